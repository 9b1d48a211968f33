"""A model folder's tokenizer, chat template, parsers and sampling defaults, from settings. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from quire.assembly.place import place_of
from quire.assembly.request_defaults import check_read, sampling, template_kwargs
from quire.assembly.tokenizer import pooler_of, read_tokenizer, tokenizer_folder
from quire.config import Settings
from quire.errors import InvalidModel
from quire.parsers.reasoning import parser_of
from quire.parsers.suffix import named
from quire.parsers.tools.styles import STYLES, sign_of, style_of
from quire.tokenization.chat_template import ChatTemplate
from quire.tokenization.tokenizer import Tokenizer
from quire.weights.locate import check
from quire.weights.pooling import PoolerConfig


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
    try:
        tokenizer, own_template = read_tokenizer(settings)
    except InvalidModel:
        _check_architecture(settings, folder)
        raise
    tools, reasoning = model.tool_call_parser, model.reasoning_parser
    style = None if tools == "auto" else STYLES[tools]
    template, kwargs = None, template_kwargs(settings)
    if tokenizer.has_text:
        template = ChatTemplate.from_folder(
            tokenizer_folder(settings),
            tokenizer.tokens,
            override=model.chat_template,
            style=style,
            default=own_template,
            kwargs=kwargs,
        )
    check_read(kwargs, template)
    if template is not None:
        template.try_out()
        tokenizer.render_chat = template.render
    source, tools_source = (None, None) if template is None else (template.source, template.tools_source)
    return Text(
        folder,
        tokenizer,
        template,
        sampling(settings, folder),
        named((style or style_of(tools_source)).name, tokenizer.added),
        named(parser_of(source) if reasoning == "auto" else reasoning, tokenizer.added),
        "as set" if style else "by the chat template" if sign_of(tools_source) else "the chat template names no format",
        pooler_of(settings),
    )


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
