"""The executor interface's values as the contract's messages, and back. `proto/` says what each field means."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from quire.engine.executor import Description
from quire.executors.contract import executor_pb2 as pb
from quire.scheduler.plan import Mask, NewSequence, Plan, Result, Span
from quire.types import SamplingParams, TokenLogprobs

VERSION = 1
"""Of the contract: both sides must have the same."""

_FIELDS: Mapping[str, str] = {
    "num_blocks": "pages",
    "block_size": "page_size",
    "num_rows": "rows",
    "max_model_len": "max_model_len",
    "vocab_size": "vocab_size",
    "lookahead": "depth",
    "max_step_tokens": "tokens",
    "num_drafts": "drafts",
    "supports_masks": "masks",
    "block_bytes": "kv_bytes",
    "device": "device",
    "dtype": "dtype",
    "draft_catch_up_seconds": "catch_up",
    "draft_kv_share": "draft_kv",
    "supports_pooling": "pools",
    "bidirectional": "bidirectional",
}
"""The message's name of each field of a description."""

_SAMPLING_SCALARS = tuple(
    each for each in pb.Sampling.DESCRIPTOR.fields if each.message_type is None and not each.is_repeated
)
"""The message's fields that are one value of SamplingParams under the same name."""


def send_description(about: Description, instance: int) -> pb.Description:
    """instance: of the server that sends it."""
    message = pb.Description(version=VERSION, instance=instance, facts=about.static_gauges)
    for name, field in _FIELDS.items():
        setattr(message, field, getattr(about, name))
    message.paces.extend(pb.Pace(rows=r, drafts=d, seconds=seconds) for (r, d), seconds in about.step_times.items())
    return message


def read_description(message: pb.Description) -> Description:
    """The description in a message."""
    paces = {(each.rows, each.drafts): each.seconds for each in message.paces}
    plain = {name: getattr(message, field) for name, field in _FIELDS.items()}
    return Description(**plain, step_times=paces, static_gauges=dict(message.facts))


def send_plan(plan: Plan, before: tuple[Span, ...]) -> pb.Plan:
    """before: the previous step's spans, which are not sent again when they are the same object."""
    message = pb.Plan(masked=plan.masked_spans, drafts=plan.num_drafts)
    message.snapshots.extend(chain.from_iterable(plan.snapshots))
    if plan.new_sequences:
        message.opened.extend(_open(each) for each in plan.new_sequences)
    if plan.new_blocks:
        message.grown.extend(pb.Growth(row=row, pages=pages) for row, pages in plan.new_blocks)
    if plan.spans is before:
        message.same_spans = True
    else:
        message.spans.extend(chain.from_iterable(plan.spans))
    return message


def read_plan(message: pb.Plan, before: tuple[Span, ...]) -> Plan:
    """Raises ValueError for spans that are not whole."""
    if message.same_spans:
        spans = before
    else:
        flat = iter(message.spans)
        spans = tuple(Span(*four) for four in zip(flat, flat, flat, flat, strict=True))
    return Plan(
        tuple(_opened(each) for each in message.opened),
        tuple((each.row, tuple(each.pages)) for each in message.grown),
        spans,
        tuple(message.masked),
        tuple(message.drafts),
        tuple(zip(*[iter(message.snapshots)] * 3, strict=True)),
    )


def _open(one: NewSequence) -> pb.Open:
    s = one.sampling
    scalars = {each.name: getattr(s, each.name) for each in _SAMPLING_SCALARS}
    sampling = pb.Sampling(logit_bias=s.logit_bias, **scalars)
    sampling.bad_words.extend(pb.TokenList(tokens=word) for word in s.bad_words_token_ids)
    if s.allowed_token_ids is not None:
        sampling.allowed.tokens.extend(s.allowed_token_ids)
    return pb.Open(
        row=one.row,
        tokens=one.tokens,
        start=one.num_computed,
        prompt=one.prompt_length,
        seed=one.seed % (1 << 64),
        choice=one.choice,
        stop=sorted(one.stop_token_ids),
        limit=one.max_length,
        sampling=sampling,
        snapshot=one.snapshot,
    )


def _opened(message: pb.Open) -> NewSequence:
    s = message.sampling
    sampling = SamplingParams(
        **{
            each.name: getattr(s, each.name)
            for each in _SAMPLING_SCALARS
            if not each.has_presence or s.HasField(each.name)
        },
        max_tokens=None,
        logit_bias=dict(s.logit_bias),
        bad_words_token_ids=tuple(tuple(word.tokens) for word in s.bad_words),
        allowed_token_ids=tuple(s.allowed.tokens) if s.HasField("allowed") else None,
    )
    return NewSequence(
        message.row,
        tuple(message.tokens),
        message.start,
        message.prompt,
        sampling,
        message.seed,
        message.choice,
        frozenset(message.stop),
        message.limit,
        message.snapshot,
    )


def send_masks(masks: Sequence[Sequence[Mask]]) -> pb.Masks:
    """Masks by masked span."""
    return pb.Masks(spans=[pb.SpanMasks(rows=[pb.Mask(allowed=each) for each in rows]) for rows in masks])


def read_masks(message: pb.Masks) -> list[list[Mask]]:
    """The masks in a message."""
    return [[each.allowed if each.HasField("allowed") else None for each in span.rows] for span in message.spans]


def send_result(result: Result) -> pb.Result:
    """A result as a message."""
    message = pb.Result(tokens=chain.from_iterable(result.tokens), errors=result.errors, pooled=result.pooled)
    if any(len(tokens) != 1 for tokens in result.tokens):
        message.counts.extend(map(len, result.tokens))
    message.drafts.extend(pb.TokenList(tokens=drafts) for drafts in result.draft_tokens)
    for into, scores in ((message.logprobs, result.logprobs), (message.prompt_logprobs, result.prompt_logprobs)):
        for span, each in scores.items():
            into[span].scores.extend(_score(one) for one in each)
    return message


def read_result(message: pb.Result) -> Result:
    """The result in a message."""
    flat = list(message.tokens)
    tokens = _cut(flat, message.counts) if message.counts else [[token] for token in flat]
    drafts = [list(each.tokens) for each in message.drafts]
    of_prompts: dict[int, Sequence[TokenLogprobs]] = {**_scores(message.prompt_logprobs)}
    return Result(tokens, drafts, _scores(message.logprobs), of_prompts, dict(message.errors), dict(message.pooled))


def _cut(flat: list[int], counts: Iterable[int]) -> list[list[int]]:
    out, at = [], 0
    for count in counts:
        out.append(flat[at : at + count])
        at += count
    return out


def _score(one: TokenLogprobs) -> pb.Score:
    tokens, logprobs = [token for token, _ in one.top], [logprob for _, logprob in one.top]
    return pb.Score(token=one.token, logprob=one.logprob, rank=one.rank, top_tokens=tokens, top_logprobs=logprobs)


def _scores(message: Mapping[int, pb.Scores]) -> dict[int, list[TokenLogprobs]]:
    return {
        span: [
            TokenLogprobs(s.token, s.logprob, s.rank, tuple(zip(s.top_tokens, s.top_logprobs, strict=True)))
            for s in each.scores
        ]
        for span, each in message.items()
    }


SERVICE = "quire.executors.contract.Executor"
DESCRIBE, RUN = "Describe", "Run"

LARGEST = 64 << 20
"""Bytes of one message: a step that opens hundreds of rows with long prompts."""

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", LARGEST),
    ("grpc.max_receive_message_length", LARGEST),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.enable_http_proxy", 0),
)
"""Keepalive detects a machine that vanished; without it a half-open connection would hold its executor for ever.
A proxy for the web (`http_proxy`) does not know the executor, and would be one more way for every step."""
