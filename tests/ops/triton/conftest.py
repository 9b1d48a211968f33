"""Where there is no CUDA device, kernels run in Triton's interpreter. It is chosen before any kernel is defined."""

from __future__ import annotations

import os
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from triton.runtime import interpreter

_plain = interpreter._patch_lang_tensor


def _with_index(tensor: Any, scope: Any) -> None:
    """Triton 3.6 turns its scalars, which are arrays of one, into ints in a way that NumPy 2.4 no longer allows."""
    _plain(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = _with_index
