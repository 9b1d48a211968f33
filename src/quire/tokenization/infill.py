"""Filling in between two texts: the markers that models were trained with, and prompts made of them as token ids.

A prompt is the marker of the prefix, the prefix, that of the suffix, the suffix, and that of the middle, which the
model then writes: "Efficient Training of Language Models to Fill in the Middle" (Bavarian et al., 2022), order PSM.
With markers of two texts only, as Codestral's are, the suffix comes first, and the middle goes on from the prefix.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple


class Infill(NamedTuple):
    """Token ids of the markers, and of those that end the middle besides the model's end of text.

    middle: None where the middle has no marker. written: the markers as text, which is no marker where it stands in a
    prefix or suffix.
    """

    prefix: int
    suffix: int
    middle: int | None
    ends: tuple[int, ...]
    written: re.Pattern[str]

    def prompt(self, before: Sequence[int], after: Sequence[int]) -> tuple[int, ...]:
        """The prompt for the text between two, given as token ids."""
        if self.middle is None:
            return (self.suffix, *after, self.prefix, *before)
        return (self.prefix, *before, self.suffix, *after, self.middle)


_MARKERS: Mapping[tuple[str, ...], tuple[str, ...]] = {
    # Qwen 2.5 and later, CodeGemma, whose middle ends with <|file_separator|>.
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"): (
        *("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
    ),
    # StarCoder, Granite Code, StableCode.
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"): ("<fim_pad>", "<repo_name>", "<reponame>", "<file_sep>"),
    # DeepSeek Coder. The hole is where the middle goes, so the suffix follows it.
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"): (),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"): ("▁<EOT>",),
    # SantaCoder.
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"): ("<fim-pad>",),
    # Codestral. Its vocabulary has [MIDDLE] too, which prompts do not.
    ("[PREFIX]", "[SUFFIX]"): (),
}
"""Names of the vocabulary: the markers of prefix, suffix and middle, and the tokens that end the middle."""


def find_infill(id_of: Callable[[str], int | None]) -> Infill | None:
    """The markers of a vocabulary, None if it has none. id_of: the id of an entry, by its exact name."""
    for names, ends in _MARKERS.items():
        prefix, suffix, *rest = map(id_of, names)
        if prefix is not None and suffix is not None and None not in rest:
            # Where U+2581 stands for a space, a space makes the same token.
            forms = {*names, *(name.replace("▁", " ") for name in names)}
            found = tuple(id for id in map(id_of, ends) if id is not None)
            middle = next(iter(rest), None)
            return Infill(prefix, suffix, middle, found, re.compile("|".join(map(re.escape, sorted(forms)))))
    return None


def pieces(text: str, written: re.Pattern[str]) -> list[str]:
    """The text cut within each marker that is written in it, so that no piece has one."""
    cuts = [0, *((found.start() + found.end()) // 2 for found in written.finditer(text)), len(text)]
    return [text[start:end] for start, end in pairwise(cuts)]
