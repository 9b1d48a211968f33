"""What the runner asks of the model, and in which order steps run."""

from __future__ import annotations

import pytest
import torch

from quire.errors import StepFailed
from quire.model_runner import step_io
from quire.model_runner.memory import allocate, layer_shapes
from quire.model_runner.row_state import RowState
from quire.model_runner.runner import Runner
from quire.model_runner.sampling.sampler import Sampler
from quire.scheduler.plan import NewSequence, Plan, Span
from quire.types import GREEDY, SamplingParams
from tests.model_runner.tiny import VOCAB, Tiny


def runner(model: Tiny) -> Runner:
    kv = allocate(layer_shapes(model.spec.kv_shapes, torch.float64), pages=40, page_size=4)
    return Runner(model, kv, RowState(4, 100, 4), Sampler(VOCAB), None, torch.device("cpu"))


def opening(row: int, prompt: tuple[int, ...], sampling: SamplingParams = GREEDY) -> Plan:
    pages = tuple(range(1 + 10 * row, 1 + 10 * row + -(-len(prompt) // 4) + 1))
    rows = 1
    logits = rows if sampling.prompt_logprobs is None else len(prompt)
    return Plan(
        (NewSequence(row, prompt, 0, len(prompt), sampling),), ((row, pages),), (Span(row, len(prompt), rows, logits),)
    )


def best(model: Tiny, tokens: tuple[int, ...]) -> int:
    return int(model.dense(tokens)[-1].argmax())


def test_only_the_rows_that_are_sampled_become_logits() -> None:
    model = Tiny()
    it = runner(model)
    prompt = tuple(range(30))
    assert it.launch(opening(0, prompt)).result().tokens == [[best(model, prompt)]]
    assert (model.fed, model.scored) == (30, 1)


def test_a_prompt_chunk_needs_no_logits() -> None:
    model = Tiny()
    it = runner(model)
    plan = opening(0, tuple(range(9)))._replace(spans=(Span(0, 5, 0, 0),))
    assert it.launch(plan).result().tokens == [[]]
    assert model.scored == 0


def test_prompt_logprobs_are_computed_in_bounded_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_io, "_CHUNK", 7 * VOCAB + 3)
    model = Tiny()
    prompt = tuple(range(30))
    result = runner(model).launch(opening(0, prompt, SamplingParams(temperature=0.0, prompt_logprobs=2))).result()
    assert model.scored == 7
    want = model.dense(prompt).log_softmax(-1)
    scores = result.prompt_logprobs[0]
    assert [each.token for each in scores] == list(prompt[1:])
    assert [each.logprob for each in scores] == pytest.approx(
        [float(want[i, t]) for i, t in enumerate(prompt[1:])], abs=1e-5
    )
    assert all(len(each.top) == 2 for each in scores)


def test_tokens_after_the_prompt_have_no_prompt_logprobs() -> None:
    """A preempted row is opened with its output so far, and fed from the start again."""
    model = Tiny()
    text = (4, 8, 15, 16, 23, 42)
    wants = SamplingParams(temperature=0.0, prompt_logprobs=0)
    plan = opening(0, text, wants)
    result = (
        runner(model).launch(plan._replace(new_sequences=(plan.new_sequences[0]._replace(prompt_length=4),))).result()
    )
    assert [each.token for each in result.prompt_logprobs[0]] == [8, 15, 16]


def test_steps_behind_one_that_waits_for_masks_wait_too() -> None:
    model = Tiny()
    it = runner(model)
    first = it.launch(opening(0, (1, 2, 3))._replace(masked_spans=(0,)))
    second = it.launch(opening(1, (4, 5)))
    assert model.fed == 3
    with pytest.raises(StepFailed, match="masks"):
        second.result()
    first.sample([[None]])
    assert first.result().tokens == [[best(model, (1, 2, 3))]]
    assert second.result().tokens == [[best(model, (4, 5))]]


def test_a_reset_forgets_rows_and_steps() -> None:
    model = Tiny()
    it = runner(model)
    waiting = it.launch(opening(0, (1, 2, 3))._replace(masked_spans=(0,)))
    it.reset()
    with pytest.raises(StepFailed):
        it.launch(Plan((), (), (Span(0, 1, 1, 1),))).result()
    it.reset()
    assert it.launch(opening(0, (9, 9))).result().tokens == [[best(model, (9, 9))]]
    with pytest.raises(StepFailed):
        waiting.result()


def test_a_seeded_answer_is_the_same_after_being_opened_again_at_any_point() -> None:
    model = Tiny()
    prompt = (7, 3, 11)
    hot = SamplingParams(temperature=1.4, top_p=0.95, repetition_penalty=1.3)

    def go(it: Runner, text: tuple[int, ...], row: int, count: int) -> list[int]:
        plan = opening(row, (*text, *([0] * 12)), hot)
        plan = plan._replace(
            new_sequences=(NewSequence(row, text, 0, len(prompt), hot, 99, 1),), spans=(Span(row, len(text), 1, 1),)
        )
        out = []
        for _ in range(count):
            out += it.launch(plan).result().tokens[0]
            plan = Plan((), (), (Span(row, 1, 1, 1),))
        return out

    whole = go(runner(model), prompt, 0, 12)
    assert len(set(whole)) > 5
    for cut in range(1, 12):
        assert go(runner(model), (*prompt, *whole[:cut]), cut % 4, 12 - cut) == whole[cut:]
