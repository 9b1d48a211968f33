"""Names that other servers have for options, and what there is instead."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType


def _by_name(names: Mapping[str, str]) -> Mapping[str, str]:
    """From names, separated by spaces, by their text to the text by name."""
    return MappingProxyType({name: text for text, several in names.items() for name in several.split()})


UNSUPPORTED: Mapping[str, str] = _by_name(
    {
        "ranks are started by one server, see --tensor-parallel-size and --pipeline-parallel-size": (
            "nnodes node_rank master_addr master_port headless dist_init_addr nccl_init_addr nccl_port "
            "dist_timeout rpc shard_uds_path engine_use_ray worker_use_ray ray_workers_use_nsight"
        ),
        "see --replicas, or start one server for each copy of the model": (
            "data_parallel_size dp data_parallel_rank data_parallel_size_local data_parallel_address "
            "data_parallel_rpc_port data_parallel_hybrid_lb data_parallel_external_lb data_parallel_backend "
            "dp_size data_parallel_start_rank data_parallel_supervisor_port load_balance_method"
        ),
        "see --tensor-parallel-size and --pipeline-parallel-size": (
            "prefill_context_parallel_size decode_context_parallel_size attention_context_parallel_size dcp "
            "sharded split_mode sm tensor_split ts main_gpu mg"
        ),
        "see --enable-expert-parallel": (
            "all2all_backend enable_dbo enable_eplb eplb_config expert_placement_strategy moe_backend "
            "moe_a2a_backend moe_runner_backend deepep_mode ep_num_redundant_experts moe_dense_tp_size "
            "enable_dp_attention enable_dp_lm_head enable_two_batch_overlap dbo_decode_token_threshold "
            "enable_ep_weight_filter ep ep_size expert_parallel_size disable_shared_experts_fusion"
        ),
        "images are read as the model's own configuration says; see --limit-mm-per-prompt": (
            "enable_mm_embeds interleave_mm_strings media_io_kwargs mm_processor_cache_gb mm_processor_cache_type "
            "mm_encoder_only mm_encoder_tp_mode skip_mm_profiling video_pruning_rate disable_chunked_mm_input "
            "disable_mm_preprocessor_cache mm_shm_cache_max_object_size_mb enable_multimodal mm_process_config "
            "mm_max_concurrent_calls image_min_tokens image_max_tokens mtmd_batch_max_tokens video_fps "
            "video_timestamp_interval video_ffmpeg_dir disable_fast_image_processor keep_mm_feature_on_device "
            "enable_multimodal_encoder_data_parallel language_model_only"
        ),
        "blocks are laid out as the model needs them": (
            "disable_hybrid_kv_cache_manager kv_sharing_fast_prefill mamba_cache_dtype mamba_ssm_cache_dtype "
            "mamba_block_size max_mamba_cache_size mamba_ssm_dtype mamba_full_memory_ratio swa_full_tokens_ratio "
            "disable_hybrid_swa_memory"
        ),
        "run it under torch.profiler or py-spy": (
            "profiler_config enable_layerwise_nvtx_tracing enable_profile_cuda_graph show_time_cost"
        ),
        "see --skip-tokenizer-init": "tokens_only",
        "texts are encoded in threads by themselves": (
            "tokenizer_pool_size tokenizer_pool_type tokenizer_pool_extra_config tokenizer_worker_num "
            "renderer_num_workers validation_workers enable_tokenizer_batch_encode threads_http"
        ),
        "templates are code: see --chat-template": "trust_request_chat_template",
        "clients run tools": "tool_server",
        "see --hf-overrides and --tokenizer": "hf_config_path",
        "headers have fixed limits": "h11_max_incomplete_event_size h11_max_header_count",
        "see --debug": "log_error_stack",
        "each rank of --tensor-parallel-size is a process of this host": "disable_custom_all_reduce",
        "one front process serves all clients; the engine has a process of its own": (
            "api_server_count disable_frontend_multiprocessing"
        ),
        "it is read from the checkpoint; see --quantization": (
            "quantization_config quantization_param_path modelopt_quant torchao_config"
        ),
        "--model takes a repository, and of several GGUF files one by its name: owner/name/file.gguf": (
            "hf_file hff hf_repo_file"
        ),
        "the chat template is always applied": "jinja no_jinja",
        "attention is chosen by itself": (
            "flash_attn fa swa_full disable_chunked_prefix_cache disable_flashinfer_autotune"
        ),
        "the file is mapped, and read where it is needed": "mmap mlock load_mode lm lazy_mode lzm check_tensors",
        "requests join the running steps by themselves": (
            "cont_batching cb nocb waiting_served_ratio max_waiting_tokens"
        ),
        "requests share the KV cache by blocks": (
            "kv_unified kvu kv_unified_per_slot cache_idle_slots slot_prompt_similarity sps defrag_thold dt"
        ),
        "prompts are never cut or shifted": "context_shift keep allow_auto_truncate",
        "prefixes are found by their tokens; see --enable-prefix-caching": "cache_prompt cache_reuse",
        "see --kv-offloading-dir": "slot_save_path",
        "see --state-snapshots": "ctx_checkpoints ctxcp swa_checkpoints checkpoint_min_step cms mamba_cache_mode",
        "weights and KV are all on --device": (
            "kv_offload kvo nkvo op_offload cpu_moe cmoe n_cpu_moe ncmoe n_cpu_ffn ncffn moe_cache_mib "
            "override_tensor ot no_host offload_backend"
        ),
        "memory is fitted by itself; `quire plan MODEL` shows how": "fit fitt fit_target fitc fit_ctx",
        "matrices are packed by themselves": "repack nr",
        "threads are not bound to cores; see --threads": (
            "threads_batch tb cpu_mask cpu_range cr cpu_strict prio poll numa cpu_mask_batch cpu_range_batch crb "
            "cpu_strict_batch prio_batch poll_batch"
        ),
        "set CUDA_VISIBLE_DEVICES in the environment": "base_gpu_id gpu_id_step dev list_devices",
        "the server is warm when /health/ready says so": "warmup skip_server_warmup warmups",
        "it needs no processor time while idle, and stays loaded": "sleep_idle_seconds sleep_on_idle",
        "there is no such switch: leave it out": "no_webui no_slots",
        "start the server with --runner pooling, or ask any model at /v1/embeddings": "embedding embeddings",
        "start the server with --runner pooling": "reranking rerank pooling is_embedding",
        "send it in the request: normalize of /v1/embeddings": "embd_normalize",
        "a server has one model": "models_dir models_preset models_max models_autoload",
        "clients call tools": (
            "tools tools_runtime mcp_servers_config mcp_servers_json agent ag no_ag ui_mcp_proxy webui_mcp_proxy"
        ),
        "/ui has no settings": "ui_config webui_config ui_config_file webui_config_file path",
        "it says nothing that an answer depends on": "tags weight_version perf escape e usage_stats env",
        "give a file or a repository to --model": "model_url mu docker_repo dr",
        "set HF_HUB_OFFLINE=1 in the environment": "offline",
        "set HF_HOME in the environment, or --download-dir": "huggingface_hub_cache weights_cache_override",
        "`quire list` lists models": "cache_list cl",
        "see docs/quickstart.md#shell-completion": "completion_bash",
        "vision encoders of GGUF files are not read: see docs/guides/images.md": (
            "mmproj mm mmproj_url mmu mmproj_auto mmproj_offload mmproj_device mmdev"
        ),
        "send it in the request": (
            "mirostat n_predict predict n samplers grammar grammar_file json_schema json_schema_file j jf "
            "logit_bias l ignore_eos reverse_prompt r repeat_last_n spm_infill"
        ),
        "send it in the request, or set it for all: --override-generation-config '{\"temperature\": 0.7}'": (
            "temp repeat_penalty"
        ),
        "use temperature, top_p, top_k and the penalties": (
            "sampler_seq sampling_seq top_nsigma top_n_sigma xtc_probability xtc_threshold typical typical_p "
            "dry_multiplier dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breaker adaptive_target "
            "adaptive_decay dynatemp_range dynatemp_exp mirostat_lr mirostat_ent"
        ),
        "samplers run where the model does": "backend_sampling bs sampling_backend",
        "see --hf-overrides": (
            "rope_freq_base rope_freq_scale rope_scale rope_factor yarn_orig_ctx yarn_ext_factor yarn_attn_factor "
            "yarn_beta_slow yarn_beta_fast override_kv"
        ),
        "say it in one JSON object: --speculative-config '{\"model\": ...}'": (
            "md model_draft draft draft_max draft_min draft_n draft_n_min draft_p_min draft_p_split spec_type "
            "spec_default spec_draft_model spec_draft_hf hfd hfrd hf_repo_draft spec_draft_n_max spec_draft_n_min "
            "spec_draft_p_split spec_draft_p_min spec_draft_sampling spec_draft_type_k spec_draft_type_v ctkd "
            "cache_type_k_draft ctvd cache_type_v_draft lookup_cache_static lcs lookup_cache_dynamic lcd "
            "speculative_algorithm speculative_draft_model_path speculative_draft_model "
            "speculative_draft_model_revision speculative_num_steps speculative_num_draft_tokens "
            "speculative_eagle_topk speculative_token_map threads_draft td device_draft devd spec_draft_device "
            "gpu_layers_draft ngld spec_draft_ngl n_gpu_layers_draft spec_ngram_mod_n_min "
            "spec_ngram_simple_size_n speculative_draft_tensor_parallel_size speculative_max_model_len"
        ),
        "weights and KV stay on the device; see --max-model-len, --max-num-seqs and --kv-cache-memory-bytes": (
            "cpu_offload_gb enable_memory_saver enable_weights_cpu_backup"
        ),
        "see --max-model-len, or --kv-cache-memory-bytes for the size of the KV cache": (
            "max_total_tokens max_batch_total_tokens"
        ),
        "see --kv-cache-memory-bytes": "cpu_kvcache_space",
        "see --kv-offloading-size and --kv-offloading-dir": (
            "kv_offloading_backend hicache_size hicache_ratio enable_hierarchical_cache hicache_storage_backend "
            "hicache_write_policy hicache_io_backend hicache_mem_layout hicache_storage_prefetch_policy "
            "cache_disk cache_ram cram enable_lmcache"
        ),
        "scales of --kv-cache-dtype fp8 are found while loading": "calculate_kv_scales",
        "preempted requests are recomputed, never swapped": "swap_space preemption_mode",
        "stop the server and start it again: it is ready in seconds": "enable_sleep_mode",
        "code from a repository is never run; only Quire's and transformers' own architectures are served": (
            "trust_remote_code code_revision tool_parser_plugin reasoning_parser_plugin logits_processors "
            "logits_processor_pattern enable_custom_logit_processor"
        ),
        "see --runner and --convert": "task",
        "our own layers run it; --executor hf runs transformers'": "model_impl disable_custom_kernels",
        "config.json is the one format": "config_format",
        "set HF_TOKEN in the environment": "hf_token hft",
        "--revision is the tokenizer's, too": "tokenizer_revision",
        "edit config.json in a local copy of the model": "rope_scaling rope_theta",
        "see --load-format": (
            "model_loader_extra_config safetensors_load_strategy pt_load_map_location ignore_patterns use_tqdm_on_load"
        ),
        "weights stream to the device by themselves": "max_parallel_loading_workers delete_ckpt_after_loading",
        "it is called --pooler-config": "override_pooler_config",
        "prompts are texts or token ids": "enable_prompt_embeds",
        "tokenizer.json is the one format; see --tokenizer": "tokenizer_mode",
        "see --lookahead, the number of steps launched ahead": (
            "async_scheduling num_scheduler_steps disable_overlap_schedule num_continuous_decode_steps "
            "multi_step_stream_outputs"
        ),
        "every step's text is sent as it comes": "stream_interval incremental_streaming_output",
        "see --latency-target-ms, which shares steps between prompts and answers": "max_num_partial_prefills",
        "see --long-prefill-token-threshold": "max_long_partial_prefills",
        "see --latency-target-ms": (
            "scheduler_delay_factor enable_mixed_chunk enable_dynamic_chunking prefill_max_requests "
            "enable_prefill_delayer"
        ),
        "say --scheduling-policy priority": (
            "enable_priority_scheduling abort_on_priority_when_disabled schedule_low_priority_values_first "
            "priority_scheduling_preemption_threshold"
        ),
        "see --pressure-policy": "schedule_conservativeness",
        "it follows from --speculative-config": "num_lookahead_slots",
        "windows are the model's own": "disable_sliding_window",
        "it says nothing about this engine: leave it out": (
            "disable_cascade_attn use_v2_block_manager disable_async_output_proc disable_outlines_disk_cache "
            "enable_p2p_check enable_symm_mem enable_nccl_nvls enable_mscclpp scheduler_recv_interval "
            "triton_attention_reduce_in_fp32 flashinfer_mla_disable_ragged gc_warning_threshold_secs reuse_port "
            "io_processor_plugin external_parameters disable_nccl_for_dp_synchronization "
            "enable_flash_late_interaction cp_kv_cache_interleave_size dcp_kv_cache_interleave_size "
            "pp_max_micro_batch_size pp_async_batch_depth enable_nan_detection enable_fp32_lm_head "
            "enable_mamba_cache_stochastic_rounding weight_transfer_config"
        ),
        "see --executor": "worker_cls worker_extension_cls",
        "see --disaggregation-mode and --disaggregation-address": (
            "kv_transfer_config disaggregation_bootstrap_port disaggregation_transfer_backend "
            "disaggregation_ib_device disaggregation_decode_dp ec_transfer_config"
        ),
        "see /ui and /v1/requests": "kv_events_config",
        "every option has a name of its own": "additional_config",
        "there is no compile step": (
            "max_seq_len_to_capture optimization_level O compilation_config cc cudagraph_capture_sizes "
            "max_cudagraph_capture_size cuda_graph_max_bs cuda_graph_bs cuda_graphs disable_cuda_graph_padding "
            "enable_cudagraph_gc enable_torch_compile torch_compile_max_bs enable_flashinfer_autotune"
        ),
        "see --max-num-queued-reqs, which bounds the queue": "max_num_queued_tokens",
        "see --scheduling-policy and --batching": "scheduler_cls",
        "prefixes are compared, not hashed": "prefix_caching_hash_algo",
        "it follows from --device": (
            "attention_backend attention_config override_attention_dtype mm_encoder_attn_backend "
            "prefill_attention_backend decode_attention_backend mm_attention_backend fp8_gemm_backend "
            "fp4_gemm_backend"
        ),
        "it is called --deterministic": "enable_deterministic_inference batch_invariant",
        "see --max-num-seqs and --max-num-batched-tokens": "performance_mode",
        'say it in one JSON object: --speculative-config \'{"method": "ngram"}\'': (
            "spec_method spec_model spec_tokens speculative_model num_speculative_tokens"
        ),
        "the grammar back end is not a choice; ask for structure in the request": (
            "structured_outputs_config guided_decoding_backend guided_decoding_disable_fallback grammar_backend "
            "guided_decoding_disable_any_whitespace guided_decoding_disable_additional_properties "
            "constrained_json_whitespace_pattern constrained_json_disable_any_whitespace disable_grammar_support"
        ),
        "see --reasoning-parser": "enable_reasoning reasoning_format reasoning_config skip_chat_parsing think",
        "send reasoning_effort or thinking in the request, or set --default-chat-template-kwargs": (
            "reasoning rea reasoning_effort reasoning_preserve"
        ),
        "send thinking_token_budget in the request": "reasoning_budget reasoning_budget_message think_budget",
        "send continue_final_message in the request": "prefill_assistant",
        "send n, stop and logprobs as the request needs them; --max-n bounds the first": (
            "max_best_of max_stop_sequences max_top_n_tokens enable_prefill_logprobs max_client_batch_size"
        ),
        "the role is assistant": "response_role",
        "send return_token_ids in the request": "return_tokens_as_token_ids",
        "a template gets tools only where they may be called": "exclude_tools_when_tool_choice_none",
        "models choose tools by themselves wherever a request brings some": "enable_auto_tool_choice",
        "both forms of message content are accepted": "chat_template_content_format",
        "adapters are not applied at run time; merge the adapter into the weights": (
            "enable_lora lora_modules max_loras max_lora_rank max_cpu_loras lora lora_scaled lora_paths "
            "lora_adapters default_mm_loras fully_sharded_loras lora_dtype enable_prompt_adapter "
            "max_prompt_adapters prompt_adapters lora_extra_vocab_size long_lora_scaling_factors enable_lora_bias "
            "qlora_adapter_name_or_path lora_target_modules max_loras_per_batch max_loaded_loras "
            "lora_eviction_policy lora_backend lora_init_without_apply control_vector control_vector_scaled "
            "control_vector_layer_range"
        ),
        "put a proxy that speaks TLS in front, with --root-path": "ssl_ca_certs ssl_cert_reqs ssl_ciphers",
        "start the server again to read new certificates": "enable_ssl_refresh",
        "pages of --allowed-origins may send all methods and headers, but no cookies": (
            "allowed_methods allowed_headers allow_credentials cors_methods cors_headers cors_credentials"
        ),
        "put a proxy in front": "middleware",
        "HTTP only": "grpc grpc_mode",
        "HTTP only; see --port": "grpc_port",
        "/docs and /openapi.json show nothing of requests, and fetch nothing from elsewhere": (
            "disable_fastapi_docs enable_offline_docs"
        ),
        "it is always on": (
            "enable_request_id_headers enable_prompt_tokens_details metrics slots props webui ui enable_metrics "
            "enable_cache_report collect_tokens_histogram"
        ),
        "a stream that is silent for 15 seconds sends a comment": "sse_keep_alive_interval sse_ping_interval",
        "see --read-timeout and --write-timeout": "timeout to",
        "send a header Authorization: Bearer KEY; keys in a file: QUIRE_API_KEY=$(paste -sd, FILE)": "api_key_file",
        "see --allowed-local-media-path": "media_path",
        "watermarks are not made": "watermark_gamma watermark_delta",
        "put a tunnel in front, with --root-path": "ngrok ngrok_authtoken ngrok_edge",
        "answers name the version": "fingerprint_mode fingerprint_value",
        "see --batch-dir": "file_storage_path",
        "prompts are completed by the model's own tokens for it": "completion_template",
        "name the template with --chat-template": "hf_chat_template_name",
        "the model's hidden states: see /pooling": "enable_return_hidden_states",
        "checksums are the hub's; `quire pull` compares them": "model_checksum",
        "acceptance is exact: answers are those without drafts": (
            "speculative_accept_threshold_single speculative_accept_threshold_acc spec_decoding_acceptance_method"
        ),
        "drafts are turned off by themselves where they do not pay": "speculative_disable_by_batch_size",
        "logprobs are those of the model with drafts, too": "disable_logprobs_during_spec_decoding",
        "it is preferred of clients: set --override-generation-config": "preferred_sampling_params",
        "they are not logged unless --enable-log-requests says so": "disable_log_requests",
        "see --uvicorn-log-level": (
            "aggregate_engine_logging log_disable log_verbosity lv v verbose verbosity log_verbose log_file "
            "log_level_http log_colors log_prefix log_timestamps"
        ),
        "see --log-format and --uvicorn-log-level": "log_config_file",
        "texts are never logged; see --enable-log-requests": (
            "enable_log_outputs enable_log_deltas max_log_len log_requests_level log_requests_target log_prompts_dir"
        ),
        "there is no access log": "disable_uvicorn_access_log disable_access_log_for_endpoints",
        "see --recording-dir": "crash_dump_folder export_metrics_to_file",
        "send return_timings in the request": "enable_per_request_metrics enable_request_time_stats_logging",
        "see /metrics": (
            "collect_detailed_traces enable_mfu_metrics enable_metrics_for_all_schedulers cudagraph_metrics "
            "enable_logging_iteration_details kv_cache_metrics_sample decode_log_interval prometheus_port"
        ),
        "buckets and labels are fixed: see docs/reference/metrics.md": (
            "bucket_time_to_first_token prompt_tokens_buckets tokenizer_metrics_custom_labels_header"
        ),
        "it follows from --otlp-traces-endpoint": "enable_trace otlp_service_name",
        "see /metrics and /stats": "kv_cache_metrics",
        "metrics keep their names": "show_hidden_metrics_for_version",
        "see /stats": "enable_server_load_tracking",
        "requests may ask for as many as the API allows": "max_logprobs",
        "they are of the model's raw distribution": "logprobs_mode",
        "special tokens are shown where a request says skip_special_tokens false": "special sp",
        "answers do not say which experts ran": "enable_return_routed_experts",
    }
)
"""Options of other servers that Quire does not have, and what there is instead."""

ELSEWHERE: Mapping[str, str] = _by_name(
    {
        "--model": "m model_path model_id model_tag hf_repo hf hfr",
        "--max-model-len": "c ctx_size context_length max_input_tokens max_input_length",
        "--max-num-seqs": "np n_parallel parallel max_running_requests max_batch_size",
        "--max-num-batched-tokens": (
            "b batch batch_size ub ubatch ubatch_size max_prefill_tokens max_batch_prefill_tokens chunked_prefill_size"
        ),
        "--gpu-memory-utilization": "mem_fraction_static cuda_memory_fraction",
        "--max-num-queued-reqs": (
            "max_queued_requests max_waiting_requests max_queue_size queue_size max_concurrent_requests"
        ),
        "--scheduling-policy": "schedule_policy",
        "--no-enable-prefix-caching": "disable_radix_cache",
        "--enforce-eager": "disable_cuda_graph",
        "--block-size": "page_size",
        "--threads": "t",
        "--served-model-name": "alias a",
        "--chat-template": "chat_template_file",
        "--quantization": "quantize",
        "--step-timeout": "watchdog_timeout soft_watchdog_timeout",
        "--kv-cache-dtype": "cache_type_k ctk cache_type_v ctv",
        "--device": "n_gpu_layers gpu_layers ngl",
        "--tensor-parallel-size": "tp tp_size num_shard",
        "--pipeline-parallel-size": "pp pp_size",
        "--seed": "s random_seed",
        "--host": "hostname",
        "--port": "p",
        "--tokenizer": "tokenizer_path tokenizer_config_path",
        "--root-path": "fastapi_root_path api_prefix",
        "--admin-key": "admin_api_key",
        "--allowed-origins": "cors_origins cors_allow_origin",
        "--ssl-keyfile": "ssl_key_file",
        "--ssl-certfile": "ssl_cert_file",
        "--max-body-bytes": "payload_limit",
        "--shutdown-timeout": "graceful_termination_timeout",
        "--hf-overrides": "json_model_override_args",
        "--eviction-policy": "radix_eviction_policy",
        "--speculative-config": "speculate",
        "--default-chat-template-kwargs": "chat_template_kwargs",
        "--generation-config vllm": "sampling_defaults",
        "--log-format json": "log_jsonl json_output",
        "--uvicorn-log-level": "log_level",
        "--enable-log-requests": "log_requests",
        "--log-format": "log_requests_format",
        "--otlp-traces-endpoint": "otlp_endpoint",
    }
)
"""Options of other servers, by name, and Quire's."""

VARIABLES: Mapping[str, str] = MappingProxyType(
    {
        "VLLM_API_KEY": "here it is QUIRE_API_KEY",
        "VLLM_BATCH_INVARIANT": "here it is QUIRE_DETERMINISTIC",
        "VLLM_LOGGING_LEVEL": "here it is QUIRE_UVICORN_LOG_LEVEL",
        "VLLM_MAX_N_SEQUENCES": "here it is QUIRE_MAX_N",
        "VLLM_CPU_KVCACHE_SPACE": "here it is QUIRE_KV_CACHE_MEMORY_BYTES",
        "VLLM_CPU_OMP_THREADS_BIND": "see QUIRE_THREADS",
        "LLAMA_API_KEY": "here it is QUIRE_API_KEY",
        "OLLAMA_CONTEXT_LENGTH": "here it is QUIRE_MAX_MODEL_LEN",
        "OLLAMA_NUM_PARALLEL": "here it is QUIRE_MAX_NUM_SEQS",
        "OLLAMA_MAX_QUEUE": "here it is QUIRE_MAX_NUM_QUEUED_REQS",
        "OLLAMA_ORIGINS": "here it is QUIRE_ALLOWED_ORIGINS",
        "OLLAMA_KV_CACHE_TYPE": "here it is QUIRE_KV_CACHE_DTYPE",
        "OLLAMA_SCHED_SPREAD": "see QUIRE_TENSOR_PARALLEL_SIZE",
        "OLLAMA_MAX_LOADED_MODELS": "a server has one model",
        "OLLAMA_KEEP_ALIVE": "the model stays loaded as long as the server runs",
        "OLLAMA_FLASH_ATTENTION": "attention is chosen by itself",
    }
)
"""Environment variables of other servers, and what there is instead."""
