"""What the rim needs of a model folder: tokenizer, chat template, sampling defaults. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from quire.config import Settings
from quire.errors import InvalidModel
from quire.parsers.reasoning import ReasoningParser, parser_of
from quire.parsers.tools.styles import STYLES, ToolParser, style_of
from quire.tokenization.chat_template import ChatTemplate
from quire.tokenization.tokenizer import Tokenizer, sampling_defaults
from quire.tokenization.vocabularies import ends_of, from_gguf
from quire.weights.gguf import find_gguf, read_gguf
from quire.weights.locate import check, locate


class Text(NamedTuple):
    """Text in, text out. template: None when the model has none. defaults: of generation_config.json.

    tool_parser, reasoning_parser: as set, or else as the template has it.
    """

    folder: Path
    tokenizer: Tokenizer
    template: ChatTemplate | None
    defaults: Mapping[str, Any]
    tool_parser: ToolParser
    reasoning_parser: ReasoningParser


def build_text(settings: Settings) -> Text:
    """Read the tokenizer's and the model's folder, or GGUF file.

    Raises InvalidModel, for a template too that is broken or hostile: better now than at the first request.
    """
    model = settings.model
    folder = locate(model.model, revision=model.revision, cache=model.download_dir)
    check(folder)
    spoken = _spoken(settings)
    try:
        tokenizer, brought = _read(spoken)
    except InvalidModel:
        _judge(settings, folder)
        raise
    tools, thoughts = model.tool_call_parser, model.reasoning_parser
    chosen = None if tools == "auto" else STYLES[tools]
    template = ChatTemplate.from_folder(
        spoken, tokenizer.tokens, override=model.chat_template, style=chosen, default=brought
    )
    if template is not None:
        template.try_out()
    source = None if template is None else template.source
    return Text(
        folder,
        tokenizer,
        template,
        sampling_defaults(folder),
        (chosen or style_of(source)).name,
        parser_of(source) if thoughts == "auto" else thoughts,
    )


def _judge(settings: Settings, folder: Path) -> None:
    """Raises InvalidModel where the model is none that we know, for no tokenizer would help it.

    Who knows that needs torch, without which this side does otherwise: asked only where nothing can start anyway.
    """
    if settings.executor.executor == "local":
        fields = import_module("quire.weights.files").read_config(folder)
        import_module("quire.models.registry").read_spec(fields)


def build_tokenizer(settings: Settings) -> Tokenizer:
    """The tokenizer alone. Raises InvalidModel."""
    return _read(_spoken(settings))[0]


def _read(spoken: Path) -> tuple[Tokenizer, str | None]:
    """The tokenizer, and the template a GGUF file brings."""
    file = find_gguf(spoken)
    if file is None:
        return Tokenizer.from_folder(spoken), None
    facts = read_gguf(file).facts
    core, config = from_gguf(facts)
    return Tokenizer(core, config, eos=ends_of(facts)), config.get("chat_template")


def _spoken(settings: Settings) -> Path:
    """The folder of the tokenizer: the model's own, unless another was named."""
    model = settings.model
    if model.tokenizer is not None:
        return locate(model.tokenizer, cache=model.download_dir)
    return locate(model.model, revision=model.revision, cache=model.download_dir)
