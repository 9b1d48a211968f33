"""Threads that wait for one another beside other programs: they sleep, instead of using up their own time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

import pytest

from quire.ops.native.library import best_level

SAID = "import os, quire; quire.SamplingParams; print(os.environ.get('GOMP_SPINCOUNT'))"

STEPS = """
import sys
from quire import LLM  # as whoever starts an engine
import json, subprocess, tempfile, time, torch
from pathlib import Path
from quire.ops.native.library import best_level
from quire.ops.native.ops import NativeOps
from quire.weights.load import load_model
from tests.ops.batches import Pages, poisoned

shape = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2}
shape |= {"intermediate_size": 1536, "vocab_size": 512, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
took, made = [], []
with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
    Path(folder, "config.json").write_text(json.dumps(shape), "utf-8")
    model = load_model(folder, dtype="bfloat16", ops=NativeOps(best_level()), load_format="dummy")
    pages, kv = Pages(60, 4), [poisoned(60, 2, 4, 64, torch.bfloat16) for _ in range(4)]
    neighbours = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(int(sys.argv[1]))]
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for step in range(40):
            if step == 10:
                began = time.process_time()
            said = model.forward(pages.batch([(0, step, [step])]), kv)
        took.append(time.process_time() - began)
        made.append(float(said.float().square().sum()))
    for each in neighbours:
        each.kill()
        each.wait()
    print(*took, *made)
"""


def run(*arguments: str, more: Mapping[str, str] | None = None) -> str:
    """What Python prints, in an environment that says nothing of threads."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    made = subprocess.run(
        [sys.executable, *arguments], env=kept | (more or {}), capture_output=True, text=True, check=True, timeout=300
    )
    return made.stdout.strip()


def test_threads_sleep_soon_unless_the_environment_says_otherwise() -> None:
    assert run("-c", SAID) == "200"
    assert run("-c", SAID, more={"GOMP_SPINCOUNT": "7"}) == "7"
    assert run("-c", SAID, more={"OMP_WAIT_POLICY": "active"}) == "None"


@pytest.mark.skipif(best_level() is None, reason="the CPU kernels do not run on this machine")
def test_two_threads_beside_busy_neighbours_take_no_more_than_their_share() -> None:
    """By processor time, which does not depend on how busy a machine is, unless threads wait by spinning: that takes
    ten times as much and more."""
    neighbours = str(max(1, (os.cpu_count() or 1) // 2))
    one, two, alone, together = run("-c", STEPS, neighbours).split()
    assert alone == together
    assert float(two) < 3 * float(one)
