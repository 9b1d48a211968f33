"""What `python -m benchmarks.checkpoint` writes can be loaded, and what it finds of memory is a bound on the loader."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from benchmarks import checkpoint
from quire.weights.files import Checkpoint
from quire.weights.load import load_model

LITTLE = {"hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 2816}


@pytest.fixture(autouse=True)
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "CONFIG", {**checkpoint.CONFIG, **LITTLE, "vocab_size": 32000})
    monkeypatch.setattr(checkpoint, "POOL", 1 << 20)


def test_it_is_of_the_size_asked_for_and_sharded(tmp_path: Path) -> None:
    size = checkpoint.write(tmp_path, 0.25)
    assert 0.2 < size / checkpoint.GIB < 0.3
    entries = Checkpoint(tmp_path).entries
    assert len({entry.order[0] for entry in entries.values()}) > 3
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    calls: list[int] = []
    model = load_model(tmp_path, progress=lambda done, total: calls.append(done))
    with ThreadPoolExecutor() as pool:
        assert (torch.get_num_threads(), pool.submit(torch.get_num_threads).result()) == (3, 3)
    torch.set_num_threads(threads)
    assert model.spec.layers > 2
    assert calls == sorted(calls)
    assert calls[-1] == sum(entry.size for entry in entries.values())


def test_loading_takes_little_more_memory_than_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a small vocabulary, which is most of so small a model."""
    monkeypatch.setattr(checkpoint, "CONFIG", {**checkpoint.CONFIG, "vocab_size": 16_000})
    found = checkpoint.measure(tmp_path, checkpoint.write(tmp_path, 0.4), 1)
    assert 0.95 < found["peak_grown_share_of_model"] < 1.25
    assert found["progress_calls"] > 10


@pytest.mark.nightly
def test_loading_a_larger_model_takes_a_tenth_more_at_most(tmp_path: Path) -> None:
    found = checkpoint.measure(tmp_path, checkpoint.write(tmp_path, 2), 1)
    assert found["peak_grown_share_of_model"] < 1.1
