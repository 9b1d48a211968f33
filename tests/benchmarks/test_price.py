"""The matrix of features: every cell runs, each feature does what it says, and rows become a heat map and a page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from benchmarks import price
from benchmarks.price import FEATURES, MODELS, OPTIONS, SIZES, Batch, Bench, Speed, ask, compared, params, plan
from benchmarks.price_page import cells, page, read
from benchmarks.shapes import SHAPES, byte_words, write
from quire.bench.load_client import LoadJob, encode_request
from quire.config import Settings
from quire.frontend.supervisor import free_port
from quire.llm import LLM
from quire.model_runner import graphs
from quire.models.registry import parameters, read_spec
from quire.tokenization.tokenizer import Tokenizer
from quire.weights.schemes import read_scheme

QUICK = ("--repeat", "1", "--prompt", "8", "12", "--new", "8", "12")
STRUCTURED = ("JSON schema", "regex", "tools")


def called(*arguments: str) -> Result:
    result = CliRunner().invoke(price.command, arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of the whole matrix of the tiny model, with 16 and 2 sequences."""
    path = tmp_path_factory.mktemp("price") / "rows.jsonl"
    called("run", "tiny", str(path), *QUICK, "--size", "16", "--size", "2")
    for option in OPTIONS:
        called("run", "tiny", str(path), *QUICK, "--size", "2", "--option", option)
    return path


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    tiny = MODELS["tiny"]
    place = write(tmp_path_factory.mktemp("model"), tiny.shape, tokenizer=byte_words, config=tiny.config)
    with LLM(str(place), load_format="dummy", max_num_seqs=16, max_model_len=512) as running:
        yield running


# ---------------------------------------------------------------- cells


def test_every_cell_runs(rows: Path) -> None:
    found = cells(read([rows]))
    assert not [row for row in found.values() if "error" in row]
    small = {"n = 4", "beside 8 structured", "beside 8 plain"}
    assert {name for name, _, size in found if size == 16} == {"plain", *FEATURES} - {*OPTIONS}
    assert {name for name, _, size in found if size == 2} == {"plain", *FEATURES} - small
    assert all(row["ratio"] > 0 and row["tok_s"] > 0 for row in found.values())


def test_structured_answers_count_without_forced_tokens(rows: Path) -> None:
    found = cells(read([rows]))
    for name, forced in (("JSON schema", 14), ("regex", 0)):
        row = found[name, "tiny", 16]
        assert row["forced"] == 16 * forced
        assert row["tokens"] - row["forced"] == found["logprobs", "tiny", 16]["tokens"]
        assert row["ratio_all"] == pytest.approx(
            row["ratio"] * row["tokens"] / (row["tokens"] - row["forced"]), rel=0.01
        )


def test_cells_left_when_time_is_over_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    called("run", "tiny", str(path), *QUICK, "--seconds", "0", "--size", "2", "--feature", "bias", "--feature", "seeds")
    assert read([path])[-1] == {"model": "tiny", "missing": ["bias at 2", "seeds at 2"]}


def test_features_are_measured_in_groups_that_hold_each_cell_once() -> None:
    groups = plan([*FEATURES], SIZES)
    found = [(name, group.size) for group in groups for name in group.names]
    expected = {(name, size) for name, one in FEATURES.items() for size in SIZES if size >= one.least}
    assert len(found) == len(set(found)) and set(found) == expected
    assert ("n = 4", 1) not in expected and ("beside 8 structured", 16) in expected
    assert all(len({FEATURES[name].short for name in group.names}) == 1 for group in groups)
    assert [group.size for group in groups] == sorted((group.size for group in groups), key=SIZES.index)


@pytest.mark.parametrize("name", list(MODELS))
def test_every_model_is_one_that_can_be_read_with_its_options(name: str, tmp_path: Path) -> None:
    model = MODELS[name]
    fields = {**SHAPES[model.shape], **model.config}
    spec = read_spec(fields)
    assert (
        parameters(spec) > {"tiny": 1e5, "0.6B": 5e8, "8B": 8e9, "30B-A3B": 3e10, "gpt-oss-20B": 2e10}[name.split()[0]]
    )
    scheme = read_scheme(fields)
    settings = Settings.of(model=str(tmp_path), load_format="dummy", **model.options)
    stored = scheme.name if scheme else settings.model.quantization
    assert stored == {"fp8": "fp8", "int4": "awq", "mxfp4": "mxfp4"}.get(name.split()[-1], "auto")
    assert not model.draft or SHAPES[model.draft]["vocab_size"] == spec.vocab


def test_a_feature_that_fails_is_a_row_with_its_error(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = price.Feature(fields=price.always(allowed_token_ids=(10**6,)))
    monkeypatch.setattr(price, "FEATURES", {**FEATURES, "broken": broken})
    bench = Bench(llm, llm, 4096, [])
    plain, bad, good = price.measured(bench, price.Group(2, ("broken", "seeds")), 1, (8, 8), (4, 4))
    assert "allowed_token_ids" in bad["error"] and "ratio" not in bad
    assert plain["ratio"] == 1.0 and good["tokens"] == 8


def test_where_plain_requests_fail_so_do_all_features_of_the_group(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(llm, llm, 4096, [])

    def fails(batch: Batch) -> Speed:
        raise click.ClickException("no memory")

    monkeypatch.setattr(bench, "plain", fails)
    found = list(price.measured(bench, price.Group(2, ("bias", "seeds")), 2, (8, 8), (4, 4)))
    assert [(row["feature"], row["error"]) for row in found] == [("bias", "no memory"), ("seeds", "no memory")]


def test_what_is_compiled_during_a_feature_is_in_its_row(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(llm, llm, 4096, [{"what": "before", "ms": 1.0}])

    def late(bench: Bench, name: str, batch: Batch, plain: Speed) -> price.Pair:
        bench.late.append({"what": "kernel", "ms": 70.0})
        return plain, plain

    monkeypatch.setattr(price, "FEATURES", {**FEATURES, "bias": price.Feature(measure=late)})
    plain, seeds, biased = price.measured(bench, price.Group(2, ("seeds", "bias")), 1, (8, 8), (4, 4))
    assert plain["late"] == seeds["late"] == []
    assert biased["late"] == [{"what": "kernel", "ms": 70.0, "during": "bias at 2"}]


# ---------------------------------------------------------------- features


def test_bad_words_and_stop_tokens_are_ones_that_plain_answers_have(llm: LLM) -> None:
    bench = Bench(llm, llm, 4096, [])
    batch = bench.batch(2, 0, (8, 8), (20, 20))
    bench.plain(batch)
    answer = batch.answers[1]
    assert len(answer) == 20
    words = price.bad_words(batch, 1)["bad_words_token_ids"]
    inside = {answer[i:j] for i in range(20) for j in range(i + 1, 21)}
    assert [len(word) for word in words if word in inside] == [1, 2, 3, 4] and len(words) == 20
    done = llm.generate([batch.prompts[1]], params(20, **price.bad_words(batch, 1)), use_tqdm=False)
    new = done[0].outputs[0].token_ids
    assert not any(new[i : i + len(word)] == word for word in words for i in range(20))
    stops = price.min_tokens(batch, 1)
    with pytest.raises(click.ClickException, match="ended early"):
        ask(llm, [batch.prompts[1]], [params(20, stop_token_ids=stops["stop_token_ids"])])
    assert ask(llm, [batch.prompts[1]], [params(20, **stops)])[0].tokens == 20


def test_other_features_restrict_as_much_as_apis_take() -> None:
    batch = Batch([[1]] * 2, [10] * 2, 0, 151936)
    assert len(price.bias(batch, 0)["logit_bias"]) == 300
    assert len(price.allowed(batch, 0)["allowed_token_ids"]) == 4000
    assert price.bias(batch, 0) == price.bias(batch, 0) != price.bias(batch, 1)
    assert [FEATURES["seeds"].fields(batch, i)["seed"] for i in range(2)] == [0, 1]


def test_every_schema_of_the_many_forces_as_many_tokens_and_no_answer_ends(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert {price.forced_tokens(price.json_schema(i), tokenizer) for i in range(4)} == {14}
    assert len({price.json_schema(i).json for i in range(50)}) == 50
    for name in STRUCTURED:
        form = FEATURES[name].structure
        assert form is not None
        done = llm.generate([[1000, 1001]], params(200, structured_outputs=form(0), detokenize=True), use_tqdm=False)
        assert done[0].outputs[0].finish_reason == "length"
        start = {"JSON schema": '{"a":"', "regex": "", "tools": '<tool_call>\n{"name": "'}[name]
        assert done[0].outputs[0].text.startswith(start)


def test_tokens_of_a_byte_write_any_text(tmp_path: Path) -> None:
    byte_words(1000).save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    ids = tokenizer.encode('{"a": é} aaaa')
    assert tokenizer.decode(ids) == '{"a": é} aaaa' and len(ids) == 14 and max(ids) < 256
    assert tokenizer.decode([256, 257]) == " aaaa baaa" and tokenizer.vocab_size == 1000


def test_ratios_are_medians_of_turns_that_are_compared_each_with_its_own() -> None:
    turns = [(100.0, 100.0), (50.0, 100.0), (80.0, 40.0)]
    found = compared([(Speed(one, 30, 10), Speed(other, 20, 0)) for one, other in turns])
    assert (found["tok_s"], found["reference_tok_s"], found["ratio"], found["ratio_all"]) == (80, 100, 1.0, 1.5)


def test_what_is_captured_after_ready_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "captured", lambda work, pool: (work(), pool))
    late: list[Any] = []
    with price.watched(late, "cpu"):
        assert graphs.captured(lambda: 3, None) == (3, None)  # type: ignore[comparison-overlap]
    graphs.captured(lambda: 3, None)
    assert [one["what"] for one in late] == ["capture"] and late[0]["ms"] >= 0


def test_what_is_compiled_after_ready_is_noted_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    compilation = SimpleNamespace(listener=lambda *, src, **rest: heard.append(src.name))
    triton = SimpleNamespace(knobs=SimpleNamespace(compilation=compilation))
    monkeypatch.setattr(price, "import_module", lambda name: triton)
    monkeypatch.setattr(price, "count_compiles", lambda device: int)
    late: list[Any] = []
    with price.watched(late, "cuda"):
        compilation.listener(src=SimpleNamespace(name="kernel"), times=SimpleNamespace(total=61000), cache_hit=False)
    assert late == [{"what": "kernel", "ms": 61.0}] and heard == ["kernel"]


# ---------------------------------------------------------------- HTTP


@pytest.mark.nightly
def test_a_server_is_measured_plain_with_logprobs_and_with_a_schema(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    few = ("--streams", "2", "--requests", "2", "--processes", "1", "--repeat", "1", "--new", "4", "6")
    called("http", "tiny", str(path), *few, "--port", str(free_port()))
    _, *found = read([path])
    assert [row["feature"] for row in found] == ["plain, HTTP", "logprobs, HTTP", "JSON schema, HTTP"]
    plain, logprobs, schema = found
    assert plain["ratio"] == 1.0 and plain["tokens"] == logprobs["tokens"] == schema["tokens"] - 2 * 14


def test_a_load_job_sends_further_fields() -> None:
    job = LoadJob(host="h", port=1, model="m", streams=1, prompts=[[1]], output_lens=[2], extra={"logprobs": 5})
    body = json.loads(encode_request(job, 0).split(b"\r\n\r\n")[1])
    assert (body["logprobs"], body["max_tokens"]) == (5, 2)


# ---------------------------------------------------------------- heat map and page


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_rows_are_drawn(kind: str, rows: Path, tmp_path: Path) -> None:
    picture = tmp_path / f"price.{kind}"
    called("draw", str(rows), str(picture))
    assert picture.read_bytes().startswith({"png": b"\x89PNG", "svg": b"<?xml"}[kind])
    assert picture.stat().st_size > 20_000


def test_rows_become_a_page(rows: Path, tmp_path: Path) -> None:
    to = tmp_path / "price.md"
    called("page", str(rows), str(to), "--picture", "price.png")
    text = to.read_text("utf-8")
    assert "![Ratios to plain](price.png)" in text and "### tiny" in text and "### 8B" not in text
    ratio = cells(read([rows]))["JSON schema", "tiny", 16]["ratio"]
    line = next(line for line in text.splitlines() if line.startswith("| JSON schema |"))
    assert line.split("|")[3].strip() == f"{ratio:.3f}"
    assert "16,607" in text and "0 kernels and graphs" in text


def test_a_page_judges_targets_and_lists_what_is_late_or_missing(tmp_path: Path) -> None:
    def cell(feature: str, size: int, ratio: float, model: str = "0.6B bf16", **more: Any) -> dict[str, Any]:
        fields = {"feature": feature, "model": model, "size": size, "prompt": [1, 2], "new": [1, 2], "tok_s": 16000}
        return fields | {"ratio": ratio} | more

    late = [{"what": "slow", "ms": 61.0, "during": "bias at 64"}, {"what": "quick", "ms": 2.0}]
    given = [
        cell("plain", 64, 1.0, late=late),
        {**cell("plain", 64, 1.0), "tok_s": 18000},
        cell("logprobs", 64, 0.5),
        cell("logprobs", 64, 0.95),
        cell("bias", 256, 0.899),
        cell("bias", 256, 0.5, model="8B bf16"),
        cell("regex", 16, 0.5),
        {"feature": "seeds", "model": "8B int4", "size": 64, "prompt": [1, 2], "error": "no memory"},
        {"model": "30B-A3B", "missing": ["regex at 64"]},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in given))
    text = page([path], "", features=[*FEATURES], models=[*MODELS], sizes=SIZES)
    judged = text.split("## Targets")[1].split("## Ratios")[0]
    assert "| logprobs | 0.6B bf16 | 64 | 0.90 | 0.950 | met |" in judged
    assert "| bias | 0.6B bf16 | 256 | 0.90 | 0.899 | missed |" in judged
    assert "8B bf16" not in judged and "regex" not in judged
    assert "| plain, tokens/s |  |  | 17,000 |  |" in text
    assert "2 kernels and graphs were compiled or captured late, 1 for over 50 ms" in text
    assert "- slow: 61 ms, during bias at 64" in text and "quick" not in text
    assert "- seeds, 8B int4, 64: no memory" in text and "- 30B-A3B: regex at 64" in text
