"""Run as a program, as each of several ranks: sums through shared memory, with interpreted kernels. See
`test_all_reduce`.

Arguments: a file that the ranks share, of zeros, the rank, how many there are, and the bytes of the largest sum.
Prints, as JSON, a digest of each sum.
"""

from __future__ import annotations

import json
import sys

import torch

from quire.ops.triton.all_reduce import PeerSum, buffer_bytes
from quire.ops.triton.launch import DeviceInfo
from tests.ops.triton.test_all_reduce import asked, digest


def main() -> None:
    path, (rank, size, most) = sys.argv[1], map(int, sys.argv[2:])
    nbytes = buffer_bytes(size, most)
    shared = torch.from_file(path, shared=True, size=size * nbytes, dtype=torch.uint8)
    buffers = [shared.data_ptr() + each * nbytes for each in range(size)]
    add = PeerSum(rank, buffers, DeviceInfo(sms=2), torch.device("cpu"), most)
    print(json.dumps([digest(add(parts[rank])) for parts in asked(size)]))


if __name__ == "__main__":
    main()
