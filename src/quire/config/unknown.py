"""Errors for unknown options: of other servers, with a replacement or the reason; misspelled, with the nearest name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from quire.config.option import PREFIX
from quire.errors import InvalidConfig
from quire.types import NUMERIC_PARAMETERS


def _by_name(names: Mapping[str, str]) -> Mapping[str, str]:
    """From names, separated by spaces, by their text to the text by name."""
    return MappingProxyType({name: text for text, several in names.items() for name in several.split()})


UNSUPPORTED = _by_name(
    {
        "ranks are started by one server, see --tensor-parallel-size and --pipeline-parallel-size": (
            "nnodes node_rank master_addr master_port headless"
        ),
        "start one server for each copy of the model": (
            "data_parallel_size dp data_parallel_rank data_parallel_size_local data_parallel_address "
            "data_parallel_rpc_port data_parallel_hybrid_lb data_parallel_external_lb data_parallel_backend"
        ),
        "see --tensor-parallel-size and --pipeline-parallel-size": (
            "prefill_context_parallel_size decode_context_parallel_size"
        ),
        "see --enable-expert-parallel": "all2all_backend enable_dbo enable_eplb expert_placement_strategy",
        "images are read as the model's own configuration says; see --limit-mm-per-prompt": (
            "enable_mm_embeds interleave_mm_strings media_io_kwargs mm_processor_cache_gb mm_processor_cache_type "
            "mm_encoder_only mm_encoder_tp_mode skip_mm_profiling video_pruning_rate disable_chunked_mm_input"
        ),
        "blocks are laid out as the model needs them": (
            "disable_hybrid_kv_cache_manager kv_sharing_fast_prefill mamba_cache_dtype mamba_ssm_cache_dtype "
            "mamba_block_size"
        ),
        "run it under torch.profiler or py-spy": "profiler_config",
        "see --skip-tokenizer-init": "tokens_only",
        "texts are encoded in threads by themselves": "tokenizer_pool_size",
        "templates are code: see --chat-template": "trust_request_chat_template",
        "clients run tools": "tool_server",
        "see --hf-overrides and --tokenizer": "hf_config_path",
        "headers have fixed limits": "h11_max_incomplete_event_size h11_max_header_count",
        "see --debug": "log_error_stack",
        "each rank of --tensor-parallel-size is a process of this host": ("disable_custom_all_reduce"),
        "one front process serves all clients; the engine has a process of its own": (
            "api_server_count disable_frontend_multiprocessing"
        ),
        "it is read from the checkpoint; see --quantization": "quantization_config",
        "say --quantization": "q",
        "--model takes a repository, and of several GGUF files one by its name: owner/name/file.gguf": (
            "hf_file hff hf_repo_file"
        ),
        "the chat template is always applied": "jinja no_jinja",
        "attention is chosen by itself": "flash_attn fa",
        "the file is mapped, and read where it is needed": "mmap no_mmap mlock",
        "requests join the running steps by themselves": "cont_batching cb",
        "there is no such switch: leave it out": "no_webui no_slots",
        "start the server with --runner pooling, or ask any model at /v1/embeddings": "embedding embeddings",
        "start the server with --runner pooling": "reranking rerank pooling",
        "vision encoders of GGUF files are not read: see docs/guides/images.md": "mmproj mm mmproj_url",
        "send it in the request": (
            "temp repeat_penalty repeat_last_n mirostat n_predict predict n samplers grammar json_schema"
        ),
        "see --hf-overrides": "rope_freq_base rope_freq_scale yarn_orig_ctx",
        "say it in one JSON object: --speculative-config '{\"model\": ...}'": (
            "md model_draft draft draft_max draft_min draft_n spec_type"
        ),
        "weights and KV stay on the device; see --max-model-len, --max-num-seqs and --kv-cache-memory-bytes": (
            "cpu_offload_gb"
        ),
        "see --kv-cache-memory-bytes": "cpu_kvcache_space",
        "see --kv-offloading-size and --kv-offloading-dir": (
            "kv_offloading_backend hicache_size hicache_ratio enable_hierarchical_cache hicache_storage_backend "
            "hicache_write_policy cache_disk"
        ),
        "scales of --kv-cache-dtype fp8 are found while loading": "calculate_kv_scales",
        "preempted requests are recomputed, never swapped": "swap_space preemption_mode",
        "stop the server and start it again: it is ready in seconds": "enable_sleep_mode",
        "code from a repository is never run; only Quire's and transformers' own architectures are served": (
            "trust_remote_code code_revision tool_parser_plugin reasoning_parser_plugin logits_processors "
            "logits_processor_pattern"
        ),
        "see --runner and --convert": "task",
        "our own layers run it; --executor hf runs transformers'": "model_impl",
        "config.json is the one format": "config_format",
        "set HF_TOKEN in the environment": "hf_token",
        "--revision is the tokenizer's, too": "tokenizer_revision",
        "edit config.json in a local copy of the model": "rope_scaling rope_theta",
        "see --load-format": (
            "model_loader_extra_config safetensors_load_strategy pt_load_map_location ignore_patterns use_tqdm_on_load"
        ),
        "weights stream to the device by themselves": "max_parallel_loading_workers",
        "it is called --pooler-config": "override_pooler_config",
        "prompts are texts or token ids": "enable_prompt_embeds",
        "tokenizer.json is the one format; see --tokenizer": "tokenizer_mode",
        "the model's generation_config.json gives the defaults; requests override them": "generation_config",
        "set sampling parameters in the request": "override_generation_config",
        "see --lookahead, the number of steps launched ahead": "async_scheduling num_scheduler_steps",
        "every step's text is sent as it comes": "stream_interval",
        "see --latency-target-ms, which shares steps between prompts and answers": "max_num_partial_prefills",
        "see --long-prefill-token-threshold": "max_long_partial_prefills",
        "see --latency-target-ms": "scheduler_delay_factor",
        "it follows from --speculative-config": "num_lookahead_slots",
        "windows are the model's own": "disable_sliding_window",
        "it says nothing about this engine: leave it out": (
            "disable_cascade_attn use_v2_block_manager disable_async_output_proc"
        ),
        "see --executor": "worker_cls worker_extension_cls",
        "see --disaggregation-mode and --disaggregation-address": (
            "kv_transfer_config disaggregation_bootstrap_port disaggregation_transfer_backend "
            "disaggregation_ib_device disaggregation_decode_dp ec_transfer_config"
        ),
        "see /ui and /v1/requests": "kv_events_config",
        "every option has a name of its own": "additional_config",
        "there is no compile step": (
            "max_seq_len_to_capture optimization_level o compilation_config cc cudagraph_capture_sizes "
            "max_cudagraph_capture_size"
        ),
        "see --max-num-queued-reqs, which bounds the queue": "max_num_queued_tokens",
        "see --scheduling-policy and --batching": "scheduler_cls",
        "prefixes are compared, not hashed": "prefix_caching_hash_algo",
        "it follows from --device": (
            "attention_backend attention_config override_attention_dtype mm_encoder_attn_backend"
        ),
        "it is called --deterministic": "enable_deterministic_inference batch_invariant",
        "see --max-num-seqs and --max-num-batched-tokens": "performance_mode",
        'say it in one JSON object: --speculative-config \'{"method": "ngram"}\'': (
            "spec_method spec_model spec_tokens speculative_model num_speculative_tokens"
        ),
        "the grammar back end is not a choice; ask for structure in the request": (
            "structured_outputs_config guided_decoding_backend"
        ),
        "see --reasoning-parser": "enable_reasoning",
        "the role is assistant": "response_role",
        "send return_token_ids in the request": "return_tokens_as_token_ids",
        "a template gets tools only where they may be called": "exclude_tools_when_tool_choice_none",
        "models choose tools by themselves wherever a request brings some": "enable_auto_tool_choice",
        "both forms of message content are accepted": "chat_template_content_format",
        "send chat_template_kwargs in the request": "default_chat_template_kwargs",
        "adapters are not applied at run time; merge the adapter into the weights": (
            "enable_lora lora_modules max_loras max_lora_rank max_cpu_loras lora lora_scaled "
            "default_mm_loras fully_sharded_loras lora_dtype enable_prompt_adapter"
        ),
        "see --host and --port": "uds",
        "put a proxy that speaks TLS in front, with --root-path": "ssl_ca_certs ssl_cert_reqs ssl_ciphers",
        "start the server again to read new certificates": "enable_ssl_refresh",
        "pages of --allowed-origins may send all methods and headers, but no cookies": (
            "allowed_methods allowed_headers allow_credentials"
        ),
        "put a proxy in front": "middleware",
        "HTTP only": "grpc",
        "HTTP only; see --port": "grpc_port",
        "there are no such pages to disable": "disable_fastapi_docs",
        "it is always on": "enable_request_id_headers enable_prompt_tokens_details metrics slots props webui",
        "streams send tokens as they come and nothing between": "sse_keep_alive_interval",
        "they are not logged unless --enable-log-requests says so": "disable_log_requests",
        "see --uvicorn-log-level": (
            "disable_uvicorn_access_log aggregate_engine_logging log_disable log_verbosity lv v verbose log_file"
        ),
        "see --log-format and --uvicorn-log-level": "log_config_file",
        "texts are never logged; see --enable-log-requests": "enable_log_outputs max_log_len",
        "see /metrics": "collect_detailed_traces enable_per_request_metrics",
        "see /metrics and /stats": "kv_cache_metrics",
        "metrics keep their names": "show_hidden_metrics_for_version",
        "clients ask with stream_options.include_usage": "enable_force_include_usage",
        "see /stats": "enable_server_load_tracking",
        "requests may ask for as many as the API allows": "max_logprobs",
        "they are of the model's raw distribution": "logprobs_mode",
    }
)
"""Options of other servers that Quire does not have, and what there is instead."""

ELSEWHERE = _by_name(
    {
        "--model": "m model_path model_id hf_repo hf hfr",
        "--max-model-len": "c ctx_size context_length max_total_tokens max_input_tokens",
        "--max-num-seqs": "np parallel max_running_requests max_concurrent_requests",
        "--max-num-batched-tokens": "b batch_size ub ubatch_size max_prefill_tokens max_batch_prefill_tokens",
        "--long-prefill-token-threshold": "chunked_prefill_size",
        "--gpu-memory-utilization": "mem_fraction_static cuda_memory_fraction",
        "--max-num-queued-reqs": "max_queued_requests max_waiting_requests max_queue_size queue_size",
        "--scheduling-policy": "schedule_policy",
        "--no-enable-prefix-caching": "disable_radix_cache",
        "--enforce-eager": "disable_cuda_graph",
        "--block-size": "page_size",
        "--threads": "t",
        "--served-model-name": "alias",
        "--chat-template": "chat_template_file",
        "--quantization": "quantize",
        "--step-timeout": "watchdog_timeout",
        "--kv-cache-dtype": "cache_type_k",
        "--device": "n_gpu_layers ngl",
        "--tensor-parallel-size": "tp tp_size num_shard",
        "--pipeline-parallel-size": "pp pp_size",
    }
)
"""Options of SGLang, llama.cpp and TGI, by name, and Quire's."""


_IN_REQUESTS = frozenset(each.name for each in NUMERIC_PARAMETERS if each.in_requests)


def refuse(name: str, source: str, known: Iterable[str]) -> InvalidConfig:
    """The error for an unknown option. name, known: both flags, variables or keys."""
    plain = re.sub(r"^-(\w)\d+$", r"\1", name).removeprefix(PREFIX).lstrip("-").replace("-", "_").lower()
    if plain in ELSEWHERE:
        return InvalidConfig(f"{source}: there is no option {name}: here it is {ELSEWHERE[plain]}", param=plain)
    if plain in _IN_REQUESTS:
        return InvalidConfig(f"{source}: {name} is not supported: send it in the request", param=plain)
    if plain in UNSUPPORTED:
        return InvalidConfig(f"{source}: {name} is not supported: {UNSUPPORTED[plain]}", param=plain)
    # Without what all names begin with, which would make any two of them alike.
    bare = {re.sub(r"^(--|QUIRE_)", "", one): one for one in known}
    close = difflib.get_close_matches(re.sub(r"^(--|QUIRE_)", "", name), bare, n=1, cutoff=0.6)
    hint = f" Did you mean {bare[close[0]]!r}?" if close else ""
    return InvalidConfig(f"{source}: there is no option {name}.{hint}", param=plain)
