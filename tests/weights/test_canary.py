"""K/V in float8: near what it was, in half the memory, and where it is not near, not at all."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quire.assembly.engine import make_executor
from quire.config import Settings
from quire.errors import InvalidModel
from quire.executors.local import LocalExecutor
from quire.layers.quantization.base import WeightStorage
from quire.ops.quantized import E4M3, FLOAT8, Float8, to_fp8
from quire.weights.canary import ROOM, float8_layers, scale_of
from quire.weights.files import SINGLE, Checkpoint
from quire.weights.kv_scales import kv_scales
from quire.weights.load import load_model
from tests.checkpoints import make
from tests.models.feeding import Feeder
from tests.weights.test_load import SHAPE, edit

TOKENS = [7 * i % 199 for i in range(80)]
CPU = torch.device("cpu")


def test_keys_and_values_in_float8_answer_nearly_the_same(tmp_path: Path) -> None:
    make(tmp_path, SHAPE)
    model = load_model(tmp_path, dtype="float32")
    layers, quality = float8_layers(model, TOKENS, CPU)
    assert all(layer.dtype is E4M3 and layer.k_scale > 0 and layer.v_scale > 0 for layer in layers)
    assert 0 < quality.kl < 0.05
    assert quality.agreement > 0.7


def test_a_float8_pool_holds_what_was_written_to_the_last_bit_of_its_mantissa(tmp_path: Path) -> None:
    make(tmp_path, SHAPE)
    model = load_model(tmp_path, dtype="float32")
    layers, _ = float8_layers(model, TOKENS, CPU)
    plain, small = (Feeder(model, page_size=8) for _ in range(2))
    small.keep(layers)
    plain.step([(0, TOKENS[:30])])
    small.step([(0, TOKENS[:13])])
    small.step([(0, TOKENS[13:30])])
    for exact, stored in zip(plain.kv[:1], small.kv[:1], strict=True):
        for pool, kept, scale in ((exact.k, stored.k, stored.k_scale), (exact.v, stored.v, stored.v_scale)):
            there = ~pool.isnan()
            assert int(there.sum()) == 32 * 22, "four pages, the last of them cleared before it is begun"
            error = (kept.float() * scale - pool)[there].abs()
            assert bool((error <= (pool[there].abs() / 16).clamp(min=scale * 2**-9)).all())


@pytest.mark.parametrize("form", FLOAT8.values(), ids=FLOAT8)
def test_a_layer_whose_numbers_float8_cannot_hold_keeps_the_models_dtype(tmp_path: Path, form: Float8) -> None:
    make(tmp_path, SHAPE)
    name = "model.layers.1.self_attn.k_proj.bias"
    bias = load_file(tmp_path / SINGLE)[name]
    # Beside it all others underflow.
    bias[3] = 1e7 if form.dtype is E4M3 else 1e13
    edit(tmp_path, **{name: bias})
    model = load_model(tmp_path, dtype="float32")
    layers, _ = float8_layers(model, TOKENS, CPU, form=form)
    assert [layer.dtype for layer in layers] == [form.dtype, torch.float32, form.dtype]
    assert (layers[1].k_scale, layers[1].v_scale) == (1.0, 1.0)


NAMES = {
    "compressed-tensors": ("self_attn.k_scale", "self_attn.v_scale"),
    "modelopt": ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    "older compressed-tensors": ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
    "one for both": ("self_attn.kv_scale",),
}


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
def test_scales_of_a_checkpoint_are_used_where_it_has_some(names: tuple[str, ...], tmp_path: Path) -> None:
    make(tmp_path, SHAPE)
    edit(
        tmp_path,
        **{f"model.layers.{i}.{name}": torch.tensor([0.5 + j]) for i in (0, 2) for j, name in enumerate(names)},
    )
    settings = Settings.of(model=str(tmp_path), kv_cache_dtype="fp8", dtype="float32", canary="warn")
    with closing(make_executor(settings).executor) as executor:
        assert isinstance(executor, LocalExecutor)
        kept = [(each.k_scale, each.v_scale) for each in executor.runner.kv]
    measured, _ = float8_layers(load_model(tmp_path, dtype="float32"), (), CPU)
    assert kept[0] == kept[2] == (0.5, 1.5 if len(names) == 2 else 0.5)
    assert kept[1] == pytest.approx((measured[1].k_scale, measured[1].v_scale), rel=1e-4)


def test_a_scale_that_is_no_positive_number_is_refused_by_name(tmp_path: Path) -> None:
    make(tmp_path, SHAPE)
    for wrong in (torch.tensor([0.0]), torch.tensor([float("nan")]), torch.ones(3)):
        edit(tmp_path, **{"model.layers.1.self_attn.k_scale": wrong})
        load_model(tmp_path, dtype="float32")
        with pytest.raises(InvalidModel, match=r"model\.layers\.1\.self_attn\.k_scale must be one positive number"):
            kv_scales(Checkpoint(tmp_path).entries)


@pytest.mark.parametrize(("name", "error"), [("fp8", 0.07), ("fp8_e5m2", 0.126)])
def test_values_four_times_as_large_as_the_probes_are_held(name: str, error: float) -> None:
    form, found = FLOAT8[name], torch.linspace(-3.0, 3.0, 400).view(100, 2, 2)
    scale = scale_of(found, form)
    assert scale is not None
    larger = ROOM * found
    assert ((to_fp8(larger, scale, form.dtype).float() * scale - larger).abs() <= error * larger.abs()).all()
    assert to_fp8(100 * larger, scale, form.dtype).float().abs().max() == form.most
    assert scale_of(torch.zeros(4, 2, 2), form) is scale_of(torch.full((4, 2, 2), torch.inf), form) is None


class Asked:
    """A canary that measures nothing. asked: (what was measured against, whether anything was quantised). known: what
    an earlier start found."""

    known = None

    def __init__(self) -> None:
        self.asked: list[tuple[object, bool]] = []

    def record_reference(self, model: object, device: torch.device) -> str:
        return f"before it was quantised, on {device}"

    def check(self, model: object, stored: list[WeightStorage], device: torch.device, reference: object) -> None:
        self.asked.append((reference, any(each.quantized is not None for each in stored)))


def test_weights_quantised_here_are_measured_against_those_of_the_file(tmp_path: Path) -> None:
    make(tmp_path, SHAPE)
    found = {}
    for load_format in ("auto", "dummy"):
        for quantization in ("auto", "int8"):
            canary: Any = Asked()
            load_model(tmp_path, dtype="float32", load_format=load_format, quantization=quantization, canary=canary)
            found[load_format, quantization] = canary.asked
    assert found == {
        ("auto", "auto"): [],
        ("auto", "int8"): [("before it was quantised, on cpu", True)],
        ("dummy", "auto"): [],
        ("dummy", "int8"): [],
    }
