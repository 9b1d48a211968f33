"""Quantised on request, all the way: measured, told in /metrics, and refused where it spoils the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.assembly.engine import build_engine
from quire.config import Settings
from quire.engine.engine import Engine
from quire.errors import InvalidConfig, InvalidModel
from quire.layers.quantization import scaled
from quire.models.registry import Model
from quire.observability import prometheus
from quire.observability.engine_metrics import METRICS, EngineMetrics
from quire.types import GREEDY, Request
from quire.weights.canary import Canary
from tests.live import serving

SMALL = {"max_num_seqs": 2, "max_model_len": 256}


def tokens(engine: Engine) -> list[int]:
    engine.add(Request(id="a", prompt=(5, 9, 30, 7), max_new_tokens=12, sampling=GREEDY))
    made: list[int] = []
    while engine.has_pending_work:
        for event in engine.step():
            made += event.tokens
    engine.close()
    return made


def test_weights_and_kv_are_quantised_on_request_and_measured() -> None:
    engine = build_engine(Settings.of(**SMALL, quantization="fp8", kv_cache_dtype="fp8"))
    facts = engine.description.static_gauges
    assert 0.9 < facts["quire:canary_top1_agreement"] < 1
    assert 0 < facts["quire:canary_kl_nats"] < 0.01
    assert 0 < facts["quire:canary_kv_kl_nats"] < 0.01
    assert facts["quire:kv_cache_float8_layers"] == 8
    plain = build_engine(Settings.of(**SMALL))
    assert plain.description.static_gauges == {}
    assert engine.description.block_bytes * 2 == plain.description.block_bytes
    metrics = EngineMetrics()
    metrics.static_gauges = facts
    text = prometheus.text(METRICS, metrics.snapshot(engine), model="m").decode()
    assert f'quire:canary_kl_nats{{engine="0",model_name="m"}} {facts["quire:canary_kl_nats"]}' in text
    assert len(tokens(engine)) == len(tokens(plain)) == 12


def test_kv_in_e5m2_moves_answers_more_than_in_e4m3_and_takes_the_same_memory() -> None:
    one, other = (build_engine(Settings.of(**SMALL, kv_cache_dtype=name)) for name in ("fp8", "fp8_e5m2"))
    kl = [each.description.static_gauges["quire:canary_kv_kl_nats"] for each in (one, other)]
    assert 0 < 2 * kl[0] < kl[1] < 0.02
    assert other.description.static_gauges["quire:kv_cache_float8_layers"] == 8
    assert one.description.block_bytes == other.description.block_bytes
    one.close()
    assert len(tokens(other)) == 12


def test_a_server_prints_what_its_canary_found_and_tells_it_in_its_metrics(tmp_path: Path) -> None:
    with serving(tmp_path, "--quantization", "int8", "--kv-cache-dtype", "fp8") as server:
        assert 0.9 < server.metric("quire:canary_top1_agreement") <= 1
        assert 0 < server.metric("quire:canary_kl_nats") < 0.01
        assert 0 < server.metric("quire:canary_kv_kl_nats") < 0.01
        assert server.metric("quire:kv_cache_float8_layers") == 8
        assert "quantized weights: " in server.log
        assert "K/V in float8 in 8 of 8 layers: " in server.log


def test_what_spoils_the_model_is_refused_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(InvalidModel, match=r"quantisation has degraded the model: .* next tokens stay the same"):
        build_engine(Settings.of(**SMALL, quantization="int8", canary_min_agreement=1.0))
    with pytest.raises(InvalidModel, match=r"--kv-cache-dtype fp8 has degraded the model"):
        build_engine(Settings.of(**SMALL, kv_cache_dtype="fp8", canary_max_kl=0.0))
    rightly = scaled.quantize

    def wrongly(*args: object) -> object:
        numbers, scale = rightly(*args)  # type: ignore[arg-type]
        return numbers, scale.roll(1, 0)

    monkeypatch.setattr(scaled, "quantize", wrongly)
    with pytest.raises(InvalidModel, match="quantisation has degraded the model"):
        build_engine(Settings.of(**SMALL, quantization="fp8"))
    build_engine(Settings.of(**SMALL, quantization="fp8", canary="warn")).close()
    assert "next tokens stay the same" in caplog.text
    assert build_engine(Settings.of(**SMALL, quantization="fp8", canary="off")).description.static_gauges == {}


def test_a_model_that_has_passed_is_not_judged_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    probes = list[int]()
    rightly = Canary.record_reference

    def counted(canary: Canary, model: Model, device: torch.device) -> torch.Tensor:
        probes.append(1)
        return rightly(canary, model, device)

    monkeypatch.setattr(Canary, "record_reference", counted)

    def started(**options: object) -> tuple[Engine, int]:
        probes.clear()
        return build_engine(Settings.of(**SMALL, **{"quantization": "int8", **options})), len(probes)

    (first, some), (second, none) = started(), started()
    assert (some, none) == (2, 0)
    assert second.description.static_gauges == first.description.static_gauges
    assert tokens(second) == tokens(first), "quantized all the same"
    assert [started(**other)[1] for other in ({"quantization": "fp8"}, {})] == [2, 0]
    with pytest.raises(InvalidModel, match="quantisation has degraded the model"):
        started(canary_min_agreement=1.0)
    assert not probes, "what is known is compared with other thresholds"
    with pytest.raises(InvalidModel, match="quantisation has degraded the model"):
        started(quantization="int8_w8a8", canary_min_agreement=1.0)
    assert started(quantization="int8_w8a8")[1] == 2, "what was refused is judged again"


def test_a_method_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(InvalidConfig, match=r"must be one of auto, fp8, .*, not 'fp9'. Did you mean 'fp8'"):
        Settings.of(quantization="fp9")
    with pytest.raises(InvalidModel, match="--quantization gptq: the checkpoint is not quantized in this format"):
        build_engine(Settings.of(**SMALL, quantization="gptq"))
