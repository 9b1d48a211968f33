"""Budgets of thoughts are exact to the token, with and without drafts and look-ahead, whatever ends the thoughts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.engine.engine import Engine
from quire.parsers.reasoning import THOUGHTS, bounded, thoughts_ahead
from quire.scheduler.block_pool import EVICTION_POLICIES, RadixPrefixCache
from quire.scheduler.constraint import FREE, MaskRequest, one_by_one
from quire.scheduler.kv_cache import KVCacheManager
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.speculation import FixedDrafts
from quire.structured_output.llguidance import LlguidanceCompiler
from quire.structured_output.thought_budget import BudgetRules, ThoughtBudget, only
from quire.types import Ahead, Request, StructuredOutputsParams
from tests.hash_model import HashDevice, naive
from tests.server.doubles import TOKENIZER

OPEN, CLOSE = "<think>", "</think>"
# The model's tokens: many that open a thought, one that closes it, and two that close it together.
PIECES = {**dict.fromkeys(range(60, 80), OPEN), 80: CLOSE, 81: "</th", 82: "ink>", 83: "a</th", 84: "\n"}
CLOSES = {"one": {CLOSE: (80,), "ink>": (82,)}, "two": {CLOSE: (81, 82), "ink>": (82,)}}


def piece(token: int) -> str:
    return PIECES.get(token, chr(97 + token % 26))


def encoder(kind: str) -> Any:
    known = CLOSES[kind]
    return lambda text: known[text] if text in known else tuple(ord(c) % 26 for c in text)


def rules(kind: str, ahead: Ahead, budget: int) -> BudgetRules:
    return BudgetRules(
        THOUGHTS["qwen3"], ahead, budget, piece=lambda token: piece(token).encode(), encode=encoder(kind)
    )


def thoughts_of(output: Sequence[int], ahead: Ahead) -> tuple[int, int] | None:
    """(tokens of the thought, tokens of its opening mark), from the whole text; None where there is no thought."""
    begin = 0
    if ahead == "possible":
        text = ""
        while begin < len(output) and OPEN not in text:
            text += piece(output[begin])
            begin += 1
        if not text.lstrip().startswith(OPEN):
            return None
    for end in range(begin, len(output) + 1):
        if CLOSE in "".join(map(piece, output[begin:end])):
            return end - begin, begin
    return len(output) - begin, begin


def oracle(kind: str, ahead: Ahead, budget: int) -> Any:
    """The mask after an output, from the whole text each time."""

    def mask(output: Sequence[int]) -> bytes | None:
        found = thoughts_of(output, ahead)
        if found is None or (ahead == "possible" and not output):
            return None
        count, begin = found
        text = "".join(map(piece, output[begin:]))
        if CLOSE in text or count < budget:
            return None
        said = "".join(map(piece, output[begin : begin + budget]))
        left = next((CLOSE[n:] for n in range(len(CLOSE) - 1, 0, -1) if said.endswith(CLOSE[:n])), CLOSE)
        wanted: int = encoder(kind)(left)[count - budget]
        return only(wanted).ljust(13, b"\0")

    return mask


def padded(requests: Sequence[MaskRequest]) -> list[list[bytes | None]]:
    made = one_by_one(requests)
    return [[mask and bytes(mask).ljust(13, b"\0") for mask in masks] for masks in made]  # type: ignore[arg-type]


def answered(requests: Sequence[tuple[Request, ThoughtBudget]], drafts: int, lookahead: int) -> dict[str, list[int]]:
    kv = KVCacheManager(400, 4, RadixPrefixCache(4), EVICTION_POLICIES["lru"](), min_shared_tokens=4)
    scheduler = Scheduler(kv, rows=64, speculation=FixedDrafts(drafts), compute_masks=padded)
    engine = Engine(scheduler, HashDevice(400, 4, eager=False, seed="1"), lookahead=lookahead)
    said: dict[str, list[int]] = {}
    for request, constraint in requests:
        engine.add(request, constraint)
    while engine.has_pending_work:
        for event in engine.step():
            assert event.error is None
            said.setdefault(event.id, []).extend(event.tokens)
    assert not engine.failures
    return said


def check(seed: int, count: int, drafts: int, lookahead: int) -> None:
    """`count` requests; each answer equals the naive loop's, and its thoughts have no token more than the budget."""
    rng = random.Random(seed)
    requests, wanted, about = [], {}, {}
    for i in range(count):
        kind = rng.choice(("one", "two"))
        ahead: Ahead = rng.choice(("open", "possible"))
        budget = rng.choice((0, 1, 2, 3, rng.randrange(4, 50)))
        prompt = tuple(rng.randrange(60) for _ in range(rng.randrange(1, 12)))
        request = Request(id=str(i), prompt=prompt, max_new_tokens=rng.randrange(1, 70), seed=rng.randrange(99))
        requests.append((request, ThoughtBudget(rules(kind, ahead, budget), FREE)))
        made = naive(prompt, request.max_new_tokens, frozenset(), (request.seed, 0), oracle(kind, ahead, budget))
        wanted[request.id], about[request.id] = made[len(prompt) :], (kind, ahead, budget)
    said = answered(requests, drafts, lookahead)
    exact = 0
    for id, output in said.items():
        kind, ahead, budget = about[id]
        assert output == wanted[id], about[id]
        found = thoughts_of(output, ahead)
        closing = len(CLOSES[kind][CLOSE])
        if found is not None:
            # The thought and its closing mark; within the budget a thought may end by itself.
            assert found[0] <= budget + closing
            exact += found[0] == budget + closing
    assert exact > count // 4, "budgets were reached"


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_thoughts_end_at_their_budget_to_the_token(drafts: int, lookahead: int) -> None:
    check(drafts, 40, drafts, lookahead)


@pytest.mark.nightly
@pytest.mark.parametrize("drafts", [0, 1, 4])
@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_a_thousand_requests_keep_their_budgets(drafts: int, lookahead: int) -> None:
    for seed in range(10):
        check(100 + seed, 100, drafts, lookahead)


def forced(structure: StructuredOutputsParams | None, text: str) -> list[list[int]]:
    """For each place of `text`, token by token: the token that must follow, or none."""
    assert structure is not None
    follow = LlguidanceCompiler(lambda: TOKENIZER)(structure)()
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    out = []
    for at in range(len(tokens) + 1):
        [mask] = follow.masks(list(tokens[:at]), [])
        bits = 0 if mask is None else int.from_bytes(bytes(mask), "little")
        out.append([bits.bit_length() - 1] if bits and not bits & (bits - 1) else [])
    return out


def test_a_structure_behind_a_bounded_thought_is_obeyed() -> None:
    form = bounded(StructuredOutputsParams(choice=("yes", "no")), "qwen3", "open", 4)
    close = list(TOKENIZER.encode(CLOSE, add_special_tokens=False))
    tokens = TOKENIZER.encode("abcdefgh", add_special_tokens=False)[:4]
    text = TOKENIZER.decode(tokens)
    assert forced(form, text)[-1] == close[:1]
    assert forced(form, text + CLOSE + "yes")[len(tokens) : len(tokens) + len(close)] == [[t] for t in close]


def test_masks_follow_from_the_output_whatever_was_asked_before() -> None:
    """Outputs that grow, are cut, and whose last token is another."""
    ran = random.Random(5)
    pieces = [60, 80, 81, 82, 1, 2]
    for kind in CLOSES:
        made, output = rules(kind, "open", 3), list[int]()
        asked = ThoughtBudget(made, FREE)
        for _ in range(400):
            kept = output[: ran.randrange(len(output) + 1)] if len(output) > 5 or ran.random() < 0.2 else output
            changed = [*output[:-1], ran.choice(pieces)]
            output = ran.choice((kept, changed, [*output, ran.choice(pieces)])) if kept is output else kept
            drafts = [ran.choice(pieces) for _ in range(ran.randrange(3))]
            assert asked.masks(output, drafts) == ThoughtBudget(made, FREE).masks(output, drafts)


def test_masks_end_behind_a_draft_that_is_not_the_forced_token() -> None:
    made, close = rules("two", "open", 2), [only(81), only(82)]
    for drafts, count in (((), 1), ((5,), 1), ((5, 82), 1), ((81,), 2), ((81, 5), 2), ((81, 82), 3), ((81, 82, 7), 4)):
        found = ThoughtBudget(made, FREE).masks([1, 2], drafts)
        assert found == [*close, None, None][:count], drafts


def test_thoughts_in_channels_share_one_budget() -> None:
    style = THOUGHTS["openai_gptoss"]
    made = BudgetRules(style, "possible", 3, piece=lambda t: chr(t).encode(), encode=lambda s: [ord(c) for c in s])

    def after(text: str) -> str:
        thought = made.first
        for c in text:
            thought = made.after(thought, ord(c))
        return "".join(map(chr, thought.forced))

    begin = style.opens[0]
    assert after(begin + "ab") == "" and after(begin + "abc") == style.closes[0]
    assert after(f"{begin}abc<|e") == style.closes[0][3:]
    again = f"{begin}a{style.closes[0]}<|start|>assistant{begin}"
    assert after(again) == style.closes[0], "the closing mark of a thought that ended by itself counts, too"
    assert after(f"<|channel|>final<|message|>{'x' * 99}") == ""


def test_without_thoughts_ahead_or_with_an_unlimited_budget_nothing_is_bound() -> None:
    assert bounded(None, "qwen3", "none", 5) is None
    assert bounded(None, "qwen3", "open", -1) is None and bounded(None, "qwen3", "open", None) is None
    assert thoughts_ahead("openai_gptoss", "<|start|>assistant") == "possible"


TEMPLATE = "{% for m in messages %}<|user|>\n{{ m.content }}{% endfor %}<|assistant|><think>\n"


def answers(drafts: str | None, budgets: Sequence[int]) -> list[tuple[int, ...]]:
    settings = {"dtype": "float32", "max_model_len": 256, "reasoning_parser": "qwen3"}
    with LLM("embedded", speculative_config=drafts, chat_template=TEMPLATE, **settings) as llm:
        params = [
            SamplingParams(thinking_token_budget=n, max_tokens=48, temperature=0.8, seed=n, ignore_eos=True)
            for n in budgets
        ]
        talks = [[{"role": "user", "content": "Count."}] for _ in budgets]
        return [made.outputs[0].token_ids for made in llm.chat(talks, params)]


def test_the_embedded_model_stops_thinking_at_its_budget_with_and_without_drafts() -> None:
    budgets = (0, 1, 2, 7, 20)
    plain = answers(None, budgets)
    assert answers('{"method": "ngram", "adaptive": false}', budgets) == plain
    with LLM("embedded", dtype="float32", max_model_len=64) as llm:
        tokenizer = llm.get_tokenizer()
        close = tuple(tokenizer.encode(CLOSE, add_special_tokens=False))
    for budget, tokens in zip(budgets, plain, strict=True):
        assert tokens[budget : budget + len(close)] == close, budget
