from __future__ import annotations

import re
import typing

import pytest
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chats

from quire.errors import InvalidRequest
from quire.server import schemas
from quire.server.fields import NO_OPS, REFUSED_FIELDS, check

VLLM = re.findall(
    r"\w+",
    """
add_generation_prompt add_special_tokens allowed_token_ids bad_words cache_salt chat_template chat_template_kwargs
continue_final_message documents echo ec_transfer_params frequency_penalty ignore_eos include_reasoning
include_stop_str_in_output kv_transfer_params length_penalty logit_bias logprob_token_ids logprobs
max_completion_tokens max_tokens media_io_kwargs messages min_p min_tokens mm_processor_kwargs model n
parallel_tool_calls presence_penalty priority prompt_logprobs reasoning_effort repetition_detection
repetition_penalty request_id response_format return_mm_kwargs return_prompt_text return_token_ids
return_token_offsets return_tokens_as_token_ids routed_experts_prompt_start seed session_id skip_special_tokens
spaces_between_special_tokens stop stop_token_ids stream stream_interval stream_options structured_outputs
temperature thinking_token_budget tool_choice tools top_k top_logprobs top_p truncate_prompt_tokens
truncation_side use_beam_search user vllm_xargs watermarking guided_json guided_regex guided_choice guided_grammar
""",
)


def names(kind: type) -> set[str]:
    return {*kind.__struct_fields__, *NO_OPS, *REFUSED_FIELDS}  # type: ignore[attr-defined]


def test_every_field_of_the_openai_client_is_in_the_table() -> None:
    assert set(typing.get_type_hints(chats.CompletionCreateParamsBase)) <= names(schemas.ChatRequest)
    assert set(typing.get_type_hints(completions.CompletionCreateParamsBase)) <= names(schemas.CompletionRequest)


def test_every_field_of_vllm_is_in_the_table() -> None:
    assert set(VLLM) <= names(schemas.ChatRequest)
    assert {"prompt", "best_of", "suffix", "prompt_embeds"} <= names(schemas.CompletionRequest)


def test_no_field_has_two_states() -> None:
    assert not NO_OPS.keys() & REFUSED_FIELDS.keys()


@pytest.mark.parametrize("name", sorted(REFUSED_FIELDS))
def test_a_refusal_names_the_field_and_says_why(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check({name: {"anything": 1}}, ())
    assert caught.value.param == name
    assert str(caught.value) == f"{name}: {REFUSED_FIELDS[name].why}"
    for harmless in (None, *REFUSED_FIELDS[name].no_op):
        assert check({name: harmless}, ()) == {}


def test_no_ops_are_dropped_and_honoured_fields_kept() -> None:
    assert check({"user": "u", "n": 2}, {"n"}) == {"n": 2}
