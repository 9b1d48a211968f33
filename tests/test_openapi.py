"""Whatever /openapi.json allows is asked of a real server: no 5xx but 503 and 504, documented answers only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import load_all_checks
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from quire.server.openapi import document
from tests.live import Live, serving

load_all_checks()
CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]
schema = schemathesis.openapi.from_dict(msgspec.json.decode(document("0")))
QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large, HealthCheck.large_base_example]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("described")
    with serving(folder, "--max-model-len", "128", "--batch-dir", str(folder / "batches")) as live:
        yield live


def ask(case: Any, live: Live) -> None:
    answer = case.call(base_url=live.url, timeout=300)
    assert answer.status_code < 500 or answer.status_code in (503, 504)
    case.validate_response(answer, checks=CHECKS)


def test_a_call_has_one_message_or_more_and_a_prompt_one_character() -> None:
    types = msgspec.json.decode(document("0"))["components"]["schemas"]
    fields = [one["properties"] for one in types.values() if "properties" in one]
    messages = [kind for each in fields for kind in kinds(each.get("messages", {})) if kind.get("type") == "array"]
    prompts = [kind for each in fields for kind in kinds(each.get("prompt", {})) if kind.get("type") == "string"]
    assert messages and prompts
    assert all(kind["minItems"] == 1 and kind["items"] for kind in messages)
    assert all(kind["minLength"] == 1 for kind in prompts)


def kinds(schema: dict[str, Any]) -> list[dict[str, Any]]:
    return schema.get("anyOf", [schema])


@schema.parametrize()
@settings(
    max_examples=8, deadline=None, suppress_health_check=QUIET, phases=[Phase.generate], derandomize=True, database=None
)
def test_what_is_described_is_answered_as_described(case: Any, live: Live) -> None:
    ask(case, live)


@pytest.mark.nightly
@schema.parametrize()
@settings(max_examples=300, deadline=None, suppress_health_check=QUIET, phases=[Phase.generate], database=None)
def test_all_night_what_is_described_is_answered_as_described(case: Any, live: Live) -> None:
    ask(case, live)


def test_the_server_is_well_afterwards(live: Live) -> None:
    assert live.settled()["cache"]["used_pages"] == 0
    assert live.openai.completions.create(model="embedded", prompt="x", max_tokens=2).choices
