"""TensorFlow's checkpoints, `NAME.index` beside `NAME.data-00000-of-00001`: read as data, without TensorFlow.

The index is a sorted table (LevelDB's format) of protobuf messages: under the empty key a header, under each tensor's
name its type, shape, file and place. The data files hold the tensors' bytes, row-major and little endian. Written by
`tf.train.Saver` since TensorFlow 1.0, so GPT-2's own files are of this kind.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from quire.errors import InvalidModel
from quire.weights.entries import TensorEntry, file_entry

MAGIC = 0xDB4775248B80FB57
FOOTER, TRAILER = 48, 5
"""Bytes at the end of the table, and behind each of its blocks: how it is compressed (1), and its checksum (4)."""

LARGEST_INDEX = 16 << 20
"""Bytes. GPT-2's largest model has an index of 40 kB."""

DTYPES: Mapping[int, torch.dtype] = {
    1: torch.float32,
    2: torch.float64,
    3: torch.int32,
    4: torch.uint8,
    6: torch.int8,
    9: torch.int64,
    10: torch.bool,
    14: torch.bfloat16,
    19: torch.float16,
}
_STRING = 7

Fields = dict[int, list[int | bytes]]
"""A protobuf message: the values of each field, as they are on the wire."""


class _Damaged(Exception):
    """The index is not what the format says. The text says where."""


def find_bundle(folder: Path) -> Path | None:
    """The index of the checkpoint in a folder, None where there is none.

    Of several, the one that the file `checkpoint` names. Raises InvalidModel where it does not say.
    """
    found = sorted(path for path in folder.glob("*.index") if any(folder.glob(f"{path.stem}.data-*")))
    if len(found) <= 1:
        return found[0] if found else None
    state = folder / "checkpoint"
    text = state.read_bytes()[:4096].decode("utf-8", "replace") if state.is_file() else ""
    last = re.search(r'^model_checkpoint_path: "(?:[^"]*[/\\])?([^"/\\]+)"', text, re.MULTILINE)
    for path in found:
        if last and path.stem == last[1]:
            return path
    raise InvalidModel(
        f"{folder.name} has several checkpoints ({', '.join(path.stem for path in found[:3])}), and no file "
        "`checkpoint` that names one of them: keep one"
    )


def read_bundle(index: Path) -> dict[str, TensorEntry]:
    """Every tensor of numbers by name. Strings, such as the graph of saved objects, are left out.

    Raises InvalidModel for a file that is damaged, compressed, or places a tensor where there is none.
    """
    if index.stat().st_size > LARGEST_INDEX:
        raise InvalidModel(f"{index.name} has more than {LARGEST_INDEX >> 20} MiB: it is not the index of a checkpoint")
    try:
        table = dict(_table(index.read_bytes()))
        header = _message(table.pop(b"", b""))
        shards = _number(header, 1)
        if _number(header, 2):
            raise InvalidModel(
                f"{index.name} is big endian, which is not supported: save it on a little-endian machine"
            )
        entries = {name.decode("utf-8"): _message(value) for name, value in table.items()}
        return {
            name: _entry(index, name, entry, shards) for name, entry in entries.items() if _number(entry, 1) != _STRING
        }
    except (_Damaged, UnicodeDecodeError) as error:
        raise InvalidModel(f"{index.name} is damaged ({error}): download it again") from None


def _entry(index: Path, name: str, entry: Fields, shards: int) -> TensorEntry:
    """The tensor that a BundleEntryProto describes. Raises InvalidModel and _Damaged."""
    kind, shard, start, size = (_number(entry, field) for field in (1, 3, 4, 5))
    if entry.get(7):
        raise InvalidModel(f"{index.name}: {name} is stored in slices, which is not supported: save it whole")
    if kind not in DTYPES:
        raise InvalidModel(f"{index.name}: {name} has TensorFlow's type {kind}, which is not supported")
    dims = [_message(dim) for shape in _bytes(entry, 2) for dim in _bytes(_message(shape), 2)]
    shape, dtype = tuple(_number(dim, 1) for dim in dims), DTYPES[kind]
    if math.prod(shape) * dtype.itemsize != size:
        raise InvalidModel(f"{index.name}: {name} has {size} bytes, which is not {dtype} of shape {list(shape)}")
    data = index.with_name(f"{index.stem}.data-{shard:05d}-of-{shards:05d}")
    if not data.is_file():
        raise InvalidModel(f"{index.name} names {data.name}, which is not in the folder: download it again")
    if start + size > data.stat().st_size:
        raise InvalidModel(f"{data.name} is truncated: {name} ends at byte {start + size:,}; download it again")
    return file_entry(data, start, dtype, shape, str(dtype).removeprefix("torch."))


# ---------------------------------------------------------------- the table


def _table(file: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values. Raises _Damaged."""
    if len(file) < FOOTER or struct.unpack("<Q", file[-8:])[0] != MAGIC:
        raise _Damaged("its end is not that of an index")
    place = _varint(file, _varint(file, len(file) - FOOTER)[1])[1]
    for _, handle in _block(file, place):
        yield from _block(file, 0, handle)


def _block(file: bytes, at: int, handle: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of the block whose place and size are at `at` of `file`, or of `handle`. Raises _Damaged."""
    start, at = _varint(file if handle is None else handle, at)
    size, _ = _varint(file if handle is None else handle, at)
    end = start + size
    if end + TRAILER > len(file):
        raise _Damaged("a block ends behind the file")
    if file[end]:
        raise _Damaged("it is compressed, which TensorFlow does not do")
    if _checksum(file[start : end + 1]) != struct.unpack("<I", file[end + 1 : end + TRAILER])[0]:
        raise _Damaged("the checksum of a block is wrong")
    block = file[start:end]
    restarts = struct.unpack("<I", block[-4:])[0] if size >= 4 else -1
    stop, at, key = size - 4 - 4 * restarts, 0, b""
    if not 0 <= restarts <= size or stop < 0:
        raise _Damaged("a block has no end")
    while at < stop:
        shared, at = _varint(block, at)
        rest, at = _varint(block, at)
        length, at = _varint(block, at)
        if shared > len(key) or at + rest + length > stop:
            raise _Damaged("an entry ends behind its block")
        key = key[:shared] + block[at : at + rest]
        yield key, block[at + rest : at + rest + length]
        at += rest + length


def _crc_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return tuple(table)


_CRC = _crc_table()


def _checksum(data: bytes) -> int:
    """CRC-32C, rotated and shifted as the format does."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


# ---------------------------------------------------------------- protobuf


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at `at`, and where it ends. Raises _Damaged."""
    value = 0
    for shift in range(0, 64, 7):
        if at >= len(data):
            raise _Damaged("it ends within a number")
        byte, at = data[at], at + 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
    raise _Damaged("a number has more than 64 bits")


def _message(data: bytes) -> Fields:
    """The fields of a message. Raises _Damaged."""
    held: Fields = {}
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind, value = tag & 7, 0
        if kind == 0:
            value, at = _varint(data, at)
            held.setdefault(tag >> 3, []).append(value)
            continue
        if kind not in (1, 2, 5):
            raise _Damaged(f"a field of kind {kind}")
        size, at = _varint(data, at) if kind == 2 else ({1: 8, 5: 4}[kind], at)
        if at + size > len(data):
            raise _Damaged("a field ends behind its message")
        held.setdefault(tag >> 3, []).append(data[at : at + size])
        at += size
    return held


def _number(held: Fields, field: int) -> int:
    """The last value of a field of numbers, 0 where it is left out. Raises _Damaged for bytes and negative numbers."""
    value = held.get(field, [0])[-1]
    if not isinstance(value, int) or value >> 63:
        raise _Damaged(f"field {field} is no size")
    return value


def _bytes(held: Fields, field: int) -> list[bytes]:
    """The values of a field of messages. Raises _Damaged for numbers."""
    values = [value for value in held.get(field, []) if isinstance(value, bytes)]
    if len(values) != len(held.get(field, [])):
        raise _Damaged(f"field {field} is no message")
    return values
