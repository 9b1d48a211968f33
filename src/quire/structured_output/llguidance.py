"""Structured output by llguidance: tokenizer, grammar compilation and token masks, within bounds on size and work."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLTokenizer, TokenizerWrapper

from quire.errors import InvalidModel, InvalidRequest
from quire.parsers.reasoning import THOUGHTS
from quire.parsers.suffix import declared
from quire.parsers.tools.styles import STYLES, TaggedStyle
from quire.scheduler.constraint import FREE, Constraint, MaskRequest, one_by_one
from quire.scheduler.plan import Mask
from quire.structured_output.source import LIMITS, grammar_source, message, refusal, style_of
from quire.structured_output.thought_budget import BudgetRules, ThoughtBudget
from quire.structured_output.trial import FewTokens
from quire.token_masks import MaskTable, write_mask
from quire.tokenization.tokenizer import Tokenizer
from quire.types import StructuredOutputsParams

Lines = npt.NDArray[np.int32]
"""Masks [N, words]."""

_FIRST = 0.1
"""CPU seconds that the first mask may take."""

_AHEAD = 8
"""Tokens of one possible answer that are tried: most grammars that are too wide are too wide near the beginning."""


class LlguidanceCompiler:
    """Compiles grammars for one tokenizer, which is read when the first grammar is compiled.

    source: of a structure, in the library's notation; `trial.Trials` tries it in another process.
    """

    def __init__(
        self,
        tokenizer: Callable[[], Tokenizer],
        source: Callable[[StructuredOutputsParams, Callable[[], FewTokens]], str] = grammar_source,
        *,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._read = tokenizer
        self._source = source
        self._clock = clock
        self._lock = threading.Lock()

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return self._read()

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        return vocabulary(self._tokenizer)

    def __call__(self, structure: StructuredOutputsParams) -> Callable[[], Constraint]:
        """A function that makes a Constraint for a new sequence in microseconds.

        Raises InvalidRequest naming the request's field.
        """
        make: Callable[[], Constraint] = (lambda: FREE) if structure.kind[0] == "free" else self._grammar(structure)
        if structure.thought_budget is None:
            return make
        with self._lock:
            tokenizer = self._tokenizer
        rules = BudgetRules(
            style_of(structure),
            structure.thoughts,
            structure.thought_budget,
            piece=lambda token: tokenizer.token_text(token)[1],
            encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
        )
        return lambda: ThoughtBudget(rules, make())

    def _few_tokens(self) -> FewTokens:
        with self._lock:
            vocabulary, tokenizer = self._vocabulary, self._tokenizer
        size = vocabulary.vocab_size
        special = [token for token in range(size) if vocabulary.is_special_token(token)]
        pieces = {token: tokenizer.token_text(token)[1] for token in special if token < tokenizer.vocab_size}
        return FewTokens(size, sorted(tokenizer.eos), pieces)

    def _grammar(self, structure: StructuredOutputsParams) -> Callable[[], Matcher]:
        """Matchers of one grammar, which share the library's caches.

        Raises InvalidRequest naming the request's field, with the library's message.
        """
        try:
            source = self._source(structure, self._few_tokens)
            # Read once, by whichever thread comes first: it takes a second for a large vocabulary.
            with self._lock:
                vocabulary = self._vocabulary
            first = LLMatcher(vocabulary, source, log_level=0, limits=LIMITS)
        except InvalidModel as error:
            raise InvalidRequest(f"{structure.param}: {error}", param=structure.param) from error
        except (ValueError, RecursionError) as error:
            raise refusal(structure, str(error)) from error
        began = self._clock()
        mask = first.compute_bitmask()
        if first.is_error():
            raise refusal(structure, first.get_error())
        if self._clock() - began > _FIRST:
            raise refusal(structure, "it is too complex")
        if not any(mask):
            raise refusal(structure, "nothing can satisfy it")
        eos = self._tokenizer.eos
        if why := _ahead(first.deep_copy(), mask, eos):
            raise refusal(structure, why)
        size = -(-vocabulary.vocab_size // 32) * 4
        beginning = _beginning(first, mask, eos)
        first = with_mask_inside(first, beginning, eos)
        return lambda: Matcher(first.deep_copy(), eos, size, beginning=beginning)


def _ahead(matcher: LLMatcher, mask: bytes, eos: frozenset[int]) -> str:
    """Why the grammar fails within the first tokens of one answer that it allows; empty if it does not."""
    for _ in range(_AHEAD):
        bits = int.from_bytes(mask, "little") & ~_as_bits(eos)
        if not bits or matcher.is_stopped():
            return ""
        matcher.consume_token((bits & -bits).bit_length() - 1)
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            return str(matcher.get_error())
    return ""


class Beginning(NamedTuple):
    """What is known of every answer that a grammar allows: its first tokens, where only one is allowed at each, and the
    masks before each of them and after them; none: nothing is known."""

    tokens: tuple[int, ...] = ()
    masks: tuple[bytes, ...] = ()


UNKNOWN = Beginning()

_FORCED = 48
"""Tokens of a beginning at most."""


def _beginning(matcher: LLMatcher, mask: bytes, eos: frozenset[int]) -> Beginning:
    """The beginning of a grammar, whose tokens `matcher` consumes. mask: its first."""
    tokens, masks = list[int](), list[bytes]()
    while len(tokens) < _FORCED:
        bits = int.from_bytes(mask, "little")
        token = bits.bit_length() - 1
        if bits.bit_count() != 1 or token in eos:
            break
        tokens.append(token)
        masks.append(mask)
        matcher.consume_token(token)
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            matcher.reset()
            return UNKNOWN
    return Beginning(tuple(tokens), (*masks, mask))


def with_mask_inside(matcher: LLMatcher, beginning: Beginning, eos: frozenset[int]) -> LLMatcher:
    """A copy of `matcher`, which has consumed a grammar's beginning, that knows the mask after one token more.

    The library keeps the last mask that it made, for as long as an answer stays in the same text, and gives it to
    copies; without it, the first mask in a text takes each answer up to a millisecond. The token with the greatest id
    is one that begins a text, where one may begin there.
    """
    bits = int.from_bytes(beginning.masks[-1] if beginning.masks else b"", "little") & ~_as_bits(eos)
    inside = matcher.deep_copy()
    if not bits or not inside.consume_token(bits.bit_length() - 1):
        return matcher
    inside.compute_bitmask()
    return inside if inside.rollback(1) and not inside.is_error() else matcher


def _as_bits(tokens: frozenset[int]) -> int:
    return sum(1 << token for token in tokens)


EMPTY_MASK = b""
"""Allows no token: the row ends with an error."""


_STUCK = "it cannot be followed any further"
"""Why an answer ends where the library does not say it."""


class TimeBudget(NamedTuple):
    """CPU seconds that the masks of one answer may take: `once`, and `each` for every token.

    The library bounds the work of a step, but within its bounds a step may still take hundreds of times the usual time,
    and the whole batch would wait for it.
    """

    once: float = 0.5
    each: float = 1e-3
    clock: Callable[[], float] = time.thread_time


DEFAULT_BUDGET = TimeBudget()


class Matcher:
    """The Constraint of one sequence.

    The state is a function of the committed tokens: those new since the last call are consumed, and where the output
    does not continue the previous one, matching starts again. Drafts are consumed and rolled back. Tokens in `eos` are
    never passed to the library: after one, only they are allowed. mask_bytes: of a mask for the vocabulary, in whole
    32-bit words. beginning: of the grammar, whose tokens `matcher` has consumed: its masks need no library.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        eos: frozenset[int],
        mask_bytes: int,
        budget: TimeBudget = DEFAULT_BUDGET,
        beginning: Beginning = UNKNOWN,
    ) -> None:
        self._matcher = matcher
        self._beginning = beginning
        self.mask_bytes = mask_bytes
        self._eos = eos
        self._budget = budget
        self._num_seen = 0
        self._last = -1
        self._over = False
        self._why = ""
        self._inside = False
        """Whether the library, which has consumed a token, makes the next masks."""
        self._time_spent = 0.0
        self._end = _bits(eos)

    def masks(self, output: Sequence[int], drafts: Sequence[int]) -> list[Mask]:
        """See Constraint."""
        began = self._budget.clock()
        self.follow(output, 0, drafts)
        made = self._walk(drafts)
        self._time_spent += self._budget.clock() - began
        if self._time_spent > self._budget.once + self._budget.each * len(output):
            self._end_with(self._why or "following it takes too much time: make it simpler")
        return made

    def fill(self, tokens: Sequence[int], begin: int, address: int) -> bool:
        """Follow the output, `tokens[begin:]`, and write the next mask to memory at `address`, of `mask_bytes`.

        False: the library has none, and `mask` knows it.
        """
        library = self.follow(tokens, begin, ())
        if library is None:
            return False
        library.unsafe_compute_mask_ptr(address, self.mask_bytes)
        if library.is_error():
            # The mask would allow the text to end.
            self._end_with(message(library.get_error()) or _STUCK)
            return False
        return True

    def _end_with(self, why: str) -> None:
        """No token is allowed any more."""
        self._why, self._inside = why, False

    def why(self) -> str:
        """See Constraint."""
        return self._why

    def beginning(self) -> Sequence[int]:
        """See Constraint."""
        return self._beginning.tokens

    def follow(self, tokens: Sequence[int], begin: int, drafts: Sequence[int]) -> LLMatcher | None:
        """Consume what is new in the output, `tokens[begin:]`. None: the library is not needed for the next masks."""
        known = begin + self._num_seen
        if self._inside and len(tokens) == known + 1 and tokens[known - 1] == self._last:
            # Each row of each step: what is below is for all cases.
            token = tokens[known]
            if token not in self._eos and self._matcher.consume_token(token):
                self._last = token
                self._num_seen += 1
                return self._matcher
        if len(tokens) < known or (self._num_seen and tokens[known - 1] != self._last):
            known = self._restart(begin)
        elif self._beginning.masks:
            first, length = self._beginning.tokens, len(tokens) - begin
            # Where only one token was allowed no other was sampled. Drafts are walked by the library, which is ahead.
            if (*tokens[begin : begin + len(first)],) != first[:length] or (drafts and length < len(first)):
                known = self._restart(begin)
            elif length < len(first) or (length == len(first) and not drafts):
                self._num_seen, self._last = length, tokens[-1] if length else -1
                return None
            else:
                known, self._beginning = begin + len(first), UNKNOWN
        for token in tokens[known:]:
            self._last = token
            self._over = self._over or token in self._eos
            if not self._over and not self._matcher.consume_token(token):
                self._why = message(self._matcher.get_error()) or "the answer left it"
        self._num_seen = len(tokens) - begin
        follows = not (self._over or self._why)
        self._inside = follows and self._num_seen > 0
        return self._matcher if follows else None

    def _restart(self, begin: int) -> int:
        """The output is not what has been consumed: begin again, at index `begin`."""
        self._matcher.reset()
        self._beginning = UNKNOWN
        self._over = False
        return begin

    def collect(self, lines: npt.NDArray[np.int32], begin: int, drafts: Sequence[int]) -> int:
        """Check the masks that the library wrote to `lines`, after the output and after each draft: how many hold.

        begin: the first of its lines. Those behind a draft that is not allowed do not hold; those behind the end of the
        text are written here.
        """
        if self._matcher.is_error():
            self._end_with(message(self._matcher.get_error()) or _STUCK)
            lines[begin] = 0
            return 1
        over = False
        for i, draft in enumerate(drafts):
            if not _allows(lines[begin + i].view(np.uint8), draft):
                return i + 1
            over = over or draft in self._eos
            if over:
                write_mask(self._end, lines[begin + i + 1])
        return 1 + len(drafts)

    def drafts_to_walk(self, drafts: Sequence[int]) -> list[int]:
        """The drafts before the first that ends the text: the library does not see that one."""
        end = next((i for i, draft in enumerate(drafts) if draft in self._eos), len(drafts))
        return list(drafts[:end])

    def _walk(self, drafts: Sequence[int]) -> list[Mask]:
        """Masks up to the first draft that is not allowed. Drafts may follow an end token where it is ignored."""
        matcher = self._matcher
        mask = self.mask()
        over = self._over
        walked = 0
        made: list[Mask] = [mask]
        for draft in drafts:
            if not _allows(mask, draft):
                break
            over = over or draft in self._eos
            if not over:
                matcher.consume_token(draft)
                walked += 1
            mask = self._end if over else self.mask()
            made.append(mask)
        if walked:
            matcher.rollback(walked)
        return made

    def mask(self) -> bytes:
        """The mask after what has been consumed."""
        if self._over:
            return self._end
        if self._why:
            return EMPTY_MASK
        if self._beginning.masks:
            return self._beginning.masks[self._num_seen]
        mask: bytes = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            # The mask would allow the text to end.
            self._end_with(message(self._matcher.get_error()) or _STUCK)
            return EMPTY_MASK
        return mask


class DistinctMasks:
    """Writes the masks of a step to `lines`, those of `size` bytes that are alike once: rows inside a text mostly have
    the same. That is less to copy to a device, and the masks of many rows do not fit into a core's cache.

    The library writes to `address`, memory that stays in the cache, and what it wrote is compared with the last few
    others. given: the lines of masks that are kept elsewhere, by identity. used: lines that have been written.
    """

    COMPARED = 8

    def __init__(self, lines: Lines, size: int) -> None:
        self._lines, self._size = lines, size
        self._bytes = lines.reshape(-1).view(np.uint8).data
        self._known: deque[tuple[bytearray, int]] = deque(maxlen=self.COMPARED)
        self.given: dict[int, int] = {}
        self.used = 0
        self._next()

    def _next(self) -> None:
        self._mask = bytearray(max(1, self._size))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._mask))

    def line(self) -> int:
        """The line that has the mask at `address`."""
        mask = self._mask
        for known, line in self._known:
            if known == mask:
                return line
        free, size = self.used, self._size
        self._bytes[free * size : (free + 1) * size] = mask
        self._known.append((mask, free))
        self.used += 1
        self._next()
        return free

    def give(self, mask: bytes) -> int:
        """A new line with a mask that is kept elsewhere, for all rows of the step that have the same object."""
        line = self.given[id(mask)] = self.used
        write_mask(mask, self._lines[line])
        self.used += 1
        return line


class ParallelMasks:
    """Computes the masks of a step, on several cores where they are slow (a `ComputeMasks`).

    A usual mask takes 4 to 6 us, and waking threads for 64 of them takes longer than making them. num_threads: None for
    up to MAX_THREADS, as cores allow. The time of one grammar is not known there. So two steps in a row that took
    longer than usual by `TimeBudget.each` are followed by one whose masks are made one by one, each charged to its
    answer; where none was slow, that is done ever more rarely. (One step alone may be slow because answers enter a
    state that their grammar has not been in.)
    """

    USUAL = 3e-5
    """Seconds of one mask, with what is done around it."""

    WAKE = 1e-3
    """Seconds after which the masks that are left are made by threads. They also are where other threads of the process
    take the interpreter's lock: it is released for each mask before, and for all at once then."""

    THREADED = 1e-5
    """Seconds that one of many usual masks takes where threads make them: as long as others are made sooner, they stay
    without threads, and those that are alike are copied once."""

    MAX_PAUSE = 63
    """Most steps between two that are measured, where no grammar is slow."""

    MAX_THREADS = 4
    """More wait for each other: 64 usual masks of 152,000 tokens take 0.64 ms with 4, 0.78 with 8 (16 cores), and 0.23
    with none."""

    def __init__(
        self,
        num_threads: int | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._cpu_clock = cpu_clock
        self._num_threads = num_threads or max(1, min(self.MAX_THREADS, (os.cpu_count() or 1) - 1))
        self._clock = clock
        self._measure = self._slow = False
        self._pause = self._wait = 0
        self._lines = np.zeros((0, 0), dtype=np.int32)

    @cached_property
    def _executor(self) -> LLExecutor:
        return LLExecutor(self._num_threads)

    def __call__(self, requests: Sequence[MaskRequest]) -> Sequence[Sequence[Mask]]:
        """The masks of each request; lines of one array that the next call writes to."""
        if self._measure:
            return self._one_by_one(requests)
        began = self._clock()
        made = self._together(requests)
        self._wait -= 1
        was_slow, self._slow = self._slow, self._clock() - began > DEFAULT_BUDGET.each + self.USUAL * len(requests)
        self._measure = was_slow and self._slow and self._wait < 0
        return made

    def _one_by_one(self, requests: Sequence[MaskRequest]) -> list[list[Mask]]:
        made, slowest = list[list[Mask]](), 0.0
        for request in requests:
            began = self._cpu_clock()
            made += one_by_one([request])
            slowest = max(slowest, self._cpu_clock() - began)
        self._measure = slowest > DEFAULT_BUDGET.each
        self._pause = 0 if self._measure else min(2 * self._pause + 1, self.MAX_PAUSE)
        self._wait = self._pause
        return made

    def _together(self, requests: Sequence[MaskRequest]) -> MaskTable:
        count = len(requests) + sum([len(request[3]) for request in requests])
        width = next((one[0].mask_bytes // 4 for one in requests if isinstance(one[0], Matcher)), 0)
        lines = self._buffer(count, width or self._lines.shape[1])
        distinct, clock = DistinctMasks(lines, 4 * width), self._clock
        given, due = distinct.given, clock() + max(self.WAKE, self.THREADED * len(requests))
        places, rest = list[list[int]](), list[tuple[list[int], MaskRequest]]()
        for request in requests:
            matcher, tokens, begin, drafts = request
            if drafts or not isinstance(matcher, Matcher) or clock() > due:
                span = list[int]()
                rest.append((span, request))
            elif matcher.fill(tokens, begin, distinct.address):
                span = [distinct.line()]
            else:
                mask = matcher.mask()
                line = given.get(id(mask))
                span = [distinct.give(mask) if line is None else line]
            places.append(span)
        used = distinct.used
        if rest:
            used, lines = self._rest(rest, lines, used, width)
        return MaskTable(lines[:used], places)

    def _rest(
        self, rest: Sequence[tuple[list[int], MaskRequest]], lines: Lines, used: int, width: int
    ) -> tuple[int, Lines]:
        """Masks of spans with drafts, of other constraints than matchers, and those that threads make.

        rest: the places of each request are put into its list. lines: of which `used` are written; width: of a mask, 0:
        no matcher is among them. Returns how many are used then, and the lines.
        """
        count, at, size = len(lines), lines.ctypes.data, 4 * width
        left = list[tuple[LLMatcher, int]]()
        drafted = list[tuple[LLMatcher, int, list[int]]]()
        checks = list[tuple[Matcher, list[int], Sequence[int]]]()
        others = list[tuple[list[int], list[Mask]]]()
        for span, request in rest:
            constraint, tokens, begin, drafts = request
            span += range(used, used + 1 + len(drafts))
            matcher = constraint if isinstance(constraint, Matcher) else None
            library = None if matcher is None else matcher.follow(tokens, begin, drafts)
            if matcher is None or library is None:
                known: list[Mask] = [matcher.mask()] if matcher and not drafts else one_by_one([request])[0]
                others.append((span, known))
            else:
                checks.append((matcher, span, drafts))
                if drafts and (walked := matcher.drafts_to_walk(drafts)):
                    drafted.append((library, used, walked))
                else:
                    left.append((library, used))
            used = span[-1] + 1
        if left:
            self._executor.unsafe_compute_mask_ptr(left, at, size, count)
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, at, size, count)
        for matcher, span, drafts in checks:
            held = matcher.collect(lines, span[0], drafts)
            span[held:] = [-1] * (len(span) - held)
        if not width:
            least = max((-(-len(mask or b"") // 4) for _, masks in others for mask in masks), default=0)
            lines = self._buffer(count, max(least, self._lines.shape[1]))
        written: dict[int, int] = {}
        for span, masks in others:
            for n, mask in enumerate(masks):
                line = -1 if mask is None else written.setdefault(id(mask), span[n])
                if mask is not None and line == span[n]:
                    write_mask(mask, lines[line])
                span[n] = line
        return used, lines

    def _buffer(self, count: int, words: int) -> npt.NDArray[np.int32]:
        if len(self._lines) < count or self._lines.shape[1] != words:
            self._lines = np.zeros((max(count, 2 * len(self._lines)), words), dtype=np.int32)
        return self._lines[:count]


def _allows(mask: bytes | npt.NDArray[np.uint8], token: int) -> bool:
    at = token >> 3
    return at < len(mask) and bool(mask[at] >> (token & 7) & 1)


def _bits(tokens: frozenset[int]) -> bytes:
    return _as_bits(tokens).to_bytes(max(tokens, default=0) // 8 + 1, "little")


def vocabulary(tokenizer: Tokenizer) -> LLTokenizer:
    """The library's tokenizer, with the bytes that the detokenizer uses, so that masks apply to what a client reads.

    Raises InvalidModel where tokens have no bytes of their own, or where there is no end-of-text token.
    """
    if not tokenizer.exact:
        raise InvalidModel("structured output needs a tokenizer whose tokens are bytes (byte-level or sentencepiece)")
    if not tokenizer.eos:
        raise InvalidModel("structured output needs an end-of-text token, and this model's tokenizer names none")
    pieces = [tokenizer.token_text(token)[1] for token in range(tokenizer.vocab_size)]
    return LLTokenizer(TokenizerWrapper(_TokenizerAdapter(tokenizer, pieces)), eos_token=sorted(tokenizer.eos))


def _special(tokenizer: Tokenizer, pieces: Sequence[bytes]) -> frozenset[int]:
    """Special tokens but marks of calls and thoughts, which are text for grammars, as these are written in text."""
    marks = {token for token in tokenizer.special - tokenizer.eos if pieces[token] and _is_mark(pieces[token])}
    return tokenizer.special - marks


def _is_mark(piece: bytes) -> bool:
    """Whether a special token's text is part of a mark, and no word or bracket that marks are written with."""
    text = piece.decode(errors="replace")
    return len(text) > 2 and not text.isalnum() and (text in _MARKS or declared(text) in _MARKS)


_MARKS = "\n".join(
    (
        *(mark for style in THOUGHTS.values() for mark in (*style.opens, *style.closes, style.between, style.answer)),
        *(text for style in STYLES.values() for text in (style.before, style.start, style.finish, style.after)),
        *(mark for style in STYLES.values() if isinstance(style, TaggedStyle) for mark in (style.begin, *style.opens)),
    )
)
"""Texts that contain the marks of calls and thoughts."""


class _TokenizerAdapter:
    """The interface that the library expects of a tokenizer. The library could read tokenizer.json by itself, for which
    it keeps Python's lock three times as long."""

    def __init__(self, tokenizer: Tokenizer, pieces: list[bytes]) -> None:
        self._tokenizer = tokenizer
        self._special = special = _special(tokenizer, pieces)
        self.bos_token_id = tokenizer.bos
        self.eos_token_id = min(tokenizer.eos)
        self.special_token_ids = sorted(special)
        self.tokens = pieces
        self._ids = {piece: token for token, piece in enumerate(pieces) if piece and token not in special}
        self._longest = max(map(len, self._ids))
        self._cut = lru_cache(1024)(self._tokens)  # all answers of a grammar have the same texts

    def __call__(self, text: bytes) -> list[int]:
        """The tokens of text that the grammar determines, up to a special one."""
        return self._cut(text)

    def _tokens(self, text: bytes) -> list[int]:
        """The tokenizer's, or where those are not this very text, the longest match at each position."""
        encoded = self._tokenizer.encode_inner(text.decode())
        if b"".join(self.tokens[token] for token in encoded) == text:
            return list(takewhile(lambda token: token not in self._special, encoded))
        tokens: list[int] = []
        at = 0
        while at < len(text):
            ends = range(min(at + self._longest, len(text)), at, -1)
            end = next((end for end in ends if text[at:end] in self._ids), None)
            if end is None:
                return tokens
            tokens.append(self._ids[text[at:end]])
            at = end
        return tokens
