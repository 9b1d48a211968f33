"""What `quire doctor` finds, and what it says is to be done."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from quire.cli import doctor, main
from quire.cli.doctor import Finding


def found(monkeypatch: pytest.MonkeyPatch, *findings: Finding) -> None:
    monkeypatch.setattr(doctor, "findings", lambda port: iter(findings))


def test_this_machine_is_described_as_a_table_and_as_json() -> None:
    shown = CliRunner().invoke(main, ["doctor", "--port", "0"])
    said = CliRunner().invoke(main, ["doctor", "--port", "0", "--json"])
    rows = json.loads(said.output)
    names = [row["name"] for row in rows]
    assert names[:2] == ["quire", "torch"] and {"processor", "memory", "models", "port", "extras"} <= {*names}
    assert torch.__version__ in rows[1]["says"]
    for row in rows:
        assert row["name"] in shown.output and (row["verdict"] == "ok" or row["mend"])


@pytest.mark.parametrize("port", ["-1", "65536", "http"])
def test_a_port_that_is_none_is_refused(port: str) -> None:
    done = CliRunner().invoke(main, ["doctor", "--port", port])
    assert done.exit_code == 2
    assert "Invalid value for '--port'" in done.output


@pytest.mark.parametrize(("verdict", "code"), [("ok", 0), ("slow", 0), ("missing", 1)])
def test_only_what_is_missing_makes_it_fail(
    verdict: doctor.Verdict, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found(monkeypatch, Finding("a", "ok", "[b]"), Finding("c", verdict, "d", "Do e."))
    done = CliRunner().invoke(main, ["doctor"])
    assert done.exit_code == code
    assert [line.split() for line in done.output.splitlines()] == [
        ["a", "ok", "[b]"],
        ["c", verdict, "d"],
        ["Do", "e."],
    ]


def test_a_gpu_needs_memory_a_capability_and_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [("new", 9, 70, 80), ("old", 7, 70, 80), ("full", 9, 10, 80)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
    about = [SimpleNamespace(name=name, major=major, minor=0) for name, major, *_ in cards]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: about[i])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i: tuple(each << 30 for each in cards[i][2:]))
    monkeypatch.setattr(doctor, "compiler", lambda: Finding("kernels", "ok", "gcc"))
    said = {each.name: each for each in doctor.gpus()}
    assert [each.verdict for each in said.values()] == ["ok", "missing", "slow", "ok"]
    assert said["gpu 0"].says == "new, compute capability 9.0, 70.00 GiB of 80.00 GiB free"
    assert "--device cpu" in said["gpu 1"].mend


@pytest.mark.parametrize(
    ("triton", "cc", "there", "verdict"),
    [
        (False, "", (), "missing"),
        (True, "", (), "missing"),
        (True, "", ("gcc",), "ok"),
        (True, "mine", ("mine",), "ok"),
    ],
)
def test_kernels_need_triton_and_a_compiler(
    triton: bool, cc: str, there: tuple[str, ...], verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", cc)
    monkeypatch.setattr(doctor, "find_spec", lambda name: object() if triton else None)
    monkeypatch.setattr(doctor, "version", lambda name: "3")
    one = doctor.compiler(lambda name: f"/bin/{name}" if name in there else None)
    assert one.verdict == verdict and all(f"/bin/{name}" in one.says for name in there)


def test_a_cuda_driver_without_cuda_in_torch_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    for driver, verdict in ((None, "ok"), ("/bin/nvidia-smi", "slow")):
        monkeypatch.setattr(doctor.shutil, "which", lambda name, driver=driver: driver)
        assert doctor.installed_torch().verdict == verdict


def test_caches_are_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_CACHE", "HF_HOME", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    assert doctor.caches()["kernel cache"] == Path.home() / ".triton/cache"
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert doctor.caches()["models"] == tmp_path / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "other"))
    assert doctor.caches()["models"] == tmp_path / "other"


def test_a_folder_that_is_not_there_yet_is_judged_by_the_one_it_will_be_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "a" / "b"
    assert doctor.disk("models", place).verdict == "ok"
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1 << 20, total=1 << 30))
    assert doctor.disk("models", place).verdict == "slow"
    monkeypatch.setattr(doctor.os, "access", lambda folder, how: folder != tmp_path)
    assert "HF_HOME" in doctor.disk("models", place).mend and "TRITON_CACHE_DIR" in doctor.disk("kernels", place).mend
    assert not place.exists()


def test_a_file_system_that_holds_nothing_is_not_writable() -> None:
    found = doctor.disk("models", Path("/proc/nohome/hub"))
    assert (found.verdict, found.mend) == ("missing", "Set HF_HOME to a folder that is.")
    assert "/proc is not writable" in found.says


def test_a_port_in_use_is_said() -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        assert doctor.listening(busy.getsockname()[1]).verdict == "slow"


def test_memory_limits_and_processors_that_are_small_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "host_bytes", lambda: 1 << 30)
    monkeypatch.setattr(doctor, "can_pack", lambda dtype, device: False)
    monkeypatch.setattr("resource.getrlimit", lambda what: (256, 1024))
    monkeypatch.setattr(doctor.platform, "machine", lambda: "riscv64")
    checks = (doctor.memory, doctor.processor, doctor.descriptors, doctor.python)
    assert [check().verdict for check in checks] == ["slow"] * 4


def test_extras_that_are_not_installed_are_named_with_their_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: None if name == "grpc" else object())
    one = doctor.extras()
    assert "installed: hf, onnx, otel, ray, report, vision" in one.says
    assert "(pip install 'quire-llm[grpc]', in a clone pip install -e '.[grpc]', or" in one.says
    assert one.says.endswith(":\n  grpc: --executor grpc")
