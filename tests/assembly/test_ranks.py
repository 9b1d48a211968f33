"""Two ranks or stages in processes of their own, over gloo, answer as one rank does, whatever is asked and whatever
happens.

The processes are started once; engines with other settings take turns on their executor.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.assembly.engine import build_engine, make_executor
from quire.config import Settings
from quire.engine.engine import Engine
from quire.engine.executor import Executor
from quire.errors import InvalidConfig, InvalidModel
from quire.executors.ranks import RankedExecutor
from quire.scheduler.constraint import FREE
from quire.scheduler.kv_cache import KVCacheManager, make_prefix_cache
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.speculation import FixedDrafts
from quire.types import Request
from tests.checkpoints import SHAPES, VOCAB, make
from tests.executors.asked import prompts
from tests.executors.driver import Alternate
from tests.executors.test_features import FEATURES
from tests.forked import runs
from tests.mtp import make_mtp
from tests.pairs import pairwise
from tests.weights.test_ranks import UNDIVIDED

pytestmark = pytest.mark.usefixtures("forked_children")

OPTIONS: Mapping[str, Any] = MappingProxyType(
    {
        "dtype": "float32",
        "block_size": 4,
        "num_gpu_blocks_override": 600,
        "max_num_seqs": 10,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "adaptive": False},
        "threads": 1,
        "deterministic": False,
        "cpu_kernels": "torch",
    }
)
NEW = 6
AXES: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "lookahead": (0, 1),
        "drafts": (0, 2),
        "blocks": (600, 60),
        "prefixes": (False, True),
        "tokens": (64, 512),
        "asked": tuple(FEATURES),
    }
)
PAIRS = pairwise(AXES)
SIZES: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "ranks": {"tensor_parallel_size": 2},
        "stages": {"pipeline_parallel_size": 2},
        "both": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
        "three": {"pipeline_parallel_size": 3},
    }
)
IN_CI = {"ranks": 7, "stages": 14}
"""One in so many situations."""


def in_ci(kind: str, at: int, situation: Mapping[str, Any]) -> bool:
    """Of four ranks and of three stages, those situations in which each feature is met first, a half by each."""
    if kind in IN_CI:
        return at % IN_CI[kind] == 0
    place = list(FEATURES).index(situation["asked"])
    return at == FIRST_ASKED[situation["asked"]] and place % 2 == (kind == "three")


SITUATIONS = sorted(PAIRS, key=lambda each: bool(each["asked"] == "every prompt_logprob"))
FIRST_ASKED = {each["asked"]: at for at, each in reversed([*enumerate(SITUATIONS)])}
CASES = [
    pytest.param(
        kind,
        situation,
        id="-".join(map(str, (kind, *situation.values()))),
        marks=() if in_ci(kind, at, situation) else pytest.mark.nightly,
    )
    for kind in SIZES
    for at, situation in enumerate(SITUATIONS)
]


@pytest.fixture(scope="module")
def executors() -> Iterator[Callable[[str], Executor]]:
    """By the kind of ranks; "": one. They are started when they are first used."""
    made: dict[str, Executor] = {}

    def start(kind: str) -> Executor:
        if kind not in made:
            made[kind] = make_executor(Settings.of(**OPTIONS, **SIZES.get(kind, {}))).executor
            assert isinstance(made[kind], RankedExecutor) == bool(kind)
        return made[kind]

    yield start
    for each in made.values():
        each.close()


def engine(executor: Executor, situation: Mapping[str, Any], stages: int) -> Engine:
    about = executor.describe()
    executor.reset()
    blocks = min(situation["blocks"], about.num_blocks)
    lookahead = situation["lookahead"] * max(1, stages - 1)  # a step in flight for each stage
    scheduler = Scheduler(
        KVCacheManager(blocks, about.block_size, make_prefix_cache(about.block_size, situation["prefixes"])),
        rows=about.num_rows,
        max_num_seqs=10,
        max_num_batched_tokens=situation["tokens"],
        max_chunk_tokens=situation["tokens"] // 4,
        speculation=FixedDrafts(situation["drafts"]),
        groups=min(stages, 1 + lookahead),
    )
    return Engine(scheduler, executor, lookahead=lookahead)


def answers(it: Engine, name: str, vocab: int = 300) -> dict[str, Any]:
    """By request: tokens, and log-probabilities as (token, rank, rounded value, tokens of the likeliest)."""
    out: dict[str, Any] = {}
    for index, prompt in enumerate(prompts(vocab)[:5]):
        sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": None, **FEATURES[name]})
        asked = Request(id=str(index), prompt=prompt, max_new_tokens=NEW, sampling=sampling, seed=index)
        it.add(asked, Alternate() if name == "mask" else FREE)
        out[str(index)] = ([], [], [])
    while it.has_pending_work:
        for event in it.step():
            assert event.error is None, event.error
            tokens, scores, prompt_scores = out[event.id]
            tokens.extend(event.tokens)
            scores.extend(event.logprobs)
            prompt_scores.extend(event.prompt_logprobs)
    assert not it.failures
    return out


@pytest.mark.parametrize(("kind", "situation"), CASES)
def test_several_ranks_answer_as_one_does(
    kind: str, situation: Mapping[str, Any], executors: Callable[[str], Executor]
) -> None:
    stages = SIZES[kind].get("pipeline_parallel_size", 1)
    one, two = (answers(engine(executors(each), situation, stages), situation["asked"]) for each in ("", kind))
    check_equal(one, two)


def check_equal(one: dict[str, Any], two: dict[str, Any]) -> None:
    """Tokens are equal, and log-probabilities almost."""
    for id, (tokens, *scores) in two.items():
        assert tokens == one[id][0]
        for got, want in zip(scores, one[id][1:], strict=True):
            assert [each.token for each in got] == [each.token for each in want]
            assert [each.logprob for each in got] == pytest.approx([each.logprob for each in want], abs=1e-4)
            # Unlikely tokens that are almost equally unlikely may change places.
            assert [each.rank for each in got] == pytest.approx([each.rank for each in want], abs=3)
            values = [[value for each in one for _, value in each.top] for one in (got, want)]
            assert values[0] == pytest.approx(values[1], abs=1e-4)


def test_blocks_are_as_large_on_all_ranks_together_as_on_one(executors: Callable[[str], Executor]) -> None:
    whole = executors("").describe().block_bytes
    assert {kind: executors(kind).describe().block_bytes for kind in ("both", "three")} == {
        "both": whole,
        "three": whole,
    }


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["both", "three"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_answers_with_every_feature_as_one_rank_does(shape: str, kind: str, tmp_path: Path) -> None:
    make(tmp_path, shape)
    options = {**OPTIONS, "model": str(tmp_path), "canary": "off", "speculative_config": None}
    stages = SIZES[kind]["pipeline_parallel_size"]
    with ExitStack() as closing:
        one = make_executor(Settings.of(**options)).executor
        closing.callback(one.close)
        try:
            several = make_executor(Settings.of(**options, **SIZES[kind])).executor
        except InvalidModel as refused:
            most = re.search(r"can be cut into (\d+)", str(refused))
            assert shape in UNDIVIDED if most is None else int(most[1]) < stages
            return
        closing.callback(several.close)
        for at, name in enumerate(FEATURES):
            situation = {**SITUATIONS[at], "drafts": 0, "asked": name}
            check_equal(*(answers(engine(each, situation, stages), name, VOCAB) for each in (one, several)))


@pytest.mark.parametrize("kind", ["ranks", pytest.param("stages", marks=pytest.mark.nightly)])
def test_a_model_of_several_ranks_survives_the_loss_of_one(kind: str) -> None:
    """The requests on it fail by name, others run on new ranks, and nothing is left when it is closed."""
    others = set(ranks())
    llm = LLM(**SIZES[kind], **OPTIONS)
    try:
        before = sorted(set(ranks()) - others)
        assert len(before) == 2
        greedy = SamplingParams(temperature=0.0, max_tokens=8)
        wanted = llm.generate(["Once upon a time"], greedy, use_tqdm=False)[0].outputs[0].text
        shape = "(cat|dog) [0-9]{3} (red|blue)"
        formed = SamplingParams(
            temperature=0.9, n=2, max_tokens=24, structured_outputs=StructuredOutputsParams(regex=shape)
        )
        for output in llm.generate(["Once upon a time", "Hello"], formed, use_tqdm=False):
            assert all(re.fullmatch(shape, one.text) for one in output.outputs)
        os.kill(before[1], signal.SIGKILL)
        lost = llm.generate(["Once upon a time"], greedy, use_tqdm=False)[0].outputs[0]
        assert lost.finish_reason == "error"
        assert f"rank 1 of 2 (process {before[1]}) was ended by signal 9" in str(lost.stop_reason)
        assert llm.generate(["Once upon a time"], greedy, use_tqdm=False)[0].outputs[0].text == wanted
        after = set(ranks()) - others
        assert len(after) == 2 and not after & set(before)
    finally:
        llm.close()
    assert set(ranks()) == others


def ranks() -> list[int]:
    """The ranks that this process has started, in order."""
    pids = list[int]()
    for task in Path(f"/proc/{os.getpid()}/task").iterdir():
        with suppress(FileNotFoundError):  # a thread that has ended
            pids += map(int, (task / "children").read_text().split())
    pids.sort()
    return [pid for pid in pids if runs(pid, "rank_child")]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tensor_parallel_size": 2, "max_model_len": 1 << 20}, "max_model_len"),
        ({"tensor_parallel_size": 2, "executor": "onnx"}, "--tensor-parallel-size does not go with --executor onnx"),
        ({"tensor_parallel_size": 2, "executor": "hf"}, "--tensor-parallel-size does not go with --executor hf"),
        ({"pipeline_parallel_size": 2, "executor": "hf"}, "--pipeline-parallel-size does not go with --executor hf"),
        ({"pipeline_parallel_size": 2, "kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8 does not go with --pipeline"),
    ],
)
def test_what_cannot_be_divided_is_refused_as_by_one_rank(options: dict[str, Any], said: str) -> None:
    before = set(ranks())
    with pytest.raises(InvalidConfig, match=said):
        build_engine(Settings.of(**options))
    assert set(ranks()) == before


DRAFTING = (
    "deepseek_v3-groups-yarn",
    "deepseek_v32-groups-yarn",
    "qwen3_next-shared-keys",
    "mimo-gqa",
    "ernie4_5_moe-gqa",
    "nemotron_h-experts",
)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("shape", "kind", "layers"),
    # The others have two layers beside those that draft.
    [
        (shape, kind, layers)
        for shape in DRAFTING
        for kind in SIZES
        for layers in (1, 2)
        if (kind != "three" or shape.startswith(("qwen", "nemotron"))) and not (layers > 1 and "nemotron" in shape)
    ],
)
def test_the_layers_for_multi_token_prediction_draft_the_same(
    shape: str, kind: str, layers: int, tmp_path: Path
) -> None:
    make_mtp(tmp_path, shape, layers)
    sizes: dict[str, Any] = {"max_model_len": 96, "kv_cache_memory_bytes": 1 << 26, "skip_tokenizer_init": True}
    drafts = {"method": "mtp", "num_speculative_tokens": 2}
    answers = []
    for divided, config in (({}, None), (SIZES[kind], drafts)):
        with LLM(str(tmp_path), dtype="float32", speculative_config=config, **divided, **sizes) as llm:
            asked = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
            done = llm.generate([[5, 9, 7, 11, 30], [44, 3, 8]], asked, use_tqdm=False)
            answers.append([each.outputs[0].token_ids for each in done])
    assert answers[0] == answers[1]
