"""`quire executor` and `quire export-onnx`: what they refuse, and in what words."""

from __future__ import annotations

import errno
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from quire.cli import main


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["executor", "--listen", "50051"], "--listen must look like 127.0.0.1:50051, not 50051"),
        (["executor", "--listen", "127.0.0.1:99999"], "--listen must look like"),
        (["executor", "--tls-cert", "here.pem"], "TLS needs both --tls-cert and --tls-key"),
        (["executor", "--tls-cert", "no.pem", "--tls-key", "no.pem"], "tls_cert: no.pem cannot be read"),
        (["executor", "--executor", "onnx"], "embedded has no graph"),
        (
            ["generate", "--executor", "grpc", "--executor-address", "127.0.0.1:1", "--deterministic"],
            "--deterministic is an option of the process that runs the steps: give it to `quire executor`",
        ),
        (["generate", "--executor", "rpc"], "must be one of auto, local, grpc, onnx, hf"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(args: list[str], complaint: str) -> None:
    said = CliRunner().invoke(main, args)
    assert said.exit_code == 2 and complaint in said.output


def test_a_missing_package_is_named_with_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    monkeypatch.delitem(sys.modules, "quire.weights.onnx_export", raising=False)
    said = CliRunner().invoke(main, ["export-onnx", "embedded", str(tmp_path)])
    assert said.exit_code == 2 and "(onnx): pip install 'quire-llm[onnx]'" in said.output


def test_what_export_writes_generates(tmp_path: Path) -> None:
    runner = CliRunner()
    said = runner.invoke(main, ["export-onnx", "embedded", str(tmp_path)])
    assert said.exit_code == 0 and f"quire serve {tmp_path} --executor onnx" in said.output
    outputs = [
        runner.invoke(main, ["generate", "Once upon a time", "--max-tokens", "12", "--temperature", "0", *flags]).output
        for flags in (["--model", str(tmp_path), "--executor", "onnx"], ["--dtype", "float32"])
    ]
    assert outputs[0] == outputs[1] and len(outputs[0]) > 20


def test_an_export_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a full disk half of the weights were left, and a model of the same name was overwritten."""

    def full(*args: object) -> None:
        Path(str(args[1])).write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "body.onnx").write_text("whole")
    monkeypatch.setattr("quire.weights.onnx_export.save", full)
    for folder in (kept, tmp_path / "new"):
        said = CliRunner().invoke(main, ["export-onnx", "embedded", str(folder)])
        assert said.exit_code == 1 and "No space left on device" in said.output
    assert [(file.name, file.read_text()) for file in kept.iterdir()] == [("body.onnx", "whole")]
    assert [file.name for file in tmp_path.iterdir()] == ["kept"]
