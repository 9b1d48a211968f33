"""A vocabulary of 61 tokens, byte-level, for the tiny model: letters, digits, JSON's marks, some pairs of them.

It has all of JSON but escapes: where a text is forced on that no token has, the library cannot go on.
"""

from __future__ import annotations

import functools

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from quire.structured_output.llguidance import LlguidanceCompiler
from quire.tokenization.tokenizer import Tokenizer
from tests.model_runner.tiny import VOCAB

END = 0
PAIRS = ('{"', '":', '",', '"}', "ab", "ba", "aa", "12", "Ġa", "abc", "true")


def _names() -> list[str]:
    singles = [*'{}[]":,.-_', *"0123456789", *"abcdefglnrstuk", "Ġ"]
    names = ["<end>", *singles, *PAIRS]
    return [*names, *(f"<{i}>" for i in range(VOCAB - len(names)))]


@functools.cache
def tokenizer() -> Tokenizer:
    """Id 0 end-of-text token; what is left over up to the model's vocabulary is special too."""
    names = _names()
    core = tokenizers.Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([name for name in names if name.startswith("<")])
    return Tokenizer(core, {"eos_token": "<end>"})


@functools.cache
def compiler() -> LlguidanceCompiler:
    return LlguidanceCompiler(tokenizer)


def allowed(mask: bytes | None) -> set[int]:
    """The tokens of a mask."""
    assert mask is not None
    return {t for t in range(VOCAB) if t >> 3 < len(mask) and mask[t >> 3] >> (t & 7) & 1}


def tokens_of(text: str) -> list[int]:
    """One token a character."""
    core = tokenizer()
    found = [core.id_of("Ġ" if c == " " else c) for c in text]
    assert None not in found, text
    return [t for t in found if t is not None]
