"""Matrices that are read and brought to their final form behind the first answers.

A model is ready without them. Each is made by what needs it first: the first step, from the first layer on, or a thread
beside it, from the last one on (`mapped.pack_beside`). It is made once, so that products always have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import cast

import torch
from torch import Tensor

from quire.errors import ModelLost, QuireError
from quire.layers.quantization.base import QuantizedWeight, TableStorage, WeightSlot, WeightStorage
from quire.ops.operands import Gate


class Deferred:
    """A matrix in its format, of which `read`, once it is set, fills the slots when the matrix is wanted."""

    def __init__(self, stored: WeightStorage) -> None:
        self.stored, self.matrix = stored, stored.matrix
        self.places = stored.slots()
        self.nbytes = sum(place.target.nbytes for place in self.places)
        self.read: Callable[[], object] | None = None
        self._lock = Lock()
        self._failure: ModelLost | None = None

    def slots(self) -> list[WeightSlot]:
        """See `WeightStorage`."""
        return self.places

    def finalize(self) -> None:
        """Now, unless it is read later."""
        self.places = []
        if self.read is None:
            self.stored.finalize()

    @property
    def packed(self) -> bool:
        """Whether it has its final form."""
        return self.read is None

    @torch.inference_mode()
    def pack(self) -> None:
        """Bring it to its final form, or wait until another thread has. Raises ModelLost, and again where it is needed
        later: what is filled in part is not filled again."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self.read is None:
                return
            try:
                self.read()
                self.stored.finalize()
            except Exception as error:
                why = str(error) if isinstance(error, QuireError) else f"{type(error).__name__}: {error}"
                self._failure = ModelLost(f"weights cannot be read: {why}")
                raise self._failure from error
            self.read = None

    def apply(self, x: Tensor, gate: Gate = "") -> Tensor:
        """See `WeightStorage`."""
        if self.read is not None:
            self.pack()
        return self.stored.apply(x, gate)

    def rows(self, tokens: Tensor) -> Tensor:
        """See `TableStorage`, of one."""
        if self.read is not None:
            self.pack()
        return cast(TableStorage, self.stored).rows(tokens)

    @property
    def quantized(self) -> QuantizedWeight | None:
        """See `WeightStorage`: None until it has its final form."""
        return None if self.read is not None else self.stored.quantized
