"""Write GGUF files: metadata, then each tensor in its type, some rows at a time: no whole tensor is in memory."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from quire.errors import InvalidModel
from quire.ops.gguf_encode import encode
from quire.ops.threads import single_threads
from quire.weights.entries import TensorEntry
from quire.weights.gguf import ARRAY, KINDS, MAGIC, STRING, Kind, StoredStrings

VERSION, ALIGNMENT = 3, 32
UINT32, INT32, FLOAT32, BOOL, UINT64, INT64 = 4, 5, 6, 7, 10, 11

PIECE = 1 << 18
"""Numbers that are encoded at a time: what is computed with them fits a core's cache."""

PLAIN: Mapping[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

KIND_BY_NAME: Mapping[str, tuple[int, Kind]] = {kind.name: (number, kind) for number, kind in KINDS.items()}


class NewTensor(NamedTuple):
    """A tensor to be written: its name in the file, its numbers, and the name of its type. whole: it is read at once,
    since its rows are not in the order of the checkpoint's file."""

    name: str
    entry: TensorEntry
    kind: str
    whole: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        _, kind = KIND_BY_NAME[self.kind]
        return math.prod(self.entry.shape) // kind.block * kind.size


def write_gguf(
    path: Path,
    facts: Mapping[str, Any],
    tensors: Sequence[NewTensor],
    *,
    threads: int = 1,
    progress: Callable[[int, int], None],
) -> None:
    """Write a file, under another name until it is whole. progress: called with (bytes written, bytes in all).

    Raises InvalidModel for a path where something is, and OSError, such as for a full disk; nothing is left then.
    """
    if path.exists():
        raise InvalidModel(f"{path} exists: remove it, or name another file")
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("wb") as file:
            _write(file, facts, tensors, threads, progress)
            file.flush()
            os.fsync(file.fileno())
        # A link fails where something has come to be there in the meantime.
        os.link(partial, path)
    except FileExistsError:
        raise InvalidModel(f"{path} exists: remove it, or name another file") from None
    finally:
        partial.unlink(missing_ok=True)


def _write(
    file: BinaryIO,
    facts: Mapping[str, Any],
    tensors: Sequence[NewTensor],
    threads: int,
    progress: Callable[[int, int], None],
) -> None:
    file.write(MAGIC + struct.pack("<IQQ", VERSION, len(tensors), len(facts)))
    for key, value in facts.items():
        file.write(_text(key) + _value(key, value))
    offset = 0
    for tensor in tensors:
        shape = tensor.entry.shape[::-1]
        number, _ = KIND_BY_NAME[tensor.kind]
        file.write(_text(tensor.name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, number, offset))
        offset += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    done = 0
    with single_threads(threads, "encode") as pool:
        for tensor in tensors:
            file.write(bytes(-file.tell() % ALIGNMENT))
            for piece in _encoded(tensor, pool, threads):
                file.write(piece)
                done += len(piece)
                progress(done, offset)
    file.write(bytes(-file.tell() % ALIGNMENT))


def _encoded(tensor: NewTensor, pool: ThreadPoolExecutor, threads: int) -> Iterator[bytes]:
    """The tensor's bytes in order, made by several threads at once, of which few pieces wait."""
    shape, read = tensor.entry.shape, tensor.entry.read
    if tensor.whole:
        held = read(())
        read = held.__getitem__
    rows = max(1, PIECE // max(1, math.prod(shape[1:])))
    cuts = [slice(at, min(at + rows, shape[0])) for at in range(0, shape[0], rows)]
    for at in range(0, len(cuts), 4 * threads):
        yield from pool.map(lambda cut: encoded_rows(tensor, read((cut,))), cuts[at : at + 4 * threads])


@torch.inference_mode()
def encoded_rows(tensor: NewTensor, values: Tensor) -> bytes:
    """The bytes of some rows of a tensor. Raises InvalidModel for numbers that are not finite."""
    if tensor.kind in PLAIN:
        return _bytes(values.to(PLAIN[tensor.kind]))
    values = values.float().contiguous()
    if not bool(values.isfinite().all()):
        raise InvalidModel(f"{tensor.name} holds numbers that are not finite: the checkpoint is broken")
    _, kind = KIND_BY_NAME[tensor.kind]
    pieces = torch.split(values.view(-1, kind.block), PIECE // kind.block)
    return b"".join(_bytes(encode(tensor.kind, piece)) for piece in pieces)


def _bytes(values: Tensor) -> bytes:
    return values.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(data)) + data


def _value(key: str, value: Any) -> bytes:
    """The type and the bytes of a metadata value."""
    if isinstance(value, list | tuple | StoredStrings):
        return struct.pack("<I", ARRAY) + _array(key, value)
    kind, data = _scalar(key, value)
    return struct.pack("<I", kind) + data


def _scalar(key: str, value: Any) -> tuple[int, bytes]:
    if isinstance(value, bool):
        return BOOL, struct.pack("<?", value)
    if isinstance(value, int):
        kind, code = next(
            each for each in ((UINT32, "I"), (INT32, "i"), (UINT64, "Q"), (INT64, "q")) if _fits(value, each[1])
        )
        return kind, struct.pack(f"<{code}", value)
    if isinstance(value, float):
        return FLOAT32, struct.pack("<f", value)
    if isinstance(value, str):
        return STRING, _text(value)
    raise InvalidModel(f"{key} is {type(value).__name__}, which GGUF's metadata has no type for")


def _array(key: str, values: Sequence[Any]) -> bytes:
    """Of one type: whole numbers are int32 where all fit, as llama.cpp reads types of tokens."""
    count = len(values)
    if isinstance(values, StoredStrings) or all(isinstance(value, str) for value in values):
        return struct.pack("<IQ", STRING, count) + b"".join(map(_text, values))
    if all(isinstance(value, bool) for value in values):
        return struct.pack(f"<IQ{count}?", BOOL, count, *values)
    if all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        kind, code = next(
            each
            for each in ((INT32, "i"), (UINT32, "I"), (UINT64, "Q"), (INT64, "q"))
            if all(_fits(value, each[1]) for value in (min(values), max(values)))
        )
        return struct.pack(f"<IQ{count}{code}", kind, count, *values)
    if all(isinstance(value, float) for value in values):
        return struct.pack(f"<IQ{count}f", FLOAT32, count, *values)
    raise InvalidModel(f"{key} is a list of several types, which GGUF's metadata cannot hold")


def _fits(value: int, code: str) -> bool:
    bits = 8 * struct.calcsize(code)
    return 0 <= value < 1 << bits if code.isupper() else -(1 << bits - 1) <= value < 1 << bits - 1
