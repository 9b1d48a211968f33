"""Run as a program, as each of several ranks: sums through memory that ranks share, a file with interpreted kernels, or
that of GPUs. See `test_all_reduce`.

Arguments: the file, of EMPTY bytes, or on GPUs one by which ranks meet; the rank, how many there are, and the bytes of
the largest sum, or "cuda".

Prints, as JSON, digests of each sum, of one that is normed and the residual stream, of the parts side by side, and of
what the norm's own kernel makes of the sum; and how many shots the normed sums have.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch import Tensor

from quire.ops.operands import Norm
from quire.ops.triton import rows
from quire.ops.triton.all_reduce import PeerSum, buffer_bytes, peer_sum
from quire.ops.triton.launch import DeviceInfo
from tests.ops.triton.test_all_reduce import PROGRAMS, TWO_SHOT, asked, digest, normed, total


def in_a_file(path: str, rank: int, size: int, most: int) -> PeerSum:
    nbytes = buffer_bytes(size, most)
    shared = torch.from_file(path, shared=True, size=size * nbytes, dtype=torch.uint8)
    buffers = [shared.data_ptr() + each * nbytes for each in range(size)]
    return PeerSum(rank, buffers, DeviceInfo(sms=2), torch.device("cpu"), most, shared, programs=PROGRAMS)


def on_cards(path: str, rank: int, size: int) -> PeerSum:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", store=dist.FileStore(path, size), rank=rank, world_size=size)
    made = peer_sum(dist.group.WORLD, rank, torch.device("cuda", rank))
    dist.barrier()
    return made


def main() -> None:
    path, most = sys.argv[1], sys.argv[4]
    rank, size = map(int, sys.argv[2:4])
    add = on_cards(path, rank, size) if most == "cuda" else in_a_file(path, rank, size, int(most))
    add.two_shot = TWO_SHOT
    device = add.peers.device

    def here(one: object) -> object:
        if isinstance(one, Norm):
            return one._replace(weight=here(one.weight), bias=here(one.bias))
        return one.to(device) if isinstance(one, Tensor) else one

    found = []
    for parts, (x, residual, *how) in zip(asked(size), normed(size), strict=True):  # by turns: they share memory
        own, normal, how = parts[rank].to(device), x[rank].to(device), [here(each) for each in how]
        made = [digest(add(own)), *map(digest, add.add_norm(normal, residual.to(device, copy=True), *how))]  # type: ignore[arg-type]
        beside = own.view(torch.int32) if own.itemsize == 4 else own  # as logits, and as candidates for a token
        made.append(digest(add.gather(beside.repeat(3, 1))))
        if rank == 0:
            norm, *rest = how
            alone, stream = [norm] if norm is not None else [], residual.to(device)
            outs = rows.norms(total(x).to(device), alone, add.card, stream, *rest)  # type: ignore[arg-type]
            made += map(digest, (*outs, *[stream] * (2 - len(outs))))
        found.append(made)
    print(json.dumps([found, [add.shots(x[rank]) for x, *_ in normed(size)]]), flush=True)
    if most == "cuda":
        torch.cuda.synchronize()
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
