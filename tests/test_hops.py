"""How many files a change touches: the worked examples of CONTRIBUTING.md, compared with the source."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
CALL = re.compile(r"SamplingParams\([^()]*\)")
"""A call with the parameter uses it; it need not change when another one is added."""


def mentions(name: str) -> set[str]:
    """Files of the package and of the contract, generated ones apart, in which the parameter is named."""
    word = re.compile(rf"\b{name}\b|--{name.replace('_', '-')}\b")
    paths = [*(ROOT / "src" / "quire").rglob("*.py"), *(ROOT / "proto").rglob("*.proto")]
    return {
        path.relative_to(ROOT).as_posix()
        for path in paths
        if "_pb2" not in path.name and word.search(CALL.sub("", path.read_text(encoding="utf-8")))
    }


def listed(heading: str) -> set[str]:
    """The files in the table below a heading of CONTRIBUTING.md."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.split(f"## {heading}\n")[1].split("\n## ")[0]
    return set(re.findall(r"^\| `([\w/.]+)` \|", section, re.MULTILINE))


def test_a_sampling_parameter_is_in_the_files_that_contributing_lists() -> None:
    files = listed("A new sampling parameter")
    tests = {file for file in files if file.startswith("tests/")}
    assert mentions("min_p") == files - tests
    assert len(tests) == 1
    assert all(re.search(r"\bmin_p\b", (ROOT / file).read_text(encoding="utf-8")) for file in tests)


def test_a_sampling_parameter_takes_six_files() -> None:
    assert len(listed("A new sampling parameter")) <= 6


def test_an_architecture_is_in_one_file_and_its_defaults_and_in_the_shapes_that_test_it() -> None:
    files = listed("A new architecture")
    names_in_files = "src/quire/weights/gguf_names.py"
    own = {"src/quire/models/olmo.py", "src/quire/models/defaults.py"}
    assert (mentions("Olmo2") | mentions("olmo2")) - {names_in_files} == own
    assert files == own | {"tests/checkpoints.py"}
    assert "olmo2-" in (ROOT / "tests/checkpoints.py").read_text(encoding="utf-8")


def test_a_known_layout_takes_one_file_and_a_new_one_three() -> None:
    files = listed("A quantization format")
    option = "src/quire/config/settings.py"
    assert mentions("fbgemm_fp8") - {option} == {"src/quire/weights/schemes.py"}
    assert mentions("IntegerScheme") == {file for file in files if file.startswith("src/")}
    assert len(files) == 3
    assert all((ROOT / file).is_file() for file in files)


def named(text: str) -> set[str]:
    """Files of the package that contain a text."""
    paths = (ROOT / "src" / "quire").rglob("*.py")
    return {path.relative_to(ROOT).as_posix() for path in paths if text in path.read_text(encoding="utf-8")}


def test_a_metric_takes_one_file() -> None:
    engine, frontend = sorted(listed("A new metric"))
    assert named("quire:queue_tokens") == {engine}
    assert named("vllm:e2e_request_latency_seconds") == {frontend}
