"""Options we do not have: vLLM's, with the nearest thing or the reason, and hints for the misspelled."""

from __future__ import annotations

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

UNSUPPORTED: Mapping[str, str] = MappingProxyType(
    {
        "tensor_parallel_size": _ONE_DEVICE,
        "tp": _ONE_DEVICE,
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
        "cpu_offload_gb": _NO_OFFLOAD,
        "kv_offloading_size": _NO_OFFLOAD,
        "kv_offloading_backend": _NO_OFFLOAD,
        "swap_space": "preempted requests are recomputed, never swapped",
        "enable_sleep_mode": "stop the server and start it again: it is ready in seconds",
        "trust_remote_code": _NO_CODE,
        "tokenizer_mode": "tokenizer.json is the one format; see --tokenizer",
        "skip_tokenizer_init": "send token ids as the prompt instead",
        "hf_overrides": "edit config.json in a local copy of the model",
        "generation_config": "the model's generation_config.json gives the defaults; requests override them",
        "override_generation_config": "set sampling parameters in the request",
        "async_scheduling": "see --lookahead, the number of steps launched ahead",
        "num_scheduler_steps": "see --lookahead, the number of steps launched ahead",
        "stream_interval": "every step's text is sent as it comes",
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
        "structured_outputs_config": "the grammar back end is not a choice; ask for structure in the request",
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
        "allowed_origins": "put a proxy in front that sets CORS headers",
        "middleware": "put a proxy in front",
        "grpc": "HTTP only",
        "grpc_port": "HTTP only; see --port",
        "disable_fastapi_docs": "there are no such pages to disable",
        "enable_request_id_headers": _ALWAYS,
        "sse_keep_alive_interval": "streams send tokens as they come and nothing between",
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


def refuse(name: str, source: str, known: Iterable[str]) -> InvalidConfig:
    """The error for an option we do not have; `name` and `known` are spelled alike: flags, variables or keys."""
    plain = name.removeprefix(PREFIX).lstrip("-").replace("-", "_").lower()
    if plain in UNSUPPORTED:
        return InvalidConfig(f"{source}: {name} is not supported: {UNSUPPORTED[plain]}", param=plain)
    return InvalidConfig(f"{source}: there is no option {name}.{nearest(name, known)}", param=plain)
