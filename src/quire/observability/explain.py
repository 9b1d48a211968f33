"""Explains why a request took as long as it did: its history as sentences, and the numbers behind them."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quire.observability.history import History, Note, RequestHistory
from quire.scheduler.sequence import Transfer
from quire.types import prompt_of

MISSING: Mapping[str, str] = {
    "seats": "a free row: max_num_seqs sequences were running",
    "rows": "a row on the device, which a step in flight still used",
    "pages": "free KV blocks",
    "budget": "a step with room for the whole prompt",
    "grammar": "its grammar to be compiled",
    "tier": "its K/V to come from host memory, disk or a prefill engine",
    "gap": "an idle engine: it runs only while no other request can",
}


def explanation(id: str, answers: Sequence[Mapping[str, Any] | None], left_out: int) -> dict[str, Any]:
    """What is known of a request, as plain JSON. left_out: answers of it that are not explained here."""
    return {"id": id, "answers": answers, "answers_left_out": left_out}


def joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One explanation of those of several engines, each of which ran some of a request's prompts."""
    answers = sorted((one for part in parts for one in part["answers"]), key=lambda one: (one["prompt"], one["choice"]))
    return explanation(parts[0]["id"], answers, sum(part["answers_left_out"] for part in parts))


def explain(history: History, id: str, now: float) -> dict[str, Any] | None:
    """All that is known of a request, as plain JSON; times in seconds from its submission. None for an unknown id."""
    story = history.requests.get(id)
    if story is None:
        return None
    until = story.ended if story.ended is not None else now
    waits, prefix = _waits(history, story, until), _with_tiers(story, _prefix(history, story))
    return details(
        story,
        until,
        prompt=prompt_of(id),
        prefill=None if story.opened is None else _span(story.opened, story.first, until),
        prefix=prefix,
        chunks=story.chunks,
        waits=waits,
        events=list(_events(story, waits, prefix)),
        summary=_summary(story, waits, until),
    )


def details(story: RequestHistory, until: float, *, prefill: float | None, **more: Any) -> dict[str, Any]:
    """An explanation: what every request's history has, and `more`. until: when it ended, or now."""
    begin, about = story.submitted, _common_fields(story, until)
    return {
        **about,
        "max_tokens": story.request.max_new_tokens,
        "priority": story.request.priority,
        "choice": story.request.choice,
        "seconds": {
            **about["seconds"],
            "prefill": prefill,
            "decode": None if story.first is None else short(until - story.first),
        },
        "events_left_out": story.unnoted,
        "token_times": [short(t - begin) for t in story.times],
        **more,
    }


def summary_of(story: RequestHistory, now: float) -> dict[str, Any]:
    """A line about a request, as plain JSON; times in seconds from its submission."""
    return {**_common_fields(story, now), "cached_tokens": story.cached}


def _common_fields(story: RequestHistory, now: float) -> dict[str, Any]:
    begin, until = story.submitted, story.ended if story.ended is not None else now
    return {
        "id": story.request.id,
        "number": story.number,
        "state": state_of(story),
        "finish_reason": story.finish,
        "prompt_tokens": story.prompt_tokens,
        "generated_tokens": story.generated,
        "preemptions": story.preemptions,
        "seconds": {
            "queued": _span(begin, story.opened, until),
            "first_token": None if story.first is None else short(story.first - begin),
            "total": short(until - begin),
        },
    }


def state_of(story: RequestHistory) -> str:
    """finished, waiting, prefill or decode."""
    if story.ended is not None:
        return "finished"
    if story.waiting:
        return "waiting"
    return "prefill" if story.first is None else "decode"


def short(seconds: float) -> float:
    """Rounded to microseconds."""
    return round(seconds, 6)


def _span(begin: float, end: float | None, until: float) -> float:
    return short((until if end is None else end) - begin)


# -------------------------------------------------------------------- waiting


def _waits(history: History, story: RequestHistory, until: float) -> list[dict[str, Any]]:
    """What the head of the queue waited for while this request was in it, longest first."""
    begin = story.submitted
    end = story.opened if story.opened is not None else until
    behind: dict[tuple[str, str], float] = {}
    for wait in history.waits:
        overlap = min(end, wait.end) - max(begin, wait.begin)
        own = wait.id == story.request.id
        if overlap > 0 and (own or wait.missing not in ("grammar", "tier")):
            key = wait.missing, "" if own else wait.id
            behind[key] = behind.get(key, 0.0) + overlap
    found = sorted(behind.items(), key=lambda item: -item[1])
    return [
        {"for": missing, "behind": head or None, "seconds": short(seconds), "says": _waiting(missing, head, seconds)}
        for (missing, head), seconds in found[:16]
    ]


def _waiting(missing: str, head: str, seconds: float) -> str:
    what = MISSING.get(missing, missing)
    return (
        f"{_time(seconds)} behind {head}, which needed {what}" if head else f"{_time(seconds)} at the head, for {what}"
    )


# -------------------------------------------------------------------- the prefix cache


def _prefix(history: History, story: RequestHistory) -> dict[str, Any]:
    """How many prompt tokens were cached, where the match ended, and why it was not longer."""
    prompt, hits, size = story.prompt_tokens, story.cached, history.block_size
    found: dict[str, Any] = {"hit_tokens": hits, "prompt_tokens": prompt, "diverged_at": None, "from": None}
    if story.opened is None:
        return {**found, "why": "not looked up yet"}
    if story.request.sampling.prompt_logprobs is not None:
        return {**found, "why": "log-probabilities of the prompt were asked for, so all of it had to be computed"}
    if story.request.sampling.pooling == "mean":
        return {**found, "why": "the mean of all its hidden states was asked for, so all of it had to be computed"}
    most = (prompt - 1) // size * size
    if hits >= most:
        why = "all that could be reused was" if hits else f"a prompt this short fills no block of {size} tokens"
        return {**found, "why": why}
    shared, other = _closest(history, story)
    if other is None:
        at = hits or None if story.diverged_at is None else story.diverged_at
        return {**found, "diverged_at": at, "why": "no request still remembered began with the same tokens"}
    found |= {"diverged_at": shared, "from": other.request.id}
    name = other.request.id
    if shared < hits + size:
        why = f"the first {hits} tokens are in the cache; the longest match, {name}, differs from token {shared} on"
        return {**found, "why": f"{why}; blocks hold {size} tokens"}
    taken, resumed = other.lost.get(hits // size), story.resumed or 0.0
    if (other.opened or 0.0) < history.emptied <= min(resumed, taken[0] if taken else resumed):
        return {**found, "why": f"{name} had the same first {shared} tokens, but the prefix cache was emptied since"}
    if taken is not None and taken[0] <= resumed:
        return {
            **found,
            "evicted_by": taken[1],
            "why": f"{name} had the same first {shared} tokens, but {taken[1]} was given the block that held "
            f"tokens {hits} to {hits + size - 1}",
        }
    if history.recurrent:
        return {
            **found,
            "why": f"{name} has the same first {shared} tokens, but no state of the model's recurrent layers was kept "
            f"past the first {hits} of them",
        }
    return {**found, "why": f"{name} has the same first {shared} tokens, but they were not computed yet"}


def _with_tiers(story: RequestHistory, found: dict[str, Any]) -> dict[str, Any]:
    """What `_prefix` found, with where it came from, if not all of it was on the device."""
    tiers = {"host memory": story.from_host, "disk": story.from_disk, "a prefill engine": story.from_remote}
    came = " and ".join(f"{count} from {tier}" for tier, count in tiers.items() if count)
    if came:
        why = f"{found['why']}; of the tokens found, K/V came back of {came}"
        found = {**found, "host_tokens": story.from_host, "disk_tokens": story.from_disk, "why": why}
    return found if story.transfer is None else _with_transfer(story.transfer, story.from_remote, found)


def _with_transfer(transfer: Transfer, used: int, found: dict[str, Any]) -> dict[str, Any]:
    """What `_prefix` found, with what came of asking a prefill engine."""
    peer, seconds = transfer.peer, short(transfer.seconds)
    if not transfer.failed:
        why = f"{peer} computed {transfer.tokens} tokens and sent {transfer.num_bytes:,} bytes in {_time(seconds)}"
    elif transfer.failed == "slower":
        why = (
            f"a prefill engine was predicted to take {_time(short(transfer.predicted))} for {transfer.tokens} tokens, "
            f"and computing them here {_time(short(transfer.computing))}, so they were computed here"
        )
    elif not peer:
        why = f"no prefill engine computed {transfer.tokens} tokens ({transfer.failed}), so they were computed here"
    else:
        why = (
            f"{peer} sent K/V of {transfer.received} of {transfer.tokens} tokens in {_time(seconds)} "
            f"({transfer.failed}); the rest was computed here"
        )
    about = {
        "from": peer or None,
        "tokens": transfer.tokens,
        "received_tokens": transfer.received,
        "bytes": transfer.num_bytes,
        "seconds": seconds,
        "predicted_seconds": short(transfer.predicted),
        "computing_seconds": None if transfer.computing == math.inf else short(transfer.computing),
        "failed": transfer.failed or None,
    }
    return {**found, "remote_tokens": used, "transfer": about, "why": f"{found['why']}; {why}"}


def _closest(history: History, story: RequestHistory) -> tuple[int, RequestHistory | None]:
    """The length of the longest common prefix with a request that was scheduled before this one, and that request."""
    prompt = story.tokens[: story.prompt_tokens]
    found: tuple[int, RequestHistory | None] = (0, None)
    for other in history.requests.values():
        if other is story or other.opened is None or other.opened > (story.resumed or 0.0):
            continue
        known = found[0] + 1
        if other.request.cache_salt != story.request.cache_salt or prompt[:known] != other.tokens[:known]:
            continue
        common = _common(prompt, other.tokens, found[0])
        if common > found[0]:
            found = common, other
    return found


def _common(a: array[int], b: array[int], known: int) -> int:
    """Length of the common prefix of two arrays, at least `known`. Compares pieces of memory, not items."""
    most, piece = min(len(a), len(b)), 4096
    while known < most and a[known : known + piece] == b[known : known + piece]:
        known = min(known + piece, most)
    return next((i for i in range(known, most) if a[i] != b[i]), most)


# -------------------------------------------------------------------- sentences


def _events(story: RequestHistory, waits: Sequence[dict[str, Any]], prefix: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """Events in order of time."""
    begin, prompt = story.submitted, _count(story.prompt_tokens, "prompt token")

    def event(at: float, what: str, says: str, **more: Any) -> dict[str, Any]:
        return {"at": short(at - begin), "what": what, "says": says, **more}

    yield event(begin, "submitted", f"submitted: {prompt}, at most {story.request.max_new_tokens} new ones")
    for wait in waits[:4]:
        yield event(begin, "waited", f"waited {wait['says']}", behind=wait["behind"])
    for note in story.notes:
        yield event(note.at, note.what, _says(story, note), step=note.step, by=note.by or None, tokens=note.n)
        if note.what == "opened" and note.at == story.resumed:
            yield event(note.at, "prefix", f"prefix cache: {prefix['why']}")
    if story.first is not None:
        yield event(story.first, "first_token", f"first token after {_time(story.first - begin)}")
    if story.ended is not None:
        made = _count(story.generated, "token")
        yield event(
            story.ended, "finished", f"{_ENDS.get(str(story.finish), str(story.finish))}, with {made} generated"
        )


def _says(story: RequestHistory, note: Note) -> str:
    """A note as a sentence."""
    others = (
        f"the step fed {note.fed} tokens of {note.width} requests" if note.width > 1 else "that is the limit of a step"
    )
    cached, again = min(note.n, story.prompt_tokens), note.n - story.prompt_tokens
    hit = f"{cached} of {_count(story.prompt_tokens, 'prompt token')} came from the prefix cache"
    hit += f", and {again} of its answer" if again > 0 else ""
    lost = f"lost its KV blocks to {note.by}, which is more urgent or had more to lose"
    if note.by == story.request.id:
        lost = "gave up its own KV blocks, for there were none to grow into"
    return {
        "opened": f"admitted, with {_count(note.width - 1, 'other')} in the step: {hit}",
        "chunk": f"{note.n} of its prompt's tokens were fed, the rest later: {others}",
        "follows": f"waited for {note.by}, which was computing the {note.n} tokens that both begin with",
        "preempted": f"{lost}: {note.n} tokens to compute again",
        "sat-out": "skipped a step: the KV blocks it needed were still used by a step in flight",
        "failed": f"a step failed ({note.by}): started again from what was committed",
    }[note.what]


_ENDS: Mapping[str, str] = {
    "stop": "ended at a stop token or stop string",
    "length": "ended at its limit of tokens",
    "abort": "ended by the server, because its client left or the server was about to",
    "timeout": "ended at its deadline",
    "error": "failed",
}


def _summary(story: RequestHistory, waits: Sequence[dict[str, Any]], until: float) -> str:
    """One sentence on what took the largest part of its time."""
    total = until - story.submitted
    queued = (story.opened if story.opened is not None else until) - story.submitted
    lead = f"{_time(total)} in all"
    if story.preemptions:
        lead += f", preempted {_count(story.preemptions, 'time')}"
    if queued > total / 3 and waits:
        return f"{lead}; {_time(queued)} of it in the queue, most of that {waits[0]['says']}"
    if story.first is None:
        return f"{lead}; no token yet"
    parts = {"queue": queued, "prefill": story.first - story.submitted - queued, "decode": until - story.first}
    longest = max(parts, key=lambda name: parts[name])
    return f"{lead}; most of it {_time(parts[longest])} of {longest}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"
