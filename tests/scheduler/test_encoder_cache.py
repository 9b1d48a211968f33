"""What is encoded, kept and dropped, and that no sequence feeds an image before its embeddings are there."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from quire.scheduler.encoder_cache import EncoderCache
from quire.scheduler.kv_cache import KVCacheManager, make_prefix_cache
from quire.scheduler.plan import EncodeSpan, Plan, Result
from quire.scheduler.policy import SchedulingPolicy
from quire.scheduler.scheduler import Scheduler
from quire.types import UNLIMITED, PromptImage, Request


def image(start: int, length: int, name: int) -> PromptImage:
    return PromptImage(start, length, 1, 1, b"", name.to_bytes(16, "big"))


def prompt(*parts: int | tuple[int, int]) -> tuple[tuple[int, ...], tuple[PromptImage, ...]]:
    """Parts are numbers of text tokens, and (tokens, name) of images."""
    tokens, images = list[int](), list[PromptImage]()
    for part in parts:
        if isinstance(part, tuple):
            images.append(image(len(tokens), *part))
            tokens += [9] * part[0]
        else:
            tokens += [1] * part
    return tuple(tokens), tuple(images)


@dataclass
class Device:
    """A fold over plans, with the rules of an encoder: embeddings are there once all layers have run, in order."""

    layers: int
    capacity: int
    whole: bool
    max_tokens: int = UNLIMITED
    done: dict[int, int] = field(default_factory=dict)
    rows: dict[int, tuple[list[int], int, int]] = field(default_factory=dict)
    images: dict[int, dict[int, tuple[int, int]]] = field(default_factory=dict)
    encoded: int = 0

    def run(self, plan: Plan, lengths: dict[int, int]) -> Result:
        for number in plan.dropped_images:
            self.done.pop(number)
        work = 0
        for number, first, last in plan.encode:
            assert self.done.get(number, 0) == first < last <= self.layers
            self.done[number] = last
            work += (last - first) * lengths[number]
            self.encoded += last == self.layers
        assert sum(lengths[number] for number in self.done) <= self.capacity
        assert work <= max(self.max_tokens * self.layers, max((lengths[n] for n, _, _ in plan.encode), default=0))
        for new in plan.new_sequences:
            self.rows[new.row] = list(new.tokens), new.num_computed, new.prompt_length
            self.images[new.row] = {each.start: (each.start + each.length, each.number) for each in new.images}
        tokens = []
        for row, count, samples, _ in plan.spans:
            known, begin, _ = self.rows[row]
            end = begin + count
            for start, (stop, number) in self.images[row].items():
                if start < end and stop > begin:
                    assert self.done.get(number) == self.layers, "an image is fed that is not encoded"
                    assert not self.whole or stop <= end, "a span ends inside an image"
            sampled = [5] * min(samples, 1)
            self.rows[row] = known + sampled, len(known) if samples else end, 0
            tokens.append(sampled)
        return Result(tokens, [])


def test_a_step_does_its_share_of_an_image_and_others_decode_meanwhile() -> None:
    cache = EncoderCache(capacity=100, max_tokens=10, num_layers=4)
    scheduler = Scheduler(KVCacheManager(100, 4), encoder_cache=cache)
    scheduler.add(Request(id="text", prompt=(1, 2, 3), max_new_tokens=20))
    device = Device(4, 100, whole=False, max_tokens=10)
    plan = scheduler.plan()
    assert plan is not None
    scheduler.commit(device.run(plan, {}))
    tokens, images = prompt(2, (20, 7), 1)
    scheduler.add(Request(id="seen", prompt=tokens, max_new_tokens=1, images=images))
    shapes = []
    for _ in range(3):
        plan = scheduler.plan()
        assert plan is not None
        shapes.append(([span.num_tokens for span in plan.spans], plan.encode))
        scheduler.commit(device.run(plan, {1: 20}))
    assert shapes == [
        ([1, 2], (EncodeSpan(1, 0, 2),)),
        ([1, 21], (EncodeSpan(1, 2, 4),)),
        ([1], ()),
    ]


def test_an_image_larger_than_a_steps_share_advances_a_layer_a_step() -> None:
    cache = EncoderCache(capacity=100, max_tokens=1, num_layers=3)
    scheduler = Scheduler(KVCacheManager(100, 4), encoder_cache=cache)
    tokens, images = prompt((50, 1), 1)
    scheduler.add(Request(id="a", prompt=tokens, max_new_tokens=1, images=images))
    plans = []
    device = Device(3, 100, whole=False)
    while (plan := scheduler.plan()) is not None:
        plans.append(plan)
        scheduler.commit(device.run(plan, {1: 50}))
    assert [len(plan.spans) for plan in plans] == [0, 0, 1]
    assert [plan.encode for plan in plans] == [(EncodeSpan(1, layer, layer + 1),) for layer in range(3)]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_fed_before_it_is_encoded_and_everything_ends(seed: int, whole: bool) -> None:
    chance = random.Random(seed)
    layers, most = chance.choice((1, 3, 5)), chance.choice((1, 4, 30, UNLIMITED))
    sizes = {name: chance.randint(1, 12) for name in range(1, 7)}
    capacity = chance.choice((max(sizes.values()), 20, 60))
    cache = EncoderCache(capacity, most, layers, whole_images=whole)
    scheduler = Scheduler(
        KVCacheManager(chance.choice((30, 80)), 4, make_prefix_cache(4, chance.random() < 0.7)),
        rows=6,
        max_num_batched_tokens=chance.choice((5, 11, 64)),
        max_chunk_tokens=chance.choice((4, 16, UNLIMITED)),
        policy=SchedulingPolicy(pressure="preempt"),
        encoder_cache=cache,
    )
    device = Device(layers, capacity, whole, most)
    lengths: dict[int, int] = {}
    waiting = [
        prompt(*(chance.choice((1, 3, (sizes[n := chance.randint(1, 6)], n))) for _ in range(chance.randint(1, 8))), 1)
        for _ in range(25)
    ]
    added, ended, steps = 0, 0, 0
    while ended < 25:
        steps += 1
        assert steps < 5000, "no progress"
        while added < 25 and chance.random() < 0.4:
            tokens, images = waiting[added]
            scheduler.add(Request(id=str(added), prompt=tokens, max_new_tokens=chance.randint(1, 6), images=images))
            added += 1
        if chance.random() < 0.02 and scheduler.sequences:
            ended += scheduler.abort(chance.choice(list(scheduler.sequences))) is not None
        if chance.random() < 0.02:
            scheduler.recover()
            device.done.clear()
        plan = scheduler.plan()
        if plan is None:
            continue
        lengths |= {each.number: each.image.length for each in cache.images.values()}
        for span in plan.encode:
            assert cache.pixels(span.number).length == lengths[span.number]
        outputs = scheduler.commit(device.run(plan, lengths))
        ended += sum(one.finish is not None for one in outputs)
    assert not cache.users and cache.num_used == sum(each.image.length for each in cache.images.values()) <= capacity
    assert all(each.is_resident and not each.num_users for each in cache.images.values())
    assert cache.num_encoded == device.encoded


def test_the_prefix_cache_tells_images_apart() -> None:
    kv = KVCacheManager(100, 4, make_prefix_cache(4, True))
    scheduler = Scheduler(kv, encoder_cache=EncoderCache())
    cached = []
    for name in (1, 1, 2, 1):
        tokens, images = prompt(4, (10, name), 4)
        scheduler.add(Request(id="x", prompt=tokens, max_new_tokens=1, images=images))
        device = Device(1, UNLIMITED, whole=False)
        while (plan := scheduler.plan()) is not None:
            cached += [new.num_computed for new in plan.new_sequences]
            device.done = {span.number: 0 for span in plan.encode} | dict.fromkeys(range(1, 9), 1)
            scheduler.commit(Result([[5] * min(1, span.num_samples) for span in plan.spans], []))
    assert cached == [0, 16, 4, 16]
