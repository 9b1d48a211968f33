"""The offline door, on a model whose weights are the alphabet: after each letter comes the next, after z the end."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from quire import LLM, RequestOutput, SamplingParams
from quire.config import Settings
from quire.engine.engine import Engine
from quire.engine.executor import Description
from quire.errors import Closed, InvalidConfig, InvalidRequest, QuireError
from quire.scheduler.kv_cache import KVCacheManager, make_prefix_cache
from quire.scheduler.plan import Mask, Plan, Result
from quire.scheduler.scheduler import Scheduler
from quire.tokenization.chat_template import ChatTemplate
from quire.tokenization.infill import Infill
from quire.tokenization.tokenizer import Tokenizer
from quire.types import UNLIMITED, CompletionOutput, StructuredOutputsParams, TokenLogprobs
from quire.weights.pooling import GENERATES

CONTEXT = 40
LETTERS = {letter: place for place, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
END = len(LETTERS)


class Spelled:
    def __init__(self, result: Result) -> None:
        self._result = result

    def sample(self, masks: Sequence[Sequence[Mask]]) -> None:
        raise AssertionError("nobody asked for masks")

    def is_done(self) -> bool:
        return True

    def result(self) -> Result:
        return self._result


class Alphabet:
    """After each letter the next one; the n-th answer takes n steps at once. Log-probabilities are all -1/2."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.rows: dict[int, tuple[list[int], int, bool]] = {}
        self.closed = False
        self.fails = ""

    def describe(self) -> Description:
        return Description(num_blocks=self.pages, block_size=4, num_rows=8, max_model_len=CONTEXT, vocab_size=END + 1)

    def launch(self, plan: Plan) -> Spelled:
        for opened in plan.new_sequences:
            wanted = opened.sampling.logprobs is not None
            self.rows[opened.row] = (list(opened.tokens), 1 + opened.choice, wanted)
        tokens: list[list[int]] = []
        logprobs: dict[int, list[TokenLogprobs]] = {}
        for index, span in enumerate(plan.spans):
            history, stride, wanted = self.rows[span.row]
            last = history[-1] + stride
            tokens.append([last if last <= LETTERS["z"] else END] if span.num_samples else [])
            history += tokens[-1]
            if wanted:
                logprobs[index] = [TokenLogprobs(token, -0.5, 1) for token in tokens[-1]]
        errors = dict.fromkeys(range(len(plan.spans)), self.fails) if self.fails else {}
        return Spelled(Result(tokens, [], logprobs, errors=errors))

    def reset(self) -> None:
        self.rows.clear()

    def close(self) -> None:
        self.closed = True


def tokenizer() -> Tokenizer:
    core = tokenizers.Tokenizer(models.BPE(LETTERS, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<end>"])
    return Tokenizer(core, {"eos_token": "<end>"})


@pytest.fixture
def pages() -> int:
    return 64


@pytest.fixture
def alphabet(pages: int) -> Alphabet:
    return Alphabet(pages)


@pytest.fixture(params=[0, 1, 2], ids="lookahead {}".format)
def lookahead(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def chunk() -> int:
    return UNLIMITED


@pytest.fixture
def engine(alphabet: Alphabet, lookahead: int, chunk: int) -> Engine:
    about = alphabet.describe()
    kv = KVCacheManager(about.num_blocks, about.block_size, make_prefix_cache(about.block_size, True))
    return Engine(Scheduler(kv, rows=about.num_rows, max_chunk_tokens=chunk), alphabet, lookahead=lookahead)


@pytest.fixture
def llm(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    text = SimpleNamespace(
        pooler=GENERATES,
        tokenizer=tokenizer(),
        template=template,
        defaults={"temperature": 0.5},
        reasoning_parser="none",
    )
    monkeypatch.setattr("quire.llm.build_engine", lambda settings: engine)
    monkeypatch.setattr("quire.llm.build_text", lambda settings: text)
    with LLM() as opened:
        yield opened
    assert engine.scheduler.kv.block_pool.num_free == engine.description.num_blocks, "pages were not given back"


def only(llm: LLM, prompt: Any, **sampling: Any) -> CompletionOutput:
    [output] = llm.generate(prompt, SamplingParams(**sampling))
    [completion] = output.outputs
    return completion


def test_answers_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    outputs = llm.generate(["abc", "x", "mn"], SamplingParams(max_tokens=3))
    assert [(o.prompt, o.outputs[0].text) for o in outputs] == [("abc", "def"), ("x", "yz"), ("mn", "opq")]
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "stop", "length"]
    assert all(o.finished for o in outputs)
    assert len({o.request_id for o in outputs}) == 3


@pytest.mark.parametrize("prompt", ["b", {"prompt": "b"}, {"prompt_token_ids": [LETTERS["b"]]}, [LETTERS["b"]]])
def test_a_prompt_may_be_text_or_token_ids_alone_or_in_a_list(llm: LLM, prompt: Any) -> None:
    assert only(llm, prompt, max_tokens=2).text == "cd"
    assert only(llm, [prompt], max_tokens=2).text == "cd"


def test_more_prompts_than_fit_at_once_all_come_home(llm: LLM) -> None:
    outputs = llm.generate(["a" * (1 + n % 5) for n in range(50)], SamplingParams(max_tokens=5))
    assert {o.outputs[0].text for o in outputs} == {"bcdef"}


def test_each_prompt_may_have_params_of_its_own(llm: LLM) -> None:
    outputs = llm.generate(["a", "a"], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)])
    assert [o.outputs[0].text for o in outputs] == ["b", "bc"]


def test_what_is_enqueued_is_returned_once_in_order(llm: LLM) -> None:
    first = llm.enqueue(["abc", "x"], SamplingParams(max_tokens=3))
    [third] = llm.enqueue("m", SamplingParams(max_tokens=2, n=2), use_tqdm=False, lora_request=None)
    assert only(llm, "a", max_tokens=2).text == "bc", "other calls run meanwhile"
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == [*first, third]
    found = [(output.prompt, [one.text for one in output.outputs]) for output in outputs]
    assert found == [("abc", ["def"]), ("x", ["yz"]), ("m", ["no", "oq"])]
    assert all(output.finished for output in outputs)
    assert llm.wait_for_completion() == []


def test_what_is_enqueued_runs_before_it_is_waited_for(llm: LLM) -> None:
    llm.enqueue("a", SamplingParams(max_tokens=5))
    [batch] = llm._enqueued
    ended = batch.ended.get(timeout=30)
    batch.ended.put(ended)
    assert ended[1] is None
    [output] = llm.wait_for_completion((RequestOutput,))
    assert output.outputs[0].text == "bcdef"


@pytest.mark.parametrize("suffix", ["", "mn"])
def test_nothing_is_enqueued_of_a_call_that_is_refused(llm: LLM, suffix: str) -> None:
    with pytest.raises(InvalidRequest, match="lora_request"):
        llm.enqueue("a", lora_request="adapter", suffix=suffix)
    with pytest.raises(InvalidRequest, match="suffix" if suffix else "context|tokens"):
        llm.enqueue(["a", "b" * (CONTEXT + 1)], SamplingParams(max_tokens=5), suffix=suffix)
    assert llm.wait_for_completion() == []


def test_only_types_that_are_enqueued_can_be_waited_for(llm: LLM) -> None:
    [id] = llm.enqueue("a", SamplingParams(max_tokens=1))
    with pytest.raises(InvalidRequest, match="other types are not supported") as caught:
        llm.wait_for_completion((int, str))
    assert caught.value.param == "output_type"
    [output] = llm.wait_for_completion(RequestOutput)
    assert output.request_id == id


def test_two_threads_that_wait_share_what_was_enqueued(llm: LLM) -> None:
    ids = [id for letter in "abcdefgh" for id in llm.enqueue(letter, SamplingParams(max_tokens=4))]
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(llm.wait_for_completion, use_tqdm=False) for _ in range(2)]
        outputs = [output for each in waiting for output in each.result(timeout=60)]
    assert sorted(output.request_id for output in outputs) == sorted(ids)


def test_closing_ends_what_was_enqueued(llm: LLM) -> None:
    llm.enqueue(["a"] * 20, SamplingParams(max_tokens=20))
    llm.close()
    with pytest.raises(Closed, match="has been closed"):
        llm.wait_for_completion()
    with pytest.raises(Closed, match="has been closed"):
        llm.enqueue("a")


def test_a_suffix_is_filled_in_before_until_a_token_that_ends_the_middle(llm: LLM) -> None:
    spelled = dict(LETTERS)
    marks = (spelled["y"], spelled["x"], None, (spelled["e"],))
    llm._text.tokenizer.infill = Infill(*marks, re.compile("(?!)"))
    filled = llm.generate(["ab", {"prompt": "ab"}, "p"], SamplingParams(max_tokens=9), suffix=["mn", "", "a"])
    ids = [tuple(spelled[letter] for letter in letters) for letters in ("xmnyab", "ab", "xayp")]
    assert [output.prompt_token_ids for output in filled] == ids
    assert [output.outputs[0].text for output in filled] == ["cd", "cdefghijk", "qrstuvwxy"]
    assert (filled[0].outputs[0].finish_reason, filled[0].outputs[0].stop_reason) == ("stop", spelled["e"])
    [on] = llm.generate("ab", SamplingParams(max_tokens=5, ignore_eos=True), suffix="mn")
    assert on.outputs[0].text == "cdefg"


@pytest.mark.parametrize(
    ("prompts", "suffix", "words"),
    [
        (["a", "b"], ["x"], "2 prompts but 1 suffixes"),
        ("a", 3, "must be a list"),
        (["a"], [3], "must be text"),
        ([[1, 2]], "x", "a prompt must be text"),
        ({"prompt_token_ids": [1]}, "x", "a prompt must be text"),
        ("a", "x", "no markers"),
    ],
)
def test_a_suffix_that_cannot_be_filled_in_before_is_refused_by_name(
    llm: LLM, prompts: Any, suffix: Any, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words) as refused:
        llm.generate(prompts, suffix=suffix)
    assert refused.value.param == "suffix"


def test_the_end_token_counts_but_is_not_text(llm: LLM) -> None:
    answer = only(llm, "x", max_tokens=9)
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("yz", "stop", None)
    assert answer.token_ids == (LETTERS["y"], LETTERS["z"], END)


def test_the_end_token_can_be_ignored(llm: LLM) -> None:
    assert only(llm, "y", max_tokens=3, ignore_eos=True).finish_reason == "length"


def test_a_stop_string_ends_the_text_before_it_and_spans_tokens(llm: LLM) -> None:
    answer = only(llm, "a", max_tokens=20, stop=["no", "ef"])
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("bcd", "stop", "ef")


def test_a_stop_string_ends_the_computing_too(llm: LLM, engine: Engine) -> None:
    assert only(llm, "a", max_tokens=30, ignore_eos=True).finish_reason == "length"
    whole = engine.stats.num_steps
    assert only(llm, "a", max_tokens=30, ignore_eos=True, stop="ef").text == "bcd"
    assert engine.stats.num_steps - whole < 10 < 30 <= whole
    before = engine.stats.num_steps
    outputs = llm.generate(["a", "c"], SamplingParams(max_tokens=30, ignore_eos=True, stop="ef"))
    assert [output.outputs[0].text for output in outputs] == ["bcd", "d"]
    assert engine.stats.num_steps - before < 10, "of several at once too"


def test_a_stop_string_may_be_kept(llm: LLM) -> None:
    assert only(llm, "a", stop="ef", include_stop_str_in_output=True).text == "bcdef"


def test_stop_strings_wait_for_min_tokens(llm: LLM) -> None:
    assert only(llm, "a", max_tokens=20, min_tokens=4, stop=["c", "h"]).text == "bcdefg"


def test_a_stop_token_is_named(llm: LLM) -> None:
    answer = only(llm, "a", stop_token_ids=[LETTERS["d"]])
    assert (answer.text, answer.stop_reason) == ("bc", LETTERS["d"])


def test_text_that_only_might_have_become_a_stop_string_is_told_at_the_end(llm: LLM) -> None:
    assert only(llm, "a", max_tokens=3, stop=["cdx"]).text == "bcd"


def test_n_answers_to_one_prompt(llm: LLM) -> None:
    [output] = llm.generate("a", SamplingParams(n=3, max_tokens=3))
    assert [(c.index, c.text) for c in output.outputs] == [(0, "bcd"), (1, "ceg"), (2, "dgj")]


def test_log_probabilities_are_there_when_asked_for(llm: LLM) -> None:
    answer = only(llm, "a", max_tokens=4, logprobs=0)
    assert answer.logprobs is not None
    assert [one.token for one in answer.logprobs] == list(answer.token_ids)
    assert answer.cumulative_logprob == -2.0
    assert only(llm, "a").logprobs is None


def test_outputs_have_the_attributes_of_vllms(llm: LLM) -> None:
    [output] = llm.generate("abc", SamplingParams(max_tokens=3, logprobs=1, best_of=1))
    [answer] = output.outputs
    assert answer.logprobs is not None and output.metrics is not None
    for token, position in zip(answer.token_ids, answer.logprobs, strict=True):
        assert position[token].decoded_token == llm.get_tokenizer().decode([token])
        assert position[token].logprob == position.logprob
    assert answer.finished() and output.metrics.num_generation_tokens == 3 and output.metrics.first_token_latency >= 0
    for one, absent in ((output, "lora_request encoder_prompt"), (answer, "lora_request routed_experts")):
        assert [getattr(one, name) for name in absent.split()] == [None, None]


def test_parameters_may_be_changed_once_a_call_was_made(llm: LLM) -> None:
    params = SamplingParams(max_tokens=3)
    for most in (1, 2):
        params.max_tokens = most
        llm.enqueue("a", params)
    pieces = llm.stream("a", params)
    params.max_tokens = 3
    assert [one.outputs[0].text for one in llm.wait_for_completion()] == ["b", "bc"]
    assert "".join(pieces) == "bc" and only(llm, "a", max_tokens=3).text == "bcd"


def test_no_limit_means_the_whole_context(llm: LLM) -> None:
    answer = only(llm, "a" * 30, max_tokens=None, ignore_eos=True)
    assert (len(answer.token_ids), answer.finish_reason) == (CONTEXT - 30, "length")


@pytest.mark.parametrize("pages", [5])
def test_no_limit_means_no_more_than_the_pages_hold(llm: LLM) -> None:
    assert len(only(llm, "a" * 12, max_tokens=None, ignore_eos=True).token_ids) == 5 * 4 - 12


def test_a_repeated_prompt_is_read_from_the_cache(llm: LLM) -> None:
    first, second = (llm.generate("abcdefghij", SamplingParams(max_tokens=1))[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 8)
    assert first.outputs == second.outputs


def test_after_a_reset_nothing_is_read_from_the_cache(llm: LLM) -> None:
    cached = []
    for _ in range(2):
        cached.append(llm.generate("abcdefghij", SamplingParams(max_tokens=1))[0].num_cached_tokens)
        llm.reset_prefix_cache()
    assert cached == [0, 0]


def test_without_params_the_models_own_defaults_hold(llm: LLM) -> None:
    assert llm.default_sampling_params(top_k=5) == SamplingParams(temperature=0.5, top_k=5)
    assert llm.generate("a")[0].outputs[0].text == "bcdefghijklmnopq"


def test_chat_renders_one_conversation_or_many(llm: LLM) -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    one, two = SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)
    assert [o.outputs[0].text for o in llm.chat(talk, two)] == ["cd"]
    assert [o.outputs[0].text for o in llm.chat([talk, talk[:1]], [one, two])] == ["c", "bc"]
    assert llm.chat(talk, one)[0].prompt == "ab"


def test_chat_may_go_on_with_the_last_message(llm: LLM) -> None:
    talk, one = [{"role": "assistant", "content": "ab"}], SamplingParams(max_tokens=1)
    [output] = llm.chat(talk, one, add_generation_prompt=False, continue_final_message=True)
    assert output.outputs[0].text == "c"
    with pytest.raises(InvalidRequest, match="add_generation_prompt"):
        llm.chat(talk, one, continue_final_message=True)


def test_a_stream_tells_pieces_that_make_up_the_whole(llm: LLM) -> None:
    pieces = list(llm.stream("a", SamplingParams(max_tokens=5)))
    assert pieces == ["b", "c", "d", "e", "f"]
    assert "".join(llm.stream_chat([{"role": "user", "content": "u"}], SamplingParams())) == "vwxyz"


@pytest.mark.parametrize("chunk", [2])
def test_steps_that_bring_nothing_do_not_end_a_stream(llm: LLM) -> None:
    """A prompt of several chunks, and results that are home steps later than they were launched."""
    assert list(llm.stream("abcdefghi", SamplingParams(max_tokens=3))) == ["j", "k", "l"]


def test_two_streams_may_be_read_in_turns(llm: LLM) -> None:
    params = SamplingParams(max_tokens=3)
    pairs = zip(llm.stream("a", params), llm.stream("m", params), strict=True)
    assert list(pairs) == [("b", "n"), ("c", "o"), ("d", "p")]


def test_a_stream_whose_answer_fails_says_so_rather_than_end(llm: LLM, alphabet: Alphabet) -> None:
    alphabet.fails = "the model produced NaN"
    with pytest.raises(QuireError, match="NaN"):
        list(llm.stream("a", SamplingParams(max_tokens=3)))
    alphabet.fails = ""
    assert list(llm.stream("a", SamplingParams(max_tokens=1))) == ["b"]


def test_a_stream_that_is_closed_ends_its_request(llm: LLM, engine: Engine) -> None:
    stream = llm.stream("a", SamplingParams(max_tokens=20))
    assert next(stream) == "b"
    stream.close()
    assert not engine.has_pending_work
    assert only(llm, "a", max_tokens=1).text == "b"


@pytest.mark.parametrize(
    ("prompts", "sampling", "words"),
    [
        ("", SamplingParams(), "at least one"),
        ("a" * CONTEXT, SamplingParams(), f"context holds {CONTEXT}"),
        ("a" * 30, SamplingParams(max_tokens=11), "41"),
        ({"text": "a"}, SamplingParams(), "prompt_token_ids"),
        (["a", "b"], [SamplingParams()], "2 prompts but 1 sampling_params"),
        ([[END + 1]], SamplingParams(), f"0 to {END}"),
        (["a", ""], SamplingParams(), "at least one"),
    ],
)
def test_what_cannot_run_is_refused_and_leaves_nothing_behind(
    llm: LLM, engine: Engine, prompts: Any, sampling: Any, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        llm.generate(prompts, sampling)
    assert not engine.has_pending_work


@pytest.mark.parametrize(
    "prompts", [None, 5, b"a", iter(["a"]), ["a", None], [5.5], {"prompt": 5}, {"prompt_token_ids": "ab"}, [[1, "a"]]]
)
def test_what_is_no_prompt_is_refused_as_that(llm: LLM, prompts: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"must be"):
        llm.generate(prompts, SamplingParams(max_tokens=1))


@pytest.mark.parametrize("params", [{"max_tokens": 1}, [None], 5])
def test_what_are_no_params_is_refused_as_that(llm: LLM, params: Any) -> None:
    with pytest.raises(InvalidRequest, match="sampling_params must be SamplingParams"):
        llm.generate(["a"], params)


@pytest.mark.parametrize(
    "messages",
    ["hi", {"role": "user", "content": "a"}, [5], [{}], [{"role": 5}], [[5]], [{"role": "user", "content": 5}]],
)
def test_what_are_no_messages_is_refused_as_that(llm: LLM, messages: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm.chat(messages, SamplingParams(max_tokens=1))
    assert caught.value.param == "messages"


def test_what_is_no_tool_is_refused_as_that(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match=r"tools\[0\] must be a mapping with a function"):
        llm.chat([{"role": "user", "content": "a"}], tools=[{"x": 1}])


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids"])
@pytest.mark.parametrize("token", [-1, END + 1, 1 << 70])
def test_token_ids_outside_the_vocabulary_are_refused(llm: LLM, field: str, token: int) -> None:
    """A negative one would count from the end."""
    with pytest.raises(InvalidRequest, match=f"{field}: token ids must be from 0 to {END}"):
        only(llm, "a", **{field: [token]})
    with pytest.raises(InvalidRequest, match=f"logit_bias: token ids must be from 0 to {END}"):
        only(llm, "a", logit_bias={token: 5.0})


def test_no_prompts_have_no_answers(llm: LLM) -> None:
    assert llm.generate([]) == []


def test_vectors_are_refused_where_there_are_no_hidden_states(llm: LLM, engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="no hidden states"):
        llm.embed("abc")
    assert not engine.has_pending_work


def test_options_are_checked_before_anything_is_loaded(llm: LLM) -> None:
    with pytest.raises(InvalidConfig, match="max_num_seqs"):
        LLM(max_num_sqs=3)
    assert LLM(settings=Settings.of(seed=3)).settings.model.seed == 3


def test_the_seed_decides_what_requests_without_one_get() -> None:
    def said(seed: int) -> list[tuple[int, ...]]:
        drawn = SamplingParams(temperature=1.5, max_tokens=12)
        with LLM(seed=seed, max_model_len=64) as llm:
            return [one.outputs[0].token_ids for one in llm.generate(["Once", "Once"], drawn, use_tqdm=False)]

    first = said(1)
    assert first[0] != first[1], "each request has a seed of its own"
    assert said(1) == first != said(2)


def test_closing_gives_the_device_back(llm: LLM, alphabet: Alphabet) -> None:
    llm.close()
    assert alphabet.closed


@pytest.mark.parametrize(("options", "thoughts"), [({"enable_thinking": False}, "none"), ({}, "open"), (None, "open")])
def test_a_structure_binds_a_chat_from_its_first_token_where_thinking_is_disabled(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any] | None, thoughts: str
) -> None:
    bound: list[Any] = []

    def refused(request: Any) -> Any:
        bound.append(request.sampling.structured_outputs.thoughts)
        raise InvalidRequest("seen")

    monkeypatch.setattr(llm._text, "reasoning_parser", "deepseek_r1", raising=False)
    monkeypatch.setattr(llm._grammars, "get_or_compile", refused)
    params = SamplingParams(max_tokens=2, structured_outputs=StructuredOutputsParams(regex="[a-z]+"))
    for messages in ([{"role": "user", "content": "a"}], [[{"role": "user", "content": one}] for one in "ab"]):
        with pytest.raises(InvalidRequest, match="seen"):
            llm.chat(messages, params, chat_template_kwargs=options)
    assert bound == [thoughts] * 2
    # What the operator has set, where the call does not say.
    template = ChatTemplate(llm._text.template.source, kwargs={"enable_thinking": False})
    monkeypatch.setattr(llm._text, "template", template, raising=False)
    with pytest.raises(InvalidRequest, match="seen"):
        llm.chat([{"role": "user", "content": "a"}], params, chat_template_kwargs=options)
    assert bound[2] == "none"
    with pytest.raises(InvalidRequest, match="seen"):
        llm.chat([{"role": "user", "content": "a"}], params, chat_template_kwargs={"enable_thinking": True})
    assert bound[3] == "open"


def test_what_vllm_takes_and_changes_nothing_is_taken(llm: LLM) -> None:
    asked = SamplingParams(temperature=0.0, max_tokens=3)
    plain = llm.generate("abc", asked)[0].outputs
    assert llm.generate("abc", asked, lora_request=None, priority=[0])[0].outputs == plain
    talk = [{"role": "user", "content": "abc"}]
    assert llm.chat(talk, asked, lora_request=None, chat_template_content_format="auto")[0].outputs == plain


def test_a_sampling_parameter_in_the_wrong_place_is_refused_with_the_right_one(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match=r"no parameter top_p: pass sampling_params=SamplingParams\(top_p=0\.5\)"):
        llm.generate("abc", top_p=0.5)  # type: ignore[call-arg]


def test_an_argument_that_would_change_something_is_refused_by_name(llm: LLM) -> None:
    for call in (llm.generate, llm.chat, llm.embed):
        with pytest.raises(InvalidRequest, match="lora_request='adapter' is not supported, only None") as caught:
            call("abc", lora_request="adapter")  # type: ignore[operator]
        assert caught.value.param == "lora_request"


@pytest.mark.parametrize(
    ("priority", "named"),
    [([1], "2 prompts but 1"), (3, "scheduling_policy"), ("high", "must be a list"), ([True, 0], "must be a number")],
)
def test_a_priority_that_says_nothing_is_refused(llm: LLM, priority: Any, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named) as caught:
        llm.generate(["a", "b"], priority=priority)
    assert caught.value.param == "priority"


@pytest.mark.parametrize(("priority", "reached"), [(None, [0, 0]), (-2, [-2, -2]), ([5, 1], [5, 1])])
def test_a_priority_reaches_the_scheduler_that_reads_it(
    llm: LLM, engine: Engine, monkeypatch: pytest.MonkeyPatch, priority: Any, reached: list[int]
) -> None:
    add, priorities = engine.add, []
    monkeypatch.setattr(
        engine, "add", lambda request, *more: (priorities.append(request.priority), add(request, *more))
    )
    llm.settings = Settings.of(scheduling_policy="priority")
    llm.generate(["a", "b"], SamplingParams(max_tokens=1), priority=priority)
    assert priorities == reached
