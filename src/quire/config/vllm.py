"""Arguments of vLLM's classes and methods: taken where their value changes nothing here, otherwise refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from quire.config.option import OTHER_NAMES
from quire.config.settings import OPTIONS, Settings
from quire.config.unknown import UNSUPPORTED
from quire.errors import InvalidConfig, InvalidRequest, nearest

ANY: tuple[Any, ...] = ()
"""Every value: what the argument sets is not there to be set, and answers are the same."""

_Values = Sequence[tuple[tuple[Any, ...], str]]


def _by_name(groups: _Values) -> Mapping[str, tuple[Any, ...]]:
    return MappingProxyType({name: values for values, names in groups for name in names.split()})


CONSTRUCTOR = _by_name(
    (
        ((1, None), "data_parallel_size num_scheduler_steps"),
        ((0, None), "cpu_offload_gb num_lookahead_slots"),
        (
            (False, None),
            "trust_remote_code enable_lora enable_sleep_mode "
            "enable_prompt_embeds calculate_kv_scales disable_sliding_window async_scheduling",
        ),
        (("auto", None), "tokenizer_mode config_format worker_cls guided_decoding_backend"),
        (("auto", "vllm", None), "model_impl"),
        (("auto", "generate", None), "task"),
        (("auto", None), "generation_config"),
        (("raw_logprobs", None), "logprobs_mode"),
        (("recompute", None), "preemption_mode"),
        (
            (None, {}, [], ""),
            "rope_scaling rope_theta override_generation_config "
            "additional_config model_loader_extra_config logits_processors kv_transfer_config kv_events_config "
            "quantization_config tokenizer_revision code_revision hf_token speculative_model num_speculative_tokens "
            "structured_outputs_config override_pooler_config",
        ),
        (
            ANY,
            "swap_space max_seq_len_to_capture disable_custom_all_reduce disable_async_output_proc "
            "use_v2_block_manager disable_cascade_attn max_parallel_loading_workers compilation_config "
            "cudagraph_capture_sizes max_logprobs max_loras max_lora_rank max_cpu_loras",
        ),
    )
)
"""Arguments of vLLM's `LLM`, `AsyncEngineArgs` and the like that are no options here, and the values that are taken."""

METHODS = _by_name(
    (
        (
            (None, {}, []),
            "lora_request prompt_adapter_request mm_processor_kwargs tokenization_kwargs guided_options_request "
            "trace_headers data_parallel_rank pooling_params",
        ),
        ((None,), "chat_template"),
        (("auto", "string", "openai"), "chat_template_content_format"),
    )
)
"""Arguments of the methods of vLLM's classes that the same methods do not have here, and the values that are taken."""


def options_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Of a constructor's arguments those that are options, with Quire's values: None is an option that is not given.

    A dtype may be torch's. Raises InvalidConfig for an argument with a value that would change something.
    """
    taken = {}
    for name, value in given.items():
        if name in CONSTRUCTOR:
            if not _changes_nothing(value, CONSTRUCTOR[name]):
                raise InvalidConfig(f"{_refusal(name, value, CONSTRUCTOR)}: {UNSUPPORTED[name]}", param=name)
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
        raise AttributeError(f"there is no argument {name}.{nearest(name, OPTIONS)}")

    def given(self) -> dict[str, Any]:
        """The arguments that were given, by name."""
        return dict(vars(self))


def check_method(given: Mapping[str, Any]) -> None:
    """Raise InvalidRequest for an argument of a method that is not known, or whose value would change something."""
    for name, value in given.items():
        if name not in METHODS:
            raise InvalidRequest(f"there is no argument {name}.{nearest(name, METHODS)}", param=name)
        if not _changes_nothing(value, METHODS[name]):
            raise InvalidRequest(_refusal(name, value, METHODS), param=name)


def _changes_nothing(value: object, values: tuple[Any, ...]) -> bool:
    return values is ANY or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values)


def _refusal(name: str, value: object, known: Mapping[str, tuple[Any, ...]]) -> str:
    others = " or ".join(repr(one) for one in known[name])
    return f"{name}={value!r:.80} is not supported, only {others}"


def _value(name: str, value: Any) -> Any:
    if name not in OTHER_NAMES:
        return value
    text = str(value).removeprefix("torch.")
    return OTHER_NAMES[name].get(text, text)
