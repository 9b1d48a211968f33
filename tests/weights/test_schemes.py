"""Every quantised format answers as the floats it stands for do, whole or cut; a spoiled one is caught."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.errors import InvalidModel
from quire.layers.builder import ModelBuilder
from quire.layers.quantization import scaled
from quire.layers.quantization.base import Matrix, MatrixPart, Plain
from quire.layers.quantization.gguf import StoredBlocks
from quire.layers.quantization.integers import IntegerScheme, IntegerTensors, pack_pairs
from quire.models.registry import build_model, read_spec
from quire.ops.base import Ops
from quire.ops.operands import IntegerKind, IntegerMatrix, QuantizedMatrix, Routing
from quire.ops.quantized import dequantize, quantize_tokens
from quire.ops.reference import ReferenceOps
from quire.ops.triton.ops import TritonOps
from quire.types import UNLIMITED
from quire.weights.canary import Canary, Threshold, answers
from quire.weights.files import SINGLE, Checkpoint, read_config
from quire.weights.load import load_model, load_weights
from quire.weights.schemes import IGNORED_TENSORS, ONLINE, choose_format, matches_rule, read_scheme
from tests import quantised
from tests.checkpoints import make
from tests.layers.test_builder import Rank
from tests.quantised import FORMATS, SHAPE, SIZES, plain, quantise
from tests.weights.test_load import answer


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    make(folder, SHAPE, **SIZES)
    return folder


@pytest.fixture
def folder(source: Path, tmp_path: Path) -> Path:
    shutil.copytree(source, tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_answers_as_the_numbers_it_stands_for(folder: Path, name: str) -> None:
    means = quantise(folder, name)
    model = load_model(folder, dtype="float32")
    stored = {each.matrix.parts[0].name: each.quantized for each in matrices(model)}
    quantised = [each for each in stored.values() if each is not None]
    assert len(quantised) == 4 * 3
    for each in quantised:
        each.exact = True
    ours = answer(model)
    plain(folder, means)
    wanted = answer(load_model(folder, dtype="float32"))
    assert wanted.std() > 1
    assert (ours - wanted).abs().max() < 1e-4


def matrices(model: object) -> list:
    """All matrices of a Llama's layers, and its head."""
    found = [model.head.apply.__self__]  # type: ignore[attr-defined]
    for block in model.blocks:  # type: ignore[attr-defined]
        for layer in (block.attention.qkv, block.attention.out, block.mlp.gate_up, block.mlp.down):
            found.append(layer.apply.__self__)
    return found


def test_w8a8_rounds_each_token_by_its_largest_number(folder: Path) -> None:
    quantise(folder, "int8-w8a8")
    stored = matrices(load_model(folder, dtype="float32"))[1]
    x = torch.randn(5, 144) * torch.tensor([[1e-3], [1.0], [30.0], [0.0], [1.0]])
    rounded = torch.empty(5, 144)
    for t, token in enumerate(x):
        step = token.abs().max() / 127
        rounded[t] = (token / step).round() * step if step else 0.0
    wanted = rounded @ stored.quantized.dequantize().t() + stored.bias
    torch.testing.assert_close(stored.apply(x), wanted, rtol=1e-4, atol=1e-4)
    numbers, steps = quantize_tokens(x)
    assert numbers.abs().amax(1).tolist() == [127, 127, 127, 0, 127]
    torch.testing.assert_close(numbers * steps, rounded)


@pytest.mark.parametrize(
    "name",
    [
        *("gptq-act-order", "int4-packed-zeros", "gptq-8", "int8-w8a16-packed"),
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("awq", "gptq", "int4-packed")),
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("int8-packed-zeros", "int8-w8a16")),
    ],
)
def test_kernels_read_integers_in_groups_of_32_or_rows_in_their_own_layout(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"head_dim": 16, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 192}
    make(folder, SHAPE, hidden_size=128, **sizes)
    monkeypatch.setattr(quantised, "GROUP", 32)
    quantise(folder, name)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"group_size": 16', '"group_size": 32'))
    ours, theirs = (matrices(load_model(folder, dtype="float32", ops=ops))[1:5] for ops in (TritonOps("cpu"), None))
    for own, other in zip(ours, theirs, strict=True):
        assert isinstance(own.quantized.matrix, IntegerMatrix)
        assert (own.quantized.matrix.order is not None) == (name in ("gptq-act-order", "gptq-8"))
        assert own.quantized.matrix.bits == (8 if "8" in name else 4)
        assert torch.equal(own.quantized.dequantize(), other.quantized.dequantize())
        x = torch.randn(2, own.matrix.columns)
        torch.testing.assert_close(own.apply(x), other.apply(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("ops", [TritonOps("cpu"), ReferenceOps()], ids=["kernels", "reference"])
def test_floats_of_four_bits_are_kept_and_stand_for_their_numbers(tmp_path: Path, ops: Ops) -> None:
    sizes = {"head_dim": 16, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 160}
    make(tmp_path, SHAPE, hidden_size=96, **sizes)
    means = quantise(tmp_path, "mxfp4")
    stored = matrices(load_model(tmp_path, dtype="float32", ops=ops))[1:5]
    assert all(each.quantized.matrix.kind is IntegerKind.FLOATS for each in stored)
    names = [[part.name for part in each.matrix.parts] for each in stored]
    for own, parts in zip(stored, names, strict=True):
        whole = torch.cat([means[f"{name}.weight"] for name in parts])
        assert torch.equal(own.quantized.dequantize(), whole)
        x = torch.randn(2, own.matrix.columns)
        wanted = torch.nn.functional.linear(x, whole, own.bias)
        torch.testing.assert_close(own.apply(x), wanted, atol=1e-4, rtol=1e-4)


def spoiled(folder: Path, suffix: str, spoil: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change the first tensor of a checkpoint whose name ends so."""
    tensors = load_file(folder / SINGLE)
    name = next(name for name in tensors if name.endswith(suffix))
    tensors[name] = spoil(tensors[name]).contiguous()
    save_file(tensors, folder / SINGLE)


def test_broken_experts_of_floats_are_refused_by_name(tmp_path: Path) -> None:
    make(tmp_path, "gpt_oss-gqa-mxfp4")
    spoiled(tmp_path, "down_proj_scales", lambda scales: torch.full_like(scales, 255))
    with pytest.raises(InvalidModel, match=r"down_proj\.0\.weight_scale holds numbers that cannot be scales"):
        load_model(tmp_path)
    spoiled(tmp_path, "down_proj_scales", lambda scales: scales[..., 1:])
    with pytest.raises(InvalidModel, match=r"down_proj\.0\.weight_scale has shape \[64, 0\], but .* \[64, 1\]"):
        load_model(tmp_path)
    make(tmp_path, "gpt_oss-gqa-mxfp4", intermediate_size=64, hidden_size=96)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"hidden_size": 96', '"hidden_size": 90'))
    with pytest.raises(InvalidModel, match="90 columns: MXFP4 needs a multiple of 32"):
        load_model(tmp_path)


@pytest.mark.parametrize("quantization", ["fp8", "int8"])
def test_plain_experts_in_one_tensor_are_quantized_while_they_are_loaded(tmp_path: Path, quantization: str) -> None:
    make(tmp_path, "gpt_oss-gqa")
    exact, rounded = (load_model(tmp_path, dtype="float32", quantization=each) for each in ("auto", quantization))
    tokens = [7 * i % 199 for i in range(45)]
    wanted, got = (answers(model, tokens, torch.device("cpu")) for model in (exact, rounded))
    assert 1e-4 < (got - wanted).std() < 0.3 * wanted.std()


@pytest.mark.parametrize("name", ["fp8-blocks", "fp8-tensor", "fp8-rows", "int8-w8a8"])
def test_experts_of_eight_bits_are_one_matrix_that_kernels_read(tmp_path: Path, name: str) -> None:
    make(tmp_path, "qwen3_moe-gqa", hidden_size=144, num_hidden_layers=1)
    quantise(tmp_path, name)
    ours, theirs = (load_model(tmp_path, dtype="float32", ops=ops) for ops in (TritonOps("cpu"), ReferenceOps()))
    own, other = (model.blocks[0].mlp for model in (ours, theirs))
    x, routing = torch.randn(3, 144), Routing(torch.tensor([[0, 6], [6, 2], [3, 0]]).int(), torch.rand(3, 2))
    with torch.inference_mode():
        got, want = own.experts(x, routing), other.experts(x, routing)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
        for whole, each in zip(own.experts.joined, (own.experts.gate_up, own.experts.down), strict=True):
            kept = [stored.quantized.matrix.weight for stored in each]
            assert torch.equal(torch.cat(kept).float(), whole.weight.float())
            assert {part.untyped_storage().data_ptr() for part in kept} == {whole.weight.untyped_storage().data_ptr()}
        other.experts.joined = None
        torch.testing.assert_close(other.experts(x, routing), want)


@pytest.mark.parametrize("name", ["fp8-blocks", "fp8-rows"])
def test_the_reference_of_the_quality_check_rounds_no_activations(tmp_path: Path, name: str) -> None:
    make(tmp_path, "qwen3_moe-gqa", hidden_size=144, num_hidden_layers=1)
    quantise(tmp_path, name)
    ours, theirs = (
        load_model(tmp_path, dtype=dtype, ops=ops).blocks[0]
        for dtype, ops in (("float16", TritonOps("cpu")), ("float32", ReferenceOps()))
    )
    x, routing = torch.randn(17, 144), Routing(torch.arange(34).view(17, 2).int() % 7, torch.rand(17, 2))
    qkv, experts = ours.attention.qkv.apply.__self__, ours.mlp.experts
    with torch.inference_mode():
        wanted = theirs.attention.qkv(x), theirs.mlp.experts(x, routing)
        rounded = qkv.apply(x.half()), experts(x.half(), routing)
        for each in (qkv, *experts.gate_up, *experts.down):
            each.quantized.exact = True
        kept = qkv.apply(x.half()), experts(x.half(), routing)
    for want, other, same in zip(wanted, rounded, kept, strict=True):
        assert (same - want).norm() < 3e-3 * want.norm(), "float16"
        assert 0.01 * want.norm() < (other - want).norm() < 0.08 * want.norm(), "three bits, twice in a mixture"


def integer_mixture(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mixture of experts in a format of integers, in groups of 32."""
    make(folder, "qwen3_moe-gqa", hidden_size=64, moe_intermediate_size=32, head_dim=16, num_hidden_layers=1)
    monkeypatch.setattr(quantised, "GROUP", 32)
    quantise(folder, name)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"group_size": 16', '"group_size": 32'))


@pytest.mark.parametrize(
    "name",
    ["awq", "gptq", "gptq-act-order", "gptq-8", "int4-packed", "int4-packed-zeros", "int8-w8a16", "int8-packed-zeros"],
)
def test_experts_of_integers_stay_packed_and_are_one_matrix_that_kernels_read(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    integer_mixture(tmp_path, name, monkeypatch)
    ours, theirs = (load_model(tmp_path, dtype="float32", ops=ops) for ops in (TritonOps("cpu"), ReferenceOps()))
    own, other = (model.blocks[0].mlp.experts for model in (ours, theirs))
    x, routing = torch.randn(3, 64), Routing(torch.tensor([[0, 6], [6, 2], [3, 0]]).int(), torch.rand(3, 2))
    moved = name in ("gptq-act-order", "gptq-8")
    assert (own.joined[0].order is not None) == moved, "each expert has its columns in an order of its own"
    assert own.joined[1].order is None, "rows of what makes its inputs are moved instead"
    with torch.inference_mode():
        torch.testing.assert_close(own(x, routing), other(x, routing), atol=1e-4, rtol=1e-4)
        for whole, each in zip(own.joined, (own.gate_up, own.down), strict=True):
            assert isinstance(whole, IntegerMatrix)
            kept = [stored.quantized.matrix.weight.untyped_storage().data_ptr() for stored in each]
            assert set(kept) == {whole.weight.untyped_storage().data_ptr()}
        for one, two, down in zip(own.gate_up, other.gate_up, other.down, strict=True):
            rows = down.quantized.matrix.groups.argsort(stable=True) if moved else torch.arange(two.quantized.rows // 2)
            wanted = two.quantized.dequantize()[torch.cat([rows, rows + len(rows)])]
            assert torch.equal(one.quantized.dequantize(), wanted)
        own.joined = None
        torch.testing.assert_close(own(x, routing), other(x, routing), atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["awq", "gptq", "gptq-act-order", "int4-packed-zeros", "int8-w8a16"])
def test_a_mixture_of_integers_says_the_same_on_a_gpu(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    integer_mixture(tmp_path, name, monkeypatch)
    tokens, device = [7 * i % 199 for i in range(45)], torch.device("cuda")
    wanted = answers(load_model(tmp_path, dtype="float32"), tokens, torch.device("cpu"))
    ours = load_model(tmp_path, dtype="float32", device=device, ops=TritonOps(device))
    got = answers(ours, tokens, device)
    assert (got - wanted).std() < 1e-3 * wanted.std()
    assert torch.equal(got.argmax(-1), wanted.argmax(-1))


@pytest.mark.parametrize("name", FORMATS)
def test_a_cut_is_a_cut_of_the_whole_in_every_format(folder: Path, name: str) -> None:
    """Three ranks of one group: their partial sums add up, and cuts go through blocks of 128."""
    make(folder, SHAPE, **SIZES, vocab_size=198)
    quantise(folder, name)
    config = read_config(folder)
    spec, checkpoint = read_spec(config), Checkpoint(folder)
    x = torch.randn(4, 144)

    def layers(rank: int, size: int) -> list:
        format = choose_format(config, "auto", Plain, checkpoint.entries)
        build = ModelBuilder(
            ops=ReferenceOps(),
            parallel=Rank(rank, size),
            dtype=torch.float32,
            device=torch.device("cpu"),
            format=format,
        )
        build.ignore(*IGNORED_TENSORS)
        with torch.inference_mode():
            model = build_model(spec, build)
            load_weights(build, checkpoint, lambda done, total: None)
            build.finalize()
        for stored in build.matrices:
            if stored.quantized is not None:
                stored.quantized.exact = True
        return model.blocks

    own = torch.randn(4, 144)
    with torch.inference_mode():
        whole, ranks = layers(0, 1)[0], [layers(rank, 3)[0] for rank in range(3)]
        torch.testing.assert_close(sum(rank.mlp(x) for rank in ranks), whole.mlp(x), rtol=1e-4, atol=1e-4)
        back = sum(rank.attention.out(part) for rank, part in zip(ranks, own.chunk(3, -1), strict=True))
        torch.testing.assert_close(back, whole.attention.out(own), rtol=1e-4, atol=1e-4)
        heads = [
            torch.cat(part, -1)
            for part in zip(*(r.attention.qkv(x).split([48, 16, 16], -1) for r in ranks), strict=True)
        ]
        for ours, wanted in zip(heads, whole.attention.qkv(x).split([144, 48, 48], -1), strict=True):
            torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ONLINE)
def test_plain_weights_are_quantised_on_request(folder: Path, tmp_path: Path, method: str) -> None:
    if isinstance(ONLINE[method], StoredBlocks):
        # Rows of whole blocks of 256.
        folder = tmp_path
        sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
        make(folder, "llama-gqa-tied", **sizes, head_dim=64)
    before = answer(load_model(folder, dtype="float32"))
    canary = Canary()
    model = load_model(folder, dtype="float32", quantization=method, canary=canary)
    kept = [each.quantized is None for each in matrices(model)]
    assert kept == [True] + [False] * (len(kept) - 1), "the head stays as it was"
    after, coarse = answer(model), method in ("q5_k", "q4_k", "q4_0")
    # Random weights have no few that matter: of four bits as much is left as of any numbers.
    assert 0 < (after - before).std() < (0.6 if coarse else 0.15) * before.std()
    assert canary.quality is not None
    assert canary.quality.agreement > (0.3 if coarse else 0.6)
    assert 0 < canary.quality.kl < (0.4 if coarse else 0.1)
    assert canary.suspects == ()


@pytest.mark.parametrize(("method", "block"), [("fp8", None), ("int8", None), ("fp8_per_block", 128)])
def test_quantising_follows_its_definition(folder: Path, method: str, block: int | None) -> None:
    w = load_file(folder / SINGLE)["model.layers.0.mlp.down_proj.weight"]
    wanted = torch.empty_like(w)
    for i in range(0, len(w), block or 1):
        for j in range(0, w.shape[1], block or w.shape[1]):
            at = slice(i, i + (block or 1)), slice(j, j + (block or w.shape[1]))
            scale = w[at].abs().max() / (127 if method == "int8" else 448)
            scaled = w[at] / scale
            wanted[at] = (scaled.round() if method == "int8" else scaled.to(torch.float8_e4m3fn).float()) * scale
    found = matrices(load_model(folder, dtype="float32", quantization=method))[4].quantized.dequantize()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    error = (found - w).norm() / w.norm()
    assert error < (0.01 if method == "int8" else 0.04)


def test_a_broken_scale_on_the_way_is_caught_by_the_canary(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(weight: torch.Tensor, dtype: torch.dtype, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        numbers, scale = quantise_rightly(weight, dtype, block)
        return numbers, scale * 1.5

    quantise_rightly = scaled.quantize
    monkeypatch.setattr(scaled, "quantize", broken)
    with pytest.raises(InvalidModel, match="quantisation has degraded the model"):
        load_model(folder, dtype="float32", quantization="fp8", canary=Canary(threshold=Threshold()))
    canary = Canary()
    load_model(folder, dtype="float32", quantization="fp8", canary=canary)
    assert canary.quality is not None
    assert canary.quality.kl > 0.25, "with a threshold of nothing it is measured and served"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda scale: scale * 1e4, "times as strong as most"),
        (lambda scale: scale * float("nan"), "holds numbers that cannot be scales"),
        (lambda scale: -scale, "holds numbers that cannot be scales"),
        (lambda scale: scale * torch.where(torch.arange(len(scale)) == 5, 1e6, 1.0)[:, None], "cannot be scales"),
        (lambda scale: scale * 1e-4, "times as strong as most"),
    ],
)
def test_a_broken_scale_in_a_checkpoint_is_caught(
    folder: Path, change: Callable[[torch.Tensor], torch.Tensor], said: str
) -> None:
    quantise(folder, "fp8-rows")
    held = load_file(folder / SINGLE)
    name = "model.layers.1.mlp.down_proj.weight_scale"
    save_file({**held, name: change(held[name])}, folder / SINGLE)
    with pytest.raises(InvalidModel, match=said) as caught:
        load_model(folder, canary=Canary(threshold=Threshold()))
    assert "model.layers.1.mlp.down_proj" in str(caught.value)


def test_the_canary_measures_rounded_activations_of_a_checkpoint(folder: Path) -> None:
    quantise(folder, "int8-w8a8")
    canary = Canary()
    load_model(folder, dtype="float32", canary=canary)
    assert canary.quality is not None
    assert 0 < canary.quality.kl < 0.05
    weights_only = Canary()
    quantise_again = json.loads((folder / "config.json").read_text())
    quantise_again["quantization_config"]["config_groups"]["group_0"]["input_activations"] = None
    (folder / "config.json").write_text(json.dumps(quantise_again))
    load_model(folder, dtype="float32", canary=weights_only)
    assert weights_only.quality is not None
    assert weights_only.quality.kl < 1e-9


def test_what_cannot_be_is_refused_by_name(folder: Path) -> None:
    def refused(**asked: str) -> str:
        with pytest.raises(InvalidModel) as error:
            load_model(folder, **asked)  # type: ignore[arg-type]
        return str(error.value)

    assert "--quantization awq: the checkpoint is not quantized in this format" in refused(quantization="awq")
    quantise(folder, "awq")
    assert "is already quantized by awq: --quantization fp8 cannot be" in refused(quantization="fp8")
    load_model(folder, quantization="awq")
    config = json.loads((folder / "config.json").read_text())
    for change, said in (
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not supported"),
        ({"quant_method": "awq", "bits": 3}, "only 4 bits"),
        ({"quant_method": "gptq", "bits": 3}, "GPTQ of 3 bits is not supported"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size must be two numbers"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "must hold one group"),
    ):
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": change}))
        assert said in refused()


def test_dummy_weights_of_a_quantised_checkpoint_are_lively(folder: Path) -> None:
    for name in ("fp8-blocks", "awq", "int8-w8a8"):
        make(folder, SHAPE, **SIZES)
        quantise(folder, name)
        logits = answer(load_model(folder, load_format="dummy", dtype="float32"), 40)
        assert logits.isfinite().all()
        assert 0.3 < logits.std() < 5


def test_a_scale_counts_for_its_columns_only() -> None:
    weight, scale = torch.ones(2, 5, dtype=torch.int8), torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert dequantize(QuantizedMatrix(weight, scale, 2, 1)).tolist() == [[1, 2, 2, 3, 3], [4, 5, 5, 6, 6]]


@pytest.mark.parametrize(
    ("rule", "meant"),
    [
        ("lm_head", {"lm_head"}),
        ("model.layers.1", {"model.layers.1.mlp.up_proj"}),
        ("up_proj", {"model.layers.1.mlp.up_proj", "model.layers.10.mlp.up_proj"}),
        ("proj", set()),
        ("re:model.layers.1\\.", {"model.layers.1.mlp.up_proj"}),
        ("re:layers", set()),
    ],
)
def test_a_rule_means_a_whole_module_and_what_is_in_it(rule: str, meant: set[str]) -> None:
    modules = ("lm_head", "model.layers.1.mlp.up_proj", "model.layers.10.mlp.up_proj")
    assert {module for module in modules if matches_rule(module, rule)} == meant


@pytest.mark.parametrize(
    ("actorder", "ordered"), [("group", True), (True, True), ("weight", False), ("static", False), (None, False)]
)
def test_columns_are_in_another_order_where_the_checkpoint_says_so_by_name_or_as_true(
    actorder: object, ordered: bool
) -> None:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "actorder": actorder}
    group = {"weights": weights, "format": "pack-quantized"}
    config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    scheme = read_scheme({"quantization_config": config})
    assert scheme is not None and isinstance(scheme.layout, IntegerScheme)
    assert scheme.layout.ordered is ordered


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("block", [scaled.ROW, scaled.TILE, (4, 8), (UNLIMITED, UNLIMITED)])
def test_numbers_are_quantised_some_rows_at_a_time_as_all_at_once(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, block: tuple[int, int]
) -> None:
    weight = torch.randn(150, 20)
    numbers, scale = scaled.quantize(weight, dtype, block)
    expanded = scale[torch.arange(150) // min(block[0], 150)]
    for at_once in (1, 100, 1 << 17):
        monkeypatch.setattr(scaled, "AT_ONCE", at_once)
        found = torch.zeros(150, 20, dtype=dtype)
        assert scaled.quantize_into(found, weight, block).equal(expanded)
        assert found.view(torch.int8).equal(numbers.view(torch.int8))


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_words_are_the_bytes_that_they_are_made_of(bits: int) -> None:
    matrix = Matrix((MatrixPart("m", 6, slice(0, 6)),), 64, slice(0, 64), torch.float32, torch.device("cpu"))
    part = IntegerTensors(matrix.parts[0], matrix, IntegerScheme("packed", 32, zeros=False, bits=bits))
    part.weight.random_(-(1 << 31), 1 << 31)
    numbers = scaled.unpack(part.weight, bits, 1)
    assert part.bytes().equal(pack_pairs(numbers) if bits == 4 else numbers)
