"""On two GPUs: a prefill and a decode engine, each with a GPU of its own, answer as one engine does."""

from __future__ import annotations

import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.frontend.supervisor import free_port
from tests.live import Live, serving
from tests.test_disaggregated_servers import ask, eventually, random_prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

ON_CARDS = ("--device", "cuda", "--dtype", "float32", "--gpu-memory-utilization", "0.1", "--max-model-len", "512")


def test_a_split_between_two_cards_answers_as_one_engine(tmp_path: Path) -> None:
    role = ("--disaggregation-address", f"127.0.0.1:{free_port()}", "--disaggregation-min-tokens", "64")
    kinds = {
        "one": ("0", ()),
        "prefill": ("0", (*role[:2], "--disaggregation-mode", "prefill")),
        "decode": ("1", (*role, "--disaggregation-mode", "decode", "--disaggregation-max-slowdown", "1e9")),
    }
    prompts = random_prompts(40, seed=3)
    with ExitStack() as stack:
        servers: dict[str, Live] = {}
        for name, (card, options) in kinds.items():
            (folder := tmp_path / name).mkdir()
            started: dict[str, Any] = {"environ": {"CUDA_VISIBLE_DEVICES": card}, "start": subprocess.Popen}
            servers[name] = stack.enter_context(serving(folder, *ON_CARDS, *options, **started))
        eventually(lambda: ": connected" in servers["decode"].log)
        for prompt in prompts:
            one, two = (ask(servers[name], prompt, max_tokens=16) for name in ("one", "decode"))
            assert one["choices"][0]["token_ids"] == two["choices"][0]["token_ids"]
        assert servers["decode"].metric("quire:remote_prefills_total", outcome="done") > 20
        assert servers["prefill"].metric("quire:kv_offload_copied_bytes_total", copy="send") > 0
