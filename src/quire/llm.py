"""Offline inference: the engine in the caller's process, with vLLM's interface.

from quire import LLM, SamplingParams
LLM().generate(["Once upon a time"], SamplingParams(max_tokens=50))
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Never, Self, cast

import torch
from rich.console import Console
from rich.progress import Progress

from quire import errors
from quire.assembly.engine import begin_context, build_engine
from quire.assembly.images import build_images, fetch_now
from quire.assembly.limits import choose_device
from quire.assembly.place import located
from quire.assembly.pooled import PoolingReader
from quire.assembly.prompts import (
    Message,
    Prompt,
    PromptReader,
    ReadPrompt,
    check_continuation,
    check_list,
    last_text,
    listed,
    suffixes,
)
from quire.assembly.text import build_text
from quire.assembly.tiers import refuse_prefill
from quire.checks import number
from quire.config import Settings
from quire.config.vllm import EngineArgs, check_method, missing, options_of
from quire.engine.thread import EngineThread, wait_for
from quire.errors import InvalidRequest, QuireError
from quire.frontend.beam_search import (
    Beam,
    BeamSearch,
    BeamSearchOutput,
    BeamSearchParams,
    beam_search_output,
    search,
)
from quire.frontend.interface import Call, Delta
from quire.frontend.outputs import (
    classification_output,
    embedding_output,
    pooling_output,
    request_output,
    scoring_outputs,
)
from quire.frontend.pooling import longest
from quire.frontend.processor import (
    OutputProcessor,
    check_priority,
    delta_of_error,
    max_new_tokens,
    output_processor,
    requests,
)
from quire.parsers.parts import Splitter, TextPart
from quire.scheduler.constraint import FREE, Constraint
from quire.structured_output.compiler import GrammarCompiler
from quire.structured_output.llguidance import LlguidanceCompiler
from quire.structured_output.trial import Trials
from quire.tokenization.detokenizer import StopStrings
from quire.tokenization.no_tokenizer import needs_text
from quire.tokenization.tokenizer import Tokenizer
from quire.types import (
    UNLIMITED,
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    FinishReason,
    Pooling,
    PoolingRequestOutput,
    Request,
    RequestOutput,
    RequestStepOutput,
    SamplingParams,
    ScoringRequestOutput,
    TokenTotal,
)


class LLM:
    """A model in this process. Arguments are the options of `quire serve`, by name; or whole `settings`.

    Arguments of vLLM's `LLM` and of its methods that are none here are taken with values that change nothing
    (`data_parallel_size=1`, `lora_request=None`); others are refused by name. See docs/clients.md.

    May be used from any number of threads: their requests run in the same steps. A signal never interrupts a step, so
    after Ctrl-C the next call works as any other. Raises InvalidConfig or InvalidModel; its methods raise Closed after
    `close`, and Interrupted when another thread closes it meanwhile.
    """

    def __init__(self, model: str = "embedded", *, settings: Settings | None = None, **options: Any) -> None:
        self.settings = located(Settings.of(model=model, **options_of(options)) if settings is None else settings)
        begin_context(self.settings)
        self._text = text = build_text(self.settings)
        self._prompts = PromptReader(text, build_images(self.settings), fetch_now(self.settings))
        self._trials = trials = Trials()
        # Not of self, which would then wait for the garbage collector with all its memory.
        self._grammars = grammars = GrammarCompiler(LlguidanceCompiler(lambda: text.tokenizer, trials))
        self._grammars_lock = lock = threading.Lock()
        refuse_prefill(self.settings, "an LLM")
        self._engine = build_engine(self.settings)
        if choose_device(self.settings.execution.device).type == "cuda":
            # Now: the caller's thread may wait for the whole device later, and CUDA fails it while a graph is captured.
            while self._engine.prepare():
                pass
            self._engine.prepare_last(lambda: _locked(lock, grammars.warm_up))
        self._seeds = random.Random(self.settings.model.fixed_seed)
        self._names = itertools.count()
        self._enqueued: deque[_Batch] = deque()
        """What `wait_for_completion` returns next; a deque, as its methods are atomic."""
        self._thread = EngineThread(self._engine, _take_over_threads)
        weakref.finalize(self, self._thread.leave)

    if not TYPE_CHECKING:  # or type checkers would find every name

        def __getattr__(self, name: str) -> Never:
            raise missing(self, name)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """An LLM of arguments that were made before. Raises as the constructor does."""
        return cls(**engine_args.given())

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
        suffix: str | Sequence[str] = "",
        **others: Any,
    ) -> list[RequestOutput]:
        """One answer for each prompt, in order. `sampling_params`: for all, one for each, or the model's defaults.

        suffix: for all or one for each, what follows the answer, which fills in between; needs a model with markers for
        that, and prompts that are text.

        `use_tqdm` (vLLM's name) shows progress on a terminal. priority: for all or one for each, lower is sooner; needs
        a `scheduling_policy` that reads it. others: arguments of vLLM that change nothing. Raises InvalidRequest naming
        the field.
        """
        self._thread.check()
        check_method(others)
        read, params = self._completions(prompts, sampling_params, suffix)
        return self._outputs(read, params, use_tqdm, priority)

    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: None = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool = True,
        *,
        suffix: str | Sequence[str] = "",
        **others: Any,
    ) -> list[str]:
        """Start what `generate` would answer, and return at once: the `request_id` of each prompt, in order.

        `wait_for_completion` returns the outputs, which are kept until then. Arguments are those of `generate`:
        the order is vLLM's, `lora_request` is None, and `use_tqdm` changes nothing, as nothing is waited for. Raises
        InvalidRequest naming the field; then none runs.
        """
        del use_tqdm
        self._thread.check()
        check_method({"lora_request": lora_request, **others})
        batch = self._batch(*self._completions(prompts, sampling_params, suffix), priority)
        _Running(self._thread, batch.readers).__enter__()
        self._enqueued.append(batch)
        return [job.call.id for job in batch.jobs]

    def wait_for_completion(
        self,
        output_type: type[RequestOutput] | tuple[type, ...] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """The outputs of all that was enqueued, by any thread, since this was called last, in that order.

        Each output is returned once. Where an exception ends the wait, Ctrl-C for example, those requests end with it.
        output_type: vLLM's; only RequestOutput is enqueued here. Raises InvalidRequest for types without it.
        """
        self._thread.check()
        types = output_type if isinstance(output_type, tuple) else (output_type or RequestOutput,)
        if RequestOutput not in types:
            raise InvalidRequest(
                "output_type must be RequestOutput: other types are not supported", param="output_type"
            )
        batches: list[_Batch] = []
        with contextlib.suppress(IndexError):
            while True:
                batches.append(self._enqueued.popleft())
        with contextlib.ExitStack() as stack:
            stack.push(_Running(self._thread, [reader for batch in batches for reader in batch.readers]))
            return [job.output() for job in _wait(batches, use_tqdm, _Job.output)]

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: None = None,
        use_tqdm: bool = False,
        **others: Any,
    ) -> list[BeamSearchOutput]:
        """The `params.beam_width` likeliest answers to each prompt that beam search finds, best first.

        Each step is a request for each beam, whose prompt is mostly in the prefix cache. Raises InvalidRequest naming
        the field, also where a prompt and `max_tokens` do not fit into the context.
        """
        self._thread.check()
        check_method({"lora_request": lora_request, **others})
        whole = self._prompts.read(prompts)
        read = [one.ids for one in whole]
        tokenizer, one = self._text.tokenizer, SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
        longest = replace(one, max_tokens=params.max_tokens)
        for ids in read:
            max_new_tokens(len(ids), longest, self._context)
        searches = [BeamSearch(params, tokenizer.eos) for _ in read]

        def likeliest(asked: Sequence[tuple[int, Beam, int]]) -> list[Sequence[tuple[int, float]]]:
            made = [whole[i]._replace(text=None, ids=(*read[i], *beam.tokens)) for i, beam, _ in asked]
            jobs = self._run(made, [replace(one, logprobs=count) for _, _, count in asked], use_tqdm)
            return [job.likeliest() for job in jobs]

        search(searches, likeliest)
        return [
            beam_search_output(ids, found.beams, params, tokenizer) for ids, found in zip(read, searches, strict=True)
        ]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate_prompt_tokens: int | None = None,
        prompt_name: str | None = None,
        use_tqdm: bool = True,
        **others: Any,
    ) -> list[EmbeddingRequestOutput]:
        """One vector for each prompt, in order, of the model's hidden states: their mean, or the last or first one.

        pooling, normalize: None for what the model was made for, and of a model for text the mean, of length 1.
        dimensions: how many numbers, the first ones, all if None. truncate_prompt_tokens: most tokens of a prompt,
        whose end is left out, -1 for as many as the model takes. prompt_name: of a text that the model has to stand
        before prompts. Raises InvalidRequest naming the field, also where the executor has no hidden states.
        """
        self._thread.check()
        check_method(others)
        reader = self._pooling_reader()
        reader.task("embed")
        asked = reader.texts(
            prompts,
            "embed",
            pooling=pooling,
            dimensions=dimensions,
            truncate=truncate_prompt_tokens,
            prompt_name=prompt_name,
        )
        pooler = self._text.pooler
        return [
            embedding_output(job.call, job.last, dimensions, normalize, pooler)
            for job in self._run(asked.prompts, asked.params, use_tqdm)
        ]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_activation: bool | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        **others: Any,
    ) -> list[ClassificationRequestOutput]:
        """What each class of the model's classifier gets, for each prompt. use_activation: False for its numbers before
        softmax or sigmoid. Raises InvalidRequest naming the field, also where there is no classifier."""
        self._thread.check()
        check_method(others)
        reader = self._pooling_reader()
        asked = reader.texts(prompts, reader.task("classify"), truncate=truncate_prompt_tokens)
        return [
            classification_output(job.call, job.last, self._text.pooler, use_activation)
            for job in self._run(asked.prompts, asked.params, use_tqdm)
        ]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        use_activation: bool | None = None,
        truncate_prompt_tokens: int | None = None,
        instruction: str | None = None,
        use_tqdm: bool = True,
        **others: Any,
    ) -> list[ScoringRequestOutput]:
        """How well texts go together: one text with each of several, or as many with as many.

        A classifier with one class reads both texts of a pair; of a model that embeds it is the cosine of their
        vectors. instruction: for rerankers that read one. Raises InvalidRequest naming the field.
        """
        self._thread.check()
        check_method(others)
        reader = self._pooling_reader()
        asked = reader.pairs(data_1, data_2, truncate=truncate_prompt_tokens, instruction=instruction)
        calls = [(job.call, job.last) for job in self._run(asked.prompts, asked.params, use_tqdm)]
        return scoring_outputs(calls, asked.pairs, self._text.pooler, use_activation)

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_task: str | None = None,
        use_activation: bool | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        **others: Any,
    ) -> list[PoolingRequestOutput]:
        """What a task makes of each prompt: `embed` a vector, `token_embed` one for each token, `classify` what each
        class gets; None for the model's own. Raises InvalidRequest naming the field."""
        self._thread.check()
        check_method(others)
        reader = self._pooling_reader()
        task = reader.task(pooling_task)
        asked = reader.texts(prompts, task, truncate=truncate_prompt_tokens)
        return [
            pooling_output(job.call, job.last, task, self._text.pooler, use_activation)
            for job in self._run(asked.prompts, asked.params, use_tqdm)
        ]

    def _pooling_reader(self) -> PoolingReader:
        about, pooler = self._engine.description, self._text.pooler
        return PoolingReader(
            self._text,
            self._prompts,
            limit=longest(about, pooler) - pooler.generates,
            vocab=about.vocab_size // pooler.token_types,
            pools=about.supports_pooling,
        )

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: None = None,
        chat_template: None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """One answer for each conversation, or for the only one.

        Raises InvalidRequest also when the model has no chat template, or its template refuses the messages.
        """
        self._thread.check()
        check_method({"lora_request": lora_request, "chat_template": chat_template, **others})
        check_continuation(add=add_generation_prompt, go_on=continue_final_message)
        rendering = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            "chat_template_kwargs": chat_template_kwargs,
        }
        check_list("messages", messages)
        alone = len(messages) > 0 and isinstance(messages[0], Mapping)
        several = cast("Sequence[Sequence[Message]]", [messages] if alone else messages)
        talks = [self._prompts.rendered(talk, **rendering) for talk in several]
        each = _copies(_for_each(sampling_params or self.default_sampling_params(), len(talks)))
        begun = [last_text(talk) if continue_final_message else "" for talk in several]
        bound = [
            self._prompts.bound(*one, chat_template_kwargs)
            for one in zip((talk.text or "" for talk in talks), begun, each, strict=True)
        ]
        return self._outputs(talks, bound, use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Generator[str, None, TokenTotal]:
        """The pieces of the first answer's text as they are generated. Closing the iterator ends the request.

        The generator's return value is how many tokens were generated, an int with a `finish_reason`. Raises the error
        with which the request failed, and InvalidRequest where the model has no text.
        """
        self._thread.check()
        if not self._text.tokenizer.has_text:
            raise needs_text("stream")
        return self._stream(self._prompts.encoded(prompt), self._prompts.sampling(sampling_params))

    def stream_chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> Generator[str, None, TokenTotal]:
        """As `stream`, for a conversation."""
        self._thread.check()
        talk = self._prompts.rendered(messages)
        params = self._prompts.sampling(sampling_params)
        return self._stream(talk, self._prompts.bound(talk.text or "", "", params))

    def stream_chat_parts(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> Generator[TextPart, None, TokenTotal]:
        """As `stream_chat`, with reasoning apart: each piece has a `kind`, "reasoning" or "content", and a `text`.

        The marks between them are in neither. A model that does not reason has content alone. The generator's return
        value is that of `stream`.
        """
        self._thread.check()
        talk = self._prompts.rendered(messages)
        params = self._prompts.bound(talk.text or "", "", sampling_params or self.default_sampling_params())
        splitter, params = self._prompts.splitter(talk.text or "", params)
        return self._parts(self._stream(talk, params), splitter)

    def default_sampling_params(self, **changed: Any) -> SamplingParams:
        """What the model's generation_config.json recommends, with some fields `changed`."""
        return SamplingParams(**{**self._text.defaults, **changed})

    def get_default_sampling_params(self) -> SamplingParams:
        """vLLM's name for `default_sampling_params`."""
        return self.default_sampling_params()

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._text.tokenizer

    def reset_prefix_cache(self) -> None:
        """Later prompts find nothing computed before."""
        self._thread.reset_prefix_cache()

    def close(self) -> None:
        """Free memory and device; again: no effect. Running calls of other threads raise Interrupted."""
        self._thread.close()
        self._grammars.close()
        self._trials.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---------------------------------------------------------------- running

    def _run(
        self,
        prompts: Sequence[ReadPrompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        watch: bool,
        priority: int | Sequence[int] | None = None,
        each: Callable[[_Job], object] | None = None,
    ) -> list[_Job]:
        """The jobs of prompts, all ended. each: see `_wait`."""
        batch = self._batch(prompts, params, priority)
        with _Running(self._thread, batch.readers):
            return _wait([batch], watch, each)

    def _outputs(
        self,
        prompts: Sequence[ReadPrompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        watch: bool,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """The answers to prompts, each put together when it has ended, while others run on."""
        return [job.output() for job in self._run(prompts, params, watch, priority, _Job.output)]

    def _batch(
        self,
        prompts: Sequence[ReadPrompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] | None,
    ) -> _Batch:
        each = _for_each(params or self.default_sampling_params(), len(prompts))
        urgency = self._priorities(priority, len(prompts))
        jobs = [self._job(prompt, one, urgent) for prompt, one, urgent in zip(prompts, each, urgency, strict=True)]
        ended: SimpleQueue[_Ended] = SimpleQueue()
        readers = [reader for job in jobs for reader in self._readers(job, _putting(job, ended))]
        return _Batch(jobs, readers, ended)

    def _completions(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        suffix: str | Sequence[str],
    ) -> tuple[list[ReadPrompt], list[SamplingParams]]:
        """Each prompt, and its parameters."""
        several = listed(prompts)
        ends = suffixes(suffix, len(several))
        read = [self._prompts.encoded(prompt, end) for prompt, end in zip(several, ends, strict=True)]
        each = _copies(_for_each(params or self.default_sampling_params(), len(read)))
        return read, [self._prompts.filling(one, end) for one, end in zip(each, ends, strict=True)]

    def _stream(self, prompt: ReadPrompt, params: SamplingParams) -> Generator[str, None, TokenTotal]:
        """The pieces of the first answer's text; returns how many tokens it had."""
        job = self._job(prompt, params)
        pieces: SimpleQueue[Delta | QuireError | None] = SimpleQueue()
        readers = self._readers(job, pieces.put, whole=False)
        readers[0].tell = pieces.put
        with _Running(self._thread, readers):
            finish, count = None, 0
            while finish is None:
                delta = wait_for(pieces)
                if isinstance(delta, QuireError):
                    raise delta
                if delta is None:  # another answer's end
                    continue
                count += len(delta.tokens)
                if delta.text:
                    yield delta.text
                if delta.error is not None:
                    raise errors.of(delta.status, delta.error, param=delta.param)
                finish = delta.finish_reason
        return TokenTotal(count, finish)

    @staticmethod
    def _parts(pieces: Generator[str, None, TokenTotal], splitter: Splitter) -> Generator[TextPart, None, TokenTotal]:
        with contextlib.closing(pieces):
            while True:
                try:
                    piece = next(pieces)
                except StopIteration as end:
                    yield from splitter.flush()
                    return cast(TokenTotal, end.value)
                yield from splitter.feed(piece)

    def _job(self, prompt: ReadPrompt, params: SamplingParams, priority: int = 0) -> _Job:
        text, ids, images = prompt
        name = f"llm-{next(self._names)}"
        call = Call(id=name, prompt=ids, text=text, sampling=params, priority=priority, images=images)
        return _Job(call, self._text.tokenizer)

    def _priorities(self, given: int | Sequence[int] | None, prompts: int) -> Sequence[int]:
        each = [given or 0] * prompts if given is None or isinstance(given, int) else given
        check_list("priority", each)
        if len(each) != prompts:
            raise InvalidRequest(f"there are {prompts} prompts but {len(each)} priorities", param="priority")
        for one in each:
            number("priority", one, -UNLIMITED, UNLIMITED, whole=True)
            check_priority(one, self.settings.scheduler.reads_priorities)
        return each

    def _readers(self, job: _Job, end: Callable[[QuireError | None], None], *, whole: bool = True) -> list[_Reader]:
        """One for each answer. end: called when it is complete, or with why it will never be. whole: see
        `output_processor`."""
        tokenizer, seed = self._text.tokenizer, self._seeds.getrandbits(63)
        stops = StopStrings(job.call.sampling.stop)
        asked = requests(job.call, tokenizer=tokenizer, limit=self._context, seed=seed, pooler=self._text.pooler)
        return [
            _Reader(
                job, request, self._constraint(request), output_processor(request, tokenizer, stops, whole=whole), end
            )
            for request in asked
        ]

    @property
    def _context(self) -> int:
        """The longest sequence, in tokens."""
        return longest(self._engine.description, self._text.pooler)

    def _constraint(self, request: Request) -> Constraint:
        if request.sampling.structured_outputs is None:
            return FREE
        with self._grammars_lock:
            return self._grammars.get_or_compile(request)


class _Job:
    """One call and the deltas of each of its answers."""

    def __init__(self, call: Call, tokenizer: Tokenizer) -> None:
        self.call, self._tokenizer = call, tokenizer
        self.choices: list[list[Delta]] = [[] for _ in range(call.sampling.n)]
        self.num_ended = 0
        self._output: RequestOutput | None = None

    def output(self) -> RequestOutput:
        """What its caller gets, once all answers have ended."""
        if self._output is None:
            self._output = request_output(self.call, self.choices, self._tokenizer)
        return self._output

    def likeliest(self) -> Sequence[tuple[int, float]]:
        """The likeliest (token id, log-probability) after the prompt. Raises an error that ended it."""
        last = self.choices[0][-1]
        if not last.logprobs:
            raise errors.of(last.status, last.error or "the prompt could not be computed", param=last.param)
        return last.logprobs[0].top

    @property
    def last(self) -> Delta:
        """The last delta of the only answer."""
        return self.choices[0][-1]


class _Reader:
    """Turns one request's tokens into deltas, in the engine's thread, as long as its caller waits.

    tell: what each delta is given to.
    """

    def __init__(
        self,
        job: _Job,
        request: Request,
        constraint: Constraint,
        answer: OutputProcessor,
        end: Callable[[QuireError | None], None],
    ) -> None:
        self.request, self.constraint = request, constraint
        self.tell: Callable[[Delta], None] = job.choices[request.choice].append
        self._job = weakref.ref(job)  # an interrupted caller drops it
        self._answer, self._end = answer, end

    def take(self, event: RequestStepOutput) -> FinishReason | None:
        if self._job() is None:
            return "abort"
        delta = delta_of_error(self._answer, event)
        if delta is None:
            return None
        self.tell(delta)
        if delta.finish_reason is None:
            return None
        self._end(None)
        return "stop"

    def lost(self, error: QuireError) -> None:
        self._end(error)


@dataclass(frozen=True, slots=True)
class _Batch:
    """The prompts of one call. ended: gets each answer that is complete."""

    jobs: list[_Job]
    readers: list[_Reader]
    ended: SimpleQueue[_Ended]


_Ended = tuple["weakref.ref[_Job]", QuireError | None]
"""The end of an answer: whose it is, and why it will never be complete."""


def _locked(lock: threading.Lock, work: Callable[[], None]) -> None:
    with lock:
        work()


def _putting(job: _Job, ended: SimpleQueue[_Ended]) -> Callable[[QuireError | None], None]:
    of = weakref.ref(job)  # an interrupted caller drops it
    return lambda error: ended.put((of, error))


def _wait(batches: Sequence[_Batch], watch: bool, each: Callable[[_Job], object] | None = None) -> list[_Job]:
    """The jobs of all batches when every answer is complete. watch: show progress on a terminal. each: called for each
    job that is complete, while others run."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not (watch and console.file.isatty())) as progress:
        task = progress.add_task("answers", total=sum(len(batch.readers) for batch in batches))
        for batch in batches:
            for _ in batch.readers:
                of, error = wait_for(batch.ended)
                if error is not None:
                    raise error
                progress.advance(task)
                job = of()
                if job is not None:
                    job.num_ended += 1
                    if each is not None and job.num_ended == len(job.choices):
                        each(job)
    return [job for batch in batches for job in batch.jobs]


class _Running:
    """While entered, the requests run. On exit those left are ended, and the engine becomes idle where no other
    request runs; an interrupted caller does not wait for that."""

    def __init__(self, thread: EngineThread, readers: Sequence[_Reader]) -> None:
        self._thread, self._readers = thread, readers

    def __enter__(self) -> None:
        try:
            self._thread.submit([(reader.request, reader.constraint, reader) for reader in self._readers])
        except BaseException as error:  # interrupted while it waited, perhaps
            self.__exit__(type(error))
            raise

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        wait = kind is None or issubclass(kind, Exception | GeneratorExit)
        self._thread.end([reader.request.id for reader in self._readers], wait=wait)


def _take_over_threads() -> None:
    """torch keeps a number of CPU threads for each calling thread: set the chosen one in the engine's."""
    torch.set_num_threads(torch.get_num_threads())


def _check_params(given: object) -> None:
    if not isinstance(given, Sequence) or not all(isinstance(each, SamplingParams) for each in given):
        raise InvalidRequest("sampling_params must be SamplingParams, or a list of them", param="sampling_params")


def _for_each(params: SamplingParams | Sequence[SamplingParams], prompts: int) -> Sequence[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * prompts
    _check_params(params)
    if len(params) != prompts:
        raise InvalidRequest(f"there are {prompts} prompts but {len(params)} sampling_params", param="sampling_params")
    return params


def _copies(params: Sequence[SamplingParams]) -> Sequence[SamplingParams]:
    """Copies, as a caller may change its own while requests run."""
    made = {id(one): copy(one) for one in params}
    return [made[id(one)] for one in params]
