"""PyTorch's own files, read as data only: whatever in them is more than tensors is refused, and never run."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quire.errors import InvalidModel
from quire.weights.entries import CopiedEntry, TensorEntry

ZIP = b"PK\x03\x04"


@dataclass(frozen=True, slots=True)
class Mapped(CopiedEntry):
    """A tensor of a file that is mapped, not read: it takes memory as it is copied."""

    file: str
    number: int
    tensor: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def order(self) -> tuple[str, int]:
        return self.file, self.number

    @property
    def kind(self) -> str:
        return str(self.tensor.dtype).removeprefix("torch.")

    @property
    def size(self) -> int:
        return self.tensor.nbytes

    def read(self, cut: tuple[slice, ...]) -> Tensor:
        return self.tensor[cut] if cut else self.tensor


def read_pickle(path: Path) -> dict[str, TensorEntry]:
    """Every tensor of the file. Raises InvalidModel for one that is broken, or holds anything but tensors."""
    try:
        with path.open("rb") as file:
            mapped = file.read(4) == ZIP  # older files are one stream, which cannot be mapped
        held = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError:
        raise InvalidModel(
            f"{path.name} holds more than tensors, code perhaps, which is never run: ask for safetensors, or save the "
            "state_dict alone"
        ) from None
    except (RuntimeError, ValueError, OSError, EOFError, KeyError) as error:
        reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise InvalidModel(f"{path.name} cannot be read, truncated perhaps: {reason}") from None
    if isinstance(held, dict) and set(held) == {"state_dict"}:
        held = held["state_dict"]
    if not isinstance(held, dict) or not all(isinstance(each, Tensor) for each in held.values()):
        raise InvalidModel(f"{path.name} is not a dictionary of tensors")
    return {str(name): Mapped(path.name, i, tensor) for i, (name, tensor) in enumerate(held.items())}
