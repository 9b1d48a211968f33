"""Peers of `quire bench cpu`: their processes, what is refused, and the random weights that all of them read."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from quire.assembly.engine import build_engine
from quire.bench import cpu
from quire.bench.late import cpu as bench_cpu
from quire.bench.peers import checkpoints, process
from quire.bench.peers.process import Peer, check, pythons
from quire.config import Settings
from quire.errors import InvalidConfig
from quire.ops.native.library import best_level

TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 300,
    "max_position_embeddings": 128,
}
ECHO = """
def load(model, threads, sequences, context):
    def generate(prompts, new):
        if new > 9:
            raise ValueError("too many")
        print("noise")
        return [[threads] * new for _ in prompts]
    return generate, "1.2"
"""


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    service = (process.HERE / "service.py").read_text("utf-8")
    (tmp_path / "service.py").write_text(service, "utf-8")
    (tmp_path / "echo.py").write_text(ECHO, "utf-8")
    (tmp_path / "missing.py").write_text("def load(*_):\n    import no_such_package\n", "utf-8")
    monkeypatch.setattr(process, "HERE", tmp_path)
    monkeypatch.setattr(process, "PACKAGES", {"missing": "no-such-package"})
    return str(tmp_path)


def test_a_peer_answers_in_a_process_of_its_own_and_its_failures_are_named(echo: str) -> None:
    with Peer("echo", sys.executable, Path(echo), 3, 1, 10) as peer:
        assert peer.version == "1.2"
        said = peer.ask([[1], [2]], 2)
        assert said["tokens"] == [[3, 3], [3, 3]]
        assert peer([[1]], 1) == pytest.approx(peer.ask([[1]], 1)["wall"], abs=10)
        with pytest.raises(RuntimeError, match="echo: ValueError: too many"):
            peer([[1]], 10)
        assert peer.ask([[1]], 1)["tokens"] == [[3]]
    assert peer.process.poll() is not None


def test_a_peer_does_not_wait_for_its_threads_as_this_process_does(echo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(echo, "spins.py").write_text(
        "import os\ndef load(*_):\n    return None, os.environ.get('GOMP_SPINCOUNT')\n", "utf-8"
    )
    monkeypatch.setenv("GOMP_SPINCOUNT", "200")
    with Peer("spins", sys.executable, Path(echo), 1, 1, 10) as peer:
        assert peer.version == "None"


def test_a_peer_that_is_not_installed_says_what_to_install(echo: str) -> None:
    with pytest.raises(
        InvalidConfig, match=r"no_such_package.*pip install no-such-package.*--peer-python missing=PATH"
    ):
        Peer("missing", sys.executable, Path(echo), 1, 1, 10)


def test_what_cannot_be_measured_is_refused_by_name() -> None:
    check(["llama-cpp", "openvino", "transformers"], "bf16")
    for peers, kind, says in (
        (["vllm"], "bf16", "--vs vllm: vllm has no wheel"),
        (["ollama"], "bf16", "--vs ollama is not known"),
        (["openvino"], "q8_0", "--vs openvino does not run --format q8_0"),
    ):
        with pytest.raises(InvalidConfig, match=says):
            check(peers, kind)
    with pytest.raises(InvalidConfig, match="use PEER=PATH"):
        pythons(["vllm=/usr/bin/python3"])
    assert pythons(["openvino=/x"])["openvino"] == "/x"
    refused = CliRunner().invoke(bench_cpu, ["--threads", "2", "--clock", "cpu"])
    assert isinstance(refused.exception, InvalidConfig)


@pytest.mark.parametrize("kind", ["bf16", "q8_0"])
def test_a_folder_and_a_gguf_file_are_the_same_model(kind: str, tmp_path: Path) -> None:
    folder = checkpoints.write_folder(tmp_path / "model", TINY, "bfloat16")
    file = checkpoints.write_gguf(tmp_path / "model.gguf", TINY, kind)
    answers = []
    for model in (folder, file):
        engine = build_engine(
            Settings.of(model=str(model), device="cpu", dtype="float32", max_num_seqs=1, max_model_len=64)
        )
        request = engine.submit([5, 9, 30, 2], 6)
        made = [token for _ in range(20) if engine.has_pending_work for token in tokens_of(engine.step(), request)]
        answers.append(made)
    assert [len(made) for made in answers] == [6, 6]
    assert answers[0] == answers[1] or kind == "q8_0"


def tokens_of(outputs: object, request: str) -> list[int]:
    """New tokens of a request in what a step returns."""
    return [token for each in outputs if each.id == request for token in each.tokens]  # type: ignore[attr-defined]


def test_the_bandwidth_of_memory_is_a_speed() -> None:
    before = torch.get_num_threads()
    assert cpu.bandwidth() > 1e6
    assert torch.get_num_threads() == before


def test_a_layer_costs_time_and_few_calls(tmp_path: Path) -> None:
    """Layers in one call of the library make fewer than one each; torch's operations many."""
    folder = checkpoints.write_folder(tmp_path / "model", {**TINY, "num_hidden_layers": 8}, "bfloat16")
    found = {}
    for kernels in ("auto", "torch"):
        how = {"dtype": "bfloat16", "threads": 1, "cpu_kernels": kernels}
        measured = cpu._Quire(folder, how, 2, 64, "wall")
        found[kernels] = measured.layer_cost([[5, 9, 30], [7, 2, 4]], 8)
        assert measured([[5, 9, 30], [7, 2, 4]], 3) > 0  # it goes on as before
        assert found[kernels]["us"] > 0
    assert found["torch"]["calls"] > 10
    assert found["auto"]["calls"] < found["torch"]["calls"] / (4 if best_level() else 0.5)
