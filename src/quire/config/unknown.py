"""Errors for unknown options: of other servers, with a replacement or the reason; misspelled, with the nearest name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from quire.config.option import PREFIX
from quire.errors import InvalidConfig, nearest

_ONE_DEVICE = "a server runs its model on one device; start one server for each device"
_NO_LORA = "adapters are not applied at run time; merge the adapter into the weights"
_SPECULATION = 'say it in one JSON object: --speculative-config \'{"method": "ngram"}\''
_NO_OFFLOAD = "weights and KV stay on the device; see --max-model-len, --max-num-seqs and --kv-cache-memory-bytes"
_NO_TLS = "put a proxy that speaks TLS in front, with --root-path"
_NO_CODE = "code from a repository is never run; only built-in architectures are served"
_NO_COMPILE = "there is no compile step"
_ALWAYS = "it is always on"
_TEXT_ONLY = "models read and write text only"
_HEADERS = "pages of --allowed-origins may send all methods and headers, but no cookies"
_GONE = "it says nothing about this engine: leave it out"

UNSUPPORTED: Mapping[str, str] = MappingProxyType(
    {
        "tensor_parallel_size": _ONE_DEVICE,
        "tp": _ONE_DEVICE,
        "tp_size": _ONE_DEVICE,
        "num_shard": _ONE_DEVICE,
        "pipeline_parallel_size": _ONE_DEVICE,
        "pp": _ONE_DEVICE,
        "data_parallel_size": _ONE_DEVICE,
        "dp": _ONE_DEVICE,
        "enable_expert_parallel": _ONE_DEVICE,
        "distributed_executor_backend": _ONE_DEVICE,
        "nnodes": _ONE_DEVICE,
        "node_rank": _ONE_DEVICE,
        "master_addr": _ONE_DEVICE,
        "master_port": _ONE_DEVICE,
        "headless": _ONE_DEVICE,
        "api_server_count": "one front process serves all clients; the engine has a process of its own",
        "quantization_config": "it is read from the checkpoint; see --quantization",
        "q": "say --quantization",
        "cpu_offload_gb": _NO_OFFLOAD,
        "cpu_kvcache_space": "see --kv-cache-memory-bytes",
        "calculate_kv_scales": "scales of --kv-cache-dtype fp8 are found while loading",
        "kv_offloading_size": _NO_OFFLOAD,
        "kv_offloading_backend": _NO_OFFLOAD,
        "swap_space": "preempted requests are recomputed, never swapped",
        "enable_sleep_mode": "stop the server and start it again: it is ready in seconds",
        "trust_remote_code": _NO_CODE,
        "task": "what a model can do follows from the model; /v1/embeddings needs no option",
        "runner": "what a model can do follows from the model; /v1/embeddings needs no option",
        "convert": "what a model can do follows from the model; /v1/embeddings needs no option",
        "model_impl": "our own layers run it; --executor hf runs transformers'",
        "config_format": "config.json is the one format",
        "hf_token": "set HF_TOKEN in the environment",
        "code_revision": _NO_CODE,
        "tokenizer_revision": "--revision is the tokenizer's, too",
        "rope_scaling": "edit config.json in a local copy of the model",
        "rope_theta": "edit config.json in a local copy of the model",
        "model_loader_extra_config": "see --load-format",
        "max_parallel_loading_workers": "weights stream to the device by themselves",
        "limit_mm_per_prompt": _TEXT_ONLY,
        "mm_processor_kwargs": _TEXT_ONLY,
        "enable_prompt_embeds": "prompts are texts or token ids",
        "tokenizer_mode": "tokenizer.json is the one format; see --tokenizer",
        "skip_tokenizer_init": "send token ids as the prompt instead",
        "hf_overrides": "edit config.json in a local copy of the model",
        "generation_config": "the model's generation_config.json gives the defaults; requests override them",
        "override_generation_config": "set sampling parameters in the request",
        "async_scheduling": "see --lookahead, the number of steps launched ahead",
        "num_scheduler_steps": "see --lookahead, the number of steps launched ahead",
        "stream_interval": "every step's text is sent as it comes",
        "max_num_partial_prefills": "see --latency-target-ms, which shares steps between prompts and answers",
        "max_long_partial_prefills": "see --long-prefill-token-threshold",
        "scheduler_delay_factor": "see --latency-target-ms",
        "num_lookahead_slots": "it follows from --speculative-config",
        "preemption_mode": "preempted requests are recomputed, never swapped",
        "disable_sliding_window": "windows are the model's own",
        "disable_cascade_attn": _GONE,
        "disable_custom_all_reduce": _ONE_DEVICE,
        "use_v2_block_manager": _GONE,
        "worker_cls": "see --executor",
        "kv_transfer_config": "K/V stays in the server that made it",
        "kv_events_config": "see /ui and /v1/requests",
        "additional_config": "every option has a name of its own",
        "max_seq_len_to_capture": _NO_COMPILE,
        "max_num_queued_tokens": "see --max-num-queued-reqs, which bounds the queue",
        "scheduler_cls": "see --scheduling-policy and --batching",
        "prefix_caching_hash_algo": "prefixes are compared, not hashed",
        "optimization_level": _NO_COMPILE,
        "o": _NO_COMPILE,
        "compilation_config": _NO_COMPILE,
        "cc": _NO_COMPILE,
        "cudagraph_capture_sizes": _NO_COMPILE,
        "max_cudagraph_capture_size": _NO_COMPILE,
        "attention_backend": "it follows from --device",
        "enable_deterministic_inference": "it is called --deterministic",
        "batch_invariant": "it is called --deterministic",
        "performance_mode": "see --max-num-seqs and --max-num-batched-tokens",
        "spec_method": _SPECULATION,
        "spec_model": _SPECULATION,
        "spec_tokens": _SPECULATION,
        "speculative_model": _SPECULATION,
        "num_speculative_tokens": _SPECULATION,
        "structured_outputs_config": "the grammar back end is not a choice; ask for structure in the request",
        "guided_decoding_backend": "the grammar back end is not a choice; ask for structure in the request",
        "enable_reasoning": "see --reasoning-parser",
        "tool_parser_plugin": _NO_CODE,
        "logits_processors": _NO_CODE,
        "response_role": "the role is assistant",
        "return_tokens_as_token_ids": "send return_token_ids in the request",
        "exclude_tools_when_tool_choice_none": "a template gets tools only where they may be called",
        "enable_auto_tool_choice": "models choose tools by themselves wherever a request brings some",
        "chat_template_content_format": "both forms of message content are accepted",
        "default_chat_template_kwargs": "send chat_template_kwargs in the request",
        "enable_lora": _NO_LORA,
        "lora_modules": _NO_LORA,
        "max_loras": _NO_LORA,
        "max_lora_rank": _NO_LORA,
        "max_cpu_loras": _NO_LORA,
        "uds": "see --host and --port",
        "ssl_ca_certs": _NO_TLS,
        "ssl_cert_reqs": _NO_TLS,
        "ssl_ciphers": _NO_TLS,
        "enable_ssl_refresh": "start the server again to read new certificates",
        "allowed_methods": _HEADERS,
        "allowed_headers": _HEADERS,
        "allow_credentials": _HEADERS,
        "middleware": "put a proxy in front",
        "grpc": "HTTP only",
        "grpc_port": "HTTP only; see --port",
        "disable_fastapi_docs": "there are no such pages to disable",
        "enable_request_id_headers": _ALWAYS,
        "sse_keep_alive_interval": "streams send tokens as they come and nothing between",
        "disable_log_requests": "they are not logged unless --enable-log-requests says so",
        "disable_uvicorn_access_log": "see --uvicorn-log-level",
        "log_config_file": "see --log-format and --uvicorn-log-level",
        "enable_log_outputs": "texts are never logged; see --enable-log-requests",
        "max_log_len": "texts are never logged; see --enable-log-requests",
        "collect_detailed_traces": "see /metrics",
        "kv_cache_metrics": "see /metrics and /stats",
        "show_hidden_metrics_for_version": "metrics keep their names",
        "enable_prompt_tokens_details": _ALWAYS,
        "enable_force_include_usage": "clients ask with stream_options.include_usage",
        "enable_per_request_metrics": "see /metrics",
        "enable_server_load_tracking": "see /stats",
        "max_logprobs": "requests may ask for as many as the API allows",
        "logprobs_mode": "they are of the model's raw distribution",
    }
)

ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("m", "model_path", "model_id", "hf_repo", "hf"), "--model"),
        **dict.fromkeys(("c", "ctx_size", "context_length", "max_total_tokens", "max_input_tokens"), "--max-model-len"),
        **dict.fromkeys(("np", "parallel", "max_running_requests", "max_concurrent_requests"), "--max-num-seqs"),
        **dict.fromkeys(
            ("ub", "ubatch_size", "max_prefill_tokens", "max_batch_prefill_tokens"), "--max-num-batched-tokens"
        ),
        "chunked_prefill_size": "--long-prefill-token-threshold",
        "mem_fraction_static": "--gpu-memory-utilization",
        "cuda_memory_fraction": "--gpu-memory-utilization",
        **dict.fromkeys(
            ("max_queued_requests", "max_waiting_requests", "max_queue_size", "queue_size"), "--max-num-queued-reqs"
        ),
        "schedule_policy": "--scheduling-policy",
        "disable_radix_cache": "--no-enable-prefix-caching",
        "disable_cuda_graph": "--enforce-eager",
        "page_size": "--block-size",
        "t": "--threads",
        "alias": "--served-model-name",
        "chat_template_file": "--chat-template",
        "quantize": "--quantization",
        "watchdog_timeout": "--step-timeout",
        "cache_type_k": "--kv-cache-dtype",
        "n_gpu_layers": "--device",
        "ngl": "--device",
    }
)
"""Options of SGLang, llama.cpp and TGI, by name, and Quire's."""


def refuse(name: str, source: str, known: Iterable[str]) -> InvalidConfig:
    """The error for an unknown option. name, known: both flags, variables or keys."""
    plain = re.sub(r"^-(\w)\d+$", r"\1", name).removeprefix(PREFIX).lstrip("-").replace("-", "_").lower()
    if plain in ELSEWHERE:
        return InvalidConfig(f"{source}: there is no option {name}: here it is {ELSEWHERE[plain]}", param=plain)
    if plain in UNSUPPORTED:
        return InvalidConfig(f"{source}: {name} is not supported: {UNSUPPORTED[plain]}", param=plain)
    return InvalidConfig(f"{source}: there is no option {name}.{nearest(name, known)}", param=plain)
