"""What scripts written for vLLM pass: taken where it changes nothing, refused by name where it would."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest
import torch

from quire.config import OPTIONS, Settings
from quire.config.unknown import UNSUPPORTED
from quire.config.vllm import ANY, CONSTRUCTOR, METHODS, EngineArgs, check_method, options_of
from quire.errors import InvalidConfig, InvalidRequest
from tests.live import ROOT

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
    with pytest.raises(InvalidConfig, match="trust_remote_code=0"):
        options_of({"trust_remote_code": 0})


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
    for name, values in METHODS.items():
        for value in values:
            check_method({name: value})
        with pytest.raises(InvalidRequest, match=f"{name}=") as caught:
            check_method({name: "adapter"})
        assert caught.value.param == name
    with pytest.raises(InvalidRequest, match=r"no argument lora_requests.*'lora_request'"):
        check_method({"lora_requests": None})


def test_each_argument_has_a_reason_and_is_in_the_table() -> None:
    assert CONSTRUCTOR.keys() <= UNSUPPORTED.keys() and not CONSTRUCTOR.keys() & OPTIONS.keys()
    page = (ROOT / "docs/clients.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|$", page, re.MULTILINE)
    known = [*CONSTRUCTOR.items(), *METHODS.items()]
    assert rows == [(name, ", ".join(f"`{one!r}`" for one in values) or "any") for name, values in known]


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
