"""Loading: fused and sharded as it may be, every number lands; and what is broken is named in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.errors import InvalidModel
from quire.layers.quantization.base import Plain
from quire.layers.quantization.packed import Packed
from quire.models.registry import Model, read_spec
from quire.ops.matmul import can_pack
from quire.ops.ragged import LayerKV, RaggedBatch
from quire.weights.files import INDEX, SINGLE, Checkpoint, read_config
from quire.weights.load import choose_dtype, load_model
from tests.checkpoints import make
from tests.gguf_files import write

SHAPE = "llama-mqa-biased-odd-dim"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make(tmp_path, SHAPE)
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    make(tmp_path, SHAPE, shard="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    return tmp_path


def answer(model: Model, count: int = 12) -> torch.Tensor:
    """Logits of one prompt of `count` tokens, in one page."""
    kv = [LayerKV(*(torch.zeros(2, heads, 64, dim) for dim in dims)) for heads, *dims, _ in model.spec.kv_shapes]
    numbers = torch.arange(count)
    ends = torch.tensor([0, count], dtype=torch.int32)
    table = torch.ones(1, 1, dtype=torch.int32)
    batch = RaggedBatch(numbers * 7 % model.spec.vocab, numbers, 64 + numbers, ends, ends[1:], table, 64, count, count)
    with torch.inference_mode():
        return model.logits(model.forward(batch, kv))


def edit(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Replace tensors of the single file ('__' is a dot), or take them out."""
    held = load_file(folder / SINGLE)
    for name, value in tensors.items():
        held.pop(name.replace("__", "."), None)
        if value is not None:
            held[name.replace("__", ".")] = value
    save_file(held, folder / SINGLE)


def refused(folder: Path) -> str:
    with pytest.raises(InvalidModel) as error:
        load_model(folder)
    assert "\n" not in str(error.value)
    assert str(folder.parent) not in str(error.value), "paths do not belong in messages that may reach a client"
    return str(error.value)


def test_shards_make_the_same_model_as_one_file(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    pieces = tmp_path_factory.mktemp("pieces")
    make(pieces, SHAPE, shard="100KB")
    assert torch.equal(answer(load_model(folder)), answer(load_model(pieces)))


def test_progress_ends_with_every_byte(sharded: Path) -> None:
    calls: list[tuple[int, int]] = []
    load_model(sharded, progress=lambda done, total: calls.append((done, total)))
    total = sum(len(t.numpy().tobytes()) for f in sharded.glob("*.safetensors") for t in load_file(f).values())
    assert calls[0] == (0, total)
    assert calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_auto_dtype_is_the_checkpoints_and_float32_for_half_precision_on_a_cpu(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    for named, found in (("bfloat16", torch.bfloat16), ("float16", torch.float32), ("float32", torch.float32)):
        (folder / "config.json").write_text(json.dumps(config | {"dtype": named}))
        assert load_model(folder).embedding.weight.dtype is found
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "dtype"}))
    save_file({k: v.bfloat16() for k, v in load_file(folder / SINGLE).items()}, folder / SINGLE)
    assert load_model(folder).embedding.weight.dtype is torch.bfloat16


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_auto_dtype_is_half_precision_where_there_is_arithmetic_for_it(folder: Path, device: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    found = torch.float32 if device == "cpu" else torch.float16
    spec = read_spec(config | {"dtype": "float16"})
    assert choose_dtype("auto", spec, None, torch.device(device)) is found
    unnamed = read_spec({k: v for k, v in config.items() if k != "dtype"})
    save_file({k: v.half() for k, v in load_file(folder / SINGLE).items()}, folder / SINGLE)
    assert choose_dtype("auto", unnamed, Checkpoint(folder), torch.device(device)) is found
    assert choose_dtype("float16", spec, None, torch.device(device)) is torch.float16, "asked for by name"


@pytest.mark.parametrize(
    ("kind", "packed", "found"),
    [
        ("Q8_0", True, torch.bfloat16),
        ("Q4_K", True, torch.bfloat16),
        ("Q8_0", False, torch.float32),
        ("BF16", False, torch.bfloat16),
        ("F16", True, torch.float32),
        ("F32", True, torch.float32),
        ("Q2_K", True, torch.float32),
    ],
)
def test_auto_dtype_of_a_gguf_file_is_that_of_its_matrices(
    tmp_path: Path, kind: str, packed: bool, found: torch.dtype
) -> None:
    """Norms are float32 in every file. Blocks that kernels read packed are multiplied by rows in bfloat16."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    write(tmp_path / "m.gguf", make(tmp_path / "source", "llama-gqa-tied", **sizes), kind)
    spec = read_spec(read_config(tmp_path / "m.gguf"))
    checkpoint = Checkpoint(tmp_path / "m.gguf")
    assert choose_dtype("auto", spec, checkpoint, torch.device("cpu"), packed=packed) is found
    assert choose_dtype("float32", spec, checkpoint, torch.device("cpu"), packed=packed) is torch.float32


def test_a_draft_computes_the_same_by_other_products(folder: Path) -> None:
    target, draft = load_model(folder), load_model(folder, draft=True)
    torch.testing.assert_close(answer(draft), answer(target), atol=1e-5, rtol=1e-5)
    if can_pack(torch.float32, torch.device("cpu")):
        kinds = [type(model.blocks[0].attention.out.apply.__self__) for model in (target, draft)]  # type: ignore[attr-defined]
        assert kinds == [Packed, Plain]


def test_buffers_and_a_tied_head_stored_twice_are_passed_over(tmp_path: Path) -> None:
    make(tmp_path, "llama-gqa-tied")
    before = answer(load_model(tmp_path))
    edit(tmp_path, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4), lm_head__weight=torch.ones(199, 72))
    assert torch.equal(answer(load_model(tmp_path)), before)


@pytest.mark.parametrize(("shape", "body"), [("gpt2-odd-heads", "transformer."), ("llama-gqa-tied", "model.")])
def test_a_body_saved_without_its_head_loads_as_openais_gpt2_does(tmp_path: Path, shape: str, body: str) -> None:
    make(tmp_path, shape)
    before = answer(load_model(tmp_path))
    short = {name.removeprefix(body): tensor for name, tensor in load_file(tmp_path / SINGLE).items()}
    buffers = {"h.0.attn.bias": torch.ones(1, 1, 8, 8)} if shape.startswith("gpt2") else {}
    save_file(short | buffers, tmp_path / SINGLE)
    assert torch.equal(answer(load_model(tmp_path)), before)
    save_file({**short, "h.0.attn.nonsense": torch.ones(1)}, tmp_path / SINGLE)
    assert "no place for: h.0.attn.nonsense" in refused(tmp_path)


def test_missing_tensors_are_named(folder: Path) -> None:
    edit(folder, model__layers__1__mlp__up_proj__weight=None, model__norm__weight=None)
    said = refused(folder)
    assert "lacks 2 tensors" in said
    assert "model.layers.1.mlp.up_proj.weight" in said
    assert "model.norm.weight" in said


def test_unexpected_tensors_are_named_and_long_lists_cut(folder: Path) -> None:
    edit(folder, **{f"model__layers__{i}__extra": torch.ones(1) for i in range(9)})
    said = refused(folder)
    assert "9 tensors the model has no place for: model.layers.0.extra" in said
    assert "and 6 more" in said


def test_misshaped_tensors_are_named_with_both_shapes(folder: Path) -> None:
    edit(folder, model__norm__weight=torch.ones(61))
    assert refused(folder) == "model.norm.weight has shape [61], but config.json makes it [60]"


def test_integers_in_place_of_weights_are_refused(folder: Path) -> None:
    edit(folder, model__norm__weight=torch.ones(60, dtype=torch.int32))
    assert refused(folder) == "model.norm.weight is stored as int32: not supported"


@pytest.mark.parametrize("keep", [0, 5, 100, 0.5, -1])
def test_truncated_files_say_so(folder: Path, keep: float) -> None:
    data = (folder / SINGLE).read_bytes()
    cut = int(len(data) * keep) if isinstance(keep, float) else keep
    (folder / SINGLE).write_bytes(data[:cut])
    said = refused(folder)
    assert said.startswith("model.safetensors")
    assert any(each in said for each in ("truncated", "not a safetensors file", "is empty"))


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (b"[]", "its header is not an object"),
        (b"{", "its header is not JSON"),
        (b"\xff\xfe", "its header is not JSON"),
        (b'{"a": 3}', "the header's entry for a is malformed"),
        (b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', "the header's entry for a is malformed"),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', "not F32 of shape [2]"),
        (b'{"a": {"dtype": "C64", "shape": [1], "data_offsets": [0, 8]}}', "dtype 'C64', which is not supported"),
        (b'{"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}', "truncated"),
    ],
)
def test_headers_that_lie_are_caught(folder: Path, header: bytes, said: str) -> None:
    (folder / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    assert said in refused(folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model.norm.weight": "gone.safetensors"}, "names gone.safetensors, which is not in the folder"),
        ({"model.norm.weight": "../gone.safetensors"}, "outside the model folder"),
        ({"model.extra": "model-00002-of"}, "places model.extra in model-00002-of"),
        ({"model.norm.weight": 3}, "has no weight_map"),
    ],
)
def test_a_wrong_index_is_named(sharded: Path, change: dict, said: str) -> None:
    index = json.loads((sharded / INDEX).read_text())
    files = sorted({*index["weight_map"].values()})
    second = {k: files[1] if v == "model-00002-of" else v for k, v in change.items()}
    (sharded / INDEX).write_text(json.dumps({"weight_map": index["weight_map"] | second}))
    assert said in refused(sharded)


def test_folders_that_are_none_say_what_they_lack(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match=r"has no config\.json"):
        load_model(tmp_path)
    make(tmp_path, SHAPE)
    (tmp_path / SINGLE).rename(tmp_path / "weights.bin")
    assert "neither model.safetensors nor" in refused(tmp_path)
    assert "weights.bin" in refused(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": [')
    assert "config.json cannot be read" in refused(tmp_path)
    with pytest.raises(InvalidModel, match="is not a model folder"):
        Checkpoint(tmp_path / "nowhere")


def test_longrope_takes_the_factors_of_the_longest_sequence(tmp_path: Path) -> None:
    make(tmp_path, "phi3-mqa-tied-long-factors")
    long, short = (load_model(tmp_path, max_model_len=length).spec.rope for length in (None, 1))
    assert long.factors[-1] == 12.0
    assert short.factors[-1] == 2.5


def test_dummy_weights_need_no_files_and_make_lively_finite_logits(folder: Path) -> None:
    (folder / SINGLE).unlink()
    first = answer(load_model(folder, load_format="dummy", seed=3), 40)
    assert first.isfinite().all()
    assert 0.5 < first.std() < 2
    assert len(set(first.argmax(-1).tolist())) > 10
    assert torch.equal(first, answer(load_model(folder, load_format="dummy", seed=3), 40))
    assert not torch.equal(first, answer(load_model(folder, load_format="dummy", seed=4), 40))


def test_a_model_larger_than_the_memory_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    make(tmp_path, "llama-gqa-tied")
    seen: list[int] = []
    with pytest.raises(InvalidModel, match=r"no memory for .* GiB of weights, and there are 0.0 GiB; `quire plan`"):
        load_model(tmp_path, room=1000, progress=lambda done, total: seen.append(done))
    assert seen == []
