"""Settings: one spelling for flags, environment and file; what is unknown or impossible is refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import hypothesis
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config import OPTIONS, SchedulerConfig, Settings, load
from quire.config.other_servers import ELSEWHERE, UNSUPPORTED
from quire.errors import InvalidConfig

SOURCE = Path(__file__).parents[1] / "src/quire"


def refusal(**values: object) -> str:
    with pytest.raises(InvalidConfig) as caught:
        Settings.of(**values)
    return str(caught.value)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "quire.yaml"


def test_defaults_serve_the_embedded_model_on_loopback_with_a_bounded_queue() -> None:
    settings = Settings()
    assert settings.model.model == "embedded"
    assert (settings.server.host, settings.server.port) == ("127.0.0.1", 8000)
    assert settings.scheduler.max_num_queued_reqs == 2048
    assert settings.scheduler.max_num_seqs is None, "auto stays auto until the device is known"
    assert {settings.source(name) for name in OPTIONS} == {"default"}


def test_later_sources_win_and_each_value_knows_where_it_came_from(file: Path) -> None:
    file.write_text("port: 1\nmax-num-seqs: 1\nmax_model_len: 1k\nseed: 1\n")
    environ = {"QUIRE_PORT": "2", "QUIRE_MAX_NUM_SEQS": "2", "HOME": "/"}
    settings = load({"port": "3"}, file=file, environ=environ)
    assert settings.server.port == 3
    assert settings.scheduler.max_num_seqs == 2
    assert settings.model.max_model_len == 1000
    assert settings.source("port") == "flag --port"
    assert settings.source("max_num_seqs") == "environment QUIRE_MAX_NUM_SEQS"
    assert settings.source("seed") == f"file {file}"
    assert settings.source("host") == "default"


def test_the_environment_may_name_the_file(file: Path) -> None:
    file.write_text("port: 81")
    assert load(environ={"QUIRE_CONFIG": str(file)}).server.port == 81


@pytest.mark.parametrize(
    ("written", "value"),
    [("32k", 32_000), ("32K", 32_768), ("1.5k", 1500), ("4GiB", 4 << 30), ("4GB", 4 * 10**9), (" 7 ", 7), (7, 7)],
)
def test_whole_numbers_take_units(written: object, value: int) -> None:
    assert Settings.of(kv_cache_memory_bytes=written).cache.kv_cache_memory_bytes == value


@pytest.mark.parametrize("written", ["1.5", "32q", "", "1e3", 1.0, True, [1]])
def test_what_is_no_whole_number_is_refused(written: object) -> None:
    assert "max_model_len" in refusal(max_model_len=written)


@pytest.mark.parametrize("written", ["auto", -1, "-1", None])
def test_auto_is_a_value(written: object) -> None:
    assert Settings.of(max_model_len=written).model.max_model_len is None


@pytest.mark.parametrize(("written", "value"), [("off", False), ("True", True), ("0", False), (True, True)])
def test_switches_take_the_usual_words(written: object, value: bool) -> None:
    assert Settings.of(enforce_eager=written).execution.enforce_eager is value


def test_several_keys_come_as_a_list_or_with_commas() -> None:
    assert Settings.of(api_key=["a", "b"]).server.api_key == ("a", "b")
    assert load(environ={"QUIRE_API_KEY": "a, b"}).server.api_key == ("a", "b")
    assert load(flags={"api_key": ("a, b", " c ")}).server.api_key == ("a", "b", "c")
    assert load(environ={"QUIRE_API_KEY": ""}).server.api_key == (), "an empty variable is none"


@pytest.mark.parametrize("name", ["api_key", "admin_key"])
@pytest.mark.parametrize("given", [("",), ("a", " "), ["a", ","]])
def test_an_empty_key_is_refused_for_it_would_look_like_one(name: str, given: Sequence[str]) -> None:
    assert f"{name}: must be text, or a list of texts, none of them empty" in refusal(**{name: given})


@pytest.mark.parametrize("value", ["m\udcff", "a\0b"])
def test_text_that_cannot_be_sent_to_the_engine_is_refused_by_its_option(value: str) -> None:
    """Such as an argument in Latin-1."""
    for name in ("model", "served_model_name", "chat_template", "api_key"):
        with pytest.raises(InvalidConfig, match=rf"{name}.*in UTF-8 and without zero bytes"):
            Settings.of(**{name: value})


def test_secrets_are_never_shown() -> None:
    settings = Settings.of(api_key="sesame")
    shown = [known.show(settings.get(name)) for name, known in OPTIONS.items()]
    assert "sesame" not in repr(settings) + "".join(shown)
    assert "sesame" not in refusal(api_key={"sesame": 1})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"max_num_seq": 3}, ["max_num_seq", "Did you mean 'max_num_seqs'?"]),
        ({"nnodes": 2}, ["nnodes", "see --tensor-parallel-size"]),
        ({"tensor_parallel_size": 0}, ["tensor_parallel_size", "1 to 64"]),
        ({"port": 70000}, ["port", "0 to 65535", "70000"]),
        ({"dtype": "floot32"}, ["dtype", "bfloat16", "Did you mean 'float32'?"]),
        ({"gpu_memory_utilization": float("nan")}, ["gpu_memory_utilization"]),
        ({"gpu_memory_utilization": 1.5}, ["gpu_memory_utilization", "to 1"]),
        ({"host": 5}, ["host", "text"]),
        ({"enforce_eager": "maybe"}, ["enforce_eager", "true or false"]),
    ],
)
def test_a_refusal_names_the_option_and_the_way_out(values: dict[str, object], words: list[str]) -> None:
    message = refusal(**values)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    "values",
    [
        {"max_num_batched_tokens": 32, "max_num_seqs": 64},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 512, "max_model_len": 1024},
        {"enable_chunked_prefill": False, "long_prefill_token_threshold": 64},
        {"num_gpu_blocks_override": 10, "kv_cache_memory_bytes": "1GiB"},
        {"num_gpu_blocks_override": 10, "block_size": 16, "max_model_len": 161},
    ],
)
def test_options_that_cannot_go_together_are_both_named(values: dict[str, object]) -> None:
    message = refusal(**values)
    assert all(name in message for name in values), message


@pytest.mark.parametrize(
    "values",
    [
        {"max_num_batched_tokens": 64, "max_num_seqs": 64},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 1024, "max_model_len": 1024},
        {"num_gpu_blocks_override": 10, "block_size": 16, "max_model_len": 160},
    ],
)
def test_options_that_just_fit_are_taken(values: dict[str, object]) -> None:
    assert {name: Settings.of(**values).get(name) for name in values} == values


def test_sections_made_by_hand_are_checked_too() -> None:
    with pytest.raises(InvalidConfig, match="max_num_seqs"):
        Settings(scheduler=SchedulerConfig(max_num_seqs=0))


@pytest.mark.parametrize(
    ("environ", "hint"),
    [
        ({"QUIRE_PROT": "1"}, "Did you mean 'QUIRE_PORT'?"),
        ({"QUIRE_NNODES": "2"}, "see --tensor-parallel-size"),
        ({"QUIRE_PORT": "x"}, "environment QUIRE_PORT"),
    ],
)
def test_variables_are_refused_in_their_own_spelling(environ: dict[str, str], hint: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        load(environ=environ)
    assert hint in str(caught.value)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("max-model-length: 3", "Did you mean 'max-model-len'?"),
        ("max_model_length: 3", "Did you mean 'max_model_len'?"),
        ("port: 1\nport: [", "not valid YAML"),
        ("- port", "option: value"),
        ("max-num-seqs: 1\nmax_num_seqs: 2", "twice"),
        ("max_num_seqs: 1\nmax-num-seqs: 2", "twice"),
        ("port: 1\nseed: 1\nport: 2", "port is given twice"),
        ("port: x", "quire.yaml"),
        ("api-key: 5", "api_key"),
    ],
)
def test_files_are_refused_by_name_and_key(file: Path, text: str, hint: str) -> None:
    file.write_text(text)
    with pytest.raises(InvalidConfig) as caught:
        load(file=file)
    assert hint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_refused(file: Path) -> None:
    with pytest.raises(InvalidConfig, match="cannot read the settings file"):
        load(file=file)


def test_settings_travel_as_plain_values() -> None:
    settings = Settings.of(model="m", api_key=("a",), max_model_len=5, enforce_eager=True)
    assert Settings.of(**settings.flat()) == settings
    assert msgspec.json.decode(msgspec.json.encode(settings), type=Settings) == settings
    assert json.loads(json.dumps(settings.flat()))["max_model_len"] == 5


WRITTEN = st.text("ab01.-kK, ", max_size=5) | st.integers() | st.none()


@hypothesis.settings(deadline=None, derandomize=True)
@given(st.dictionaries(st.sampled_from(sorted(OPTIONS)), WRITTEN, max_size=3))
def test_whatever_is_given_is_taken_as_it_is_or_refused_by_name(values: dict[str, object]) -> None:
    try:
        settings = Settings.of(**values)
    except InvalidConfig as error:
        refused = error.param
    else:
        refused = None
        assert Settings.of(**settings.flat()) == settings
    assert refused is None or refused in OPTIONS


def test_no_option_is_ignored() -> None:
    """Each is read somewhere."""
    code = "".join(path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py") if path.parent.name != "config")
    assert {name for name in OPTIONS if not re.search(rf"\.{name}\b", code)} == set()


def test_every_option_explains_itself_and_none_is_also_called_unsupported() -> None:
    for known in OPTIONS.values():
        assert known.help.endswith((".", ")", "answer")), known.name
        known.check(known.default, known.name)
    assert not set(OPTIONS) & {*UNSUPPORTED, *ELSEWHERE}
    assert not set(UNSUPPORTED) & set(ELSEWHERE)


def test_what_is_said_instead_is_an_option_there_is() -> None:
    known = {known.flag for known in OPTIONS.values()} | {f"--no-{known.flag[2:]}" for known in OPTIONS.values()}
    for name, instead in {**UNSUPPORTED, **ELSEWHERE}.items():
        assert set(re.findall(r"--[a-z-]+", instead)) <= known, name


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [("dtype", "half", "float16"), ("dtype", "bf16", "bfloat16"), ("kv_cache_dtype", "fp8_e4m3", "fp8")],
)
def test_other_servers_names_of_a_value_are_taken(name: str, given: str, value: str) -> None:
    assert OPTIONS[name].read(given, "flag") == value
