"""Every feature of every shape counts: with any one of them left out, the logits are others.

CI leaves features out of every third architecture, `make nightly` of all.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
import torch

from quire.layers.basic import RopeConfig
from quire.models.spec import ModelSpec
from quire.types import UNLIMITED
from quire.weights import load
from tests.checkpoints import FIRST, SHAPES, make
from tests.models.feeding import LENGTHS, Feeder


def plain(rope: RopeConfig) -> RopeConfig:
    return RopeConfig(dim=rope.dim, theta=rope.theta, interleaved=rope.interleaved)


def of_rope(**change: object) -> Callable[[ModelSpec], ModelSpec]:
    return lambda spec: replace(
        spec,
        rope=replace(spec.rope, **change),
        ropes=spec.ropes and tuple(replace(rope, **change) for rope in spec.ropes),
    )


def without_scaling(spec: ModelSpec) -> ModelSpec:
    return replace(spec, rope=plain(spec.rope), ropes=tuple(map(plain, spec.ropes)))


def slower(rope: RopeConfig) -> RopeConfig:
    return replace(rope, theta=2 * rope.theta) if rope.dim else rope


def experts(**change: object) -> Callable[[ModelSpec], ModelSpec]:
    return lambda spec: replace(spec, experts=spec.experts and replace(spec.experts, **change))


def indexed(more: int | None) -> Callable[[ModelSpec], ModelSpec]:
    """An indexer that chooses so many tokens more; None: no indexer."""

    def changed(spec: ModelSpec) -> ModelSpec:
        if spec.latent is None or spec.latent.index is None:
            return spec
        index = None if more is None else replace(spec.latent.index, top=spec.latent.index.top + more)
        return replace(spec, latent=replace(spec.latent, index=index))

    return changed


WITHOUT: Mapping[str, Callable[[ModelSpec], ModelSpec]] = MappingProxyType(
    {
        "windows": lambda spec: replace(spec, windows=(UNLIMITED,) * spec.layers),
        "one more in a window": lambda spec: replace(spec, windows=tuple(min(UNLIMITED, w + 1) for w in spec.windows)),
        "chunks": lambda spec: replace(spec, chunks=()),
        "one more in a chunk": lambda spec: replace(spec, chunks=tuple(min(UNLIMITED, n + 1) for n in spec.chunks)),
        "rope": lambda spec: replace(spec, rope=slower(spec.rope), ropes=tuple(map(slower, spec.ropes))),
        "rope scaling": without_scaling,
        "rope gain": of_rope(gain=1.0, short_gain=1.0),
        "rope rounding": of_rope(full_dim=True),
        "rope of neighbours": of_rope(interleaved=False),
        "gain of queries": of_rope(query_beta=0.0),
        "embedding scale": lambda spec: replace(spec, embedding_scale=1.0),
        "residual scale": lambda spec: replace(spec, residual_scale=1.0),
        "logit scale": lambda spec: replace(spec, logit_scale=1.0),
        "shift of norms": lambda spec: replace(spec, norm_shift=0.0),
        "norms after rope": lambda spec: replace(
            spec, qk_norm="each" if spec.qk_norm == "after_rope" else spec.qk_norm
        ),
        "local ropes": lambda spec: replace(
            spec, ropes=tuple(replace(spec.rope, dim=rope.dim or spec.rope.dim) for rope in spec.ropes)
        ),
        "norms of values": lambda spec: replace(spec, norm_values=False),
        "scale": lambda spec: replace(spec, scale=spec.scale and spec.head_dim**-0.5),
        "cap of scores": lambda spec: replace(spec, score_cap=0.0),
        "cap of logits": lambda spec: replace(spec, logit_cap=0.0),
        "renormalisation": lambda spec: (
            spec if spec.experts and spec.experts.margin else experts(normalize_weights=True)(spec)
        ),
        "margin": experts(margin=0.0),
        "narrower margin": lambda spec: replace(
            spec, experts=spec.experts and replace(spec.experts, margin=spec.experts.margin / 4)
        ),
        "shares as they are": experts(normalize_weights=False),
        "sigmoid of shares": experts(sigmoid=False),
        "groups of experts": experts(groups=1, used_groups=1),
        "scale of shares": experts(scale=1.0),
        "weighed inputs": experts(weighs_inputs=False),
        "first step of gains": of_rope(query_shift=0),
        "choice of tokens": indexed(None),
        "one more token": indexed(1),
        "an expert": lambda spec: replace(
            spec,
            experts=spec.experts
            and replace(spec.experts, num_experts_per_token=max(1, spec.experts.num_experts_per_token - 1)),
        ),
        "activation": lambda spec: replace(
            spec, activation="gelu_pytorch_tanh" if spec.activation == "silu" else spec.activation
        ),
    }
)


def logits(folder: Path) -> torch.Tensor:
    """Of one prompt longer than every window and every rope's original context."""
    chance = random.Random(0)
    tokens = [chance.randrange(199) for _ in range(70)]
    return Feeder(load.load_model(folder, dtype="float32"), page_size=16).step([(0, tokens)])[0]


THIRD = [pytest.param(shape, marks=() if shape in sorted(FIRST)[::3] else pytest.mark.nightly) for shape in SHAPES]


@pytest.mark.parametrize("shape", THIRD)
def test_no_feature_of_a_shape_can_be_left_out(shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, shape)
    whole = logits(tmp_path)
    read = load.read_spec
    given = read(load.read_config(tmp_path))
    left_out = {name: change(given) for name, change in WITHOUT.items() if change(given) != given}
    assert "rope" in left_out or not given.rope.dim, "GPT-2's features are tensors, and those cannot be left out"
    for name, less in left_out.items():
        if (
            name == "shares as they are"
            and less.experts
            and (less.experts.num_experts_per_token == less.experts.num_experts or less.experts.gained)
        ):
            continue  # the shares of all sum to 1, and Gemma 4 norms what its experts make
        monkeypatch.setattr(load, "read_spec", lambda config, less=less, **rest: less)
        assert (logits(tmp_path) - whole).abs().max() > 1e-3, f"{shape} does not show {name}"


def test_every_feature_is_shown_by_at_least_one_shape(tmp_path: Path) -> None:
    shown = set()
    for shape in SHAPES:
        make(tmp_path / shape, shape)
        spec = load.read_spec(load.read_config(tmp_path / shape))
        shown |= {name for name, change in WITHOUT.items() if change(spec) != spec}
    assert shown == set(WITHOUT)


def test_every_family_comes_in_shapes_that_leave_no_way_out(tmp_path: Path) -> None:
    """At least three, odd head counts and shared heads among them, prompts beyond each window and each rope's limit."""
    families: dict[str, list[ModelSpec]] = {}
    for shape in SHAPES:
        make(tmp_path / shape, shape)
        spec = load.read_spec(load.read_config(tmp_path / shape))
        families.setdefault(spec.architecture, []).append(spec)
        limits = [size for size in (*spec.windows, *spec.chunks) if size < UNLIMITED]
        limits += [rope.original for rope in (spec.rope, *spec.ropes) if rope.original < spec.context]
        assert max(limits, default=0) < sorted(LENGTHS)[-2], shape
    for name, specs in families.items():
        assert len(specs) >= 3, name
        assert any(spec.heads % 2 for spec in specs), name
        ratios = {spec.heads // spec.kv_heads for spec in specs}
        assert ratios == {1} if name == "GPT2LMHeadModel" else len(ratios) >= 2, name
        assert len({spec.head_dim for spec in specs}) >= 2, name


@pytest.mark.parametrize(
    "shape", [pytest.param(shape, marks=() if shape in FIRST else pytest.mark.nightly) for shape in SHAPES]
)
def test_what_is_wanted_alone_is_what_it_is_among_all(shape: str, tmp_path: Path) -> None:
    make(tmp_path, shape)
    model = load.load_model(tmp_path, dtype="float32")
    found = []
    for wanted in (None, torch.tensor([69, 3, 71], dtype=torch.int32)):
        feeder = Feeder(model, page_size=16)
        batch = feeder.pages.batch([(0, 0, list(range(70))), (1, 0, [5, 6])])
        with torch.inference_mode():
            found.append(model.forward(replace(batch, output_indices=wanted), feeder.kv)[[69, 3, 71]])
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)
