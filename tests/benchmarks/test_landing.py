"""What a long prompt costs sequences that decode meanwhile, measured on an engine without a model."""

from __future__ import annotations

from contextlib import closing

from benchmarks.landing import landed
from quire.engine.engine import Engine
from quire.executors.synthetic import SyntheticExecutor
from quire.scheduler.kv_cache import KVCacheManager, make_prefix_cache
from quire.scheduler.scheduler import Scheduler


def test_gaps_are_counted_before_a_prompt_and_beside_it_until_its_first_token() -> None:
    executor = SyntheticExecutor(pages=2000, page_size=16, rows=8, max_model_len=4096, vocab_size=50000, depth=0)
    scheduler = Scheduler(
        KVCacheManager(2000, 16, make_prefix_cache(16, True, None)),
        rows=8,
        max_num_batched_tokens=64,
        max_chunk_tokens=64,
    )
    with closing(Engine(scheduler, executor)) as engine:
        found = landed(engine, decodes=3, own=20, prompt=600, seed=0)
        assert not engine.has_pending_work
    # Each step has 64 tokens, of which 3 are decoded.
    assert found["tokens_beside"] == 3 * -(-600 // 61)
    assert found["alone_ms"][0] <= found["alone_ms"][1] and found["first_ms"] > 0
    assert found["ratio_p99"] == found["beside_ms"][1] / found["alone_ms"][1]
