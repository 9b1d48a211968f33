"""What engines and executors are put together from, by their settings, as written down."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.assembly import engine, engine_child, grpc, hf, limits, onnx, place, speculate
from quire.config import Settings
from quire.engine.executor import Description
from quire.engine.protocol import BuildFailed
from quire.errors import InvalidConfig, InvalidModel, QuireError
from quire.model_runner.memory import LayerShape
from quire.models.registry import read_spec
from quire.models.spec import ModelSpec
from quire.weights.canary import Canary, Quality
from quire.weights.pooling import PoolerConfig
from tests.calls import Calls, shown
from tests.expected import check

EXPECTED = Path(__file__).parent / "expected"
ROOT = Path(__file__).parents[2]
GIB = 1 << 30


def spec(**fields: Any) -> ModelSpec:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "intermediate_size": 96,
        "max_position_embeddings": 2048,
    }
    return read_spec(config | fields)


def model(**fields: Any) -> Any:
    return SimpleNamespace(spec=spec(**fields), dtype=torch.bfloat16, classify=None, head=None)


def tried(calls: Calls, title: str, work: Callable[[], object]) -> None:
    """Writes down what `work` gives, or how it is refused."""
    calls.lines += ["", title]
    try:
        made = work()
    except QuireError as error:
        param = getattr(error, "param", None)
        calls.lines.append(f"{type(error).__name__} ({param}): {error}")
    else:
        calls.say("made", made)


def of(**options: Any) -> Settings:
    """Settings as a start has them: with the place of the model."""
    return place.located(Settings.of(**options))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Calls:
    """Nothing is loaded or allocated; the host has 6 GiB, and a card of 80 has 70."""
    noted = Calls()
    target = model()
    draft = model(num_hidden_layers=1, hidden_size=32, max_position_embeddings=1024)
    draft.dtype = torch.float16
    note_load = noted.to("load_model", target)

    def load(folder: Path, *, canary: Canary | None, **named: Any) -> Any:
        if canary is not None:
            canary.suspects = ("q_proj", "k_proj")
            canary.quality = Quality(9, 0.875, 0.5, 0.25, 0.125) if named["quantization"] == "int8" else None
        return note_load(folder, canary=canary and (canary.encoded, canary.threshold), **named)

    monkeypatch.setattr(engine, "pooler_of", lambda settings: PoolerConfig())
    monkeypatch.setattr(engine, "read_config", lambda folder: {"architectures": ["LlamaForCausalLM"]})
    monkeypatch.setattr(engine, "load_model", load)
    monkeypatch.setattr(speculate, "load_model", noted.to("load_draft", draft))
    monkeypatch.setattr(speculate, "allocate", noted.to("allocate", ["pools"]))
    monkeypatch.setattr(engine, "LocalExecutor", noted.to("LocalExecutor", "executor"))
    for module in (place, speculate):
        monkeypatch.setattr(
            module, "locate", lambda name, **rest: noted.say("located", [name, rest]) or Path(f"found/{name}")
        )
    monkeypatch.setattr(speculate, "embedded", lambda: Path("embedded"))
    monkeypatch.setattr(engine, "stable_rows", lambda: 0)
    monkeypatch.setattr(engine, "host_bytes", lambda: 6 * GIB)
    monkeypatch.setattr(torch, "set_num_threads", noted.to("set_num_threads"))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    monkeypatch.setattr(engine, "build_tokenizer", lambda settings: SimpleNamespace(encode=lambda text: (5, 6, 7)))
    caplog.set_level(logging.INFO)
    return noted


NGRAM = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 5, "prompt_lookup_min": 2}'
MODEL_DRAFT = '{"method": "draft_model", "model": "small", "num_speculative_tokens": 2}'
BROUGHT = '{"method": "draft_model", "num_speculative_tokens": 2}'
FIXED = '{"method": "ngram", "adaptive": false}'

ON_HOST: list[dict[str, Any]] = [
    {"model": "m"},
    {},
    {"model": "m", "deterministic": True, "dtype": "float32", "seed": 3, "threads": 2, "canary": "off"},
    {"deterministic": False, "dtype": "float32", "load_format": "dummy", "quantization": "int8"},
    {"model": "m", "revision": "r", "download_dir": "d", "max_model_len": 100, "block_size": 8, "max_num_seqs": 3},
    {"model": "m", "num_gpu_blocks_override": 9, "lookahead": 2, "canary": "refuse", "canary_min_agreement": 0.5},
    {"model": "m", "kv_cache_memory_bytes": 1 << 22, "speculative_config": NGRAM},
    {"model": "m", "kv_cache_memory_bytes": 1 << 14},
    {"model": "m", "speculative_config": MODEL_DRAFT, "max_num_seqs": 2, "seed": (1 << 64) - 1},
    {"model": "m", "speculative_config": BROUGHT},
    {"speculative_config": BROUGHT, "load_format": "dummy", "num_gpu_blocks_override": 20},
    {"model": "m", "speculative_config": '{"method": "ngram", "synthetic_acceptance_rate": 0.5}'},
    {"model": "m", "max_model_len": 4096},
    {"model": "m", "kv_cache_dtype": "fp8"},
    {"model": "m", "kv_cache_dtype": "fp8", "canary": "refuse"},
]


def float8(model: Any, probe: tuple[int, ...], device: torch.device, published: Any, form: Any) -> Any:
    """K/V in float8 in all but the first layer."""
    assert published == {} and form.dtype is torch.float8_e4m3fn
    layers = tuple(LayerShape(2, 16, 16, torch.float8_e4m3fn if i else model.dtype, 0.5, 0.25) for i in range(3))
    return layers, Quality(len(probe), 0.75, 0.5, 0.125, 0.25)


def test_executors_on_a_host_are_made_as_written_down(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine, "float8_layers", float8)
    monkeypatch.setattr(engine, "published_scales", lambda folder: {})
    monkeypatch.setattr(engine, "best_level", lambda: None)
    for options in ON_HOST:
        tried(calls, f"quire serve {options}", lambda options=options: engine.make_executor(of(**options)))
        calls.lines += [f"logged {each.levelname} {each.getMessage()}" for each in caplog.records]
        caplog.clear()
    check(EXPECTED / "builds-host.txt", "\n".join(calls.lines))


ON_A_CARD: list[dict[str, Any]] = [
    {"model": "m"},
    {"model": "m", "enforce_eager": True, "deterministic": True, "max_num_seqs": 5, "block_size": 16, "lookahead": 3},
    {"model": "m", "gpu_memory_utilization": 0.5, "max_num_batched_tokens": 64, "max_num_seqs": 2},
    {"model": "m", "num_gpu_blocks_override": 30, "speculative_config": NGRAM, "max_num_seqs": 3},
    {"model": "m", "kv_cache_memory_bytes": 1 << 24, "speculative_config": MODEL_DRAFT, "max_num_seqs": 20},
    {"load_format": "dummy", "speculative_config": '{"method": "ngram", "synthetic_acceptance_rate": 0.5}'},
    {"model": "m", "gpu_memory_utilization": 0.1},
    {"model": "m", "kv_cache_dtype": "fp8", "canary": "warn", "speculative_config": MODEL_DRAFT, "max_num_seqs": 1},
]


def test_executors_on_a_card_are_made_as_written_down(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cuda = pytest.importorskip("quire.assembly.cuda")
    card = torch.device("cuda")
    for module in (engine, limits):
        monkeypatch.setattr(module, "choose_device", lambda name: card)
    monkeypatch.setattr(torch.cuda, "empty_cache", calls.to("empty_cache"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", calls.to("mem_get_info", (70 * GIB, 80 * GIB)))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(engine, "float8_layers", float8)
    monkeypatch.setattr(engine, "published_scales", lambda folder: {})
    monkeypatch.setattr(cuda, "load_draft", lambda *args: speculate.load_draft(*args))
    for name in ("TritonOps", "BatchInvariantTritonOps", "TritonSteps", "ForcedSteps", "CudaQueue"):
        monkeypatch.setattr(cuda, name, calls.to(name, name))
    for name in ("NgramProposer", "ModelProposer"):
        monkeypatch.setattr(speculate, name, calls.to(name, name))
    monkeypatch.setattr(cuda, "CudaExecutor", calls.to("CudaExecutor", "executor"))
    for options in ON_A_CARD:
        tried(calls, f"quire serve {options}", lambda options=options: engine.make_executor(of(**options)))
        said = [
            re.sub(r"in \d+\.\d s", "in 0.0 s", each.getMessage().partition("; beside")[0]) for each in caplog.records
        ]
        calls.lines += [f"logged {line}" for line in said]
        caplog.clear()
    check(EXPECTED / "builds-card.txt", "\n".join(calls.lines))


def test_a_card_that_does_not_read_e4m3_refuses_it_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = pytest.importorskip("quire.assembly.cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    cuda.check_float8("fp8_e5m2", torch.device("cuda"))
    with pytest.raises(InvalidConfig, match=r"8\.9 or later, and this one has 8\.6: use fp8_e5m2, or leave it at auto"):
        cuda.check_float8("fp8", torch.device("cuda"))


def test_steps_that_are_prepared_are_as_written_down() -> None:
    cuda = pytest.importorskip("quire.assembly.cuda")
    lines = []
    for given in ((1, 16, 16), (5, 100, 64), (20, 300, 0), (33, 40, 2048)):
        lines += [f"{given}: {[tuple(key) for key in cuda.graph_keys(*given)]}"]
    for more in ((3, 64, 0, False), (3, 64, 2, False), (9, 40, 3, True), (300, 16, 8, False), (2, 16, 1, True)):
        lines += [f"{more}: {[tuple(key) for key in speculate.speculative_graph_keys(*more)]}"]
    for timed in ((1, 0), (9, 0), (9, 3), (400, 8)):
        lines.append(f"timed {timed}: {cuda._timed_steps(*timed)}")
    check(EXPECTED / "prepared.txt", "\n".join(lines))


ENGINES: list[dict[str, Any]] = [
    {},
    {"max_num_seqs": 8, "max_num_batched_tokens": 256, "lookahead": 1, "eviction_policy": "fifo"},
    {"enable_prefix_caching": False, "enable_chunked_prefill": False, "batching": "static", "latency_target_ms": 40},
    {"scheduling_policy": "priority", "pressure_policy": "preempt", "speculative_config": NGRAM},
    {"speculative_config": FIXED, "long_prefill_token_threshold": 32},
    {"recording_dir": "FOLDER", "recording_max_bytes": 1 << 20},
]


def test_engines_are_put_together_as_written_down(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    about = Description(40, 16, 64, 2048, 100, num_drafts=3, draft_kv_share=0.5, static_gauges={"a": 1.0})
    executor = SimpleNamespace(describe=lambda: about)
    real = engine.make_executor

    def built(settings: Settings, ranks: object) -> Any:
        assert ranks is None
        return real(settings)._replace(executor=executor, static_gauges={"b": 2.0})

    monkeypatch.setattr(engine, "make_executor", built)
    for options in ENGINES:
        calls.lines += ["", str(options)]
        if "recording_dir" in options:
            options = {**options, "recording_dir": str(tmp_path)}
        it = engine.build_engine(of(**options), observers=["observer"], keep=4, wrap=lambda each: each)  # type: ignore[list-item]
        calls.lines.append(type(it).__name__)
        calls.members("engine", it, without=("clock", "scheduler", "observers"))
        calls.say("observers", it.observers[:1])
        calls.members("scheduler", it.scheduler, without=("compute_masks", "free_rows"))
        calls.members("policy", it.scheduler.policy)
        calls.members("speculation", it.scheduler.speculation)
        calls.members("kv", it.scheduler.kv)
        calls.say("eviction", it.scheduler.kv.pins.others)
        if it.step_budget is not None:
            calls.members("budget", it.step_budget)
        if it is not None and "recording_dir" in options:
            calls.say("recorded to", sorted(each.suffix for each in tmp_path.iterdir()))
    check(EXPECTED / "engines.txt", "\n".join(calls.lines).replace(str(tmp_path), "FOLDER"))


REMOTE: list[dict[str, Any]] = [
    {"executor_address": "h:1"},
    {"executor_address": "h:1", "executor_start_timeout": 3, "executor_step_timeout": 4, "max_num_seqs": 4},
    {"executor_address": "h:1", "max_num_seqs": 33},
    {"executor_address": "h:1", "max_num_batched_tokens": 97},
    {"executor_address": "h:1", "max_num_batched_tokens": 96, "enable_chunked_prefill": False},
    {"executor_address": "h:1", "dtype": "float32"},
    {"executor_address": "h:1", "lookahead": 1},
    {"executor_address": "h:1", "executor_tls_ca": "CA", "executor_tls_cert": "CERT", "executor_tls_key": "KEY"},
    {"executor_address": "h:1", "executor_tls_ca": "CA"},
    {"executor_address": "h:1", "executor_tls_ca": "missing"},
]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_connections_to_executors_are_made_as_written_down(
    device: str, calls: Calls, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    about = Description(40, 8, 64, 512, 100, lookahead=1, max_step_tokens=96, device=device)
    remote = SimpleNamespace(describe=lambda: about, close=calls.to("close"))
    monkeypatch.setattr(grpc, "RemoteExecutor", calls.to("RemoteExecutor", remote))
    for name in ("CA", "CERT", "KEY"):
        (tmp_path / name).write_text(f"{name} text")
    for options in REMOTE:
        named = {
            key: str(tmp_path / value) if key.startswith("executor_tls") else value for key, value in options.items()
        }
        settings = Settings.of(executor="grpc", **named)
        tried(calls, f"quire serve {options}", lambda settings=settings: engine.make_executor(settings))
    monkeypatch.setattr(grpc, "choose_device", lambda name: torch.device(device))
    monkeypatch.setattr(grpc, "ExecutorServer", calls.to("ExecutorServer", "server"))
    built = limits.BuiltExecutor(remote, None, {})  # type: ignore[arg-type]
    monkeypatch.setattr(grpc, "make_executor", lambda made: calls.say("lookahead", made.scheduler.lookahead) or built)
    for given in ({}, {"lookahead": 0}, {"lookahead": 3}):
        tried(calls, f"quire executor {given}", lambda given=given: grpc.host(of(**given), "a:0", None))
    check(EXPECTED / f"builds-grpc-{device}.txt", "\n".join(calls.lines).replace(str(tmp_path), "FOLDER"))


FOREIGN: list[dict[str, Any]] = [
    {"model": "m"},
    {"model": "m", "threads": 3, "max_num_seqs": 2, "max_model_len": 64, "dtype": "float32"},
    {"model": "m", "dtype": "bfloat16"},
    {"model": "m", "device": "cuda"},
    {"model": "m", "deterministic": True},
    {"model": "m", "deterministic": False, "enforce_eager": False},
    {"model": "m", "load_format": "dummy"},
    {"model": "m", "quantization": "int8"},
    {"model": "m", "kv_cache_dtype": "fp8"},
    {"model": "m", "kv_cache_memory_bytes": 1 << 20},
    {"model": "m", "num_gpu_blocks_override": 7},
    {"model": "m", "block_size": 8},
    {"model": "m", "speculative_config": NGRAM},
    {"model": "m", "lookahead": 1},
    {"model": "m", "enforce_eager": True},
]


@pytest.mark.parametrize("kind", ["onnx", "hf"])
def test_foreign_executors_are_made_as_written_down(
    kind: str, calls: Calls, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    foreign = SimpleNamespace(
        spec=spec(),
        dtype=torch.float32,
        device=torch.device("cpu"),
        layers=["layer"],
        past=SimpleNamespace(whole=False, about="kept"),
    )
    monkeypatch.setattr(place, "locate", lambda name, **rest: calls.say("located", rest) or tmp_path)
    if kind == "hf":
        monkeypatch.setattr(hf, "choose_device", lambda name: torch.device("cuda" if name == "cuda" else "cpu"))
        monkeypatch.setattr(hf, "HfModel", calls.to("HfModel", foreign))
        monkeypatch.setattr(hf, "load", calls.to("load", "loaded"))
        monkeypatch.setattr(hf, "kv_budget", calls.to("kv_budget", GIB))
        monkeypatch.setattr(hf, "paged", calls.to("paged", "executor"))
    else:
        monkeypatch.setattr(onnx, "OnnxModel", calls.to("OnnxModel", foreign))
        monkeypatch.setattr(onnx, "parameters", lambda spec: 20_000_000)
        monkeypatch.setattr(onnx, "read_spec", lambda config: foreign.spec)
        for config in (None, {}, {"quire_onnx_format": 0}):
            monkeypatch.setattr(onnx, "read_config", lambda folder, config=config: config)
            settings = of(executor=kind, model="m")
            tried(calls, f"of {config}", lambda settings=settings: engine.make_executor(settings))
            (tmp_path / "body.onnx").touch()
        monkeypatch.setattr(onnx, "read_config", lambda folder: {"quire_onnx_format": onnx.ONNX_FORMAT})
    for options in FOREIGN:
        settings = of(executor=kind, **options)
        tried(calls, f"quire serve {options}", lambda settings=settings: engine.make_executor(settings))
    check(EXPECTED / f"builds-{kind}.txt", "\n".join(calls.lines).replace(str(tmp_path), "FOLDER"))


@pytest.mark.parametrize("kind", ["auto", "local", "grpc", "onnx"])
@pytest.mark.parametrize("option", [{"device_map": "auto"}, {"max_memory": '{"cpu": "1GiB"}'}])
def test_where_layers_are_placed_is_asked_of_one_executor_only(
    kind: str, option: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for maker in ("build_local", "extra"):
        monkeypatch.setattr(engine, maker, Calls().to(maker, raises=AssertionError("an executor was made")))
    address = {"executor_address": "127.0.0.1:1"} if kind == "grpc" else {}
    settings = Settings.of(executor=kind, model="embedded", **address, **option)
    [name] = option
    told = rf"--{name.replace('_', '-')} does not go with --executor \w+: it places layers"
    with pytest.raises(InvalidConfig, match=told) as no:
        engine.make_executor(settings)
    assert no.value.param == name


def test_the_memory_of_steps_is_counted_as_written_down() -> None:
    mixture = spec(
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=4,
        moe_intermediate_size=48,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        tie_word_embeddings=False,
        hidden_act="silu",
    )
    wide = spec(num_attention_heads=32, num_key_value_heads=32, head_dim=64, intermediate_size=32)
    lines = []
    for name, each in (("dense", spec()), ("mixture", mixture), ("wide", wide), ("spoken", spec(vocab_size=50_000))):
        for tokens, captured, rows in ((512, 0, 4), (8192, 2048, 256), (16, 2048, 300)):
            for dtype in (torch.bfloat16, torch.float32):
                size = limits.working_bytes(each, dtype, tokens=tokens, captured=captured, rows=rows)
                lines.append(f"{name} {tokens} {captured} {rows} {dtype}: {size}")
    check(EXPECTED / "working-bytes.txt", "\n".join(lines))


def test_devices_and_threads_are_chosen_as_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    for there in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        for name in ("auto", "cpu", "cuda"):
            try:
                lines.append(f"{name}, GPU {there}: {limits.choose_device(name)}")
            except QuireError as error:
                lines.append(f"{name}, GPU {there}: {error}")
    lines += [f"{count}: {limits.choose_threads(count)} threads" for count in (0, 19_999_999, 20_000_000, 10**9)]
    for asked in (None, False, True):
        for own in (False, True):
            for stable in (False, True):
                monkeypatch.setattr(engine, "best_level", lambda: None)
                monkeypatch.setattr(engine, "stable_rows", lambda stable=stable: 64 * stable)
                ops = engine.choose_ops(torch.device("cpu"), asked, embedded=own)
                lines.append(f"deterministic {asked}, embedded {own}, stable {stable}: {type(ops).__name__}")
    lines.append(f"compiled on a CPU: {engine.count_compiles('cpu')()}")
    check(EXPECTED / "devices.txt", "\n".join(lines))


CHILDREN: list[dict[str, Any]] = [
    {"model": "m", "block_size": 32},
    {"executor": "grpc", "executor_address": "h:1", "executor_step_timeout": 9.0},
    {"executor": "grpc", "executor_address": "h:1", "step_timeout": 8.0, "executor_step_timeout": 9.0},
    {"step_timeout": 7.0, "kv_cache_dtype": "fp8"},
    {"device": "cuda"},
    {"model": "broken"},
]


def test_an_engines_process_begins_as_written_down(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    about = Description(40, 16, 64, 2048, 100, device="there", static_gauges={"a": 1.0})
    scheduler = SimpleNamespace(kv="blocks")
    built = SimpleNamespace(description=about, scheduler=scheduler, executor=None, close=calls.to("engine.close"))
    built.prepare_last = lambda work: (calls.say("to be prepared", "last"), work())
    loop = SimpleNamespace(run=calls.to("loop.run", True))
    link = SimpleNamespace(set_inheritable=calls.to("link.set_inheritable"), close=calls.to("link.close"))

    def build(settings: Settings, **named: Any) -> Any:
        calls.to("build_engine")(settings.model.model, **named)
        if settings.model.model == "broken":
            raise InvalidModel("it is broken")
        return built

    class Metrics(engine_child.EngineMetrics):
        def snapshot(self, engine: Any) -> Any:
            return shown([self.static_gauges, self.cache, self.compiles])

    monkeypatch.setattr(engine_child, "EngineMetrics", Metrics)
    monkeypatch.setattr(engine_child.heap, "settled", calls.to("settled"))
    monkeypatch.setattr(engine_child.gc, "collect", calls.to("gc.collect"))
    monkeypatch.setattr(engine_child.socket, "socket", calls.to("socket", link))
    monkeypatch.setattr(engine_child.sys, "argv", ["child", "12"])
    monkeypatch.setattr(engine_child, "build_engine", build)
    monkeypatch.setattr(engine_child, "choose_device", lambda name: torch.device(name.replace("auto", "cpu")))
    monkeypatch.setattr(engine_child, "count_compiles", calls.to("count_compiles", "compiles"))
    monkeypatch.setattr(engine_child.History, "attach", lambda self, kv: calls.say("history follows", kv))
    monkeypatch.setattr(engine_child.GrammarCompiler, "warm_up", calls.to("warm_up"))
    monkeypatch.setattr(engine_child, "begin_context", calls.to("begin_context"))
    monkeypatch.setattr(
        engine_child.StepWatch, "install_signal_handler", lambda self, it: calls.say("watches", self.timeout)
    )
    monkeypatch.setattr(engine_child, "ends_with_server", nullcontext)
    monkeypatch.setattr(engine_child, "_send", lambda link, message: calls.say("sent", message))

    def looped(engine: Any, link: Any, snapshot: Any, *rest: Any) -> Any:
        calls.to("EngineLoop")(engine, link, *rest)
        calls.say("metrics", snapshot())
        return loop

    monkeypatch.setattr(engine_child, "EngineLoop", looped)
    for options in CHILDREN:
        calls.lines += ["", str(options)]
        monkeypatch.setattr(engine_child, "received_settings", lambda link, options=options: Settings.of(**options))
        calls.say("exit", engine_child.main())
    check(EXPECTED / "children.txt", "\n".join(calls.lines))


@pytest.mark.parametrize("gone", [BrokenPipeError, ConnectionResetError])
def test_a_server_that_has_gone_is_found_out_by_the_next_read(gone: type[Exception]) -> None:
    link: Any = SimpleNamespace(sendall=Calls().to("sendall", raises=gone()))
    engine_child._send(link, BuildFailed("InvalidModel", "it is broken"))
    full: Any = SimpleNamespace(sendall=Calls().to("sendall", raises=OSError("full")))
    with pytest.raises(OSError, match="full"):
        engine_child._send(full, BuildFailed("InvalidModel", "it is broken"))


@pytest.mark.parametrize(("quantization", "read"), [("auto", 0), ("int8", 1)])
def test_the_probes_tokens_are_made_once_where_weights_are_quantized(
    quantization: str, read: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, known = engine.build_tokenizer, []
    monkeypatch.setattr(engine, "build_tokenizer", lambda settings: known.append(settings) or real(settings))
    settings = of(device="cpu", num_gpu_blocks_override=8, quantization=quantization)
    gauges = engine.make_executor(settings).static_gauges
    assert len(known) == read
    assert ("quire:canary_top1_agreement" in gauges) == bool(read)
