"""The options themselves: eleven frozen sections, and what must hold between their fields.

Names are vLLM's where users know them. None means 'auto' (or, where `unset` says so, 'none'): the composition
root resolves it when it knows the device and the checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_type_hints

from quire.config.multimodal import max_images, processor_changes
from quire.config.option import Option, option, options
from quire.config.speculative import parse
from quire.config.unknown import refuse
from quire.errors import InvalidConfig
from quire.parsers.reasoning import THOUGHTS
from quire.parsers.tools.styles import STYLES
from quire.scheduler.policy import POLICIES, Batching, Pressure
from quire.scheduler.routing import MAX_IMBALANCE
from quire.types import UNLIMITED


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessConfig:
    """The admin key, host names, limits of each key, and TLS."""

    admin_key: tuple[str, ...] = option(
        (),
        "A key for all endpoints. If it is set, /stats, /metrics, /v1/requests and the live page, which show other "
        "people's requests, need it. If not, /v1/requests, /v1/recording, the live page's events and "
        "/reset_prefix_cache are only for clients on the server's machine.",
        secret=True,
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "Host names that requests may name, beside localhost and IP addresses: quire.example.com, *.example.com, or * "
        "for any. Unset: no others if the server listens on loopback without --api-key, against web pages that rebind "
        "their name; otherwise any.",
        metavar="NAME",
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        "Origins of web pages that may use the server from a browser (CORS): https://chat.example.com, or * for any.",
        metavar="ORIGIN",
    )
    max_requests_per_minute: int | None = option(
        None,
        "Requests that each key may make in a minute; none: as many as it likes.",
        low=1,
        high=UNLIMITED,
        unset="none",
    )
    max_tokens_per_minute: int | None = option(
        None,
        "Tokens, of prompts and answers together, that each key may use in a minute; none: as many as it likes.",
        low=1,
        high=UNLIMITED,
        unset="none",
    )
    ssl_keyfile: str | None = option(None, "Private key for TLS, a PEM file; none: plain HTTP.")
    ssl_certfile: str | None = option(None, "Certificate for TLS, a PEM file with its chain.")


_HOST_NAME = re.compile(
    r"\*|(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*\.?|\[?[0-9a-f:.]*:[0-9a-f:.]*:[0-9a-f:.]*\]?", re.IGNORECASE
)
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:\d+)?", re.IGNORECASE)


def check_access(config: AccessConfig, backend: str) -> None:
    """Raise InvalidConfig for a bad host or origin, and for options that cannot be used together."""
    for name in config.allowed_hosts:
        if not _HOST_NAME.fullmatch(name):
            raise InvalidConfig(
                f"allowed_hosts: {name!r} is not the name of a host: write quire.example.com or *.example.com, without "
                "a scheme and without a port, names that are not ASCII in Punycode",
                param="allowed_hosts",
            )
    for origin in config.allowed_origins:
        if not _ORIGIN.fullmatch(origin):
            raise InvalidConfig(
                f"allowed_origins: {origin!r} is not an origin: write https://chat.example.com, with a scheme, with "
                "the port unless it is the scheme's own, and with no path; several with commas; or * for any",
                param="allowed_origins",
            )
    if (config.ssl_keyfile is None) != (config.ssl_certfile is None):
        missing = "ssl_keyfile" if config.ssl_keyfile is None else "ssl_certfile"
        raise InvalidConfig(f"TLS needs both ssl_keyfile and ssl_certfile: set {missing} too", param=missing)
    if config.max_tokens_per_minute is not None and backend != "native":
        raise InvalidConfig(
            f"max_tokens_per_minute counts our own engine's tokens, and backend is {backend}: "
            "use max_requests_per_minute",
            param="max_tokens_per_minute",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorConfig:
    """What runs the steps."""

    executor: Literal["auto", "local", "grpc", "onnx", "hf"] = option(
        "auto",
        "What runs the steps: local, our own layers; hf, Hugging Face transformers, slowly, for models we have no "
        "layers for; auto, hf for those and local for all others; onnx, ONNX Runtime on a folder that `quire "
        "export-onnx` wrote; grpc, a `quire executor` elsewhere.",
    )
    device_map: str | None = option(
        None,
        "Where --executor hf puts layers, as transformers' device_map: auto, balanced, balanced_low_0, sequential, or "
        "a JSON object of modules and devices. Unset: all on --device.",
    )
    max_memory: str | None = option(
        None,
        'Most memory for weights on each device, with --device-map: a JSON object such as {"0": "20GiB", "cpu": '
        '"60GiB"}.',
        mapping=True,
    )
    executor_address: str | None = option(
        None, "HOST:PORT of the `quire executor` that runs the steps, for --executor grpc."
    )
    executor_start_timeout: float = option(
        60.0, "Seconds until the executor at --executor-address must answer after the start.", low=0.1, high=86400
    )
    executor_step_timeout: float = option(
        60.0, "Seconds that a step may take there before the executor counts as lost.", low=0.1, high=86400
    )
    executor_tls_ca: str | None = option(
        None, "File with the certificate (PEM) of who signed the executor's. Unset: the connection is in the clear."
    )
    executor_tls_cert: str | None = option(
        None, "File with this engine's own certificate (PEM), if the executor asks for one."
    )
    executor_tls_key: str | None = option(None, "File with the key (PEM) of that certificate.")


def check_executor(config: ExecutorConfig) -> None:
    """Raise InvalidConfig for options that do not apply to the executor, or cannot be used together."""
    if config.executor == "grpc" and config.executor_address is None:
        raise InvalidConfig(
            "executor grpc runs steps in another process: set executor_address to its HOST:PORT",
            param="executor_address",
        )
    for entry in fields(config):
        of_grpc = entry.name.startswith("executor_") and config.executor != "grpc"
        if of_grpc and getattr(config, entry.name) != entry.default:
            raise InvalidConfig(
                f"{entry.name} is for executor grpc, but executor is {config.executor}", param=entry.name
            )
    address = config.executor_address
    # gRPC would ask port 443 of a host without one, and wait.
    if address is not None and not re.fullmatch(r".+:\d{1,5}|unix:.+", address):
        raise InvalidConfig(f"executor_address: {address!r} is not HOST:PORT", param="executor_address")
    if (config.executor_tls_cert is None) != (config.executor_tls_key is None):
        raise InvalidConfig("executor_tls_cert and executor_tls_key go together", param="executor_tls_cert")
    if config.executor_tls_cert is not None and config.executor_tls_ca is None:
        raise InvalidConfig(
            "executor_tls_cert needs executor_tls_ca: without it the connection is not encrypted",
            param="executor_tls_ca",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP side."""

    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 opens the server to the network.")
    port: int = option(8000, "Port to listen on; 0 lets the system choose.", low=0, high=65535)
    uds: str | None = option(
        None,
        "Path of a Unix socket to listen on in place of --host and --port. The server's own user may connect.",
    )
    api_key: tuple[str, ...] = option(
        (), "A key that clients must send; several are allowed (repeat the flag, or use commas).", secret=True
    )
    address_file: str | None = option(
        None, "File that holds the server's address (https://127.0.0.1:8000, say) while it answers, for health checks."
    )
    root_path: str = option("", "Path prefix that a proxy in front removes.")
    max_body_bytes: int = option(4 << 20, "Largest request body accepted (4MiB works).", low=1024, high=1 << 40)
    batch_dir: str | None = option(
        None, "Folder for files and batches, this server's alone; none: there are no batches."
    )
    batch_concurrency: int = option(16, "Lines of a batch answered at once, in the background.", low=1, high=4096)
    max_stored_responses: int = option(
        1000,
        "Most responses of /v1/responses that are stored, so that others can continue them; beyond, those not used for "
        "the longest time are removed. 0: none are stored.",
        low=0,
        high=1 << 20,
    )
    max_stored_bytes: int = option(128 << 20, "Most bytes of stored responses.", low=1 << 16, high=1 << 40)
    state_dir: str | None = option(
        None, "Folder for stored responses, this server's alone; none: they are kept in memory until it ends."
    )
    max_header_bytes: int = option(
        32 << 10, "Largest head of a request accepted, first line and header fields together.", low=1024, high=1 << 30
    )
    closed_schemas: bool = option(
        True,
        "Objects of a JSON schema (of a tool, or of an answer) have no properties but those that it lists, where it "
        "says nothing of additionalProperties.",
    )
    strict_tools: bool = option(
        False,
        "Refuse requests with tools of OpenAI or Anthropic that this server lacks, such as web_search. Otherwise they "
        "are left out, and the header x-quire-omitted-tools says which.",
    )
    prompt_header: str = option(
        "",
        "Regular expression of whole lines that are taken out of a conversation's first message, since they change "
        "with every request and so keep its prefix from being found in the cache: an agent's billing header, the time. "
        "The header x-quire-prompt-header says what was removed.",
    )
    enable_tokenizer_info_endpoint: bool = option(
        False, "Answer /tokenizer_info with the tokenizer's configuration and the chat template, to all clients."
    )
    enable_force_include_usage: bool = option(
        False,
        "Put usage into every chunk of streams of /v1/completions and /v1/chat/completions, as if each request asked "
        "for it with stream_options, for proxies that count tokens.",
    )
    max_n: int = option(128, "Most answers to one prompt: the largest n.", low=1, high=1024)
    max_new_tokens: int | None = option(
        None,
        "Most new tokens of an answer: a request for more gets this many, and the finish reason length; none: as many "
        "as the context has room for.",
        low=1,
        high=UNLIMITED,
        unset="none",
    )
    default_max_new_tokens: int | None = option(
        None,
        "New tokens of an answer whose request does not say. Unset: what the model's generation_config.json says, "
        "otherwise 16 for a completion, as OpenAI's API has it, and as many as the context has room for in a chat.",
        low=1,
        high=UNLIMITED,
        unset="unset",
    )
    max_connections: int = option(
        4096,
        "Most connected clients, as far as the process may open descriptors (ulimit -n, raised to its hard limit at "
        "the start); further ones are refused with 503 and a Retry-After.",
        low=1,
        high=1 << 20,
    )
    timeout_keep_alive: float = option(5.0, "Seconds a connection may wait between two requests.", low=0.1, high=86400)
    read_timeout: float = option(
        20.0, "Seconds a client may take to send a request's head, and each KiB of its body.", low=0.1, high=86400
    )
    write_timeout: float = option(
        60.0, "Seconds a client may take to read each KiB of an answer that waits for it.", low=0.1, high=86400
    )
    shutdown_timeout: float = option(
        30.0, "Seconds that running requests may still take after SIGTERM.", low=0, high=86400
    )
    standby_engine: bool = option(
        True,
        "Keep a second process that has imported what an engine needs, so that requests are answered again within "
        "seconds when the engine's process dies; it takes some 200 MiB of memory.",
    )
    uvicorn_log_level: Literal["critical", "error", "warning", "info", "debug", "trace"] = option(
        "info", "How much the HTTP server logs."
    )
    disable_log_stats: bool = option(False, "Do not log throughput and load every ten seconds while there is work.")
    enable_log_requests: bool = option(False, "Log how each answer ended, with counts and times; never its text.")
    log_format: Literal["text", "json"] = option("text", "How log lines look; json: an object a line, for programs.")
    otlp_traces_endpoint: str | None = option(
        None,
        "Where a trace of each request is sent, OTLP over HTTP (http://127.0.0.1:4318/v1/traces); "
        "needs quire-llm[otel].",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamConfig:
    """Answers from other servers, which Quire stands in front of: see docs/guides/upstream.md."""

    backend: Literal["native", "openai", "vllm"] = option(
        "native",
        "Who answers: native, our own engine; openai, servers that run already (--upstream); vllm, a private "
        "`vllm serve` that is started, watched and started again.",
    )
    upstream: tuple[str, ...] = option(
        (),
        "Address of a running server, http://HOST:PORT; several are allowed (repeat the flag, or use commas).",
        metavar="URL",
    )
    upstream_api_key: str | None = option(
        None, "Key that is sent to the servers. Unset: the client's own, where this server wants none.", secret=True
    )
    upstream_policy: Literal["least_loaded", "round_robin", "prefix_hash", "longest_prefix"] = option(
        "least_loaded",
        "Which server gets a request: the one with the fewest requests; each in turn; by a hash of how the prompt "
        "begins; or the one that was sent the longest beginning of the prompt. The last two only while it is not much "
        "busier.",
    )
    upstream_affinity: bool = option(False, "The same as --upstream-policy prefix_hash.")
    upstream_start_timeout: float = option(
        600.0, "Seconds until a server must answer after the start.", low=0, high=86400
    )
    upstream_most: int = option(
        2048, "Most requests at the servers; further ones are refused with 429.", low=1, high=UNLIMITED
    )
    vllm_command: str = option("vllm", "The command that is vLLM, with leading arguments if it needs some.")
    vllm_args: tuple[str, ...] = option(
        (), "Arguments of `vllm serve`, as they are; on the command line also whatever follows --.", verbatim=True
    )
    vllm_log: str | None = option(
        None, "File that what vLLM says is added to. Unset: a new one among the temporary files."
    )


def check_upstream(config: UpstreamConfig) -> None:
    """Raise InvalidConfig for options that do not apply to the backend."""
    if config.backend == "openai" and not config.upstream:
        raise InvalidConfig("backend openai forwards requests: set upstream to the server's address", param="upstream")
    for entry in fields(config):
        name = entry.name
        of_vllm, of_others = name.startswith("vllm_"), name == "upstream"
        wrong = {"native": name != "backend", "openai": of_vllm, "vllm": of_others}[config.backend]
        if wrong and getattr(config, name) != entry.default:
            wants = "vllm" if of_vllm else "openai" if of_others else "openai or vllm"
            raise InvalidConfig(f"{name} is for backend {wants}, but backend is {config.backend}", param=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicasConfig:
    """Several engines behind one server, on Ray Serve: see docs/guides/replicas.md."""

    replicas: int = option(
        1,
        "Engines behind this server, each of them a replica with a whole model, on Ray Serve; 1: one engine, without "
        "Ray. More need quire-llm[ray].",
        low=1,
        high=1024,
    )
    max_replicas: int | None = option(
        None,
        "Most replicas: more than --replicas run while prompts wait (autoscaling); none: always --replicas.",
        low=1,
        high=1024,
        unset="none",
    )
    replica_policy: Literal["longest_prefix", "least_loaded", "round_robin", "prefix_hash"] = option(
        "longest_prefix",
        "Which replica gets a request: the one that was sent the longest beginning of its prompt; the one with the "
        "fewest requests; each in turn; or by a hash of the prompt's first block. The first and the last only while "
        "that one is not much busier.",
    )
    replica_max_imbalance: int = option(
        MAX_IMBALANCE,
        "Requests that a replica chosen for its prefix cache may have beyond those of the least loaded one.",
        low=0,
        high=UNLIMITED,
    )
    replica_queued_tokens: int = option(
        8192, "Prompt tokens that may wait at each replica; for more, others are started.", low=1, high=UNLIMITED
    )
    replica_up_delay: float = option(
        10.0, "Seconds for which more replicas must be wanted until they are started.", low=0, high=86400
    )
    replica_down_delay: float = option(
        300.0, "Seconds for which fewer replicas must be wanted until some are stopped.", low=0, high=86400
    )
    replica_drain_timeout: float = option(
        600.0, "Seconds that a replica which is to stop may take to end its requests.", low=0, high=86400
    )
    ray_dashboard: bool = option(False, "Start Ray's dashboard with the replicas, at 127.0.0.1:8265.")

    @property
    def most(self) -> int:
        """Replicas that there may be."""
        return self.replicas if self.max_replicas is None else self.max_replicas

    @property
    def several(self) -> bool:
        """Whether there may be more than one, so that Ray Serve runs them."""
        return self.most > 1


def check_replicas(settings: Settings) -> None:
    """Raise InvalidConfig for options that do not go with several replicas, or not with each other."""
    config = settings.replicas
    if config.max_replicas is not None and config.max_replicas < config.replicas:
        raise InvalidConfig(
            f"max_replicas ({config.max_replicas}) is below replicas ({config.replicas}), which is how many run at "
            "least: raise the first or lower the second",
            param="max_replicas",
        )
    if not config.several:
        return
    if settings.upstream.backend != "native":
        raise InvalidConfig(
            f"replicas are of our own engine, but backend is {settings.upstream.backend}: name several upstreams, or "
            "leave one of the two out",
            param="replicas",
        )
    if settings.executor.executor == "grpc":
        raise InvalidConfig(
            "replicas have executors of their own, but executor grpc is one for all: leave one of the two out",
            param="replicas",
        )
    if settings.disaggregation.disaggregation_mode != "none":
        raise InvalidConfig(
            "disaggregation_mode is for one engine, but there are several replicas: start a server for each engine",
            param="disaggregation_mode",
        )
    if settings.execution.pipeline_parallel_size > 1:
        raise InvalidConfig(
            "pipeline_parallel_size divides one engine, and replicas of such engines are not supported: leave one out",
            param="pipeline_parallel_size",
        )
    if settings.execution.recording_dir is not None:
        raise InvalidConfig(
            "recording_dir is for the recording of one engine, but there are several replicas: leave one of the two "
            "out",
            param="recording_dir",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, and how it is read."""

    model: str = option(
        "embedded",
        "The model: 'embedded' (shipped with Quire), a folder, a GGUF file, a Hugging Face repository (with :Q4_K_M, "
        "one of its GGUF files), or a model of Ollama's on this machine.",
        metavar="MODEL",
    )
    served_model_name: tuple[str, ...] | None = option(
        None,
        "A name that clients use for the model; several are allowed (repeat the flag, or use commas): answers and "
        "metrics have the first. Unset: as given by --model.",
        unset="none",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "Type of weights and activations; auto: what suits the device and the checkpoint."
    )
    load_format: Literal["auto", "dummy"] = option(
        "auto", "auto: read the weights; dummy: random weights of the model's shape (for benchmarks)."
    )
    quantization: Literal[
        "auto",
        "fp8",
        "fp8_per_block",
        "int8",
        "int8_w8a8",
        "q8_0",
        "q6_k",
        "q5_k",
        "q4_k",
        "q4_0",
        "awq",
        "gptq",
        "compressed-tensors",
        "fbgemm_fp8",
        "mxfp4",
    ] = option(
        "auto",
        "How weights are stored; auto: as the checkpoint has them. Those from fp8 to q4_0 are made of plain weights "
        "while loading (q8_0 to q4_0 are GGUF's types), the others must be what the checkpoint says.",
    )
    fp8_activations: Literal["auto", "off"] = option(
        "auto",
        "With FP8 weights on a GPU: auto: a step of more than 16 tokens rounds activations to FP8, too, each token by "
        "its own largest number, where the GPU multiplies FP8 and answers need not be deterministic; off: they keep "
        "16 bits.",
    )
    canary: Literal["refuse", "warn", "off"] = option(
        "refuse",
        "What happens when quantized weights or K/V answer a probe differently from unquantized ones; off: no probe.",
    )
    canary_min_agreement: float = option(
        0.6, "Least share of the probe's positions whose likeliest token must stay the same.", low=0, high=1
    )
    canary_max_kl: float = option(
        0.25,
        "Most that next-token distributions may move, in nats (mean Kullback-Leibler divergence).",
        low=0,
        high=1e3,
    )
    max_model_len: int | None = option(
        None,
        "Longest sequence, prompt and answer, in tokens (32k and 32K work); auto: the model's own.",
        low=1,
        high=UNLIMITED,
    )
    runner: Literal["auto", "generate", "pooling"] = option(
        "auto",
        "What the model is served for: generate, text; pooling, vectors, classes and scores, without its language "
        "model's head; auto: by its architecture and by sentence-transformers' modules.json.",
    )
    convert: Literal["auto", "none", "embed", "classify"] = option(
        "auto",
        "What a pooling model gives: embed, vectors, also of a classifier's checkpoint; classify, classes and scores; "
        "auto: classes where it has a classifier.",
    )
    pooler_config: str | None = option(
        None,
        'How vectors are made, in place of what the checkpoint says: a JSON object such as {"pooling_type": "CLS", '
        '"normalize": false}. Unset: as the checkpoint says.',
        mapping=True,
    )
    hf_overrides: str | None = option(
        None,
        "Fields in place of config.json's, as of a reranker that answers with words: a JSON object such as "
        '{"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["no", "yes"]}. Unset: none.',
        mapping=True,
    )
    seed: int | None = option(
        None,
        "Seed of random weights, and of requests that sample and bring none. Unset: 0, but a server draws each "
        "request's seed from the system.",
        low=0,
        high=2**64 - 1,
    )
    tokenizer: str | None = option(None, "Folder or repository of the tokenizer. Unset: the model's own.")
    skip_tokenizer_init: bool = option(
        False,
        "Read no tokenizer, which the checkpoint need not have: prompts and answers are token ids, and what needs text "
        "is refused.",
    )
    chat_template: str | None = option(None, "File with a jinja chat template. Unset: the model's own.")
    default_chat_template_kwargs: str | None = option(
        None,
        'What the chat template gets where requests do not say: a JSON object such as {"enable_thinking": false}. '
        "chat_template_kwargs, reasoning_effort and thinking of a request come before it. Unset: nothing.",
        mapping=True,
    )
    generation_config: Literal["auto", "vllm"] = option(
        "auto",
        "Sampling parameters of requests that do not set them; auto: what the model's generation_config.json says; "
        "vllm: temperature 1, and everything else off.",
    )
    override_generation_config: str | None = option(
        None,
        'Sampling parameters in place of those: a JSON object such as {"temperature": 0.6, "max_new_tokens": 512}. '
        "Requests come before it. Unset: none.",
        mapping=True,
    )
    tool_call_parser: str = option(
        "auto", "How the model writes tool calls; auto: by its chat template.", choices=("auto", *sorted(STYLES))
    )
    reasoning_parser: str = option(
        "auto",
        "How the model marks its reasoning, which is separated from the answer; auto: by its chat template; none: "
        "it stays in the text.",
        choices=("auto", "none", *sorted(THOUGHTS)),
    )
    revision: str | None = option(None, "Branch, tag or commit of the Hugging Face repository. Unset: its main branch.")
    download_dir: str | None = option(None, "Where downloaded models are kept. Unset: Hugging Face's own cache.")

    @property
    def fixed_seed(self) -> int:
        """The seed of everything random but a server's requests: 0 where none is set."""
        return self.seed or 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int | None = option(
        None, "Tokens in one KV block; auto: 16 on a CPU, 64 on a GPU.", low=1, high=1 << 20
    )
    num_gpu_blocks_override: int | None = option(
        None, "Number of KV blocks, on whatever device; auto: from the memory there is.", low=1, high=UNLIMITED
    )
    kv_cache_memory_bytes: int | None = option(
        None,
        "Memory for KV blocks (4GiB works); auto: what is left, and no more than the limits can use.",
        low=1,
        high=1 << 50,
    )
    gpu_memory_utilization: float = option(
        0.92, "Share of the GPU's memory to use in all; no meaning on a CPU.", low=0.01, high=1
    )
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e5m2"] = option(
        "auto",
        "How K/V is stored; auto: as activations are; fp8: in half the memory (float8 e4m3), but for layers whose "
        "numbers it cannot hold; fp8_e5m2: as fp8, with a wider range and a bit less of mantissa.",
    )
    enable_prefix_caching: bool = option(True, "Keep the K/V of finished requests for prompts that begin the same.")
    state_snapshots: int | None = option(
        None,
        "States of recurrent layers that are kept for the prefix cache, each as large as those of one sequence: a "
        "prompt goes on from the last one that it shares; auto: two for each of max_num_seqs, in at most half of the "
        "memory that the sequences' own leave; 0: nothing is reused. No meaning for models without such layers.",
        low=0,
        high=1 << 20,
    )
    snapshot_interval: int = option(
        1024,
        "Tokens from one snapshot of a long text to the next, where it is not known that others begin alike; see "
        "--state-snapshots.",
        low=1,
        high=UNLIMITED,
    )
    kv_offloading_size: float = option(
        0.0,
        "GiB of host memory for KV blocks that are evicted, pinned on a GPU: a prompt's blocks come back where that is "
        "faster than computing them. 0: evicted blocks are gone.",
        low=0,
        high=1 << 20,
    )
    kv_offloading_dir: str | None = option(
        None,
        "Folder for blocks that host memory has no room for, this server's alone; they outlive it. What is there can "
        "be turned back into prompts and answers. Unset: none are written.",
    )
    kv_offloading_dir_size: float = option(16.0, "Most GiB of blocks in that folder.", low=0, high=1 << 20)
    eviction_policy: Literal["lru", "fifo"] = option(
        "lru", "Which cached block goes first when blocks run out: lru, least recently used; fifo, the oldest."
    )
    max_pinned_share: float = option(
        0.25,
        "Share of the KV blocks that requests may pin with cache_control, so that they are evicted last for some "
        "minutes; clients of several keys share it fairly. 0: none.",
        low=0,
        high=1,
    )
    pressure_policy: Pressure = option(
        "foresee",
        "Which requests are admitted while blocks are short: foresee, those that fit beside what running ones will "
        "soon take; preempt, those that fit for one step, and others may be preempted; reserve, those that fit to "
        "their end, without preemption.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Which requests run in the next step, and with how many tokens."""

    max_num_seqs: int | None = option(
        None, "Sequences that run at once; auto: 64 on a CPU, 256 on a GPU.", low=1, high=1 << 20
    )
    max_num_batched_tokens: int | None = option(
        None, "Tokens fed in one step, over all sequences; auto: 512 on a CPU, 8192 on a GPU.", low=1, high=UNLIMITED
    )
    enable_chunked_prefill: bool = option(True, "Feed long prompts over several steps, so that others go on.")
    long_prefill_token_threshold: int = option(
        0, "Most prompt tokens one sequence gets in a step; 0: no limit but the step's own.", low=0, high=UNLIMITED
    )
    latency_target_ms: float = option(
        100.0,
        "Most milliseconds between tokens that others' prompts may cost, by the measured step time: prompts are fed in "
        "smaller chunks; 0: no bound.",
        low=0,
        high=1e6,
    )
    scheduling_policy: str = option(
        "fcfs",
        "Who goes first: fcfs, by arrival; priority, by the request's own priority (lower is sooner). module:Class: a "
        "scheduling policy of your own.",
        choices=tuple(POLICIES),
        registered=True,
    )
    batching: Batching = option(
        "continuous", "continuous: sequences join and leave between steps; static: a batch runs to its end."
    )
    lookahead: int | None = option(
        None, "Steps launched ahead of results; auto: 0 on a CPU, 1 on a GPU.", low=0, high=8
    )
    speculative_config: str | None = option(
        None,
        'Draft tokens ahead and verify them, answers unchanged: a JSON object, such as {"method": "ngram"} or '
        '{"method": "draft_model", "num_speculative_tokens": 4} or {"method": "mtp"}. Unset: no speculation.',
        mapping=True,
    )
    max_num_queued_reqs: int = option(
        2048, "Most waiting requests; further ones are refused with 429 and a Retry-After.", low=1, high=UNLIMITED
    )

    @property
    def reads_priorities(self) -> bool:
        """Whether the scheduling policy reads requests' priorities."""
        return self.scheduling_policy != "fcfs"


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiModalConfig:
    """Images: how many, how large, where from, and the encoder's share of steps and memory."""

    limit_mm_per_prompt: str | None = option(
        None,
        'Most images of a prompt, a JSON object: {"image": 4}. 0 loads no encoder, so that the model reads text alone. '
        "Unset: 16.",
        mapping=True,
    )
    mm_processor_kwargs: str | None = option(
        None,
        'Changes to the checkpoint\'s image processor, a JSON object: {"max_pixels": 1003520} bounds what an image is '
        "resized to, and so its tokens; min_pixels is known, too. Unset: as the checkpoint says.",
        mapping=True,
    )
    allowed_media_domains: tuple[str, ...] = option(
        (),
        "Hosts that images of requests may be fetched from: example.com, or *.example.com for those below it. Private "
        "addresses are never asked. Unset: none are fetched, and images come within requests.",
        metavar="HOST",
    )
    allowed_local_media_path: str | None = option(
        None, "Folder whose files requests may name as images (file:///...). Unset: no files are read."
    )
    image_fetch_timeout: float = option(
        5.0, "Seconds within which an image is fetched, with all redirects.", low=0.1, high=600
    )
    max_image_bytes: int = option(20 << 20, "Largest file of an image (20MiB works).", low=1024, high=1 << 30)
    max_image_pixels: int = option(
        1 << 25,
        "Most pixels of an image before it is resized; larger ones are refused undecoded.",
        low=1,
        high=178_956_970,
    )
    max_pending_image_bytes: int = option(
        1 << 30,
        "Most bytes of pixels of all requests that wait or run; further images are refused with 429.",
        low=1 << 20,
        high=1 << 40,
    )
    max_num_encoder_input_tokens: int | None = option(
        None,
        "Most image tokens that a step encodes; the rest of an image waits for the next one. auto: as many as a step "
        "feeds.",
        low=1,
        high=UNLIMITED,
    )
    encoder_cache_size: int | None = option(
        None,
        "Image tokens whose embeddings are kept; the largest image must fit. auto: 8192, or as many as that one has.",
        low=1,
        high=UNLIMITED,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionConfig:
    """Where and how steps run."""

    device: Literal["auto", "cpu", "cuda"] = option("auto", "auto: the GPU if there is one, else the CPU.")
    tensor_parallel_size: int = option(
        1,
        "Ranks that every layer of the model is divided among, each a process with a GPU of its own, or with a share "
        "of the CPU's cores.",
        low=1,
        high=64,
    )
    pipeline_parallel_size: int = option(
        1,
        "Stages that the layers of the model are cut into, each on --tensor-parallel-size ranks of its own.",
        low=1,
        high=64,
    )
    distributed_executor_backend: Literal["mp", "ray"] = option(
        "mp",
        "Where several ranks run: mp, processes of this host; ray, actors of a Ray cluster, which may have several "
        "hosts. It needs the extra ray.",
    )
    enable_expert_parallel: bool = option(
        False,
        "With several ranks, each has whole experts of a mixture, not a part of every expert; no meaning with one.",
    )
    threads: int | None = option(
        None,
        "CPU threads for the model, of each rank; auto: OMP_NUM_THREADS, else the cores there are, shared by ranks.",
        low=1,
        high=4096,
    )
    cpu_kernels: Literal["auto", "torch", "avx2", "avx512", "avx512_bf16", "amx"] = option(
        "auto",
        "What multiplies on a CPU: Quire's kernels for an instruction set of x86-64, or torch; auto: those for the "
        "best instruction set that the processor has, else torch. Deterministic answers are computed by torch.",
    )
    enforce_eager: bool = option(False, "Launch every kernel of every step, without CUDA graphs; no meaning on a CPU.")
    deterministic: bool | None = option(
        None,
        "The same bits of every token and log-probability alone, in a batch, cold, warm, chunked, preempted and "
        "speculated, for a price; auto: for the embedded model in its own dtype on a CPU, where the price is small.",
    )
    step_timeout: float | None = option(
        None,
        "Seconds that a step may take before /health says 503 and the log says where it hangs; after as many again the "
        "engine is started anew. Ten times what the steps before suggest is allowed in any case. auto: 10 once steps "
        "have been measured, 30 and a tenth of a second for each token of a step before; for --executor grpc its "
        "--executor-step-timeout.",
        low=0.1,
        high=86400,
    )
    debug: bool = option(False, "Show the traceback of an error.")
    recording_dir: str | None = option(
        None,
        "Folder for a recording of what the scheduler decided and why, without prompts or answers, for `quire replay`; "
        "none: nothing is recorded.",
    )
    recording_max_bytes: int = option(
        256 << 20,
        "Largest size of all recordings in that folder: the oldest go first (64MiB works).",
        low=1 << 20,
        high=1 << 50,
    )

    @property
    def num_ranks(self) -> int:
        """Of all stages."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def ranked(self) -> bool:
        """Whether ranks have processes of their own. One rank on Ray has."""
        return self.num_ranks > 1 or self.distributed_executor_backend == "ray"


@dataclass(frozen=True, slots=True, kw_only=True)
class DisaggregationConfig:
    """Prefill and decode in different engines."""

    disaggregation_mode: Literal["none", "prefill", "decode"] = option(
        "none",
        "Split prefill and decode: decode, long prompts are computed by a prefill engine, which sends their K/V; "
        "prefill, compute prompts for decode engines.",
    )
    disaggregation_address: tuple[str, ...] = option(
        (),
        "HOST:PORT where a prefill engine listens for decode engines, or where a decode engine reaches its prefill "
        "engines (several are allowed). Unset: 127.0.0.1:8998.",
        metavar="HOST:PORT",
    )
    disaggregation_secret_file: str | None = option(
        None, "File with a secret that both sides share, of 16 bytes or more. Unset: only over loopback."
    )
    disaggregation_min_tokens: int = option(
        256,
        "Prompt tokens not found in the cache from which on a decode engine asks a prefill engine.",
        low=1,
        high=UNLIMITED,
    )
    disaggregation_max_slowdown: float = option(
        4.0,
        "A decode engine computes a prompt itself where a prefill engine is predicted to take more than so many times "
        "as long, by what it has taken so far. 1: it is asked only where it is faster; a large number: always.",
        low=0.1,
        high=1e9,
    )
    disaggregation_timeout: float = option(
        10.0,
        "Seconds that a decode engine waits for the next part of a prompt's K/V before it computes the rest itself.",
        low=0.1,
        high=3600,
    )


ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")


def check_disaggregation(config: DisaggregationConfig) -> None:
    """Raise InvalidConfig for a bad address, and for options without a mode, or not of this mode."""
    mode = config.disaggregation_mode
    for entry in fields(config)[1:]:
        of_decode = entry.name.endswith(("min_tokens", "max_slowdown", "timeout"))
        if getattr(config, entry.name) != entry.default and (mode == "none" or (of_decode and mode == "prefill")):
            raise InvalidConfig(
                f"{entry.name} is for disaggregation_mode {'decode' if of_decode else 'prefill and decode'}, and that "
                f"is {mode}",
                param=entry.name,
            )
    for address in config.disaggregation_address:
        found = ADDRESS.fullmatch(address)
        if found is None or not 0 < int(found[2]) < 1 << 16:
            raise InvalidConfig(f"disaggregation_address: {address!r} is not HOST:PORT", param="disaggregation_address")
    if mode == "prefill" and len(config.disaggregation_address) > 1:
        raise InvalidConfig(
            "disaggregation_address: a prefill engine listens at one address; give it one",
            param="disaggregation_address",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All sections, validated one by one and together. sources: where each value came from, by name. place: where the
    model is on this disk, once it has been found.

    Raises InvalidConfig on construction, naming the field, or both fields of two that cannot go together.
    """

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    multimodal: MultiModalConfig = MultiModalConfig()
    execution: ExecutionConfig = ExecutionConfig()
    executor: ExecutorConfig = field(default_factory=ExecutorConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    access: AccessConfig = field(default_factory=AccessConfig)
    upstream: UpstreamConfig = field(default_factory=UpstreamConfig)
    disaggregation: DisaggregationConfig = field(default_factory=DisaggregationConfig)
    replicas: ReplicasConfig = field(default_factory=ReplicasConfig)
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    place: Path | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for known in OPTIONS.values():
            known.check(self.get(known.name), known.name)
        _check_together(self)

    @classmethod
    def of(cls, **values: object) -> Settings:
        """Settings from plain values by name, as a Python call gives them: `Settings.of(max_num_seqs=8)`.

        Raises InvalidConfig for an unknown name, with the nearest known one.
        """
        return cls.build({name: (value, "call") for name, value in values.items()})

    @classmethod
    def build(cls, given: Mapping[str, tuple[object, str]]) -> Settings:
        """Settings from (value, source) by name; values may still be text; the rest is default."""
        sections: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
        for name, (value, source) in given.items():
            if name not in OPTIONS:
                raise refuse(name, source, OPTIONS)
            known = OPTIONS[name]
            where = name if source == "call" else f"{name} ({source})"
            sections[known.section][name] = known.read(value, where)
        made: dict[str, Any] = {section: kind(**sections[section]) for section, kind in SECTIONS.items()}
        return cls(**made, sources={name: source for name, (_, source) in given.items()})

    def get(self, name: str) -> Any:
        """The value of the option called `name`, whatever its section."""
        return getattr(getattr(self, OPTIONS[name].section), name)

    def source(self, name: str) -> str:
        """Where the option's value came from."""
        return self.sources.get(name, "default")

    def changed(self, **values: object) -> Settings:
        """These settings with other values by name. Raises InvalidConfig as `of` does."""
        return self.of(**{**self.flat(), **values})

    def flat(self) -> dict[str, Any]:
        """Every option by name, as plain values: `Settings.of(**settings.flat())` equals `settings`."""
        return {name: self.get(name) for name in OPTIONS}


SECTIONS: Mapping[str, type] = MappingProxyType(
    {name: kind for name, kind in get_type_hints(Settings).items() if name not in ("sources", "place")}
)

OPTIONS: Mapping[str, Option] = MappingProxyType(
    {known.name: known for section, kind in SECTIONS.items() for known in options(section, kind)}
)


def _check_together(settings: Settings) -> None:
    """Raise InvalidConfig for values that cannot be used together. Options at auto are made to fit later."""
    model, cache, scheduler = settings.model, settings.cache, settings.scheduler
    parse(scheduler.speculative_config)
    max_images(settings.multimodal.limit_mm_per_prompt)
    processor_changes(settings.multimodal.mm_processor_kwargs)
    check_upstream(settings.upstream)
    check_access(settings.access, settings.upstream.backend)
    check_executor(settings.executor)
    check_disaggregation(settings.disaggregation)
    check_replicas(settings)
    budget, rows, longest = scheduler.max_num_batched_tokens, scheduler.max_num_seqs, model.max_model_len
    if budget and rows and budget < rows:
        raise InvalidConfig(
            f"max_num_batched_tokens ({budget}) is below max_num_seqs ({rows}), but every running sequence"
            " needs one token a step: raise the first or lower the second",
            param="max_num_batched_tokens",
        )
    if not scheduler.enable_chunked_prefill and budget and longest and budget < longest:
        raise InvalidConfig(
            f"enable_chunked_prefill is false, so a prompt must fit one step, but max_num_batched_tokens"
            f" ({budget}) is below max_model_len ({longest}): raise the first or lower the second",
            param="max_num_batched_tokens",
        )
    if not scheduler.enable_chunked_prefill and scheduler.long_prefill_token_threshold:
        raise InvalidConfig(
            "long_prefill_token_threshold sets the size of chunks, but enable_chunked_prefill is false:"
            " set only one of them",
            param="long_prefill_token_threshold",
        )
    named = next((name for name in ("tokenizer", "chat_template") if getattr(model, name) is not None), None)
    if model.skip_tokenizer_init and named:
        raise InvalidConfig(f"skip_tokenizer_init reads no tokenizer, but {named} is set: set one of them", param=named)
    if cache.num_gpu_blocks_override and cache.kv_cache_memory_bytes:
        raise InvalidConfig(
            "num_gpu_blocks_override and kv_cache_memory_bytes both set the size of the KV cache: set one of them",
            param="kv_cache_memory_bytes",
        )
    if cache.kv_offloading_dir is not None and not cache.kv_offloading_size:
        raise InvalidConfig(
            "kv_offloading_dir takes what kv_offloading_size has no room for, and that is 0: set it to some GiB",
            param="kv_offloading_dir",
        )
    room = (cache.num_gpu_blocks_override or 0) * (cache.block_size or 0)
    if room and longest and room < longest:
        raise InvalidConfig(
            f"num_gpu_blocks_override ({cache.num_gpu_blocks_override}) blocks of block_size ({cache.block_size}) hold "
            f"{room} tokens, but max_model_len is {longest}: no sequence of that length could ever run",
            param="num_gpu_blocks_override",
        )
