"""What the operator has set for requests that do not say: arguments of the chat template, and sampling parameters."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from quire.assembly.tokenizer import json_object
from quire.config import Settings
from quire.errors import InvalidConfig, InvalidRequest, nearest
from quire.tokenization.chat_template import RENDERED, ChatTemplate
from quire.tokenization.tokenizer import GENERATION_FIELDS, as_sampling, read_json, sampling_defaults
from quire.weights.gguf import find_gguf, read_gguf
from quire.weights.gguf_sampling import sampling_of

log = logging.getLogger(__name__)


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
    return {**(recommended(folder) if settings.model.generation_config == "auto" else {}), **chosen}


def recommended(folder: Path) -> dict[str, Any]:
    """What generation_config.json or a GGUF file's metadata says of sampling. Raises InvalidModel."""
    if (file := find_gguf(folder)) is not None:
        return {**sampling_of(file, read_gguf(file).facts), **sampling_defaults(folder)}
    given = read_json(folder / "generation_config.json")
    left = [name for name, off in NOT_READ.items() if given.get(name) not in (None, *off)]
    if left:
        log.warning("generation_config.json: without effect here: %s", ", ".join(left))
    return sampling_defaults(folder)


NOT_READ: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "do_sample": (True,),
        "num_beams": (1,),
        "typical_p": (1,),
        "epsilon_cutoff": (0,),
        "eta_cutoff": (0,),
        "penalty_alpha": (0,),
        "guidance_scale": (1,),
        "encoder_repetition_penalty": (1,),
        "no_repeat_ngram_size": (0,),
        "min_length": (0,),
        "min_new_tokens": (0,),
        "bad_words_ids": ([],),
        "suppress_tokens": ([],),
        "begin_suppress_tokens": ([],),
        "sequence_bias": ([], {}),
        "stop_strings": ([], ""),
        "forced_bos_token_id": (),
        "forced_eos_token_id": (),
        "exponential_decay_length_penalty": (),
    }
)
"""Fields of generation_config.json that transformers samples by and this engine does not, with values that ask for
nothing."""
