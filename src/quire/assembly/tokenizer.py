"""A model's tokenizer and pooler from settings: all that an engine reads of text. Needs no torch and no templates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from quire.assembly.place import place_of
from quire.config import Settings
from quire.errors import InvalidConfig, InvalidModel
from quire.tokenization.no_tokenizer import NoTokenizer
from quire.tokenization.tokenizer import Tokenizer, read_eos
from quire.tokenization.vocabularies import ends_of, from_gguf
from quire.weights.gguf import find_gguf, read_gguf
from quire.weights.locate import locate
from quire.weights.pooling import PoolerConfig, read_pooler


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


def build_tokenizer(settings: Settings) -> Tokenizer:
    """The tokenizer alone. Raises InvalidModel."""
    return read_tokenizer(settings)[0]


def read_tokenizer(settings: Settings) -> tuple[Tokenizer, Any]:
    """The tokenizer, and a GGUF file's chat templates, as tokenizer_config.json has several. Of a folder that is named
    for its tokenizer, tokenizer.json comes before GGUF files, of which there may be several."""
    folder = tokenizer_folder(settings)
    named = settings.model.tokenizer is not None and (folder / "tokenizer.json").is_file()
    file = None if named else find_gguf(folder)
    facts = {} if file is None else read_gguf(file).facts
    if settings.model.skip_tokenizer_init:
        return NoTokenizer(read_eos(folder) if file is None else ends_of(facts)), None
    if file is None:
        return Tokenizer.from_folder(folder), None
    core, config = from_gguf(facts)
    return Tokenizer(core, config, eos=ends_of(facts)), config.get("chat_template")


def tokenizer_folder(settings: Settings) -> Path:
    """The folder of the tokenizer: the model's unless `tokenizer` names another."""
    model = settings.model
    if model.tokenizer is not None:
        return locate(model.tokenizer, cache=model.download_dir)
    return place_of(settings)
