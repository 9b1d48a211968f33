"""K/V tiers under whole engines: the same bits as without, for every kind of K/V, on every runner; and refusals."""

from __future__ import annotations

import json
import random
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from quire import LLM, SamplingParams
from quire.assembly.grpc import host
from quire.assembly.kv_offload import block_mover
from quire.cli import main
from quire.config import Settings
from quire.engine.engine import Engine
from quire.engine.executor import Executor
from quire.errors import InvalidConfig
from quire.executors.block_files import BlockFiles
from quire.executors.block_store import DeviceCopies, HostCopies, TieredBlockStore, block_bytes, host_lines
from quire.executors.local import LocalExecutor
from quire.model_runner.lookahead_runner import LookaheadRunner
from quire.model_runner.memory import layer_shapes
from quire.models.registry import Model
from quire.ops.batch_invariant import BatchInvariantOps
from quire.scheduler.kv_offload import KVOffload, Offload
from quire.types import Request
from quire.weights.load import load_model
from quire.weights.locate import embedded
from tests import checkpoints
from tests.live import Live, serving
from tests.surface.blocks import FOUND
from tests.test_deterministic import Ahead, Situation, Subject

PRESSED = Situation(pages=36, size=8)
SLOTS, MANY_SLOTS, FILES = 24, 50, 400
"""Slots that are fewer than the blocks of the device under pressure, and more; files."""


def tiers_of(executor: Executor, block_size: int, folder: Path, slots: int = SLOTS) -> KVOffload:
    """Slots of host memory, and files for all that they have no room for."""
    assert isinstance(executor, LocalExecutor)
    runner = executor.runner
    size = block_bytes(runner.kv)
    if isinstance(runner, LookaheadRunner):
        device = torch.device(executor.describe().device)
        lines = host_lines(slots, size, pinned=device.type == "cuda")
        copies: DeviceCopies | HostCopies = DeviceCopies(lines, block_mover(runner.kv, device), runner.queue, device)
    else:
        lines = host_lines(slots, size, pinned=False)
        copies = HostCopies(runner.kv, lines)
    folder.mkdir(exist_ok=True)
    files = BlockFiles(folder, b"f" * 32, size)
    return KVOffload(TieredBlockStore(copies, lines, files, FILES), block_size)


class Tiered(Subject):
    """The answers that count are those of an engine without tiers; `folder` turns tiers on."""

    folder: Path | None = None
    slots = SLOTS

    def tiers(self, executor: Executor) -> Offload | None:
        return None if self.folder is None else tiers_of(executor, PRESSED.size, self.folder, self.slots)

    def converse(self, folder: Path, count: int, seed: int = 1, situation: Situation = PRESSED) -> Engine:
        """`count` requests, some at a time, each of them many times: every one is answered as alone."""
        self.folder = folder
        engine, rng = self.engine(situation), random.Random(seed)
        self.folder = None
        while count > 0:
            asked = rng.sample(self.requests, rng.randrange(1, 6))
            count -= len(asked)
            answers = self.ask(engine, asked)
            assert answers == {request.id: self.alone[request.id] for request in asked}
        engine.close()
        return engine


class TieredAhead(Tiered, Ahead):
    """The same, on the runner of a device."""


class Float8(Tiered):
    """K/V in float8."""

    def executor(self, s: Situation, pages: int) -> Executor:
        layers = layer_shapes(self.model.spec.kv_shapes, torch.float8_e4m3fn)
        sizes = {"pages": pages, "page_size": s.size, "rows": 64, "max_model_len": 256}
        return LocalExecutor(self.model, **sizes, dtype=self.model.dtype, layers=layers)  # type: ignore[arg-type]


@cache
def model(shape: str, dtype: str, base: Path) -> Model:
    folder = embedded() if shape == "embedded" else base / f"tiers-{shape}"
    if not folder.exists():
        checkpoints.make(folder, shape)
    return load_model(folder, dtype=dtype, ops=BatchInvariantOps())


@cache
def answered(kind: type[Tiered], shape: str, dtype: str, base: Path) -> Tiered:
    return kind(model(shape, dtype, base))


def subject_of(kind: type[Tiered], shape: str, dtype: str, factory: pytest.TempPathFactory) -> Tiered:
    """Of its own, but for the model and what it answers alone."""
    return copy(answered(kind, shape, dtype, factory.getbasetemp()))


KINDS = [
    (Tiered, "llama-gqa-tied", "float32"),
    (Float8, "llama-gqa-tied", "float32"),
    (TieredAhead, "llama-gqa-tied", "bfloat16"),
    (Tiered, "deepseek_v32-groups-yarn", "float32"),
    (TieredAhead, "deepseek_v3-plain-queries", "bfloat16"),
    (Tiered, "gemma2-gqa", "float32"),
    (TieredAhead, "gpt2-odd-heads", "bfloat16"),
    (Tiered, "qwen3_moe-gqa", "bfloat16"),
    (Tiered, "deepseek_v2-groups-yarn", "float32"),
    (Float8, "deepseek_v32-groups-yarn", "float32"),
]
AT_NIGHT = KINDS[4:5] + KINDS[6:]
EVERY = pytest.mark.parametrize(
    ("kind", "shape", "dtype"),
    [pytest.param(*each, marks=pytest.mark.nightly) if each in AT_NIGHT else each for each in KINDS],
    ids=lambda each: getattr(each, "__name__", each),
)


def converse(kind: type[Tiered], shape: str, dtype: str, count: int, factory: pytest.TempPathFactory) -> Engine:
    subject = subject_of(kind, shape, dtype, factory)
    engine = subject.converse(factory.mktemp("kv"), count)
    stats = engine.scheduler.kv.offload.stats
    assert stats.num_hit["host"] > 0 and stats.num_hit["disk"] > 0
    assert stats.failures.keys() <= {"no_room", "timeout"}
    return engine


@EVERY
def test_answers_have_the_bits_that_they_have_without_tiers(
    kind: type[Tiered], shape: str, dtype: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    converse(kind, shape, dtype, 25, tmp_path_factory)


@pytest.mark.nightly
@EVERY
def test_two_thousand_answers_have_the_bits_that_they_have_without_tiers(
    kind: type[Tiered], shape: str, dtype: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    converse(kind, shape, dtype, 2000, tmp_path_factory)


@pytest.mark.parametrize("kind", [Tiered, TieredAhead])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("count", [30, pytest.param(2000, marks=pytest.mark.nightly)])
def test_blocks_that_are_saved_before_they_are_evicted_have_the_same_bits(
    kind: type[Tiered], depth: int, count: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    subject = subject_of(kind, "llama-gqa-tied", "bfloat16", tmp_path_factory)
    subject.slots = MANY_SLOTS
    engine = subject.converse(tmp_path / "kv", count, situation=PRESSED._replace(depth=depth))
    assert engine.scheduler.kv.offload.stats.num_hit["host"] > 0


SITUATIONS = {
    "small chunks": PRESSED._replace(budget=24, chunk=7),
    "drafts ahead": PRESSED._replace(drafts=4, depth=1),
    "two at once": PRESSED._replace(cap=2, depth=2),
}


@pytest.mark.parametrize("situation", SITUATIONS.values(), ids=SITUATIONS)
def test_chunks_drafts_and_steps_in_flight_change_nothing(
    situation: Situation, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    subject = subject_of(TieredAhead, "llama-gqa-tied", "bfloat16", tmp_path_factory)
    engine = subject.converse(tmp_path / "kv", 30, situation=situation)
    assert engine.scheduler.kv.offload.stats.copied["load"] > 0


def test_files_that_are_spoilt_while_it_runs_cost_time_and_never_an_answer(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    subject = subject_of(Tiered, "llama-gqa-tied", "bfloat16", tmp_path_factory)
    subject.folder = tmp_path / "kv"
    engine, rng = subject.engine(PRESSED), random.Random(3)
    for _ in range(25):
        asked = rng.sample(subject.requests, 4)
        assert subject.ask(engine, asked) == {request.id: subject.alone[request.id] for request in asked}
        for path in sorted(subject.folder.rglob("*.kv")):
            data, kind = path.read_bytes(), rng.randrange(4)
            if not data or kind == 0:
                path.write_bytes(data[: rng.randrange(1, 2 + len(data)) - 1])
            elif kind == 1:
                at = rng.randrange(len(data))
                path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
            elif kind == 2:
                path.unlink()
    failures = engine.scheduler.kv.offload.stats.failures
    assert len(failures.keys() & {"truncated", "checksum", "missing"}) > 1, failures
    engine.close()


def test_no_salt_finds_the_blocks_of_another_and_the_same_one_finds_its_own(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    subject = subject_of(Tiered, "llama-gqa-tied", "bfloat16", tmp_path_factory)
    subject.folder = tmp_path / "kv"
    engine = subject.engine(PRESSED)
    prompt = tuple(range(3, 60))

    def found(number: int, salt: str, tokens: tuple[int, ...] = prompt) -> int:
        engine.add(Request(id=str(number), prompt=tokens, max_new_tokens=2, cache_salt=salt))
        got = 0
        while engine.has_pending_work:
            engine.wait(0.05)
            got += sum(output.num_cached for output in engine.step())
        return got

    def evict(number: int) -> None:
        for i in range(8):
            found(number + i, "evicting", tuple(90 + (i * 7 + number) % 29 for i in range(120)))

    assert found(0, "a") == 0
    evict(100)
    assert (found(1, "b"), found(2, ""), found(3, "a")) == (0, 0, 56)
    evict(200)
    assert (found(4, "c"), found(5, "b"), found(6, "")) == (0, 56, 56)
    engine.close()


# -------------------------------------------------------------------- by options

PROMPT = [(37 * i) % 1900 + 50 for i in range(330)]
OTHERS = [[(31 * i + 101 * j) % 1900 + 50 for i in range(330)] for j in range(1, 4)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
SMALL = {"num_gpu_blocks_override": 128, "max_num_seqs": 2, "kv_offloading_size": 0.002}


def cached(llm: LLM, prompt: list[int]) -> tuple[int, list[int]]:
    (answer,) = llm.generate([{"prompt_token_ids": prompt}], GREEDY)
    return answer.num_cached_tokens, list(answer.outputs[0].token_ids)


def test_a_directory_outlives_the_engine_and_is_refused_to_others_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    options = {
        **SMALL,
        "num_gpu_blocks_override": 30,
        "max_model_len": 400,
        "kv_offloading_size": 0.01,
        "kv_offloading_dir": str(folder),
    }
    with LLM("embedded", **options) as llm:
        first = cached(llm, PROMPT)[1]
        for _ in range(2):
            for other in OTHERS:
                cached(llm, other)
    assert folder.stat().st_mode & 0o777 == 0o700
    written = {path.suffix for path in folder.rglob("*") if path.is_file()}
    assert written == {"", ".json", ".kv"} and all(
        path.stat().st_mode & 0o077 == 0 for path in folder.rglob("*") if path.is_file()
    )
    with LLM("embedded", **options) as llm:
        assert cached(llm, PROMPT) == (320, first)
        with pytest.raises(InvalidConfig, match="in use by another server"):
            LLM("embedded", **options)
    for changed, name in (({"block_size": 32}, "block_size"), ({"dtype": "float32"}, "dtype")):
        with pytest.raises(InvalidConfig, match=f"of another .*{name}"):
            LLM("embedded", **{**options, "num_gpu_blocks_override": 60, **changed})
    about = folder / "fingerprint.json"
    about.write_text(json.dumps({**json.loads(about.read_text()), "weights": "other"}))
    with pytest.raises(InvalidConfig, match=r"of another weights .*name another folder, or remove this one"):
        LLM("embedded", **options)
    (folder / "lock").write_text("quire kv, format 99\n")
    with pytest.raises(InvalidConfig, match="format 99, and this version of Quire reads format 1"):
        LLM("embedded", **options)


def test_recordings_of_engines_that_share_a_directory_are_made_again(tmp_path: Path) -> None:
    """The second engine finds files of the first, whose tokens its own recording cannot know."""
    options = {**SMALL, "num_gpu_blocks_override": 30, "max_model_len": 400, "kv_offloading_size": 0.01}
    options |= {"kv_offloading_dir": str(tmp_path / "kv"), "recording_dir": str(tmp_path / "rec")}
    for _ in range(2):
        with LLM("embedded", **options) as llm:
            for prompt in (PROMPT, *OTHERS, *OTHERS):
                cached(llm, prompt)
            found = llm._engine.scheduler.kv.offload.stats
    assert found.copied["read"] and found.num_hit["disk"]
    done = CliRunner().invoke(main, ["replay", str(tmp_path / "rec"), "--json"])
    assert done.exit_code == 0, done.output
    first, second = json.loads(done.output)["recordings"]
    assert first["same"] and second["same"]
    assert second["tiers"]["hit_tokens"] == {tier: n for tier, n in found.num_hit.items() if n}
    said = CliRunner().invoke(main, ["replay", str(tmp_path / "rec"), "--run", "2"]).output
    assert f"{found.num_hit['disk']} disk" in said and "tiers: copied blocks" in said
    assert "every decision is the same" in said


REFUSED = {
    "prefix_caching_off": ({"enable_prefix_caching": False}, "turn --enable-prefix-caching on"),
    "no_room_for_a_block": ({"kv_offloading_size": 1e-6}, "does not hold one KV block"),
    "no_room_for_a_file": ({"kv_offloading_dir": "kv", "kv_offloading_dir_size": 1e-6}, "does not hold one file"),
    "directory_alone": ({"kv_offloading_dir": "kv", "kv_offloading_size": 0}, "set it to some GiB"),
    "directory_of_others": ({"kv_offloading_dir": "taken"}, "is not empty"),
    "directory_that_is_a_file": ({"kv_offloading_dir": "taken/file"}, "kv-offloading-dir"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_with_tiers_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("x")
    changed, reason = REFUSED[name]
    with pytest.raises(InvalidConfig, match=reason):
        LLM("embedded", **{**SMALL, **changed})


def test_models_with_recurrent_layers_are_refused(tmp_path: Path) -> None:
    checkpoints.make(tmp_path, "qwen3_next-shared-keys")
    with pytest.raises(InvalidConfig, match="recurrent layers"):
        LLM(str(tmp_path), tokenizer=str(embedded()), max_model_len=128, kv_offloading_size=0.01)


@pytest.mark.parametrize("executor", ["onnx", "hf", "grpc"])
def test_other_executors_refuse_tiers(executor: str) -> None:
    address = {"executor_address": "127.0.0.1:1"} if executor == "grpc" else {}
    with pytest.raises(InvalidConfig, match="--kv-offloading-size does not go with --executor"):
        LLM("embedded", executor=executor, kv_offloading_size=1, **address)


def test_commands_without_tiers_refuse_them() -> None:
    with pytest.raises(InvalidConfig, match="`quire executor` has no K/V tiers"):
        host(Settings.of(kv_offloading_size=1), "127.0.0.1:0")
    refused = CliRunner().invoke(main, ["verify", "--kv-offloading-size", "1"])
    assert refused.exit_code == 2 and "`quire verify` has no K/V tiers" in refused.output


def test_a_reset_of_the_prefix_cache_empties_all_tiers(tmp_path: Path) -> None:
    with LLM("embedded", **{**SMALL, "kv_offloading_dir": str(tmp_path / "kv")}) as llm:
        cached(llm, PROMPT)
        for other in (*OTHERS, *OTHERS):
            cached(llm, other)
        llm.reset_prefix_cache()
        assert cached(llm, PROMPT)[0] == 0


def test_the_guides_conversations_come_back(capsys: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, Any] = {}
    exec(FOUND["docs/guides/kv-tiers.md: from quire import LLM, SamplingParams"].text, scope)
    scope["llm"].close()
    assert capsys.readouterr().out.split() == ["0", "0", "0", "1488", "1488", "1488"]


def test_a_server_says_where_a_prefix_came_from(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    words = FOUND["docs/guides/kv-tiers.md: quire serve --kv-offloading-size 8"].words("serve")
    assert [set(each) >= {"--kv-offloading-size", "8"} for each in words] == [True, True]
    options = (
        *("--num-gpu-blocks-override", "30", "--max-model-len", "400"),
        *("--kv-offloading-size", "0.02", "--kv-offloading-dir", str(folder)),
    )

    def ask(server: Live, prompt: list[int]) -> dict[str, Any]:
        body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "model": "embedded"}
        answer: dict[str, Any] = server.http.post("/v1/completions", json=body).raise_for_status().json()
        return answer

    with serving(tmp_path, *options) as server:
        first = ask(server, PROMPT)
        assert "cached_tokens_details" not in first["usage"]["prompt_tokens_details"]
        for other in OTHERS:
            ask(server, other)
        again = ask(server, PROMPT)
        details = again["usage"]["prompt_tokens_details"]
        tiers = details["cached_tokens_details"]
        assert again["choices"][0]["text"] == first["choices"][0]["text"]
        assert details["cached_tokens"] == sum(tiers.values()) == 320 and tiers["host"] > 200
        (explained,) = server.http.get(f"/v1/requests/{again['id']}/explain").json()["answers"]
        prefix = explained["prefix"]
        assert prefix["host_tokens"] == tiers["host"] and "from host memory" in prefix["why"]
        assert server.metric("vllm:prompt_tokens_cached_by_source_total", source="host") == tiers["host"]
        assert server.metric("vllm:external_prefix_cache_hits_total") == tiers["host"]
        assert server.metric("quire:kv_offload_copied_bytes_total", copy="load") == tiers["host"] // 16 * 65536
        assert server.metric("quire:kv_offload_bytes", tier="host") > 0
        assert server.metric("quire:kv_offload_failures_total") == 0
    with serving(tmp_path, *options) as server:
        warm = ask(server, PROMPT)
        assert warm["choices"][0]["text"] == first["choices"][0]["text"]
        assert warm["usage"]["prompt_tokens_details"]["cached_tokens_details"]["disk"] > 0
        assert server.metric("vllm:prompt_tokens_cached_by_source_total", source="disk") > 0
