"""What a GGUF file's metadata says of rope, sampling, pooling and tokens is followed, refused by name or logged."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from quire.assembly.request_defaults import NOT_READ, recommended
from quire.assembly.text import build_text
from quire.cli import main
from quire.config import Settings
from quire.errors import InvalidModel
from quire.tokenization.vocabularies import ends_of, from_gguf
from quire.weights.gguf import Gguf
from quire.weights.gguf_model import gguf_config, rope_fields
from quire.weights.gguf_write import write_gguf
from quire.weights.pooling import read_pooler
from tests.tokenization.vocabulary import byte_level, save

LLAMA = {"general.architecture": "llama", "llama.block_count": 1}
S = "rope.scaling"


def facts(**more: Any) -> dict[str, Any]:
    return {**LLAMA, **{f"llama.{key}": value for key, value in more.items()}}


def file(folder: Path, named: dict[str, Any]) -> Path:
    path = folder / "model.gguf"
    write_gguf(path, named, [], progress=lambda done, total: None)
    return path


ROPES: list[tuple[dict[str, Any], Any]] = [
    ({}, None),
    ({f"{S}.type": "none", f"{S}.factor": 4.0}, None),
    ({f"{S}.type": "linear"}, None),
    ({f"{S}.type": "linear", f"{S}.factor": 1.0}, None),
    ({f"{S}.type": "linear", f"{S}.factor": 4.0}, ("linear", 4.0)),
    ({f"{S}.factor": 4.0}, ("linear", 4.0)),  # llama.cpp's default of the type
    ({"rope.scale_linear": 4.0}, ("linear", 4.0)),  # its name of 2023
    ({"rope.scale_linear": 2.0, f"{S}.factor": 4.0}, ("linear", 4.0)),
    ({"rope.scale_linear": 0.0}, None),
    ({f"{S}.type": "yarn", f"{S}.factor": 4.0}, ("yarn", 4.0)),
]


@pytest.mark.parametrize(("given", "means"), ROPES)
def test_a_factor_of_positions_is_followed_under_each_of_its_names(given: dict[str, Any], means: Any) -> None:
    found = rope_fields(Gguf(Path("x.gguf"), facts(**given), {}))
    assert (found and (found["rope_type"], found["factor"])) == means


def test_sampling_parameters_of_a_file_are_those_of_requests_that_do_not_say(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "penalty_repeat": 1.1, "mirostat": 0}
    path = file(tmp_path, LLAMA | {f"general.sampling.{name}": value for name, value in given.items()})
    wanted = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.1}
    with caplog.at_level(logging.WARNING):
        assert recommended(path) == recommended(tmp_path) == wanted
    assert not caplog.messages
    (tmp_path / "generation_config.json").write_text('{"top_k": 5}')
    assert recommended(tmp_path) == {**wanted, "top_k": 5}


@pytest.mark.parametrize(("name", "value"), [("mirostat", 1), ("xtc_probability", 0.5), ("sequence", "top_k;temp")])
def test_sampling_parameters_without_effect_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, value: Any
) -> None:
    path = file(tmp_path, LLAMA | {f"general.sampling.{name}": value, "general.sampling.xtc_threshold": 0.1})
    with caplog.at_level(logging.WARNING):
        assert recommended(path) == {}
    assert caplog.messages == [f"model.gguf: without effect here: general.sampling.{name}"]


def test_sampling_parameters_that_no_request_may_have_are_refused(tmp_path: Path) -> None:
    path = file(tmp_path, LLAMA | {"general.sampling.temp": -1.0})
    with pytest.raises(InvalidModel, match=r"^model\.gguf: general\.sampling: temperature must be between"):
        recommended(path)


@pytest.mark.parametrize("name", NOT_READ)
def test_fields_of_generation_config_without_effect_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    off = NOT_READ[name]
    for value in (None, *off, "on"):
        save(tmp_path, byte_level(), generation_config={name: value, "temperature": 0.5})
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert recommended(tmp_path) == {"temperature": 0.5}
        said = f"generation_config.json: without effect here: {name}"
        assert caplog.messages == ([said] if value == "on" else [])


@pytest.mark.parametrize(("kind", "pooling"), [(None, "mean"), (0, "mean"), (1, "mean"), (2, "cls"), (3, "last")])
def test_vectors_are_made_of_what_a_file_says(tmp_path: Path, kind: int | None, pooling: str) -> None:
    """Qwen3-Embedding's are the last token's."""
    path = file(tmp_path, facts(pooling_type=kind) if kind is not None else LLAMA)
    for place in (path, tmp_path):
        found = read_pooler(place)
        assert (found.pooling, found.generates) == (pooling, True)


def test_rerankers_and_models_whose_tokens_see_later_ones_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match=r"model\.gguf is a reranker, .* name the checkpoint's folder"):
        read_pooler(file(tmp_path, facts(pooling_type=4)))
    with pytest.raises(InvalidModel, match=r"x\.gguf is a model whose tokens see later ones"):
        gguf_config(Gguf(Path("x.gguf"), facts(**{"attention.causal": False}), {}))


def test_tokens_beyond_the_vocabulary_end_nothing() -> None:
    named = {"tokens": ["a", "b"], "eos_token_id": 1, "eot_token_id": 9, "eom_token_id": -1}
    assert ends_of({f"tokenizer.ggml.{key}": value for key, value in named.items()}) == [1]


@pytest.mark.parametrize(("merges", "said"), [([], "has no merges"), (["ab"], "is damaged: failed to extract")])
def test_a_tokenizer_without_merges_or_with_odd_ones_is_refused_in_a_line(merges: list[str], said: str) -> None:
    """Without merges every text was a token for each character, and answers were nonsense."""
    named = {"model": "gpt2", "tokens": ["a", "b"], "merges": merges}
    with pytest.raises(InvalidModel, match=f"^the file's tokenizer {said}") as caught:
        from_gguf({f"tokenizer.ggml.{key}": value for key, value in named.items()})
    assert "\n" not in str(caught.value)


def test_a_model_that_was_quantized_is_sampled_as_before(tmp_path: Path) -> None:

    path = tmp_path / "model.gguf"
    done = CliRunner().invoke(main, ["quantize", "embedded", str(path), "--type", "q8_0", "--no-check"])
    assert done.exit_code == 0, done.output
    assert build_text(Settings.of(model=str(path))).defaults == build_text(Settings.of()).defaults
