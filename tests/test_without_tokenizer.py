"""`skip_tokenizer_init`: a checkpoint without a tokenizer, from Python, with answers equal to those with one."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from quire import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from quire.assembly.grpc import host
from quire.cli import main
from quire.config import Settings
from quire.errors import InvalidConfig, InvalidModel, InvalidRequest
from quire.types import PositionLogprobs, RequestOutput, StructuredOutputsParams
from quire.weights.locate import locate
from quire.weights.onnx_export import export

OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 8}
IDS = [[5, 9, 100, 44], [300, 7]]
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, logprobs=2, prompt_logprobs=1, n=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The embedded model without its tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(locate("embedded") / name, folder)
    return str(folder)


@pytest.fixture(scope="module")
def llm(folder: str) -> Iterator[LLM]:
    with LLM(folder, skip_tokenizer_init=True, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def wanted() -> list[RequestOutput]:
    with LLM(**OPTIONS) as llm:
        return llm.generate(IDS, PARAMS)


def scores(positions: Sequence[PositionLogprobs | None] | None) -> list[Any]:
    return [one and (one.token, one.logprob, one.rank, one.top) for one in positions or ()]


def shown(outputs: list[RequestOutput]) -> list[Any]:
    return [
        [(choice.token_ids, choice.finish_reason, scores(choice.logprobs)) for choice in one.outputs]
        + [scores(one.prompt_logprobs)]
        for one in outputs
    ]


def test_token_ids_come_to_the_same_as_with_a_tokenizer(llm: LLM, wanted: list[RequestOutput]) -> None:
    found = llm.generate(IDS, PARAMS)
    assert shown(found) == shown(wanted) and {each.text for one in found for each in one.outputs} == {""}
    ended = llm.generate([IDS[0]], SamplingParams(temperature=0, max_tokens=6, stop_token_ids=[44]))[0].outputs[0]
    assert (ended.finish_reason, ended.stop_reason, ended.token_ids) == ("stop", 44, (44,))
    free = llm.generate([IDS[0]], SamplingParams(temperature=0, max_tokens=3, bad_words_token_ids=[[44]]))[0]
    assert 44 not in free.outputs[0].token_ids


@pytest.mark.parametrize("executor", ["hf", "onnx", "grpc"])
def test_other_executors_serve_ids_too(
    folder: str, wanted: list[RequestOutput], llm: LLM, executor: str, tmp_path: Path
) -> None:
    beams = BeamSearchParams(beam_width=2, max_tokens=4)
    [same] = llm.beam_search(IDS[:1], beams)
    with ExitStack() as stack:
        where: dict[str, Any] = {"executor": executor, **OPTIONS}
        if executor == "onnx":
            export(Path(folder), tmp_path / "graphs")
            folder = str(tmp_path / "graphs")
        if executor == "grpc":
            server = host(Settings.of(model=folder, skip_tokenizer_init=True, **OPTIONS), "127.0.0.1:0")
            stack.callback(server.executor.close)
            stack.callback(server.stop)
            where = {"executor": "grpc", "executor_address": f"127.0.0.1:{server.port}"}
        other = stack.enter_context(LLM(folder, skip_tokenizer_init=True, **where))
        assert [one.outputs[0].token_ids for one in other.generate(IDS, PARAMS)] == [
            one.outputs[0].token_ids for one in wanted
        ]
        assert [one.tokens for one in other.beam_search(IDS[:1], beams)[0].sequences] == [
            one.tokens for one in same.sequences
        ]


@pytest.mark.parametrize("command", ["run", "chat", "generate"])
def test_commands_for_text_say_so_before_a_model_is_loaded(command: str) -> None:
    said = CliRunner().invoke(main, [command, "--skip-tokenizer-init"], input="hi")
    assert (
        said.exit_code == 2 and f"`quire {command}` reads and writes text, for which skip_tokenizer_init" in said.output
    )


def test_in_a_process_of_its_own_each_step_has_an_output(folder: str, wanted: list[RequestOutput]) -> None:
    async def read() -> list[RequestOutput]:
        params = SamplingParams(temperature=0.0, max_tokens=6, output_kind="delta")  # type: ignore[arg-type]
        async with AsyncLLM(folder, skip_tokenizer_init=True, standby_engine=False, **OPTIONS) as llm:
            with pytest.raises(InvalidRequest, match="without a tokenizer"):
                await anext(llm.generate("text"))
            return [one async for one in llm.generate(IDS[0], params)]

    found = asyncio.run(read())
    assert sum((one.outputs[0].token_ids for one in found), ()) == wanted[0].outputs[0].token_ids and len(found) > 1


def test_beams_have_ids_and_no_text(llm: LLM) -> None:
    [found] = llm.beam_search(IDS[:1], BeamSearchParams(beam_width=2, max_tokens=4))
    with LLM(**OPTIONS) as other:
        [same] = other.beam_search(IDS[:1], BeamSearchParams(beam_width=2, max_tokens=4))
    assert [one.tokens for one in found.sequences] == [one.tokens for one in same.sequences]
    assert {one.text for one in found.sequences} == {""}


@pytest.mark.parametrize(
    ("ask", "param"),
    [
        (lambda llm: llm.generate("text"), "prompt"),
        (lambda llm: llm.generate("text", suffix="more"), "suffix"),
        (lambda llm: llm.embed("text"), "prompt"),
        (lambda llm: llm.stream(IDS[0]), "stream"),
        (lambda llm: llm.chat([{"role": "user", "content": "hi"}]), "messages"),
        (lambda llm: llm.generate(IDS, SamplingParams(stop="a")), "stop"),
        (lambda llm: llm.generate(IDS, SamplingParams(bad_words=["a"])), "bad_words"),
        (
            lambda llm: llm.generate(IDS, SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))),
            "structured_outputs",
        ),
    ],
)
def test_what_needs_text_is_refused_by_name(llm: LLM, ask: Callable[[LLM], Any], param: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{param}: .*without a tokenizer") as caught:
        ask(llm)
    assert (caught.value.param, caught.value.code) == (param, "no_tokenizer")


def test_a_model_without_a_tokenizer_says_what_to_set(folder: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match="--skip-tokenizer-init"):
        LLM(folder)
    with pytest.raises(InvalidConfig, match="tokenizer is set"):
        LLM(folder, skip_tokenizer_init=True, tokenizer="embedded")
