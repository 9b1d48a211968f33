"""Writes docs/reference/vllm.md, the names of vLLM's Python API and command line beside Quire's: `make docs`.

Which names vLLM has is written here; what becomes of each is asked of the code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any

import quire
from quire import types
from quire.checks import ANY, Unneeded
from quire.config import OPTIONS
from quire.config.other_servers import UNSUPPORTED
from quire.config.vllm import ATTRIBUTES, CONSTRUCTOR, METHODS, taken_by_the_command_line
from quire.frontend.beam_search import BeamSearchParams

SAMPLING = """n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop
    stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs detokenize skip_special_tokens
    include_stop_str_in_output output_kind structured_outputs logit_bias allowed_token_ids bad_words
    thinking_token_budget spaces_between_special_tokens flat_logprobs logprob_token_ids prompt_logprob_token_ids
    prompt_logprob_start stream_interval skip_clone output_text_buffer_length extra_args skip_reading_prefix_cache
    repetition_detection routed_experts_prompt_start trace_decode_token_ids best_of use_beam_search length_penalty
    early_stopping logits_processors truncate_prompt_tokens guided_decoding"""
STRUCTURED = """json regex choice grammar json_object disable_any_whitespace disable_additional_properties
    whitespace_pattern structural_tag backend backend_options disable_fallback"""
BEAMS = "beam_width max_tokens ignore_eos temperature length_penalty include_stop_str_in_output"
ENGINE = """model tokenizer dtype max_model_len gpu_memory_utilization tensor_parallel_size
    pipeline_parallel_size data_parallel_size seed enforce_eager quantization enable_prefix_caching
    enable_chunked_prefill max_num_seqs max_num_batched_tokens kv_cache_dtype kv_cache_memory_bytes block_size
    num_gpu_blocks_override load_format download_dir revision served_model_name skip_tokenizer_init runner convert
    task trust_remote_code tokenizer_mode tokenizer_revision code_revision hf_token hf_overrides hf_config_path
    config_format model_impl allowed_local_media_path allowed_media_domains limit_mm_per_prompt enable_mm_embeds
    interleave_mm_strings media_io_kwargs mm_processor_kwargs mm_processor_cache_gb mm_processor_cache_type
    mm_encoder_only mm_encoder_tp_mode mm_encoder_attn_backend skip_mm_profiling video_pruning_rate
    disable_chunked_mm_input distributed_executor_backend enable_expert_parallel nnodes node_rank master_addr
    master_port prefill_context_parallel_size decode_context_parallel_size data_parallel_rank
    data_parallel_size_local data_parallel_address data_parallel_rpc_port data_parallel_hybrid_lb
    data_parallel_external_lb data_parallel_backend all2all_backend enable_dbo enable_eplb
    expert_placement_strategy disable_custom_all_reduce max_parallel_loading_workers prefix_caching_hash_algo
    disable_sliding_window disable_cascade_attn swap_space cpu_offload_gb kv_offloading_size kv_offloading_backend
    max_num_partial_prefills max_long_partial_prefills long_prefill_token_threshold scheduling_policy
    scheduler_cls async_scheduling stream_interval max_logprobs logprobs_mode disable_log_stats enable_lora
    max_loras max_lora_rank max_cpu_loras lora_dtype fully_sharded_loras default_mm_loras
    model_loader_extra_config ignore_patterns safetensors_load_strategy pt_load_map_location use_tqdm_on_load
    structured_outputs_config reasoning_parser reasoning_parser_plugin logits_processors logits_processor_pattern
    speculative_config pooler_config override_pooler_config compilation_config optimization_level
    cudagraph_capture_sizes max_cudagraph_capture_size max_seq_len_to_capture attention_backend attention_config
    override_attention_dtype worker_cls worker_extension_cls profiler_config kv_transfer_config kv_events_config
    ec_transfer_config generation_config override_generation_config enable_sleep_mode enable_prompt_embeds
    calculate_kv_scales mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size kv_sharing_fast_prefill
    disable_hybrid_kv_cache_manager additional_config quantization_config rope_scaling rope_theta
    use_v2_block_manager num_lookahead_slots num_scheduler_steps preemption_mode scheduler_delay_factor
    guided_decoding_backend disable_async_output_proc speculative_model num_speculative_tokens tokenizer_pool_size
    enable_prompt_adapter disable_log_requests otlp_traces_endpoint collect_detailed_traces kv_cache_metrics
    show_hidden_metrics_for_version tokens_only device moe_backend language_model_only mamba_cache_mode reasoning_config
    enable_return_routed_experts enable_mfu_metrics cudagraph_metrics kv_cache_metrics_sample io_processor_plugin
    mm_shm_cache_max_object_size_mb eplb_config weight_transfer_config offload_backend renderer_num_workers
    enable_logging_iteration_details max_num_queued_reqs max_num_queued_tokens performance_mode
    disable_mm_preprocessor_cache lora_extra_vocab_size tokenizer_pool_type ray_workers_use_nsight"""
SERVER = """host port uds api_key root_path allowed_origins allowed_methods allowed_headers allow_credentials
    ssl_keyfile ssl_certfile ssl_ca_certs ssl_cert_reqs enable_ssl_refresh middleware chat_template
    chat_template_content_format default_chat_template_kwargs trust_request_chat_template response_role
    enable_auto_tool_choice tool_call_parser tool_parser_plugin tool_server exclude_tools_when_tool_choice_none
    enable_reasoning return_tokens_as_token_ids lora_modules enable_log_requests enable_log_outputs max_log_len
    log_config_file uvicorn_log_level disable_uvicorn_access_log log_error_stack aggregate_engine_logging
    enable_prompt_tokens_details enable_force_include_usage enable_server_load_tracking enable_request_id_headers
    disable_fastapi_docs disable_frontend_multiprocessing api_server_count headless shutdown_timeout
    h11_max_incomplete_event_size h11_max_header_count enable_log_deltas enable_per_request_metrics
    enable_tokenizer_info_endpoint fingerprint_mode fingerprint_value disable_access_log_for_endpoints
    enable_offline_docs enable_flash_late_interaction ssl_ciphers sse_keep_alive_interval grpc grpc_port"""
LLM = """generate chat beam_search embed encode classify score reward enqueue enqueue_chat wait_for_completion
    get_tokenizer set_tokenizer get_default_sampling_params from_engine_args reset_prefix_cache reset_mm_cache
    get_metrics get_world_size preprocess_chat sleep wake_up start_profile stop_profile collective_rpc apply_model
    llm_engine model_config"""
ASYNC = """generate encode abort from_engine_args shutdown get_tokenizer reset_prefix_cache reset_mm_cache
    add_request add_lora list_loras get_model_config get_vllm_config check_health is_running errored do_log_stats
    pause_generation resume_generation sleep wake_up start_profile stop_profile collective_rpc"""
OUTPUTS = {
    "RequestOutput": "request_id prompt prompt_token_ids prompt_logprobs outputs finished metrics num_cached_tokens "
    "lora_request encoder_prompt encoder_prompt_token_ids kv_transfer_params multi_modal_placeholders",
    "CompletionOutput": "index text token_ids cumulative_logprob logprobs finish_reason stop_reason finished "
    "lora_request routed_experts kv_transfer_params",
    "EmbeddingRequestOutput": "request_id outputs prompt_token_ids num_cached_tokens finished",
    "EmbeddingOutput": "embedding hidden_size",
    "ClassificationOutput": "probs num_classes",
    "ScoringOutput": "score",
    "PoolingOutput": "data",
    "Logprob": "logprob rank decoded_token",
}
OF_METHODS = """lora_request prompt_adapter_request mm_processor_kwargs tokenization_kwargs
    guided_options_request trace_headers data_parallel_rank pooling_params prompt_token_ids chat_template
    chat_template_content_format"""

WORKS = "works"

HEAD = """# vLLM's names

Written by `make docs`; do not edit. Names are those of vLLM's main branch in November 2026 and of older versions that
scripts are still written for. Each works, or is taken where its value changes nothing about an answer, or is refused by
name with what to do instead: with `quire.errors.InvalidRequest` or `InvalidConfig` in Python, and exit code 2 on the
command line, where an option that is taken is named. [Move from vLLM](../guides/from-vllm.md) has the differences that
are none of names, [Request fields](requests.md) the fields of HTTP requests.
"""


def markdown() -> str:
    """The whole page."""
    return HEAD + "".join(
        f"\n## {title}\n\n{about}| {kind} | |\n|---|---|\n" + "".join(f"| `{name}` | {said} |\n" for name, said in rows)
        for title, kind, about, rows in _sections()
    )


def _sections() -> Iterator[tuple[str, str, str, list[tuple[str, str]]]]:
    for title, names, has, others in (
        ("SamplingParams", SAMPLING, _fields(types.SamplingParams), types.SAMPLING_OTHERS),
        ("StructuredOutputsParams", STRUCTURED, _fields(types.StructuredOutputsParams), types.STRUCTURE_OTHERS),
        ("BeamSearchParams", BEAMS, _fields(BeamSearchParams), {}),
        ("Arguments of methods", OF_METHODS, set(), METHODS),
    ):
        yield (
            title,
            "field" if has else "argument",
            "",
            [(name, _of_fields(name, has, others)) for name in names.split()],
        )
    yield (
        "LLM, EngineArgs, AsyncEngineArgs",
        "argument",
        'An argument that is `None` is one that is not given; `dtype` may be `"half"`, `"float"` or torch\'s.\n\n',
        [(name, argument(name)) for name in ENGINE.split()],
    )
    for title, names, one in (("LLM", LLM, quire.LLM), ("AsyncLLM, AsyncLLMEngine", ASYNC, quire.AsyncLLM)):
        yield f"Methods of {title}", "method", "", [(name, attribute(one, name)) for name in names.split()]
    for title, text in OUTPUTS.items():
        one = getattr(types, title)
        yield title, "attribute", _ABOUT.get(title, ""), [(name, attribute(one, name)) for name in text.split()]
    yield (
        "Options of `vllm serve`",
        "option",
        "Those of the engine are the arguments above, with dashes.\n\n",
        [(f"--{name.replace('_', '-')}", option(name)) for name in SERVER.split()],
    )


_ABOUT: Mapping[str, str] = {
    "CompletionOutput": "`logprobs`, and `prompt_logprobs` of a `RequestOutput`, have a mapping for each position, "
    "from token id to `Logprob`; its `token`, `logprob`, `rank` and `top` are those of the token that was chosen.\n\n",
    "PoolingOutput": "A tuple of numbers, not a tensor: `torch.tensor(output.outputs.data)` makes one.\n\n",
}


def _fields(one: Any) -> set[str]:
    return {each.name for each in fields(one)}


def _of_fields(name: str, has: set[str], others: Mapping[str, Unneeded]) -> str:
    if name in has:
        return WORKS
    values, instead = others[name]
    return _taken(values, instead)


def _taken(values: tuple[Any, ...], instead: str) -> str:
    if values is ANY:
        return f"taken, changes nothing: {instead}" if instead else "taken, changes nothing"
    return f"taken if {' or '.join(f'`{one!r}`' for one in values)}; otherwise: {instead}"


def argument(name: str) -> str:
    """What becomes of an argument of `LLM`."""
    if name in OPTIONS:
        return WORKS
    if name in CONSTRUCTOR:
        return _taken(CONSTRUCTOR[name], UNSUPPORTED[name])
    return f"refused: {UNSUPPORTED[name]}"


def option(name: str) -> str:
    """What becomes of an option of `vllm serve`."""
    if name in OPTIONS:
        return WORKS
    values = taken_by_the_command_line(name)
    return f"refused: {UNSUPPORTED[name]}" if values is None else _taken(values, UNSUPPORTED[name])


def attribute(one: Callable[..., Any], name: str) -> str:
    """What becomes of an attribute of a class."""
    if isinstance(vars(one).get(name), types.Absent):
        return "`None`"
    known = hasattr(one, name) or name in getattr(one, "__dataclass_fields__", ())
    return WORKS if known else f"refused: {ATTRIBUTES[name]}"


if __name__ == "__main__":
    print(markdown(), end="")
