"""Prompts as a Python caller gives them: text, token ids or messages become token ids, for one model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple, cast

from quire.assembly.text import Text
from quire.checks import token_ids
from quire.errors import InvalidRequest
from quire.multimodal.inputs import ImageInputs, MediaNeeded, NoImages
from quire.parsers.parts import PLAIN, Splitter
from quire.parsers.reasoning import bounded, thought_style, thoughts_ahead, turned_off
from quire.tokenization.no_tokenizer import needs_text
from quire.types import PromptImage, SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, {"prompt": text} or {"prompt_token_ids": ids}; with images, {"multi_modal_data": {"image": [...]}}
beside."""

Message = Mapping[str, Any]


class ReadPrompt(NamedTuple):
    """A prompt's text, None if it has none, its token ids, and its images."""

    text: str | None
    ids: tuple[int, ...]
    images: tuple[PromptImage, ...] = ()


class PromptReader:
    """Turns prompts into token ids. May be used from any thread; methods raise InvalidRequest naming the argument.

    images: how images are read. fetch: reads files of other servers, see `MediaFetcher.fetch`.
    """

    def __init__(
        self,
        text: Text,
        images: ImageInputs | None = None,
        fetch: Callable[[Mapping[str, str]], Mapping[str, bytes]] | None = None,
    ) -> None:
        self._text = text
        self._images: ImageInputs = NoImages() if images is None else images
        self._fetch = fetch

    def sampling(self, params: SamplingParams | None) -> SamplingParams:
        """A copy of a caller's parameters, which may change while the request runs; those that the model's
        generation_config.json recommends where there are none."""
        return copy(params) if params else SamplingParams(**self._text.defaults)

    def read(self, prompts: Prompt | Sequence[Prompt]) -> list[ReadPrompt]:
        """One prompt, or a list of them, each `encoded`."""
        return [self.encoded(prompt) for prompt in listed(prompts)]

    def encoded(self, prompt: Prompt, suffix: str = "") -> ReadPrompt:
        """A prompt's text, None if it has none, its token ids and its images.

        suffix: a text to fill in before; with one, a prompt is text, and the ids are not those of it.
        """
        if suffix:
            text = prompt.get("prompt") if isinstance(prompt, Mapping) and set(prompt) == {"prompt"} else prompt
            if not isinstance(text, str):
                raise InvalidRequest("suffix: with a suffix, a prompt must be text", param="suffix")
            return ReadPrompt(None, self._text.tokenizer.encode(text, suffix=suffix))
        if isinstance(prompt, Mapping):
            known = {"prompt", "prompt_token_ids"} & set(prompt)
            if not known or len(prompt) > len(known) + ("multi_modal_data" in prompt):
                raise InvalidRequest(
                    "a prompt has 'prompt' or 'prompt_token_ids', perhaps 'multi_modal_data', and nothing else, not "
                    f"{sorted(prompt)}",
                    param="prompts",
                )
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            _check_prompt("a prompt", text or "")
            return self._with_images(text, ids, prompt.get("multi_modal_data"))
        if isinstance(prompt, str):
            return ReadPrompt(prompt, self._text.tokenizer.encode(prompt))
        _check_prompt("a prompt", prompt)
        return ReadPrompt(None, token_ids("prompts", prompt))

    def _with_images(self, text: str | None, ids: object, data: object) -> ReadPrompt:
        """A prompt whose images are beside it, in the order of their places."""
        images = self._images.load(images_of(data), "multi_modal_data")
        if ids is None:
            encoded = self._text.tokenizer.encode(self._images.marked(text or "", images))
        else:
            encoded = token_ids("prompt_token_ids", ids)
        return ReadPrompt(text, *self._images.place(encoded, images))

    def filling(self, params: SamplingParams, suffix: str) -> SamplingParams:
        """`params` for an answer before `suffix`: it also ends at the tokens that end the middle."""
        infill = self._text.tokenizer.infill
        if not suffix or infill is None or params.ignore_eos:
            return params
        return replace(params, stop_token_ids=(*params.stop_token_ids, *infill.ends))

    def rendered(self, messages: Sequence[Message], **rendering: Any) -> ReadPrompt:
        """A conversation's text by the model's chat template, its token ids and images. rendering: of
        `ChatTemplate`."""
        if not self._text.tokenizer.has_text:
            raise needs_text("messages")
        if self._text.template is None:
            raise InvalidRequest(
                "this model has no chat template: give one with --chat-template (in Python: chat_template=)",
                param="messages",
                code="no_chat_template",
            )
        _check_mappings("messages", messages, "role", str)
        _check_mappings("tools", rendering.get("tools") or (), "function", Mapping)
        shown, images = self._read_images(messages)
        text = self._images.marked(self._text.template.render(shown, **rendering), images)
        ids = self._text.tokenizer.encode(text, add_special_tokens=False)
        return ReadPrompt(text, *self._images.place(ids, images))

    def _read_images(self, messages: Sequence[Message]) -> tuple[Sequence[Message], tuple[PromptImage, ...]]:
        own = self._images.begin()
        try:
            return own.read(messages)
        except MediaNeeded as needed:
            assert self._fetch is not None
            return own.begin(self._fetch(needed.urls)).read(messages)

    def splitter(self, text: str, params: SamplingParams) -> tuple[Splitter, SamplingParams]:
        """What splits an answer to a conversation rendered as `text` into reasoning and content, and `params` with
        which the marks between them are there to be seen."""
        parser = self._text.reasoning_parser
        style = thought_style(parser)
        if style is None:
            return PLAIN, params
        inside = thoughts_ahead(parser, text) == "open"
        return style.splitter(inside=inside), replace(params, skip_special_tokens=False) if style.special else params

    def bound(
        self, text: str, begun: str, params: SamplingParams, kwargs: Mapping[str, Any] | None = None
    ) -> SamplingParams:
        """`params` for a conversation rendered as `text`: a structure binds what comes after the thoughts,
        which are bounded too. begun: what the answer goes on with. kwargs: chat_template_kwargs of the call."""
        template = self._text.template
        off = turned_off({} if template is None else template.kwargs, kwargs)
        parser, form = self._text.reasoning_parser, params.structured_outputs
        ahead = thoughts_ahead(parser, text, begun, off=off)
        style = thought_style(parser)
        form = form and replace(form, begin="" if style is None else style.answer)
        return replace(params, structured_outputs=bounded(form, parser, ahead, params.thinking_token_budget))


def images_of(data: object) -> Sequence[Any]:
    """The images of `multi_modal_data`: {"image": one of pillow, or a list of them}. Raises InvalidRequest."""
    if data is None:
        return ()
    if not isinstance(data, Mapping) or set(data) - {"image"}:
        raise InvalidRequest('multi_modal_data must look like {"image": image}', param="multi_modal_data")
    found = data.get("image")
    return () if found is None else list(found) if isinstance(found, list | tuple) else [found]


def listed(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """One prompt, or a list of them, as a list. Raises InvalidRequest."""
    _check_prompt("prompts", prompts)
    alone = isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], int))
    return cast("Sequence[Prompt]", [prompts] if alone else prompts)


def suffixes(given: object, prompts: int) -> list[str]:
    """The suffix of each prompt: one for all, or a list of them. Raises InvalidRequest."""
    each = [given] * prompts if isinstance(given, str) else check_list("suffix", given)
    texts = [one for one in each if isinstance(one, str)]
    if len(texts) < len(each):
        raise InvalidRequest("suffix must be text, or a list of texts", param="suffix")
    if len(each) != prompts:
        raise InvalidRequest(f"there are {prompts} prompts but {len(each)} suffixes", param="suffix")
    return texts


def check_list(name: str, given: object) -> Sequence[object]:
    """`given`, if it is a list. Raises InvalidRequest."""
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise InvalidRequest(f"{name} must be a list, not {given!r}"[:200], param=name)
    return given


def check_continuation(*, add: bool, go_on: bool) -> None:
    """Raise InvalidRequest where a conversation is both to be answered and to be continued."""
    if add and go_on:
        raise InvalidRequest(
            "continue_final_message continues the last message, add_generation_prompt starts another: set one",
            param="continue_final_message",
        )


def last_text(messages: Sequence[Message]) -> str:
    """The text of the last message, which an answer may go on with."""
    content = messages[-1].get("content") if messages else None
    return content if isinstance(content, str) else ""


def _check_prompt(what: str, given: object) -> None:
    if not isinstance(given, Sequence | Mapping) or isinstance(given, bytes):
        kinds = "text, token ids, {'prompt': text}, {'prompt_token_ids': ids}, or a list of these"
        raise InvalidRequest(f"{what} must be {kinds}, not {type(given).__name__}", param="prompts")


def _check_mappings(name: str, given: object, key: str, kind: type) -> None:
    for i, one in enumerate(check_list(name, given)):
        if not isinstance(one, Mapping) or not isinstance(one.get(key), kind):
            raise InvalidRequest(f"{name}[{i}] must be a mapping with a {key}, not {one!r}"[:200], param=name)
