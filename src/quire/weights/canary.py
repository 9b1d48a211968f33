"""The quality canary: does a quantised model still say what it said before?

A probe is fed once in higher precision and once as it will be served. Compared are the likeliest next tokens and the
distance of the two distributions; and, without any reference, scales no quantiser makes are looked for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.errors import InvalidModel
from quire.layers.quantization.base import QuantizedWeight, WeightStorage
from quire.models.registry import Model
from quire.ops.ragged import LayerKV, RaggedBatch
from quire.weights.files import listed

PROBE = (
    "The water in a kettle boils when its vapour pressure equals that of the air above it, which is why tea is weaker "
    "on a mountain. In 1687 Newton published three laws of motion; the second says that force is mass times "
    "acceleration, F = m * a. def area(radius): return 3.14159 * radius ** 2  # in square metres. Once upon a time "
    "there was a fox who lived at the edge of a wood, and every evening she counted the stars: one, two, three, four, "
    "five, six, seven. Paris is the capital of France, Rome of Italy, Madrid of Spain, and Lisbon of Portugal. "
    '{"name": "Ada", "age": 36, "languages": ["English", "French"]} She opened the letter, read it twice, and laughed.'
)
"""Prose, arithmetic, code and JSON: what a model is likely to be asked for."""

LONGEST = 256
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
        """As gauges."""
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
        """Raises InvalidModel for a model that is not what it was."""
        broken = not (math.isfinite(quality.kl) and math.isfinite(quality.nll))
        if broken or quality.agreement < self.agreement or quality.kl > self.kl:
            raise InvalidModel(
                f"{what} has spoiled the model: {quality}; at least {100 * self.agreement:.0f} % and at most "
                f"{self.kl:g} nats are asked for (--canary-min-agreement, --canary-max-kl; with --canary warn it is "
                "served anyway)"
            )


def pages(model: Model, length: int, device: torch.device) -> list[LayerKV]:
    """Room for one probe, in the model's own dtype."""
    count = -(-length // PAGE) + 1

    def zeros(heads: int, dim: int) -> Tensor:
        return torch.zeros(count, heads, PAGE, dim, dtype=model.dtype, device=device)

    return [LayerKV(zeros(heads, dim), zeros(heads, dim)) for heads, dim in model.spec.kv_shapes]


@torch.inference_mode()
def answers(model: Model, tokens: Sequence[int], device: torch.device, kv: Sequence[LayerKV] | None = None) -> Tensor:
    """Logits [n, V] float32 at every position, on the CPU. The probe is fed in two steps, so that K/V is read back."""
    caches = pages(model, len(tokens), device) if kv is None else kv
    middle = len(tokens) // 2
    halves = [half for half in ((0, middle), (middle, len(tokens))) if half[0] < half[1]]
    return torch.cat(
        [model.logits(model.forward(feed(tokens, *half, device), caches)).float().cpu() for half in halves]
    )


def feed(tokens: Sequence[int], start: int, stop: int, device: torch.device) -> RaggedBatch:
    """One sequence, in pages 1, 2, 3."""
    positions = torch.arange(start, stop, device=device)
    count = -(-len(tokens) // PAGE)
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
    )


def compare(reference: Tensor, served: Tensor, tokens: Sequence[int]) -> Quality:
    """reference and served: logits [n, V] of the same probe."""
    before, after = reference.double().log_softmax(-1), served.double().log_softmax(-1)
    following = torch.tensor(tokens[1:])[:, None]
    loss = [-float(each[:-1].gather(1, following).mean()) if len(tokens) > 1 else 0.0 for each in (after, before)]
    return Quality(
        positions=len(tokens),
        agreement=float((reference.argmax(-1) == served.argmax(-1)).double().mean()),
        kl=float((before.exp() * (before - after)).sum(-1).mean()),
        nll=loss[0],
        before=loss[1],
    )


def probe(vocab: int, encoded: Sequence[int]) -> tuple[int, ...]:
    """The probe's tokens: the text's, as far as they are the model's; for lack of any, numbers from all over."""
    known = tuple(token for token in encoded if 0 <= token < vocab)[:LONGEST]
    return known or tuple(i * 7919 % vocab for i in range(1, 65))


class Canary:
    """One loading's probe and what came of it. encoded: the probe's tokens; threshold None serves whatever it finds.

    quality: None where nothing is quantised. suspects: matrices that cannot be meant as they are.
    """

    def __init__(self, encoded: Sequence[int] = (), threshold: Threshold | None = None) -> None:
        self.encoded, self.threshold = encoded, threshold
        self.quality: Quality | None = None
        self.suspects: tuple[str, ...] = ()

    def record_reference(self, model: Model, device: torch.device) -> Tensor:
        """The probe's logits as the model is now."""
        return answers(model, probe(model.spec.vocab, self.encoded), device)

    def check(
        self, model: Model, stored: Sequence[WeightStorage], device: torch.device, reference: Tensor | None
    ) -> None:
        """Compare. Without a reference, with the same numbers multiplied in full precision.

        Raises InvalidModel below the threshold.
        """
        matrices = {each.matrix.parts[0].name: each.quantized for each in stored if each.quantized is not None}
        self.suspects = tuple(suspects(matrices))
        if self.suspects and self.threshold is not None:
            raise InvalidModel(
                f"{listed(self.suspects)}: such weights cannot be meant; the checkpoint or its scales are broken "
                "(--canary warn serves it anyway)"
            )
        if reference is None:
            for matrix in matrices.values():
                matrix.exact = True
            reference = self.record_reference(model, device)
            for matrix in matrices.values():
                matrix.exact = False
        self.quality = compare(reference, self.record_reference(model, device), probe(model.spec.vocab, self.encoded))
        if self.threshold is not None:
            self.threshold.check(self.quality, "quantisation")


UNLIKE, SAMPLE = 100.0, 64


def suspects(matrices: Mapping[str, QuantizedWeight]) -> list[str]:
    """Those a hundred times as strong or weak as most, or not numbers."""
    gains = {name: gain(matrix) for name, matrix in matrices.items()}
    middle = sorted(gains.values())[len(gains) // 2] if gains else 1.0
    return [
        f"{name} is {found / middle:.2g} times as strong as most"
        for name, found in gains.items()
        if not middle / UNLIKE < found < middle * UNLIKE
    ]


def gain(matrix: QuantizedWeight) -> float:
    """How much longer than its input a random vector's product is, by a sample of rows."""
    rows = matrix.dequantize(slice(0, None, max(1, matrix.rows // SAMPLE)))
    return float(rows.square().sum(-1).mean().sqrt())
