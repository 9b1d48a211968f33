"""Request types, strictly typed, and `parse`, which turns a body into one or names the field that is wrong."""

from __future__ import annotations

import codecs
import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec import Struct

from quire.errors import InvalidRequest
from quire.server import fields
from quire.server.limits import Limits, check_depth
from quire.types import NUMERIC_PARAMETERS

T = TypeVar("T", bound=Struct)

# Text, token ids, or a list of either: the types of items are checked by `prompts.prompts`.
Prompt = str | list[Any]


class StreamOptions(Struct, kw_only=True):
    """OpenAI's `stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class UsageOptions(Struct, kw_only=True):
    """OpenRouter's `usage`: whether a stream ends with it. Other answers always have it."""

    include: bool | None = None


class JsonSchema(Struct, kw_only=True):
    """`json_schema` of a response_format. Every schema is obeyed strictly."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(Struct, kw_only=True):
    """OpenAI's; some clients put a bare `schema` beside the type."""

    type: str
    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | None = None


def response_format(given: Any, where: str) -> ResponseFormat:
    """The format of another API's field: `text.format` of Responses, `output_config.format` of Messages.

    where: the field. Raises InvalidRequest naming it.
    """
    if not isinstance(given, dict) or not isinstance(given.get("type"), str):
        raise InvalidRequest(f"{where} must be an object with a type", param=where)
    kept = fields.check(given, ("type", "name", "description", "schema", "strict"), where=f"{where}.")
    if not isinstance(schema := kept.get("schema"), dict | None):
        raise InvalidRequest(f"{where}.schema must be a JSON schema", param=where)
    if kept["type"] != "json_schema":
        return ResponseFormat(type=kept["type"])
    return ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=schema))


class Structure(Struct, kw_only=True):
    """vLLM's `structured_outputs`."""

    json: str | dict[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None


class _ModelField(Struct, kw_only=True):
    model: str | None = None


if TYPE_CHECKING:
    _NumericFields = _ModelField
else:
    # Declared once, in SamplingParams; read by name in `params.sampling_params`.
    _NumericFields = msgspec.defstruct(
        "_NumericFields",
        [(each.name, f"{each.annotation} | None", None) for each in NUMERIC_PARAMETERS if each.in_requests],
        bases=(_ModelField,),
        kw_only=True,
    )


class Sampling(_NumericFields, kw_only=True):
    """Fields of every endpoint that generates, the numbers of SamplingParams first. None, or not sent, means the
    default."""

    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    bad_words: list[str] | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout: float | None = None
    cache_control: dict[str, Any] | None = None
    return_timings: bool | None = None
    return_cache_details: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: Structure | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None


class Answers(Sampling, kw_only=True):
    """Fields that completions and chat completions share besides those for sampling."""

    n: int | None = None
    max_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    usage: UsageOptions | None = None
    echo: bool | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_sampling_params: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None


class CompletionRequest(Answers, kw_only=True):
    """`POST /v1/completions`."""

    prompt: Prompt
    suffix: str = ""
    logprobs: int | None = None


class ChatRequest(Answers, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    web_search_options: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    thinking: dict[str, Any] | None = None
    thinking_token_budget: int | None = None
    reasoning: dict[str, Any] | None = None
    reasoning_effort: str | None = None


def shared_fields(request: Struct) -> dict[str, Any]:
    """The fields of a request that chat requests have too, by the same name."""
    return {name: getattr(request, name) for name in request.__struct_fields__ if name in ChatRequest.__struct_fields__}


class GenerateRequest(Sampling, kw_only=True):
    """`POST /generate`: one prompt, and text back. max_new_tokens: another name of max_tokens."""

    prompt: Prompt
    max_tokens: int | None = None
    max_new_tokens: int | None = None
    stream: bool | None = None


class TokenizeRequest(Struct, kw_only=True):
    """`POST /tokenize`: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """`POST /detokenize`."""

    tokens: list[int]
    model: str | None = None


def parse(body: bytes, kind: type[T], limits: Limits) -> T:
    """The request of type `kind` in `body`. Raises InvalidRequest naming the field; NaN and Infinity are not JSON.

    A byte order mark before the JSON, as editors on Windows write it, means nothing (RFC 8259, 8.1).
    """
    body = body.removeprefix(codecs.BOM_UTF8)
    try:
        raw = msgspec.json.decode(body)
    except RecursionError as error:
        why = f"the JSON is nested more than {limits.max_depth} deep: send what is deeper as text"
        raise InvalidRequest(why, code="json_too_deep") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _not_json(body, error) from error
    if not isinstance(raw, dict):
        raise InvalidRequest(f"the body must be a JSON object, not {_name(raw)}", code="invalid_json")
    check_depth(raw, limits)
    kept = fields.check(raw, kind.__struct_fields__)
    _check_within(kept, _WITHIN, "")
    return converted(kept, kind)


def _not_json(body: bytes, error: Exception) -> InvalidRequest:
    """What is wrong with a body that the decoder refuses."""
    if b"\0" in body[:4]:
        return InvalidRequest("the body is UTF-16 or UTF-32: send the JSON as UTF-8", code="invalid_json")
    try:
        body.decode()
    except UnicodeDecodeError as found:
        why = f"the body is not UTF-8: byte {body[found.start]:#04x} at {found.start} begins no character"
        return InvalidRequest(why, code="invalid_json")
    if "out of range" not in str(error):
        return InvalidRequest(f"the body is not JSON: {error}", code="invalid_json")
    name = _out_of_range(body)
    where = "the body" if name is None else name[:64]
    return InvalidRequest(f"{where}: a number is out of range", param=name and name[:64], code="invalid_json")


def _out_of_range(body: bytes) -> str | None:
    """The field with the first number that is too large for a float; None where that cannot be found."""
    huge = object()

    def number(text: str) -> object:
        return huge if math.isinf(float(text)) else None

    try:
        raw = json.loads(body, parse_float=number, parse_int=number)
    except (ValueError, RecursionError):
        return None
    fields = raw.items() if isinstance(raw, dict) else ()
    return next((name for name, value in fields if _holds(value, huge)), None)


def _holds(value: Any, sought: object) -> bool:
    """Whether a value of JSON is, or has within, the very object that is sought."""
    level = [value]
    while level:
        if any(one is sought for one in level):
            return True
        inside = (one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list))
        level = [one for several in inside for one in several]
    return False


def converted(given: Mapping[str, Any], kind: type[T], where: str = "") -> T:
    """`given` as a `kind`. where: path of the object. Raises InvalidRequest naming the field whose type is wrong.

    A number such as 8.0 is the integer 8: clients whose numbers are all floats send whole ones so.
    """
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError:
        pass
    try:
        return msgspec.convert({name: _whole(value) for name, value in given.items()}, kind)
    except msgspec.ValidationError as error:
        raise _named(error, where) from error


def _whole(value: Any) -> Any:
    return int(value) if type(value) is float and abs(value) < 1 << 53 and value.is_integer() else value


# Fields that are objects with fields of their own; `json_schema` is in `response_format`.
_WITHIN: Mapping[str, type[Struct]] = {
    "stream_options": StreamOptions,
    "usage": UsageOptions,
    "structured_outputs": Structure,
    "response_format": ResponseFormat,
    "json_schema": JsonSchema,
}


def _check_within(given: dict[str, Any], names: Iterable[str], where: str) -> None:
    """Replace each object in `given` by its honoured fields. where: path of `given`."""
    for name in names:
        options = given.get(name)
        if isinstance(options, dict):
            path = f"{where}{name}."
            given[name] = options = fields.check(options, _WITHIN[name].__struct_fields__, where=path)
            if name == "response_format":
                _check_within(options, ("json_schema",), path)


_WHERE = re.compile(r"(.*?)(?: - at `(?:key in )?\$\.?(.*)`)?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(\w+)`")


def _named(error: msgspec.ValidationError, path: str) -> InvalidRequest:
    """msgspec's message, after the field's name. path: of the object that has the field."""
    if missing := _MISSING.match(str(error)):
        name = path + missing[1]
        return InvalidRequest(f"{name} is required", param=name, code="missing_field")
    found = _WHERE.fullmatch(str(error))
    what, where = (found[1], found[2] and path + found[2]) if found else (str(error), None)
    what = what[:1].lower() + what[1:].replace("`", "").replace(" | null", "")
    return InvalidRequest(f"{where}: {what}" if where else what, param=where, code="invalid_type")


def _name(value: Any) -> str:
    kinds = {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return kinds.get(type(value), "null")
