"""What each token is in bytes, read off a tokenizer's decoder.

Byte-level BPE (GPT-2, Llama 3, Qwen) spells every byte as one printable character; sentencepiece-style vocabularies
(Llama 2, Mistral, Gemma) spell a space as a low line and a lone byte as `<0xE2>`. In both, a text is nothing but its
tokens' bytes end to end, so decoding can go on token by token for ever at the same cost. Decoders that say more
than that (WordPiece and the like) have no table of pieces, and are decoded through a sliding window instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tokenizers

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _spelling() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 stands for itself, the rest follows from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = [b for b in range(256) if b not in set(plain)]
    return {chr(b): b for b in plain} | {chr(0x100 + i): b for i, b in enumerate(shifted)}


class Rule(NamedTuple):
    """How a vocabulary entry becomes bytes. `strip` leading spaces are not part of a text's beginning."""

    spell: Callable[[str], bytes]
    strip: int = 0


class Pieces(dict[int, bytes]):
    """Token id to bytes, filled as tokens are met. Unknown ids, and those `hidden`, are nothing."""

    def __init__(
        self, core: tokenizers.Tokenizer, rule: Rule, added: Mapping[int, str], hidden: frozenset[int]
    ) -> None:
        super().__init__()
        self._name, self._rule, self._added, self._hidden = core.id_to_token, rule, added, hidden

    def __missing__(self, token: int) -> bytes:
        if token in self._hidden:
            piece = b""
        elif token in self._added:
            piece = self._added[token].encode()
        else:
            name = self._name(token)
            if name is None:
                return b""  # not kept: what callers make up must not grow the table
            piece = self._rule.spell(name)
        self[token] = piece
        return piece


def rule_of(core: tokenizers.Tokenizer) -> Rule | None:
    """The rule of a tokenizer's decoder, or None if it is more than its tokens' bytes end to end."""
    if core.decoder is None:
        return None
    parts = _flat(json.loads(core.decoder.__getstate__()))
    kinds = [part["type"] for part in parts]
    if set(kinds) <= {"ByteLevel", "Fuse"} and "ByteLevel" in kinds:
        return Rule(_byte_level())
    if kinds == ["Metaspace"]:
        mark = parts[0]["replacement"]
        return Rule(_marked([(mark, " ")], fallback=False), int(parts[0].get("prepend_scheme") != "never"))
    if set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        return _sentencepiece(parts, kinds)
    return None


def _flat(part: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if part["type"] != "Sequence":
        return [part]
    return [leaf for child in part["decoders"] for leaf in _flat(child)]


def _byte_level() -> Callable[[str], bytes]:
    spelling = _spelling()

    def spell(name: str) -> bytes:
        try:
            return bytes(map(spelling.__getitem__, name))
        except KeyError:  # an entry that is not in the alphabet means itself
            return name.encode()

    return spell


def _marked(swaps: Sequence[tuple[str, str]], *, fallback: bool) -> Callable[[str], bytes]:
    def spell(name: str) -> bytes:
        if fallback and (byte := _BYTE.fullmatch(name)):
            return bytes([int(byte[1], 16)])
        for old, new in swaps:
            name = name.replace(old, new)
        return name.encode()

    return spell


def _sentencepiece(parts: Sequence[Mapping[str, Any]], kinds: Sequence[str]) -> Rule | None:
    swaps = [(part["pattern"].get("String"), part["content"]) for part in parts if part["type"] == "Replace"]
    strips = [part for part in parts if part["type"] == "Strip"]
    if any(old is None for old, _ in swaps):
        return None
    if any(part["content"] != " " or part["stop"] or "Fuse" not in kinds for part in strips):
        return None  # without Fuse every token would be stripped
    spell = _marked(swaps, fallback="ByteFallback" in kinds)
    return Rule(spell, sum(part["start"] for part in strips))
