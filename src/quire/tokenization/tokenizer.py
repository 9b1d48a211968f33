"""Text to token ids and back: a thin layer over the `tokenizers` library, read from a model folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import tokenizers

from quire.errors import InvalidModel
from quire.tokenization.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from quire.tokenization.token_pieces import Pieces, rule_of
from quire.tokenization.vocabularies import Read, load_core

_LONG = 1 << 14
"""Characters from which on encoding goes through the batch call, which lets other threads run meanwhile."""

_PADDED = 0.75
"""Share of a model's token ids that its own tokenizer has at least."""


class Tokenizer:
    """A vocabulary and its special tokens. Immutable; `encode` and `decode` may be called from any thread.

    config: tokenizer_config.json. eos: further token ids that end a text (generation_config.json lists several).
    """

    def __init__(
        self, core: tokenizers.Tokenizer, config: Mapping[str, Any] | None = None, *, eos: Iterable[int] = ()
    ) -> None:
        config = {} if config is None else config
        _declare(core, config.get("added_tokens_decoder") or {})
        self._core = core
        added = core.get_added_tokens_decoder()
        self.special: frozenset[int] = frozenset(i for i, token in added.items() if token.special)
        self.tokens: dict[str, str] = _named(config)
        """The named special tokens, as chat templates know them: `bos_token`, `eos_token` and so on."""
        self.bos: int | None = self._id("bos_token")
        self.eos: frozenset[int] = frozenset(eos) | {i for i in [self._id("eos_token")] if i is not None}
        self.vocab_size: int = core.get_vocab_size(with_added_tokens=True)
        self._begin, self._end = self._frame(config)
        self._rule = rule_of(core)
        if self._rule:
            names = {i: token.content for i, token in added.items()}
            self._shown = Pieces(core, self._rule, names, frozenset())
            self._hidden = Pieces(core, self._rule, names, self.special)

    @classmethod
    def from_folder(cls, folder: str | Path) -> Self:
        """Read tokenizer.json, or else another vocabulary (`vocabularies.load_core`), and, where they exist,
        tokenizer_config.json, generation_config.json, config.json.

        Raises InvalidModel naming the file that is missing or broken.
        """
        folder = Path(folder)
        core, said = _read(folder)
        config = said | {k: v for k, v in read_json(folder / "tokenizer_config.json").items() if v is not None}
        generation, model = read_json(folder / "generation_config.json"), read_json(folder / "config.json")
        eos = generation.get("eos_token_id", model.get("eos_token_id"))
        return cls(core, config, eos=_ids(eos))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of `text`, between the model's begin and end tokens if it has any and they are wanted."""
        if len(text) < _LONG:
            ids = self._core.encode(text, add_special_tokens=False).ids
        else:
            ids = self._core.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return (*self._begin, *ids, *self._end) if add_special_tokens else tuple(ids)

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of `tokens`; ids outside the vocabulary are nothing, invalid UTF-8 becomes U+FFFD."""
        if self._rule is None:
            return str(self._core.decode(list(tokens), skip_special_tokens=skip_special_tokens))
        pieces = self._hidden if skip_special_tokens else self._shown
        data = b"".join(map(pieces.__getitem__, tokens))
        strip = self._rule.strip
        return data.removeprefix(b" " * min(strip, len(data) - len(data.lstrip(b" ")))).decode("utf-8", "replace")

    def detokenizer(self, *, skip_special_tokens: bool = True, context: Sequence[int] = ()) -> Detokenizer:
        """For a text that follows `context`, so that a space at its beginning is kept."""
        if self._rule:
            return ByteDetokenizer(self._hidden if skip_special_tokens else self._shown)

        def decode(tokens: Sequence[int]) -> str:
            return self.decode(tokens, skip_special_tokens=skip_special_tokens)

        return WindowDetokenizer(decode, context)

    def token_text(self, token: int) -> tuple[str, bytes]:
        """One token as text (U+FFFD for parts of a character) and as its exact bytes."""
        if self._rule:
            piece = self._shown[token]
            return piece.decode("utf-8", "replace"), piece
        text = self.decode((token,))
        return text, text.encode()

    def doubts(self, size: int) -> str:
        """Why it may be the tokenizer of another model than one of `size` token ids; empty where it fits.

        Models pad their vocabulary by some percent, and tokenizers none.
        """
        says = f"the tokenizer has {self.vocab_size:,} tokens and the model {size:,}"
        if self.vocab_size > size:
            return f"{says}: prompts with one of the others are refused; is it this model's tokenizer?"
        if self.vocab_size < _PADDED * size:
            return f"{says}: what the model says with the others is lost; is it this model's tokenizer?"
        return ""

    @property
    def exact(self) -> bool:
        """Whether a text is nothing but its tokens' bytes end to end."""
        return self._rule is not None

    def to_json(self) -> str:
        """tokenizer.json with what tokenizer_config.json adds, for libraries that read it."""
        core = tokenizers.Tokenizer.from_str(self._core.to_str())
        core.no_padding()
        core.no_truncation()
        return str(core.to_str())

    def id_of(self, name: str) -> int | None:
        """The id of a vocabulary entry by its exact name."""
        return self._core.token_to_id(name)

    def _id(self, role: str) -> int | None:
        return self._core.token_to_id(self.tokens[role]) if role in self.tokens else None

    def _frame(self, config: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What stands before and after every text: the post-processor's word, unless tokenizer_config overrides."""
        framed, bare = self._core.encode("a").ids, self._core.encode("a", add_special_tokens=False).ids
        at = next((i for i in range(len(framed)) if framed[i : i + len(bare)] == bare), 0) if bare else 0
        begin, end = tuple(framed[:at]), tuple(framed[at + len(bare) :])
        eos = self._id("eos_token")
        begin = _asked(begin, self.bos, config.get("add_bos_token"))
        return begin, _asked(end, eos, config.get("add_eos_token"))


def _read(folder: Path) -> Read:
    path = folder / "tokenizer.json"
    if path.is_file():
        try:
            return tokenizers.Tokenizer.from_file(str(path)), {}
        except Exception as error:  # the library raises bare Exception
            raise InvalidModel(f"{path} cannot be read: {error}") from error
    found = load_core(folder)
    if found is None:
        raise InvalidModel(
            f"no tokenizer.json in {folder}, nor tokenizer.model, vocab.json with merges.txt, or *.tiktoken: "
            "Quire needs one to turn text into tokens; --tokenizer names another folder"
        )
    return found


def read_json(path: Path) -> dict[str, Any]:
    """An optional JSON object: empty when there is no file. Raises InvalidModel when it is not JSON."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidModel(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidModel(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def _asked(frame: tuple[int, ...], token: int | None, wanted: bool | None) -> tuple[int, ...]:
    if token is None or wanted is None or wanted == (token in frame):
        return frame
    return (token,) if wanted else tuple(t for t in frame if t != token)


def _ids(eos: Any) -> list[int]:
    found = [eos] if isinstance(eos, int) else eos or []
    if not isinstance(found, list) or not all(type(id) is int for id in found):
        raise InvalidModel(f"generation_config.json or config.json: eos_token_id must be token ids, not {eos!r}")
    return found


def _named(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and the like; older files give each as an object with a `content`."""
    named = {}
    for role, value in config.items():
        if role.endswith("_token") and not role.startswith("add_"):
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                named[role] = content
    return named


def _declare(core: tokenizers.Tokenizer, declared: Mapping[str, Mapping[str, Any]]) -> None:
    """Add the tokens that only tokenizer_config.json knows. Raises InvalidModel if their ids cannot be kept."""
    try:
        wanted = [(int(id), _added(about)) for id, about in declared.items()]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise InvalidModel(
            "tokenizer_config.json: added_tokens_decoder must map ids to tokens with a content"
        ) from None
    for id, token in sorted(wanted, key=lambda pair: pair[0]):
        if core.token_to_id(token.content) == id:
            continue
        (core.add_special_tokens if token.special else core.add_tokens)([token])
        if core.token_to_id(token.content) != id:
            raise InvalidModel(
                f"tokenizer_config.json gives {token.content!r} the id {id}, "
                f"but tokenizer.json makes it {core.token_to_id(token.content)}"
            )


def _added(about: Mapping[str, Any]) -> tokenizers.AddedToken:
    flags = {k: about[k] for k in ("single_word", "lstrip", "rstrip", "normalized") if k in about}
    return tokenizers.AddedToken(about["content"], special=bool(about.get("special")), **flags)
