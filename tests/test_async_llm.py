"""`AsyncLLM`: what `LLM` answers, to many tasks of one event loop, and nothing left behind by those that go."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from quire import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    AsyncLLMEngine,
    EngineArgs,
    RequestOutputKind,
    SamplingParams,
)
from quire.assembly import backend
from quire.async_llm import _Running
from quire.errors import Closed, Interrupted, InvalidRequest, QuireError, StepFailed, Unavailable
from quire.types import EmbeddingRequestOutput, RequestOutput, StructuredOutputsParams
from tests import encoders
from tests.contract.unreliable import Fate

pytestmark = pytest.mark.usefixtures("forked_children")

T = TypeVar("T")

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "num_gpu_blocks_override": 160,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "standby_engine": False,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
PROMPTS = [f"{name} had a little dog" for name in ("Lily", "Tom", "Anna", "Ben", "Mia")]
SOON = 300.0
"""Seconds that nothing here takes, unless it hangs."""


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


def made(**options: Any) -> AsyncLLM:
    """One whose engine fails for certain seeds (`tests.contract.unreliable`)."""
    with pytest.MonkeyPatch.context() as patch:
        unreliable = partial(backend.engine_process, child="tests.contract.unreliable")
        patch.setattr("quire.async_llm.engine_process", unreliable)
        return AsyncLLM(**OPTIONS | options)


@pytest.fixture(scope="module")
def llm(runner: asyncio.Runner) -> Iterator[AsyncLLM]:
    opened = made()
    runner.run(opened.start())
    yield opened
    runner.run(opened.close())


def run(runner: asyncio.Runner, work: Coroutine[Any, Any, T]) -> T:
    return runner.run(asyncio.wait_for(work, SOON))


async def outputs(llm: AsyncLLM, prompt: Any, *args: Any, **more: Any) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, *args, **more)]


async def last(llm: AsyncLLM, prompt: Any, *args: Any, **more: Any) -> RequestOutput:
    return (await outputs(llm, prompt, *args, **more))[-1]


async def idle(llm: AsyncLLM) -> None:
    """Return when no request is left in the engine, and no block is held by one."""
    while True:
        now = llm._backend.engine.snapshot()
        if now and not now["active_requests"] and not now["waiting_requests"]:
            assert now["cache"]["active_sequences"] == 0 and not llm._running and not llm._backend.load()
            return
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(temperature=0.9, top_p=0.9, seed=7, max_tokens=8, n=3),
        SamplingParams(temperature=0.0, max_tokens=6, logprobs=2, prompt_logprobs=1),
        SamplingParams(
            temperature=0.0, max_tokens=20, structured_outputs=StructuredOutputsParams(choice=("yes", "no"))
        ),
        SamplingParams(temperature=0.0, max_tokens=40, stop=("dog",)),
    ],
    ids=["greedy", "seeded", "logprobs", "structured", "stop"],
)
def test_answers_are_those_of_llm(runner: asyncio.Runner, llm: AsyncLLM, params: SamplingParams) -> None:
    async def at_once() -> list[RequestOutput]:
        await llm.reset_prefix_cache()
        return await asyncio.gather(*(last(llm, prompt, params) for prompt in PROMPTS))

    found = run(runner, at_once())
    options = {name: value for name, value in OPTIONS.items() if name != "standby_engine"}
    with LLM(**options) as other:
        wanted = other.generate(PROMPTS, params)
    for one, two in zip(found, wanted, strict=True):
        assert (one.prompt, one.prompt_token_ids, one.finished) == (two.prompt, two.prompt_token_ids, True)
        assert [(each.text, each.token_ids, each.finish_reason, each.stop_reason) for each in one.outputs] == [
            (each.text, each.token_ids, each.finish_reason, each.stop_reason) for each in two.outputs
        ]
        for mine, theirs in zip(one.outputs, two.outputs, strict=True):
            assert [each.token for each in mine.logprobs or ()] == [each.token for each in theirs.logprobs or ()]
            assert mine.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-4)
        assert len(one.prompt_logprobs or ()) == len(two.prompt_logprobs or ())


def test_each_kind_of_output_comes_to_the_same(runner: asyncio.Runner, llm: AsyncLLM) -> None:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=9, n=2)

    async def each_kind() -> list[list[RequestOutput]]:
        kinds = (RequestOutputKind.CUMULATIVE, "delta", RequestOutputKind.FINAL_ONLY)
        return await asyncio.gather(*(outputs(llm, "One day", replace(params, output_kind=kind)) for kind in kinds))

    cumulative, delta, [final] = run(runner, each_kind())
    assert cumulative[-1].outputs == final.outputs and final.finished
    for some in (cumulative, delta):
        assert len(some) > 1 and [one.finished for one in some] == [False] * (len(some) - 1) + [True]
    for choice, whole in enumerate(final.outputs):
        texts = [one.outputs[choice].text for one in cumulative]
        assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
        pieces = [each for one in delta for each in one.outputs if each.index == choice]
        assert "".join(piece.text for piece in pieces) == whole.text
        assert sum((piece.token_ids for piece in pieces), ()) == whole.token_ids
        assert [piece.finish_reason for piece in pieces if piece.finish_reason] == [whole.finish_reason]


def test_many_tasks_at_once_get_each_its_own_answer(runner: asyncio.Runner, llm: AsyncLLM) -> None:
    async def alone_and_together() -> None:
        alone = {prompt: (await last(llm, prompt, GREEDY)).outputs for prompt in PROMPTS}
        asked = [(prompt, f"{prompt}-{turn}") for turn in range(12) for prompt in PROMPTS]
        together = await asyncio.gather(*(last(llm, prompt, GREEDY, id) for prompt, id in asked))
        for (prompt, id), one in zip(asked, together, strict=True):
            assert (one.request_id, one.outputs) == (id, alone[prompt])
        await idle(llm)

    run(runner, alone_and_together())


def test_prompts_are_text_or_token_ids_or_mappings(runner: asyncio.Runner, llm: AsyncLLM) -> None:
    ids = llm.get_tokenizer().encode("One day")
    prompts = ["One day", ids, list(ids), {"prompt": "One day"}, {"prompt_token_ids": ids}]

    async def each() -> list[RequestOutput]:
        return [await last(llm, prompt, GREEDY) for prompt in prompts]

    found = run(runner, each())
    assert {one.prompt_token_ids for one in found} == {tuple(ids)}
    assert len({one.outputs for one in found}) == 1


def test_a_conversation_is_rendered_by_the_models_template(runner: asyncio.Runner, llm: AsyncLLM) -> None:
    asked: dict[str, Any] = {"role": "user", "content": "Tell me about a boat."}
    tool = {"type": "function", "function": {"name": "row", "parameters": {"type": "object", "properties": {}}}}
    cases: list[tuple[list[Any], dict[str, Any]]] = [
        ([asked], {}),
        ([asked], {"tools": [tool], "chat_template_kwargs": {"enable_thinking": False}}),
        (
            [asked, {"role": "assistant", "content": "A boat"}],
            {"add_generation_prompt": False, "continue_final_message": True},
        ),
    ]

    async def chat(talk: list[Any], given: dict[str, Any]) -> RequestOutput:
        params = replace(GREEDY, output_kind=RequestOutputKind.FINAL_ONLY)
        [found] = [output async for output in llm.chat(talk, params, "talk", **given)]
        return found

    with LLM(**OPTIONS) as other:
        for talk, given in cases:
            found = run(runner, chat(talk, given))
            [wanted] = other.chat(talk, GREEDY, **given)
            assert (found.request_id, found.prompt, found.outputs) == ("talk", wanted.prompt, wanted.outputs)
    with pytest.raises(InvalidRequest, match="add_generation_prompt starts another"):
        run(runner, chat([asked], {"continue_final_message": True}))


def test_an_abort_ends_one_request_and_gives_its_blocks_back(runner: asyncio.Runner, llm: AsyncLLM) -> None:
    async def abort() -> None:
        other = asyncio.create_task(last(llm, "Tom", GREEDY, "other"))
        found = []
        async for output in llm.generate("Lily", ENDLESS, "long"):
            found.append(output)
            if len(found) == 3:
                await llm.abort("long")
        end = found[-1].outputs[0]
        assert found[-1].finished and end.finish_reason == "abort" and 3 <= len(end.token_ids) < 400
        assert (await other).outputs[0].finish_reason == "length"
        await llm.abort(["long", "other", "nobody"])  # none runs: nothing happens
        await idle(llm)
        again = await last(llm, "Lily", GREEDY, "long")
        assert again.outputs == (await last(llm, "Lily", GREEDY)).outputs

    run(runner, abort())


def test_an_abort_while_the_prompt_is_encoded_counts_too(runner: asyncio.Runner, llm: AsyncLLM) -> None:
    async def read() -> RequestOutput:
        talk = [{"role": "user", "content": "Tell me about a boat."}]
        [found] = [output async for output in llm.chat(talk, replace(ENDLESS, output_kind="final_only"), "early")]
        return found

    async def abort() -> None:
        task = asyncio.create_task(read())
        while "early" not in llm._running:
            await asyncio.sleep(0)
        assert llm._running["early"].live is None
        await llm.abort("early")
        [end] = (await task).outputs
        assert (end.finish_reason, end.token_ids) == ("abort", ())
        await idle(llm)

    run(runner, abort())


@pytest.mark.parametrize("how", ["cancel", "break", "timeout"])
def test_a_reader_that_goes_away_ends_its_request(runner: asyncio.Runner, llm: AsyncLLM, how: str) -> None:
    async def leave() -> None:
        begun = asyncio.Event()

        async def read() -> None:
            async for _ in llm.generate("Lily", ENDLESS, "left"):
                begun.set()
                if how == "break":
                    break

        task = asyncio.create_task(asyncio.wait_for(read(), 0.5 if how == "timeout" else None))
        await begun.wait()
        if how == "cancel":
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError, TimeoutError):
            await task
        while llm._running:
            await asyncio.sleep(0.01)
        await idle(llm)
        assert (await last(llm, "Lily", GREEDY, "left")).finished

    run(runner, leave())


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"prompt": 5}, "prompts"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "a" * 9000}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"sampling_params": {"temperature": 0}}, "sampling_params"),
        ({"request_id": 5}, "request_id"),
        ({"request_id": ""}, "request_id"),
        ({"output_kind": "delta"}, "output_kind"),
        ({"priority": 1}, "priority"),
        ({"priority": "high"}, "priority"),
        ({"lora_request": "adapter"}, "lora_request"),
        ({"lora_requests": None}, "lora_requests"),
    ],
)
def test_what_cannot_run_is_refused_by_name_and_leaves_nothing_behind(
    runner: asyncio.Runner, llm: AsyncLLM, arguments: dict[str, Any], param: str
) -> None:
    async def ask() -> None:
        with pytest.raises(InvalidRequest) as caught:
            await outputs(llm, **{"prompt": "a", "sampling_params": GREEDY} | arguments)
        assert caught.value.param == param
        await idle(llm)

    run(runner, ask())


def test_a_request_id_that_runs_is_refused_and_the_first_goes_on(runner: asyncio.Runner, llm: AsyncLLM) -> None:
    async def twice() -> None:
        first = llm.generate("Lily", GREEDY, "twin")
        await anext(first)
        with pytest.raises(InvalidRequest, match="'twin' is running"):
            await outputs(llm, "Tom", GREEDY, "twin")
        assert [output async for output in first][-1].finished

    run(runner, twice())


def test_what_vllm_takes_and_changes_nothing_is_taken(runner: asyncio.Runner, llm: AsyncLLM) -> None:
    run(runner, made(tensor_parallel_size=1, trust_remote_code=False).close())
    more = {"prompt": "a", "sampling_params": GREEDY, "request_id": "0", "lora_request": None, "priority": 0}
    assert run(runner, last(llm, **more)).finished


def test_an_error_reaches_the_one_caller_that_it_concerns(runner: asyncio.Runner, llm: AsyncLLM) -> None:
    broken = SamplingParams(seed=Fate.NAN, temperature=1.0, max_tokens=5)

    async def both() -> list[Any]:
        asked = [("Lily", GREEDY), ("Tom", broken), ("Anna", GREEDY)]
        return await asyncio.gather(*(last(llm, *one) for one in asked), return_exceptions=True)

    one, failed, other = run(runner, both())
    assert isinstance(failed, QuireError) and not isinstance(failed, Unavailable)
    assert one.finished and other.finished and one.outputs[0].finish_reason == "length"


def test_a_step_that_fails_ends_the_request_at_fault_alone(runner: asyncio.Runner, llm: AsyncLLM) -> None:
    async def both() -> list[Any]:
        asked = [GREEDY, SamplingParams(seed=Fate.KERNEL, temperature=1.0, max_tokens=5)]
        return await asyncio.gather(*(last(llm, "Lily", one) for one in asked), return_exceptions=True)

    one, failed = run(runner, both())
    assert one.finished and isinstance(failed, StepFailed)


def test_the_death_of_the_engine_reaches_every_caller_and_another_is_started(runner: asyncio.Runner) -> None:
    async def killed() -> None:
        async with made() as llm:
            first, second = llm.generate("Lily", ENDLESS), llm.generate("Tom", ENDLESS)
            await anext(first)
            await anext(second)
            process = llm._backend.engine.process  # type: ignore[attr-defined]
            process.send_signal(signal.SIGKILL)
            for stream in (first, second):
                with pytest.raises(Interrupted, match="the engine process ended"):
                    async for _ in stream:
                        pass
            with pytest.raises(Unavailable):
                await last(llm, "Lily", GREEDY)
            while not llm._backend.ready():
                await asyncio.sleep(0.05)
            assert (await last(llm, "Lily", GREEDY)).finished

    run(runner, killed())


def test_closing_interrupts_those_that_run_and_refuses_those_that_come(runner: asyncio.Runner) -> None:
    async def close() -> None:
        llm = made()
        running = llm.generate("Lily", ENDLESS)
        await anext(running)
        process = llm._backend.engine.process  # type: ignore[attr-defined]
        await asyncio.gather(llm.close(), llm.close())
        assert process.poll() is not None
        with pytest.raises(Interrupted, match="closed while the request was running"):
            async for _ in running:
                pass
        await llm.close()
        for again in (last(llm, "Lily", GREEDY), llm.start(), llm.abort("a"), llm.reset_prefix_cache()):
            with pytest.raises(Closed, match="create another"):
                await again

    run(runner, close())


def test_it_may_be_closed_while_it_starts_or_before(runner: asyncio.Runner) -> None:
    async def close() -> None:
        await made().close()
        llm = made()
        early = asyncio.create_task(last(llm, "Lily", GREEDY))
        while llm._starting is None:
            await asyncio.sleep(0)
        await llm.close()
        with pytest.raises(Closed):
            await early

    run(runner, close())


def test_a_start_that_fails_says_why_to_every_caller(runner: asyncio.Runner) -> None:
    async def start() -> None:
        llm = made(num_gpu_blocks_override=None, kv_cache_memory_bytes=1)
        found = await asyncio.gather(*(last(llm, "a", GREEDY) for _ in range(3)), return_exceptions=True)
        assert len({str(one) for one in found}) == 1 and all(isinstance(one, QuireError) for one in found), found
        assert "KV memory holds no tokens" in str(found[0])
        await llm.close()

    run(runner, start())


def test_another_event_loop_is_told_that_the_engine_is_elsewhere(llm: AsyncLLM) -> None:
    for work in (last(llm, "a", GREEDY), llm.start(), llm.close(), llm.abort("a")):
        with asyncio.Runner() as elsewhere, pytest.raises(Closed, match="another event loop"):
            elsewhere.run(work)


def test_defaults_are_the_models(llm: AsyncLLM) -> None:
    assert llm.default_sampling_params(max_tokens=3).max_tokens == 3
    assert llm.get_tokenizer().decode(llm.get_tokenizer().encode("One day")) == "One day"


def test_a_suffix_needs_a_model_with_markers(runner: asyncio.Runner, llm: AsyncLLM) -> None:
    async def ask() -> None:
        async for _ in llm.generate("a", suffix="b"):
            raise AssertionError("the embedded model fills nothing in")

    with pytest.raises(InvalidRequest, match="no markers") as refused:
        runner.run(ask())
    assert refused.value.param == "suffix"


def test_tasks_beyond_the_bound_wait_outside_the_engine_in_order(runner: asyncio.Runner) -> None:
    async def many() -> None:
        async with made(max_num_seqs=2, max_num_queued_reqs=2) as llm:
            ends: list[int] = []
            most = 0

            async def ask(number: int) -> None:
                nonlocal most
                params = SamplingParams(temperature=0.0, max_tokens=3, n=1 + number % 2 * 5)  # of 6 answers, or of one
                finished = False
                async for output in llm.generate("Lily", params, str(number)):
                    most = max(most, len(llm._backend._active))
                    finished = output.finished and len(output.outputs) == params.n
                assert finished
                ends.append(number)

            await asyncio.gather(*(ask(number) for number in range(40)))
            assert sorted(ends) == list(range(40)) and most <= 6
            assert llm._admission._free == 4 and not llm._admission._waiting
            await idle(llm)

    run(runner, many())


@pytest.mark.parametrize("how", ["cancel", "abort", "close"])
def test_a_task_that_waits_outside_can_be_ended(runner: asyncio.Runner, how: str) -> None:
    async def end() -> None:
        async with made(max_num_seqs=1, max_num_queued_reqs=1) as llm:
            held = [asyncio.create_task(last(llm, "Lily", ENDLESS, f"held-{i}")) for i in range(2)]
            waiting = asyncio.create_task(last(llm, "Tom", ENDLESS, "waiting"))
            while not llm._admission._waiting:
                await asyncio.sleep(0)
            if how == "cancel":
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
            elif how == "abort":
                await llm.abort("waiting")
                assert (await waiting).outputs[0].finish_reason == "abort" and not held[0].done()
            else:
                await llm.close()
                with pytest.raises(Closed):
                    await waiting
            if how != "close":
                await llm.abort(["held-0", "held-1"])
                assert (await last(llm, "Tom", GREEDY)).finished
                await idle(llm)
            await asyncio.gather(*held, return_exceptions=True)
            assert llm._admission._free == 2 and not llm._admission._waiting

    run(runner, end())


def test_a_storm_of_cancelled_tasks_leaves_nothing_behind(runner: asyncio.Runner) -> None:
    async def storm() -> None:
        async with made(max_num_seqs=4, max_num_queued_reqs=8) as llm:
            for turn in range(3):
                tasks = [asyncio.create_task(last(llm, PROMPTS[i % 5], ENDLESS)) for i in range(200)]
                for _ in range(turn * 20):
                    await asyncio.sleep(0)
                await llm.abort([f"async-{i}" for i in range(0, 700, 7)])
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            await idle(llm)
            assert llm._admission._free == 12 and not llm._admission._waiting
            assert (await last(llm, "Lily", GREEDY)).finished

    run(runner, storm())


def test_vectors_are_those_of_llm(runner: asyncio.Runner, llm: AsyncLLM) -> None:
    async def vectors() -> list[EmbeddingRequestOutput]:
        return await asyncio.gather(*(llm.embed(prompt, prompt, dimensions=8) for prompt in PROMPTS))

    found = run(runner, vectors())
    with LLM(**OPTIONS) as other:
        wanted = other.embed(PROMPTS, dimensions=8)
    assert [one.request_id for one in found] == PROMPTS
    for one, two in zip(found, wanted, strict=True):
        assert one.prompt_token_ids == two.prompt_token_ids
        assert one.outputs.embedding == pytest.approx(two.outputs.embedding, abs=1e-4)
    with pytest.raises(InvalidRequest, match="dimensions must be at most"):
        run(runner, llm.embed("a", dimensions=10**6))
    with pytest.raises(InvalidRequest, match="dimensions must be at least 1"):
        run(runner, llm.embed("a", dimensions=0))


def test_scripts_for_vllm_make_it_of_engine_args_and_shut_it_down(runner: asyncio.Runner) -> None:
    async def script() -> tuple[str, int]:
        llm = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(**OPTIONS, enforce_eager=True, tensor_parallel_size=1))
        try:
            params = SamplingParams(temperature=0.0, max_tokens=8, output_kind=RequestOutputKind.DELTA)
            pieces = [one async for one in llm.generate(request_id="0", prompt="Once upon", sampling_params=params)]
        finally:
            llm.shutdown()
        with pytest.raises(Closed):
            await llm.embed("a")
        await llm.close()
        return "".join(one.outputs[0].text for one in pieces), len(pieces)

    text, pieces = run(runner, script())
    with LLM.from_engine_args(EngineArgs(**OPTIONS)) as other:
        assert text == other.generate("Once upon", GREEDY)[0].outputs[0].text and pieces > 1
        assert other.get_default_sampling_params() == other.default_sampling_params()


@pytest.mark.parametrize("labels", [0, 1, 3])
def test_poolings_are_those_of_llm(runner: asyncio.Runner, labels: int, tmp_path: Path) -> None:
    encoders.write(tmp_path, "bert", labels=labels)
    texts = ["a red dog", "the old house is near the river", "fish"]
    with LLM(str(tmp_path), dtype="float32") as llm:
        wanted = [llm.encode(texts), llm.classify(texts) if labels else llm.embed(texts)]
        scores = llm.score("what dog", texts) if labels < 2 else []

    async def found() -> tuple[list[list[Any]], list[Any]]:
        async with AsyncLLM(str(tmp_path), dtype="float32") as other:
            method = other.classify if labels else other.embed
            made = [await asyncio.gather(*map(each, texts)) for each in (other.encode, method)]
            with pytest.raises(InvalidRequest):
                await (other.embed("a") if labels else other.classify("a"))
            if labels < 2:
                # A request that fails in part has ended whole: its ids are free.
                other._running["s-1"] = _Running()
                with pytest.raises(InvalidRequest, match="'s-1' is running"):
                    await other.score("what dog", texts, "s")
                assert [*other._running] == ["s-1"]
            return made, await other.score("what dog", texts) if labels < 2 else []

    made, scored = run(runner, found())
    assert [[one.outputs for one in each] for each in made] == [[one.outputs for one in each] for each in wanted]
    assert [one.outputs for one in scored] == [one.outputs for one in scores]
