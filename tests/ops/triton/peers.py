"""Run as a program, as each of several ranks: sums through shared memory, with interpreted kernels. See
`test_all_reduce`.

Arguments: a file that the ranks share, of EMPTY bytes, the rank, how many there are, and the bytes of the largest sum.
Prints, as JSON, digests of each sum, of one that is normed and the residual stream, and of the parts side by side.
"""

from __future__ import annotations

import json
import sys

import torch

from quire.ops.triton.all_reduce import PeerSum, buffer_bytes
from quire.ops.triton.launch import DeviceInfo
from tests.ops.triton.test_all_reduce import PROGRAMS, TWO_SHOT, asked, digest, normed


def main() -> None:
    path, (rank, size, most) = sys.argv[1], map(int, sys.argv[2:])
    nbytes = buffer_bytes(size, most)
    shared = torch.from_file(path, shared=True, size=size * nbytes, dtype=torch.uint8)
    buffers = [shared.data_ptr() + each * nbytes for each in range(size)]
    limits = {"two_shot": TWO_SHOT, "programs": PROGRAMS}
    add = PeerSum(rank, buffers, DeviceInfo(sms=2), torch.device("cpu"), most, **limits)
    sums, rows = asked(size), normed(size)
    found = []
    for parts, (x, residual, *norms) in zip(sums, rows, strict=True):  # by turns: they share what has arrived
        summed, both = digest(add(parts[rank])), [digest(y) for y in add.add_norm(x[rank], residual, *norms)]
        found.append((summed, both, digest(add.gather(parts[rank].repeat(3, 1)))))
    print(json.dumps([found, [add.shots(x[rank]) for x, *_ in rows]]))


if __name__ == "__main__":
    main()
