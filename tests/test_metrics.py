"""/metrics is what clients saw, in names that dashboards know, to a real Prometheus too."""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.live import ROOT, Live, serving
from tests.prometheus import PROMETHEUS, PROMTOOL, RULES, Scraping, prometheus, queries
from tools.metrics_page import buckets, rows

VLLM = frozenset(
    """
    num_requests_running num_requests_waiting num_requests_waiting_by_reason kv_cache_usage_perc
    cache_config_info prompt_tokens_total generation_tokens_total prompt_tokens_by_source_total
    prompt_tokens_cached_total prompt_tokens_cached_by_source_total prefix_cache_queries_total
    prefix_cache_hits_total num_preemptions_total request_success_total admission_rejections_total
    spec_decode_num_drafts_total spec_decode_num_draft_tokens_total spec_decode_num_accepted_tokens_total
    spec_decode_num_accepted_tokens_per_pos_total time_to_first_token_seconds inter_token_latency_seconds
    request_time_per_output_token_seconds e2e_request_latency_seconds request_queue_time_seconds
    request_inference_time_seconds request_prefill_time_seconds request_decode_time_seconds
    request_prompt_tokens request_generation_tokens request_max_num_generation_tokens request_params_n
    request_params_max_tokens request_prefill_kv_computed_tokens iteration_tokens_total gpu_cache_usage_perc
    time_per_output_token_seconds gpu_prefix_cache_queries_total gpu_prefix_cache_hits_total
    """.split()  # noqa: SIM905
)
"""vLLM 0.33's names for what there is here, and three that it has dropped since."""

SLOW = ".3 .5 .8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"
BOUNDS = {
    "time_to_first_token_seconds": ".001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10 20 40 80 160 640 2560",
    "inter_token_latency_seconds": ".01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80",
    "e2e_request_latency_seconds": SLOW,
    "request_queue_time_seconds": SLOW,
    "request_inference_time_seconds": SLOW,
    "request_prefill_time_seconds": SLOW,
    "request_decode_time_seconds": SLOW,
    "iteration_tokens_total": "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384",
    "request_params_n": "1 2 5 10 20",
}

NOISE = r"should not contain ':'|_total\" suffix"
"""What promtool holds against vLLM's own names: their colon, and a histogram that ends in _total."""

STATS = {"running", "model", "waiting_requests", "active_requests", "completed_requests", "generated_tokens"}
STATS |= {"decode_steps", "average_batch_size", "max_batch_observed", "cache"}
CACHE = {"page_size", "max_pages", "used_pages", "free_pages", "active_sequences", "pressure_events", "evictions"}
CACHE |= {"utilization", "policy"}


class Seen(NamedTuple):
    """One request as its client saw it. tokens: of completions; None if the client left, having seen some."""

    kind: str
    n: int
    prompt: int
    tokens: int | None
    cached: int = 0


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with serving(
        tmp_path_factory.mktemp("metrics"), "--max-num-seqs", "48", "--num-gpu-blocks-override", "900"
    ) as server:
        yield server


@pytest.fixture(scope="module")
def scraping(live: Live, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraping | None]:
    """Prometheus, from before the first request on; None where there is none."""
    if not PROMETHEUS:
        yield None
        return
    with prometheus(tmp_path_factory.mktemp("prometheus"), live.url) as found:
        found.scraped(2)
        yield found


@pytest.fixture(scope="module")
def seen(live: Live, scraping: Scraping | None) -> list[Seen]:
    """250 requests of several kinds, 48 at once."""
    found: list[Seen] = []

    async def one(client: httpx.AsyncClient, kinds: Iterator[str], draw: random.Random) -> None:
        for kind in kinds:
            asked = request(kind, draw)
            path = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
            if kind == "leaves":
                found.append(await leave(client, path, asked))
                continue
            answer = await client.post(path, json=asked)
            if kind == "bad":
                assert answer.status_code == 400
                continue
            usage = answer.json()["usage"]
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            found.append(Seen(kind, asked.get("n", 1), usage["prompt_tokens"], usage["completion_tokens"], cached))

    async def all() -> None:
        kinds = ["plain"] * 130 + ["chat"] * 50 + ["many"] * 10 + ["stop"] * 30 + ["leaves"] * 20 + ["bad"] * 10
        random.Random(3).shuffle(kinds)
        shared = iter(kinds)
        async with httpx.AsyncClient(base_url=live.url, trust_env=False, timeout=1200) as client:
            await asyncio.gather(*(one(client, shared, random.Random(i)) for i in range(48)))

    asyncio.run(all())
    live.settled()
    return found


def request(kind: str, draw: random.Random) -> dict[str, Any]:
    begin = draw.choice(("Once upon a time there was a little dog who liked boats. ", "The old king had three sons. "))
    text = begin * draw.randint(1, 3) + str(draw.randint(0, 9999))
    asked: dict[str, Any] = {"model": "embedded", "max_tokens": draw.randint(1, 14), "seed": draw.randint(0, 99)}
    if kind == "chat":
        return asked | {"messages": [{"role": "user", "content": text}]}
    asked["prompt"] = text
    more: dict[str, dict[str, Any]] = {
        "many": {"n": 3},
        "stop": {"stop": [" the", "."], "max_tokens": 40},
        "leaves": {"stream": True, "max_tokens": 800, "ignore_eos": True},
        "bad": {"temperature": -1},
    }
    return asked | more.get(kind, {})


async def leave(client: httpx.AsyncClient, path: str, asked: dict[str, Any]) -> Seen:
    async with client.stream("POST", path, json=asked) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                break
    prompt = (await client.post("/tokenize", json={"prompt": asked["prompt"]})).json()["count"]
    return Seen("leaves", 1, prompt, None)


def test_counters_equal_what_clients_saw(live: Live, seen: list[Seen]) -> None:
    stayed = [one for one in seen if one.tokens is not None]
    answers, prompts = sum(one.n for one in seen), sum(one.n * one.prompt for one in seen)
    assert (len(seen), len(stayed), answers) == (240, 220, 260)
    assert live.metric("vllm:prompt_tokens_total") == prompts == live.metric("vllm:request_prompt_tokens_sum")
    assert live.metric("vllm:time_to_first_token_seconds_count") == answers
    assert live.metric("vllm:request_success_total") == answers
    assert live.metric("vllm:request_success_total", finished_reason="abort") == 20
    assert live.metric("vllm:request_params_n_sum") == answers
    made, surplus = live.metric("vllm:generation_tokens_total"), live.metric("quire:surplus_tokens_total")
    counted = made - surplus
    assert made == live.metric("vllm:request_generation_tokens_sum")
    assert live.metric("vllm:request_max_num_generation_tokens_count") == live.metric("vllm:request_params_n_count")
    assert counted / 2 < live.metric("vllm:request_max_num_generation_tokens_sum") < counted
    to_clients_that_left = counted - sum(one.tokens or 0 for one in stayed)
    assert 20 <= to_clients_that_left < 20 * 100, "they saw one token at least, and left soon"
    gaps = live.metric("vllm:inter_token_latency_seconds_count")
    assert gaps == live.metric("vllm:time_per_output_token_seconds_count")
    assert counted - answers <= gaps <= made - answers


def test_each_request_is_remembered_as_its_client_saw_it(live: Live, seen: list[Seen]) -> None:
    stories = live.http.get("/v1/requests").json()["requests"]
    assert len(stories) == sum(one.n for one in seen)
    assert sum(story["generated_tokens"] for story in stories) == live.metric("vllm:generation_tokens_total")
    known = {(story["prompt_tokens"], story["generated_tokens"], story["cached_tokens"]) for story in stories}
    assert all((one.prompt, one.tokens, one.cached) in known for one in seen if one.kind in ("plain", "chat"))


def test_cached_tokens_are_those_that_usage_says(live: Live, seen: list[Seen]) -> None:
    cached = live.metric("vllm:prompt_tokens_cached_total")
    stories = live.http.get("/v1/requests").json()["requests"]
    assert cached == sum(story["cached_tokens"] for story in stories)
    assert 500 < sum(one.cached for one in seen) <= cached
    by_source = live.metric("vllm:prompt_tokens_by_source_total", source="local_cache_hit")
    assert by_source == cached == live.metric("vllm:prompt_tokens_cached_by_source_total")
    computed = live.metric("vllm:request_prefill_kv_computed_tokens_sum")
    assert computed == live.metric("vllm:prompt_tokens_by_source_total", source="local_compute")


def test_idle_gauges_are_0_and_stats_have_the_known_fields(live: Live, seen: list[Seen]) -> None:
    for name in ("num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason"):
        assert live.metric(f"vllm:{name}") == 0
    for name in ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "quire:queue_tokens", "quire:pages_shared"):
        assert live.metric(name) == 0
    assert live.metric("quire:pages", state="held") == 0 == live.metric("quire:fragmentation_internal")
    assert live.metric("quire:pages") == 900
    assert live.metric("quire:jit_compiles_after_ready_total") == 0 == live.metric("quire:step_failures_total")
    stats = live.stats()
    assert set(stats) >= STATS and set(stats["cache"]) == CACHE
    assert stats["decode_steps"] == live.metric("quire:steps_total") >= live.metric("quire:decode_steps_total") > 0


def test_every_name_is_on_the_list_and_vllms_are_there(live: Live, seen: list[Seen]) -> None:
    known = {name: (kind, set(labels)) for name, kind, labels, _ in rows()}
    found = {}
    for family in text_string_to_metric_families(live.http.get("/metrics").text):
        name = family.name + "_total" * (family.type == "counter")
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert {"model_name", "engine"} <= labels or not family.samples, name
        found[name] = family.type
        assert known[name][0] == family.type
        if name != "vllm:cache_config_info" and family.samples:
            assert labels - {"model_name", "engine"} == known[name][1], name
    missing = set(known) - set(found)
    assert all("canary" in name or "float8" in name for name in missing), missing
    assert {f"vllm:{name}" for name in VLLM} <= set(found)
    for name, bounds in BOUNDS.items():
        assert {float(bound) for bound in bounds.split()} <= set(buckets()[f"vllm:{name}"])
    assert 'block_size="16"' in next(
        line for line in live.http.get("/metrics").text.splitlines() if line.startswith("vllm:cache_config_info")
    )


@pytest.mark.skipif(not PROMTOOL, reason="needs promtool")
def test_promtool_finds_nothing_new_to_say(live: Live, seen: list[Seen]) -> None:
    text = live.http.get("/metrics").text
    checked = subprocess.run([PROMTOOL, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    said = [line for line in (checked.stdout + checked.stderr).splitlines() if line and not re.search(NOISE, line)]
    assert said == []
    for arguments in (("check", "config", str(RULES.parent / "prometheus.yml")), ("check", "rules", str(RULES))):
        subprocess.run([PROMTOOL, *arguments], check=True, capture_output=True)
    tests = RULES.parent / "rules_test.yml"
    subprocess.run([PROMTOOL, "test", "rules", str(tests)], check=True, capture_output=True)


@pytest.mark.skipif(not PROMETHEUS, reason="needs Prometheus")
def test_prometheus_scrapes_it_and_every_query_of_the_dashboard_has_data(scraping: Scraping, seen: list[Seen]) -> None:
    scraping.scraped(6)
    assert scraping.ask("vllm:generation_tokens_total")[0]["metric"]["model_name"] == "embedded"
    for row, expressions in queries().items():
        for expression in expressions:
            assert scraping.ask(expression), f"{row}: nothing for {expression}"
    rules = scraping.rules()
    assert {rule["health"] for rule in rules.values()} == {"ok"}
    assert all(scraping.ask(name) for name, rule in rules.items() if rule["type"] == "recording")
    firing = {name for name, rule in rules.items() if rule["type"] == "alerting" and rule["state"] == "firing"}
    assert firing == set()


def test_the_dashboard_asks_vllm_only_for_what_vllm_has() -> None:
    asked = queries()
    for row, expressions in asked.items():
        names = {name for expression in expressions for name in re.findall(r"\b((?:vllm|quire):\w+)", expression)}
        assert names
        if row == "Quire only":
            continue
        for name in names:
            bare = re.sub(r"_(bucket|sum|count)$", "", name.removeprefix("vllm:"))
            assert name.startswith("vllm:") and bare in VLLM, f"{row}: {name}"


def test_compose_mounts_what_is_there() -> None:
    compose = (ROOT / "compose.yaml").read_text()
    for mounted in re.findall(r"- (\./[\w/.-]+):", compose):
        assert (ROOT / mounted).is_dir()
    folder = Path(re.search(r"PATH: (\S+)", compose)[1])  # type: ignore[index]
    provider = (ROOT / "deploy/grafana/provisioning/dashboards/files.yml").read_text()
    assert f"path: {folder.parent}" in provider
    assert (ROOT / "deploy/grafana/dashboards" / folder.name).exists()
    title = json.loads((ROOT / "deploy/grafana/dashboards" / folder.name).read_text())["title"]
    assert "vLLM" in title
