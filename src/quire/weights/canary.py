"""The quality canary: a check, after loading, that quantization has not broken the model.

A probe is run once in higher precision and once as it will be served, and the next-token distributions are compared.
Without a reference, scales that no quantizer makes are looked for. K/V in float8 gets its scales from the same probe.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from types import MappingProxyType

import torch
from torch import Tensor

from quire.errors import InvalidModel
from quire.layers.quantization.base import QuantizedWeight, WeightStorage
from quire.model_runner.memory import LayerShape, allocate, layer_shapes
from quire.models.registry import Model
from quire.ops.quantized import FLOAT8, Float8, to_fp8
from quire.ops.ragged import LayerKV, RaggedBatch, StateSlots
from quire.weights.files import listed
from quire.weights.kept_result import KeptResult

PROBE = (
    "The water in a kettle boils when its vapour pressure equals that of the air above it, which is why tea is weaker "
    "on a mountain. In 1687 Newton published three laws of motion; the second says that force is mass times "
    "acceleration, F = m * a. def area(radius): return 3.14159 * radius ** 2  # in square metres. Once upon a time "
    "there was a fox who lived at the edge of a wood, and every evening she counted the stars: one, two, three, four, "
    "five, six, seven. Paris is the capital of France, Rome of Italy, Madrid of Spain, and Lisbon of Portugal. "
    '{"name": "Ada", "age": 36, "languages": ["English", "French"]} She opened the letter, read it twice, and laughed.'
)
"""Prose, arithmetic, code and JSON, as in real requests."""

LONGEST = 256
POSITIONS = 8
PAGE = 16


@dataclass(frozen=True, slots=True)
class Quality:
    """What a canary found, over `positions` of the probe.

    agreement: share of positions whose likeliest token stayed the same. kl: mean Kullback-Leibler divergence from the
    higher precision, in nats. nll: mean negative log-likelihood of the probe as served, in nats, and `before` in
    higher precision.
    """

    positions: int
    agreement: float
    kl: float
    nll: float
    before: float

    def __str__(self) -> str:
        return (
            f"{100 * self.agreement:.1f} % of {self.positions} next tokens stay the same, KL {self.kl:.2g} nats, "
            f"loss {self.nll:.3f} ({self.before:.3f} in higher precision)"
        )

    @property
    def facts(self) -> dict[str, float]:
        """The figures as gauges, by their names in /metrics."""
        return {
            "quire:canary_top1_agreement": self.agreement,
            "quire:canary_kl_nats": self.kl,
            "quire:canary_loss_nats": self.nll,
            "quire:canary_reference_loss_nats": self.before,
        }


@dataclass(frozen=True, slots=True)
class Threshold:
    """The least quality that is served: agreement at least, KL at most."""

    agreement: float = 0.6
    kl: float = 0.25

    def check(self, quality: Quality, what: str) -> None:
        """Raise InvalidModel for a quality below the threshold."""
        broken = not (math.isfinite(quality.kl) and math.isfinite(quality.nll))
        if broken or quality.agreement < self.agreement or quality.kl > self.kl:
            raise InvalidModel(
                f"{what} has degraded the model: {quality}; at least {100 * self.agreement:.0f} % and at most "
                f"{self.kl:g} nats are required (--canary-min-agreement, --canary-max-kl; with --canary warn it is "
                "served anyway)"
            )


def pages(model: Model, length: int, device: torch.device) -> list[LayerKV]:
    """K/V blocks for one probe, in the model's dtype."""
    layers = layer_shapes(model.spec.kv_shapes, model.dtype, model.spec.state_shapes)
    return allocate(layers, pages=-(-length // PAGE), page_size=PAGE, device=device, states=1)


@torch.inference_mode()
def answers(model: Model, tokens: Sequence[int], device: torch.device, kv: Sequence[LayerKV] | None = None) -> Tensor:
    """Logits [n, V] float32 of every position, on the CPU. The probe runs in two steps, so that K/V is read back."""
    caches = pages(model, len(tokens), device) if kv is None else kv
    middle = len(tokens) // 2
    halves = [half for half in ((0, middle), (middle, len(tokens))) if half[0] < half[1]]
    hidden = [model.forward(feed(tokens, *half, device), caches) for half in halves]
    if model.spec.own_layers.stop < model.spec.layers:
        return torch.empty(0)  # a later stage has the logits
    return torch.cat([model.logits(each).float().cpu() for each in hidden])


def feed(tokens: Sequence[int], start: int, stop: int, device: torch.device) -> RaggedBatch:
    """A step of one sequence, whose K/V is in blocks 1, 2, 3 and so on, and whose state in slot 1."""
    positions = torch.arange(start, stop, device=device)
    count, last = -(-len(tokens) // PAGE), (positions == stop - 1).long()
    return RaggedBatch(
        tokens=torch.tensor(tokens[start:stop], device=device),
        positions=positions,
        slots=PAGE + positions,
        query_start=torch.tensor([0, stop - start], dtype=torch.int32, device=device),
        kv_len=torch.tensor([stop], dtype=torch.int32, device=device),
        page_table=torch.arange(1, count + 1, dtype=torch.int32, device=device)[None],
        page_size=PAGE,
        max_query=stop - start,
        max_kv=stop,
        states=StateSlots(torch.tensor([int(start > 0)], device=device), last, torch.zeros_like(last)),
    )


def compare(reference: Tensor, served: Tensor, tokens: Sequence[int]) -> Quality:
    """reference and served: logits [n, V] of the same probe."""
    count = len(tokens)
    following = torch.tensor([*tokens[1:], 0])
    divergence, losses = list[Tensor](), (list[Tensor](), list[Tensor]())
    # Some positions at a time: all of them take more memory than a small model.
    for own in torch.split(torch.arange(count), POSITIONS):
        both = [each[own].log_softmax(-1) for each in (served, reference)]
        divergence.append((both[1].exp() * (both[1] - both[0])).sum(-1, dtype=torch.float64))
        for each, found in zip(both, losses, strict=True):
            found.append(each.gather(1, following[own, None])[:, 0])
    nll, before = (-float(torch.cat(found)[:-1].mean()) if count > 1 else 0.0 for found in losses)
    return Quality(
        positions=count,
        agreement=float((reference.argmax(-1) == served.argmax(-1)).double().mean()),
        kl=float(torch.cat(divergence).mean()),
        nll=nll,
        before=before,
    )


def probe(vocab: int, encoded: Sequence[int]) -> tuple[int, ...]:
    """The probe's tokens: those of the text that are in the vocabulary; without any, ids from all of it."""
    known = tuple(token for token in encoded if 0 <= token < vocab)[:LONGEST]
    return known or tuple(i * 7919 % vocab for i in range(1, 65))


class Canary:
    """The check of one model. encode: makes the probe's tokens, if anything is checked. threshold: None accepts any
    quality. keep: where what has been found is kept; None: nowhere.

    quality: None where nothing is quantized. suspects: matrices with impossible scales.
    """

    def __init__(
        self,
        encode: Callable[[], Sequence[int]] = tuple,
        threshold: Threshold | None = None,
        keep: Callable[[], KeptResult] | None = None,
    ) -> None:
        self._encode, self.threshold, self._keep = encode, threshold, keep
        self.quality: Quality | None = None
        self.suspects: tuple[str, ...] = ()

    @cached_property
    def _kept(self) -> KeptResult | None:
        # It only saves time: neither a file that cannot be read, which the model may not need, nor a user without a
        # home keeps a model from being served.
        with suppress(OSError, RuntimeError):
            return None if self._keep is None else self._keep()
        return None

    @cached_property
    def known(self) -> Quality | None:
        """What has been found of the same files by the same code, if anything: it is not computed again."""
        found = None if self._kept is None else self._kept.read()
        with suppress(TypeError):  # of another form
            return None if found is None else Quality(**found)
        return None

    @cached_property
    def encoded(self) -> Sequence[int]:
        """The probe's tokens; empty where there is no tokenizer."""
        return self._encode()

    def record_reference(self, model: Model, device: torch.device) -> Tensor:
        """Logits of the probe with the present weights."""
        return answers(model, probe(model.spec.vocab, self.encoded), device)

    def check(
        self, model: Model, stored: Sequence[WeightStorage], device: torch.device, reference: Tensor | None
    ) -> None:
        """Compare with `reference`, or else with the same weights multiplied in full precision. What is known already
        has only to be good enough.

        Raises InvalidModel below the threshold.
        """
        self.quality = self.known or self._found(model, stored, device, reference)
        if self.quality is None:
            return
        if self.threshold is not None:
            self.threshold.check(self.quality, "quantisation")
        if self._kept is not None and self.known is None and not self.suspects:
            self._kept.write(asdict(self.quality))

    def _found(
        self, model: Model, stored: Sequence[WeightStorage], device: torch.device, reference: Tensor | None
    ) -> Quality | None:
        """What `check` compares; None on a stage that has no logits."""
        matrices = {each.matrix.parts[0].name: each.quantized for each in stored if each.quantized is not None}
        self.suspects = tuple(suspects(matrices))
        if self.suspects and self.threshold is not None:
            raise InvalidModel(
                f"{listed(self.suspects)}: such weights cannot be right; the checkpoint or its scales are corrupt "
                "(--canary warn serves it anyway)"
            )
        rounding = [matrix for matrix in matrices.values() if matrix.rounds]
        if reference is None and rounding:
            for matrix in rounding:
                matrix.exact = True
            reference = self.record_reference(model, device)
            for matrix in rounding:
                matrix.exact = False
        served = self.record_reference(model, device)
        # Where no activations are rounded, the same products were compared with themselves.
        reference = served if reference is None else reference
        return compare(reference, served, probe(model.spec.vocab, self.encoded)) if len(served) else None


UNLIKE, SAMPLE = 100.0, 64


def suspects(matrices: Mapping[str, QuantizedWeight]) -> list[str]:
    """Matrices whose gain is UNLIKE times the median or more, or 1 / UNLIKE of it, or not a number."""
    gains = {name: gain(matrix) for name, matrix in matrices.items()}
    middle = sorted(gains.values())[len(gains) // 2] if gains else 1.0
    return [
        f"{name} is {found / middle:.2g} times as strong as most"
        for name, found in gains.items()
        if not middle / UNLIKE < found < middle * UNLIKE
    ]


def gain(matrix: QuantizedWeight) -> float:
    """Root mean square of the norms of a sample of rows: how much the matrix amplifies a random vector."""
    rows = matrix.dequantize(slice(0, None, max(1, matrix.rows // SAMPLE)))
    return float(rows.square().sum(-1).mean().sqrt())


# ---------------------------------------------------------------- K/V in float8

ROOM = 4.0
"""Other texts may have values this many times as large as the probe's largest."""


def float8_layers(
    model: Model,
    encoded: Sequence[int],
    device: torch.device,
    published: Mapping[int, tuple[float, float]] = MappingProxyType({}),
    form: Float8 = FLOAT8["fp8"],
) -> tuple[tuple[LayerShape, ...], Quality]:
    """The shape and dtype of each layer's K/V, and the model's quality with it, compared with K/V in its own dtype.

    Layers whose values float8 cannot hold keep the model's dtype. published: scales by layer, in place of those of the
    probe. form: of float8.
    """
    tokens = probe(model.spec.vocab, encoded)
    caches = pages(model, len(tokens), device)
    reference = answers(model, tokens, device, caches)
    layers = []
    for i, cache in enumerate(caches):
        heads, dims = cache.k.shape[1], (cache.k.shape[3], cache.v.shape[3])
        scales = published.get(i) or [scale_of(written(pool, len(tokens)), form) for pool in (cache.k, cache.v)]
        rough = any(scale is None for scale in scales)
        kept = [1.0 if rough or scale is None else scale for scale in scales]
        size = 0 if cache.index is None else cache.index.shape[-1]
        dtype = model.dtype if rough else form.dtype
        layers.append(LayerShape(heads, *dims, dtype, kept[0], kept[1], index_dim=size))
    room = allocate(layers, pages=-(-len(tokens) // PAGE), page_size=PAGE, device=device)
    return tuple(layers), compare(reference, answers(model, tokens, device, room), tokens)


def written(pool: Tensor, count: int) -> Tensor:
    """K or V of the probe's tokens: blocks [N, G, B, D] -> [count, G, D] float32."""
    return pool[1:].transpose(1, 2).flatten(0, 1)[:count].float()


def scale_of(found: Tensor, form: Float8) -> float | None:
    """The scale of float8 values; None where rounding would lose too much."""
    largest = float(found.abs().max())
    if not 0 < largest < float("inf"):
        return None
    scale = largest * ROOM / form.most
    apart = (to_fp8(found, scale, form.dtype).float() * scale - found).abs() / found.abs().clamp(min=1e-30)
    return scale if float(apart.median()) < form.error else None
