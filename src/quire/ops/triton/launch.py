"""What a kernel's launch depends on: the GPU, and whether kernels may start before the preceding one has ended.

With programmatic dependent launch a kernel is set up while the preceding one still runs, and waits by itself. Two rules
keep that correct, and every kernel here follows them. `wait` comes before anything that the preceding kernel wrote is
read, and before anything is written. `release`, which lets the next one start, comes after `wait`; so the kernel before
the preceding one has ended when a kernel starts, and its results may be read at once.

Kernels that are shorter than the setup of the next one, or leave most of the card to it, release before they wait
(`release_and_wait`): norms, rotation, attention. What follows one of these reads nothing before its wait but what no
kernel near it writes: weights, and the lists of a step (`tests/ops/triton/test_early_release.py`).

Every kernel that the host launches is made by `kernel`, so that precompilation can record launches instead of running
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime import driver

from quire.ops.capture import PRECOMPILING

ADA, HOPPER = (8, 9), (9, 0)
"""The first compute capabilities with 8-bit floating point, and with dependent launch."""

PDL = "launch_pdl"
"""Triton's option of a kernel that is launched before the preceding one has ended."""
FUSION = "enable_fp_fusion"
"""Triton's option by which a product and a sum may become one operation, which rounds once."""


@dataclass(frozen=True)
class DeviceInfo:
    """A device as far as launches depend on it. sms: multiprocessors to be kept busy; with 0, work is split
    independently of the batch. dependent: kernels are launched dependently. shared: bytes of shared memory of a
    program. units: multiprocessors, also where work is so split, and divided among them without changing a bit.

    precision: how float32 tiles are multiplied; "tf32x3" is exact to float32 rounding on matrix units, "ieee" plain.
    """

    sms: int
    capability: tuple[int, int] = (0, 0)
    dependent: bool = False
    precision: str = "ieee"
    shared: int = 99 << 10
    options: Mapping[str, bool] = field(default_factory=lambda: MappingProxyType({}))
    units: int = 132

    def launch(self, fresh: bool) -> Mapping[str, bool]:
        """Options of a launch; fresh: one that reads before its wait what the preceding kernel has made."""
        return self._in_order if fresh else self.options

    @cached_property
    def _in_order(self) -> Mapping[str, bool]:
        """Options of a kernel that starts when the preceding one has ended."""
        return MappingProxyType({name: value for name, value in self.options.items() if name != PDL})

    def without_fusion(self) -> DeviceInfo:
        """The same device, where a product and a sum are rounded one after the other unless a kernel fuses them. Which
        of them a compiler fuses may differ from one variant of a kernel to the next."""
        return replace(self, options=MappingProxyType({**self.options, FUSION: False}))

    @property
    def float8(self) -> bool:
        """Whether kernels can read e4m3; the interpreter can."""
        return self.capability >= ADA or not any(self.capability)

    @staticmethod
    def of(device: torch.device, dependent: bool = True) -> DeviceInfo:
        """Of a GPU; a CPU, on which only Triton's interpreter runs, counts as a very small one."""
        if device.type != "cuda":
            return DeviceInfo(sms=2)
        about = torch.cuda.get_device_properties(device)
        capability = (about.major, about.minor)
        dependent = dependent and capability >= HOPPER
        # Named, since Triton's defaults differ by version.
        options = MappingProxyType({FUSION: True} | ({PDL: True} if dependent else {}))
        shared = int(driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"])
        sms = about.multi_processor_count
        return DeviceInfo(sms, capability, dependent, "tf32x3", shared, options, sms)


class Kernel:
    """A kernel: `kernel[grid](...)` launches it, as in Triton."""

    def __init__(self, made: Any) -> None:
        self.made = made

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        record = PRECOMPILING.get()
        launch: Callable[..., object] = self.made[grid] if record is None else partial(record, self.made, grid)
        return launch


def kernel(*function: Callable[..., None], **options: Any) -> Any:
    """A decorator for kernels that the host launches, with `triton.jit`'s options or none."""
    return Kernel(triton.jit(*function)) if function else lambda one: Kernel(triton.jit(one, **options))


@triton.jit
def wait(DEPENDENT: tl.constexpr):
    """Wait until the preceding kernel has ended and what it wrote is visible."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()


@triton.jit
def release(DEPENDENT: tl.constexpr):
    """Let the next kernel be set up."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_and_release(DEPENDENT: tl.constexpr):
    """Both."""
    wait(DEPENDENT)
    release(DEPENDENT)


@triton.jit
def release_and_wait(DEPENDENT: tl.constexpr):
    """Both, the next kernel being set up while the preceding one may still run."""
    release(DEPENDENT)
    wait(DEPENDENT)


@triton.jit
def fetch(start, offsets):
    """Prefetch the lines at start + offsets into L2. Only on a GPU: the interpreter cannot."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [(start + offsets).to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


def block(n: int, least: int = 1) -> int:
    """The smallest power of two that holds n, at least `least`."""
    return max(least, 1 << max(0, n - 1).bit_length())
