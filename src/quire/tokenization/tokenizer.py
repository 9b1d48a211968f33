"""Text to token ids and back: the `tokenizers` library, read from a model folder.

Byte-level BPE (GPT-2, Llama 3, Qwen) writes every byte as one printable character; sentencepiece vocabularies (Llama 2,
Mistral, Gemma) write a space as U+2581 and a lone byte as `<0xE2>`. In both, a text is the concatenation of its tokens'
bytes, so incremental decoding costs the same for every token. Other decoders (WordPiece and the like) have no bytes a
token, and are decoded in a sliding window.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import tokenizers

from quire.checks import instead
from quire.errors import InvalidModel, InvalidRequest
from quire.tokenization.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from quire.tokenization.infill import find_infill, pieces
from quire.tokenization.vocabularies import INSTEAD, Read, byte_alphabet, load_core
from quire.types import NUMERIC_PARAMETERS, SamplingParams

Json = TypeVar("Json", dict[str, Any], list[Any])

_LONG = 1 << 14
"""Characters from which on encoding uses the batch call, which releases the GIL."""

_PADDED = 0.75
"""The least share of a model's token ids that its own tokenizer has."""

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Rule(NamedTuple):
    """How vocabulary entries become bytes. strip: the number of spaces that are removed from the start of a text."""

    to_bytes: Callable[[str], bytes]
    strip: int = 0


class Pieces(dict[int, bytes]):
    """The bytes of each token id, computed on first use. Unknown ids and those in `hidden` have none."""

    def __init__(
        self, core: tokenizers.Tokenizer, rule: Rule, added: Mapping[int, str], hidden: frozenset[int]
    ) -> None:
        super().__init__()
        self._name = core.id_to_token
        self._rule = rule
        self._added = added
        self._hidden = hidden

    def __missing__(self, token: int) -> bytes:
        if token in self._hidden:
            piece = b""
        elif token in self._added:
            piece = self._added[token].encode()
        else:
            name = self._name(token)
            if name is None:
                # Not stored: ids that callers invent must not grow the table.
                return b""
            piece = self._rule.to_bytes(name)
        self[token] = piece
        return piece


def rule_of(core: tokenizers.Tokenizer) -> Rule | None:
    """The rule of a tokenizer's decoder; None where decoding is not the concatenation of the tokens' bytes."""
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
    alphabet = {char: byte for byte, char in enumerate(byte_alphabet())}

    def to_bytes(name: str) -> bytes:
        try:
            return bytes(map(alphabet.__getitem__, name))
        # An entry that is not in the alphabet is literal text.
        except KeyError:
            return name.encode()

    return to_bytes


def _marked(swaps: Sequence[tuple[str, str]], *, fallback: bool) -> Callable[[str], bytes]:
    def to_bytes(name: str) -> bytes:
        if fallback and (byte := _BYTE.fullmatch(name)):
            return bytes([int(byte[1], 16)])
        for old, new in swaps:
            name = name.replace(old, new)
        return name.encode()

    return to_bytes


def _sentencepiece(parts: Sequence[Mapping[str, Any]], kinds: Sequence[str]) -> Rule | None:
    swaps = [(part["pattern"].get("String"), part["content"]) for part in parts if part["type"] == "Replace"]
    strips = [part for part in parts if part["type"] == "Strip"]
    if any(old is None for old, _ in swaps):
        return None
    if any(part["content"] != " " or part["stop"] or "Fuse" not in kinds for part in strips):
        # Without Fuse, every token is stripped.
        return None
    return Rule(_marked(swaps, fallback="ByteFallback" in kinds), sum(part["start"] for part in strips))


PoolingText = str | tuple[str, str]
"""A text, or two that are read together."""


class PoolingTokens(NamedTuple):
    """Token ids of a text or of two, the type of each, empty where all are of type 0, and how many were left out."""

    ids: tuple[int, ...]
    types: tuple[int, ...] = ()
    truncated: int = 0


def pair_lengths(first: int, second: int, most: int) -> tuple[int, int]:
    """How many tokens are kept of two texts that have more than `most` together: of the longer fewer, until both are
    alike (transformers' `longest_first`)."""
    short = min(first, second)
    if short <= most // 2:
        kept = short, most - short
    else:
        kept = most // 2, most - most // 2
    return kept if first <= second else kept[::-1]


def _room(most: int, added: int) -> int:
    """Tokens left for texts. Raises InvalidRequest where none are."""
    if most <= added:
        raise InvalidRequest(
            f"truncate_prompt_tokens ({most}) leaves no token beside the {added} around every text",
            param="truncate_prompt_tokens",
        )
    return most - added


def _framed(ids: list[int], begin: tuple[int, ...], end: tuple[int, ...], most: int | None) -> PoolingTokens:
    added = len(begin) + len(end)
    if most is None or len(ids) + added <= most:
        return PoolingTokens((*begin, *ids, *end))
    room = _room(most, added)
    return PoolingTokens((*begin, *ids[:room], *end), (), len(ids) - room)


class PairPart(NamedTuple):
    """A part of what a pair becomes: the text of this number, or if None the special token `id`; and its type."""

    text: int | None
    id: int
    type: int


def _paired(first: list[int], second: list[int], parts: Sequence[PairPart], most: int | None) -> PoolingTokens:
    """The two texts' token ids with what stands around them, cut to `most` tokens."""
    added = sum(part.text is None for part in parts)
    whole = len(first) + len(second) + added
    if most is not None and whole > most:
        kept = pair_lengths(len(first), len(second), _room(most, added))
        first, second = first[: kept[0]], second[: kept[1]]
    ids, types = list[int](), list[int]()
    for part in parts:
        filled = [part.id] if part.text is None else (first, second)[part.text]
        ids += filled
        types += [part.type] * len(filled)
    return PoolingTokens(tuple(ids), tuple(types), whole - len(ids))


class Tokenizer:
    """A vocabulary and its special tokens. Immutable; `encode` and `decode` may be called from any thread.

    config: tokenizer_config.json. eos: further end-of-text token ids (generation_config.json lists several).
    has_text: whether prompts and answers have a text, which is false of `NoTokenizer` alone.
    """

    has_text = True
    render_chat: Callable[..., str] | None = None
    """`ChatTemplate.render` of the model's template, where it has one."""

    def __init__(
        self, core: tokenizers.Tokenizer, config: Mapping[str, Any] | None = None, *, eos: Iterable[int] = ()
    ) -> None:
        config = {} if config is None else config
        self._config = config
        # Files may have both, as sentence-transformers saves them: nothing is cut without being asked for.
        core.no_truncation()
        core.no_padding()
        _declare(core, config.get("added_tokens_decoder") or {})
        self._core = core
        added = core.get_added_tokens_decoder()
        self.special: frozenset[int] = frozenset(i for i, token in added.items() if token.special)
        self.tokens: dict[str, str] = _named(config)
        """The special tokens by the names that chat templates use: `bos_token`, `eos_token` and so on."""
        self.bos: int | None = self._id("bos_token")
        self.eos: frozenset[int] = frozenset(eos) | {i for i in [self._id("eos_token")] if i is not None}
        self.vocab_size: int = core.get_vocab_size(with_added_tokens=True)
        self._begin, self._end = self._frame(config)
        self._rule = rule_of(core)
        if self._rule:
            names = {i: token.content for i, token in added.items()}
            self._shown = Pieces(core, self._rule, names, frozenset())
            self._hidden = Pieces(core, self._rule, names, self.special)
        self.infill = find_infill(self.id_of)
        """How it marks a gap between two texts; None if it does not."""
        spaced = self._rule is not None and b"".join(map(self._shown.__getitem__, self._encode("a"))).startswith(b" ")
        # Where a space is put before a text, it goes before this character, which merges with nothing.
        self._before = "☺" if spaced else ""

    @classmethod
    def from_folder(cls, folder: str | Path) -> Self:
        """Read tokenizer.json, or else another vocabulary (`vocabularies.load_core`), and, where they exist,
        tokenizer_config.json, generation_config.json and config.json.

        Raises InvalidModel naming the file that is missing or broken.
        """
        folder = Path(folder)
        core, config = _read(folder)
        config |= {k: v for k, v in read_json(folder / "tokenizer_config.json").items() if v is not None}
        return cls(core, config, eos=read_eos(folder))

    def encode(self, text: str, *, add_special_tokens: bool = True, suffix: str = "") -> tuple[int, ...]:
        """Token ids of `text`, between the model's begin and end tokens if it has any, unless they are disabled.

        suffix: a text to fill in before. The ids are then the model's prompt for the text between the two, in which
        markers are not read; no end token follows. Raises InvalidRequest where the tokenizer has no markers.
        """
        if suffix:
            ids = self._encode_infill(text, suffix)
            return (*self._begin, *ids) if add_special_tokens else ids
        ids = self._encode(text)
        return (*self._begin, *ids, *self._end) if add_special_tokens else ids

    def encode_inputs(
        self, inputs: Sequence[PoolingText], *, add_special_tokens: bool = True, most: int | None = None
    ) -> list[PoolingTokens]:
        """Texts, and pairs of texts, of which one vector is to be made each.

        most: tokens of an input, from which on its end is left out; of a pair the end of the longer text, or of both.
        Raises InvalidRequest where there is not even room for the tokens around a text.
        """
        if not any(isinstance(one, tuple) for one in inputs):
            texts = [one for one in inputs if isinstance(one, str)]
            frame = (self._begin, self._end) if add_special_tokens else ((), ())
            return [_framed(ids, *frame, most) for ids in self._encode_all(texts)]
        pairs = [one if isinstance(one, tuple) else (one, "") for one in inputs]
        # One query is often paired with many documents: it is encoded once, or long ones would take gigabytes.
        distinct = list(dict.fromkeys(text for pair in pairs for text in pair))
        encoded = dict(zip(distinct, self._encode_all(distinct), strict=True))
        parts = self._pair_parts(special=add_special_tokens)
        return [_paired(encoded[first], encoded[second], parts, most) for first, second in pairs]

    def _encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        try:
            return [one.ids for one in self._core.encode_batch_fast(list(texts), add_special_tokens=False)]
        except TypeError as error:
            raise _not_unicode(texts) from error

    def _pair_parts(self, *, special: bool) -> list[PairPart]:
        """What a pair of texts becomes, by the tokenizer's post-processor on two texts of one token."""
        probe = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
        if self._core.post_processor is not None:
            probe.post_processor = self._core.post_processor
        made = probe.encode("a", "a", add_special_tokens=special)
        return [PairPart(*part) for part in zip(made.sequence_ids, made.ids, made.type_ids, strict=True)]

    def _encode(self, text: str) -> tuple[int, ...]:
        if len(text) >= _LONG:
            return tuple(self._encode_all([text])[0])
        try:
            return tuple(self._core.encode(text, add_special_tokens=False).ids)
        except TypeError as error:
            raise _not_unicode([text]) from error

    def encode_inner(self, text: str) -> tuple[int, ...]:
        """Token ids of a text that goes on from another one: without the space that may be put before a text."""
        return self._encode(self._before + text)[len(self._encode(self._before)) :]

    def _encode_infill(self, prefix: str, suffix: str) -> tuple[int, ...]:
        if self.infill is None:
            raise InvalidRequest(
                "suffix: this model's tokenizer has no markers to fill in between a prompt and a suffix",
                param="suffix",
                code="unsupported_field",
            )
        first, *rest = pieces(prefix, self.infill.written)
        # As in training: a prefix is the beginning of a text, and a suffix is not.
        before = [*self._encode(first), *(id for piece in rest for id in self.encode_inner(piece))]
        after = [id for piece in pieces(suffix, self.infill.written) for id in self.encode_inner(piece)]
        return self.infill.prompt(before, after)

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of `tokens`; ids outside the vocabulary are ignored, and invalid UTF-8 becomes U+FFFD."""
        if self._rule is None:
            return str(self._core.decode(list(tokens), skip_special_tokens=skip_special_tokens))
        pieces = self._hidden if skip_special_tokens else self._shown
        data = b"".join(map(pieces.__getitem__, tokens))
        strip = self._rule.strip
        return data.removeprefix(b" " * min(strip, len(data) - len(data.lstrip(b" ")))).decode("utf-8", "replace")

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **kwargs: Any,
    ) -> str | tuple[int, ...]:
        """A conversation as token ids, or with `tokenize=False` as text. Names and defaults are transformers'.

        kwargs: what the template gets besides. Raises InvalidRequest as `ChatTemplate.render`, and where there is none.
        """
        if self.render_chat is None:
            raise InvalidRequest("this model has no chat template: give one with chat_template=", param="chat_template")
        text = self.render_chat(
            conversation,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=kwargs,
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    @property
    def bos_token_id(self) -> int | None:
        """The id of the token that texts begin with (transformers' name)."""
        return self.bos

    @property
    def eos_token_id(self) -> int | None:
        """The id of the token that texts end with (transformers' name); `eos` has all that end an answer."""
        return self._id("eos_token")

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int | None] | None:
        """The ids of vocabulary entries by their exact names, None where there is none (transformers' name)."""
        return self.id_of(tokens) if isinstance(tokens, str) else [self.id_of(one) for one in tokens]

    def detokenizer(self, *, skip_special_tokens: bool = True, context: Sequence[int] = ()) -> Detokenizer:
        """An incremental decoder of a text that follows `context`, whose leading space is kept."""
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
        """Why this may not be the tokenizer of a model with `size` token ids; empty where it fits.

        Models pad their vocabulary by some percent; tokenizers do not.
        """
        sizes = f"the tokenizer has {self.vocab_size:,} tokens and the model {size:,}"
        if self.vocab_size > size:
            return f"{sizes}: prompts with one of the others are refused; is it this model's tokenizer?"
        if self.vocab_size < _PADDED * size:
            return f"{sizes}: what the model says with the others is lost; is it this model's tokenizer?"
        return ""

    @property
    def exact(self) -> bool:
        """Whether a text is the concatenation of its tokens' bytes."""
        return self._rule is not None

    def to_json(self) -> str:
        """tokenizer.json with the tokens that tokenizer_config.json adds, for other libraries."""
        return str(self._core.to_str())

    def info(self) -> dict[str, Any]:
        """tokenizer_config.json as transformers shows it: tokens as their text, without names of files."""
        shown = {name: _texts(value) for name, value in self._config.items() if not name.endswith("_file")}
        return {"tokenizer_class": "PreTrainedTokenizerFast", **shown}

    def id_of(self, name: str) -> int | None:
        """The id of a vocabulary entry by its exact name."""
        return self._core.token_to_id(name)

    @property
    def added(self) -> frozenset[str]:
        """The texts of the tokens that were added to the vocabulary, special ones among them."""
        return frozenset(token.content for token in self._core.get_added_tokens_decoder().values())

    def _id(self, role: str) -> int | None:
        return self._core.token_to_id(self.tokens[role]) if role in self.tokens else None

    def _frame(self, config: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The tokens before and after every text: the post-processor's, unless tokenizer_config overrides them."""
        framed = self._core.encode("a").ids
        bare = self._core.encode("a", add_special_tokens=False).ids
        at = next((i for i in range(len(framed)) if framed[i : i + len(bare)] == bare), 0) if bare else 0
        begin = _with_token(tuple(framed[:at]), self.bos, config.get("add_bos_token"))
        end = tuple(framed[at + len(bare) :])
        return begin, _with_token(end, self._id("eos_token"), config.get("add_eos_token"))


def _not_unicode(texts: Iterable[str]) -> InvalidRequest:
    """What is wrong with texts that the library does not take: names of files and arguments of commands may have half
    of a surrogate pair in place of a byte that is no UTF-8."""
    bad = next((text for text in texts if not _is_unicode(text)), "")
    return InvalidRequest(
        f"the text {bad[:40]!r} has a surrogate, which is no character: read it with errors='replace'"
    )


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_eos(folder: Path) -> list[int]:
    """The end-of-text token ids of generation_config.json, or else of config.json. Raises InvalidModel."""
    generation = read_json(folder / "generation_config.json")
    return _ids(generation.get("eos_token_id", read_json(folder / "config.json").get("eos_token_id")))


def _read(folder: Path) -> Read:
    path = folder / "tokenizer.json"
    if path.is_file():
        try:
            return tokenizers.Tokenizer.from_file(str(path)), {}
        except Exception as error:  # the library raises bare Exception
            why = instead(path, "a tokenizer")
            raise InvalidModel(why if ":" in why else f"{path} cannot be read: {error}") from error
    found = load_core(folder)
    if found is None:
        raise InvalidModel(
            f"no tokenizer.json in {folder}, nor tokenizer.model, vocab.json with merges.txt, encoder.json with "
            f"vocab.bpe, or *.tiktoken: {INSTEAD}"
        )
    return found


def read_json(path: Path) -> dict[str, Any]:
    """An optional JSON object: empty when there is no file. Raises InvalidModel when it is none."""
    return _read_as(path, dict, "object")


def read_json_list(path: Path) -> list[Any]:
    """An optional JSON list: empty when there is no file. Raises InvalidModel when it is none."""
    return _read_as(path, list, "list")


def _read_as(path: Path, kind: type[Json], name: str) -> Json:
    if not path.is_file():
        return kind()
    try:
        value = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidModel(f"{path} is not JSON: {error}") from error
    if not isinstance(value, kind):
        raise InvalidModel(f"{path} must hold a JSON {name}, not {type(value).__name__}")
    return value


def _with_token(frame: tuple[int, ...], token: int | None, wanted: bool | None) -> tuple[int, ...]:
    if token is None or wanted is None or wanted == (token in frame):
        return frame
    return (token,) if wanted else tuple(t for t in frame if t != token)


def _ids(eos: Any) -> list[int]:
    found = [eos] if isinstance(eos, int) else eos or []
    if not isinstance(found, list) or not all(type(id) is int for id in found):
        raise InvalidModel(f"generation_config.json or config.json: eos_token_id must be token ids, not {eos!r}")
    return found


def _named(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and the like; older files have an object with a `content` for each."""
    named = {}
    for role, value in config.items():
        if role.endswith("_token") and not role.startswith("add_"):
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                named[role] = content
    return named


def _texts(value: Any) -> Any:
    """The value with the text of each token in place of its description."""
    if isinstance(value, Mapping):
        return value["content"] if "content" in value else {key: _texts(one) for key, one in value.items()}
    return [_texts(one) for one in value] if isinstance(value, list) else value


def _declare(core: tokenizers.Tokenizer, declared: Mapping[str, Mapping[str, Any]]) -> None:
    """Add the tokens that only tokenizer_config.json has. Raises InvalidModel if they would get other ids."""
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


GENERATION_FIELDS: Mapping[str, str] = {
    **{each.name: each.name for each in NUMERIC_PARAMETERS if each.in_checkpoints},
    "max_new_tokens": "max_tokens",
}
"""The field of SamplingParams for each field of generation_config.json."""


def sampling_defaults(folder: str | Path) -> dict[str, Any]:
    """The fields of SamplingParams that generation_config.json sets.

    Raises InvalidModel for values that no request may have.
    """
    config = read_json(Path(folder) / "generation_config.json")
    known = {name: config[name] for name in GENERATION_FIELDS if config.get(name) is not None}
    try:
        return as_sampling(known)
    except InvalidRequest as error:
        raise InvalidModel(f"generation_config.json: {error}") from error


def as_sampling(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of generation_config.json, of GENERATION_FIELDS, as fields of SamplingParams.

    Raises InvalidRequest for values that no request may have.
    """
    found = {GENERATION_FIELDS[name]: value for name, value in config.items()}
    try:
        SamplingParams(**found)
    except TypeError as error:
        raise InvalidRequest(str(error)) from error
    return found
