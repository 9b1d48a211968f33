"""The many spellings of structured output, as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from quire.errors import InvalidRequest, nearest
from quire.server.schemas import ResponseFormat, Sampling, Structure
from quire.types import StructuredOutputsParams


def structure(asked: Sampling) -> StructuredOutputsParams | None:
    """What the answer must look like, if anything is asked. Raises InvalidRequest naming the field."""
    given = [name for name in _SPELLINGS if _asks(getattr(asked, name))]
    if len(given) > 1:
        raise InvalidRequest(f"{given[0]} and {given[1]} exclude each other: send one", param=given[1])
    if asked.guided_whitespace_pattern is not None and given != ["guided_json"]:
        raise InvalidRequest("guided_whitespace_pattern needs guided_json", param="guided_whitespace_pattern")
    return _SPELLINGS[given[0]](asked) if given else None


def _asks(value: Any) -> bool:
    return value is not None and not (isinstance(value, ResponseFormat) and value.type == "text")


def _response_format(asked: Sampling) -> StructuredOutputsParams:
    form, param = asked.response_format, "response_format"
    assert form is not None
    inner = form.json_schema.schema if form.json_schema is not None else None
    if form.type not in ("json_object", "json_schema"):
        hint = nearest(form.type[:64], ("text", "json_object", "json_schema"))
        raise InvalidRequest(f"{param}.type must be text, json_object or json_schema.{hint}", param=f"{param}.type")
    if inner is not None and form.schema is not None:
        raise InvalidRequest(f"{param}: the schema is given twice", param=param)
    schema = form.schema if inner is None else inner
    if schema is not None:
        return StructuredOutputsParams(json=schema, param=param)
    if form.type == "json_schema":
        raise InvalidRequest(f"{param}.json_schema.schema is required", param=f"{param}.json_schema.schema")
    return StructuredOutputsParams(json_object=True, param=param)


def _structured_outputs(asked: Sampling) -> StructuredOutputsParams:
    one = asked.structured_outputs
    assert isinstance(one, Structure)
    return StructuredOutputsParams(
        json=one.json,
        json_object=one.json_object,
        regex=one.regex,
        choice=None if one.choice is None else tuple(one.choice),
        grammar=one.grammar,
        whitespace_pattern=one.whitespace_pattern,
        disable_any_whitespace=bool(one.disable_any_whitespace),
    )


def _guided(kind: str) -> Callable[[Sampling], StructuredOutputsParams]:
    name = f"guided_{kind}"

    def make(asked: Sampling) -> StructuredOutputsParams:
        value = getattr(asked, name)
        one: dict[str, Any] = {kind: tuple(value) if isinstance(value, list) else value}
        return StructuredOutputsParams(**one, whitespace_pattern=asked.guided_whitespace_pattern, param=name)

    return make


_SPELLINGS: Mapping[str, Callable[[Sampling], StructuredOutputsParams]] = MappingProxyType(
    {
        "response_format": _response_format,
        "structured_outputs": _structured_outputs,
        **{f"guided_{kind}": _guided(kind) for kind in ("json", "regex", "choice", "grammar")},
    }
)
