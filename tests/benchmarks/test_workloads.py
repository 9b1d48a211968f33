"""What the GPU benchmarks ask for is the same every time, and their ceilings are what arithmetic says."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest

from benchmarks import http
from benchmarks.gpu import grouped, judged, peer
from benchmarks.shapes import SHAPES, write
from benchmarks.workloads import BANDWIDTH, MATRIX, WORKLOADS, floor, prompts
from quire.assembly.text import build_text
from quire.bench.load_client import ClientTally, LoadJob, run_job
from quire.config import Settings
from quire.errors import InvalidConfig
from quire.models.registry import parameters, read_spec


def test_prompts_are_the_same_every_time_and_share_what_they_shall() -> None:
    ids, new = prompts(5, (3, 9), (2, 4), shared=7, seed=1)
    assert (ids, new) == prompts(5, (3, 9), (2, 4), shared=7, seed=1)
    assert ids != prompts(5, (3, 9), (2, 4), shared=7, seed=2)[0]
    assert all(each[:7] == ids[0][:7] and 10 <= len(each) <= 16 for each in ids)
    assert all(2 <= n <= 4 for n in new)


@pytest.mark.parametrize("name", list(SHAPES))
def test_every_shape_is_one_we_can_read(name: str) -> None:
    assert parameters(read_spec(dict(SHAPES[name]))) > 1e8


def test_the_ceiling_of_decode_is_weights_and_kv_over_bandwidth() -> None:
    spec = read_spec(dict(SHAPES["llama-3.1-8b"]))
    count = parameters(spec)
    seconds = floor(spec, count, [(512, 128)], seats=256, prompts=False)
    read = 127 * (2 * (count - spec.vocab * spec.hidden) + (512 + 64) * 131072)
    assert seconds == pytest.approx(read / BANDWIDTH)


def test_the_ceiling_of_prompts_is_their_operations() -> None:
    spec = read_spec(dict(SHAPES["llama-3.1-8b"]))
    body = parameters(spec) - 2 * spec.vocab * spec.hidden
    seconds = floor(spec, parameters(spec), [(2048, 1)] * 64, seats=256)
    attention = 4 * 32 * 32 * 128 * 64 * 2048**2 / 2
    assert seconds == pytest.approx((2 * body * 64 * 2048 + attention) / MATRIX)


def test_rows_stand_beside_the_peer_and_the_target() -> None:
    burst = judged({"workload": "burst-3b", "batch": "", "seconds": 2.0}, [(10, 30), (10, 50)], 1.0)
    assert (burst["ours"], burst["ceiling"], burst["peer"], burst["target"]) == (40.0, 80.0, 15718, 20000)
    token = judged({"workload": "tpot-8b", "batch": "8", "ms_a_token": 4.0}, [(512, 128)] * 8, 0.254)
    assert (token["ours"], token["ceiling"], token["peer"]) == (4.0, pytest.approx(2.0), 5.19)
    assert set(peer()["target"]) <= set(WORKLOADS)


def test_a_model_is_loaded_once_for_all_its_workloads() -> None:
    assert dict(grouped(("burst-3b", "tpot-8b", "prefix-3b"))) == {
        "llama-3.2-3b": ["burst-3b", "prefix-3b"],
        "llama-3.1-8b": ["tpot-8b"],
    }


def test_a_shape_without_weights_has_a_tokenizer(tmp_path: Path) -> None:
    text = build_text(Settings.of(model=str(write(tmp_path, "gpt2"))))
    assert text.tokenizer.encode("hello")
    with pytest.raises(InvalidConfig, match="gpt2"):
        write(tmp_path, "gpt3")


def test_the_client_counts_every_token_of_a_server_that_does_nothing() -> None:
    async def measured() -> ClientTally:
        server = await asyncio.start_server(http.reply, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        job = LoadJob(
            host="127.0.0.1",
            port=port,
            model="m",
            streams=2,
            prompts=[[1, 2]] * 5,
            output_lens=[3, 4, 5, 6, 7],
            begin=time.time(),
        )
        tally = await run_job(job)
        server.close()
        return tally

    tally = asyncio.run(measured())
    assert (tally.tokens, tally.events, tally.failed) == (25, 25, 0)
    assert len(tally.first) == 5 and len(tally.gaps) == 20
    assert json.dumps(tally.__dict__)
