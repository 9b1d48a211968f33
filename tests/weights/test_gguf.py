"""GGUF files of the gguf package's making: the same tokens as the model they were made of, and clear refusals."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from quire.errors import InvalidModel
from quire.layers.basic import StoredEmbedding
from quire.layers.quantization.base import Matrix, MatrixPart, Plain
from quire.layers.quantization.gguf import GgufFormat, GgufStorage, StoredBlocks
from quire.models.registry import read_spec
from quire.models.spec import MOST_LAYERS
from quire.ops.gguf_blocks import BLOCKS, PACKED
from quire.ops.operands import IntegerMatrix, MixedMatrix, Routing
from quire.ops.quantized import dequantize
from quire.ops.reference import ReferenceOps
from quire.ops.triton.ops import TritonOps
from quire.weights.canary import Canary, answers
from quire.weights.entries import file_entry
from quire.weights.gguf import KINDS, GgufTensorInfo, read_gguf
from quire.weights.gguf_model import block_entry, gguf_config, gguf_entries
from quire.weights.gguf_write import NewTensor, write_gguf
from quire.weights.load import load_model
from tests.checkpoints import GPT_OSS_ROPE, greedy, make
from tests.gguf_files import HALVES, TYPES, stored, write
from tests.models.feeding import Feeder
from tests.weights.test_load import answer

PHIMOE: dict[str, Any] = {
    "router_jitter_noise": 0.01,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 400.0,
        "short_factor": [1.0, 1.1, 1.6, 2.5],
        "long_factor": [1.0, 2.0, 4.0, 8.0],
        "original_max_position_embeddings": 512,
        "attention_factor": 1.2,
        "short_mscale": 1.2,
        "long_mscale": 1.2,
    },
}
LLAMA4: dict[str, Any] = {
    "num_hidden_layers": 6,
    "no_rope_layer_interval": 4,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 8192,
    "floor_scale": 8192,
    "attn_scale": 0.1,
}
"""What their files do not say."""

SHAPES: dict[str, dict[str, Any]] = {
    "llama-gqa-tied": {},
    "llama-mha-llama3-rope": {},
    "llama-linear-rope": {},
    "mistral-window": {},
    "mixtral-three-of-six": {},
    "qwen2-gqa": {},
    "qwen3-gqa": {},
    "qwen3-mha-biased": {"attention_bias": False},
    "qwen3_moe-gqa": {},
    "gemma2-gqa": {"query_pre_attn_scalar": 10},
    "gemma3_text-untied-pattern-of-six": {
        "query_pre_attn_scalar": 16,
        "attention_bias": False,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "gpt2-narrow-mlp-untied": {},
    "gpt2-odd-heads": {},
    "gemma-mqa": {},
    "phi3-gqa-partly-rotated": {},
    "phi3-mqa-tied-long-factors": {},
    "olmo2-gqa": {},
    "olmo3-gqa-yarn": {},
    "olmo3-global-first": {},
    "granite-gqa": {},
    "glm4-gqa": {},
    "smollm3-gqa": {},
    "cohere-gqa": {},
    "cohere2-gqa": {},
    "seed_oss-gqa": {},
    "exaone4-gqa": {},
    "exaone4-mqa-all-global": {},
    "nemotron-gqa": {},
    "arcee-gqa": {},
    "starcoder2-gqa": {},
    "hunyuan_v1_dense-gqa": {},
    "ernie4_5-gqa": {},
    "qwen2_moe-gqa": {"norm_topk_prob": False, "mlp_only_layers": [], "decoder_sparse_step": 1},
    "olmoe-mha": {"norm_topk_prob": False},
    "granitemoe-gqa": {},
    "granitemoeshared-gqa": {},
    "glm4_moe-gqa": {},
    "ernie4_5_moe-gqa": {},
    "minimax_m2-gqa": {},
    "phimoe-gqa": PHIMOE,
    "llama4_text-gqa": LLAMA4,
    "gemma4_text-mixture": {},
    "gemma4_text-inputs-of-layers": {},
    "ministral3-gqa": {},
    "ministral3-mha-tied": {},
    "apertus-gqa": {},
    "apertus-mha-tied": {},
    "glm-gqa": {},
    "cohere-query-norms": {},
    "granitemoehybrid-mamba": {},
    "granitemoehybrid-mamba-experts": {"position_embedding_type": None},
    "granitemoehybrid-mamba-tied": {},
    "bamba-gqa": {},
    "nemotron_h-gqa": {},
    "nemotron_h-attention-last": {},
    "nemotron_h-experts": {"n_group": 1, "topk_group": 1},
    "nemotron_h-latent-experts": {"layers_block_type": ["linear_attention", "full_attention", "moe"]},
    "qwen3_next-shared-keys": {},
    "qwen3_next-one-key-head": {"mlp_only_layers": [], "norm_topk_prob": True},
    "qwen3_5_text-shared-keys": {},
    "qwen3_5_text-tied-by-interval": {},
    "qwen3_5_text-biased-one-key-head": {},
    "qwen3_5_moe_text-shared-keys": {"norm_topk_prob": True},
    "gpt_oss-gqa": {"rope_parameters": {**GPT_OSS_ROPE, "beta_fast": 32.0, "beta_slow": 1.0}},
}
PROMPTS = [[7 * i % 199 for i in range(45)], [3, 5, 8]]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_converted_model_says_the_same(tmp_path: Path, shape: str) -> None:
    model = make(tmp_path / "source", shape, **SHAPES[shape])
    write(tmp_path / "model.gguf", model)
    ours = load_model(tmp_path / "model.gguf", dtype="float32")
    with torch.no_grad():
        wanted = model(torch.tensor([PROMPTS[0]])).logits[0]
    assert (Feeder(ours, page_size=4).step([(0, PROMPTS[0])])[0] - wanted).abs().max() < 1e-4
    found = Feeder(ours, page_size=16).greedy(PROMPTS, 8, chunked=False)
    assert found == [greedy(model, prompt, 8, said) for prompt, said in zip(PROMPTS, found, strict=True)]


def test_rows_of_a_recurrent_layer_that_are_sorted_by_kind_are_sorted_by_head_in_their_blocks_too(
    tmp_path: Path,
) -> None:
    model = make(tmp_path / "source", "qwen3_next-shared-keys", hidden_size=64)
    write(tmp_path / "model.gguf", model, "Q8_0")
    entry = gguf_entries(read_gguf(tmp_path / "model.gguf"))["model.layers.0.linear_attn.in_proj_qkvz.weight"]
    wanted = model.state_dict()["model.layers.0.linear_attn.in_proj_qkvz.weight"]
    assert (entry.read(()) - wanted).abs().max() < 0.02
    assert entry.stored is not None
    assert entry.stored.dtype is torch.uint8
    load_model(tmp_path / "model.gguf", dtype="float32")
    blocks = entry.stored.read(()).view(-1, 34)
    assert torch.equal(BLOCKS["Q8_0"](blocks).values().view(wanted.shape), entry.read(()))


WIDE = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
}


@pytest.mark.parametrize(
    ("kind", "near"),
    [
        ("F32", 0),
        ("F16", 0.003),
        ("BF16", 0.03),
        ("Q8_0", 0.1),
        ("Q6_K", 0.3),
        ("Q5_K", 0.5),
        ("Q4_K", 0.9),
        ("Q4_0", 0.9),
        ("MXFP4", 0.9),
        ("Q4_1", 0.9),
        ("Q5_0", 0.5),
        ("Q5_1", 0.5),
        *((kind, 4.0) for kind in HALVES),
    ],
)
def test_every_type_means_what_the_gguf_package_says_it_does(tmp_path: Path, kind: str, near: float) -> None:
    """Logits are those of the numbers the package reads back; `near` states how far those are from the source's,
    in deviations: random networks lose by a few bits what trained ones do not."""
    model = make(tmp_path / "source", "llama-gqa-tied", **WIDE)
    with torch.no_grad():
        source = model(torch.tensor([PROMPTS[0]])).logits[0]
        meant = write(tmp_path / "model.gguf", model, kind)
        assert read_gguf(tmp_path / "model.gguf").tensors["blk.0.ffn_down.weight"].kind.name == kind
        model.load_state_dict({**meant, "lm_head.weight": meant["model.embed_tokens.weight"]})
        wanted = model(torch.tensor([PROMPTS[0]])).logits[0]
    ours = load_model(tmp_path / "model.gguf", dtype="float32")
    found = Feeder(ours, page_size=16).step([(0, PROMPTS[0])])[0]
    assert (found - wanted).abs().max() < 1e-4
    error = float((found - source).std() / source.std())
    assert near / 10 <= error <= max(near, 1e-5)
    if kind in ("F32", "F16", "BF16"):
        assert Feeder(ours, page_size=16).greedy(PROMPTS, 24) == [greedy(model, p, 24) for p in PROMPTS]


def test_a_folder_with_one_file_is_that_file_and_with_several_must_be_named(tmp_path: Path) -> None:
    model = make(tmp_path / "source", "llama-gqa-tied")
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder" / "a.gguf", model)
    expected = answer(load_model(tmp_path / "source", dtype="float32"))
    torch.testing.assert_close(answer(load_model(tmp_path / "folder", dtype="float32")), expected)
    write(tmp_path / "folder" / "b.gguf", model)
    with pytest.raises(InvalidModel, match=r"holds 2 GGUF files: name the one to load, such as a\.gguf"):
        load_model(tmp_path / "folder")


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda data: data[: len(data) // 2], "is truncated"),
        (lambda data: data[:300], "ends within its header"),
        (lambda data: b"GGML" + data[4:], "is not a GGUF file"),
        (lambda data: data[:4] + b"\x01" + data[5:], "version 1: only 2 and 3"),
        (lambda data: data[:8] + b"\xff" * 8 + data[16:], "its header is invalid"),
        (lambda data: data.replace(b"llama", b"mamba"), "architecture 'mamba', which is not supported"),
        (lambda data: b"", "is empty: download it again"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, edit: Callable[[bytes], bytes], said: str) -> None:
    path = tmp_path / "model.gguf"
    write(path, make(tmp_path / "source", "llama-gqa-tied"))
    path.write_bytes(edit(path.read_bytes()))
    with pytest.raises(InvalidModel, match=said) as caught:
        load_model(path)
    assert "\n" not in str(caught.value)


def test_types_that_are_not_read_are_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("x.weight", np.zeros((2, 66), np.uint8), raw_dtype=gguf.GGMLQuantizationType.IQ2_XXS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(InvalidModel, match=r"x\.weight is stored as IQ2_XXS: not supported"):
        load_model(tmp_path / "model.gguf")


@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind not in ("F32", "F16", "BF16")])
def test_a_part_of_a_quantised_matrix_is_that_part_of_the_whole(tmp_path: Path, kind: str) -> None:
    """Ranks read their rows, and experts that one tensor holds are read one by one."""
    numbers = np.random.default_rng(1).standard_normal((6, 4, 512), dtype=np.float32)
    bytes_, _ = stored(numbers.reshape(24, 512), kind)
    path = tmp_path / "one"
    path.write_bytes(bytes(40) + bytes_.tobytes())
    number = next(number for number, each in KINDS.items() if each.name == kind)
    entry = block_entry(GgufTensorInfo(KINDS[number], (6, 4, 512), 40, path))
    whole = entry.read(())
    assert whole.shape == (6, 4, 512) and (kind in HALVES or (whole - torch.from_numpy(numbers)).std() < 0.3)
    for cut in ((slice(2, 5),), (slice(5, 6), slice(1, 3)), (slice(0, 2), slice(None), slice(256, 512))):
        assert torch.equal(entry.read(cut), whole[cut])
    for expert in range(6):
        assert torch.equal(entry.part(expert).read(()), whole[expert])


def kind_name(kind: object) -> str:
    return kind if isinstance(kind, str) else "mixed"


def mixed(name: str) -> str:
    """As llama.cpp's Q4_K_M has it: what loses most is in Q6_K."""
    return "Q6_K" if any(part in name for part in ("v_proj", "down_proj", "embed_tokens", "lm_head")) else "Q4_K"


class KeptOps(ReferenceOps):
    """Wants matrices as a GPU does, and multiplies by the reference."""

    multiplies_integers = True


KEPT_KINDS = (*(kind for kind in PACKED if kind != "MXFP4"), mixed)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        pytest.param(
            kind,
            shape,
            id=f"{name}-{kind_name(kind)}",
            marks=() if at % 2 == by_turns else pytest.mark.nightly,
        )
        for at, kind in enumerate(KEPT_KINDS)
        for by_turns, (shape, name) in enumerate((("llama-gqa-tied", "tied"), ("qwen2-gqa", "untied, biased")))
    ],
)
def test_blocks_are_kept_as_they_are_in_the_file_where_kernels_multiply_them(
    tmp_path: Path, kind: str | Callable[[str], str], shape: str
) -> None:
    model = make(tmp_path / "source", shape, **WIDE)
    write(tmp_path / "model.gguf", model, kind)
    theirs = load_model(tmp_path / "model.gguf", dtype="float32")
    ours = load_model(tmp_path / "model.gguf", dtype="float32", ops=KeptOps(), canary=Canary())
    tokens = torch.tensor([3, 0, 3, 198])
    assert isinstance(ours.embedding, StoredEmbedding)
    assert torch.equal(ours.embedding(tokens), theirs.embedding(tokens))
    stored = [ours.head.apply.__self__, *(layer.apply.__self__ for layer in layers_of(ours))]
    for own, plain in zip(stored[1:], layers_of(theirs), strict=True):
        found = own.quantized.matrix
        assert isinstance(found, MixedMatrix if kind is mixed and len(own.matrix.parts) == 3 else IntegerMatrix)
        x = torch.eye(own.matrix.columns)
        got, wanted = own.quantized.dequantize(), plain(x) - plain(torch.zeros_like(x))
        torch.testing.assert_close(got, wanted.t(), rtol=0, atol=1e-5)
        some = slice(1, None, 7)
        assert torch.equal(own.quantized.dequantize(some), got[some])
    assert (stored[0].quantized is ours.embedding.stored.quantized) == (shape == "llama-gqa-tied")
    found = Feeder(ours, page_size=16).step([(0, PROMPTS[0])])[0]
    assert (found - Feeder(theirs, page_size=16).step([(0, PROMPTS[0])])[0]).abs().max() < 1e-4


def test_kernels_multiply_the_blocks_of_a_file(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", make(tmp_path / "source", "qwen2-gqa", **WIDE), mixed)
    ours, theirs = (
        load_model(tmp_path / "model.gguf", dtype="float32", ops=ops) for ops in (TritonOps("cpu"), KeptOps())
    )
    x, tokens = torch.randn(2, 256), torch.tensor([3, 0, 3, 198])
    assert torch.equal(ours.embedding(tokens), theirs.embedding(tokens))
    for own, other in list(zip(layers_of(ours), layers_of(theirs), strict=True))[:3]:
        torch.testing.assert_close(own(x), other(x), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.head(x), theirs.head(x), rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", [*(kind for kind in PACKED if kind != "MXFP4"), mixed], ids=kind_name)
def test_a_model_of_blocks_says_the_same_on_a_gpu(tmp_path: Path, kind: str | Callable[[str], str]) -> None:
    model = make(tmp_path / "source", "llama-gqa-tied", **WIDE)
    write(tmp_path / "model.gguf", model, kind)
    wanted = Feeder(load_model(tmp_path / "model.gguf", dtype="float32"), page_size=16).step([(0, PROMPTS[0])])[0]
    for dtype, most in (("float32", 1e-3), ("bfloat16", 0.1)):
        device = torch.device("cuda")
        ours = load_model(tmp_path / "model.gguf", dtype=dtype, device=device, ops=TritonOps(device), canary=Canary())
        assert isinstance(ours.embedding, StoredEmbedding)
        got = answers(ours, PROMPTS[0], device)
        assert (got - wanted).std() < most * wanted.std()


def layers_of(model: Any) -> list[Any]:
    """The linear layers of its blocks."""
    blocks = model.blocks
    return [each for b in blocks for each in (b.attention.qkv, b.attention.out, b.mlp.gate_up, b.mlp.down)]


def test_blocks_take_the_memory_that_they_take_in_the_file(tmp_path: Path) -> None:
    most = {"Q4_0": 4.5, "Q4_K": 4.625, "Q5_K": 8.625, "Q6_K": 8.625, "Q8_0": 8.5}
    numbers = np.random.default_rng(1).standard_normal((4, 512), dtype=np.float32)
    for kind, bits in most.items():
        raw = torch.from_numpy(stored(numbers, kind)[0])
        facts = next(each for each in KINDS.values() if each.name == kind)
        matrix = StoredBlocks(kind, facts.block, facts.size).packed(raw)
        assert matrix.nbytes * 8 == bits * 4 * 512
        assert torch.equal(dequantize(matrix), BLOCKS[kind](raw.view(-1, facts.size)).values().view(4, 512))


def test_transposed_matrices_are_dequantised(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", make(tmp_path / "source", "gpt2-odd-heads", n_embd=96, n_head=3), "Q8_0")
    ours, theirs = (load_model(tmp_path / "model.gguf", dtype="float32", ops=ops) for ops in (KeptOps(), None))
    found, wanted = (Feeder(model, page_size=16).step([(0, PROMPTS[1])])[0] for model in (ours, theirs))
    assert (found - wanted).abs().max() < 1e-4


def uneven(name: str) -> str:
    """The matrices of gate in another type than those of up."""
    return "Q4_0" if "gate_proj" in name else "Q8_0"


KEPT = [
    pytest.param(
        shape,
        kind,
        marks=()
        if kind is uneven or (shape.startswith("qwen") and kind not in ("Q6_K", "Q5_K", "Q4_0"))
        else pytest.mark.nightly,
    )
    for shape in ("qwen3_moe-gqa", "mixtral-three-of-six")
    for kind in ("Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q4_0", mixed, uneven)
] + [("gpt_oss-gqa", "MXFP4"), ("granitemoe-gqa", "Q4_K"), ("llama4_text-gqa", "Q8_0")]


@pytest.mark.parametrize(("shape", "kind"), KEPT, ids=kind_name)
def test_experts_are_kept_where_all_of_a_layer_are_of_one_type(
    tmp_path: Path, kind: str | Callable[[str], str], shape: str
) -> None:
    width = {"moe_intermediate_size": 256} if shape.startswith("qwen") else {"intermediate_size": 256}
    sizes = {"hidden_size": 256, "head_dim": 32} if shape.startswith(("gpt_oss", "llama4")) else {}
    model = make(tmp_path / "source", shape, **{**SHAPES.get(shape, {}), "hidden_size": 256, **sizes, **width})
    write(tmp_path / "model.gguf", model, kind)
    theirs = load_model(tmp_path / "model.gguf", dtype="float32")
    ours = load_model(tmp_path / "model.gguf", dtype="float32", ops=KeptOps(), canary=Canary())
    own, other = (model.blocks[-1].mlp.experts for model in (ours, theirs))
    if kind is uneven:
        assert all(each.quantized is None for each in (*own.gate_up, *own.down))
    else:
        assert all(isinstance(each, IntegerMatrix) for each in own.joined)
    x, used = torch.randn(3, 256), torch.tensor([[0, 3], [3, 2], [1, 0]]).int()
    routing = Routing(used, torch.rand(3, 2))
    torch.testing.assert_close(own(x, routing), other(x, routing), rtol=1e-4, atol=1e-3)
    found, wanted = (Feeder(model, page_size=16).step([(0, PROMPTS[1])])[0] for model in (ours, theirs))
    assert (found - wanted).abs().max() < 1e-4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", mixed], ids=kind_name)
def test_a_mixture_of_blocks_says_the_same_on_a_gpu(tmp_path: Path, kind: str | Callable[[str], str]) -> None:
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256}
    write(tmp_path / "model.gguf", make(tmp_path / "source", "qwen3_moe-gqa", **sizes), kind)
    device = torch.device("cuda")
    wanted = answers(load_model(tmp_path / "model.gguf", dtype="float32"), PROMPTS[0], torch.device("cpu"))
    got = answers(
        load_model(tmp_path / "model.gguf", dtype="float32", device=device, ops=TritonOps(device)), PROMPTS[0], device
    )
    assert (got - wanted).std() < 1e-3 * wanted.std()


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_rows_of_a_few_blocks_are_multiplied_too(tmp_path: Path, kind: str) -> None:
    sizes = {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 32}
    write(tmp_path / "model.gguf", make(tmp_path / "source", "qwen2-gqa", **sizes, intermediate_size=160), kind)
    ours, kept, theirs = (
        load_model(tmp_path / "model.gguf", dtype="float32", ops=ops) for ops in (TritonOps("cpu"), KeptOps(), None)
    )
    for own, other in zip(layers_of(ours), layers_of(theirs), strict=True):
        x = torch.randn(2, own.apply.__self__.matrix.columns)
        torch.testing.assert_close(own(x), other(x), rtol=1e-4, atol=1e-4)
    found, wanted = (Feeder(model, page_size=16).step([(0, PROMPTS[0])])[0] for model in (kept, theirs))
    assert (found - wanted).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("shard", "transposed", "kept"),
    [
        (slice(0, 512), False, True),
        (slice(256, 512), False, True),
        (slice(0, 128), False, False),
        (slice(0, 512), True, False),
    ],
    ids=["whole", "blocks", "through a block", "transposed"],
)
def test_a_shard_is_kept_where_it_is_whole_blocks(shard: slice, *, transposed: bool, kept: bool) -> None:
    numbers = np.random.default_rng(1).standard_normal((6, 512), dtype=np.float32)
    raw = torch.from_numpy(stored(numbers, "Q4_K")[0])
    blocks, part = {"a.weight": StoredBlocks("Q4_K", 256, 144)}, MatrixPart("a", 6, slice(1, 5))
    matrix = Matrix((part,), 512, shard, torch.float32, torch.device("cpu"), transposed=transposed)
    found = GgufFormat(Plain, blocks)(matrix, ReferenceOps())
    assert isinstance(found, GgufStorage if kept else Plain)
    if kept:
        place = found.slots()[0]
        place.copy_from(raw[place.shard])
        found.finalize()
        assert found.quantized is not None
        wanted = BLOCKS["Q4_K"](raw.view(-1, 144)).values().view(6, 512)
        assert torch.equal(found.quantized.dequantize(), wanted[1:5, shard])


def test_projectors_and_adapters_are_refused_by_name(tmp_path: Path) -> None:
    def file(name: str, architecture: str, kind: str) -> Path:
        writer = gguf.GGUFWriter(tmp_path / name, architecture)
        writer.add_type(kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tmp_path / name

    with pytest.raises(InvalidModel, match=r"mmproj\.gguf is a projector of images \(mmproj\): name the model's own"):
        load_model(file("mmproj.gguf", "clip", "mmproj"))
    with pytest.raises(InvalidModel, match=r"lora\.gguf is a LoRA adapter: merge it"):
        load_model(file("lora.gguf", "llama", "adapter"))


@pytest.mark.parametrize("wrong", ["text", -1, 1 << 40, 0.5, [], ["a"], True, float("nan")])
def test_metadata_of_a_wrong_type_is_refused_or_read(tmp_path: Path, wrong: object) -> None:
    write(tmp_path / "model.gguf", make(tmp_path / "source", "llama-gqa-tied"))
    file = read_gguf(tmp_path / "model.gguf")
    for key in file.facts:
        broken = replace(file, facts={**file.facts, key: wrong})
        with suppress(InvalidModel):  # any other error fails
            assert read_spec(gguf_config(broken)).layers <= MOST_LAYERS


LATER = 1 << 32
"""A time of the next century, in seconds."""

WORDS = ["", "a", "é", "x" * 300, "a b", "\0" * 9]


def with_words(path: Path, words: list[str]) -> Path:
    """A file of metadata alone."""
    facts = {"general.architecture": "llama", "tokenizer.ggml.tokens": words, "llama.block_count": 1}
    write_gguf(path, facts, [], progress=lambda done, total: None)
    return path


def test_strings_of_a_header_are_read_when_they_are_wanted(tmp_path: Path) -> None:
    file = read_gguf(with_words(tmp_path / "model.gguf", WORDS))
    words = file.facts["tokenizer.ggml.tokens"]
    assert (len(words), list(words), words[2], words[1:3]) == (6, WORDS, "é", ["a", "é"])
    assert file.get("block_count") == 1
    with_words(tmp_path / "other.gguf", WORDS[:3]).replace(tmp_path / "model.gguf")
    with pytest.raises(InvalidModel, match=r"model\.gguf has changed since its header was read: start again"):
        list(words)


def test_a_header_is_read_once_until_the_file_changes(tmp_path: Path) -> None:
    path = with_words(tmp_path / "model.gguf", WORDS)
    os.utime(path, (LATER, LATER))
    assert read_gguf(path) is not read_gguf(path), "a file that has just been written may be written again unseen"
    os.utime(path, (1, 1))
    first = read_gguf(path)
    assert read_gguf(path) is first
    with_words(tmp_path / "other.gguf", WORDS[1:]).replace(path)
    os.utime(path, (1, 1))
    assert list(read_gguf(path).facts["tokenizer.ggml.tokens"]) == WORDS[1:]


@pytest.mark.parametrize("length", [1 << 63, 1 << 20, (1 << 64) - 1])
def test_a_string_that_ends_behind_the_file_is_refused(tmp_path: Path, length: int) -> None:
    path = with_words(tmp_path / "model.gguf", ["longword"])
    data = path.read_bytes()
    at = data.index(b"longword")
    path.write_bytes(data[: at - 8] + length.to_bytes(8, "little") + data[at:])
    with pytest.raises(InvalidModel, match="ends within its header: it is truncated"):
        read_gguf(path)


def split(path: Path, count: int) -> list[Path]:
    """The file in parts, as llama-gguf-split makes them: the first has the metadata."""
    reader = gguf.GGUFReader(path)
    file = read_gguf(path)
    parts = []
    for i in range(count):
        part = path.with_name(f"model-{i + 1:05}-of-{count:05}.gguf")
        facts = {**(file.facts if i == 0 else {}), "split.no": i, "split.count": count}
        facts |= {"split.tensors.count": len(reader.tensors)}
        names = [name for at, name in enumerate(file.tensors) if at % count == i]
        entries = {name: file.tensors[name] for name in names}
        tensors = [
            NewTensor(name, file_entry(each.path, each.start, torch.float32, each.shape), "F32")
            for name, each in entries.items()
        ]
        write_gguf(part, facts, tensors, progress=lambda done, total: None)
        parts.append(part)
    return parts


def test_a_model_in_parts_is_the_model(tmp_path: Path) -> None:
    write(tmp_path / "whole.gguf", make(tmp_path / "source", "llama-gqa-tied"))
    (tmp_path / "parts").mkdir()
    (tmp_path / "whole.gguf").rename(tmp_path / "parts" / "whole.gguf")
    parts = split(tmp_path / "parts" / "whole.gguf", 3)
    expected = answer(load_model(tmp_path / "source", dtype="float32"))
    torch.testing.assert_close(answer(load_model(parts[0], dtype="float32")), expected)
    torch.testing.assert_close(answer(load_model(parts[2], dtype="float32")), expected)
    (tmp_path / "parts" / "whole.gguf").unlink()
    torch.testing.assert_close(answer(load_model(tmp_path / "parts", dtype="float32")), expected)
    parts[1].rename(tmp_path / "elsewhere.gguf")
    with pytest.raises(InvalidModel, match=r"one of 3 parts: model-00002-of-00003\.gguf is not beside it"):
        load_model(parts[0])
    parts[2].rename(parts[1])
    parts[1].with_name(parts[2].name).write_bytes(parts[1].read_bytes())
    with pytest.raises(InvalidModel, match=r"model-00002-of-00003\.gguf is not part 2 of 3: it has been renamed"):
        load_model(parts[0])


def test_a_big_endian_file_is_refused_as_such(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(InvalidModel, match="is a big-endian GGUF file"):
        load_model(tmp_path / "m.gguf")
