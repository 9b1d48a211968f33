"""`quire pull`, `quire list` and `quire rm`, with a little hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from huggingface_hub import constants

from quire.cli import main
from tests.hub_server import LittleHub, hub, use

MODEL, FILES = "owner/model", "owner/files-GGUF"


def quire(*words: str, input: str | None = None) -> Result:
    return CliRunner().invoke(main, list(words), input=input)


def kept(*words: str) -> list[dict[str, Any]]:
    return list(json.loads(quire("list", "--json", *words).stdout))


@pytest.fixture
def little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LittleHub]:
    """A repository of safetensors and one of GGUF files, one of them in two parts."""
    files = {
        MODEL: ("config.json", "model.safetensors", "tokenizer.json"),
        FILES: ("x-Q4_K_M.gguf", "x-Q8_0-00001-of-00002.gguf", "x-Q8_0-00002-of-00002.gguf"),
    }
    for name, held in files.items():
        (tmp_path / name).mkdir(parents=True)
        for file in held:
            (tmp_path / name / file).write_bytes(b"GGUF" + file.encode() * 100)
    with hub({name: tmp_path / name for name in files}) as running:
        use(running, tmp_path, monkeypatch)
        yield running


def test_a_model_is_pulled_listed_and_removed(little: LittleHub, tmp_path: Path) -> None:
    done = quire("pull", f"{FILES}:Q8_0")
    assert done.exit_code == 0, done.output
    first, second = done.stdout.splitlines()
    assert first.startswith(f"{FILES}:Q8_0 is at {tmp_path / 'cache'}")
    assert first.endswith("(2 files, 5.09 KiB, 2 checked by hash)")
    assert second == f"serve it with: quire serve {FILES}:Q8_0"
    assert quire("pull", MODEL).exit_code == 0
    assert {(each["name"], each["format"], each["size"]) for each in kept()} == {
        (f"{FILES}:Q8_0", "gguf", 5208),
        (MODEL, "safetensors", 4212),
    }
    table = quire("list").stdout
    assert "5.09 KiB" in table
    assert "just now" in table and "9.20 KiB in all" in table
    refused = quire("rm", MODEL, input="n\n")
    assert refused.exit_code == 1 and "It frees 4.49 KiB" in refused.stdout and "nothing was removed" in refused.stdout
    assert len(kept()) == 2
    assert quire("rm", MODEL, "--yes").stdout.endswith(f"removed {MODEL}: 4.49 KiB freed\n")
    assert [each["name"] for each in kept()] == [f"{FILES}:Q8_0"]
    assert not (tmp_path / "cache" / "models--owner--model").exists()


def test_one_type_of_several_is_removed(little: LittleHub, tmp_path: Path) -> None:
    assert quire("pull", f"{FILES}:Q8_0").exit_code == quire("pull", FILES).exit_code == 0
    assert [each["name"] for each in sorted(kept(), key=lambda each: each["name"])] == [
        f"{FILES}:Q4_K_M",
        f"{FILES}:Q8_0",
    ]
    assert quire("rm", f"{FILES}:q8_0", "-y").exit_code == 0
    assert [each["name"] for each in kept()] == [f"{FILES}:Q4_K_M"]
    assert len(list((tmp_path / "cache").rglob("blobs/*"))) == 1
    missing = quire("rm", f"{FILES}:Q8_0", "-y")
    assert missing.exit_code == 2 and "(of what is in the cache)" in missing.stderr


def test_what_another_revision_needs_is_kept(little: LittleHub, tmp_path: Path) -> None:
    assert quire("pull", MODEL).exit_code == 0
    before, little.commit = little.commit, "ab" * 20
    little.asked.clear()
    (tmp_path / MODEL / "config.json").write_text("{}")
    assert quire("pull", MODEL).exit_code == 0
    assert quire("rm", MODEL, "--yes", "--revision", before).stdout.endswith("1.08 KiB freed\n")
    assert quire("pull", MODEL).exit_code == 0
    assert little.asked == ["config.json"], "the weights were still there"
    lost = quire("rm", MODEL, "--yes", "--revision", before)
    assert lost.exit_code == 2 and f"revision {before} of {MODEL} is not in the cache" in lost.stderr


def test_an_interrupted_download_is_resumed(little: LittleHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100)
    little.cut.add("x-Q4_K_M.gguf")
    done = quire("pull", FILES)
    assert done.exit_code == 0, done.output
    assert little.ranges and little.ranges[0].startswith("bytes=6"), "the second half alone was asked for"


def test_a_damaged_file_is_found_removed_and_pulled_again(little: LittleHub, tmp_path: Path) -> None:
    assert quire("pull", FILES).exit_code == 0
    [blob] = (tmp_path / "cache").rglob("blobs/*")
    blob.write_bytes(blob.read_bytes()[:-1] + b"?")
    damaged = quire("pull", FILES)
    assert damaged.exit_code == 2 and "x-Q4_K_M.gguf was damaged: its hash is " in damaged.stderr
    assert quire("pull", FILES).exit_code == 0


def test_another_folder_of_downloads_is_listed_too(little: LittleHub, tmp_path: Path) -> None:
    elsewhere = str(tmp_path / "elsewhere")
    done = quire("pull", FILES, "--download-dir", elsewhere)
    assert done.stdout.splitlines()[1] == f"serve it with: quire serve {FILES} --download-dir {elsewhere}"
    assert kept() == [] and [each["name"] for each in kept("--download-dir", elsewhere)] == [f"{FILES}:Q4_K_M"]
    assert "no models are kept in" in quire("list").stdout
    assert quire("rm", f"{FILES}:Q4_K_M", "-y", "--download-dir", elsewhere).exit_code == 0


def test_what_is_not_whole_is_listed_as_such(little: LittleHub, tmp_path: Path) -> None:
    assert quire("pull", f"{FILES}:Q8_0").exit_code == 0
    [second] = (tmp_path / "cache").rglob("x-Q8_0-00002*")
    second.unlink()
    (tmp_path / "cache" / "models--owner--files-GGUF" / "blobs" / "x.incomplete").write_bytes(b"12345")
    assert {(each["format"], each["size"]) for each in kept()} == {("gguf, parts missing", 2604), ("incomplete", 5)}


def test_ollamas_models_are_listed_and_left_to_it(little: LittleHub, tmp_path: Path) -> None:
    blob = tmp_path / "ollama" / "blobs" / f"sha256-{'1' * 64}"
    blob.parent.mkdir(parents=True)
    blob.write_bytes(b"GGUF" * 10)
    manifest = tmp_path / "ollama/manifests/registry.ollama.ai/library/tiny/1b"
    manifest.parent.mkdir(parents=True)
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{'1' * 64}"}
    manifest.write_text(json.dumps({"layers": [layer]}))
    assert [(each["name"], each["place"], each["size"]) for each in kept()] == [("tiny:1b", "ollama", 40)]
    assert quire("pull", "tiny:1b").stdout.startswith(f"tiny:1b is at {blob} (1 file, 40 bytes)")
    refused = quire("rm", "tiny:1b", "-y")
    assert refused.exit_code == 2 and "tiny:1b is Ollama's: `ollama rm tiny:1b` removes it" in refused.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("pull",), "name the model: quire pull OWNER/NAME"),
        (("rm",), "name the model to remove: `quire list` shows"),
        (("rm", "embedded"), "embedded is not a download"),
        (("rm", "./nowhere"), "'./nowhere' is no name of a model"),
        (("rm", "owner/unknown"), "owner/unknown is not in the cache at "),
        (("rm", "qwen3:0.6b"), "Qwen/Qwen3-0.6B-GGUF is not in the cache at "),
    ],
)
def test_mistakes_are_told(little: LittleHub, words: tuple[str, ...], said: str) -> None:
    done = quire(*words)
    assert done.exit_code == 2 and said in done.stderr


def test_offline_a_pull_says_where_it_looked(little: LittleHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    done = quire("pull", "qwen3:0.6b")
    assert done.exit_code == 1
    assert "qwen3:0.6b is Qwen/Qwen3-0.6B-GGUF on the hub, unless Ollama's store has it" in done.stderr
    assert "Qwen/Qwen3-0.6B-GGUF is not in the local hub cache" in done.stderr


def test_names_of_ollamas_library_are_listed(little: LittleHub) -> None:
    assert "qwen3:SIZE  Qwen/Qwen3-SIZE-GGUF" in quire("list", "--library").stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("rm", ""), "name the model to remove"),
        (
            ("quantize", "embedded", "/no/x.gguf", "--type", "q8_0"),
            "/no/x.gguf: there is no folder /no: make it, or name",
        ),
        (("quantize", "embedded", "", "--type", "q8_0"), "OUT is empty: name the file to write, such as model.gguf"),
        (("quantize", "", "x.gguf", "--type", "q8_0"), "model '' is neither"),
    ],
)
def test_an_empty_argument_is_refused_with_what_to_write(args: tuple[str, ...], words: str) -> None:
    said = CliRunner().invoke(main, list(args))
    assert said.exit_code and words in said.output


@pytest.mark.parametrize("name", ["nothing", "nothing:1b"])
def test_what_nobody_keeps_is_not_said_to_be_ollamas(name: str, little: LittleHub) -> None:
    done = quire("rm", name)
    assert (done.exit_code, done.stderr) == (
        2,
        f"Error: no model '{name}' is kept here: `quire list` shows what is\n",
    )


def test_a_hub_that_cannot_be_reached_is_named(little: LittleHub, monkeypatch: pytest.MonkeyPatch) -> None:
    done = quire("pull", "a/b")
    assert done.exit_code == 2 and "the hub has no model 'a/b'" in done.stderr
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    done = quire("pull", "a/b")
    assert done.exit_code == 1 and "HF_HUB_OFFLINE is set: unset it" in done.stderr
    assert "`quire pull a/b`" not in done.stderr, "which is what was just tried"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "Error: name the type with --type: q4_k_m is the usual one (known: f32, "),
        (("--type", "q9"), "Error: type 'q9' is not written (known: f32, "),
    ],
)
def test_a_type_is_asked_for_and_checked_before_a_model_is_read(words: tuple[str, ...], says: str) -> None:
    done = quire("quantize", "./nothing", "out.gguf", *words)
    assert done.exit_code == 2 and done.stderr.startswith(says)
