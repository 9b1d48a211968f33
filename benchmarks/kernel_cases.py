"""The shapes that `python -m benchmarks.kernels` times: those of the models on which Quire is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from quire.layers.delta import DeltaConfig, split_by_head
from quire.model_runner.device_state import COUNTERS
from quire.model_runner.device_steps import SCORE_WIDTH
from quire.model_runner.sampling.features import COLUMNS
from quire.ops.operands import Angles, DeltaWeights, Gate, Norm, Norms, ScanInputs, ScanWeights, Scores
from quire.ops.ragged import LayerKV, LayerState, RaggedBatch, StateSlots
from quire.ops.reference import ReferenceOps
from quire.ops.triton.ops import TritonOps
from quire.ops.triton.sampler import RequestedFeatures, RowHistories, SamplingTensors, sample
from quire.types import UNLIMITED

CACHE = 200 << 20
"""Bytes that calls are rotated through: several times an H200's L2."""

PAGE = 64
BF16 = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Case:
    """check: the relative error on the first call's inputs. calls: to be captured. bytes and flops: of one call."""

    name: str
    check: Callable[[], float]
    calls: Sequence[Callable[[], object]]
    bytes: float
    flops: float = 0.0


def noise(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, dtype=dtype, device="cuda")


def relative(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want|| in float32."""
    return float((got.float() - want.float()).norm() / want.float().norm().clamp_min(1e-30))


def copies(bytes_a_call: float, most: int = 64) -> int:
    return min(most, int(CACHE / bytes_a_call) + 1)


def batch_of(spans: Sequence[tuple[int, int]], pages: int, shared: int = 0) -> RaggedBatch:
    """spans: (tokens before, tokens fed) of each, over shuffled pages of a pool of `pages`. shared: pages that all
    begin with."""
    device = torch.device("cuda")
    lengths = [past + n for past, n in spans]
    needed = [-(-length // PAGE) for length in lengths]
    order = (torch.randperm(pages - 1)[: sum(needed)] + 1).to(torch.int32)
    table = torch.zeros(len(spans), max(needed), dtype=torch.int32)
    for s, own in enumerate(torch.split(order, needed)):
        table[s, : len(own)] = own
    table[:, :shared] = table[0, :shared]
    positions = torch.cat([torch.arange(past, past + n) for past, n in spans])
    span_of = torch.repeat_interleave(torch.arange(len(spans)), torch.tensor([n for _, n in spans]))
    slots = table[span_of, positions // PAGE].long() * PAGE + positions % PAGE
    starts = torch.tensor([0, *(n for _, n in spans)]).cumsum(0).to(torch.int32)
    return RaggedBatch(
        tokens=positions.to(device),
        positions=positions.to(device),
        slots=slots.to(device),
        query_start=starts.to(device),
        kv_len=torch.tensor(lengths, dtype=torch.int32, device=device),
        page_table=table.to(device),
        page_size=PAGE,
        max_query=max(n for _, n in spans),
        max_kv=max(lengths),
    )


@dataclass(frozen=True, slots=True)
class Heads:
    """One layer's."""

    count: int
    groups: int
    dim: int
    dtype: torch.dtype = BF16
    window: int = UNLIMITED

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.count}/{self.groups}x{self.dim} {kind}" + (f" window {self.window}" * (self.window < UNLIMITED))


def attention(ops: TritonOps, name: str, heads: Heads, spans: Sequence[tuple[int, int]], shared: int = 0) -> Case:
    """shared: tokens, of whole pages, that all spans begin with."""
    width = heads.groups * heads.dim * heads.dtype.itemsize
    held = sum(min(past + n, heads.window + n) for past, n in spans) - shared * (len(spans) - 1)
    needed = sum(-(-(past + n) // PAGE) for past, n in spans) + 1
    pages = max(needed, CACHE // (2 * PAGE * width))
    k, v = (noise(pages, heads.groups, PAGE, heads.dim, dtype=heads.dtype) for _ in "kv")
    kv = LayerKV(k, v)
    tokens = sum(n for _, n in spans)
    q = noise(tokens, heads.count, heads.dim, dtype=heads.dtype)
    batches = [ops.prepare(batch_of(spans, pages, shared // PAGE)) for _ in range(min(8, max(1, pages // needed)))]
    attend = partial(ops.attention, how=Scores(heads.dim**-0.5, heads.window))

    def check() -> float:
        exact = ReferenceOps()
        few = spans[: 64 if shared else 4]
        part = batch_of(few, pages, shared // PAGE)
        rows = sum(n for _, n in few)
        whole = LayerKV(kv.k.float(), kv.v.float()) if pages * width < 1 << 30 else kv
        want = exact.attention(q[:rows].to(whole.k.dtype), whole, part, Scores(heads.dim**-0.5, heads.window))
        return relative(attend(q[:rows], kv, part), want)

    flops = 4 * heads.count * heads.dim * sum(n * (past + (n + 1) / 2) for past, n in spans)
    calls = [partial(attend, q, kv, batch) for batch in batches for _ in range(max(1, 8 // len(batches)))]
    return Case(f"attention {name} {heads}", check, calls, 2.0 * held * width, flops)


def decode_cases(ops: TritonOps) -> Iterator[tuple[str, Callable[[], Case]]]:
    wide, narrow = Heads(32, 8, 128), Heads(16, 8, 128)
    ragged = [(int(x), 1) for x in torch.randint(100, 2000, (256,), generator=torch.Generator().manual_seed(0))]
    layouts = {
        "decode 256 x 1024": [(1023, 1)] * 256,
        "decode 64 x 1024": [(1023, 1)] * 64,
        "decode 16 x 8192": [(8191, 1)] * 16,
        "decode 1 x 1024": [(1023, 1)],
        "decode 8 x 1024": [(1023, 1)] * 8,
        "decode 256 ragged": ragged,
        "decode 1 x 32768": [(32767, 1)],
        "verify 16 x 4096, 5 each": [(4091, 5)] * 16,
        "mixed 63 x 1024 and 1 x 512": [(1023, 1)] * 63 + [(0, 512)],
        "prompt 1 x 2048": [(0, 2048)],
        "prompt 8 x 1024": [(0, 1024)] * 8,
        "prompt 1 x 8192": [(0, 8192)],
        "chunk 512 after 8192": [(8192, 512)],
        "decode 4 x 32768": [(32767, 1)] * 4,
        "chunk 8192 after 24576": [(24576, 8192)],
    }
    for name, spans in layouts.items():
        for heads in (wide, narrow) if name.startswith("decode") else (wide,):
            yield f"attention {name} {heads}", partial(attention, ops, name, heads, spans)
    for heads in (Heads(12, 12, 64, torch.float32), Heads(4, 1, 256), Heads(4, 1, 256, BF16, 512), Heads(32, 8, 64)):
        for count in (1, 64, 256):
            name = f"decode {count} x 1024"
            yield f"attention {name} {heads}", partial(attention, ops, name, heads, [(1023, 1)] * count)
    for what, spans, shared in (
        ("256 x 1100, 1024 shared", [(1099, 1)] * 256, 1024),
        ("256 x 1100, none shared", [(1099, 1)] * 256, 0),
        ("64 x 4200, 4096 shared", [(4199, 1)] * 64, 4096),
        ("64 x 4200, none shared", [(4199, 1)] * 64, 0),
        ("256 x 76, none shared", [(75, 1)] * 256, 0),
    ):
        heads = Heads(24, 8, 128)
        yield f"attention prefix {what} {heads}", partial(attention, ops, f"prefix {what}", heads, spans, shared)
    for heads in (Heads(12, 12, 64, torch.float32), Heads(4, 1, 256), Heads(32, 8, 64)):
        yield f"attention prompt 4 x 1024 {heads}", partial(attention, ops, "prompt 4 x 1024", heads, [(0, 1024)] * 4)


BEFORE = ", through registers"
"""After the names of cases that `attention_kernel` has, which was there before `latent_mma`."""


def latent_attention(
    ops: TritonOps, name: str, heads: int, spans: Sequence[tuple[int, int]], ringed: bool = True
) -> Case:
    """Attention of `heads` heads to the latents of DeepSeek V2 and V3. ringed: 16 and 32 rows by `latent_mma`."""
    if not ringed:
        ops = copy(ops)
        ops.card = replace(ops.card, shared=200 << 10)
    latents, rotated = 512, 64
    held, width = sum(past + n for past, n in spans), 2 * (latents + rotated)
    needed = sum(-(-(past + n) // PAGE) for past, n in spans) + 1
    pages = max(needed, CACHE // (PAGE * width))
    kv = LayerKV(noise(pages, 1, PAGE, rotated), noise(pages, 1, PAGE, latents))
    tokens = sum(n for _, n in spans)
    q, turned = noise(tokens, heads, latents), noise(tokens, heads, rotated)
    batches = [ops.prepare(batch_of(spans, pages)) for _ in range(min(8, max(1, pages // needed)))]
    attend = partial(ops.latent_attention, scale=0.05)

    def check() -> float:
        few = spans[:2]
        part, rows = batch_of(few, pages), sum(n for _, n in few)
        whole = LayerKV(kv.k.float(), kv.v.float())
        want = ReferenceOps().latent_attention(q[:rows].float(), turned[:rows].float(), whole, part, 0.05)
        return relative(attend(q[:rows], turned[:rows], kv, part), want)

    flops = 2 * heads * (2 * latents + rotated) * sum(n * (past + (n + 1) / 2) for past, n in spans)
    calls = [partial(attend, q, turned, kv, batch) for batch in batches for _ in range(max(1, 8 // len(batches)))]
    return Case(f"latent attention {name} {heads} heads{'' if ringed else BEFORE}", check, calls, held * width, flops)


def by_head(ops: TritonOps, tokens: int, heads: int, inputs: int, outputs: int) -> Case:
    """Products by head, with matrices cut out of one, as latent attention has them."""
    size = heads * inputs * outputs * 2
    weights = [noise(heads, inputs, outputs) for _ in range(copies(size))]
    x = noise(tokens, heads, inputs)

    def check() -> float:
        return relative(ops.heads_linear(x, weights[0]), ReferenceOps().heads_linear(x.float(), weights[0].float()))

    calls = [partial(ops.heads_linear, x, weight) for weight in weights]
    name = f"latent product {heads} heads {inputs} by {outputs} rows {tokens}"
    return Case(name, check, calls, size + 2 * tokens * heads * (inputs + outputs), 2.0 * tokens * size / 2)


def latent_cases(ops: TritonOps) -> Iterator[tuple[str, Callable[[], Case]]]:
    layouts = {
        "decode 1 x 1024": [(1023, 1)],
        "decode 16 x 1024": [(1023, 1)] * 16,
        "decode 64 x 1024": [(1023, 1)] * 64,
        "decode 256 x 1024": [(1023, 1)] * 256,
        **{f"decode {n} x 8192": [(8191, 1)] * n for n in (1, 16, 64)},
        **{f"decode {n} x 32768": [(32767, 1)] * n for n in (1, 16)},
        "verify 16 x 4096, 4 each": [(4092, 4)] * 16,
        "prompt 8 x 1024": [(0, 1024)] * 8,
        "prompt 1 x 4096": [(0, 4096)],
    }
    for name, spans in layouts.items():
        for heads in (16, 32, 128) if name.startswith("decode") else (16,):
            for ringed in (True, False) if heads < 64 and name.startswith("decode") else (True,):
                label = f"latent attention {name} {heads} heads{'' if ringed else BEFORE}"
                yield label, partial(latent_attention, ops, name, heads, spans, ringed)
    for tokens in (1, 16, 64, 256, 4096):
        for inputs, outputs in ((128, 512), (512, 128)):
            yield (
                f"latent product 16 heads {inputs} by {outputs} rows {tokens}",
                partial(by_head, ops, tokens, 16, inputs, outputs),
            )


CHOSEN = 2048
"""Tokens that DeepSeek V3.2's indexer chooses."""


def sparse_attention(ops: TritonOps, name: str, heads: int, spans: Sequence[tuple[int, int]]) -> Case:
    """An indexer's choice, and attention to what it chose, of DeepSeek V3.2's sizes. The floor counts the keys
    of every token, once, and the latents that each query chose."""
    needed, tokens = sum(-(-(past + n) // PAGE) for past, n in spans) + 1, sum(n for _, n in spans)
    pages = max(needed, CACHE // (PAGE * 256))
    kv = LayerKV(noise(pages, 1, PAGE, 64), noise(pages, 1, PAGE, 512), index=noise(pages, 1, PAGE, 128))
    batches = [ops.prepare(batch_of(spans, pages)) for _ in range(min(8, max(1, pages // needed)))]
    inputs = noise(tokens, 64, 128), noise(tokens, 64), noise(tokens, heads, 512), noise(tokens, heads, 64)
    angle = noise(tokens, 32, dtype=torch.float32)

    def call(which: TritonOps | ReferenceOps, kv: LayerKV, batch: RaggedBatch, inputs: Sequence[Tensor]) -> Tensor:
        (asked, gain, q, rotated), some = inputs, angle[: len(batch.positions)]
        found = which.choose_positions(asked, gain, kv, batch, Angles(some.cos(), some.sin()), CHOSEN)
        return which.latent_attention(q, rotated, kv, batch, 0.05, found)

    def check() -> float:
        few = spans[:2]
        held, rows = sum(-(-(past + n) // PAGE) for past, n in few) + 1, sum(n for _, n in few)
        part, asked, (gain, *others) = batch_of(few, held), inputs[0][:rows], (each[:rows] for each in inputs[1:])
        k, v, index = (pool[:held] for pool in kv.pools)
        exact = LayerKV(k.float(), v.float(), index=index)
        # Queries of the indexer are rounded when they are rotated, and so both choose by the same numbers.
        want = call(ReferenceOps(), exact, part, [asked.clone(), gain, *(each.float() for each in others)])
        return relative(call(ops, LayerKV(k, v, index=index), ops.prepare(part), [asked.clone(), gain, *others]), want)

    chosen = sum(min(CHOSEN, past + i + 1) for past, n in spans for i in range(n))
    read = 256 * sum(past + n for past, n in spans) + 1152 * chosen
    calls = [partial(call, ops, kv, batch, inputs) for batch in batches for _ in range(max(1, 8 // len(batches)))]
    return Case(f"sparse attention {name} {heads} heads", check, calls, read)


def sparse_cases(ops: TritonOps) -> Iterator[tuple[str, Callable[[], Case]]]:
    layouts = {f"decode {n} x {size}": [(size - 1, 1)] * n for n in (1, 16, 64) for size in (8192, 32768, 131072)}
    layouts |= {"prompt 1 x 8192": [(0, 8192)], "prompt 1 x 4096 after 28672": [(28672, 4096)]}
    for name, spans in layouts.items():
        yield f"sparse attention {name} 16 heads", partial(sparse_attention, ops, name, 16, spans)


@dataclass(frozen=True, slots=True)
class Recurrent:
    """One layer's: `heads` memories [keys, values], whose keys are of `groups`; delta: the gated delta rule."""

    heads: int
    groups: int
    keys: int
    values: int
    delta: bool

    @property
    def channels(self) -> int:
        """Of the convolution."""
        return self.heads * self.values + 2 * self.groups * self.keys

    @property
    def state_bytes(self) -> int:
        """Read for a sequence, and written."""
        return 4 * self.heads * self.keys * self.values + 3 * 2 * self.channels

    def flops(self, tokens: int) -> float:
        """Of a long span: products with memories, those among 64 tokens, and what makes changes of the delta rule."""
        memory, near = 2 * self.keys * self.values, 2 * 64 * (self.keys + self.values)
        return tokens * self.heads * (2 * memory + near + self.delta * (memory + near + 2 * 64 * self.keys))


RECURRENT: Mapping[str, Recurrent] = {
    "qwen3-next": Recurrent(32, 16, 128, 128, delta=True),
    "nemotron-h-8b": Recurrent(128, 8, 128, 64, delta=False),
    "granite-4-h-small": Recurrent(128, 1, 128, 64, delta=False),
}


def recurrent(ops: TritonOps, name: str, model: str, spans: Sequence[tuple[int, int]]) -> Case:
    """A layer from the convolution to the gated norm; the floor counts its inputs, outputs and states."""
    layer, tokens, count = RECURRENT[model], sum(n for _, n in spans), len(spans)
    inner, moved = layer.heads * layer.values, 2.0 * count * layer.state_bytes
    moved += 2 * tokens * (layer.channels + 2 * inner + 2 * layer.heads)
    sets = copies(count * layer.state_bytes, 16)
    memory = noise(1 + sets * count, layer.heads, layer.keys, layer.values, dtype=torch.float32)
    state = LayerState(noise(len(memory), 3, layer.channels), memory)
    for each in state:
        each[0] = 0
    batch = batch_of(spans, sum(-(-(past + n) // PAGE) for past, n in spans) + 1)
    last = batch.query_start[1:].long() - 1
    fading, rise, skip = (noise(layer.heads, dtype=torch.float32) for _ in range(3))
    gate, mixed, step, beta = (noise(tokens, size) for size in (inner, layer.channels, layer.heads, layer.heads))
    weight = 0.3 * noise(layer.channels, 4)
    if layer.delta:
        delta = DeltaWeights(weight, fading, rise, Norm(noise(layer.values), 1e-6))
        size = DeltaConfig(key_heads=layer.groups, value_heads=layer.heads, key=layer.keys, value=layer.values, width=4)
        inputs = split_by_head(size, [torch.cat((mixed, gate), -1), torch.cat((beta, step), -1)])
        plain, call = (partial(each.gated_delta, inputs, delta) for each in (ReferenceOps(), ops))
    else:
        scan = ScanWeights(
            weight, weight[:, 0].contiguous(), fading, rise, skip, Norm(noise(inner), 1e-5), (0.0, float("inf"))
        )
        asked = ScanInputs(gate, mixed, step)
        plain, call = (partial(each.selective_scan, asked, scan) for each in (ReferenceOps(), ops))

    def slots(which: int) -> RaggedBatch:
        own = torch.arange(1 + which * count, 1 + (which + 1) * count, device="cuda")
        target = torch.zeros(tokens, dtype=torch.int64, device="cuda").index_copy(0, last, own)
        fed = torch.tensor([past > 0 for past, _ in spans], device="cuda")
        return ops.prepare(replace(batch, states=StateSlots(own * fed, target, torch.zeros_like(target))))

    def check() -> float:
        alike = LayerState(*(each[: 1 + count].clone() for each in state))
        exact = LayerState(*(each.clone() for each in alike))
        first = slots(0)
        error = relative(call(alike, first), plain(exact, first))
        return max(error, relative(alike.memory[1:], exact.memory[1:]), relative(alike.window[1:], exact.window[1:]))

    calls = [partial(call, state, slots(which)) for which in range(sets)]
    return Case(f"recurrent {name} {model}", check, calls, moved, layer.flops(tokens) if tokens > 16 * count else 0.0)


def recurrent_cases(ops: TritonOps) -> Iterator[tuple[str, Callable[[], Case]]]:
    layouts = {f"decode {count}": [(1023, 1)] * count for count in (1, 16, 64, 256)}
    layouts |= {
        "verify 16, 4 each": [(1020, 4)] * 16,
        "prompt 1 x 4096": [(0, 4096)],
        "prompt 8 x 1024": [(0, 1024)] * 8,
    }
    for model in RECURRENT:
        for name, spans in layouts.items():
            yield f"recurrent {name} {model}", partial(recurrent, ops, name, model, spans)


MATRICES: Mapping[str, tuple[int, int]] = {
    "0.6b qkv": (4096, 1024), "0.6b o": (1024, 2048), "0.6b gate_up": (6144, 1024), "0.6b down": (1024, 3072),
    "1b qkv": (3072, 2048), "1b o": (2048, 2048), "1b gate_up": (16384, 2048), "1b down": (2048, 8192),
    "8b qkv": (6144, 4096), "8b o": (4096, 4096), "8b gate_up": (28672, 4096), "8b down": (4096, 14336),
    "8b head": (128256, 4096),
}  # fmt: skip
"""(outputs, inputs)."""


def linear(ops: TritonOps, name: str, rows: int, how: str) -> Case:
    """how: "library", "own", "own gated"."""
    outputs, inputs = MATRICES[name]
    size = outputs * inputs * 2
    weights = [noise(outputs, inputs) for _ in range(copies(size))]
    x = noise(rows, inputs)
    gate: Gate = "silu" if "gated" in how else ""

    def call(weight: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, weight) if how == "library" else ops.linear(x, weight, None, gate)

    def check() -> float:
        return relative(call(weights[0]), ReferenceOps().linear(x.float(), weights[0].float(), None, gate))

    calls = [partial(call, weight) for weight in weights]
    return Case(f"linear {name} rows {rows} {how}", check, calls, size, 2.0 * rows * outputs * inputs)


def linear_cases(ops: TritonOps) -> Iterator[tuple[str, Callable[[], Case]]]:
    for name in MATRICES:
        for rows in (1, 2, 4, 8, 16):
            for how in ("library", "own", "own gated") if "gate_up" in name else ("library", "own"):
                yield f"linear {name} rows {rows} {how}", partial(linear, ops, name, rows, how)


def row_case(ops: TritonOps, what: str, tokens: int) -> Case:
    hidden, width, heads, groups, dim = 4096, 14336, 32, 8, 128
    plain = ReferenceOps()
    x, residual, gamma = noise(tokens, hidden), noise(tokens, hidden), noise(hidden)
    if what == "add_rms_norm":
        want = plain.norm((x + residual).float(), Norm(gamma.float(), 1e-5))
        return Case(
            f"rows {what} {tokens} x {hidden}",
            lambda: relative(ops.add_norm(x, residual.clone(), Norm(gamma, 1e-5))[0], want),
            [partial(ops.add_norm, x, noise(tokens, hidden), Norm(gamma, 1e-5)) for _ in range(16)],
            8.0 * x.numel(),
        )
    if what == "silu_mul":
        both = noise(tokens, 2 * width)
        calls = [partial(ops.silu_mul, noise(tokens, 2 * width)) for _ in range(8)]
        check = lambda: relative(ops.silu_mul(both), plain.silu_mul(both.float()))  # noqa: E731
        return Case(f"rows {what} {tokens} x {width}", check, calls, 3.0 * both.numel())
    pages = tokens // PAGE + 2
    kv, other = (LayerKV(noise(pages, groups, PAGE, dim), noise(pages, groups, PAGE, dim)) for _ in range(2))
    batch = ops.prepare(batch_of([(0, tokens)], pages))
    qkv = noise(tokens, (heads + 2 * groups) * dim)
    angle = noise(tokens, dim // 2, dtype=torch.float32)
    turn, norms = Angles(angle.cos(), angle.sin()), Norms(Norm(noise(dim), 1e-6), Norm(noise(dim), 1e-6))

    def check_turn() -> float:
        exact = LayerKV(other.k.float(), other.v.float())
        q_norm, k_norm = (each._replace(weight=each.weight.float()) for each in (norms.q, norms.k))
        wanted = Norms(q_norm, k_norm)
        want = plain.qk_norm_rope_store_kv(qkv.float(), heads, exact, batch, turn, wanted)
        got = ops.qk_norm_rope_store_kv(qkv, heads, other, batch, turn, norms)
        page, at = batch.slots // PAGE, batch.slots % PAGE
        written = ((relative(a[page, :, at], b[page, :, at])) for a, b in ((other.k, exact.k), (other.v, exact.v)))
        return max(relative(got, want), *written)

    calls = [partial(ops.qk_norm_rope_store_kv, qkv.clone(), heads, kv, batch, turn, norms) for _ in range(8)]
    return Case(f"rows {what} {tokens} x 48 heads", check_turn, calls, 4.0 * qkv.numel())


def row_cases(ops: TritonOps) -> Iterator[tuple[str, Callable[[], Case]]]:
    for what in ("add_rms_norm", "silu_mul", "turn_and_write"):
        for tokens in (1, 16, 256, 2048):
            yield f"rows {what} {tokens}", partial(row_case, ops, what, tokens)


SAMPLER_CASES: Mapping[str, dict[str, float]] = {
    "greedy": {},
    "hot": {"temperature": 1.0},
    "top_p": {"temperature": 1.0, "top_p": 0.95},
    "top_k, top_p": {"temperature": 1.0, "top_k": 50, "top_p": 0.95},
    "penalties": {"temperature": 1.0, "repetition_penalty": 1.2},
    "log-probabilities": {"logprobs": 5},
}
"""Sampling parameters that are not off, by the case's name."""


def sampler_case(ops: TritonOps, rows: int, what: str) -> Case:
    vocab = 151936
    logits = [2 * noise(rows, vocab, dtype=torch.float32) for _ in range(copies(4.0 * rows * vocab, 8))]

    def full(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((rows,), value, dtype=dtype, device="cuda")

    values = {name: column.off for name, column in COLUMNS.items()} | SAMPLER_CASES[what]
    columns = {name: full(0, torch.int32) for name in COUNTERS}
    for name, value in values.items():
        columns[name] = full(value, torch.int32 if COLUMNS[name].is_integer else torch.float32)
    settings = SamplingTensors.of(columns | {"stream": torch.arange(rows, device="cuda")})
    history = torch.randint(vocab, (rows, 1024), dtype=torch.int32, device="cuda")
    which = torch.arange(rows, dtype=torch.int32, device="cuda")
    asked = RequestedFeatures(
        random="temperature" in SAMPLER_CASES[what],
        truncated="top" in what,
        penalised=what == "penalties",
        scored=what == "log-probabilities",
    )
    scores = torch.zeros(rows, SCORE_WIDTH, dtype=torch.int32, device="cuda")
    histories = RowHistories(
        history, full(500, torch.int32), full(0, torch.int32), full(0, torch.int32), full(-1, torch.int32)
    )
    tally = torch.zeros(rows, vocab if asked.penalised else 1, dtype=torch.int32, device="cuda")
    context = (which, full(1000, torch.int32), histories, settings, ops.card, asked)

    def check() -> float:
        got = sample(logits[0].clone(), *context, tally=tally, scores=scores)[0].long()
        if "temperature" not in SAMPLER_CASES[what]:
            return float((got != logits[0].argmax(1)).float().mean())
        return float(((got < 0) | (got >= vocab)).float().mean())

    calls = [partial(sample, each, *context, tally=tally, scores=scores) for each in logits]
    return Case(f"sampler {what} {rows} x {vocab}", check, calls, 4.0 * rows * vocab)


def sampler_cases(ops: TritonOps) -> Iterator[tuple[str, Callable[[], Case]]]:
    for what in SAMPLER_CASES:
        for rows in (1, 16, 256):
            yield f"sampler {what} {rows}", partial(sampler_case, ops, rows, what)


def cases(ops: TritonOps, only: str = "") -> Iterator[Callable[[], Case]]:
    """All of them, made when called for: what they hold is large."""
    for group in (row_cases, decode_cases, latent_cases, sparse_cases, recurrent_cases, linear_cases, sampler_cases):
        yield from (make for name, make in group(ops) if only in name)
