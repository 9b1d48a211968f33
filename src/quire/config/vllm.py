"""Arguments of vLLM's classes and methods: taken where their value changes nothing here, otherwise refused by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from quire.checks import ANY, Unneeded, changes_nothing, check_unneeded, refusal
from quire.config.option import OTHER_NAMES
from quire.config.other_servers import UNSUPPORTED
from quire.config.settings import OPTIONS, Settings
from quire.errors import InvalidConfig, InvalidRequest, UnknownName, nearest
from quire.types import SamplingParams

_Values = Sequence[tuple[tuple[Any, ...], str]]


def _by_name(groups: _Values) -> Mapping[str, tuple[Any, ...]]:
    return MappingProxyType({name: values for values, names in groups for name in names.split()})


CONSTRUCTOR = _by_name(
    (
        ((1, None), "data_parallel_size num_scheduler_steps stream_interval max_num_partial_prefills"),
        ((0, None), "cpu_offload_gb num_lookahead_slots scheduler_delay_factor"),
        (
            (False, None),
            "enable_lora enable_sleep_mode enable_prompt_embeds calculate_kv_scales disable_sliding_window",
        ),
        (("auto", None), "tokenizer_mode config_format worker_cls"),
        (("auto", "vllm", None), "model_impl"),
        (("auto", "generate", None), "task"),
        (("raw_logprobs", None), "logprobs_mode"),
        (("recompute", None), "preemption_mode"),
        (
            (None, {}, [], ""),
            "rope_scaling rope_theta "
            "additional_config model_loader_extra_config logits_processors kv_transfer_config kv_events_config "
            "quantization_config tokenizer_revision code_revision hf_token speculative_model num_speculative_tokens "
            "structured_outputs_config override_pooler_config",
        ),
        (
            ANY,
            "trust_remote_code async_scheduling guided_decoding_backend disable_log_requests "
            "swap_space max_seq_len_to_capture disable_custom_all_reduce disable_async_output_proc "
            "use_v2_block_manager disable_cascade_attn max_parallel_loading_workers compilation_config "
            "optimization_level cudagraph_capture_sizes max_cudagraph_capture_size prefix_caching_hash_algo "
            "max_logprobs max_loras max_lora_rank max_cpu_loras fully_sharded_loras lora_dtype max_log_len "
            "use_tqdm_on_load safetensors_load_strategy disable_hybrid_kv_cache_manager aggregate_engine_logging "
            "mm_processor_cache_gb mm_processor_cache_type tokenizer_pool_size",
        ),
    )
)
"""Arguments of vLLM's `LLM`, `AsyncEngineArgs` and the like that are no options here, and the values that are taken."""

FLAGS = frozenset(
    (
        *("trust_remote_code", "async_scheduling", "disable_log_requests", "disable_custom_all_reduce"),
        *("disable_async_output_proc", "use_v2_block_manager", "disable_cascade_attn", "enable_auto_tool_choice"),
        *("enable_reasoning", "enable_request_id_headers", "enable_prompt_tokens_details"),
        *("disable_frontend_multiprocessing", "fully_sharded_loras", "disable_hybrid_kv_cache_manager"),
        *("aggregate_engine_logging", "use_tqdm_on_load", "disable_uvicorn_access_log"),
    )
)
"""Options of `vllm serve` without a value that change nothing."""


def _is_flag(name: str, values: tuple[Any, ...]) -> bool:
    return name in FLAGS or any(one is False for one in values)


_VALUES: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        **{name: values for name, values in CONSTRUCTOR.items() if not _is_flag(name, values)},
        "response_role": ("assistant",),
        "chat_template_content_format": ("auto", "string", "openai"),
        "api_server_count": (1,),
    }
)
"""Options of `vllm serve` with a value, and the values that change nothing."""

METHODS: Mapping[str, Unneeded] = MappingProxyType(
    {
        "lora_request": Unneeded((None, {}, []), "merge the adapter into the weights"),
        "prompt_adapter_request": Unneeded((None, {}, []), "merge the adapter into the weights"),
        "mm_processor_kwargs": Unneeded((None, {}, []), "images are read as the model's own configuration says"),
        "tokenization_kwargs": Unneeded((None, {}, []), "give token ids as a prompt"),
        "guided_options_request": Unneeded((None, {}, []), "see structured_outputs of SamplingParams"),
        "trace_headers": Unneeded((None, {}, []), "a server has traces, see --otlp-traces-endpoint"),
        "data_parallel_rank": Unneeded((None, {}, []), "start an LLM for each copy of the model"),
        "pooling_params": Unneeded(
            (None, {}, []),
            "its fields are arguments here: dimensions, normalize, use_activation, truncate_prompt_tokens",
        ),
        "prompt_token_ids": Unneeded((None,), "prompts takes token ids: prompts=[{'prompt_token_ids': [1, 2]}]"),
        "chat_template": Unneeded((None,), "set it for all calls: LLM(chat_template='template.jinja')"),
        "chat_template_content_format": Unneeded(("auto", "string", "openai"), "both forms of content are read"),
    }
)
"""Arguments of the methods of vLLM's classes that the same methods do not have here."""


ATTRIBUTES: Mapping[str, str] = MappingProxyType(
    {
        "llm_engine": "this is the engine; `settings` has its options, and `get_tokenizer()` its tokenizer",
        "model_config": "`settings` has the options",
        "vllm_config": "`settings` has the options",
        "engine": "this is the engine",
        "reward": "call encode, classify or score",
        "get_metrics": "outputs have `metrics`, and a server has /metrics",
        "sleep": "close it, and make another when it is needed",
        "wake_up": "close it, and make another when it is needed",
        "start_profile": "run the script under torch.profiler or py-spy",
        "stop_profile": "run the script under torch.profiler or py-spy",
        "collective_rpc": "ranks run the model and nothing else",
        "apply_model": "ranks run the model and nothing else",
        "set_tokenizer": "give the folder of another tokenizer: tokenizer='...'",
        "preprocess_chat": "see get_tokenizer().apply_chat_template",
        "enqueue_chat": "call enqueue with texts of get_tokenizer().apply_chat_template",
        "add_lora": "merge the adapter into the weights",
        "list_loras": "merge the adapter into the weights",
        "add_request": "call generate, or enqueue of an LLM",
        "step": "call generate, or enqueue of an LLM",
        "get_model_config": "`settings` has the options",
        "get_vllm_config": "`settings` has the options",
        "check_health": "a call raises Unavailable while the engine starts, and Closed after `close`",
        "is_running": "a call raises Unavailable while the engine starts, and Closed after `close`",
        "errored": "a call raises Unavailable while the engine starts, and Closed after `close`",
        "shutdown": "call close",
        "get_world_size": "`settings` has tensor_parallel_size and pipeline_parallel_size",
        "reset_mm_cache": "an image is found again by its pixels alone: nothing is stale",
        "do_log_stats": "outputs have `metrics`, and a server has /metrics",
        "pause_generation": "abort ends requests",
        "resume_generation": "abort ends requests",
    }
)
"""Attributes of vLLM's LLM and AsyncLLM that theirs here do not have, and what there is instead."""


def missing(one: object, name: str) -> UnknownName:
    """The error for an attribute of an LLM or AsyncLLM that is not there."""
    if name in ATTRIBUTES:
        return UnknownName(f"{type(one).__name__} has no {name}: {ATTRIBUTES[name]}", param=name)
    known = [each for each in dir(type(one)) if not each.startswith("_")]
    return UnknownName(f"{type(one).__name__} has no attribute {name}.{nearest(name, known)}", param=name)


def options_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Of a constructor's arguments those that are options, with Quire's values: None is an option that is not given.

    A dtype may be torch's. Raises InvalidConfig for an argument with a value that would change something.
    """
    taken = {}
    for name, value in given.items():
        if name in CONSTRUCTOR:
            if not changes_nothing(value, CONSTRUCTOR[name]):
                raise InvalidConfig(f"{refusal(name, value, CONSTRUCTOR[name])}: {UNSUPPORTED[name]}", param=name)
        elif value is not None or name not in OPTIONS:
            taken[name] = _value(name, value)
    return taken


class EngineArgs:
    """Arguments of `LLM` and `AsyncLLM` as one value, for `from_engine_args`, as scripts for vLLM make them.

    Attributes are the arguments, None where they are not given; `vars` has those that are given. Raises InvalidConfig
    as the constructors do.
    """

    def __init__(self, model: str = "embedded", **options: Any) -> None:
        Settings.of(model=model, **options_of(options))
        vars(self).update(options, model=model)

    def __getattr__(self, name: str) -> Any:
        if name in OPTIONS or name in CONSTRUCTOR:
            return None
        raise UnknownName(f"there is no argument {name}.{nearest(name, OPTIONS)}", param=name)

    def given(self) -> dict[str, Any]:
        """The arguments that were given, by name."""
        return dict(vars(self))


def check_method(given: Mapping[str, Any]) -> None:
    """Raise InvalidRequest for an argument of a method that is not known, or whose value would change something."""
    for name, value in given.items():
        if name in SamplingParams.__dataclass_fields__ and name not in METHODS:
            what = f"pass sampling_params=SamplingParams({name}={value!r:.40})"
            raise InvalidRequest(f"this method has no parameter {name}: {what}", param=name)
    check_unneeded("this method", given, (), METHODS)


def without_unneeded(
    args: Sequence[str],
    flags: Collection[str] = FLAGS,
    values: Mapping[str, tuple[Any, ...]] = _VALUES,
    why: Mapping[str, str] = UNSUPPORTED,
) -> tuple[list[str], dict[str, str]]:
    """Words of a command line without the options of vLLM whose values change nothing, and why, by each of those.

    flags: those without a value. values: of the others, what changes nothing.
    """
    kept: list[str] = []
    left: dict[str, str] = {}
    words = iter(args)
    for word in words:
        flag, given, value = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_") if flag.startswith("--") else ""
        if name.removeprefix("no_") in flags and not given:
            left[flag] = why[name.removeprefix("no_")]
        elif name in values:
            value = value if given else next(words, "")
            if _changes_no_answer(value, values[name]):
                left[flag] = why[name]
            else:
                kept += [word] if given else [word, value]
        else:
            kept.append(word)
    return kept, left


def taken_by_the_command_line(name: str) -> tuple[Any, ...] | None:
    """The values of an option of `vllm serve` that change nothing; None if there are none."""
    return ANY if name in FLAGS else _VALUES.get(name)


def _changes_no_answer(text: str, values: tuple[Any, ...]) -> bool:
    """Whether a word of a command line is one of `values`."""
    if values is ANY:
        return True
    try:
        return float(text) in [one for one in values if isinstance(one, int)]
    except ValueError:
        return text in values


def _value(name: str, value: Any) -> Any:
    if name not in OTHER_NAMES:
        return value
    text = str(value).removeprefix("torch.")
    return OTHER_NAMES[name].get(text, text)
