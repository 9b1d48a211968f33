"""GPUs that can be simulated without having one: step times from a model's sizes and a card's measured rates.

A step reads the weights once, whatever it feeds, does two operations a parameter for each token, and reads each
sequence's K/V. The rates are those that Quire reaches, fitted to measured rows (docs/benchmarks/simulated-2026-11-24.md
says to which, and how well); they are lower than a data sheet's.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from quire.errors import InvalidConfig, nearest
from quire.scheduler.step_time import StepCost


class Device(NamedTuple):
    """A card. memory: bytes. bandwidth: bytes a second of weights; kv_bandwidth: of K/V. flops, expert_flops: by bytes
    of a weight, of products with matrices that all tokens use and with those of experts.

    step, layer: seconds that any step takes beside, in all and for each layer. row: seconds for each row of logits and
    layer. overlap: see `StepCost`.
    """

    name: str
    memory: int
    bandwidth: float
    kv_bandwidth: float
    flops: Mapping[int, float]
    expert_flops: Mapping[int, float]
    step: float
    layer: float
    row: float
    overlap: float


class ModelSizes(NamedTuple):
    """What a step's time depends on. Bytes and counts.

    weights: bytes that every token reads; expert: those of one expert in all layers, of `experts` of which a token uses
    `used_experts`. parameters: that a token uses, embedding and head left out; expert_parameters: those of experts
    among them; head: those of a row of logits. width: bytes of numbers that are multiplied: 2, or 1 for float8. kv:
    bytes of a position in layers that see everything. windowed: bytes of K/V that a sequence longer than the windows
    has in the other layers. pair: operations for a pair of tokens in attention, all layers.
    """

    weights: float
    expert: float
    experts: int
    used_experts: int
    parameters: float
    head: float
    width: int
    kv: float
    windowed: float
    pair: float
    layers: int
    expert_parameters: float = 0.0


def step_cost(device: Device, sizes: ModelSizes, *, draft: ModelSizes | None = None) -> StepCost:
    """The cost of steps of a model on a card. draft: of a draft model, which runs once for each drafted token."""
    width = sizes.width if sizes.width in device.flops else 2
    flops, expert_flops = device.flops[width], device.expert_flops[width]
    return StepCost(
        base=device.step + device.layer * sizes.layers,
        per_token=2 * (sizes.parameters - sizes.expert_parameters) / flops + 2 * sizes.expert_parameters / expert_flops,
        per_kv=sizes.kv / device.kv_bandwidth,
        per_row=device.row * sizes.layers + 2 * sizes.head / flops + sizes.windowed / device.kv_bandwidth,
        per_pair=sizes.pair / device.flops[2],
        weights=sizes.weights / device.bandwidth,
        per_expert=sizes.expert / device.bandwidth,
        experts=sizes.experts,
        used_experts=sizes.used_experts,
        overlap=device.overlap,
        per_draft=0.0 if draft is None else device.layer * draft.layers + draft.weights / device.bandwidth,
    )


_GB = 10**9

H200 = Device(
    "h200",
    memory=141 * _GB,
    bandwidth=4.41e12,
    kv_bandwidth=4.5e12,
    flops=MappingProxyType({2: 6.5e14, 1: 6.0e14}),
    expert_flops=MappingProxyType({2: 4.2e14, 1: 2.0e14}),
    step=1e-6,
    layer=1.87e-5,
    row=3.05e-7,
    overlap=2.6,
)

H100 = H200._replace(name="h100", memory=80 * _GB, bandwidth=3.1e12, kv_bandwidth=3.2e12)
"""The same chip with other memory (SXM, 80 GB)."""

DEVICES: Mapping[str, Device] = MappingProxyType({each.name: each for each in (H200, H100)})


def find_device(name: str) -> Device:
    """The card of this name. Raises InvalidConfig for one that is not known."""
    if name.lower() not in DEVICES:
        known = ", ".join(DEVICES)
        raise InvalidConfig(
            f"--gpu must be one of {known}, not {name!r}.{nearest(name.lower(), DEVICES)} For another card, run `quire "
            "calibrate` on it and give its file as --calibration, with --memory",
            param="gpu",
        )
    return DEVICES[name.lower()]
