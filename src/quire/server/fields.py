"""Fields of OpenAI's, vLLM's, llama-server's and SGLang's requests that have no effect here, or are refused: one table
for code, tests and docs.

A field is *honoured* (the request types declare it), a *no-op* by definition, or *refused* by name with a reason. A
refused field may be sent with a value that asks for nothing, as client libraries do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from quire.errors import InvalidRequest, nearest


class Refusal(NamedTuple):
    """Why a field is not supported, the values that would change nothing (None never does), and the error's code."""

    why: str
    no_op: tuple[Any, ...] = ()
    code: str = "unsupported_field"


NO_ADAPTERS = "adapters are not applied at run time; merge the adapter into the weights"
"""Why a request cannot choose one."""

NO_THREADS = "thread_unsupported_request"
"""Anthropic's code, for which the tool runners of its clients go on with the whole conversation in each request."""


NO_OPS: Mapping[str, str] = {
    "user": "a label for the caller's own records",
    "metadata": "a label for the caller's own records",
    "safety_identifier": "a label for the caller's own records",
    "session_id": "a label that related requests share",
    "client_metadata": "a label for the caller's own records",
    "store": "only responses of /v1/responses are stored",
    "user_profile_id": "a label for the caller's own records",
    "workspace_id": "a label for the caller's own records",
    "billing_policy": "there is nothing to pay",
    "fallback_credit_token": "there is nothing to pay",
    "fallbacks": "one model answers, or none",
    "access_programs": "nothing is kept for members of programs",
    "speed": "there is one speed: as fast as it can be",
    "service_tier": "there is one tier",
    "prompt_cache_key": "prefixes are found by their tokens, without a key",
    "prompt_cache_retention": "prefixes stay while there is room",
    "prompt_cache_options": "prefixes stay while there is room",
    "cache_control": "there is no prefix to pin here",
    "guided_decoding_backend": "there is one: llguidance",
    "verbosity": "how long answers are is for the prompt to say",
    "prediction": "it would make an answer faster, never another one",
    "max_tool_calls": "this server calls no tools itself: answers say which to call",
    "include_obfuscation": "streams are not padded",
    "defer_loading": "all tools are shown to the model at once",
    "eager_input_streaming": "arguments are always streamed as they come",
    "disable_fallback": "there is nothing to fall back to",
    "provider_specific_fields": "LiteLLM's notes on an answer, which it sends back with it",
    "keep_alive": "the model stays loaded as long as the server runs",
    "cache_prompt": "prefixes are found by their tokens",
    "id_slot": "requests have no slots: they share the cache by blocks",
    "n_cache_reuse": "prefixes are found by their tokens",
    "n_keep": "prompts are never cut",
    "n_discard": "prompts are never cut",
    "mirostat_tau": "it is mirostat's, which is not supported",
    "mirostat_eta": "it is mirostat's, which is not supported",
    "dry_base": "it is of dry_multiplier, which is not supported",
    "dry_allowed_length": "it is of dry_multiplier, which is not supported",
    "dry_penalty_last_n": "it is of dry_multiplier, which is not supported",
    "dry_sequence_breakers": "it is of dry_multiplier, which is not supported",
    "xtc_threshold": "it is of xtc_probability, which is not supported",
    "dynatemp_exponent": "it is of dynatemp_range, which is not supported",
}

_TOOLS = "this older form is not supported: use tools and tool_choice"
_TEXT = "this server reads and writes text only"
_REASONING = "it is for /v1/chat/completions and /v1/responses; /v1/messages has reasoning_effort"
_BEAM = "beam search is for /v1/completions and /v1/chat/completions"
_PART = 'images are parts of messages: {"type": "image_url", ...}'

_SAMPLERS = "use temperature, top_p, top_k and the penalties"

# Edits of Anthropic's context_management that leave the conversation as it is.
_KEEP_ALL: tuple[Any, ...] = ({}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]})

REFUSED_FIELDS: Mapping[str, Refusal] = {
    "structural_tag": Refusal("use grammar, which can describe text around a schema with %json"),
    "disable_additional_properties": Refusal("send it within structured_outputs"),
    "tools": Refusal("tools are called in /v1/chat/completions, /v1/responses and /v1/messages", ([],)),
    "tool_choice": Refusal("there are no tools to choose from here", ("none", "auto")),
    "parallel_tool_calls": Refusal("there are no tools to call here", (True, False)),
    "functions": Refusal(_TOOLS, ([],)),
    "function_call": Refusal(_TOOLS, ("none", "auto")),
    "audio": Refusal(_TEXT),
    "modalities": Refusal(_TEXT, (["text"],)),
    "image": Refusal(_PART, ({},)),
    "images": Refusal(_PART, ([],)),
    "mm_processor_kwargs": Refusal("start the server with --mm-processor-kwargs", ({},)),
    "media_io_kwargs": Refusal(_TEXT, ({},)),
    "return_mm_kwargs": Refusal(_TEXT, (True, False)),
    "prompt_embeds": Refusal("prompts are text or token ids"),
    "suffix": Refusal("filling in between a prompt and a suffix is for /v1/completions", ("",)),
    "moderation": Refusal("this server does not moderate"),
    "reasoning_effort": Refusal("it is for conversations: use /v1/chat/completions"),
    "include_reasoning": Refusal("here reasoning is part of the text", (True,)),
    "enable_thinking": Refusal("put what the model's template knows into chat_template_kwargs"),
    "thinking": Refusal("it is for conversations: use /v1/chat/completions"),
    "thinking_token_budget": Refusal("here thoughts are part of the text", (-1,)),
    "documents": Refusal("put documents into a message", ([],)),
    "chat_template": Refusal("templates are code: start the server with --chat-template"),
    "template": Refusal("templates are code: start the server with --chat-template", ("",)),
    "truncate": Refusal("prompts are never cut: send the part that matters", (False,)),
    "shift": Refusal("an answer ends where the context does", (False,)),
    "use_beam_search": Refusal(_BEAM, (False,)),
    "length_penalty": Refusal(_BEAM, (1, 1.0)),
    "early_stopping": Refusal(_BEAM, (False,)),
    "truncate_prompt_tokens": Refusal("here prompts are never cut: send the part that matters"),
    "truncation_side": Refusal("where prompts are cut, their end is left out: send the part that matters", ("right",)),
    "return_sampling_params": Refusal("only completions and chat completions tell them", (False,)),
    "logits_processors": Refusal("code is not taken from requests: use logit_bias, bad_words or allowed_token_ids"),
    "logprob_token_ids": Refusal("use logprobs, which gives the most likely tokens"),
    "spaces_between_special_tokens": Refusal("text is exactly what the tokens decode to", (True,)),
    "repetition_detection": Refusal("use repetition_penalty, stop or max_tokens"),
    "watermarking": Refusal("watermarks are not supported", (False,)),
    "stream_interval": Refusal("tokens are sent as they come", (1,)),
    "request_id": Refusal("send the header X-Request-Id"),
    "return_prompt_text": Refusal("/tokenize shows what a template makes of messages", (False,)),
    "return_token_offsets": Refusal("use echo and logprobs, whose text_offset says where tokens begin", (False,)),
    "routed_experts_prompt_start": Refusal("expert routes are not reported", (0,)),
    "kv_transfer_params": Refusal("K/V stays on this server"),
    "ec_transfer_params": Refusal("K/V stays on this server"),
    "previous_response_id": Refusal("it is for /v1/responses: send the whole conversation"),
    "conversation": Refusal("conversations have no ids here: /v1/responses has previous_response_id"),
    "background": Refusal("it is for /v1/responses; /v1/batches works in the background, too", (False,)),
    "background_options": Refusal("there are no options of work in the background", ({},)),
    "thread": Refusal("threads have no ids here: send the whole conversation", code=NO_THREADS),
    "diagnostics": Refusal("/v1/requests/{id}/explain says what the prefix cache found, and why not more"),
    "personality": Refusal("put it into instructions, or a system message"),
    "compaction": Refusal("prompts are never edited: send the part that matters"),
    "truncation": Refusal("prompts are never cut: send the part that matters", ("disabled",)),
    "reasoning": Refusal(_REASONING, ({}, {"effort": None, "summary": None})),
    "allowed_callers": Refusal("only the model calls tools here", (["direct"],)),
    "context_management": Refusal("prompts are never edited: send the part that matters", _KEEP_ALL),
    "mcp_servers": Refusal("this server calls no other: call the tool and send its result", ([],)),
    "web_search_options": Refusal("this server does not search the web"),
    "container": Refusal("this server runs no code"),
    "output_config": Refusal("use response_format, or structured_outputs"),
    "output_format": Refusal("use response_format, or structured_outputs"),
    "inference_geo": Refusal("there is one place: this server"),
    "extra_body": Refusal("openai's clients put its fields into the request itself: send them so", ({},)),
    "flat_logprobs": Refusal("log-probabilities have the API's form", (False,)),
    "mirostat": Refusal(_SAMPLERS, (0,)),
    "typical_p": Refusal(_SAMPLERS, (1,)),
    "tfs_z": Refusal(_SAMPLERS, (1,)),
    "top_n_sigma": Refusal(_SAMPLERS, (-1,)),
    "dry_multiplier": Refusal(_SAMPLERS, (0,)),
    "xtc_probability": Refusal(_SAMPLERS, (0,)),
    "dynatemp_range": Refusal(_SAMPLERS, (0,)),
    "samplers": Refusal("samplers have one order here", ([],)),
    "min_keep": Refusal("each sampler leaves one token at least, and no more", (0, 1)),
    "penalize_nl": Refusal("penalties count all tokens", (True,)),
    "n_probs": Refusal("use logprobs, and top_logprobs in conversations", (0,)),
    "post_sampling_probs": Refusal("log-probabilities are those before sampling", (False,)),
    "return_tokens": Refusal("use return_token_ids", (False,)),
    "return_progress": Refusal("return_timings says how long the prompt took", (False,)),
    "reasoning_format": Refusal("start the server with --reasoning-parser", ("auto", "deepseek")),
    "thinking_forced_open": Refusal("the chat template says whether thoughts are open", (False,)),
    "lora": Refusal(NO_ADAPTERS, ([],)),
    "lora_path": Refusal(NO_ADAPTERS, ("",)),
    "separate_reasoning": Refusal("start the server with --reasoning-parser none", (True,)),
    "stream_reasoning": Refusal("thoughts are streamed as they come", (True,)),
    "no_stop_trim": Refusal("use include_stop_str_in_output", (False,)),
    "return_hidden_states": Refusal("use /v1/embeddings or /pooling", (False,)),
    "vllm_xargs": Refusal("there are no extensions that could take it", ({},)),
    "sampling_params": Refusal("send its fields beside the prompt, in the request itself", ({},)),
    "parameters": Refusal("send its fields beside the prompt, in the request itself", ({},)),
    "do_sample": Refusal("temperature 0 is greedy, and any other draws", (True,)),
    "details": Refusal("answers say how they ended; see logprobs and return_token_ids", (False,)),
    "decoder_input_details": Refusal("use prompt_logprobs", (False,)),
    "watermark": Refusal("watermarks are not supported", (False,)),
    "adapter_id": Refusal(NO_ADAPTERS),
    "input_prefix": Refusal("send prompt, which goes before, and suffix"),
    "input_extra": Refusal("put it before the prompt", ([],)),
    "t_max_predict_ms": Refusal("use timeout, in seconds, or max_tokens", (0,)),
    "t_max_prompt_ms": Refusal("use timeout, in seconds", (0,)),
    "response_fields": Refusal("answers have the API's form", ([],)),
    "n_indent": Refusal("use regex or grammar of structured_outputs", (0,)),
    "parse_tool_calls": Refusal("start the server with --tool-call-parser", (True,)),
    "reasoning_budget": Refusal("use thinking_token_budget", (-1,)),
    "stop_regex": Refusal("use stop, or a structure that ends there", ([],)),
    "custom_params": Refusal("there are no extensions that could take it", ({},)),
    "custom_logit_processor": Refusal(
        "code is not taken from requests: use logit_bias, bad_words or allowed_token_ids"
    ),
    "logprob_start_len": Refusal("use prompt_logprobs, or echo with logprobs", (-1,)),
    "token_ids_logprob": Refusal("use logprobs, which gives the most likely tokens", ([],)),
    "return_text_in_logprobs": Refusal("log-probabilities have texts", (True, False)),
    "image_data": Refusal('images are parts of messages: {"type": "image_url", ...}'),
    "input_embeds": Refusal("prompts are text or token ids"),
    "rid": Refusal("send the header X-Request-Id"),
}

# Names for the same thing, here and in other APIs; where a path has several, the first is used in hints.
SYNONYMS = (
    ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens", "num_predict", "n_predict"),
    ("min_tokens", "min_new_tokens"),
    ("prompt", "messages", "message", "input", "inputs", "text", "content", "input_ids"),
    ("stop", "stop_sequences", "stop_strings"),
    ("seed", "sampling_seed"),
    ("n", "n_cmpl"),
    ("echo", "return_full_text"),
    ("logprobs", "return_logprob", "top_n_tokens", "top_logprobs_num"),
    ("truncate_prompt_tokens", "truncate"),
    ("suffix", "input_suffix"),
    ("repetition_penalty", "repeat_penalty"),
    ("return_timings", "timings_per_token"),
    ("structured_outputs", "regex", "ebnf", "grammar", "json_schema"),
)

# The path that has a field, for hints.
ELSEWHERE: Mapping[str, str] = {
    "messages": "/v1/chat/completions",
    "prompt": "/v1/completions",
    "input": "/v1/responses",
}


def check(
    given: Mapping[str, Any],
    honoured: Iterable[str],
    *,
    where: str = "",
    no_ops: Mapping[str, str] = NO_OPS,
    refused: Mapping[str, Refusal] = REFUSED_FIELDS,
) -> dict[str, Any]:
    """The honoured fields of `given`, without those that are None. Raises InvalidRequest naming the first refused or
    unknown field.

    where: path of the object, such as 'stream_options.', for the message. no_ops, refused: the table of the object's
    other fields.
    """
    known = frozenset(honoured)
    kept = {}
    for name, value in given.items():
        if value is None:
            continue
        if name in known:
            kept[name] = value
        elif name in refused:
            refusal = refused[name]
            if value not in refusal.no_op:
                raise InvalidRequest(f"{where}{name}: {refusal.why}", param=where + name, code=refusal.code)
        elif name not in no_ops:
            path = where + name[:64]
            hint = nearest(name[:64], known) if where else _hint(name, known)
            raise InvalidRequest(f"unknown field {path!r}.{hint}", param=path, code="unknown_field")
    return kept


def _hint(name: str, known: Collection[str]) -> str:
    """The name that an unknown field has on this path, and the path that has a field of that name."""
    meant = next((other for names in SYNONYMS if name in names for other in names if other in known), None)
    hint = f" Did you mean {meant!r}?" if meant else nearest(name[:64], known)
    return hint + (f" {ELSEWHERE[name]} has {name!r}." if name in ELSEWHERE else "")


def require_text(given: Mapping[str, Any], name: str, where: str) -> str:
    """The text in a field of an object. where: path of the object. Raises InvalidRequest."""
    value = given.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{where}.{name} must be text", param=where.partition("[")[0])
    return value
