"""What scripts written for vLLM pass: taken where it changes nothing, refused by name where it would."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import click
import pytest
import torch

from quire import LLM, AsyncLLM, BeamSearchParams
from quire.cli import main
from quire.config import OPTIONS, Settings
from quire.config.other_servers import UNSUPPORTED
from quire.config.vllm import (
    ANY,
    ATTRIBUTES,
    CONSTRUCTOR,
    METHODS,
    EngineArgs,
    check_method,
    options_of,
    without_unneeded,
)
from quire.errors import InvalidConfig, InvalidRequest, QuireError, UnknownName
from quire.types import (
    SAMPLING_OTHERS,
    STRUCTURE_OTHERS,
    PositionLogprobs,
    SamplingParams,
    StructuredOutputsParams,
    TokenLogprobs,
)
from tools import vllm_page

SCRIPT = {
    "data_parallel_size": 1,
    "trust_remote_code": False,
    "tokenizer_mode": "auto",
    "swap_space": 4,
    "cpu_offload_gb": 0.0,
    "max_seq_len_to_capture": 8192,
    "disable_custom_all_reduce": True,
    "hf_overrides": None,
    "task": "generate",
}


def test_what_changes_nothing_is_taken_and_leaves_the_defaults() -> None:
    assert options_of(SCRIPT) == {}
    for name, values in CONSTRUCTOR.items():
        for value in values or (None, True, 7, "text"):
            assert options_of({name: value}) == {}


@pytest.mark.parametrize("name", [name for name, values in CONSTRUCTOR.items() if values is not ANY])
@pytest.mark.parametrize("value", [2, True, "slow", {"a": 1}])
def test_what_would_change_something_is_refused_by_name_and_value(name: str, value: Any) -> None:
    with pytest.raises(InvalidConfig, match=re.escape(f"{name}={value!r} is not supported, only ")) as caught:
        options_of({name: value})
    assert caught.value.param == name and UNSUPPORTED[name] in str(caught.value)


def test_true_is_not_one() -> None:
    with pytest.raises(InvalidConfig, match="data_parallel_size=True"):
        options_of({"data_parallel_size": True})
    with pytest.raises(InvalidConfig, match="tensor_parallel_size"):
        Settings.of(**options_of({"tensor_parallel_size": True}))
    with pytest.raises(InvalidConfig, match="enable_lora=0"):
        options_of({"enable_lora": 0})


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ("half", "float16"),
        ("float", "float32"),
        ("bfloat16", "bfloat16"),
        (torch.bfloat16, "bfloat16"),
        (torch.float16, "float16"),
        (torch.float32, "float32"),
        ("auto", "auto"),
    ],
)
def test_a_dtype_may_have_the_name_that_vllm_or_torch_gives_it(given: Any, dtype: str) -> None:
    assert Settings.of(**options_of({"dtype": given})).model.dtype == dtype


def test_none_is_an_option_that_is_not_given() -> None:
    assert Settings.of(**options_of(dict.fromkeys(OPTIONS))) == Settings()


def test_an_argument_that_nobody_has_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(InvalidConfig, match="max_num_seqs"):
        Settings.of(**options_of({"max_num_seq": 3}))
    with pytest.raises(InvalidConfig, match="no option tensor_parallel_sizes"):
        Settings.of(**options_of({"tensor_parallel_sizes": None}))


def test_an_argument_of_a_method_is_taken_or_refused_likewise() -> None:
    for name, (values, instead) in METHODS.items():
        for value in values:
            check_method({name: value})
        with pytest.raises(InvalidRequest, match=f"{name}=") as caught:
            check_method({name: "adapter"})
        assert caught.value.param == name and str(caught.value).endswith(instead)
    with pytest.raises(InvalidRequest, match=r"no parameter lora_requests.*'lora_request'"):
        check_method({"lora_requests": None})


@pytest.mark.parametrize(
    ("kind", "others", "given"),
    [(SamplingParams, SAMPLING_OTHERS, {}), (StructuredOutputsParams, STRUCTURE_OTHERS, {"json_object": True})],
)
def test_a_field_that_is_none_here_is_taken_where_it_changes_nothing(kind: Any, others: Any, given: Any) -> None:
    for name, (values, instead) in others.items():
        for value in values or (None, True, 7, "text"):
            assert kind(**given, **{name: value}) == kind(**given)
        if values is not ANY:
            with pytest.raises(InvalidRequest, match=re.escape(f"{name}='odd' is not supported")) as caught:
                kind(**given, **{name: "odd"})
            assert caught.value.param == name and str(caught.value).endswith(instead)
    with pytest.raises(InvalidRequest, match=f"{kind.__name__} has no parameter jsn.*'json'|no parameter max_token."):
        kind(**given, **{"jsn" if given else "max_token": 1})
    with pytest.raises(InvalidRequest, match=r"no parameter beam_with\. Did you mean 'beam_width'"):
        BeamSearchParams(3, max_tokens=2, beam_with=3)  # type: ignore[call-arg]


def test_sampling_parameters_are_made_copied_and_assigned_as_vllms() -> None:
    params = SamplingParams.from_optional(temperature=None, max_tokens=None, top_p=0.5, best_of=None)
    assert (params.temperature, params.max_tokens, params.top_p) == (1.0, None, 0.5)
    copied = params.clone()
    copied.stop, copied.max_tokens = "end", 7
    assert (copied.stop, copied.max_tokens) == (("end",), 7) and (params.stop, params.max_tokens) == ((), None)
    assert copied == SamplingParams(top_p=0.5, stop="end", max_tokens=7) == pickle.loads(pickle.dumps(copied))
    with pytest.raises(InvalidRequest, match="top_p must be"):
        copied.top_p = 3
    with pytest.raises(InvalidRequest, match="'max_tokens'"):
        copied.max_token = 3  # type: ignore[attr-defined]
    assert copied.top_p == 0.5


def test_log_probabilities_of_a_position_are_a_mapping_by_token() -> None:
    scores = TokenLogprobs(token=9, logprob=-2.5, rank=3, top=((4, -0.5), (7, -1.5)))
    one = PositionLogprobs(scores, "t{}".format)
    assert list(one.items()) == [(9, (-2.5, 3, "t9")), (4, (-0.5, 1, "t4")), (7, (-1.5, 2, "t7"))]
    assert (len(one), one[4].decoded_token, 5 in one, one.get(5)) == (3, "t4", False, None)
    assert (one.token, one.logprob, one.rank, one.top) == scores
    chosen = PositionLogprobs(TokenLogprobs(4, -0.5, 1, scores.top), "t{}".format)
    assert list(chosen) == [4, 7] and len(chosen) == 2 and repr(chosen).startswith("{4: Logprob(logprob=-0.5, rank=1")
    assert pickle.loads(pickle.dumps(one)) == copy.deepcopy(one) == one != chosen


def test_an_attribute_that_is_none_here_is_refused_by_name() -> None:
    llm = object.__new__(LLM)
    for name, instead in ATTRIBUTES.items():
        assert not hasattr(llm, name)
        with pytest.raises(UnknownName, match=re.escape(f"LLM has no {name}: {instead}")):
            getattr(llm, name)
    with pytest.raises(UnknownName, match="'generate'"):
        llm.generat  # noqa: B018
    with pytest.raises(QuireError, match=r"AsyncLLM has no attribute aborted\. Did you mean 'abort'"):
        object.__new__(AsyncLLM).aborted  # noqa: B018


@pytest.mark.parametrize(
    ("line", "kept", "left"),
    [
        ("m --swap-space 4 --port 80", "m --port 80", ["--swap-space"]),
        ("--swap-space=4 --trust-remote-code m", "m", ["--swap-space", "--trust-remote-code"]),
        (
            "--no-trust-remote-code --enable-auto-tool-choice",
            "",
            ["--no-trust-remote-code", "--enable-auto-tool-choice"],
        ),
        ("--data-parallel-size 1 --cpu-offload-gb 0.0", "", ["--data-parallel-size", "--cpu-offload-gb"]),
        ("--data-parallel-size 2 --cpu-offload-gb=8", "--data-parallel-size 2 --cpu-offload-gb=8", []),
        ("--tokenizer-mode auto --model-impl vllm", "", ["--tokenizer-mode", "--model-impl"]),
        ("--tokenizer-mode slow --enable-lora", "--tokenizer-mode slow --enable-lora", []),
        ("--response-role user --trust-remote-code=yes", "--response-role user --trust-remote-code=yes", []),
    ],
)
def test_options_of_vllm_serve_that_change_nothing_are_left_out(line: str, kept: str, left: list[str]) -> None:
    words, named = without_unneeded(line.split())
    assert (words, list(named)) == (kept.split(), left)


def test_a_command_names_the_options_that_change_nothing_and_refuses_others(capsys: pytest.CaptureFixture[str]) -> None:
    main.main(["config", "--swap-space", "4", "--max-num-seqs", "3"], standalone_mode=False)
    said = capsys.readouterr()
    assert said.err == f"--swap-space changes nothing here: {UNSUPPORTED['swap_space']}\n"
    assert "flag --max-num-seqs" in said.out
    for option, hint in (("--jinja", "always applied"), ("-fa", "by itself"), ("-hf", "--model"), ("--lora", "merge")):
        with pytest.raises(click.ClickException, match=f"{option}[ :].*{hint}"):
            main.main(["config", option, "x"], standalone_mode=False)


def test_several_values_behind_one_flag_are_refused_with_how_they_are_written() -> None:
    """As `vllm serve` takes them; the last would be another argument."""
    with pytest.raises(click.ClickException, match=r"\(b\): --served-model-name takes several values with commas"):
        main.main(["config", "embedded", "--served-model-name", "a", "b"], standalone_mode=False)
    with pytest.raises(click.UsageError, match=r"extra argument \(other\)$"):
        main.main(["config", "embedded", "other"], standalone_mode=False)


def test_each_argument_and_option_has_a_reason() -> None:
    assert CONSTRUCTOR.keys() <= UNSUPPORTED.keys() and not CONSTRUCTOR.keys() & OPTIONS.keys()
    for name in (*vllm_page.ENGINE.split(), *vllm_page.SERVER.split()):
        if name not in OPTIONS and name not in CONSTRUCTOR:
            with pytest.raises(InvalidConfig, match=f"{name} is not supported: "):
                Settings.of(**options_of({name: 1}))


def test_engine_args_are_arguments_that_were_checked() -> None:
    args = EngineArgs("a/model", max_num_seqs=3, tensor_parallel_size=1)
    assert vars(args) == args.given() == {"model": "a/model", "max_num_seqs": 3, "tensor_parallel_size": 1}
    args.max_num_seqs = 4
    assert args.given()["max_num_seqs"] == 4 and args.dtype is None and args.trust_remote_code is None
    assert pickle.loads(pickle.dumps(args)).given() == copy.copy(args).given() == args.given()
    with pytest.raises(InvalidConfig, match="data_parallel_size=2"):
        EngineArgs(data_parallel_size=2)
    with pytest.raises(InvalidConfig, match="max_num_seqs"):
        EngineArgs(max_num_seq=2)
    with pytest.raises(AttributeError, match="max_num_seqs"):
        EngineArgs().max_num_seq  # noqa: B018
