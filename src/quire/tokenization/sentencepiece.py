"""sentencepiece's tokenizer.model: the few fields of its protobuf that a tokenizer is made of.

Definition: sentencepiece_model.proto of github.com/google/sentencepiece.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from quire.errors import InvalidModel

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Kinds of pieces; GGUF numbers them alike."""

UNIGRAM, BPE = 1, 2


@dataclass(slots=True)
class Sentences:
    """Pieces in the order of their ids, with scores and kinds. prefix: a space is put before every text.

    model: UNIGRAM or BPE. squeeze: runs of spaces are one.
    """

    pieces: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    model: int = UNIGRAM
    prefix: bool = True
    squeeze: bool = True


def read_sentences(data: bytes) -> Sentences:
    """Raises InvalidModel for what is not a sentencepiece model."""
    found = Sentences()
    try:
        for number, value in fields(data):
            if number == 1 and isinstance(value, bytes):
                piece = dict(fields(value))
                found.pieces.append(bytes(piece[1]).decode("utf-8"))
                found.scores.append(struct.unpack("<f", piece.get(2, bytes(4)))[0])  # type: ignore[arg-type]
                found.kinds.append(int(piece.get(3, NORMAL)))
            elif number == 2 and isinstance(value, bytes):
                found.model = int(dict(fields(value)).get(3, UNIGRAM))
            elif number == 3 and isinstance(value, bytes):
                about = dict(fields(value))
                found.prefix, found.squeeze = bool(about.get(3, 1)), bool(about.get(4, 1))
    except (IndexError, KeyError, ValueError, TypeError, struct.error):
        raise InvalidModel("tokenizer.model is not a sentencepiece model") from None
    if not found.pieces:
        raise InvalidModel("tokenizer.model is not a sentencepiece model")
    return found


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of a protobuf message; groups and what is cut short raise ValueError."""
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, at = varint(data, at)
            yield number, value
            continue
        if kind == 2:
            size, at = varint(data, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"wire type {kind}")
        if at + size > len(data):
            raise ValueError("cut short")
        yield number, data[at : at + size]
        at += size


def varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("endless number")
