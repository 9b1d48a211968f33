"""A model argument becomes a folder, or one clear line. No test here reaches the network."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError

from quire.errors import InvalidModel, Unavailable
from quire.weights import locate
from quire.weights.hub import Listing


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert locate.locate(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("model", ["embedded", "folder", "model.gguf"])
def test_what_is_on_this_machine_has_no_revisions(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one than was asked for would be served."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "model.gguf").touch()
    assert locate.locate(model, revision="main") == locate.locate(model)
    with pytest.raises(InvalidModel, match=f"^revision 'v1' is of a repository on the hub, but {model} is on this"):
        locate.locate(model, revision="v1")


def test_the_embedded_model_lies_in_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(locate, "files", lambda package: tmp_path / package)
    with pytest.raises(InvalidModel, match="has no embedded model"):
        locate.locate("embedded")
    (tmp_path / "quire.weights" / "embedded").mkdir(parents=True)
    (tmp_path / "quire.weights" / "embedded" / "config.json").write_text("{}")
    assert locate.locate("embedded") == tmp_path / "quire.weights" / "embedded"


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "no spaces/here", "three/part/name", "lonely", ""])
def test_what_is_neither_folder_nor_hub_id_is_refused(name: str) -> None:
    path = name.startswith((".", "/"))
    why = (
        f"^there is no folder or file {name}$"
        if path
        else "neither 'embedded', nor a folder or file here, nor a hub id"
    )
    with pytest.raises(InvalidModel, match=why):
        locate.locate(name)


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InvalidModel, match=r"not a \.gguf file: name one, or the folder"):
        locate.locate(str(tmp_path / "config.json"))


@pytest.mark.parametrize("address", ["http://127.0.0.1:8000", "https://example.com/owner/name"])
def test_an_address_is_no_model(address: str) -> None:
    with pytest.raises(InvalidModel, match=r"is an address: .* `quire chat --url ADDRESS`"):
        locate.locate(address)


def test_a_hub_id_goes_to_the_hub_without_code_or_pickles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, str | None, str | None, list[str]]] = []

    def snapshot(name: str, *, revision: str | None, cache_dir: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision, cache_dir, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(locate.hub, "list_files", lambda *asked: Listing({"model.safetensors": 1}, online=True))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert locate.locate("owner/name", revision="main", cache="kept") == tmp_path
    [(name, revision, cache, patterns)] = asked
    assert (name, revision, cache) == ("owner/name", "main", "kept")
    assert "*.safetensors" in patterns
    assert not [p for p in patterns if p.endswith((".py", ".bin", ".pt"))]


def test_offline_a_model_that_is_not_cached_is_unavailable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(Unavailable, match="owner/name is not in the local hub cache"):
        locate.locate("owner/name")


def test_a_broken_line_is_unavailable_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(name: str, **options: object) -> str:
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(Unavailable, match="HF_HUB_OFFLINE is set"):
        locate.locate("owner/name")


def test_a_folder_without_a_model_is_distinguished_from_one_with(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidModel, match=r"there is no model in .*: it has neither config\.json nor a \.gguf file"):
        locate.check(tmp_path)
    for name in ("config.json", "hparams.json", "some.gguf"):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / name).write_text("{}")
        locate.check(folder)


def test_what_looks_like_a_path_is_named_as_one(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match=r"^there is no folder or file \./no/such$"):
        locate.locate("./no/such")
    (tmp_path / "config.json").touch()
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(InvalidModel, match=rf"that holds config\.json: its folder is {tmp_path}$"):
        locate.locate(str(tmp_path / "model.safetensors"))
