"""What the operator has set for requests that do not say: arguments of the chat template, and sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.assembly.tokenizer import json_object
from quire.config import Settings
from quire.errors import InvalidConfig, InvalidRequest, nearest
from quire.tokenization.chat_template import RENDERED, ChatTemplate
from quire.tokenization.tokenizer import GENERATION_FIELDS, as_sampling, sampling_defaults


def template_kwargs(settings: Settings) -> Mapping[str, Any]:
    """What the chat template gets where requests do not say. Raises InvalidConfig for what only a request can say."""
    kwargs = json_object("default_chat_template_kwargs", settings.model.default_chat_template_kwargs)
    for name in kwargs:
        if name in RENDERED:
            raise InvalidConfig(
                f"default_chat_template_kwargs: {name} is for requests to say: leave it out",
                param="default_chat_template_kwargs",
            )
    return kwargs


def check_read(kwargs: Mapping[str, Any], template: ChatTemplate | None) -> None:
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


def sampling(settings: Settings, folder: Path) -> dict[str, Any]:
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
