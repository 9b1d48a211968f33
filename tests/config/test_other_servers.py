"""Names of other servers: each has a line that says what there is instead, and none is ignored in silence."""

from __future__ import annotations

import re

import click
import pytest

from quire.cli import main
from quire.cli.serve import command
from quire.config import OPTIONS, refuse
from quire.config.unknown import unread
from quire.server.ollama_models import REFUSED_PATHS
from quire.server.openapi import OPERATIONS
from tools import metrics_page, other_servers_page

FLAGS = [known.flag for known in OPTIONS.values()]
WORDS = "./m.gguf -c 4096 -ngl 99 --no-mmproj --temp 0.7 --port=9 --alias -1 --seed -3 --Model-path x"


@pytest.mark.parametrize("server", other_servers_page.OPTIONS_OF)
def test_every_option_works_or_is_refused_with_more_than_the_nearest_name(server: str) -> None:
    for name in other_servers_page.OPTIONS_OF[server].split():
        said = other_servers_page.option(name)
        if said != "works" and not said.startswith("taken"):
            refusal = str(refuse(name, "here", FLAGS))
            assert "Did you mean" not in refusal and ("here it is --" in refusal or "is not supported: " in refusal)


@pytest.mark.parametrize("server", other_servers_page.PATHS_OF)
def test_every_path_works_or_is_refused_with_a_reason(server: str) -> None:
    said = {name: other_servers_page.path(name) for name in other_servers_page.PATHS_OF[server].split()}
    assert set(said.values()) > {"works"} and "unknown" not in said.values()
    served = {one.path for one in OPERATIONS} - REFUSED_PATHS.keys()
    assert not [name for name, words in said.items() if words.startswith("refused") and name in served]


def test_every_field_has_a_line_and_metrics_are_there() -> None:
    for server, (_, names) in other_servers_page.FIELDS_OF.items():
        said = other_servers_page.ollama_option if server == "Ollama" else other_servers_page.field
        assert all(said(name) != "unknown" for name in names.split())
    ours = {name for name, *_ in metrics_page.rows()}
    assert {one for names in other_servers_page.METRICS_OF.values() for one in names.values()} <= ours


def test_a_command_names_all_unknown_options_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(click.ClickException, match="there is no option --Model-path") as last:
        main.main(["config", *WORDS.split()], standalone_mode=False)
    assert last.value.exit_code == 2
    before = capsys.readouterr().err.splitlines()
    named = [re.search(r"line: (?:there is no option )?(-+[A-Za-z-]+)", line) for line in before]
    assert [one and one[1] for one in named] == ["-c", "-ngl", "--no-mmproj", "--temp", "--alias"]


def test_short_forms_of_vllm_are_taken(capsys: pytest.CaptureFixture[str]) -> None:
    main.main(["config", "-tp", "2", "-pp", "3", "-q", "int8", "-sc", '{"method": "ngram"}'], standalone_mode=False)
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if "flag --" in line}
    assert set(rows) == {"tensor-parallel-size", "pipeline-parallel-size", "quantization", "speculative-config"}


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("VLLM_API_KEY", "secret", "VLLM_API_KEY is not read: here it is QUIRE_API_KEY"),
        ("LLAMA_ARG_CTX_SIZE", "4096", "LLAMA_ARG_CTX_SIZE is not read: here it is QUIRE_MAX_MODEL_LEN"),
        ("LLAMA_ARG_THREADS", "2", "LLAMA_ARG_THREADS is not read: here it is QUIRE_THREADS"),
        ("LLAMA_ARG_FLASH_ATTN", "1", "LLAMA_ARG_FLASH_ATTN is not read: attention is chosen by itself"),
        ("LLAMA_ARG_ENDPOINT_METRICS", "1", "LLAMA_ARG_ENDPOINT_METRICS is not read: it is always on"),
        ("LLAMA_ARG_TOP_K", "1", "LLAMA_ARG_TOP_K is not read: send it in the request, or set it for all with "),
        ("LLAMA_ARG_NEW", "1", "not read: LLAMA_ARG_NEW; options are QUIRE_*"),
        ("VLLM_USE_V1", "1", "not read: VLLM_USE_V1; options are QUIRE_*"),
        ("OLLAMA_HOST", "0.0.0.0", "OLLAMA_HOST is not read: here it is QUIRE_HOST and QUIRE_PORT"),
        ("OLLAMA_HOST", "http://127.0.0.1:8000", ""),
        ("OLLAMA_MODELS", "folder", ""),
        ("TOP_K", "1", ""),
    ],
)
def test_a_variable_of_another_server_that_has_no_effect_is_named(name: str, value: str, says: str) -> None:
    lines = unread({name: value, "HOME": "x"}, OPTIONS)
    assert len(lines) == bool(says) and "".join(lines).startswith(says) and "secret" not in str(lines)
    reach = unread({name: value}, OPTIONS, reach_vllm=True)
    assert reach == ([] if name.startswith("VLLM_") else lines)


def test_serve_names_such_variables_before_anything_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served: list[object] = []
    monkeypatch.setattr("quire.cli.serve.serve", served.append)
    monkeypatch.setenv("LLAMA_API_KEY", "secret")
    command.main([], standalone_mode=False)
    assert served and capsys.readouterr().err == "LLAMA_API_KEY is not read: here it is QUIRE_API_KEY\n"
