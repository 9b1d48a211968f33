"""A seed keeps its 64 bits on every way from a request to the noise that it stands for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire.engine.protocol import FrameReader, Submit, ToEngine, encode_frame
from quire.executors.contract import executor_pb2 as pb
from quire.executors.contract import translate
from quire.frontend.interface import Call
from quire.frontend.processor import requests
from quire.model_runner.sampling.features import SamplingFeatures
from quire.model_runner.sampling.noise import stream
from quire.scheduler.plan import NewSequence, Plan, Span
from quire.types import Request, SamplingParams
from tests.server.doubles import TOKENIZER, check_error, served

HIGH = 1 << 63
SEEDS = (0, 5, HIGH - 1, HIGH, HIGH + 5, (1 << 64) - 1)
"""Some differ in their highest bit only."""

DRAWN = SamplingParams(temperature=1.0)


def asked(seed: int) -> Request:
    """As both the server and `LLM` make requests."""
    call = Call(id="c", prompt=(5,), sampling=SamplingParams(seed=seed))
    [request] = requests(call, tokenizer=TOKENIZER, limit=64, seed=0)
    return request


@pytest.mark.parametrize("seed", SEEDS)
def test_all_64_bits_of_a_seed_reach_the_engine_and_its_executors(seed: int) -> None:
    request = asked(seed)
    assert request.seed == seed
    [submit] = FrameReader(ToEngine).feed(encode_frame(Submit([request])))
    assert submit.requests[0].seed == seed
    plan = Plan((NewSequence(0, (5,), 0, 1, DRAWN, seed),), (), (Span(0, 1, 1, 1),))
    sent = translate.send_plan(plan, ()).SerializeToString()
    assert translate.read_plan(pb.Plan.FromString(sent), ()).new_sequences[0].seed == seed


def test_no_two_seeds_are_the_same_noise() -> None:
    assert len({stream(asked(seed).seed, 0) for seed in SEEDS}) == len(SEEDS)
    traits = SamplingFeatures(len(SEEDS))
    for row, seed in enumerate(SEEDS):
        traits.open(NewSequence(row, (5,), 0, 1, DRAWN, asked(seed).seed))
    assert len(np.unique(traits.stream)) == len(SEEDS)


def test_a_negative_seed_is_its_twos_complement_and_no_other() -> None:
    assert asked(-1).seed == (1 << 64) - 1
    assert asked(-HIGH).seed == HIGH


@pytest.mark.anyio
async def test_seeds_beyond_63_bits_are_kept_over_http_and_beyond_64_refused() -> None:
    async with served() as server:
        bodies: dict[str, dict[str, Any]] = {
            "/v1/completions": {"prompt": "the"},
            "/v1/chat/completions": {"messages": [{"role": "user", "content": "the"}]},
            "/v1/generate": {"prompt": "the"},
        }
        for path, body in bodies.items():
            for seed in SEEDS:
                response = await server.post(path, **body, seed=seed)
                assert response.status_code == 200, response.text
                assert server.port.submitted[-1].seed == seed
            for seed in (1 << 64, -HIGH - 1):
                check_error(await server.post(path, **body, seed=seed), 400, "seed", "between")
