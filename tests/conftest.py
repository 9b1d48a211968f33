"""Settings of every test run."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # workers of pytest-xdist would fight over the cores otherwise
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach for the network
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

if not torch.cuda.is_available():  # chosen before any kernel is defined, whichever test module imports one first
    os.environ["TRITON_INTERPRET"] = "1"
