"""Memory of each GPU of a host that the processes of the others reach, by the CUDA driver's handles.

Torch's symmetric memory does the same; making it takes three seconds and more, in which it keeps Python's lock.
"""

from __future__ import annotations

import ctypes

import torch
import torch.distributed as dist

REACH_PEERS = 1
"""Of cuIpcOpenMemHandle: GPUs are made to reach each other where they do not yet."""


class Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


def peer_memory(group: dist.ProcessGroup, rank: int, device: torch.device, size: int, fill: int) -> list[int]:
    """Addresses of `size` bytes of every rank's GPU, each `fill`, as this process reaches them; its own by `rank`. They
    are there until the process ends, since no other may lose what it reaches. Every rank calls this.

    Raises RuntimeError where GPUs cannot reach each other's memory.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    own, handle, length = ctypes.c_uint64(), Handle(), ctypes.c_size_t(size)
    check("cuMemAlloc", driver.cuMemAlloc_v2(ctypes.byref(own), length))
    check("cuMemsetD8", driver.cuMemsetD8_v2(own, ctypes.c_ubyte(fill), length))
    check("cuCtxSynchronize", driver.cuCtxSynchronize())
    check("cuIpcGetMemHandle", driver.cuIpcGetMemHandle(ctypes.byref(handle), own))
    sent = torch.tensor(list(bytes(handle)), dtype=torch.uint8, device=device)
    received = sent.new_empty(group.size(), len(sent))
    dist.all_gather_into_tensor(received.view(-1), sent, group=group)
    found = []
    for number, theirs in enumerate(received.tolist()):
        address = ctypes.c_uint64(own.value)
        if number != rank:
            of = Handle.from_buffer_copy(bytes(theirs))
            check("cuIpcOpenMemHandle", driver.cuIpcOpenMemHandle_v2(ctypes.byref(address), of, REACH_PEERS))
        found.append(address.value)
    return found


def check(name: str, code: int) -> None:
    """Raise RuntimeError for an error of the driver."""
    if code:
        raise RuntimeError(f"{name}: CUDA error {code}")
