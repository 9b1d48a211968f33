"""JSON objects in files: what is damaged counts as absent, and what is written is whole or not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.json_files import read_object, replace_object


def test_an_object_is_read_as_written(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "kept.json"
    replace_object(path, {"ä": [1, None]})
    assert read_object(path) == {"ä": [1, None]}
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b'{"a": "\xff"}'], ids=["empty", "cut", "list", "bytes"])
def test_a_file_that_holds_no_object_counts_as_absent(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "kept.json"
    assert read_object(path) == {}
    path.write_bytes(data)
    assert read_object(path) == {}


def test_what_cannot_be_written_whole_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kept.json"
    replace_object(path, {"a": 1})

    def full(self: Path, data: str, encoding: str) -> None:
        with self.open("w", encoding=encoding) as file:
            file.write(data[: len(data) // 2])
        raise OSError("no space")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="no space"):
        replace_object(path, {"a": 2})
    assert json.loads(path.read_text("utf-8")) == {"a": 1}
