"""Build: what is cut, fused and formatted comes out as the whole would have."""

from __future__ import annotations

import threading
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from quire.errors import InvalidModel
from quire.layers.builder import ExpertNames, ModelBuilder
from quire.layers.linear import ParallelGroup, heads_divide, shard_of, widths_of
from quire.layers.moe import MoEConfig
from quire.layers.quantization import packed
from quire.layers.quantization.base import Format, Plain, WeightSlot
from quire.layers.quantization.packed import Packed
from quire.ops.reference import ReferenceOps
from tests.ranks import RankThreads


class Rank(ParallelGroup):
    """One of several ranks, alone in its process: its sums stay partial, its gathers its own."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def build(parallel: ParallelGroup | None = None, format: Format = Plain) -> ModelBuilder:
    return ModelBuilder(
        ops=ReferenceOps(),
        parallel=parallel or ParallelGroup(),
        dtype=torch.float32,
        device=torch.device("cpu"),
        format=format,
    )


def fill(made: ModelBuilder, tensors: dict[str, Tensor]) -> None:
    """As the loader does: every place gets its cut."""
    for name, places in made.slots.items():
        for place in places:
            assert tuple(tensors[name].shape) == place.shape
            place.copy_from(tensors[name][place.shard])
    made.finalize()


def randoms(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name.replace("__", "."): torch.randn(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("format", [Plain, Packed])
def test_fused_columns_stand_side_by_side(format: Format) -> None:
    made = build(format=format)
    fused = made.scope("mlp").column_parallel(("a", "b"), 6, ((4, 1), (3, 1)), bias=True)
    tensors = randoms(mlp__a__weight=(4, 6), mlp__b__weight=(3, 6), mlp__a__bias=(4,), mlp__b__bias=(3,))
    fill(made, tensors)
    x = torch.randn(2, 6)
    parts = [x @ tensors[f"mlp.{n}.weight"].T + tensors[f"mlp.{n}.bias"] for n in "ab"]
    torch.testing.assert_close(fused(x), torch.cat(parts, -1))


@pytest.mark.parametrize("format", [Plain, Packed])
def test_the_shards_of_all_ranks_add_up_to_the_whole(format: Format) -> None:
    tensors = randoms(up__weight=(8, 6), up__bias=(8,), down__weight=(5, 8), down__bias=(5,))
    x = torch.randn(3, 6)
    whole = (x @ tensors["up.weight"].T + tensors["up.bias"]) @ tensors["down.weight"].T + tensors["down.bias"]
    partial = []
    for rank in range(2):
        made = build(Rank(rank, 2), format)
        up, down = (
            made.column_parallel(("up",), 6, ((4, 2),), bias=True),
            made.row_parallel("down", (4, 2), 5, bias=True),
        )
        fill(made, tensors)
        assert up(x).shape == (3, 4)
        partial.append(down(up(x)))
    torch.testing.assert_close(sum(partial), whole)


def test_transposed_matrices_are_transposed_back() -> None:
    tensors = randoms(c__weight=(6, 8), c__bias=(8,))
    x = torch.randn(3, 6)
    halves = []
    for rank in range(2):
        made = build(Rank(rank, 2))
        c = made.column_parallel(("c",), 6, ((8, 1),), bias=True, transposed=True)
        fill(made, tensors)
        halves.append(c(x))
    torch.testing.assert_close(torch.cat(halves, -1), x @ tensors["c.weight"] + tensors["c.bias"])


@pytest.mark.parametrize("transposed", [False, True])
def test_a_matrix_that_holds_q_k_and_v_is_cut_between_heads(transposed: bool) -> None:
    tensors = randoms(qkv__weight=(6, 16) if transposed else (16, 6), qkv__bias=(16,))
    weight = tensors["qkv.weight"].T if transposed else tensors["qkv.weight"]
    x = torch.randn(3, 6)
    q, k, v = (x @ weight.T + tensors["qkv.bias"]).split([8, 4, 4], -1)
    for rank in range(2):
        made = build(Rank(rank, 2))
        fused = made.column_parallel(("qkv",), 6, ((4, 2), (2, 2), (2, 2)), bias=True, transposed=transposed)
        fill(made, tensors)
        own = torch.cat([part.chunk(2, -1)[rank] for part in (q, k, v)], -1)
        torch.testing.assert_close(fused(x), own)


@pytest.mark.parametrize("format", [Plain, Packed])
def test_a_tied_head_is_the_embeddings_table_and_needs_no_tensor(format: Format) -> None:
    made = build(format=format)
    embedding = made.embedding("embed", 10, 4)
    head = made.head("lm_head", 4, 10, embedding)
    assert list(made.slots) == ["embed.weight"]
    assert made.ignored == ["lm_head.weight"]
    tensors = randoms(embed__weight=(10, 4))
    fill(made, tensors)
    torch.testing.assert_close(head(torch.eye(4)), tensors["embed.weight"].T)
    torch.testing.assert_close(embedding(torch.tensor([3, 1])), tensors["embed.weight"][[3, 1]])


def test_a_matrix_has_memory_only_while_it_is_filled() -> None:
    spare: list[Tensor] = []
    made = build(format=partial(Packed, spare=spare))
    made.column_parallel(("a", "b"), 6, ((4, 1), (4, 1)))
    made.column_parallel(("c",), 6, ((4, 1),))
    tensors = randoms(a__weight=(4, 6), b__weight=(4, 6), c__weight=(4, 6))
    a, b, c = (made.slots[f"{name}.weight"][0] for name in "abc")
    tile = made.matrices[0].tiles[0]
    assert tile.memory is None
    b.copy_from(tensors["b.weight"])
    memory = weakref.ref(tile.memory)
    assert memory() is not None
    a.copy_from(tensors["a.weight"])
    assert tile.memory is None
    assert [memory()] == spare, "the next matrix is put together in it"
    c.copy_from(tensors["c.weight"])
    assert [memory()] == spare
    made.finalize()
    assert memory() is None


def test_a_large_matrix_is_kept_in_tiles_that_multiply_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "TILE", 3 * 6 * 4)
    for transposed in (False, True):
        made = build(format=Packed)
        parts = (("c",) if transposed else ("a", "b")), 6, ((4, 1), (7, 1))
        fused = made.column_parallel(*parts, bias=True, transposed=transposed)
        tensors = randoms(a__weight=(4, 6), b__weight=(7, 6), a__bias=(4,), b__bias=(7,))
        whole, bias = (torch.cat([tensors[f"{n}.{kind}"] for n in "ab"]) for kind in ("weight", "bias"))
        fill(made, {"c.weight": whole.T, "c.bias": bias} if transposed else tensors)
        assert [rows.stop - rows.start for rows in made.matrices[0].cuts] == [3, 3, 3, 2]
        x = torch.randn(2, 6)
        torch.testing.assert_close(fused(x), x @ whole.T + bias)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_slot_is_filled_in_pieces(transposed: bool) -> None:
    into = torch.zeros(10, 4)
    whole = torch.randn(4, 12) if transposed else torch.randn(12, 4)
    cut = (slice(0, 4), slice(1, 11)) if transposed else (slice(1, 11), slice(0, 4))
    place = WeightSlot("a", tuple(whole.shape), cut, into, transposed)
    pieces = list(place.split(9))
    assert len(pieces) >= 4
    assert max(piece.target.numel() for piece in pieces) <= 10
    for piece in pieces:
        piece.copy_from(whole[piece.shard])
    torch.testing.assert_close(into, whole[cut].T if transposed else whole[cut])


def test_a_head_has_a_part_of_the_vocabulary_where_all_ranks_have_as_many_tokens_in_whole_units() -> None:
    ranks, weight = RankThreads(2), torch.randn(64, 4)

    def work(rank: int) -> tuple[int, Tensor, Tensor, Tensor]:
        made = build(ranks.groups[rank])
        head = made.head("lm_head", 4, 64, None, soft_cap=2.0, scale=0.5)
        fill(made, {"lm_head.weight": weight})
        part, hidden = head.part(32), torch.eye(4)
        assert part is not None and part.size == 2 and head.part(64) is None
        own = part.logits(hidden)
        return part.first, own, part.gather(own), head(hidden)

    made = ranks.run(work)
    ranks.close()
    assert [first for first, *_ in made] == [0, 32] and made[0][1].shape == (4, 32)
    assert all(torch.equal(gathered, whole) for _, _, gathered, whole in made)
    assert build().head("lm_head", 4, 64, None).part(32) is None
    assert build(Rank(0, 3)).head("lm_head", 4, 64, None).part(1) is None


def test_heads_are_divided_whole_and_kv_heads_may_be_replicated() -> None:
    assert [shard_of(6, Rank(r, 2), "heads", 4) for r in range(2)] == [slice(0, 12), slice(12, 24)]
    assert [shard_of(2, Rank(r, 4), "heads", 4) for r in range(4)] == [slice(0, 4)] * 2 + [slice(4, 8)] * 2
    with pytest.raises(InvalidModel, match="3 heads cannot be divided among 4 ranks"):
        shard_of(3, Rank(0, 4), "heads")
    assert [heads_divide(*heads, 4) for heads in ((8, 2), (8, 8), (6, 2), (12, 3), (8, 0))] == [1, 1, 0, 0, 1]


@pytest.mark.parametrize(("count", "size"), [(8, 2), (33, 2), (7, 3), (199, 4), (4, 4)])
def test_a_width_is_divided_whole_and_almost_evenly(count: int, size: int) -> None:
    shards = [shard_of(count, Rank(rank, size), "width", 8) for rank in range(size)]
    assert [n for shard in shards for n in range(shard.start, shard.stop)] == list(range(8 * count))
    widths = [(shard.stop - shard.start) // 8 for shard in shards]
    assert tuple(widths) == widths_of(count, size) and max(widths) - min(widths) <= 1


def test_a_width_with_fewer_groups_than_ranks_is_refused_with_what_fits() -> None:
    with pytest.raises(InvalidModel, match=r"a width of 3 in groups of 1 .* 4 ranks: --tensor-parallel-size 3 is"):
        build(Rank(0, 4)).gated_mlp(8, 3, "silu")


@pytest.mark.parametrize("format", [Plain, Packed])
def test_ranks_add_up_to_a_mixture_whose_biases_count_once(format: Format) -> None:
    mixture = MoEConfig(num_experts=3, num_experts_per_token=2, width=6, biased=True)
    names = ExpertNames("router", ("experts.gate_up", "experts.down"), transposed=True)
    shapes: dict[str, tuple[int, ...]] = {"router.weight": (3, 8), "router.bias": (3,)}
    for e in range(3):
        shapes |= {f"experts.gate_up.{e}.weight": (8, 12), f"experts.gate_up.{e}.bias": (12,)}
        shapes |= {f"experts.down.{e}.weight": (6, 8), f"experts.down.{e}.bias": (8,)}
    tensors, x = randoms(**shapes), torch.randn(7, 8)

    def made(parallel: ParallelGroup) -> Tensor:
        builder = build(parallel, format)
        experts = builder.experts(8, mixture, "clamped", names=names)
        fill(builder, tensors)
        return experts(x)

    whole = made(ParallelGroup())
    torch.testing.assert_close(sum(made(Rank(rank, 3)) for rank in range(3)), whole)
    shares, chosen = (x @ tensors["router.weight"].T + tensors["router.bias"]).softmax(-1).topk(2)
    for row, token in enumerate(x):
        want = torch.zeros(8)
        for e, share in zip(chosen[row].tolist(), shares[row] / shares[row].sum(), strict=True):
            gate, up = (token @ tensors[f"experts.gate_up.{e}.weight"] + tensors[f"experts.gate_up.{e}.bias"]).chunk(2)
            gate, up = gate.clamp(max=7), up.clamp(-7, 7)
            inner = gate * torch.sigmoid(1.702 * gate) * (up + 1)
            want += share * (inner @ tensors[f"experts.down.{e}.weight"] + tensors[f"experts.down.{e}.bias"])
        torch.testing.assert_close(whole[row], want)


def test_heads_keep_their_own_sinks() -> None:
    builders = [build(Rank(rank, 3)) for rank in range(3)]
    sinks = [each.sinks("sinks", 6) for each in builders]
    for each in builders:
        fill(each, {"sinks": torch.arange(6.0)})
    assert [each.tolist() for each in sinks] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("normalize", [False, True])
def test_a_mixture_is_the_same_in_one_tensor_and_in_separate_matrices(normalize: bool) -> None:
    mixture = MoEConfig(num_experts=5, num_experts_per_token=2, width=6, normalize_weights=normalize)
    names = [f"mlp.experts.{e}.{part}_proj" for e in range(5) for part in ("gate", "up", "down")]
    shapes = {f"{name}.weight": (8, 6) if "down" in name else (6, 8) for name in names} | {"mlp.gate.weight": (5, 8)}
    tensors = randoms(**shapes)
    x, results = torch.randn(7, 8), []
    for format in (Plain, Packed):
        made = build(format=format)
        experts = made.experts(8, mixture, "silu")
        fill(made, tensors)
        results.append(experts(x))
    torch.testing.assert_close(*results)
    shares, chosen = (x @ tensors["mlp.gate.weight"].T).softmax(-1).topk(2)
    shares = shares / shares.sum(-1, keepdim=True) if normalize else shares
    for row, token in enumerate(x):
        want = torch.zeros(8)
        for e, share in zip(chosen[row].tolist(), shares[row], strict=True):
            gate, up, down = (tensors[f"mlp.experts.{e}.{part}_proj.weight"] for part in ("gate", "up", "down"))
            want += share * (down @ (torch.nn.functional.silu(gate @ token) * (up @ token)))
        torch.testing.assert_close(results[0][row], want)


@pytest.mark.parametrize("format", [Plain, Packed])
@pytest.mark.parametrize("transposed", [False, True])
def test_experts_in_one_tensor_are_those_in_many(transposed: bool, format: Format) -> None:
    mixture = MoEConfig(num_experts=5, num_experts_per_token=2, width=6, sigmoid=True, corrected=True, shared=4)
    mixture = replace(mixture, gated_shared=True)
    names = ExpertNames(matrices=("experts.gate_up", "experts.down"), transposed=transposed)
    shapes = {f"mlp.experts.{e}.{part}_proj.weight": (6, 8) for e in range(5) for part in ("gate", "up")}
    shapes |= {f"mlp.experts.{e}.down_proj.weight": (8, 6) for e in range(5)}
    shapes |= {f"mlp.shared_experts.{part}_proj.weight": (4, 8) for part in ("gate", "up")}
    shapes |= {"mlp.shared_experts.down_proj.weight": (8, 4), "mlp.shared_expert_gate.weight": (1, 8)}
    tensors = randoms(**shapes, **{"mlp.gate.weight": (5, 8), "mlp.gate.e_score_correction_bias": (5,)})
    for e in range(5):
        gate, up, down = (tensors[f"mlp.experts.{e}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        both = torch.cat((gate, up))
        tensors[f"experts.gate_up.{e}.weight"] = both.t() if transposed else both
        tensors[f"experts.down.{e}.weight"] = down.t() if transposed else down
    x, results = torch.randn(7, 8), []
    for used in (names, ExpertNames()):
        made = build(format=format)
        experts = made.experts(8, mixture, "silu", names=used)
        fill(made, tensors)
        results.append(experts(x))
    torch.testing.assert_close(*results)


def test_weights_of_inputs_are_inside_the_activation() -> None:
    mixture = MoEConfig(num_experts=3, num_experts_per_token=2, width=6, normalize_weights=False, weighs_inputs=True)
    made = build()
    experts = made.experts(8, mixture, "silu")
    shapes = {f"mlp.experts.{e}.{part}_proj.weight": (6, 8) for e in range(3) for part in ("gate", "up")}
    shapes |= {f"mlp.experts.{e}.down_proj.weight": (8, 6) for e in range(3)} | {"mlp.gate.weight": (3, 8)}
    tensors = randoms(**shapes)
    fill(made, tensors)
    x = torch.randn(4, 8)
    shares, chosen = (x @ tensors["mlp.gate.weight"].T).softmax(-1).topk(2)
    want = torch.zeros(4, 8)
    for row in range(4):
        for e, share in zip(chosen[row].tolist(), shares[row], strict=True):
            gate, up, down = (tensors[f"mlp.experts.{e}.{part}_proj.weight"] for part in ("gate", "up", "down"))
            read = share * x[row]
            want[row] += down @ (torch.nn.functional.silu(gate @ read) * (up @ read))
    torch.testing.assert_close(experts(x), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tile_takes_its_matrix_dtype_and_is_packed_when_its_last_part_has_come(
    dtype: torch.dtype,
) -> None:
    """Two tiles after each other in the same memory, each written in two parts."""
    spare: list[torch.Tensor] = []
    for rows in (slice(0, 4), slice(4, 7)):
        done: list[torch.Tensor] = []
        tile = packed.Tile(rows, 6, dtype, spare, lambda whole, done=done: done.append(whole.clone()))
        wanted = torch.arange(6.0 * (rows.stop - rows.start)).view(-1, 6).to(dtype) + rows.start
        assert tile.outline.shape == wanted.shape and tile.outline.nbytes == wanted.nbytes
        for part in (slice(0, 1), slice(1, None)):
            assert not done
            tile.acquire(tile.outline[part]).copy_(wanted[part])
            tile.release(tile.outline[part])
        assert len(done) == 1 and done[0].equal(wanted) and done[0].dtype is dtype
        assert tile.memory is None and len(spare) == 1


def test_matrices_are_converted_beside_each_other_and_embeddings_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    together, order = threading.Barrier(2), list[str]()

    class Slow(Plain):
        def finalize(self) -> None:
            if self.matrix.parts[0].name != "table":
                together.wait(60)  # until another is converted, too
            assert torch.is_inference_mode_enabled()
            order.append(self.matrix.parts[0].name)

    made = build(format=Slow)
    made.column_parallel(("a",), 6, ((3, 1),))
    made.column_parallel(("b",), 6, ((3, 1),))
    made.embeddings.append(
        Slow(
            replace(made.matrices[0].matrix, parts=(made.matrices[0].matrix.parts[0]._replace(name="table"),)), made.ops
        )
    )
    made.finalize()
    assert order[0] == "table"
    assert set(order[1:]) == {"a", "b"}


def test_the_first_matrix_that_cannot_be_converted_says_why() -> None:
    class Broken(Plain):
        def finalize(self) -> None:
            raise InvalidModel(f"{self.matrix.parts[0].name} is corrupt")

    made = build(format=Broken)
    for name in "abc":
        made.column_parallel((name,), 6, ((3, 1),))
    with pytest.raises(InvalidModel, match="a is corrupt"):
        made.finalize()
