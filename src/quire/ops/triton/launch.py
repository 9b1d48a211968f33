"""What a kernel's launch depends on: the card, and whether kernels may begin before the one ahead has ended.

With programmatic dependent launch a kernel is set up while the one before it still runs, and waits by itself. Two
rules keep that sound, and every kernel here follows them. `wait` comes before anything that the kernel ahead wrote is
read, and before anything is written. `release`, which lets the next one start, comes after `wait`; so whatever stands
two kernels ahead has ended when a kernel starts, and its results may be read at once.

Every kernel that is launched is made by `kernel`, so that a rehearsal hears of its launches in place of the card.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime import driver

ADA, HOPPER = (8, 9), (9, 0)
"""The first compute capability with floating point of eight bits; with dependent launch."""


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A device as far as launches care. sms: multiprocessors to be kept busy; with none, how work is cut depends on no
    batch. dependent: kernels are launched dependently. shared: bytes of shared memory a program can have.

    precision: how float32 tiles are multiplied; "tf32x3" is exact to float32 rounding on matrix units, "ieee" plain.
    """

    sms: int
    capability: tuple[int, int] = (0, 0)
    dependent: bool = False
    precision: str = "ieee"
    shared: int = 99 << 10
    options: Mapping[str, bool] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def float8(self) -> bool:
        """Whether kernels can read e4m3; the interpreter can."""
        return self.capability >= ADA or not any(self.capability)

    @staticmethod
    def of(device: torch.device, dependent: bool = True) -> DeviceInfo:
        """The card behind `device`; a CPU, which only Triton's interpreter runs on, counts as a very small one."""
        if device.type != "cuda":
            return DeviceInfo(sms=2)
        about = torch.cuda.get_device_properties(device)
        capability = (about.major, about.minor)
        dependent = dependent and capability >= HOPPER
        options = MappingProxyType({"launch_pdl": True} if dependent else {})
        shared = int(driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"])
        return DeviceInfo(about.multi_processor_count, capability, dependent, "tf32x3", shared, options)


PRECOMPILING: ContextVar[Callable[..., None] | None] = ContextVar("quire_heard", default=None)
"""Who is told of this thread's launches, none of which happens: (the kernel, its grid, arguments). See `rehearsal`."""


class Kernel:
    """A kernel: `one[grid](...)` launches it, as Triton's own are launched."""

    def __init__(self, made: Any) -> None:
        self.made = made

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        heard = PRECOMPILING.get()
        launch: Callable[..., object] = self.made[grid] if heard is None else partial(heard, self.made, grid)
        return launch


def kernel(*function: Callable[..., None], **options: Any) -> Any:
    """A decorator, with `triton.jit`'s options or none, for what the host launches."""
    return Kernel(triton.jit(*function)) if function else lambda one: Kernel(triton.jit(one, **options))


@triton.jit
def wait(DEPENDENT: tl.constexpr):
    """Until the kernel launched before has ended and what it wrote is seen."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()


@triton.jit
def release(DEPENDENT: tl.constexpr):
    """Let the next kernel be set up."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def fetch(start, offsets):
    """Ask for the lines at start + offsets to be brought into L2. Only compiled for a card: the interpreter cannot."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [(start + offsets).to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


def block(n: int, least: int = 1) -> int:
    """The power of two that holds n."""
    return max(least, 1 << max(0, n - 1).bit_length())
