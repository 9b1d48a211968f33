"""Token ids to text as they come: never half a character, and always what decoding the whole would give."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

_UNSURE = "�"
_PATIENCE = 16
"""Tokens a window waits for a character to be completed; none takes more than four bytes in UTF-8."""


class Detokenizer(Protocol):
    """One text in the making."""

    def feed(self, tokens: Sequence[int]) -> str:
        """The new text that can no longer change; often, but not always, all of it."""

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that was never completed, or nothing."""


class ByteDetokenizer:
    """For vocabularies whose tokens are bytes end to end: UTF-8 is decoded as far as it is whole.

    At most three bytes are held back, so a token costs the same wherever it stands.
    """

    __slots__ = ("_held", "_piece")

    def __init__(self, pieces: Mapping[int, bytes]) -> None:
        self._piece = pieces.__getitem__
        self._held = b""

    def feed(self, tokens: Sequence[int]) -> str:
        data = self._held + b"".join(map(self._piece, tokens))
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._held = data[used:]
        return text

    def flush(self) -> str:
        held, self._held = self._held, b""
        return held.decode("utf-8", "replace")


class WindowDetokenizer:
    """For any other decoder: decode a short window with and without the news, and tell the difference.

    The window begins where the last piece told began, so that spaces between words come out as they would in the
    whole. `context` are the tokens before the text (the end of the prompt), whose text is not told.
    """

    __slots__ = ("_decode", "_ids", "_read")

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(context[-_PATIENCE:])
        self._read = len(self._ids)

    def feed(self, tokens: Sequence[int]) -> str:
        return "".join(map(self._feed, tokens))

    def _feed(self, token: int) -> str:
        self._ids.append(token)
        text = self._decode(self._ids)
        if text.endswith(_UNSURE) and len(self._ids) - self._read < _PATIENCE:
            return ""
        return self._tell(text)

    def _tell(self, text: str) -> str:
        known = self._decode(self._ids[: self._read])
        self._ids = self._ids[self._read :]
        self._read = len(self._ids)
        return text[len(known) :]

    def flush(self) -> str:
        return self._tell(self._decode(self._ids)) if len(self._ids) > self._read else ""


class NoText:
    """When nobody wants text (`detokenize=False`)."""

    def feed(self, tokens: Sequence[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""
