"""The tokenizer as llguidance knows it: what each token is in bytes, which are special, which end a text."""

from __future__ import annotations

from llguidance import LLTokenizer, TokenizerWrapper

from quire.errors import InvalidModel
from quire.text.tokenizer import Tokenizer


class _Spelled:
    """What llguidance asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._encode = tokenizer.encode
        self.bos_token_id = tokenizer.bos
        self.eos_token_id = min(tokenizer.eos)
        self.special_token_ids = sorted(tokenizer.special)
        self.tokens = [tokenizer.token_text(token)[1] for token in range(tokenizer.vocab_size)]

    def __call__(self, text: str) -> list[int]:
        if isinstance(text, bytes):
            raise TypeError("text, not bytes")  # how the library finds out what is taken
        return list(self._encode(text, add_special_tokens=False))


def vocabulary(tokenizer: Tokenizer) -> LLTokenizer:
    """The same bytes as answers are detokenised with, so that what a mask allows is what a client reads.

    Raises InvalidModel when tokens have no bytes of their own, or none ends a text.
    """
    if not tokenizer.exact:
        raise InvalidModel("structured output needs a tokenizer whose tokens are bytes (byte-level or sentencepiece)")
    if not tokenizer.eos:
        raise InvalidModel("structured output needs a token that ends a text, and this model's tokenizer names none")
    return LLTokenizer(TokenizerWrapper(_Spelled(tokenizer)), eos_token=sorted(tokenizer.eos))
