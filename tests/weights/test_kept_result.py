"""What has been found of a model is kept until a file of it changes, or the code that found it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire.weights import kept_result as module
from quire.weights.canary import Canary
from quire.weights.gguf_write import write_gguf
from quire.weights.kept_result import SAMPLE, KeptResult, files_of, identity, kept_result


def test_a_result_is_found_by_those_of_the_same_version(tmp_path: Path) -> None:
    KeptResult(tmp_path / "a" / "b.json", "1").write({"kl": 0.25})
    assert KeptResult(tmp_path / "a" / "b.json", "1").read() == {"kl": 0.25}
    assert KeptResult(tmp_path / "a" / "b.json", "2").read() is None
    assert KeptResult(tmp_path / "a" / "c.json", "1").read() is None
    assert [each.name for each in (tmp_path / "a").iterdir()] == ["b.json"]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"version": "1"}', '{"version": "1", "found": 3}', "\udcff"])
def test_a_damaged_result_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text, "utf-8", "surrogateescape")
    assert KeptResult(tmp_path / "a.json", "1").read() is None


def test_where_nothing_can_be_written_nothing_is_kept(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = KeptResult(tmp_path / "file" / "a.json", "1")
    result.write({"kl": 1.0})
    assert result.read() is None


@pytest.mark.parametrize("error", [PermissionError("a file of another user"), RuntimeError("no home directory")])
def test_where_it_cannot_be_known_what_is_kept_a_model_is_judged_anew(error: Exception) -> None:
    def keep() -> KeptResult:
        raise error

    assert Canary(keep=keep).known is None


def test_a_change_of_a_models_files_is_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    place = tmp_path / "model"
    place.mkdir()
    (place / "config.json").write_text("{}")
    weights = place / "model.safetensors"
    weights.write_bytes(bytes(1 << 20))
    os.utime(weights, (5, 5))

    def version() -> str:
        made = kept_result("canary", [place], {"dtype": "float32"})
        assert made.path.parent == tmp_path / "cache" / "quire" / "canary"
        return made.version

    seen = [version()]
    assert version() == seen[0]
    os.utime(weights, (6, 6))
    seen.append(version())
    data = bytearray(1 << 20)
    data[-1] = data[SAMPLE] = 1
    weights.write_bytes(data)
    os.utime(weights, (5, 5))
    seen.append(version())
    (place / "tokenizer.json").touch()
    seen.append(version())
    monkeypatch.setattr(module, "code_version", lambda: ["another"])
    seen.append(version())
    assert len({*seen}) == 5


def test_results_of_other_options_are_kept_beside_each_other(tmp_path: Path) -> None:
    paths = {kept_result("canary", [tmp_path], {"dtype": name}).path for name in ("float32", "bfloat16")}
    assert len(paths | {kept_result("canary", [tmp_path.parent], {"dtype": "float32"}).path}) == 3


def test_a_gguf_file_is_all_its_parts(tmp_path: Path) -> None:
    for i in range(2):
        facts = {"general.architecture": "llama", "split.no": i, "split.count": 2, "split.tensors.count": 0}
        write_gguf(tmp_path / f"m-0000{i + 1}-of-00002.gguf", facts, [], progress=lambda done, total: None)
    (tmp_path / "other.txt").touch()
    # Parts without tensors hold nothing.
    assert [each.name for each in files_of(tmp_path / "m-00001-of-00002.gguf")] == ["m-00001-of-00002.gguf"]
    assert [each.name for each in files_of(tmp_path / "other.txt")] == ["other.txt"]
    assert len(files_of(tmp_path)) == 3


def test_an_empty_file_has_an_identity(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    assert identity(tmp_path / "a")[:2] == ["a", 0]
