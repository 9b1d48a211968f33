from __future__ import annotations

import re
import typing

import pytest
from anthropic.types import message_count_tokens_params as count_params
from anthropic.types import message_create_params as message_params
from anthropic.types.beta import message_create_params as beta_params
from openai.types import completion_create_params as completions
from openai.types import embedding_create_params as embedding_params
from openai.types.chat import completion_create_params as chats
from openai.types.responses import input_token_count_params as input_params
from openai.types.responses import response_create_params as response_params

from quire.errors import InvalidRequest
from quire.server import embeddings, messages, responses, schemas
from quire.server.fields import ELSEWHERE, NO_OPS, REFUSED_FIELDS, check

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


HEADERS = {"betas"}
"""A parameter of a client that it sends as a header field."""


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (chats.CompletionCreateParamsBase, schemas.ChatRequest),
        (completions.CompletionCreateParamsBase, schemas.CompletionRequest),
        (embedding_params.EmbeddingCreateParams, embeddings.EmbeddingsRequest),
        (response_params.ResponseCreateParamsBase, responses.ResponsesRequest),
        (input_params.InputTokenCountParams, responses.ResponsesRequest),
        (message_params.MessageCreateParamsBase, messages.MessagesRequest),
        (beta_params.MessageCreateParamsBase, messages.MessagesRequest),
        (count_params.MessageCountTokensParams, messages.CountRequest),
    ],
    ids=lambda one: one.__name__,
)
def test_every_field_of_the_official_clients_is_taken_a_hint_or_refused_with_a_reason(theirs: type, ours: type) -> None:
    unknown = set(typing.get_type_hints(theirs)) - names(ours) - HEADERS
    # What another path has is refused with that path's name.
    assert unknown <= ELSEWHERE.keys(), f"neither honoured nor in the tables of server/fields.py: {sorted(unknown)}"


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


def test_what_llama_servers_clients_send_by_default_is_taken() -> None:
    """llama.cpp's defaults of samplers that are not here, which its clients send with every request."""
    sent = {
        "cache_prompt": True,
        "id_slot": -1,
        "n_keep": 0,
        "mirostat": 0,
        "mirostat_tau": 5.0,
        "mirostat_eta": 0.1,
        "typical_p": 1.0,
        "tfs_z": 1.0,
        "top_n_sigma": -1,
        "dry_multiplier": 0.0,
        "dry_base": 1.75,
        "min_keep": 0,
        "xtc_probability": 0.0,
        "xtc_threshold": 0.1,
        "dynatemp_range": 0.0,
        "dynatemp_exponent": 1.0,
        "n_probs": 0,
    }
    assert check({"n": 2, **sent}, {"n"}) == {"n": 2}
    for name, value in (("mirostat", 2), ("typical_p", 0.9), ("dry_multiplier", 0.8), ("lora", [{"id": 0}])):
        with pytest.raises(InvalidRequest, match=f"{name}: ") as caught:
            check({name: value}, {"n"})
        assert caught.value.code == "unsupported_field"
    with pytest.raises(InvalidRequest, match=r"unknown field 'content'\. Did you mean 'prompt'"):
        check({"content": "a"}, {"prompt", "n"})
