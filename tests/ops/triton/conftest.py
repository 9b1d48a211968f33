"""Where there is no CUDA device, kernels run in Triton's interpreter. It is chosen before any kernel is defined."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from tests import interpreter

interpreter.install()

from tests.ops.triton.device import DEVICE  # noqa: E402 - after the interpreter has been chosen


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a card every test that runs kernels on `DEVICE` is one of `-m gpu`: the interpreter sees no illegal access,
    and rounds each product and sum by itself."""
    if DEVICE.type == "cuda":
        for item in items:
            if getattr(getattr(item, "module", None), "DEVICE", None) is DEVICE:
                item.add_marker(pytest.mark.gpu)
