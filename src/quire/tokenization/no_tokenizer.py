"""What stands where a tokenizer would, with `skip_tokenizer_init`: prompts and answers are token ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Never

from quire.errors import InvalidModel, InvalidRequest
from quire.tokenization.detokenizer import Detokenizer, NoText
from quire.tokenization.tokenizer import PoolingText, Tokenizer
from quire.types import SamplingParams

_WHY = "this model runs without a tokenizer (skip_tokenizer_init)"


class NoTokenizer(Tokenizer):
    """No vocabulary, only the ids that end a text. What needs text raises InvalidRequest.

    eos: end-of-text token ids.
    """

    has_text = False

    def __init__(self, eos: Iterable[int] = ()) -> None:
        self.special, self.tokens, self.bos, self.eos = frozenset(), {}, None, frozenset(eos)
        self.vocab_size, self.infill = 0, None

    def encode(self, text: str, *, add_special_tokens: bool = True, suffix: str = "") -> Never:
        """Raises InvalidRequest."""
        param = "suffix" if suffix else "prompt"
        raise InvalidRequest(f"{param}: {_WHY}: send token ids instead of text", param=param, code="no_tokenizer")

    def encode_inputs(
        self, inputs: Sequence[PoolingText], *, add_special_tokens: bool = True, most: int | None = None
    ) -> Never:
        """Raises InvalidRequest."""
        self.encode("")

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = False) -> Never:
        """Raises InvalidRequest."""
        raise InvalidRequest(f"tokens: {_WHY}: they have no text", param="tokens", code="no_tokenizer")

    def detokenizer(self, *, skip_special_tokens: bool = True, context: Sequence[int] = ()) -> Detokenizer:
        """One that finds no text."""
        return NoText()

    def token_text(self, token: int) -> tuple[str, bytes]:
        """The id, as `return_tokens_as_token_ids` writes it, and no bytes."""
        return f"token_id:{token}", b""

    def doubts(self, size: int) -> str:
        """None."""
        return ""

    @property
    def added(self) -> frozenset[str]:
        """None."""
        return frozenset()

    @property
    def exact(self) -> bool:
        """Whether a text is the concatenation of its tokens' bytes."""
        return False

    def to_json(self) -> Never:
        """Raises InvalidModel."""
        raise InvalidModel(_WHY)

    def info(self) -> dict[str, Any]:
        """Nothing: there is no configuration."""
        return {}

    def id_of(self, name: str) -> None:
        """None: nothing has a name."""
        return


def without_text(sampling: SamplingParams) -> SamplingParams:
    """The parameters of a request to a model without a tokenizer. Raises InvalidRequest for those that are text."""
    structure = sampling.structured_outputs
    needs = {
        "stop": sampling.stop,
        "bad_words": sampling.bad_words,
        "structured_outputs" if structure is None else structure.param: structure,
    }
    for name, value in needs.items():
        if value:
            raise needs_text(name)
    return replace(sampling, detokenize=False)


def needs_text(name: str) -> InvalidRequest:
    """The refusal of a request's field `name`."""
    return InvalidRequest(f"{name}: {_WHY}, and this needs text", param=name, code="no_tokenizer")
