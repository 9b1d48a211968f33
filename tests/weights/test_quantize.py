"""`quire quantize`: the file is read as the model it was made of, by Quire, by the gguf package, and by llama.cpp."""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from quire.assembly.engine import choose_ops
from quire.assembly.text import build_text
from quire.cli import main
from quire.config import Settings
from quire.errors import InvalidModel
from quire.llm import LLM
from quire.models.registry import mtp_of
from quire.ops.gguf_blocks import BLOCKS
from quire.ops.gguf_encode import ENCODERS, encode
from quire.types import SamplingParams
from quire.weights.canary import answers
from quire.weights.file_types import FILE_TYPES
from quire.weights.gguf import KINDS, StoredStrings, read_gguf
from quire.weights.load import load_model
from quire.weights.locate import embedded
from quire.weights.quantize import Written, quantize
from tests import gguf_files
from tests.checkpoints import make
from tests.mtp import make_mtp
from tests.weights.test_gguf import SHAPES

CPU = torch.device("cpu")
TEXT = "Once upon a time there was a little dog who lived in a big house. It's 2024!"
ERRORS = {
    "Q8_0": 0.006,
    "Q6_K": 0.02,
    "Q5_K": 0.04,
    "Q5_0": 0.05,
    "Q5_1": 0.04,
    "Q4_K": 0.075,
    "Q4_1": 0.08,
    "Q4_0": 0.09,
}
"""Root mean square errors of normal numbers, relative to them."""

REFUSED = ("llama4_text-gqa", "gpt_oss-gqa", "gemma4_text-mixture")
REFUSED += ("gemma4_text-inputs-of-layers", "ministral3-gqa", "ministral3-mha-tied", "apertus-gqa", "apertus-mha-tied")
"""Shapes that are read from GGUF files and not written."""


def written(source: Path, path: Path, kind: str, *, vocabulary: bool = True, check: bool = True) -> Written:
    return quantize(source, path, kind, vocabulary=vocabulary, check=check, progress=lambda done, total: None)


@pytest.mark.parametrize("kind", ENCODERS)
def test_blocks_have_the_error_of_their_type(kind: str) -> None:
    block = next(each.block for each in KINDS.values() if each.name == kind)
    values = torch.randn(256, 256, generator=torch.Generator().manual_seed(1)) * 0.02
    values[0], values[1], values[2] = 0.0, 3.0, 1e-9
    raw = encode(kind, values.view(-1, block))
    ours = BLOCKS[kind](raw).values().view(256, 256)
    theirs = gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType[kind]).reshape(256, 256)
    assert np.array_equal(ours.numpy(), theirs)
    assert not ours[0].any() and (ours[1] - 3.0).abs().max() < 0.01
    assert ERRORS[kind] / 2 < float((ours - values)[3:].norm() / values[3:].norm()) < ERRORS[kind]


@pytest.mark.parametrize(
    ("kind", "near"),
    [
        pytest.param("f16", 1e-9, marks=pytest.mark.nightly),
        ("bf16", 1e-9),
        ("q8_0", 3e-4),
        pytest.param("q6_k", 2e-3, marks=pytest.mark.nightly),
        ("q4_k", 0.01),
        pytest.param("q4_0", 0.03, marks=pytest.mark.nightly),
    ],
)
def test_the_embedded_model_is_written_and_answers_alike(tmp_path: Path, kind: str, near: float) -> None:
    made = written(embedded(), tmp_path / "m.gguf", kind)
    assert made.quality is not None and made.quality.kl < near
    file = read_gguf(made.path)
    assert file.facts["general.file_type"] == FILE_TYPES[{"q4_k": "q4_k_m"}.get(kind, kind)]
    ours, theirs = (build_text(Settings.of(model=str(place))) for place in (made.path, embedded()))
    assert ours.tokenizer.encode(TEXT) == theirs.tokenizer.encode(TEXT)
    assert ours.template is not None and theirs.template is not None and ours.template.source == theirs.template.source
    assert ours.tokenizer.eos == theirs.tokenizer.eos
    read = gguf.GGUFReader(made.path)
    assert {each.name for each in read.tensors} == set(file.tensors)


def test_a_mixture_gives_llama_cpps_types(tmp_path: Path) -> None:
    written(embedded(), tmp_path / "m.gguf", "q4_k_m", check=False)
    kinds = {name: each.kind.name for name, each in read_gguf(tmp_path / "m.gguf").tensors.items()}
    assert kinds["token_embd.weight"] == "Q6_K", "the tied head"
    downs = [kinds[f"blk.{i}.ffn_down.weight"] for i in range(8)]
    assert downs == ["Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q6_K"]
    assert [kinds[f"blk.{i}.attn_v.weight"] for i in range(8)] == downs
    assert kinds["blk.0.attn_q.weight"] == "Q4_K" and kinds["blk.0.attn_norm.weight"] == "F32"


def facts_of(path: Path) -> dict[str, Any]:
    """A file's metadata, its arrays as lists."""
    facts = read_gguf(path).facts
    return {name: list(value) if isinstance(value, StoredStrings) else value for name, value in facts.items()}


def test_a_gguf_file_is_written_in_another_type_with_its_metadata(tmp_path: Path) -> None:
    written(embedded(), tmp_path / "a.gguf", "bf16", check=False)
    made = written(tmp_path / "a.gguf", tmp_path / "b.gguf", "q8_0")
    assert made.quality is not None and made.quality.kl < 3e-4
    first, second = (facts_of(tmp_path / name) for name in ("a.gguf", "b.gguf"))
    changed = {key for key in first if first[key] != second.get(key)}
    assert changed == {"general.file_type"} and set(first) == set(second)


def test_rows_that_are_no_multiple_of_256_get_smaller_blocks(tmp_path: Path) -> None:
    sizes = {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 32}
    make(tmp_path / "s", "llama-gqa-tied", **sizes, intermediate_size=160)
    written(tmp_path / "s", tmp_path / "m.gguf", "q4_k", vocabulary=False, check=False)
    kinds = {name: each.kind.name for name, each in read_gguf(tmp_path / "m.gguf").tensors.items()}
    assert kinds["blk.0.attn_q.weight"] == "Q5_0" and kinds["token_embd.weight"] == "Q8_0"


FEW = ("llama-mha-llama3-rope", "qwen3-gqa", "gemma2-gqa", "phi3-mqa-tied-long-factors", "qwen2_moe-gqa")


@pytest.mark.parametrize(
    "shape", [shape if shape in FEW else pytest.param(shape, marks=pytest.mark.nightly) for shape in SHAPES]
)
def test_every_family_is_written_exactly_or_refused_by_name(tmp_path: Path, shape: str) -> None:
    make(tmp_path / "s", shape, **SHAPES[shape])
    if shape in REFUSED:
        with pytest.raises(InvalidModel, match=r"ForCausalLM: .*(no name in GGUF that is known|not written)"):
            written(tmp_path / "s", tmp_path / "m.gguf", "f32", vocabulary=False)
        assert not (tmp_path / "m.gguf").exists()
        return
    made = written(tmp_path / "s", tmp_path / "m.gguf", "f32", vocabulary=False)
    assert made.quality is not None and made.quality.kl < 1e-9 and made.quality.agreement == 1.0


HYBRIDS = [
    shape for shape in SHAPES if shape.startswith(("granitemoe", "bamba", "nemotron_h", "qwen3_next", "qwen3_5"))
]
FEW_HYBRIDS = ("granitemoehybrid-mamba-experts", "nemotron_h-latent-experts", "qwen3_next-shared-keys")


@pytest.mark.parametrize(
    "shape", [shape if shape in FEW_HYBRIDS else pytest.param(shape, marks=pytest.mark.nightly) for shape in HYBRIDS]
)
def test_recurrent_layers_are_written_as_by_the_package_of_llama_cpp(tmp_path: Path, shape: str) -> None:
    """Names, shapes and numbers, and what the metadata says; Quire's writes some facts that its reader can derive."""
    model = make(tmp_path / "s", shape, **SHAPES[shape])
    gguf_files.write(tmp_path / "theirs.gguf", model)
    written(tmp_path / "s", tmp_path / "ours.gguf", "f32", vocabulary=False, check=False)
    ours, theirs = (read_gguf(tmp_path / f"{name}.gguf") for name in ("ours", "theirs"))
    assert ours.architecture == theirs.architecture
    held, wanted = (
        {each.name: np.array(each.data) for each in gguf.GGUFReader(file.path).tensors} for file in (ours, theirs)
    )
    assert held.keys() == wanted.keys()
    for name, numbers in wanted.items():
        assert held[name].shape == numbers.shape, name
        assert np.allclose(held[name], numbers, rtol=1e-6, atol=0), name
    said = {key: value for key, value in theirs.facts.items() if key.startswith(theirs.architecture)}
    # The tests' writer says it of every hybrid.
    said = {key: value for key, value in said.items() if value or not key.endswith("rope.scaling.finetuned")}
    unlike = {key: (value, ours.facts.get(key)) for key, value in said.items() if not same(value, ours.facts.get(key))}
    assert not unlike


def same(one: object, other: object) -> bool:
    return (
        math.isclose(one, other, rel_tol=1e-6) if isinstance(one, float) and isinstance(other, float) else one == other
    )


def test_a_quantized_hybrid_answers_alike_and_is_served(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "linear_value_head_dim": 64, "intermediate_size": 256}
    make(tmp_path / "s", "qwen3_5_text-shared-keys", **sizes)
    made = written(tmp_path / "s", tmp_path / "m.gguf", "q8_0", vocabulary=False)
    # Rounding moves the logits of random weights further than those of trained ones.
    assert made.quality is not None and made.quality.kl < 0.02
    written(made.path, tmp_path / "n.gguf", "q4_k_m", vocabulary=False, check=False)
    for path, kind in ((made.path, "Q8_0"), (tmp_path / "n.gguf", "Q5_K")):
        kinds = {name: each.kind.name for name, each in read_gguf(path).tensors.items()}
        assert kinds["blk.0.ssm_conv1d.weight"] == kinds["blk.0.ssm_a"] == "F32"
        assert kinds["blk.0.attn_qkv.weight"] == kind
    asked = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with LLM(str(made.path), skip_tokenizer_init=True, max_model_len=64, kv_cache_memory_bytes=1 << 24) as llm:
        assert len(llm.generate([[5, 9, 7]], asked, use_tqdm=False)[0].outputs[0].token_ids) == 8


def test_layers_that_draft_are_written_under_the_names_of_llama_cpp(tmp_path: Path) -> None:
    make_mtp(tmp_path / "drafting", "glm4_moe-groups")
    path = tmp_path / "made.gguf"
    written(tmp_path / "drafting", path, "f32", vocabulary=False)
    file = read_gguf(path)
    assert (file.get("block_count"), file.get("nextn_predict_layers")) == (3, 1)
    # llama.cpp's own names of everything but what repeats the model's embedding and head.
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GLM4_MOE, 3)
    theirs = load_file(tmp_path / "drafting" / "model.safetensors")
    repeated = ("embed_tokens.weight", "shared_head.head.weight")
    layer = [n for n in theirs if n.startswith("model.layers.2.") and ".experts." not in n and not n.endswith(repeated)]
    wanted = {names.get_name(n.replace("_bias", ".bias"), try_suffixes=(".weight", ".bias")) for n in layer}
    assert {n for n in file.tensors if n.startswith("blk.2.") and "_exps" not in n} == wanted
    written(path, tmp_path / "again.gguf", "bf16", vocabulary=False, check=False)
    assert mtp_of(load_model(tmp_path / "again.gguf", mtp=True)) is not None


def test_layers_that_draft_without_a_name_are_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for shape, layers, said in (
        ("ernie4_5_moe-gqa", 1, "12 tensors of a layer for multi-token prediction are not written: model.mtp_block.0"),
        ("qwen3_5_text-shared-keys", 2, "26 tensors of a layer for multi-token prediction are not written: mtp."),
    ):
        make_mtp(tmp_path / shape, shape, layers)
        written(tmp_path / shape, tmp_path / f"{shape}.gguf", "f32", vocabulary=False, check=False)
        assert said in caplog.text


def test_nothing_is_overwritten_or_left_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"mine")
    for name, said in (("m.gguf", "exists: remove it"), ("m.bin", r"must end with \.gguf")):
        with pytest.raises(InvalidModel, match=said):
            written(embedded(), tmp_path / name, "q8_0")
    assert path.read_bytes() == b"mine"
    with pytest.raises(InvalidModel, match=r"type 'q4_x' is not written \(known: .*Did you mean 'q4_0'"):
        written(embedded(), tmp_path / "n.gguf", "q4_x")

    def full(file: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        written(embedded(), tmp_path / "n.gguf", "q8_0")
    assert {each.name for each in tmp_path.iterdir()} == {"m.gguf"}


def test_the_command_says_what_was_written(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["quantize", "embedded", str(tmp_path / "m.gguf"), "--type", "Q8_0"])
    assert done.exit_code == 0, done.output
    first, second, third = done.stdout.splitlines()
    assert "7.58 MiB, from 14.01 MiB; tensors: 17 of F32, 57 of Q8_0" in first
    assert second.startswith("against the source: 9") and "next tokens stay the same, KL " in second
    assert third == f"serve it with: quire serve {tmp_path / 'm.gguf'}"


@pytest.mark.nightly
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("kind", "most"), [("q8_0", 0.005), ("q4_k", 0.03)])
def test_perplexity_of_the_embedded_model_stays(tmp_path: Path, kind: str, most: float, packed: bool) -> None:
    """Of texts that the model itself wrote, sampled at temperature 1: what it finds likely. packed: as a file is served
    by default, in bfloat16 with rows of 8 bits; else in float32."""
    model = load_model(embedded(), dtype="float32")
    texts, generator = [], torch.Generator().manual_seed(7)
    for _ in range(12):
        tokens = [0]
        while len(tokens) < 96:
            likely = answers(model, tokens, CPU)[-1].softmax(-1)
            tokens.append(int(torch.multinomial(likely, 1, generator=generator)))
        texts.append(tokens)
    written(embedded(), tmp_path / "m.gguf", kind, check=False)
    losses = []
    ops = choose_ops(CPU) if packed else None
    quantized = load_model(tmp_path / "m.gguf", dtype="auto" if packed else "float32", ops=ops)
    for each in (model, quantized):
        found = [
            torch.nn.functional.cross_entropy(answers(each, text, CPU)[:-1], torch.tensor(text[1:])) for text in texts
        ]
        losses.append(float(torch.stack(found).mean()))
    assert abs(np.exp(losses[1] - losses[0]) - 1) < most


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "near"), [("f16", 1e-6), ("q8_0", 1e-3), ("q6_k", 1e-3), ("q4_k", 2e-2), ("q4_0", 4e-2)]
)
def test_llama_cpp_answers_alike_on_the_same_file(tmp_path: Path, kind: str, near: float) -> None:
    """LLAMA_CPP_PYTHON names an interpreter that has llama-cpp-python. It rounds activations to 8 bits."""
    other = os.environ.get("LLAMA_CPP_PYTHON")
    if other is None:
        pytest.skip("LLAMA_CPP_PYTHON names no interpreter with llama-cpp-python")
    path = written(embedded(), tmp_path / "m.gguf", kind, check=False).path
    script = str(Path(__file__).parents[1] / "llama_cpp_logits.py")
    out = str(tmp_path / "logits.npy")
    said = subprocess.run([other, script, str(path), TEXT, out], capture_output=True, text=True, check=True).stdout
    tokens = list(build_text(Settings.of(model=str(path))).tokenizer.encode(TEXT))
    assert json.loads(said.splitlines()[-1]) == tokens
    ours = answers(load_model(path, dtype="float32"), tokens, CPU).double().log_softmax(-1)
    theirs = torch.from_numpy(np.load(out)).double().log_softmax(-1)
    assert float((ours.exp() * (ours - theirs)).sum(-1).mean()) < near
