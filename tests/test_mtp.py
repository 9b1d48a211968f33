"""Drafts by a model's layer for multi-token prediction: they are those of the report's formulas, and no answer depends
on them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

from quire.assembly.speculate import own_layers, speculative_graph_keys
from quire.cli import late, plan
from quire.cli.inspect import read_facts
from quire.config import Settings
from quire.engine.engine import Engine
from quire.errors import InvalidConfig, InvalidModel
from quire.executors.local import CudaExecutor, LocalExecutor
from quire.llm import LLM
from quire.model_runner.device_steps import DeviceSteps, TorchSteps
from quire.model_runner.graphs import CudaQueue, GraphKey, WorkQueue
from quire.model_runner.memory import allocate, block_bytes, layer_shapes
from quire.model_runner.mtp import MTPDrafter, MTPProposer
from quire.model_runner.triton_steps import TritonSteps
from quire.models.registry import Model, mtp_of
from quire.ops.triton.ops import TritonOps
from quire.scheduler.kv_cache import KVCacheManager, make_prefix_cache
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.speculation import AdaptiveDrafts, FixedDrafts
from quire.types import GREEDY, Request, SamplingParams, StructuredOutputsParams
from quire.weights.load import load_model, no_progress
from quire.weights.locate import embedded
from quire.weights.quantize import quantize
from tests import interpreter
from tests.gguf_files import write
from tests.mtp import SHAPES, Reference, make_mtp
from tests.test_speculation import SCHEMA, Drawn

PAGES, SIZE, ROWS, CONTEXT, DRAFTS = 200, 4, 12, 96, 3
CPU = torch.device("cpu")
RECURRENT = tuple(shape for shape in SHAPES if shape.startswith(("qwen", "nemotron")))
DENSE = "deepseek_v3-groups-yarn"
SEVERAL = (
    (DENSE, 2),
    (DENSE, 4),
    ("glm4_moe-groups", 3),
    ("mimo-gqa", 3),
    ("ernie4_5_moe-gqa", 2),
    ("qwen3_next-shared-keys", 3),
    ("qwen3_5_text-shared-keys", 2),
)
"""Shapes with several layers that draft: fewer than are drafted, as many, and more."""


def several(*quick: str, without: Sequence[str] = ()) -> list[Any]:
    """SEVERAL, of which the first of each shape in `quick` is not for the night alone."""
    first = [next(each for each in SEVERAL if each[0] == shape) for shape in quick]
    wanted = [each for each in SEVERAL if each[0] not in without]
    return [each if each in first else pytest.param(*each, marks=pytest.mark.nightly) for each in wanted]


LAYERS = (1, pytest.param(3, marks=pytest.mark.nightly))
SETTINGS = (
    GREEDY,
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.0, top_p=0.8, presence_penalty=1.0),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, logprobs=1),
    SamplingParams(temperature=1.0, logit_bias={60: 4.0}, min_tokens=6, bad_words_token_ids=((7,), (8, 9))),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Reference, Model, Path]]:
    @cache
    def make(shape: str, drafts: int = 1) -> tuple[Reference, Model, Path]:
        folder = tmp_path_factory.mktemp(shape)
        return make_mtp(folder, shape, drafts), load_model(folder, dtype="float32", mtp=True), folder

    return make


class Recorder:
    """Notes drafts: (history, drafts). wholes: prompts with their answers, from which every other draft is replaced by
    what is right, since those of random weights never are."""

    def __init__(self, wholes: Sequence[Sequence[int]] = ()) -> None:
        self.said: list[tuple[list[int], list[int]]] = []
        self.wholes = [list(each) for each in wholes]

    def note(self, known: list[int], drafts: list[int]) -> list[int]:
        """The drafts to feed."""
        self.said.append((known, drafts))
        if len(known) % 2:
            return drafts
        right = next((each[len(known) :] for each in self.wholes if each[: len(known)] == known), [])
        return [*right, *drafts[len(right) :]][: len(drafts)]


def host(model: Model, said: Recorder | None, pages: int) -> LocalExecutor:
    """A CPU's executor; with drafts, if `said` is there to take them."""
    mtp = mtp_of(model)
    assert mtp is not None
    drafter = None
    if said is not None:
        kv = allocate(layer_shapes(mtp.kv_shapes, torch.float32), pages=pages, page_size=SIZE)
        drafter = MTPDrafter(mtp.layers, kv, vocab_size=mtp.vocab, num_drafts=DRAFTS, rows=ROWS, device=CPU)
        inner = drafter.propose

        def propose(rows: Any, which: Any, num_drafts: Any) -> Any:
            known = [rows.tokens[row, : rows.num_known[row]].tolist() for row in which]
            out = inner(rows, which, num_drafts)
            for history, line, n in zip(known, out, num_drafts, strict=True):
                line[:n] = said.note(history, line[:n].tolist())
            return out

        drafter.propose = propose  # type: ignore[method-assign]
    sizes = {"pages": pages, "page_size": SIZE, "rows": ROWS, "max_model_len": CONTEXT}
    snapshots = 8 if model.spec.recurrent else 0
    return LocalExecutor(model, **sizes, dtype=torch.float32, drafter=drafter, snapshots=snapshots)  # type: ignore[arg-type]


def ahead(
    model: Model,
    said: Recorder,
    pages: int,
    steps: DeviceSteps | None = None,
    queue: WorkQueue | None = None,
    device: torch.device = CPU,
) -> CudaExecutor:
    """A device's executor, which drafts for itself."""
    mtp = mtp_of(model)
    assert mtp is not None
    kv = allocate(layer_shapes(mtp.kv_shapes, torch.float32), pages=pages, page_size=SIZE, device=device)
    proposer = MTPProposer(mtp.layers, kv, num_drafts=DRAFTS, rows=ROWS, device=device)
    queue = queue or WorkQueue()
    inner, run = proposer._draft, queue.run
    held: list[Any] = []

    def draft(key: GraphKey, context: Any) -> None:
        held[:] = [context]
        inner(key, context)

    def note(key: GraphKey, work: Callable[[], object]) -> None:
        """After `work`, which may be replayed."""
        run(key, work)
        if key.kind != "draft":
            return
        context = held[0]
        state = context.state
        for c in range(int(state.step.counts[3])):
            row = int(state.step.sample_row[state.chain[c]])
            known, wanted = int(state.columns["known"][row]), int(state.wanted_drafts[c])
            history = state.history[row].tolist()
            drafts = said.note(history[:known], history[known : known + wanted])
            state.history[row, known : known + wanted] = torch.tensor(drafts, dtype=torch.int32, device=device)

    proposer._draft, queue.run = draft, note  # type: ignore[method-assign]
    sizes = {"pages": pages, "page_size": SIZE, "rows": ROWS, "max_model_len": CONTEXT, "tokens": 48}
    how = {"dtype": torch.float32, "device": device, "steps": steps or TorchSteps(), "queue": queue}
    snapshots = 8 if model.spec.recurrent else 0
    return CudaExecutor(model, **sizes, **how, proposer=proposer, snapshots=snapshots)  # type: ignore[arg-type]


def engine(
    executor: LocalExecutor, policy: Callable[[int], Any] = FixedDrafts, *, depth: int = 0, chunk: int = 20
) -> Engine:
    found = executor.describe()
    cache = make_prefix_cache(SIZE, True, found.num_snapshots if found.recurrent else None)
    kv = KVCacheManager(found.num_blocks, SIZE, cache)
    sizes = {"max_num_seqs": 6, "max_num_batched_tokens": 48, "max_chunk_tokens": chunk}
    speculation = policy(found.num_drafts)
    return Engine(Scheduler(kv, rows=ROWS, **sizes, speculation=speculation), executor, lookahead=depth)  # type: ignore[arg-type]


def requests(count: int, *, greedy: bool = False) -> list[Request]:
    """Prompts that share beginnings, with every setting in turn."""
    rng = random.Random(3)
    draw = lambda n: tuple(rng.randrange(3, 190) for _ in range(n))  # noqa: E731
    shared = draw(21)
    asked = []
    for i in range(count):
        prompt, sampling = (shared if i % 3 else ()) + draw(rng.randrange(1, 12)), GREEDY if greedy else SETTINGS[i % 5]
        asked.append(
            Request(
                id=str(i), prompt=prompt, max_new_tokens=rng.randrange(3, 20), sampling=sampling, seed=i, choice=i % 2
            )
        )
    return asked


def answers(it: Engine, asked: Sequence[Request]) -> dict[str, tuple[int, ...]]:
    for request in asked:
        it.add(request)
    while it.has_pending_work:
        it.step()
    assert it.gauges().used_blocks == 0
    return {c.id: c.tokens for c in it.completed_requests}


def apart(model: Model) -> tuple[list[Request], dict[str, tuple[int, ...]], Recorder]:
    """Greedy requests that share no beginning, their answers, and a recorder that knows them."""
    asked = [r for r in requests(18, greedy=True) if not int(r.id) % 3]
    want = answers(engine(host(model, None, PAGES)), asked)
    return asked, want, Recorder([(*r.prompt, *want[r.id]) for r in asked])


def compare(reference: Reference, it: Engine, asked: list[Request], want: Any, said: Recorder) -> None:
    """Answers and drafts are as they should be, and some drafts were accepted and some rejected."""
    assert answers(it, asked) == want
    stats = it.scheduler.draft_stats
    assert 5 < stats.num_accepted < stats.num_drafted - 5
    # A step that is launched ahead may draft past the limit of a request, for which there are no blocks.
    ends = {tuple(each[: len(r.prompt)]): len(each) for r, each in zip(asked, said.wholes, strict=True)}
    checked = [
        (known, drafts)
        for known, drafts in said.said
        if drafts and any(tuple(known[: len(p)]) == p and len(known) + len(drafts) <= end for p, end in ends.items())
    ]
    assert len(checked) > 15
    for known, drafts in checked[::2]:
        assert drafts == reference.drafts(known, len(drafts))


@pytest.mark.parametrize("shape", SHAPES)
def test_drafts_are_those_of_the_reference(made: Any, shape: str) -> None:
    """In chunks and mixed batches, whatever was accepted before."""
    reference, model, _ = made(shape)
    asked, want, said = apart(model)
    compare(reference, engine(host(model, said, PAGES), Drawn), asked, want, said)


@pytest.mark.parametrize(
    ("shape", "layers", "theirs"),
    [
        ("glm4_moe-groups", 1, False),
        ("glm4_moe-groups", 3, False),
        ("qwen3_5_text-shared-keys", 1, False),
        ("qwen3_5_text-shared-keys", 1, True),
    ],
)
def test_drafts_of_a_gguf_file_are_those_of_the_reference(
    made: Any, shape: str, layers: int, theirs: bool, tmp_path: Path
) -> None:
    """theirs: written by llama.cpp's package."""
    reference, _, folder = made(shape, layers)
    path = tmp_path / "model.gguf"
    if theirs:
        tensors = {n: t for n, t in load_file(folder / "model.safetensors").items() if n.startswith("mtp.")}
        write(path, reference.model, facts={"qwen35.nextn_predict_layers": 1}, drafting=tensors)
    else:
        quantize(folder, path, "f32", vocabulary=False, check=False, progress=no_progress)
    model = load_model(path, dtype="float32", mtp=True)
    asked, want, said = apart(model)
    compare(reference, engine(host(model, said, PAGES), Drawn), asked, want, said)


@pytest.mark.parametrize("shape", [s for s in SHAPES if s not in RECURRENT])
def test_drafts_on_a_device_are_those_of_the_reference(made: Any, shape: str) -> None:
    reference, model, _ = made(shape)
    asked, want, said = apart(model)
    compare(reference, engine(ahead(model, said, PAGES), Drawn, depth=1), asked, want, said)


@pytest.mark.parametrize(("shape", "layers"), several(DENSE, "qwen3_next-shared-keys"))
def test_each_of_several_layers_drafts_as_the_reference(made: Any, shape: str, layers: int) -> None:
    """In chunks shorter than there are layers, and again where the cache has the prompts."""
    reference, model, _ = made(shape, layers)
    asked, want, said = apart(model)
    it = engine(host(model, said, PAGES), Drawn, chunk=2)
    compare(reference, it, asked, want, said)
    said.said.clear()
    again = [replace(request, id=f"{request.id} again") for request in asked]
    compare(reference, it, again, want | {f"{name} again": tokens for name, tokens in want.items()}, said)
    assert it.scheduler.kv.num_hit_tokens > 0


@pytest.mark.parametrize(("shape", "layers"), several("mimo-gqa", without=RECURRENT))
def test_each_of_several_layers_drafts_on_a_device_as_the_reference(made: Any, shape: str, layers: int) -> None:
    reference, model, _ = made(shape, layers)
    asked, want, said = apart(model)
    compare(reference, engine(ahead(model, said, PAGES), Drawn, depth=1, chunk=2), asked, want, said)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted where there is a GPU")
def test_several_layers_draft_through_interpreted_kernels_as_the_reference(tmp_path: Path) -> None:
    interpreter.install()
    reference = make_mtp(tmp_path, "mimo-gqa", 3)
    asked, want, said = apart(load_model(tmp_path, dtype="float32", mtp=True))
    model = load_model(tmp_path, dtype="float32", device=CPU, ops=TritonOps(CPU), mtp=True)
    it = engine(ahead(model, said, PAGES, TritonSteps(CPU)), Drawn, depth=1, chunk=5)
    compare(reference, it, asked, want, said)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("captured", [0, 256])
@pytest.mark.parametrize(("shape", "layers"), SEVERAL)
def test_each_of_several_layers_drafts_on_a_card_as_the_reference(
    tmp_path: Path, shape: str, layers: int, captured: int
) -> None:
    """captured: tokens up to which steps and drafts are graphs."""
    card, reference = torch.device("cuda"), make_mtp(tmp_path, shape, layers)
    asked, want, said = apart(load_model(tmp_path, dtype="float32", mtp=True))
    model = load_model(tmp_path, dtype="float32", device=card, ops=TritonOps(card), mtp=True)
    queue = CudaQueue(card, captured)
    it = engine(ahead(model, said, PAGES, TritonSteps(card), queue, card), Drawn, depth=1, chunk=5)
    compare(reference, it, asked, want, said)
    assert bool(queue.graphs) == bool(captured)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("shape", "layers"), SEVERAL)
def test_no_answer_depends_on_captured_drafts_of_several_layers(tmp_path: Path, shape: str, layers: int) -> None:
    """With prompts that share beginnings, every sampling setting, and too few blocks for all."""
    card = torch.device("cuda")
    make_mtp(tmp_path, shape, layers)
    want = answers(engine(host(load_model(tmp_path, dtype="float32", mtp=True), None, PAGES)), requests(20))
    model = load_model(tmp_path, dtype="float32", device=card, ops=TritonOps(card), mtp=True)
    for pages in (PAGES, 34):
        queue = CudaQueue(card, 256)
        it = engine(ahead(model, Recorder(), pages, TritonSteps(card), queue, card), Drawn, depth=1)
        assert answers(it, requests(20)) == want
        assert it.scheduler.draft_stats.num_drafted > 100
        assert bool(it.gauges().preemptions) == (pages < PAGES)


@pytest.mark.parametrize("shape", [DENSE, "glm4_moe-groups"])
def test_several_layers_draft_as_in_transformers(made: Any, shape: str) -> None:
    """The reference is compared, since transformers' own way of drafting takes one sequence and no rejected drafts."""
    reference, _, _ = made(shape, 3)
    model, form = reference.model, reference.form
    model.config.num_mtp_layers = 3
    theirs = MtpModel(model, 3)
    names = {"embedding_norm": "enorm", "hidden_norm": "hnorm", "project": "eh_proj", "norm": "post_norm"}
    for layer, own, (block,) in zip(theirs.layers, reference.own, reference.blocks, strict=True):
        layer.load_state_dict(
            {f"{names[name]}.weight": tensor for name, tensor in own.items()}
            | {f"mtp_block.{name}": tensor for name, tensor in block.state_dict().items()}
        )
    assert form.normed
    for length in (1, 2, 3, 17):
        tokens = [(7 * i + length) % 190 + 3 for i in range(length + 1)]
        made_drafts, _, _ = theirs(
            torch.tensor([tokens[1:]]),
            reference.hidden(tokens[:-1])[None],
            None,
            torch.arange(1, length + 1)[None],
            None,
        )
        assert made_drafts[0].tolist() == reference.drafts(tokens, 3)


@pytest.mark.parametrize("policy", [FixedDrafts, Drawn, pytest.param(AdaptiveDrafts, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("shape", [DENSE, RECURRENT[0]])
@pytest.mark.parametrize("layers", LAYERS)
def test_no_answer_depends_on_drafts(made: Any, shape: str, policy: Any, layers: int) -> None:
    _, model, _ = made(shape, layers)
    want = answers(engine(host(model, None, PAGES)), requests(12))
    it = engine(host(model, Recorder(), PAGES), policy)
    assert answers(it, requests(12)) == want
    assert it.scheduler.kv.num_hit_tokens > 0
    if policy is FixedDrafts:
        assert it.scheduler.draft_stats.num_drafted > 100


@pytest.mark.parametrize("shape", [DENSE, RECURRENT[0]])
@pytest.mark.parametrize("layers", LAYERS)
def test_no_answer_depends_on_drafts_under_memory_pressure(made: Any, shape: str, layers: int) -> None:
    _, model, _ = made(shape, layers)
    want = answers(engine(host(model, None, PAGES)), requests(12))
    it = engine(host(model, Recorder(), 26), Drawn)
    assert answers(it, requests(12)) == want
    assert it.gauges().preemptions > 0


@pytest.mark.parametrize("greedy", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("pages", [PAGES, 34])
@pytest.mark.parametrize("layers", LAYERS)
def test_no_answer_depends_on_drafts_of_a_device(made: Any, greedy: bool, pages: int, layers: int) -> None:
    _, model, _ = made(DENSE, layers)
    want = answers(engine(host(model, None, PAGES)), requests(20, greedy=greedy))
    it = engine(ahead(model, Recorder(), pages), Drawn, depth=1)
    assert answers(it, requests(20, greedy=greedy)) == want
    assert it.scheduler.draft_stats.num_drafted > 100
    assert bool(it.gauges().preemptions) == (pages < PAGES)


CONFIG = '{"method": "mtp", "num_speculative_tokens": 2, "adaptive": false}'
ASKED = (
    SamplingParams(temperature=0.0, max_tokens=24, structured_outputs=StructuredOutputsParams(json=SCHEMA)),
    SamplingParams(
        temperature=0.9, seed=3, max_tokens=16, structured_outputs=StructuredOutputsParams(regex="(a|b|c)+")
    ),
    SamplingParams(temperature=0.8, seed=4, n=3, max_tokens=12, logprobs=2),
    SamplingParams(temperature=0.0, max_tokens=12, logprobs=1, prompt_logprobs=1),
    SamplingParams(temperature=1.0, top_p=0.9, seed=5, n=2, max_tokens=12, frequency_penalty=0.5),
    SamplingParams(temperature=0.0, max_tokens=12, thinking_token_budget=4),
)


@pytest.fixture(scope="module", params=LAYERS)
def wordy(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A model for the embedded tokenizer."""
    folder = tmp_path_factory.mktemp("wordy")
    make_mtp(folder, RECURRENT[0], request.param, vocab_size=load_model(embedded(), load_format="dummy").spec.vocab)
    return folder


@pytest.mark.parametrize(
    ("deterministic", "lookahead"),
    [
        (True, 1),
        pytest.param(False, 0, marks=pytest.mark.nightly),
        pytest.param(False, 1, marks=pytest.mark.nightly),
        pytest.param(True, 0, marks=pytest.mark.nightly),
    ],
)
def test_grammars_choices_scores_and_budgets_are_the_same(wordy: Path, lookahead: int, deterministic: bool) -> None:
    sizes: dict[str, Any] = {"dtype": "float32", "tokenizer": str(embedded()), "max_model_len": 160, "max_num_seqs": 4}
    sizes |= {
        "block_size": 4,
        "deterministic": deterministic,
        "reasoning_parser": "qwen3",
        "max_num_batched_tokens": 48,
    }
    asked = ["Once upon a time, there was a girl and a cat and", *["The cat and the dog and the"] * 5]
    told = []
    for options in ({}, {"speculative_config": CONFIG, "lookahead": lookahead}):
        with LLM(str(wordy), **sizes, **options) as llm:
            done = llm.generate(asked, list(ASKED), use_tqdm=False)
            again = llm.generate(asked, list(ASKED), use_tqdm=False)
            told.append([[o.token_ids for o in one.outputs] for one in done])
            assert told[-1] == [[o.token_ids for o in one.outputs] for one in again]
            assert any(one.num_cached_tokens for one in again)
            drafted = llm._engine.scheduler.draft_stats.num_drafted
    assert told[0] == told[1] and drafted > 50


def test_weights_of_the_layer_are_skipped_by_name_without_the_option(
    made: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for shape, layers, patterns in (
        (DENSE, 1, ["model.layers.2.*"]),
        (DENSE, 2, ["model.layers.2.*", "model.layers.3.*"]),
        (RECURRENT[0], 1, ["mtp.*"]),
    ):
        folder = made(shape, layers)[2]
        caplog.clear()
        with caplog.at_level("INFO"):
            model = load_model(folder, dtype="float32")
        assert mtp_of(model) is None and '{"method": "mtp"}' in caplog.text
        assert all(f"({pattern})" in caplog.text for pattern in patterns)


def test_a_model_without_the_layer_or_its_weights_is_refused(made: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match=r"no layer for multi-token prediction.*ngram"):
        load_model(embedded(), mtp=True)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((made(DENSE)[2] / name).read_bytes())
    tensors = {
        n: t for n, t in load_file(tmp_path / "model.safetensors").items() if not n.startswith("model.layers.2.")
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidModel, match=r"layer for multi-token prediction.*model\.layers\.2.*leave out"):
        load_model(tmp_path, mtp=True)
    assert mtp_of(load_model(tmp_path)) is None
    with pytest.raises(InvalidConfig, match="own layers"):
        own_layers(load_model(embedded(), load_format="dummy"))


def test_plan_and_inspect_count_the_layers(made: Any) -> None:
    for shape, count in ((DENSE, 1), (DENSE, 3), (RECURRENT[0], 1)):
        _, model, folder = made(shape, count)
        layer, runner = mtp_of(model), CliRunner()
        assert layer is not None
        found = {}
        for options in ((), ("--speculative-config", '{"method": "mtp"}')):
            facts = read_facts(Settings.of(model=str(folder), speculative_config=options[1] if options else None))
            told = runner.invoke(late.plan, [str(folder), "--max-model-len", "96", *options])
            assert told.exit_code == 0, told.output
            need = plan.need(Settings.of(model=str(folder), block_size=4, max_model_len=96), facts, 1 << 30, CPU)
            found[bool(options)] = need.weights, need.page
        layers = ("mtp.", *(f"model.layers.{model.spec.layers + i}." for i in range(count)))
        repeated = ("embed_tokens", "shared_head.head")
        read = {n: t.numel() for n, t in load_file(folder / "model.safetensors").items() if n.startswith(layers)}
        size = sum(numbers for name, numbers in read.items() if not any(each in name for each in repeated))
        assert found[True][0] - found[False][0] == 4 * size
        assert found[True][1] - found[False][1] == block_bytes(layer_shapes(layer.kv_shapes, torch.float32), 4)
        told = runner.invoke(late.inspect, [str(folder)])
        assert f"{count} layer{'s' * (count > 1)} for multi-token prediction" in told.output


def test_graphs_are_captured_for_each_forward_and_number_of_drafts() -> None:
    forwards = [GraphKey(16, 16, 16), GraphKey(1, 1, 1), GraphKey.head(1, 0)]
    keys = speculative_graph_keys(4, 16, 2, True, forwards)
    follow = {key[:3] for key in keys if key.kind == "follow"}
    assert {key[:3] for key in (*forwards, *keys) if key.kind == "feed"} == follow
    assert {key.max_query for key in keys if key.kind == "draft"} == {1, 2}
