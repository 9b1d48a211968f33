"""The tokenizer as llguidance knows it: what each token is in bytes, which are special, which end a text."""

from __future__ import annotations

from llguidance import LLTokenizer, TokenizerWrapper

from quire.errors import InvalidModel
from quire.tokenization.tokenizer import Tokenizer


def vocabulary(tokenizer: Tokenizer) -> LLTokenizer:
    """The same bytes as answers are detokenised with, so that what a mask allows is what a client reads.

    Raises InvalidModel when tokens have no bytes of their own, or none ends a text.
    """
    if not tokenizer.exact:
        raise InvalidModel("structured output needs a tokenizer whose tokens are bytes (byte-level or sentencepiece)")
    if not tokenizer.eos:
        raise InvalidModel("structured output needs a token that ends a text, and this model's tokenizer names none")
    pieces = [tokenizer.token_text(token)[1] for token in range(tokenizer.vocab_size)]
    eos = sorted(tokenizer.eos)
    try:
        own = LLTokenizer(tokenizer.to_json(), eos_token=eos)
        if all(own.decode_bytes([token]) == piece or b"\xff" in piece for token, piece in enumerate(pieces)):
            return own  # 0xff, never part of a text, is how the library marks special tokens
    except ValueError:
        pass  # a decoder that the library does not know, and we do
    return LLTokenizer(TokenizerWrapper(_TokenizerAdapter(tokenizer, pieces)), eos_token=eos)


class _TokenizerAdapter:
    """What the library asks of a tokenizer that it cannot read by itself."""

    def __init__(self, tokenizer: Tokenizer, pieces: list[bytes]) -> None:
        self.bos_token_id = tokenizer.bos
        self.eos_token_id = min(tokenizer.eos)
        self.special_token_ids = sorted(tokenizer.special)
        self.tokens = pieces
        self._ids = {piece: token for token, piece in enumerate(pieces) if piece and token not in tokenizer.special}
        self._longest = max(map(len, self._ids))

    def __call__(self, text: bytes) -> list[int]:
        """The longest token first, and so on: what stands where only one text is possible.

        Not `Tokenizer.encode`, which may put a space before a text.
        """
        tokens, at = list[int](), 0
        while at < len(text):
            ends = range(min(at + self._longest, len(text)), at, -1)
            end = next((end for end in ends if text[at:end] in self._ids), None)
            if end is None:
                return tokens
            tokens.append(self._ids[text[at:end]])
            at = end
        return tokens
