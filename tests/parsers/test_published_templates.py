"""What published chat templates render is read back by the parsers that are chosen from these very templates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest

from quire.errors import InvalidRequest
from quire.multimodal.inputs import NoImages
from quire.parsers.parts import joined
from quire.parsers.reasoning import THOUGHTS, AnswerSplitter, parser_of, thoughts_ahead
from quire.parsers.tools.kinds import properties_of
from quire.parsers.tools.readers import reader_of
from quire.parsers.tools.rendering import calls_text
from quire.parsers.tools.styles import Style, sign_of, style_of
from quire.server import prompts
from quire.server.schemas import ChatRequest
from quire.tokenization.chat_template import ChatTemplate
from tests.parsers.published import templates

pytestmark = pytest.mark.nightly

FAMILIES = """
llama-cpp-python/Apertus-8B-Instruct apertus apertus
llama-cpp-python/Apriel-1.6-15b-Thinker-fixed jamba apriel
llama-cpp-python/Bielik-11B-v3.0-Instruct hermes qwen3
llama-cpp-python/ByteDance-Seed-OSS seed_oss seed_oss
llama-cpp-python/Cohere2MoE cohere_command4 cohere_command4
llama-cpp-python/CohereForAI-c4ai-command-r-plus-tool_use cohere_command_r none
llama-cpp-python/CohereForAI-c4ai-command-r7b-12-2024-tool_use cohere_command3 cohere_command3
llama-cpp-python/GLM-4.6 glm45 glm45
llama-cpp-python/GLM-4.7-Flash glm47 glm45
llama-cpp-python/GigaChat3-10B-A1.8B gigachat3 none
llama-cpp-python/GigaChat3.1-10B-A1.8B gigachat3 none
llama-cpp-python/HuggingFaceTB-SmolLM3-3B - qwen3
llama-cpp-python/Kimi-K2-Instruct kimi_k2 none
llama-cpp-python/Kimi-K2-Thinking kimi_k2 kimi_k2
llama-cpp-python/Kimi-K3 kimi_k3 kimi_k3
llama-cpp-python/LFM2-8B-A1B lfm2 none
llama-cpp-python/LFM2.5-8B-A1B lfm2 qwen3
llama-cpp-python/LFM2.5-Instruct - qwen3
llama-cpp-python/MiMo-VL hermes none
llama-cpp-python/MiniMax-M1 minimax none
llama-cpp-python/MiniMax-M2 minimax_m2 minimax_m2
llama-cpp-python/MiniMax-M3 minimax_m3 minimax_m3
llama-cpp-python/Mistral-Small-3.2-24B-Instruct-2506 mistral none
llama-cpp-python/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16 qwen3_coder qwen3
llama-cpp-python/NVIDIA-Nemotron-Nano-v2 nemotron_json qwen3
llama-cpp-python/NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use hermes none
llama-cpp-python/NousResearch-Hermes-3-Llama-3.1-8B-tool_use hermes none
llama-cpp-python/Qwen-QwQ-32B hermes qwen3
llama-cpp-python/Qwen-Qwen2.5-7B-Instruct hermes none
llama-cpp-python/Qwen-Qwen3-0.6B hermes qwen3
llama-cpp-python/Qwen3-Coder qwen3_coder none
llama-cpp-python/Qwen3.5-4B qwen3_coder qwen3
llama-cpp-python/Reka-Edge hermes qwen3
llama-cpp-python/Spark2.5 glm47 glm45
llama-cpp-python/StepFun3.5-Flash qwen3_coder qwen3
llama-cpp-python/deepseek-ai-DeepSeek-R1-Distill-Llama-8B deepseek_v3 deepseek_r1
llama-cpp-python/deepseek-ai-DeepSeek-R1-Distill-Qwen-32B deepseek_v3 deepseek_v3
llama-cpp-python/deepseek-ai-DeepSeek-V3.1 deepseek_v31 deepseek_v3
llama-cpp-python/deepseek-ai-DeepSeek-V3.2 deepseek_v32 deepseek_v3
llama-cpp-python/deepseek-ai-DeepSeek-V4 deepseek_v4 deepseek_v4
llama-cpp-python/deepseek-ai-DeepSeek-V4-Flash-0731 deepseek_v4 deepseek_v4
llama-cpp-python/google-gemma-2-2b-it gemma none
llama-cpp-python/google-gemma-4-31B-it gemma4 gemma4
llama-cpp-python/google-gemma-4-31B-it-interleaved gemma4 gemma4
llama-cpp-python/ibm-granite-granite-3.3-2B-Instruct granite granite
llama-cpp-python/ibm-granite-granite-4.0 granite4 none
llama-cpp-python/ibm-granite-granite-4.1 granite4 none
llama-cpp-python/inclusionai-ling-3.0-flash glm45 glm45
llama-cpp-python/llama-cpp-deepseek-r1 deepseek_v3 deepseek_r1
llama-cpp-python/meetkai-functionary-medium-v3.1 functionary_v3_1 none
llama-cpp-python/meetkai-functionary-medium-v3.2 functionary_v3_2 functionary_v3_2
llama-cpp-python/meta-llama-Llama-3.1-8B-Instruct llama3_json none
llama-cpp-python/meta-llama-Llama-3.2-3B-Instruct llama3_json none
llama-cpp-python/meta-llama-Llama-3.3-70B-Instruct llama3_json none
llama-cpp-python/mistralai-Ministral-3-14B-Reasoning-2512 mistral mistral
llama-cpp-python/mistralai-Mistral-Nemo-Instruct-2407 mistral none
llama-cpp-python/moonshotai-Kimi-K2 kimi_k2 none
llama-cpp-python/muse-glimmer muse_glimmer muse_glimmer
llama-cpp-python/openai-gpt-oss-120b openai openai_gptoss
llama-cpp-python/openbmb-MiniCPM5-1B minicpm5 qwen3
llama-cpp-python/poolside-Laguna-S-2.1 glm47 glm45
llama-cpp-python/poolside-Laguna-XS-2.1 glm45 glm45
llama-cpp-python/poolside-Laguna-XS.2 glm45 glm45
llama-cpp-python/tencent-Hy3 hy_v3 hy_v3
llama-cpp-python/unsloth-Apriel-1.5 jamba apriel
llama-cpp-python/unsloth-mistral-Devstral-Small-2507 mistral none
llama-cpp-python/upstage-Solar-Open-100B solar_open solar_open
trl/deepseek_r1_distill deepseek_v3 deepseek_r1
trl/deepseekv3 deepseek_v3 deepseek_r1
trl/diffusion_gemma gemma4 gemma4
trl/gemma gemma none
trl/gemma3 gemma none
trl/gemma4 gemma4 gemma4
trl/gemma4_v2 gemma4 gemma4
trl/gemma4_v3 gemma4 gemma4
trl/gemma4_v4 gemma4 gemma4
trl/gemma4_v5 gemma4 gemma4
trl/glm4moe glm45 glm45
trl/gptoss openai openai_gptoss
trl/lfm2 lfm2 none
trl/lfm2_2_5 lfm2 qwen3
trl/lfm2_2_5_v2 lfm2 qwen3
trl/lfm2_2_5_vl lfm2 qwen3
trl/lfm2_v2 lfm2 none
trl/llama3 llama3_json none
trl/llama3_1 llama3_json none
trl/llama3_2 llama3_json none
trl/muse_glimmer muse_glimmer muse_glimmer
trl/nemotron_3_5_lightning qwen3_coder qwen3
trl/nemotron_3_nano qwen3_coder qwen3
trl/nemotron_3_super qwen3_coder qwen3
trl/nemotron_3_ultra qwen3_coder qwen3
trl/qwen2_5 hermes none
trl/qwen3 hermes qwen3
trl/qwen3_5_nothink qwen3_coder qwen3
trl/qwen3_5_think qwen3_coder qwen3
trl/qwen3_6 qwen3_coder qwen3
trl/qwen3_8 qwen3_coder qwen3
trl/qwen3_instruct_2507 hermes none
trl/qwen3_vl hermes none
"""
"""Each template, and the parsers that are chosen for it; `-`: its format of calls is not told, so Hermes' is read."""

OTHERS = """
llama-cpp-python/fireworks-ai-llama-3-firefunction-v2 llama-cpp-python/llama-cpp-rwkv-world
llama-cpp-python/microsoft-Phi-3.5-mini-instruct trl/cohere trl/cohere2 trl/idefics3 trl/llava_next trl/phi3 trl/phi3_5
trl/qwen2_5_vl trl/smolvlm
"""
"""Of models that call no tools, and of FireFunction, whose template reads `functions` and `datetime` instead."""

HIDES_CALLS = """
llama-cpp-python/LFM2-8B-A1B llama-cpp-python/LFM2.5-Instruct llama-cpp-python/ibm-granite-granite-3.3-2B-Instruct
trl/lfm2 trl/lfm2_v2
"""
"""Templates that write no calls: clients of these models have to send them as content."""

UNESCAPED = "llama-cpp-python/LFM2.5-8B-A1B trl/lfm2_2_5 trl/lfm2_2_5_v2"
"""Templates that write a string between apostrophes, whatever it contains."""

REFUSES = {
    "llama-cpp-python/Kimi-K2-Instruct": "append",
    "llama-cpp-python/Kimi-K2-Thinking": "append",
    "llama-cpp-python/meta-llama-Llama-3.1-8B-Instruct": "single tool-calls",
    "llama-cpp-python/meta-llama-Llama-3.2-3B-Instruct": "single tool-calls",
    "llama-cpp-python/meta-llama-Llama-3.3-70B-Instruct": "single tool-calls",
    "trl/llama3_1": "single tool-calls",
    "trl/llama3_2": "single tool-calls",
}
"""What the error says where calls cannot be rendered: llama.cpp's templates of Kimi K2 change a list, which the sandbox
refuses as transformers' does; Llama 3's refuse several calls at once."""

ENDS = (
    *("<|im_end|>", "<|END_OF_TURN_TOKEN|>", "<|message_sep|>", "<|tool_response>", "<|eot_id|>", "<|eom_id|>", "</s>"),
    *("<|end_of_text|>", "<end_of_turn>", "<turn|>", "[e~[", "<｜end▁of▁sentence｜>", "<|return|>", "<|endoftext|>"),
    *("<|user|>", "<|observation|>", "<|assistant_end|>", "<seed:eos>", "<end_of_sentence>", "<EOS>", "<|eos|>"),
    *("<sep>", "<|role_end|>", "</assistant>", "<｜hy_eos:opensource｜>", "<|end_of_msg|>", "<SPECIAL_12>"),
    *("<|START_OF_TURN_TOKEN|>", "<|eot|>", "<|end|>\n", "<|calls|>"),
)
"""Tokens that end an answer, of all of these models."""

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "where"},
        "days": {"type": "integer", "description": "how many"},
        "hot": {"type": "boolean", "description": "whether"},
        "places": {"type": "array", "description": "of interest", "items": {"$ref": "#/$defs/place"}},
    },
    "required": ["city"],
    "$defs": {
        "place": {"type": "object", "properties": {"name": {"type": "string"}, "at": {"type": "number"}}},
    },
}
NOW: dict[str, Any] = {"type": "object", "properties": {}, "required": []}
SCHEMAS = {"weather": WEATHER, "now": NOW}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"It tells {name}", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
SIMPLE: tuple[str, dict[str, Any]] = ("weather", {"city": "Paris", "days": 3})
HARD: tuple[str, dict[str, Any]] = (
    "weather",
    {
        "city": 'São "Paulo"\n<b>, it\'s {1}',
        "days": 3,
        "hot": True,
        "places": [{"name": "a, b: c", "at": -1.5}, {"name": "7"}],
    },
)


class Answer(NamedTuple):
    """What a model says."""

    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    thought: str = ""
    content: str = ""


ANSWERS = {
    "a call": Answer((SIMPLE,)),
    "a call with all kinds of values": Answer((HARD,)),
    "two calls": Answer((SIMPLE, ("now", {}))),
    "text": Answer(content="Yes."),
    "thoughts and text": Answer(thought="Let me see.", content="Yes."),
    "thoughts and a call": Answer((SIMPLE,), thought="Let me see."),
}
SWITCHES: tuple[dict[str, Any], ...] = ({}, {"enable_thinking": True, "thinking": True}, {"enable_thinking": False})
QUESTION = {"role": "user", "content": "What now?"}


@pytest.fixture(scope="module")
def published() -> dict[str, str]:
    return templates()


def families() -> dict[str, list[str]]:
    return {name: parsers for name, *parsers in map(str.split, FAMILIES.split("\n")[1:-1])}


class Model:
    """A model of which there is a template."""

    def __init__(self, source: str, switches: Mapping[str, Any]) -> None:
        self._template = ChatTemplate(source, {"bos_token": "<BOS>", "eos_token": "<EOS>"})
        self._switches = dict(switches)
        self.style: Style = style_of(source)
        self.thoughts = parser_of(source)

    def render(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """As a backend does."""
        return self._template.render(messages, **options)

    def encode(self, text: str, **_: Any) -> tuple[int, ...]:
        """As a backend does: nothing that is looked at here."""
        return tuple(range(len(text)))

    def prompt(self, messages: list[dict[str, Any]], *, begins: bool = True) -> str:
        """What the server makes of a request."""
        request = ChatRequest(
            messages=messages, add_generation_prompt=begins, chat_template_kwargs=dict(self._switches)
        )
        return prompts.render(messages, request, self, NoImages(), TOOLS).text  # type: ignore[arg-type]

    def message(self, answer: Answer) -> dict[str, Any]:
        """An answer as a client sends it back."""
        said: dict[str, Any] = {"role": "assistant", "content": answer.content}
        if answer.thought:
            said["reasoning_content"] = answer.thought
        if answer.calls:
            random = "abcdefgh0123456789abcdef"[: self.style.id_length]
            said["tool_calls"] = [
                {
                    "id": self.style.call_id.format(name=name, index=i, random=random[:-1] + str(i)),
                    "type": "function",
                    "function": {"name": name, "arguments": json.dumps(arguments)},
                }
                for i, (name, arguments) in enumerate(answer.calls)
            ]
        return said

    def written(self, answer: Answer, *, hides_calls: bool) -> tuple[str, str]:
        """The prompt, and what the model writes behind it to give this answer.

        It is what the template writes for an answer that is part of a conversation. Where the prompt begins a thought
        that the template leaves out of conversations, the model has written it.
        """
        prompt, whole = self.prompt([QUESTION]), self.prompt([QUESTION, self.message(answer)], begins=False)
        same = _common(prompt, whole)
        text = whole[same:].removeprefix("<|CHATBOT_TOKEN|>")
        if hides_calls and answer.calls:
            text = calls_text(self.message(answer)["tool_calls"], self.style)
        ends = [at for end in ENDS if (at := text.find(end, 1)) > 0]
        text = text[: min(ends, default=len(text))]
        style = THOUGHTS.get(self.thoughts)
        begun = style is not None and prompt.rstrip().endswith(style.opens)
        if style is None or not begun:
            return prompt, text
        if text.lstrip().startswith(style.closes):
            return prompt, answer.thought + text
        return (
            prompt,
            text if answer.thought and answer.thought in text else f"{answer.thought}\n{style.closes[0]}\n\n{text}",
        )

    def read(self, prompt: str, text: str) -> Answer:
        """The answer as the server shows it."""
        style = THOUGHTS.get(self.thoughts)
        calls = reader_of(self.style, {name: properties_of(schema) for name, schema in SCHEMAS.items()})
        inside = thoughts_ahead(self.thoughts, prompt) == "open"
        splitter = calls if style is None else AnswerSplitter(style.splitter(inside=inside), calls)
        parts = joined([*splitter.feed(text), *splitter.flush()])
        arguments = {part.call: json.loads(part.text) for part in parts if part.kind == "arguments"}
        return Answer(
            tuple((part.text, arguments[part.call]) for part in parts if part.kind == "call"),
            "".join(part.text for part in parts if part.kind == "reasoning"),
            "".join(part.text for part in parts if part.kind == "content").strip(),
        )


def _common(one: str, other: str) -> int:
    """The length of what both begin with, without the beginning of a mark in which they differ."""
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    mark = max(one.rfind("<", 0, same), one.rfind("[", 0, same))
    within = mark >= 0 and same < len(one) and not set(one[mark:same]) & set(">] \n")
    return mark if within else same


def _without_apostrophes(given: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.replace("'", "") if isinstance(value, str) else value for key, value in given.items()}


def test_every_published_template_is_accounted_for(published: dict[str, str]) -> None:
    assert {*families(), *OTHERS.split()} == set(published)


@pytest.mark.parametrize("name", families())
def test_the_parsers_are_those_of_the_family(name: str, published: dict[str, str]) -> None:
    sign = sign_of(published[name])
    assert ["-" if sign is None else sign.name, parser_of(published[name])] == families()[name]


@pytest.mark.parametrize("switches", SWITCHES, ids=["as it is", "thinking", "not thinking"])
@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("name", families())
def test_what_a_template_writes_is_read_back(
    name: str, answer: str, switches: Mapping[str, Any], published: dict[str, str]
) -> None:
    model, said = Model(published[name], switches), ANSWERS[answer]
    said = said._replace(calls=said.calls[: model.style.most])
    if name in UNESCAPED.split():
        said = said._replace(calls=tuple((tool, _without_apostrophes(given)) for tool, given in said.calls))
    if name in REFUSES and len(said.calls) > ("single" in REFUSES[name]):
        with pytest.raises(InvalidRequest, match=REFUSES[name]):
            model.written(said, hides_calls=False)
        return
    prompt, text = model.written(said, hides_calls=name in HIDES_CALLS.split())
    style = THOUGHTS.get(model.thoughts)
    if style is not None and said.thought and prompt.rstrip().endswith(style.closes):
        # The prompt says that the model does not think.
        said = said._replace(thought="")
        prompt, text = model.written(said, hides_calls=name in HIDES_CALLS.split())
    # Templates leave out the thoughts of messages, but for those with calls, or of certain turns.
    shown = said if said.thought in text else said._replace(thought="")
    assert model.read(prompt, text) == shown, (prompt[-300:], text)


@pytest.mark.parametrize("name", families())
def test_a_conversation_with_results_is_rendered(name: str, published: dict[str, str]) -> None:
    model = Model(published[name], {})
    said = model.message(ANSWERS["a call"])
    messages = [
        QUESTION,
        said,
        {
            "role": "tool",
            "tool_call_id": said["tool_calls"][0]["id"],
            "name": "weather",
            "content": "It is 21 degrees.",
        },
    ]
    if "append" in REFUSES.get(name, ""):
        with pytest.raises(InvalidRequest, match="append"):
            model.prompt(messages)
        return
    text = model.prompt([*messages, {"role": "assistant", "content": "Warm."}, {"role": "user", "content": "Thanks."}])
    assert all(each in text for each in ("What now?", "It is 21 degrees.", "Warm.", "Thanks."))
    assert name in HIDES_CALLS.split() or "Paris" in text
    assert "It tells weather" in text


@pytest.mark.parametrize("name", OTHERS.split())
def test_templates_of_other_families_compile(name: str, published: dict[str, str]) -> None:
    """Some expect images, or variables of their own."""
    assert ChatTemplate(published[name], {"bos_token": "<BOS>", "eos_token": "<EOS>"}).arguments
