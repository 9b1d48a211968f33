"""Prompts with images against transformers: logits, and answers alone, crowded, chunked, warm, preempted, drafted.

Of combinations of settings that have every pair of them, CI runs three families in one each; `make nightly` runs all
of them, and every combination on one rank.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import PreTrainedModel

from quire import LLM, AsyncLLM, SamplingParams
from quire.errors import InvalidConfig, InvalidRequest
from quire.layers.linear import ParallelGroup
from quire.layers.stages import Pipeline
from quire.models.registry import read_spec
from quire.weights.files import read_config
from quire.weights.outline import ModelOutline
from tests.checkpoints import make as make_text
from tests.pairs import in_turn, pairwise
from tests.vision import FAMILIES, make, picture, place_of, theirs

pytestmark = pytest.mark.usefixtures("forked_children")

MARKS = {"gemma3": "<start_of_image>", "gemma4": "<|image|>", "gemma4-small": "<|image|>"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


class Family:
    """A checkpoint, transformers' model of it, and what it says to some prompts."""

    def __init__(self, folder: Path, family: str) -> None:
        self.folder, self.family = folder, family
        self.model: PreTrainedModel = make(folder, family)
        self.mark = MARKS.get(family, "<|vision_start|><|image_pad|><|vision_end|>")
        self.pictures = [picture(40, 30), picture(26, 70, 1), picture(57, 24, 2)]

    def llm(self, **options: Any) -> LLM:
        fixed = {"dtype": "float32", "max_model_len": 512, "block_size": 8, "max_num_seqs": 8}
        return LLM(str(self.folder), **{**fixed, **options})

    @cached_property
    def prompts(self) -> list[tuple[str, list[Image.Image]]]:
        one, two, three = self.pictures
        return [
            (f"What is {self.mark} here?", [one]),
            (f"{self.mark} and {self.mark} differ.", [one, two]),
            (f"Compare {self.mark}, then {self.mark}, then {self.mark}", [three, one, three]),
            ("No picture at all, but some words.", []),
        ]

    @cached_property
    def answers(self) -> list[list[int]]:
        """Greedy, by transformers."""
        with self.llm(num_gpu_blocks_override=512) as llm:  # other tests may share a card's memory
            read = [out.prompt_token_ids for out in llm.generate(self.inputs(), SamplingParams(max_tokens=1))]
        return [self.greedy(ids, images) for ids, (_, images) in zip(read, self.prompts, strict=True)]

    def inputs(self) -> list[dict[str, Any]]:
        return [{"prompt": text, "multi_modal_data": {"image": images}} for text, images in self.prompts]

    def greedy(self, ids: Sequence[int], images: Sequence[Image.Image]) -> list[int]:
        said: list[int] = []
        while len(said) < (GREEDY.max_tokens or 0):
            said.append(int(theirs(self.model, self.family, [*ids, *said], images)[-1].argmax()))
        return said


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(tmp_path_factory.mktemp(request.param), request.param)


HALF_OF_THEM = pytest.mark.parametrize("family", in_turn(FAMILIES), indirect=True, scope="module")
"""For what depends little on the model."""


def said(outputs: Sequence[Any]) -> list[list[int]]:
    return [list(one.outputs[0].token_ids) for one in outputs]


def test_logits_are_those_of_transformers(family: Family) -> None:
    whole = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=-1)
    with family.llm(max_num_batched_tokens=24, max_num_encoder_input_tokens=5) as llm:
        for out, (_, images) in zip(llm.generate(family.inputs(), whole), family.prompts, strict=True):
            wanted = theirs(family.model, family.family, out.prompt_token_ids, images)
            assert wanted.std() >= 0.7, "a flat model would hide errors"
            assert out.prompt_logprobs is not None
            for position, row in enumerate(out.prompt_logprobs[1:]):
                assert row is not None
                ours = torch.full((len(wanted[0]),), -torch.inf)
                ours[[token for token, _ in row.top]] = torch.tensor([value for _, value in row.top])
                assert (ours - wanted[position].log_softmax(-1)).abs().max() < 1e-4


AXES: dict[str, tuple[dict[str, Any], ...]] = {
    "tokens": ({}, {"max_num_batched_tokens": 9}),
    "encoder": ({}, {"max_num_encoder_input_tokens": 1, "encoder_cache_size": 45}),
    "memory": ({}, {"pressure_policy": "preempt"}),
    "drafts": ({}, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}),
    "lookahead": ({}, {"lookahead": 1}),
    "ops": ({}, {"deterministic": True}, {"cpu_kernels": "torch"}),
    "cache": ({}, {"enable_prefix_caching": False}),
}
EVERY = [{name: value for part in parts for name, value in part.items()} for parts in product(*AXES.values())]
RANKS = ({}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2})
ROWS = [
    {name: value for part in row.values() for name, value in part.items()}
    for row in pairwise({**AXES, "ranks": RANKS}, seed=135)
]
BLOCKS = {"gemma3": 11, "gemma4": 10, "gemma4-small": 10}
"""Of 8 tokens: enough for the first two prompts together, with drafts in flight, and too few for their answers. Of
other families it is 14."""


def same_answers(family: Family, options: dict[str, Any]) -> None:
    """Alone, all together, twice, from threads at once, and several answers each."""
    if family.family in ("gemma3", "gemma4") and "max_num_batched_tokens" in options:
        options = {**options, "max_num_batched_tokens": 14}  # an image must fit
    if "pressure_policy" in options:
        blocks = BLOCKS.get(family.family, 14)
        options = {**options, "num_gpu_blocks_override": blocks, "max_model_len": 8 * blocks}
    with family.llm(**options) as llm:
        inputs, wanted = family.inputs(), family.answers
        assert said(llm.generate(inputs, GREEDY)) == wanted
        assert said(llm.generate(inputs, GREEDY)) == wanted
        llm.reset_prefix_cache()
        assert [said(llm.generate([one], GREEDY))[0] for one in reversed(inputs)] == wanted[::-1]
        with ThreadPoolExecutor(4) as pool:
            assert [said(one)[0] for one in pool.map(lambda one: llm.generate([one], GREEDY), inputs)] == wanted
        forked = llm.generate(inputs[2], SamplingParams(n=3, temperature=0.0, max_tokens=10, ignore_eos=True))
        assert [list(one.token_ids) for one in forked[0].outputs] == [wanted[2]] * 3
        if "num_gpu_blocks_override" in options:
            assert llm._engine.scheduler.num_preemptions, "the blocks were to run out"


BY_DAY = ("qwen3-vl", "qwen3.5", "gemma4")
"""Of these CI has a row of settings each; of the others logits and prefixes."""

IN_TURN = [
    pytest.param(
        family,
        row,
        marks=() if family in BY_DAY and turn == at else pytest.mark.nightly,
        id=f"{family}-{turn}",
    )
    for at, family in enumerate(FAMILIES)
    for turn, row in enumerate(ROWS)
]


@pytest.mark.parametrize(("family", "options"), IN_TURN, indirect=["family"], scope="module")
def test_answers_are_those_of_transformers(family: Family, options: dict[str, Any]) -> None:
    same_answers(family, options)


@pytest.mark.nightly
@pytest.mark.parametrize("options", EVERY, ids=range(len(EVERY)))
def test_answers_are_those_of_transformers_in_every_setting(family: Family, options: dict[str, Any]) -> None:
    same_answers(family, options)


def test_later_stages_of_a_pipeline_have_no_encoder(family: Family) -> None:
    """Except of a model whose layers have inputs, which are made of embeddings in each stage."""
    config = read_config(family.folder)
    spec = read_spec(config)
    held = []
    outline = ModelOutline(config, spec, "auto", torch.float32, {})
    for number, layers in enumerate(outline.cut_stages(2)):
        stage = ParallelGroup()
        stage.pipeline = Pipeline(number, 2)
        build = outline._replace(spec=replace(spec, stage=layers)).build(stage)
        held.append(sum("vis" in name for name in build.slots))
    assert held[0] > 20 and held[1] == (held[0] if family.family == "gemma4-small" else 0)


@pytest.fixture(scope="module")
def plain(family: Family) -> Iterator[LLM]:
    with family.llm() as llm:
        yield llm


def counted(llm: LLM) -> tuple[int, int, int]:
    cache = llm._engine.scheduler.encoder_cache
    return cache.num_queried, cache.num_hits, cache.num_encoded


def test_an_image_is_encoded_once_and_its_prefix_not_at_all(family: Family, plain: LLM) -> None:
    one, other = picture(44, 33, 7), picture(44, 33, 8)
    before = counted(plain)
    first = {"prompt": f"a{family.mark} is it", "multi_modal_data": {"image": one}}
    again = {"prompt": f"b{family.mark}{family.mark}", "multi_modal_data": {"image": [one, one]}}
    plain.generate([first], GREEDY)
    plain.generate([again], GREEDY)
    queried, hits, encoded = (now - then for now, then in zip(counted(plain), before, strict=True))
    assert (queried, hits, encoded) == (3, 1 + 1, 1)
    warm = plain.generate([first], GREEDY)[0]
    assert warm.num_cached_tokens > 8 and counted(plain)[2] - before[2] == 1
    changed = {**first, "multi_modal_data": {"image": other}}
    cold = plain.generate([changed], GREEDY)[0]
    assert cold.num_cached_tokens <= 8, "another image in the same place is another prompt"
    assert said([cold]) == [family.greedy(cold.prompt_token_ids, [other])]
    [bare] = plain.generate({"prompt_token_ids": list(warm.prompt_token_ids)}, GREEDY)
    assert bare.num_cached_tokens <= 8, "the same tokens without an image are another prompt"


@HALF_OF_THEM
def test_a_conversation_takes_images_as_parts(family: Family, plain: LLM) -> None:
    one = family.pictures[0]
    talk = [{"role": "user", "content": [{"type": "image", "image": one}, {"type": "text", "text": "hm?"}]}]
    [out] = plain.chat(talk, GREEDY)
    assert said([out]) == [family.greedy(out.prompt_token_ids, [one])]
    [other] = plain.chat(
        [{**talk[0], "content": [{"type": "image_pil", "image_pil": one}, talk[0]["content"][1]]}], GREEDY
    )
    assert said([other]) == said([out])
    assert "".join(plain.stream_chat(talk, GREEDY)) == out.outputs[0].text


@pytest.mark.parametrize("family", ["gemma4"], indirect=True, scope="module")
def test_async_answers_are_those_of_transformers(family: Family) -> None:
    async def ask(llm: AsyncLLM, prompt: dict[str, Any]) -> list[int]:
        *_, last = [out async for out in llm.generate(prompt, GREEDY)]
        return list(last.outputs[0].token_ids)

    async def together() -> list[list[int]]:
        async with AsyncLLM(str(family.folder), dtype="float32", max_model_len=512, block_size=8) as llm:
            return await asyncio.gather(*(ask(llm, prompt) for prompt in family.inputs()))

    assert asyncio.run(together()) == family.answers


def test_what_cannot_be_read_is_refused_by_name(family: Family, plain: LLM) -> None:
    one = family.pictures[0]
    for prompt, error in (
        ({"prompt": "none", "multi_modal_data": {"image": one}}, "0 places for 1 images"),
        ({"prompt": family.mark * 2, "multi_modal_data": {"image": one}}, "2 places for 1 images"),
        ({"prompt": family.mark, "multi_modal_data": {"image": "a.png"}}, "must be an image of pillow, not str"),
        ({"prompt": family.mark, "multi_modal_data": {"video": one}}, "multi_modal_data must look like"),
        ({"prompt": family.mark * 17, "multi_modal_data": {"image": [one] * 17}}, "at most 16 are read"),
    ):
        with pytest.raises(InvalidRequest, match=error):
            plain.generate(prompt, GREEDY)
    with pytest.raises(InvalidRequest, match="cannot be continued"):
        plain.chat(
            [{"role": "assistant", "content": [{"type": "image", "image": one}]}],
            add_generation_prompt=False,
            continue_final_message=True,
        )


def test_without_images_a_checkpoint_is_its_text_model(family: Family) -> None:
    with family.llm(limit_mm_per_prompt={"image": 0}) as llm:
        assert not llm._engine.description.encoder_layers
        [out] = llm.generate(family.prompts[3][0], GREEDY)
        assert said([out]) == [family.answers[3]]
        with pytest.raises(InvalidRequest, match="--limit-mm-per-prompt turns them off"):
            llm.generate({"prompt": family.mark, "multi_modal_data": {"image": family.pictures[0]}})


def test_an_image_that_is_too_large_for_the_cache_is_refused(family: Family) -> None:
    with (
        family.llm(encoder_cache_size=3) as llm,
        pytest.raises(InvalidRequest, match="--encoder-cache-size"),
    ):
        llm.generate({"prompt": family.mark, "multi_modal_data": {"image": family.pictures[0]}}, GREEDY)


def test_recordings_are_refused_where_images_are_read(family: Family, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="--recording-dir: recordings have no images"):
        family.llm(recording_dir=str(tmp_path))


def test_a_text_model_refuses_images_by_name(tmp_path: Path) -> None:
    make_text(tmp_path, "llama-gqa-tied")
    with LLM(str(tmp_path), skip_tokenizer_init=True, dtype="float32") as llm:
        prompt = {"prompt_token_ids": [1, 2], "multi_modal_data": {"image": picture(8, 8)}}
        with pytest.raises(InvalidRequest, match="LlamaForCausalLM has no encoder of images here"):
            llm.generate(prompt)


@HALF_OF_THEM
def test_token_ids_hold_one_place_for_each_image(family: Family, plain: LLM) -> None:
    own = place_of(family.family)
    prompt = {"prompt_token_ids": [70, own, 71], "multi_modal_data": {"image": [family.pictures[0]]}}
    [out] = plain.generate(prompt, GREEDY)
    assert said([out]) == [family.greedy(out.prompt_token_ids, family.pictures[:1])]


@HALF_OF_THEM
def test_the_example_of_the_guide_runs(family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[1] / "docs/guides/images.md").read_text("utf-8")
    example = text.partition("<!-- images -->\n```python\n")[2].partition("```")[0]
    assert "Qwen/Qwen2.5-VL-3B-Instruct" in example
    monkeypatch.chdir(tmp_path)
    family.pictures[0].save("cat.png")
    code = example.replace("Qwen/Qwen2.5-VL-3B-Instruct", str(family.folder))
    code = code.replace("<|vision_start|><|image_pad|><|vision_end|>", family.mark)
    scope: dict[str, Any] = {}
    exec(code, scope)
    scope["llm"].close()
