"""Models of Ollama's store are read where they lie; what cannot be served is refused with what to type."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.errors import InvalidModel
from quire.weights.locate import locate
from quire.weights.ollama_store import models

DIGEST = "sha256:" + "ab" * 32


def pulled(
    store: Path, where: str = "registry.ollama.ai/library/tiny/latest", kinds: tuple[str, ...] = ("model",)
) -> Path:
    """A manifest with layers of these kinds, and its blob -> the blob."""
    blob = store / "blobs" / DIGEST.replace(":", "-")
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(b"GGUF")
    layers = [{"mediaType": f"application/vnd.ollama.image.{kind}", "digest": DIGEST, "size": 4} for kind in kinds]
    manifest = store / "manifests" / where
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
    return blob


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("where", "names"),
    [
        ("registry.ollama.ai/library/tiny/latest", ("tiny", "tiny:latest", "ollama.com/library/tiny")),
        ("registry.ollama.ai/library/qwen3/0.6b", ("qwen3:0.6b", "https://ollama.com/library/qwen3:0.6b")),
        ("registry.ollama.ai/me/mine/v2", ("ollama.com/me/mine:v2", "registry.ollama.ai/me/mine:v2")),
        ("hf.co/owner/name/Q4_K_M", ("hf.co/owner/name:Q4_K_M", "owner/name:Q4_K_M")),
    ],
)
def test_a_model_is_found_by_each_of_its_names(store: Path, where: str, names: tuple[str, ...]) -> None:
    blob = pulled(store, where)
    assert [locate(name) for name in names] == [blob] * len(names)
    assert [each.blob for each in models()] == [blob]


def test_parts_of_the_modelfile_that_are_not_applied_are_listed(store: Path) -> None:
    pulled(store, kinds=("model", "template", "license", "params", "projector"))
    assert [each.unused for each in models()] == [("template", "params", "projector")]


@pytest.mark.parametrize(
    ("kinds", "said"),
    [
        (("model", "adapter"), "tiny:latest in Ollama's store has a LoRA adapter: merge it"),
        (("model", "model"), "has 2 GGUF files, where one is read"),
        (("tensor",), "has 0 GGUF files, where one is read"),
    ],
)
def test_other_models_are_refused_by_name(store: Path, kinds: tuple[str, ...], said: str) -> None:
    pulled(store, kinds=kinds)
    with pytest.raises(InvalidModel, match=said):
        locate("tiny")
    assert not list(models())


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"layers": [1]}', "[" * 100_000])
def test_a_broken_manifest_is_refused(store: Path, text: str) -> None:
    pulled(store)
    (store / "manifests/registry.ollama.ai/library/tiny/latest").write_text(text)
    with pytest.raises(InvalidModel, match=r"is no manifest of Ollama: `ollama pull tiny:latest` writes it again"):
        locate("tiny")


def test_a_manifest_cannot_name_files_elsewhere(store: Path) -> None:
    pulled(store)
    layers = [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:../../../etc/passwd"}]
    (store / "manifests/registry.ollama.ai/library/tiny/latest").write_text(json.dumps({"layers": layers}))
    with pytest.raises(InvalidModel, match="names blobs outside"):
        locate("tiny")


def test_what_the_store_lacks_is_refused_with_what_to_type(store: Path) -> None:
    pulled(store, "registry.ollama.ai/library/tiny/1b").unlink()
    with pytest.raises(InvalidModel, match=r"its weights: `ollama pull tiny:1b` fetches them again"):
        locate("tiny:1b")
    with pytest.raises(InvalidModel, match=r"There it has the tags 1b: name one as tiny:TAG"):
        locate("tiny:2b")
    said = r"`ollama pull llama3.2:1b` puts it there; or find GGUF files of it at .*search=llama3.2 and name them"
    with pytest.raises(InvalidModel, match=said):
        locate("llama3.2:1b")
    with pytest.raises(InvalidModel, match="Did you mean 'embedded'"):
        locate("embeded")


def test_a_missing_file_is_told_with_its_neighbours(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (store / "models" / "other").mkdir(parents=True)
    (store / "models" / "other" / "a.gguf").touch()
    monkeypatch.chdir(store)
    with pytest.raises(InvalidModel, match=r"there is no file models/other/b.gguf: models/other has a.gguf"):
        locate("models/other/b.gguf")
    with pytest.raises(InvalidModel, match=r"there is no file b.gguf, and no GGUF file in \."):
        locate("b.gguf")
