"""A model folder's tokenizer, chat template, parsers and sampling defaults, from settings. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, cast

from quire.assembly.place import place_of
from quire.config import Settings
from quire.errors import InvalidConfig, InvalidModel, InvalidRequest, nearest
from quire.parsers.reasoning import parser_of
from quire.parsers.suffix import named
from quire.parsers.tools.styles import STYLES, sign_of, style_of
from quire.tokenization.chat_template import RENDERED, ChatTemplate
from quire.tokenization.no_tokenizer import NoTokenizer
from quire.tokenization.tokenizer import GENERATION_FIELDS, Tokenizer, as_sampling, read_eos, sampling_defaults
from quire.tokenization.vocabularies import ends_of, from_gguf
from quire.weights.gguf import find_gguf, read_gguf
from quire.weights.locate import check, locate
from quire.weights.pooling import PoolerConfig, read_pooler


class Text(NamedTuple):
    """How a model's text becomes tokens and back. template: None if it has none. defaults: sampling parameters of
    requests that do not say, from generation_config.json and options.

    tool_parser, reasoning_parser: as set, otherwise detected from the template. tools_from: how the first was chosen.
    pooler: how prompts become vectors.
    """

    folder: Path
    tokenizer: Tokenizer
    template: ChatTemplate | None
    defaults: Mapping[str, Any]
    tool_parser: str
    reasoning_parser: str
    tools_from: str
    pooler: PoolerConfig

    def info(self) -> dict[str, Any]:
        """What `/tokenizer_info` answers: the tokenizer's configuration, with the chat template that is used."""
        template = {} if self.template is None else {"chat_template": self.template.source}
        return {**self.tokenizer.info(), **template}


def build_text(settings: Settings) -> Text:
    """Read the folders of tokenizer and model, or a GGUF file.

    Raises InvalidModel, also for a broken or hostile template: better now than at the first request.
    """
    model = settings.model
    folder = place_of(settings)
    check(folder)
    tokenizer_folder = _tokenizer_folder(settings)
    try:
        tokenizer, own_template = _read(settings)
    except InvalidModel:
        _check_architecture(settings, folder)
        raise
    tools, reasoning = model.tool_call_parser, model.reasoning_parser
    style = None if tools == "auto" else STYLES[tools]
    template, kwargs = None, _template_kwargs(settings)
    if tokenizer.has_text:
        template = ChatTemplate.from_folder(
            tokenizer_folder,
            tokenizer.tokens,
            override=model.chat_template,
            style=style,
            default=own_template,
            kwargs=kwargs,
        )
    _check_read(kwargs, template)
    if template is not None:
        template.try_out()
        tokenizer.render_chat = template.render
    source = None if template is None else template.source
    return Text(
        folder,
        tokenizer,
        template,
        _sampling(settings, folder),
        named((style or style_of(source)).name, tokenizer.added),
        named(parser_of(source) if reasoning == "auto" else reasoning, tokenizer.added),
        "as set" if style else "by the chat template" if sign_of(source) else "the chat template names no format",
        pooler_of(settings),
    )


def _template_kwargs(settings: Settings) -> Mapping[str, Any]:
    """What the chat template gets where requests do not say. Raises InvalidConfig for what only a request can say."""
    kwargs = json_object("default_chat_template_kwargs", settings.model.default_chat_template_kwargs)
    for name in kwargs:
        if name in RENDERED:
            raise InvalidConfig(
                f"default_chat_template_kwargs: {name} is for requests to say: leave it out",
                param="default_chat_template_kwargs",
            )
    return kwargs


def _check_read(kwargs: Mapping[str, Any], template: ChatTemplate | None) -> None:
    """Raise InvalidConfig for an argument that would have no effect, since no template reads it."""
    if kwargs and template is None:
        raise InvalidConfig(
            "default_chat_template_kwargs: this model has no chat template: name one with --chat-template",
            param="default_chat_template_kwargs",
        )
    for name in kwargs:
        if template is not None and name not in template.arguments:
            raise InvalidConfig(
                f"default_chat_template_kwargs: this model's chat template does not read {name!r}."
                f"{nearest(name, template.arguments - RENDERED)}",
                param="default_chat_template_kwargs",
            )


def _sampling(settings: Settings, folder: Path) -> dict[str, Any]:
    """Sampling parameters of requests that do not say. Raises InvalidConfig and InvalidModel."""
    option = "override_generation_config"
    changed = json_object(option, settings.model.override_generation_config)
    for name in changed:
        if name not in GENERATION_FIELDS:
            known = ", ".join(GENERATION_FIELDS)
            hint = nearest(name, GENERATION_FIELDS)
            raise InvalidConfig(f"{option}: {name!r} is none of {known}.{hint}", param=option)
    try:
        chosen = as_sampling(changed)
    except InvalidRequest as error:
        raise InvalidConfig(f"{option}: {error}", param=option) from error
    of_model = sampling_defaults(folder) if settings.model.generation_config == "auto" else {}
    return {**of_model, **chosen}


def hf_overrides(settings: Settings) -> Mapping[str, Any]:
    """Fields in place of config.json's. Raises InvalidConfig for text that is no JSON object."""
    return json_object("hf_overrides", settings.model.hf_overrides)


def pooler_of(settings: Settings) -> PoolerConfig:
    """How the model's prompts become vectors. Raises InvalidConfig and InvalidModel."""
    model = settings.model
    found = read_pooler(
        place_of(settings),
        runner=model.runner,
        convert=model.convert,
        overrides=hf_overrides(settings),
        options=json_object("pooler_config", model.pooler_config),
    )
    return replace(found, by_chat=bool(found.classes) and model.chat_template is not None)


def require_text(settings: Settings, command: str) -> None:
    """Raise InvalidModel where `command` is for models for text and this one only pools."""
    if not pooler_of(settings).generates:
        raise InvalidModel(
            f"`{command}` is for models that generate text, and {settings.model.model} is a pooling model: "
            "`quire check` compares what it gives alone and in a batch"
        )


def require_tokenizer(settings: Settings, command: str) -> None:
    """Raise InvalidConfig where `command` reads and writes text, and no tokenizer is to be read."""
    if settings.model.skip_tokenizer_init:
        raise InvalidConfig(
            f"`{command}` reads and writes text, for which skip_tokenizer_init leaves no tokenizer: leave it out, or "
            "send token ids to /v1/completions of `quire serve`, or to LLM.generate",
            param="skip_tokenizer_init",
        )


def word_ids(words: tuple[str, str], tokenizer: Tokenizer) -> tuple[int, int]:
    """The token ids of two words. Raises InvalidConfig for one that is no token."""
    ids = [tokenizer.id_of(word) for word in words]
    for word, id in zip(words, ids, strict=True):
        if id is None:
            raise InvalidConfig(
                f"hf_overrides: classifier_from_token: {word!r} is no token of this model", param="hf_overrides"
            )
    return cast("tuple[int, int]", tuple(ids))


def json_object(name: str, text: str | None) -> Mapping[str, Any]:
    """An option that is a JSON object; empty for None. Raises InvalidConfig."""
    try:
        value = {} if text is None else json.loads(text)
    except ValueError as error:
        raise InvalidConfig(f"{name} is not JSON ({error})", param=name) from error
    if not isinstance(value, dict):
        raise InvalidConfig(f"{name} must be a JSON object, not {text!r:.80}", param=name)
    return value


def _check_architecture(settings: Settings, folder: Path) -> None:
    """Raise InvalidModel for an unknown architecture, which is the better message where a tokenizer is missing too.

    The registry of architectures needs torch, so it is imported only when the start has failed.
    """
    kind = settings.executor.executor
    if kind == "auto":
        kind = import_module("quire.assembly.engine").choose_executor(settings)
    if kind == "local":
        fields = import_module("quire.weights.files").read_config(folder)
        import_module("quire.models.registry").read_spec(fields)


def build_tokenizer(settings: Settings) -> Tokenizer:
    """The tokenizer alone. Raises InvalidModel."""
    return _read(settings)[0]


def _read(settings: Settings) -> tuple[Tokenizer, str | None]:
    """The tokenizer, and a GGUF file's chat template. Of a folder that is named for its tokenizer, tokenizer.json comes
    before GGUF files, of which there may be several."""
    folder = _tokenizer_folder(settings)
    named = settings.model.tokenizer is not None and (folder / "tokenizer.json").is_file()
    file = None if named else find_gguf(folder)
    facts = {} if file is None else read_gguf(file).facts
    if settings.model.skip_tokenizer_init:
        return NoTokenizer(read_eos(folder) if file is None else ends_of(facts)), None
    if file is None:
        return Tokenizer.from_folder(folder), None
    core, config = from_gguf(facts)
    return Tokenizer(core, config, eos=ends_of(facts)), config.get("chat_template")


def _tokenizer_folder(settings: Settings) -> Path:
    """The folder of the tokenizer: the model's unless `tokenizer` names another."""
    model = settings.model
    if model.tokenizer is not None:
        return locate(model.tokenizer, cache=model.download_dir)
    return place_of(settings)
