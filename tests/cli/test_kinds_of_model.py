"""Every command that takes a model, with every kind of model: right numbers, or one line that says what to use."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from quire.assembly.engine import build_engine
from quire.cli import main
from quire.cli.check import checked, families, family
from quire.config import Settings
from tests import encoders, vision

KINDS = {
    "embedder": ("bert", 0),
    "windows": ("modernbert", 0),
    "reranker": ("bert", 1),
    "classifier": ("qwen3", 3),
    "two ways": ("embeddinggemma", 0),
    "gemma3": None,
    "qwen2.5-vl": None,
    "qwen3-vl": None,
}
POOLING = [name for name, made in KINDS.items() if made]
READING = [name for name, made in KINDS.items() if not made]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("models")
    for name, made in KINDS.items():
        (place / name).mkdir()
        if made is None:
            vision.make(place / name, name)
        else:
            encoders.write(place / name, made[0], labels=made[1])
    return {name: place / name for name in KINDS}


def run(*args: object, typed: str | None = None) -> Result:
    """A command, which may not end in a traceback."""
    found = CliRunner().invoke(main, [str(arg) for arg in args], input=typed)
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exc_info
    return found


def refusal(found: Result) -> str:
    """The one line of a refusal."""
    [line] = [line for line in found.stderr.splitlines() if line.startswith("Error: ")]
    assert found.exit_code == 2
    return line


def pairs(found: Result) -> dict[str, str]:
    assert found.exit_code == 0, found.output
    lines = [re.split(r"  +", line.strip(), maxsplit=1) for line in found.stdout.splitlines()]
    return {line[0]: line[1] for line in lines}


@pytest.mark.parametrize("name", KINDS)
def test_a_model_is_described_as_what_it_is_served_for(name: str, models: dict[str, Path]) -> None:
    found = pairs(run("inspect", models[name]))
    assert found["loads"] == "every tensor has its place"
    assert ("sampled by default" in found) == ("KV a token, fp8" in found) == (name in READING)
    gives = {
        "embedder": "vectors, by cls pooling, of length 1; no text",
        "windows": "vectors, by cls pooling, of length 1; no text",
        "reranker": "1 classes (LABEL_0), sigmoid; no text",
        "classifier": "3 classes (LABEL_0, LABEL_1, LABEL_2), softmax; no text",
        "two ways": "vectors, by mean pooling, of length 1; no text",
    }
    assert found.get("gives") == gives.get(name)
    if name == "embedder":
        assert found["KV a token"] == "256 bytes (float32), of one layer, while its prompt is computed"


@pytest.mark.parametrize("length", [None, 40])
@pytest.mark.parametrize("rows", [3, 256])
@pytest.mark.parametrize("name", KINDS)
def test_as_many_blocks_are_planned_as_are_allocated(
    name: str, rows: int, length: int | None, models: dict[str, Path]
) -> None:
    options = {"max_num_seqs": rows, **({} if length is None else {"max_model_len": length})}
    flags = [text for option, value in options.items() for text in (f"--{option.replace('_', '-')}", value)]
    said = pairs(run("plan", models[name], "--memory", "4GiB", *flags))["KV pool"]
    engine = build_engine(Settings.of(model=str(models[name]), **options))
    engine.close()
    assert said.split(": ")[1].startswith(f"{engine.description.num_blocks:,} blocks")


def test_the_longest_text_of_sentence_transformers_is_planned_for(tmp_path: Path) -> None:
    encoders.write(tmp_path, "bert")
    encoders.sentence_transformers(tmp_path, max_seq_length=20, prompts={"query": "what is "})
    assert "for 21 tokens" in pairs(run("plan", tmp_path))["KV a sequence"]
    found = pairs(run("inspect", tmp_path))
    assert (found["longest text"], found["prompts"]) == ("20 tokens", "query")


@pytest.mark.parametrize("mode", [(), ("--deterministic",)])
@pytest.mark.parametrize("name", KINDS)
def test_a_model_of_any_kind_is_checked(name: str, mode: tuple[str, ...], models: dict[str, Path]) -> None:
    found = run("check", models[name], *mode)
    assert found.exit_code == 0, found.output
    assert "1 of 1 answered" in found.stdout


@pytest.mark.parametrize(
    "architecture", [name for name in families() if any(part in name for part in ("Bert", "Robert", "VL", "nHFor"))]
)
def test_tiny_models_of_families_that_pool_or_read_images_are_checked(architecture: str) -> None:
    assert not checked(architecture, family(Settings.of(), architecture)).error


@pytest.mark.parametrize("name", READING)
def test_layers_of_text_models_that_read_images_are_compared(name: str, models: dict[str, Path]) -> None:
    assert "no layer differs" in run("diff", models[name]).stdout


REFUSED = {
    "diff": (["diff", "MODEL"], "`quire diff` is for models that generate text.*`quire check`"),
    "verify": (["verify", "MODEL"], "`quire verify` is for models that generate text.*`quire check`"),
    "calibrate": (["calibrate", "MODEL", "--output", "OUT"], "`quire calibrate` is for models that generate text"),
    "latency": (["bench", "latency", "MODEL"], "`quire bench latency` is for models that generate text"),
    "throughput": (["bench", "throughput", "MODEL"], "`quire bench throughput` is for models that generate text"),
    "run": (["run", "MODEL", "hello"], "generates no text: use /"),
    "generate": (["generate", "hello", "--model", "MODEL"], "generates no text: use /"),
    "chat": (["chat", "MODEL"], "generates no text: use /"),
    "quantize": (["quantize", "MODEL", "OUT", "--type", "Q8_0"], "has no name in GGUF.*--quantization"),
    "export": (["export-onnx", "MODEL", "OUT"], "export-onnx does not support.*--executor local"),
}


@pytest.mark.parametrize(
    ("name", "command"),
    [(name, command) for name in KINDS for command in REFUSED if name in POOLING or command in ("quantize", "export")],
)
def test_what_a_kind_of_model_has_not_is_refused_in_one_line(
    name: str, command: str, models: dict[str, Path], tmp_path: Path
) -> None:
    args, said = REFUSED[command]
    found = run(*({"MODEL": models[name], "OUT": tmp_path / "out.gguf"}.get(arg, arg) for arg in args), typed="hello\n")
    assert re.search(said, refusal(found))
    assert not (tmp_path / "out.gguf").exists()
