"""Mixture of experts (Shazeer et al. 2017; Jiang et al. 2024): a router, and MLPs of which each token uses a few.

Which experts tokens use is known on the device alone: no shape depends on it, so a step can be captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from quire.errors import InvalidModel
from quire.layers.linear import ONE_RANK, ParallelGroup
from quire.layers.quantization.base import Plain, QuantizedWeight, WeightStorage
from quire.ops.base import Ops
from quire.ops.integer import stack_integers
from quire.ops.matmul import by_expert, through_experts
from quire.ops.operands import (
    NO_BIASES,
    ExpertBiases,
    ExpertMatrices,
    Gate,
    IntegerMatrix,
    Norm,
    QuantizedMatrix,
    RoutedRows,
    RouterWeights,
    Routing,
    TopK,
    num_parts,
)
from quire.ops.quantized import E4M3, expert_matrices
from quire.ops.ragged import RaggedBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """Experts of a layer: `num_experts` MLPs of inner `width`, of which each token uses `num_experts_per_token`.

    normalize_weights, sigmoid, groups, used_groups, group_best, scale, floor, margin: see `TopK`. corrected: the router
    has a correction, see `Ops.select_experts`. weighs_inputs: what an expert reads is multiplied by its weight, not
    what it makes (Llama 4). shared: inner width of an MLP that every token uses too, 0 for none; gated_shared: it is
    multiplied by the sigmoid of a number made of the token. gained: each expert's weights are multiplied by a number.
    logit_scale: what the router's logits are multiplied by. biased: router and experts have biases. gated: experts have
    three matrices, else two. latent: how many numbers experts read and make, projected from and to the residual
    stream's; 0: as many as that has. dense_layers: layers without experts.
    """

    num_experts: int
    num_experts_per_token: int
    width: int
    normalize_weights: bool = True
    sigmoid: bool = False
    corrected: bool = False
    groups: int = 1
    used_groups: int = 1
    group_best: int = 2
    scale: float = 1.0
    floor: float = 1e-20
    margin: float = 0.0
    weighs_inputs: bool = False
    shared: int = 0
    gated_shared: bool = False
    gained: bool = False
    logit_scale: float = 1.0
    biased: bool = False
    gated: bool = True
    latent: int = 0
    dense_layers: frozenset[int] = frozenset()

    @property
    def choice(self) -> TopK:
        """How experts are chosen."""
        return TopK(
            self.num_experts_per_token,
            self.normalize_weights,
            self.sigmoid,
            self.groups,
            self.used_groups,
            self.scale,
            self.floor,
            self.margin,
            self.group_best,
            self.logit_scale,
        )

    def checked(self) -> MoEConfig:
        """Itself. Raises InvalidModel for numbers that contradict each other."""
        size = self.num_experts // max(1, self.groups)
        even = self.groups == 1 or (self.groups > 0 and size * self.groups == self.num_experts and size > 1)
        if not even or not 1 <= self.used_groups <= self.groups:
            raise InvalidModel(
                f"config.json: {self.used_groups} of {self.groups} groups of {self.num_experts} experts cannot be used"
            )
        if self.groups > 1 and self.used_groups * size < self.num_experts_per_token:
            raise InvalidModel(
                f"config.json: {self.used_groups} groups of {size} experts have fewer than {self.num_experts_per_token}"
            )
        if not 1 <= self.num_experts_per_token <= self.num_experts or not self.width:
            raise InvalidModel(
                f"config.json: {self.num_experts_per_token} of {self.num_experts} experts of width {self.width} "
                "cannot be used"
            )
        return self


class Experts(Protocol):
    """The MLPs of a layer's experts, in a format."""

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        """x [T, hidden] -> [T, hidden]: for each token the sum of its experts' outputs times their weights."""


class StackedExperts:
    """Plain matrices, of all experts in one tensor: gate_up [E, 2F, hidden], down [E, hidden, F]."""

    def __init__(self, gate_up: Tensor, down: Tensor, gate: Gate, ops: Ops, biases: ExpertBiases = NO_BIASES) -> None:
        self.gate_up, self.down, self.gate, self.ops, self.biases = gate_up, down, gate, ops, biases

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        """See `Experts`."""
        return self.ops.experts(x, routing, self.gate_up, self.down, self.gate, self.biases)


class SeparateExperts:
    """Matrices in any format, each in its own storage; quantized ones of one layout in one tensor, see `join`."""

    def __init__(self, gate_up: Sequence[WeightStorage], down: Sequence[WeightStorage], gate: Gate, ops: Ops) -> None:
        self.gate_up, self.down, self.gate, self.ops = gate_up, down, gate, ops
        self.joined: tuple[ExpertMatrices, ExpertMatrices] | None = None
        self.biases = NO_BIASES

    def join(self) -> None:
        """Once all matrices have their final form: put them where kernels of experts want them."""
        for first, last in zip(self.gate_up, self.down, strict=True):
            follow_order(first.quantized, last.quantized, self.gate)
        gate_up, down = join_matrices(self.gate_up), join_matrices(self.down)
        self.joined = (gate_up, down) if gate_up and down else None
        self.biases = ExpertBiases(stack_biases(self.gate_up), stack_biases(self.down))

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        """See `Experts`."""
        first = self.gate_up[0].quantized
        if self.joined and first is not None and not (first.exact and first.activations):
            ops = self.ops.unrounded() if first.exact else self.ops
            return ops.quantized_experts(x, routing, *self.joined, self.gate, self.biases)
        return through_experts(x, routing, len(self.gate_up), self._mlp, self.ops.combine_experts)

    def _mlp(self, rows: Tensor, ends: Tensor) -> Tensor:
        inner = by_expert(rows, self.gate_up, ends, lambda x, stored: stored.apply(x))
        return by_expert(self.ops.apply_gate(inner, self.gate), self.down, ends, lambda x, stored: stored.apply(x))


def follow_order(first: QuantizedWeight | None, last: QuantizedWeight | None, gate: Gate) -> None:
    """Where an expert's down has columns moved, move instead the rows of what makes its inputs: the bits are the
    same."""
    rise, fall = (None if each is None else each.matrix for each in (first, last))
    if first is None or last is None or not (isinstance(rise, IntegerMatrix) and isinstance(fall, IntegerMatrix)):
        return
    if fall.order is None:
        return
    width = rise.outputs // num_parts(gate)
    rows = torch.cat([fall.order + part * width for part in range(num_parts(gate))])
    first.matrix, last.matrix = rise.rows(rows), fall._replace(order=None)
    if first.bias is not None:
        first.bias = first.bias[rows]


def join_matrices(matrices: Sequence[WeightStorage]) -> ExpertMatrices | None:
    """The matrices one after the other, each a part of the whole from now on. None unless all are integers of one
    layout, float8 with the same scales per row, or int8 by which rounded activations are multiplied."""
    stored = [each.quantized for each in matrices if each.quantized is not None]
    integers = [each.matrix for each in stored if isinstance(each.matrix, IntegerMatrix)]
    scaled = [each.matrix for each in stored if isinstance(each.matrix, QuantizedMatrix)]
    whole: ExpertMatrices | None = None
    if len(integers) == len(matrices):
        whole = stack_integers(integers)
    elif len(scaled) == len(matrices):
        whole = stack_scaled(scaled, torch.int8 if all(each.activations for each in stored) else E4M3)
    if whole is not None:
        for each, part in zip(stored, expert_matrices(whole, len(stored)), strict=True):
            each.matrix = part
    return whole


def stack_biases(matrices: Sequence[WeightStorage]) -> Tensor | None:
    """The biases of quantized matrices in one tensor [E, out]; None unless all have one."""
    biases = [each.quantized.bias for each in matrices if each.quantized and each.quantized.bias is not None]
    return torch.stack(biases) if len(biases) == len(matrices) else None


def stack_scaled(matrices: Sequence[QuantizedMatrix], dtype: torch.dtype) -> QuantizedMatrix | None:
    """Matrices of a type with the same scales per row in one, see `ExpertMatrices`; None of others."""
    first = matrices[0]
    layouts = {(each.weight.dtype, each.scale.shape[1], each.width, each.offset, each.height) for each in matrices}
    if len(layouts) > 1 or first.weight.dtype != dtype:
        return None
    weight, scale = torch.cat([each.weight for each in matrices]), torch.cat([each.scale for each in matrices])
    return first._replace(weight=weight, scale=scale)


class Router(NamedTuple):
    """A router's matrix [E, hidden], its correction, if any, and what the weights of each expert are multiplied by, [E]
    float32."""

    stored: WeightStorage
    correction: Tensor | None = None
    gains: Tensor | None = None


class PlainRouter(NamedTuple):
    """A router whose matrix is multiplied as it is."""

    weights: RouterWeights
    ops: Ops

    def add_norm(
        self, x: Tensor, residual: Tensor, norm: Norm, scale: float, batch: RaggedBatch | None
    ) -> tuple[RoutedRows, Tensor]:
        """See `Ops.add_norm_route`."""
        return self.ops.add_norm_route(x, residual, norm, self.weights, batch, scale)


class SharedMLP(Protocol):
    """What every token uses: see `basic.GatedMLP`."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""

    def leave_sum(self) -> ParallelGroup:
        """See `RowParallelLinear.leave_sum`."""


class SharedExpert(NamedTuple):
    """An MLP that every token uses. gate: a matrix [1, hidden], if any: see `MoEConfig`."""

    mlp: SharedMLP
    gate: WeightStorage | None = None


class MoE:
    """router [hidden -> E], experts, and the expert that tokens share, if any.

    own: the experts of this rank, where ranks have whole ones; None where each has a part of every expert.
    """

    def __init__(
        self,
        router: Router,
        experts: Experts,
        mixture: MoEConfig,
        parallel: ParallelGroup,
        ops: Ops,
        shared: SharedExpert | None = None,
        latent: tuple[WeightStorage, WeightStorage] | None = None,
        own: slice | None = None,
    ) -> None:
        """latent: matrices to and from what experts read, see `MoEConfig`. own: this rank's experts; None: all."""
        self.own = own
        self.router, self.experts, self.config, self.ops, self.shared = router, experts, mixture, ops, shared
        self.latent = latent
        self.parallel, self.all_reduce = parallel, parallel.all_reduce

    def leave_sum(self) -> ParallelGroup:
        """See `RowParallelLinear.leave_sum`: of the experts and of the one that tokens share, in one sum. Where the
        experts' sum passes another matrix, nothing is left."""
        if self.latent is not None:
            return ONE_RANK
        self.all_reduce = ONE_RANK.all_reduce
        if self.shared is not None:
            self.shared.mlp.leave_sum()
        return self.parallel

    @property
    def reader(self) -> PlainRouter | None:
        """See `NormLayer.add_for`. None: the router's matrix is stored in another format."""
        (stored, correction, gains), how = self.router, self.config.choice
        if not isinstance(stored, Plain):
            return None
        return PlainRouter(RouterWeights(stored.weight, how, correction, stored.bias, gains), self.ops)

    def __call__(self, x: Tensor | RoutedRows, batch: RaggedBatch | None = None) -> Tensor:
        """x [T, hidden] -> [T, hidden]. batch: see `Ops.route`."""
        if isinstance(x, RoutedRows):
            return self.through(x.rows, self._owned(x.routing))
        return self.through(x, self.route(x, batch))

    def through(self, x: Tensor, routing: Routing) -> Tensor:
        """What the experts of `routing`, and the one that all tokens use, make of x [T, hidden]: [T, hidden]. The
        latter is computed between the choice of experts and their products, so that their matrices may be requested
        meanwhile."""
        if self.shared is None:
            return self.apply(x, routing)
        mlp, gate = self.shared
        shared, logits = mlp(x), None if gate is None else gate.apply(x)
        return self.ops.add_shared(self.apply(x, routing._replace(early=True)), shared, logits)

    def route(self, x: Tensor, batch: RaggedBatch | None) -> Routing:
        """The experts of tokens x [T, hidden]. batch: see `Ops.route`."""
        if (plain := self.reader) is not None:
            return self._owned(self.ops.route(x, plain.weights, batch))
        stored, correction, gains = self.router
        return self._owned(self.ops.select_experts(stored.apply(x), self.config.choice, correction, gains))

    def apply(self, x: Tensor, routing: Routing) -> Tensor:
        """What the experts of `routing` make of x [T, hidden]: [T, hidden], without what all tokens use."""
        read = x if self.latent is None else self.latent[0].apply(x)
        routed = self._weighed(read, routing) if self.config.weighs_inputs else self.experts(read, routing)
        routed = self.all_reduce(routed)
        return routed if self.latent is None else self.latent[1].apply(routed)

    def _owned(self, routing: Routing) -> Routing:
        """The routing to this rank's experts, numbered from 0: others are none, as padding is."""
        if self.own is None:
            return routing
        inside = (routing.experts >= self.own.start) & (routing.experts < self.own.stop)
        experts = torch.where(inside, routing.experts - self.own.start, -1)
        return routing._replace(experts=experts, weights=torch.where(inside, routing.weights, 0.0))

    def _weighed(self, x: Tensor, routing: Routing) -> Tensor:
        """What experts make of x times their weights: each slot (a token and one of its experts) as a token."""
        weights = routing.weights
        rows = (x[:, None] * weights[..., None].to(x.dtype)).flatten(0, 1)
        # A weight of 0 stays: it says that there is no expert.
        made = self.experts(rows, Routing(routing.experts.view(-1, 1), (weights != 0).float().view(-1, 1)))
        return made.view(*weights.shape, -1).sum(1)
