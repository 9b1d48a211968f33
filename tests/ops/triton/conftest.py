"""Where there is no CUDA device, kernels run in Triton's interpreter. It is chosen before any kernel is defined."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from tests import interpreter

interpreter.install()
