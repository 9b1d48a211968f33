"""cuBLASLt by its C interface: torch multiplies with it, but does not let one choose the algorithm.

Enumerations and structures are those of cublasLt.h of CUDA 12 and 13, whose documentation says that an algorithm may be
stored and used again with the same version of the library.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from ctypes import POINTER, byref, c_char, c_float, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from quire.ops.gemm import GemmAlgorithm, GemmShape

WORKSPACE = 32 << 20
"""Bytes that an algorithm may use beside, as much as torch gives it on Hopper."""

PROPOSALS = 4
"""Eight gain 0.3 % more, and take twice as long to tell apart."""

KINDS: Mapping[torch.dtype, int] = {torch.float16: 2, torch.bfloat16: 14}
FLOAT, COMPUTE_FLOAT = 0, 68
TRANSPOSED_A, EPILOGUE, BIAS_POINTER = 3, 7, 8
WITH_BIAS = 4
MOST_WORKSPACE, REDUCTIONS, ALIGNMENTS = 1, 3, (5, 6, 7, 8)
ALIGNED = 16
"""Bytes that any row of eight numbers begins at a multiple of."""
SUMMED_IN_FLOAT = 2
"""Parts of a sum are put together in float32: rounding them to the result's kind is not on offer."""


class Proposal(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t. algorithm: opaque."""

    _fields_ = (
        ("algorithm", c_char * 64),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class CublasLt:
    """A `gemm.GemmLibrary`. Each engine has its own: products at the same time would share the workspace."""

    def __init__(self, device: torch.device) -> None:
        """Raises OSError where the library that torch was built with cannot be loaded."""
        self.device, self.library, self.handle = device, opened(), handle(device.index or 0)
        self.one, self.nothing = c_float(1.0), c_float(0.0)
        # `torch.cuda.current_stream` makes an object of the handle, which takes 8 us.
        self.stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        properties = torch.cuda.get_device_properties(device)
        self.version = f"{properties.name}, cublasLt {self.library.cublasLtGetVersion()}"

    @cached_property
    def workspace(self) -> Tensor:
        """Allocated at the first product: float32 engines never use it."""
        return torch.empty(WORKSPACE, dtype=torch.uint8, device=self.device)

    def supports(self, x: Tensor, weight: Tensor) -> bool:
        """Whether dtype, layout and alignment are supported."""
        aligned = not any(number % 8 for number in weight.shape) and not weight.data_ptr() % ALIGNED
        return x.dtype in KINDS and x.dtype == weight.dtype and weight.is_contiguous() and aligned

    def algorithms(self, shape: GemmShape) -> list[GemmAlgorithm]:
        """The library's proposals for a shape."""
        setup = Setup.of(self.library, shape)
        found, count = (Proposal * PROPOSALS)(), c_int()
        wanted, limits = c_void_p(), {REDUCTIONS: c_uint32(SUMMED_IN_FLOAT), MOST_WORKSPACE: c_size_t(WORKSPACE)}
        check(self.library.cublasLtMatmulPreferenceCreate(byref(wanted)))
        for name, value in (limits | {operand: c_uint32(ALIGNED) for operand in ALIGNMENTS}).items():
            check(self.library.cublasLtMatmulPreferenceSetAttribute(wanted, name, byref(value), ctypes.sizeof(value)))
        status = self.library.cublasLtMatmulAlgoGetHeuristic(
            *(self.handle, setup.product, setup.weight, setup.x, setup.out, setup.out, wanted),
            *(PROPOSALS, found, byref(count)),
        )
        check(self.library.cublasLtMatmulPreferenceDestroy(wanted))
        good = [one for one in found[: count.value] if not status and not one.state]
        return [Multiplied(self, setup, one) for one in good]

    def algorithm(self, shape: GemmShape, name: str) -> GemmAlgorithm:
        """A stored algorithm. Raises ValueError if the name is not one."""
        proposal = Proposal.from_buffer_copy(bytes.fromhex(name))
        return Multiplied(self, Setup.of(self.library, shape), proposal)


def check(status: int) -> None:
    """Raises RuntimeError unless a call succeeded."""
    if status:
        raise RuntimeError(f"cuBLASLt failed with status {status}")


@dataclass(frozen=True)
class Setup:
    """The descriptors of a product. The library is column-major: out^T [outputs, rows] = weight x^T."""

    product: c_void_p
    weight: c_void_p
    x: c_void_p
    out: c_void_p

    @staticmethod
    def of(library: ctypes.CDLL, shape: GemmShape) -> Setup:
        """Create the descriptors for a shape."""
        kind, product = KINDS[shape.kind], c_void_p()
        check(library.cublasLtMatmulDescCreate(byref(product), COMPUTE_FLOAT, FLOAT))
        settings = {TRANSPOSED_A: 1, **({EPILOGUE: WITH_BIAS} if shape.bias else {})}
        for name, value in settings.items():
            check(library.cublasLtMatmulDescSetAttribute(product, name, byref(c_int(value)), 4))

        def matrix(high: int, wide: int) -> c_void_p:
            made = c_void_p()
            check(library.cublasLtMatrixLayoutCreate(byref(made), kind, high, wide, high))
            return made

        weight, x = matrix(shape.inputs, shape.outputs), matrix(shape.inputs, shape.rows)
        return Setup(product, weight, x, matrix(shape.outputs, shape.rows))


@dataclass(frozen=True)
class Multiplied:
    """A `gemm.GemmAlgorithm`: a product by one algorithm."""

    lt: CublasLt
    setup: Setup
    proposal: Proposal

    @property
    def name(self) -> str:
        """The proposal's bytes, in hex."""
        return bytes(self.proposal).hex()

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """out = x @ weight.T + bias, by this proposal. x: (m, k); weight: (n, k); out: (m, n)."""
        lt, setup, how = self.lt, self.setup, self.proposal
        if bias is not None:
            place = c_void_p(bias.data_ptr())
            check(lt.library.cublasLtMatmulDescSetAttribute(setup.product, BIAS_POINTER, byref(place), 8))
        check(
            lt.library.cublasLtMatmul(
                *(lt.handle, setup.product, byref(lt.one), weight.data_ptr(), setup.weight),
                *(x.data_ptr(), setup.x, byref(lt.nothing), out.data_ptr(), setup.out, out.data_ptr(), setup.out),
                *(byref(how), lt.workspace.data_ptr(), how.workspace, lt.stream(out.device.index)),
            )
        )


@cache
def opened() -> ctypes.CDLL:
    """The library that torch has loaded, with the types of its functions' arguments."""
    library = ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '').split('.')[0]}")
    pointer, flag = c_void_p, c_int
    takes = {
        "Create": [pointer],
        "MatmulDescCreate": [pointer, flag, flag],
        "MatmulDescSetAttribute": [pointer, flag, pointer, c_size_t],
        "MatrixLayoutCreate": [pointer, flag, c_uint64, c_uint64, c_int64],
        "MatmulPreferenceCreate": [pointer],
        "MatmulPreferenceSetAttribute": [pointer, flag, pointer, c_size_t],
        "MatmulPreferenceDestroy": [pointer],
        "MatmulAlgoGetHeuristic": [*[pointer] * 7, flag, POINTER(Proposal), POINTER(c_int)],
        "Matmul": [*[pointer] * 14, c_size_t, pointer],
        "GetVersion": [],
    }
    for name, kinds in takes.items():
        function = getattr(library, f"cublasLt{name}")
        function.argtypes, function.restype = kinds, c_size_t if name == "GetVersion" else c_int
    return library


@cache
def handle(card: int) -> c_void_p:
    """The library's state on a GPU, one for all users."""
    made = c_void_p()
    with torch.cuda.device(card):
        check(opened().cublasLtCreate(byref(made)))
    return made
