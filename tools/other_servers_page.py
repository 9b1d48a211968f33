"""Writes docs/reference/other-servers.md, names of SGLang, llama.cpp, TGI and Ollama beside Quire's: `make docs`.

Which names they have is written here; what becomes of each is asked of the code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from quire.checks import ANY
from quire.config import OPTIONS
from quire.config.other_servers import ELSEWHERE, UNSUPPORTED, VARIABLES
from quire.config.unknown import unread
from quire.config.vllm import taken_by_the_command_line
from quire.server import error_responses, openapi, schemas
from quire.server.endpoints import GENERATE_PATHS
from quire.server.fields import NO_OPS, REFUSED_FIELDS, SYNONYMS
from quire.server.ollama import OPTION_HINTS, REFUSED_OPTIONS, Options
from quire.server.ollama_models import REFUSED_PATHS
from quire.types import NUMERIC_PARAMETERS

OPTIONS_OF: Mapping[str, str] = {
    "SGLang": """
    --model-path --model --tokenizer-path --tokenizer-mode --tokenizer-worker-num --skip-tokenizer-init
    --load-format --model-loader-extra-config --trust-remote-code --context-length --is-embedding
    --enable-multimodal --revision --model-impl --host --port --fastapi-root-path --grpc-mode --skip-server-warmup
    --warmups --nccl-port --dtype --quantization --quantization-param-path --kv-cache-dtype --enable-fp32-lm-head
    --modelopt-quant --mem-fraction-static --max-running-requests --max-queued-requests --max-total-tokens
    --chunked-prefill-size --prefill-max-requests --enable-dynamic-chunking --max-prefill-tokens --schedule-policy
    --enable-priority-scheduling --abort-on-priority-when-disabled --schedule-low-priority-values-first
    --priority-scheduling-preemption-threshold --schedule-conservativeness --page-size --swa-full-tokens-ratio
    --disable-hybrid-swa-memory --radix-eviction-policy --enable-prefill-delayer --device --tensor-parallel-size
    --tp-size --tp --pipeline-parallel-size --pp-size --attention-context-parallel-size --pp-max-micro-batch-size
    --pp-async-batch-depth --stream-interval --incremental-streaming-output --random-seed
    --constrained-json-whitespace-pattern --constrained-json-disable-any-whitespace --watchdog-timeout
    --soft-watchdog-timeout --dist-timeout --download-dir --model-checksum --base-gpu-id --gpu-id-step
    --sleep-on-idle --log-level --log-level-http --log-requests --log-requests-level --log-requests-format
    --log-requests-target --crash-dump-folder --show-time-cost --enable-metrics --enable-mfu-metrics
    --enable-metrics-for-all-schedulers --tokenizer-metrics-custom-labels-header --bucket-time-to-first-token
    --collect-tokens-histogram --prompt-tokens-buckets --gc-warning-threshold-secs --decode-log-interval
    --enable-request-time-stats-logging --kv-events-config --enable-trace --otlp-traces-endpoint
    --export-metrics-to-file --api-key --admin-api-key --served-model-name --weight-version --chat-template
    --hf-chat-template-name --completion-template --file-storage-path --enable-cache-report --reasoning-parser
    --tool-call-parser --tool-server --sampling-defaults --data-parallel-size --dp-size --dp --load-balance-method
    --dist-init-addr --nccl-init-addr --nnodes --node-rank --json-model-override-args --preferred-sampling-params
    --enable-lora --max-lora-rank --lora-target-modules --lora-paths --max-loras-per-batch --max-loaded-loras
    --lora-eviction-policy --lora-backend --attention-backend --prefill-attention-backend --decode-attention-backend
    --sampling-backend --grammar-backend --mm-attention-backend --fp8-gemm-backend --fp4-gemm-backend
    --disable-flashinfer-autotune --speculative-algorithm --speculative-draft-model-path --speculative-draft-model
    --speculative-draft-model-revision --speculative-num-steps --speculative-eagle-topk
    --speculative-num-draft-tokens --speculative-accept-threshold-single --speculative-accept-threshold-acc
    --speculative-token-map --expert-parallel-size --ep-size --ep --moe-a2a-backend --moe-runner-backend
    --deepep-mode --ep-num-redundant-experts --enable-eplb --moe-dense-tp-size --max-mamba-cache-size
    --mamba-ssm-dtype --mamba-full-memory-ratio --enable-hierarchical-cache --hicache-ratio --hicache-size
    --hicache-write-policy --hicache-io-backend --hicache-mem-layout --hicache-storage-backend
    --hicache-storage-prefetch-policy --enable-lmcache --cpu-offload-gb --disable-radix-cache --cuda-graph-max-bs
    --cuda-graph-bs --disable-cuda-graph --disable-cuda-graph-padding --enable-profile-cuda-graph
    --enable-cudagraph-gc --enable-nccl-nvls --enable-symm-mem --enable-tokenizer-batch-encode
    --disable-outlines-disk-cache --disable-custom-all-reduce --enable-mscclpp --disable-overlap-schedule
    --enable-mixed-chunk --enable-dp-attention --enable-dp-lm-head --enable-two-batch-overlap --enable-torch-compile
    --torch-compile-max-bs --torchao-config --enable-nan-detection --enable-p2p-check
    --triton-attention-reduce-in-fp32 --num-continuous-decode-steps --delete-ckpt-after-loading
    --enable-memory-saver --enable-weights-cpu-backup --allow-auto-truncate --enable-custom-logit-processor
    --flashinfer-mla-disable-ragged --disable-shared-experts-fusion --disable-chunked-prefix-cache
    --disable-fast-image-processor --keep-mm-feature-on-device --enable-return-hidden-states
    --scheduler-recv-interval --enable-deterministic-inference --disaggregation-mode --disaggregation-bootstrap-port
    --disaggregation-transfer-backend --disaggregation-ib-device --mm-max-concurrent-calls --mm-process-config""",
    "llama.cpp": """
    --cache-list --completion-bash -t --threads -tb --threads-batch --cpu-mask --cpu-range --cpu-strict --prio
    --poll --cpu-mask-batch --cpu-range-batch --cpu-strict-batch --prio-batch --poll-batch -c --ctx-size -n
    --predict --n-predict -b --batch-size -ub --ubatch-size --keep --swa-full -fa --flash-attn --perf -e --escape
    --rope-scaling --rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx --yarn-ext-factor
    --yarn-attn-factor --yarn-beta-slow --yarn-beta-fast --kv-offload --repack -ctk --cache-type-k -ctv
    --cache-type-v -dt --defrag-thold --rpc --load-mode --lazy-mode --numa -dev --device --list-devices -ot
    --override-tensor -cmoe --cpu-moe -ncmoe --n-cpu-moe --moe-cache-mib --n-cpu-ffn -ngl --gpu-layers
    --n-gpu-layers -sm --split-mode -ts --tensor-split -mg --main-gpu -fit --fit --fit-target --fit-ctx
    --check-tensors --override-kv --op-offload --lora --lora-scaled --control-vector --control-vector-scaled
    --control-vector-layer-range -m --model -mu --model-url --docker-repo -hf --hf-repo -hff --hf-file -hft
    --hf-token --log-disable --log-file --log-jsonl --log-colors -v --verbose --log-verbose --offline -lv
    --verbosity --log-verbosity --log-prefix --log-timestamps --spec-draft-type-k --cache-type-k-draft
    --spec-draft-type-v --cache-type-v-draft --samplers -s --seed --sampler-seq --sampling-seq --ignore-eos --temp
    --temperature --top-k --top-p --min-p --top-nsigma --top-n-sigma --xtc-probability --xtc-threshold --typical
    --typical-p --repeat-last-n --repeat-penalty --presence-penalty --frequency-penalty --dry-multiplier --dry-base
    --dry-allowed-length --dry-penalty-last-n --dry-sequence-breaker --adaptive-target --adaptive-decay
    --dynatemp-range --dynatemp-exp --mirostat --mirostat-lr --mirostat-ent -l --logit-bias --grammar --grammar-file
    -j --json-schema --json-schema-file --backend-sampling --lookup-cache-static --lookup-cache-dynamic
    --kv-unified-per-slot --ctx-checkpoints --swa-checkpoints --checkpoint-min-step -cram --cache-ram -kvu
    --kv-unified --cache-idle-slots --context-shift -r --reverse-prompt -sp --special --warmup --spm-infill
    --pooling -np --parallel -cb --cont-batching -mm --mmproj --mmproj-url --mmproj-auto --mmproj-offload
    --mmproj-device --image-min-tokens --image-max-tokens --mtmd-batch-max-tokens --video-fps
    --video-timestamp-interval --video-ffmpeg-dir -a --alias --tags --embd-normalize --host --port --reuse-port
    --path --cors-origins --cors-methods --cors-headers --cors-credentials --api-prefix --ui-config --webui-config
    --ui-config-file --webui-config-file --ui-mcp-proxy --webui-mcp-proxy --tools --tools-runtime
    --mcp-servers-config --mcp-servers-json --agent --ui --webui --embedding --embeddings --rerank --reranking
    --api-key --api-key-file --ssl-key-file --ssl-cert-file --chat-template-kwargs -to --timeout --sse-ping-interval
    --threads-http --cache-prompt --cache-reuse --metrics --props --slots --slot-save-path --media-path --models-dir
    --models-preset --models-max --models-autoload --jinja --reasoning-format --reasoning --reasoning-effort
    --reasoning-budget --reasoning-budget-message --reasoning-preserve --chat-template --chat-template-file
    --skip-chat-parsing --prefill-assistant --slot-prompt-similarity --lora-init-without-apply --sleep-idle-seconds
    --log-prompts-dir --spec-draft-hf --hf-repo-draft -td --threads-draft --spec-draft-n-max --spec-draft-n-min
    --spec-draft-p-split --draft-p-split --spec-draft-p-min --draft-p-min --spec-draft-sampling --spec-draft-device
    --device-draft --spec-draft-ngl --gpu-layers-draft --n-gpu-layers-draft --spec-draft-model -md --model-draft
    --spec-type --draft --draft-n --draft-max --draft-min --draft-n-min --spec-ngram-mod-n-min
    --spec-ngram-simple-size-n --spec-default --mlock --mmap""",
    "TGI": """
    --model-id --revision --validation-workers --sharded --num-shard --quantize --speculate --dtype --kv-cache-dtype
    --trust-remote-code --max-concurrent-requests --max-best-of --max-stop-sequences --max-top-n-tokens
    --max-input-tokens --max-input-length --max-total-tokens --waiting-served-ratio --max-batch-prefill-tokens
    --max-batch-total-tokens --max-waiting-tokens --max-batch-size --cuda-graphs --hostname -p --port
    --shard-uds-path --master-addr --master-port --huggingface-hub-cache --weights-cache-override
    --disable-custom-kernels --cuda-memory-fraction --rope-scaling --rope-factor --json-output --otlp-endpoint
    --otlp-service-name --cors-allow-origin --api-key --watermark-gamma --watermark-delta --ngrok --ngrok-authtoken
    --ngrok-edge --tokenizer-config-path --disable-grammar-support --env --max-client-batch-size --lora-adapters
    --usage-stats --payload-limit --enable-prefill-logprobs --graceful-termination-timeout --prometheus-port""",
}
"""Options of the servers, as their documentation of November 2026 lists them. Negations are left out."""

FIELDS_OF: Mapping[str, tuple[str, str]] = {
    "SGLang": (
        "Fields of `/generate`, those of its `sampling_params` included, beside those of `/v1/completions`",
        """text input_ids input_embeds image_data sampling_params max_new_tokens min_new_tokens stop stop_token_ids
        stop_regex temperature top_p top_k min_p frequency_penalty presence_penalty repetition_penalty n json_schema
        regex ebnf structural_tag ignore_eos skip_special_tokens spaces_between_special_tokens no_stop_trim logit_bias
        sampling_seed stream_interval custom_params custom_logit_processor rid return_logprob logprob_start_len
        top_logprobs_num token_ids_logprob return_text_in_logprobs return_hidden_states lora_path stream priority""",
    ),
    "llama.cpp": (
        "Fields of `/completion` and `/infill`, beside those of `/v1/completions`",
        """prompt n_predict temperature top_k top_p min_p stop stream seed ignore_eos logit_bias repeat_penalty
        repeat_last_n presence_penalty frequency_penalty grammar json_schema n_cmpl n_probs min_keep samplers
        typical_p top_n_sigma dynatemp_range dynatemp_exponent dry_multiplier dry_base dry_allowed_length
        dry_penalty_last_n dry_sequence_breakers xtc_probability xtc_threshold mirostat mirostat_tau mirostat_eta
        n_indent n_keep n_discard n_cache_reuse cache_prompt id_slot t_max_predict_ms t_max_prompt_ms return_tokens
        return_progress post_sampling_probs timings_per_token response_fields lora input_prefix input_suffix
        input_extra""",
    ),
    "TGI": (
        "Fields of `/generate` and of its `parameters`, beside those of `/v1/completions`",
        """inputs parameters max_new_tokens temperature top_k top_p typical_p seed stop repetition_penalty
        frequency_penalty best_of do_sample return_full_text truncate watermark details decoder_input_details
        top_n_tokens grammar adapter_id stream""",
    ),
    "Ollama": (
        "`options` of `/api/chat` and `/api/generate`",
        """num_ctx num_predict num_keep num_batch num_gpu main_gpu num_thread numa use_mmap use_mlock low_vram f16_kv
        vocab_only logits_all embedding_only seed stop temperature top_k top_p min_p typical_p tfs_z repeat_last_n
        repeat_penalty presence_penalty frequency_penalty mirostat mirostat_tau mirostat_eta penalize_newline""",
    ),
}
"""Fields of requests that are the servers' own."""

PATHS_OF: Mapping[str, str] = {
    "vLLM": """/health /ping /version /load /metrics /tokenize /detokenize /tokenizer_info /v1/models /v1/completions
    /v1/chat/completions /v1/responses /v1/messages /v1/messages/count_tokens /v1/embeddings /pooling /classify /score
    /v1/score /rerank /v1/rerank /v2/rerank /reset_prefix_cache /v1/audio/transcriptions /v1/audio/speech /v1/realtime
    /v1/load_lora_adapter /v1/unload_lora_adapter /sleep /wake_up /is_sleeping /pause /resume /server_info
    /start_profile /stop_profile /collective_rpc /invocations /inference/v1/generate /v1/chat/completions/render
    /v1/completions/render /cohere/v2/chat /docs /openapi.json""",
    "SGLang": """/generate /v1/completions /v1/chat/completions /v1/embeddings /v1/score /v1/rerank /classify /encode
    /tokenize /detokenize /v1/models /health /health_generate /model_info /get_model_info /server_info
    /get_server_info /get_load /flush_cache /abort_request /start_profile /stop_profile /separate_reasoning
    /parse_function_call /open_session /close_session /release_memory_occupation /resume_memory_occupation
    /update_weights_from_disk /update_weights_from_tensor /update_weights_from_distributed /metrics /v1/responses
    /v1/messages""",
    "llama.cpp": """/completion /completions /v1/completions /chat/completions /v1/chat/completions /v1/responses
    /v1/messages /v1/messages/count_tokens /infill /tokenize /detokenize /apply-template /embedding /embeddings
    /v1/embeddings /rerank /reranking /v1/rerank /props /slots /metrics /health /models /v1/models /lora-adapters""",
    "TGI": """/generate /generate_stream /v1/chat/completions /v1/completions /v1/models /chat_tokenize /tokenize /info
    /health /metrics""",
    "Ollama": """/api/generate /api/chat /api/embed /api/embeddings /api/tags /api/ps /api/show /api/version /api/pull
    /api/push /api/create /api/copy /api/delete""",
}

METRICS_OF: Mapping[str, Mapping[str, str]] = {
    "SGLang": {
        "sglang:num_running_reqs": "vllm:num_requests_running",
        "sglang:num_queue_reqs": "vllm:num_requests_waiting",
        "sglang:token_usage": "vllm:kv_cache_usage_perc",
        "sglang:cached_tokens_total": "vllm:prompt_tokens_cached_total",
        "sglang:prompt_tokens_total": "vllm:prompt_tokens_total",
        "sglang:generation_tokens_total": "vllm:generation_tokens_total",
        "sglang:num_requests_total": "vllm:request_success_total",
        "sglang:num_retracted_reqs": "vllm:num_preemptions_total",
        "sglang:time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
        "sglang:inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
        "sglang:e2e_request_latency_seconds": "vllm:e2e_request_latency_seconds",
        "sglang:queue_time_seconds": "vllm:request_queue_time_seconds",
    },
    "llama.cpp": {
        "llamacpp:prompt_tokens_total": "vllm:prompt_tokens_total",
        "llamacpp:tokens_predicted_total": "vllm:generation_tokens_total",
        "llamacpp:requests_processing": "vllm:num_requests_running",
        "llamacpp:requests_deferred": "vllm:num_requests_waiting",
        "llamacpp:n_decode_total": "quire:steps_total",
    },
    "TGI": {
        "tgi_queue_size": "vllm:num_requests_waiting",
        "tgi_batch_current_size": "vllm:num_requests_running",
        "tgi_request_duration": "vllm:e2e_request_latency_seconds",
        "tgi_request_queue_duration": "vllm:request_queue_time_seconds",
        "tgi_request_inference_duration": "vllm:request_inference_time_seconds",
        "tgi_request_mean_time_per_token_duration": "vllm:request_time_per_output_token_seconds",
        "tgi_request_input_length": "vllm:request_prompt_tokens",
        "tgi_request_generated_tokens": "vllm:request_generation_tokens",
        "tgi_request_success": "vllm:request_success_total",
    },
}
"""Metrics, and those of the same meaning here."""

VARIABLES_OF = """LLAMA_ARG_MODEL LLAMA_ARG_HF_REPO LLAMA_ARG_CTX_SIZE LLAMA_ARG_N_PARALLEL LLAMA_ARG_N_GPU_LAYERS
    LLAMA_ARG_THREADS LLAMA_ARG_BATCH LLAMA_ARG_HOST LLAMA_ARG_PORT LLAMA_ARG_ALIAS LLAMA_ARG_CHAT_TEMPLATE
    LLAMA_ARG_FLASH_ATTN LLAMA_ARG_ENDPOINT_METRICS LLAMA_ARG_CACHE_TYPE_K LLAMA_ARG_THINK_BUDGET"""
"""Beside those that have a line of their own in the code."""

HEAD = """# Names of other servers

Written by `make docs`; do not edit. [vLLM's names](vllm.md) are on a page of their own. Each name of an option, a field
or a path works, or has another name here, or is refused by name with what to do instead. A variable of another server's
that has no effect is named when `quire serve` starts. `quire config` with the options of a command that you have says
what becomes of each.
"""


def markdown() -> str:
    """The whole page."""
    return HEAD + "".join(
        f"\n## {title}\n\n{about}| {kind} | |\n|---|---|\n" + "".join(f"| `{name}` | {said} |\n" for name, said in rows)
        for title, kind, about, rows in _sections()
    )


def _sections() -> Iterator[tuple[str, str, str, list[tuple[str, str]]]]:
    for server, text in OPTIONS_OF.items():
        yield f"{server}: options", "option", "", [(name, option(name)) for name in text.split()]
    for server, (about, text) in FIELDS_OF.items():
        said = ollama_option if server == "Ollama" else field
        yield f"{server}: fields of requests", "field", f"{about}.\n\n", [(name, said(name)) for name in text.split()]
    for server, text in PATHS_OF.items():
        yield f"{server}: paths", "path", "", [(name, path(name)) for name in text.split()]
    for server, same in METRICS_OF.items():
        yield f"{server}: metrics", "metric", "", [(name, f"`{ours}`") for name, ours in same.items()]
    names = [*VARIABLES, *VARIABLES_OF.split()]
    yield "Environment variables", "variable", "", [(name, variable(name)) for name in sorted(names)]


_SAMPLING = frozenset(each.name for each in NUMERIC_PARAMETERS if each.in_requests)


def option(name: str) -> str:
    """What becomes of an option."""
    flags, plain = [known.flag for known in OPTIONS.values()], name.lstrip("-").replace("-", "_")
    if name in flags:
        return "works"
    if plain in _SAMPLING:
        return "a field of requests, and of `--override-generation-config`"
    if plain in ELSEWHERE:
        return f"`{ELSEWHERE[plain]}`"
    values = taken_by_the_command_line(plain)
    if values is None:
        return f"refused: {UNSUPPORTED[plain]}"
    where = "" if values is ANY else " if " + " or ".join(f"`{one!r}`" for one in values)
    return f"taken{where}, changes nothing: {UNSUPPORTED[plain]}"


def field(name: str) -> str:
    """What becomes of a field of a request for a completion."""
    known = schemas.CompletionRequest.__struct_fields__
    if name in known:
        return "works"
    if name in NO_OPS:
        return f"taken, changes nothing: {NO_OPS[name]}"
    if name in REFUSED_FIELDS:
        why, harmless = REFUSED_FIELDS[name].why, REFUSED_FIELDS[name].no_op
        return f"refused{' unless it is off' if harmless else ''}: {why}"
    [names] = [names for names in SYNONYMS if name in names]
    return f"`{next(one for one in names if one in known)}`"


def ollama_option(name: str) -> str:
    """What becomes of an option of Ollama's API."""
    if name in OPTION_HINTS:
        return f"taken, changes nothing: {OPTION_HINTS[name]}"
    if name in REFUSED_OPTIONS:
        return f"refused unless it is off: {REFUSED_OPTIONS[name].why}"
    return "works" if name in Options.__struct_fields__ else "unknown"


def path(name: str) -> str:
    """What becomes of a path."""
    if name in REFUSED_PATHS:
        return f"refused: {REFUSED_PATHS[name][1]}"
    served = {each.path for each in openapi.OPERATIONS} | {*GENERATE_PATHS, "/docs", "/openapi.json", "/metrics"}
    for start, why in error_responses.NOT_SERVED.items():
        if name == start or name.startswith(f"{start}/"):
            return f"refused: {why}"
    if name in served or name in error_responses.OLLAMA_PATHS:
        return "works"
    return f"refused: did you mean `{'/v1' + name}`?" if "/v1" + name in served else "unknown"


def variable(name: str) -> str:
    """What becomes of a variable of the environment."""
    [line] = unread({name: "1"}, OPTIONS)
    _, _, said = line.partition(": ")
    return re.sub(r"(QUIRE_[A-Z_]+)", r"`\1`", said.removeprefix("here it is "))


if __name__ == "__main__":
    print(markdown(), end="")
