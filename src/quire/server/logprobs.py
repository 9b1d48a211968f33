"""Log-probabilities in the three shapes clients know."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Any

from quire.types import TokenLogprobs

TokenText = Callable[[int], tuple[str, bytes]]
Score = TokenLogprobs | None

_FLOOR = -9999.0
"""JSON has no minus infinity."""


class TextLogprobs:
    """The completions style: four lists side by side. One for each choice, since offsets go on from chunk to chunk.

    A token that is part of a character is spelled `bytes:\\xe2\\x82`, as OpenAI does, so that keys stay apart.
    """

    __slots__ = ("_as_ids", "_decode", "_offset", "_text")

    def __init__(self, token_text: TokenText, *, as_ids: bool = False) -> None:
        self._text, self._as_ids = token_text, as_ids
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._offset = 0

    def of(self, tokens: Sequence[int], scores: Sequence[Score]) -> dict[str, list[Any]]:
        """`scores` of `tokens`; None where there is none, as for a prompt's first token."""
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._decode(self._text(token)[1]))
        return {
            "text_offset": offsets,
            "token_logprobs": [None if score is None else _finite(score.logprob) for score in scores],
            "tokens": [self._name(token) for token in tokens],
            "top_logprobs": [None if score is None else self._top(score) for score in scores],
        }

    def _top(self, score: TokenLogprobs) -> dict[str, float]:
        named = {self._name(score.token): _finite(score.logprob)}
        return named | {self._name(token): _finite(logprob) for token, logprob in score.top}

    def _name(self, token: int) -> str:
        if self._as_ids:
            return f"token_id:{token}"
        text, data = self._text(token)
        if "�" not in text:
            return text
        return text if text.encode() == data else "bytes:" + "".join(f"\\x{b:02x}" for b in data)


def chat_logprobs(
    scores: Sequence[TokenLogprobs], top: int, token_text: TokenText, *, as_ids: bool = False
) -> dict[str, list[Any]]:
    """The chat style: an object a token, with its exact bytes and its `top` best alternatives."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        text, data = token_text(token)
        return {
            "token": f"token_id:{token}" if as_ids else text,
            "logprob": _finite(logprob),
            "bytes": list(data),
        }

    return {
        "content": [
            one(score.token, score.logprob) | {"top_logprobs": [one(*best) for best in score.top[:top]]}
            for score in scores
        ]
    }


def prompt_logprobs(scores: Sequence[Score], top: int, token_text: TokenText) -> list[dict[str, Any] | None]:
    """vLLM's style for prompts: by token id, the token itself and its `top` best alternatives."""
    return [None if score is None else _ranked(score, top, token_text) for score in scores]


def _ranked(score: TokenLogprobs, top: int, token_text: TokenText) -> dict[str, Any]:
    ranked = [(score.token, score.logprob, score.rank)]
    ranked += [(token, logprob, rank) for rank, (token, logprob) in enumerate(score.top[:top], 1)]
    return {
        str(token): {"logprob": _finite(logprob), "rank": rank, "decoded_token": token_text(token)[0]}
        for token, logprob, rank in ranked
    }


def _finite(logprob: float) -> float:
    return logprob if logprob > _FLOOR else _FLOOR
