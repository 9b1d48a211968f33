"""Log-probabilities of prompts that are read late: from the device's lines to what a caller gets."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import numpy as np
import pytest

from quire import types
from quire.engine.protocol import FrameReader, Update, encode_frame
from quire.frontend.interface import Call, Delta
from quire.frontend.outputs import request_output
from quire.frontend.prompt_logprobs import PromptLogprobs
from quire.model_runner import score_table
from quire.model_runner.device_steps import SCORE_WIDTH, read_scores
from quire.model_runner.sampling.features import MAX_LOGPROBS
from quire.model_runner.score_table import ScoreTable
from quire.types import PositionLogprobs, RequestStepOutput, SamplingParams, TokenLogprobs

TOKENS, WANTED = [7, 3, 9, 4], 2
IDS = np.array(TOKENS, np.int32)


def lines() -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    made = np.zeros((len(TOKENS), SCORE_WIDTH), np.int32)
    values = made.view(np.float32)
    for i in range(len(TOKENS)):
        values[i, 0], made[i, 1] = -0.5 * i, 1 + i
        made[i, 2 : 2 + WANTED] = [20 + i, 30 + i]
        values[i, 2 + MAX_LOGPROBS : 2 + MAX_LOGPROBS + WANTED] = [-0.25, -1.5 - i]
    return made


WHOLE = [TokenLogprobs(token, -0.5 * i, 1 + i, ((20 + i, -0.25), (30 + i, -1.5 - i))) for i, token in enumerate(TOKENS)]


def test_a_table_is_a_sequence_of_the_values_of_its_lines() -> None:
    table = ScoreTable(lines(), IDS, WANTED)
    assert [*table] == read_scores(lines(), TOKENS, [WANTED] * 4) == WHOLE and len(table) == 4
    assert [table[i] for i in (0, 3, -1, -4)] == [WHOLE[i] for i in (0, 3, -1, -4)]
    assert table == WHOLE and table[1:3] == WHOLE[1:3] and table != WHOLE[1:] and table != 1
    assert repr(table) == repr(tuple(WHOLE)) and repr(PromptLogprobs([table])) == repr((None, *WHOLE))
    assert table[1:][1] == WHOLE[2] and [*ScoreTable(lines(), IDS, 0)][1] == WHOLE[1]._replace(top=())
    for at in (4, -5):
        with pytest.raises(IndexError):
            table[at]


def test_a_message_has_the_values_of_a_table() -> None:
    event = RequestStepOutput("a", (5,), prompt_logprobs=ScoreTable(lines(), IDS, WANTED))
    (update,) = FrameReader(Update).feed(encode_frame(Update(1, [event], False, 1, 1.0)))
    assert [*update.events[0].prompt_logprobs] == WHOLE
    with pytest.raises(NotImplementedError, match="a message with a object"):
        encode_frame(Update(1, [], False, 1, 1.0, stats={"a": object()}))


def test_chunks_of_a_prompt_are_one_sequence_that_begins_with_none() -> None:
    parts = [ScoreTable(lines()[:3], IDS[:3], WANTED), (WHOLE[3],)]
    whole, want = PromptLogprobs(parts), [None, *WHOLE]
    assert [*whole] == want and whole == want and len(whole) == 5 and whole != want[1:] and whole != 0
    assert [whole[i] for i in range(-5, 5)] == want * 2 and whole[2:4] == want[2:4]
    with pytest.raises(IndexError):
        whole[5]
    assert [*PromptLogprobs([])] == [None]


def test_an_output_reads_a_position_when_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[list[int]]()

    def recorded(scores: object, tokens: list[int], wanted: list[int]) -> list[TokenLogprobs]:
        read.append([*tokens])
        return read_scores(scores, tokens, wanted)  # type: ignore[arg-type]

    class Names:
        def token_text(self, token: int) -> tuple[str, bytes]:
            return f"t{token}", b""

    positions = list[TokenLogprobs]()

    class Counted(PositionLogprobs):
        def __init__(self, scores: TokenLogprobs, decode: Callable[[int], str]) -> None:
            positions.append(scores)
            super().__init__(scores, decode)

    monkeypatch.setattr(types, "PositionLogprobs", Counted)
    monkeypatch.setattr(score_table, "read_scores", recorded)
    scores = PromptLogprobs([ScoreTable(lines(), IDS, WANTED)])
    call = Call(id="a", prompt=(1, *TOKENS), text=None, sampling=SamplingParams(prompt_logprobs=WANTED))
    made = request_output(call, [[Delta(0, "", (5,), prompt_logprobs=scores)]], Names())  # type: ignore[arg-type]
    assert made.prompt_logprobs is not None and made.prompt_logprobs[0] is None and not read and not positions
    third = made.prompt_logprobs[3]
    assert third is not None and (third.token, third.rank, third[31 + 1].decoded_token) == (9, 3, "t32")
    assert read == [[9]], "once, and no other"
    monkeypatch.undo()
    second = pickle.loads(pickle.dumps(made.prompt_logprobs[2]))
    assert {token: one.logprob for token, one in second.items()} == {3: -0.5, 21: -0.25, 31: -2.5}
    whole = pickle.loads(pickle.dumps(made)).prompt_logprobs
    assert whole == made.prompt_logprobs and whole[3] == made.prompt_logprobs[-2:][0] == third and len(whole) == 5
