"""Beam search over one-token continuations, with vLLM's parameters and outputs, and transformers' order of beams.

Each step extends the running beams by their likeliest tokens. Of the best continuations, those that end go to the
finished ones, ranked by their log-probability over the number of generated tokens to the power of `length_penalty`;
the best of the others run on. The search ends at `max_tokens`, or when no running beam can become better than the worst
finished one ("Beam Search Strategies for Neural Machine Translation", Freitag and Al-Onaizan, 2017).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quire.checks import number, with_unneeded
from quire.errors import InvalidRequest
from quire.tokenization.tokenizer import Tokenizer
from quire.types import UNLIMITED

MAX_BEAMS = 256


@with_unneeded({})
@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """How to search, with vLLM's names. Raises InvalidRequest naming the field.

    beam_width: beams that run, and that are returned. max_tokens: the most that are generated. length_penalty: above 0
    favours long answers. temperature: 0, since beams are ranked by the model's own distribution. early_stopping: end as
    soon as `beam_width` beams have finished, even if others may become better.
    include_stop_str_in_output: whether `tokens` end with the end-of-text token.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    early_stopping: bool = False

    def __post_init__(self) -> None:
        number("beam_width", self.beam_width, 1, MAX_BEAMS, whole=True)
        number("max_tokens", self.max_tokens, 1, UNLIMITED, whole=True)
        number("length_penalty", self.length_penalty, -100.0, 100.0)
        if self.temperature != 0:
            raise InvalidRequest("temperature must be 0: beams are ranked, not sampled", param="temperature")


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """One beam. tokens, text: of the prompt and the answer, as in vLLM. cum_logprob: of the answer's tokens.

    finish_reason: stop at an end-of-text token, length at `max_tokens`.
    """

    tokens: tuple[int, ...]
    text: str
    cum_logprob: float
    finish_reason: str


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The answers to one prompt, best first."""

    sequences: tuple[BeamSearchSequence, ...]


class Beam(NamedTuple):
    """Tokens that were generated, and the sum of their log-probabilities."""

    tokens: tuple[int, ...] = ()
    logprob: float = 0.0


def num_candidates(params: BeamSearchParams, eos: Collection[int]) -> int:
    """Likeliest tokens of each running beam that a search needs: enough that some go on where others end.

    eos: token ids that end an answer.
    """
    return max(2, 1 + (0 if params.ignore_eos else len(eos))) * params.beam_width


class BeamSearch:
    """The search for one prompt. eos: token ids that end an answer."""

    def __init__(self, params: BeamSearchParams, eos: Collection[int]) -> None:
        self._params = params
        self._eos = frozenset() if params.ignore_eos else frozenset(eos)
        # (score, beam), best first.
        self._finished: list[tuple[float, Beam]] = []
        self.running: list[Beam] = [Beam()]
        self.over = False

    @property
    def num_candidates(self) -> int:
        """See `num_candidates`."""
        return num_candidates(self._params, self._eos)

    @property
    def beams(self) -> list[Beam]:
        """The best beams that finished, best first."""
        return [beam for _, beam in self._finished]

    def extend(self, likeliest: Sequence[Sequence[tuple[int, float]]]) -> None:
        """Extend each running beam by its `num_candidates` likeliest (token id, log-probability).

        Where a model gives none, running beams are the answers as they are, those that have tokens.
        """
        width = self._params.beam_width
        grown = [
            Beam((*beam.tokens, token), beam.logprob + logprob)
            for beam, ones in zip(self.running, likeliest, strict=True)
            for token, logprob in ones
        ]
        best = sorted(grown, key=lambda beam: -beam.logprob)[: self.num_candidates]
        if not best:
            beams = [beam for beam in self.best_so_far if beam.tokens][:width]
            self._finished = [(self._score(beam.logprob, len(beam.tokens)), beam) for beam in beams]
            self.running, self.over = [], True
            return
        length = len(best[0].tokens)
        last = length == self._params.max_tokens
        ended = [beam for beam in best[:width] if last or beam.tokens[-1] in self._eos]
        ranked = [*self._finished, *((self._score(beam.logprob, length), beam) for beam in ended)]
        self._finished = sorted(ranked, key=lambda one: -one[0])[:width]
        self.running = [beam for beam in best if not last and beam.tokens[-1] not in self._eos][:width]
        full = len(self._finished) == width
        settled = self._params.early_stopping or (
            bool(self.running) and full and self._score(self.running[0].logprob, length) <= self._finished[-1][0]
        )
        self.over = not self.running or (full and settled)

    @property
    def best_so_far(self) -> list[Beam]:
        """The best beams if the search ended now, running ones included, best first."""
        running = [(self._score(beam.logprob, len(beam.tokens)), beam) for beam in self.running if beam.tokens]
        return [beam for _, beam in sorted([*self._finished, *running], key=lambda one: -one[0])]

    def _score(self, logprob: float, length: int) -> float:
        return logprob / float(length**self._params.length_penalty)


def beam_search_output(
    prompt: Sequence[int], beams: Sequence[Beam], params: BeamSearchParams, tokenizer: Tokenizer
) -> BeamSearchOutput:
    """vLLM's output for the beams of one prompt."""
    made = []
    for beam in beams:
        ended = not params.ignore_eos and beam.tokens[-1] in tokenizer.eos
        tokens = (*prompt, *(beam.tokens[:-1] if ended and not params.include_stop_str_in_output else beam.tokens))
        reason = "stop" if ended else "length"
        text = tokenizer.decode(tokens) if tokenizer.has_text else ""
        made.append(BeamSearchSequence(tokens, text, beam.logprob, reason))
    return BeamSearchOutput(tuple(made))


def search(
    searches: Sequence[BeamSearch],
    likeliest: Callable[[Sequence[tuple[int, Beam, int]]], Sequence[Sequence[tuple[int, float]]]],
) -> None:
    """Run searches to their ends, all beams of a step together.

    likeliest: the likeliest tokens for each (number of the search, beam, how many tokens).
    """
    while going := [(i, one) for i, one in enumerate(searches) if not one.over]:
        asked = [(i, beam, one.num_candidates) for i, one in going for beam in one.running]
        found = iter(likeliest(asked))
        for _, one in going:
            one.extend([next(found) for _ in one.running])
