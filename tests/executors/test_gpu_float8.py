"""On a GPU: K/V in float8 answers as the CPU path's does, with the scales of a checkpoint and with measured ones."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.assembly.engine import build_engine
from quire.config import Settings
from quire.engine.engine import Engine
from quire.ops.quantized import FLOAT8
from quire.types import Request, SamplingParams
from quire.weights.files import SINGLE
from tests import checkpoints

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GREEDY = SamplingParams(temperature=0.0, logprobs=1)
SIZES: dict[str, Any] = {"max_model_len": 128, "num_gpu_blocks_override": 64, "max_num_seqs": 4, "canary": "warn"}


def built(folder: Path, **options: Any) -> Engine:
    return build_engine(Settings.of(model=str(folder), dtype="float32", skip_tokenizer_init=True, **SIZES, **options))


def answers(engine: Engine) -> dict[str, tuple[int, ...]]:
    for i in range(4):
        prompt = tuple(7 * (i + j) % 190 for j in range(9 + 20 * i))
        engine.add(Request(id=str(i), prompt=prompt, max_new_tokens=16, sampling=GREEDY))
    made: dict[str, tuple[int, ...]] = {}
    while engine.has_pending_work:
        for event in engine.step():
            made[event.id] = made.get(event.id, ()) + tuple(event.tokens)
    return made


@pytest.mark.parametrize("form", FLOAT8)
@pytest.mark.parametrize("options", [{}, {"deterministic": True}, {"enforce_eager": True}], ids=str)
@pytest.mark.parametrize("shape", ["qwen3-gqa", "gpt_oss-gqa", "deepseek_v3-groups-yarn", "deepseek_v32-groups-yarn"])
def test_answers_with_float8_are_those_of_the_cpu(
    shape: str, form: str, options: dict[str, Any], tmp_path: Path
) -> None:
    checkpoints.make(tmp_path, shape)
    file = tmp_path / SINGLE
    if form == "fp8" and not shape.startswith("deepseek"):
        tensors = load_file(file)
        name = "model.layers.0.self_attn"
        save_file({**tensors, f"{name}.k_scale": torch.tensor(0.02), f"{name}.v_scale": torch.tensor([0.03])}, file)
    with (
        closing(built(tmp_path, device="cpu", kv_cache_dtype=form, cpu_kernels="torch")) as host,
        closing(built(tmp_path, device="cuda", kv_cache_dtype=form, **options)) as card,
    ):
        ours, theirs = (each.description.static_gauges for each in (card, host))
        assert ours["quire:kv_cache_float8_layers"] == theirs["quire:kv_cache_float8_layers"] > 0
        assert ours["quire:canary_kv_kl_nats"] == pytest.approx(theirs["quire:canary_kv_kl_nats"], rel=0.2)
        assert card.description.block_bytes / card.description.block_size == (
            host.description.block_bytes / host.description.block_size
        )
        got, want = answers(card), answers(host)
    same = [got[i] == want[i] for i in want]
    # A number that is nearly halfway between two of float8 may be rounded to the other.
    assert sum(same) >= len(same) - 1, (got, want)
    assert all(got[i][:4] == want[i][:4] for i in want)
