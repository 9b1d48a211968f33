"""The engine for asyncio programs, with vLLM's interface: in a process of its own, driven as a server drives it.

from quire import AsyncLLM, SamplingParams
async with AsyncLLM() as llm:
    async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=50), "first"):
        print(output.outputs[0].text)
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Never, Self, cast

from quire.assembly.backend import build_backend, engine_process
from quire.assembly.images import build_images, fetch_now
from quire.assembly.place import located
from quire.assembly.pooled import PooledPrompts, PoolingReader
from quire.assembly.prompts import (
    Message,
    Prompt,
    PromptReader,
    ReadPrompt,
    check_continuation,
    last_text,
    suffixes,
)
from quire.assembly.text import build_text
from quire.checks import number
from quire.config import Settings
from quire.config.vllm import EngineArgs, check_method, missing, options_of
from quire.errors import Closed, Interrupted, InvalidRequest, QuireError
from quire.frontend.interface import Call, Delta, iterate
from quire.frontend.offload import offload
from quire.frontend.outputs import (
    classification_output,
    embedding_output,
    merge,
    pooling_output,
    request_output,
    scoring_outputs,
)
from quire.frontend.processor import ActiveRequest, check_priority
from quire.observability.observer import FrontendObserver
from quire.tokenization.tokenizer import Tokenizer
from quire.types import (
    UNLIMITED,
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    FinishedRequest,
    Pooling,
    PoolingRequestOutput,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    ScoringRequestOutput,
)

_MAX_NUM_SEQS = 256
"""Answers that are taken to run beside those that wait, where `max_num_seqs` is auto."""

_BYTES_PER_TOKEN = 4
"""About what a token id costs to read, in bytes of text."""

_Encoded = tuple[ReadPrompt, SamplingParams]


@dataclass(slots=True, eq=False)
class _Running:
    """A request from its first step to its end. live: None while it waits and while its prompt is being encoded."""

    live: ActiveRequest | None = None
    aborted: bool = False


class _Admission(FrontendObserver):
    """Lets at most so many answers into the engine at once, in the order of arrival; others wait outside, unencoded.

    A call of more answers than that is let in alone. Observing the backend, it learns which answers have ended.
    """

    def __init__(self, most: int) -> None:
        self._most = self._free = most
        self._waiting: dict[_Running, tuple[int, asyncio.Future[None]]] = {}

    async def enter(self, running: _Running, answers: int) -> None:
        """Return when `answers` may run."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[running] = answers, turn
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if self._waiting.pop(running, None) is None:
                self._free += answers
            self._admit()
            raise

    def skip(self, running: _Running) -> None:
        """Let this call in now, if it waits: it is about to end."""
        if running in self._waiting:
            self._let_in(running)

    def leave(self, answers: int) -> None:
        """So many answers have ended, or will not run."""
        self._free += answers
        self._admit()

    def on_end(self, ended: FinishedRequest) -> None:
        """See FrontendObserver."""
        self.leave(1)

    def _admit(self) -> None:
        while self._waiting:
            running, (answers, _) = next(iter(self._waiting.items()))
            if self._free < min(answers, self._most):
                return
            self._let_in(running)

    def _let_in(self, running: _Running) -> None:
        answers, turn = self._waiting.pop(running)
        self._free -= answers
        if not turn.cancelled():
            turn.set_result(None)


class AsyncLLM:
    """A model for the tasks of one event loop. Arguments are those of `LLM`.

    Any number of tasks may call it at once; their requests run in the same steps. Up to `max_num_queued_reqs` wait in
    the engine, further ones in their tasks, in the order in which they came. It starts with the first request, or
    with `async with` or `start`. Constructing it raises InvalidConfig or InvalidModel, and blocks while text files are
    read. Methods raise Closed after `close` and in another event loop.
    """

    def __init__(self, model: str = "embedded", *, settings: Settings | None = None, **options: Any) -> None:
        self.settings = located(Settings.of(model=model, **options_of(options)) if settings is None else settings)
        self._text = build_text(self.settings)
        self._prompts = PromptReader(self._text, build_images(self.settings), fetch_now(self.settings))
        seeds = random.Random(self.settings.model.fixed_seed)
        scheduler = self.settings.scheduler
        self._admission = _Admission((scheduler.max_num_seqs or _MAX_NUM_SEQS) + scheduler.max_num_queued_reqs)
        self._backend = build_backend(
            self.settings,
            self._text,
            engine_process(self.settings),
            max_queued=UNLIMITED,
            max_unread=UNLIMITED,
            observer=self._admission,
            seeds=lambda: seeds.getrandbits(63),
        )
        self._numbers = itertools.count()
        self._running: dict[str, _Running] = {}
        """By request_id."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    if not TYPE_CHECKING:  # or type checkers would find every name

        def __getattr__(self, name: str) -> Never:
            raise missing(self, name)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """An AsyncLLM of arguments that were made before. Raises as the constructor does."""
        return cls(**engine_args.given())

    # ---------------------------------------------------------------- life

    async def start(self) -> None:
        """Return when requests are accepted. Raises InvalidModel, InvalidConfig or Unavailable."""
        self._check()
        if self._starting is None:
            self._loop = asyncio.get_running_loop()
            self._starting = self._loop.create_task(self._backend.start())
        await asyncio.shield(self._starting)
        self._check()

    async def close(self) -> None:
        """End the engine's process; again: no effect. Running calls raise Interrupted."""
        await asyncio.shield(self._begin_closing())

    def shutdown(self) -> None:
        """As `close`, without waiting for it (vLLM's name). Call it in the event loop."""
        self._begin_closing()

    def _begin_closing(self) -> asyncio.Task[None]:
        self._check_loop()
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        return self._closing

    async def _close(self) -> None:
        if self._starting is not None:
            with contextlib.suppress(QuireError):  # who waits for the start gets it
                await self._starting
        await self._backend.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _check(self) -> None:
        """Raises Closed if no call can be made any more."""
        if self._closing is not None:
            raise Closed("this AsyncLLM is closed: create another")
        self._check_loop()

    def _check_loop(self) -> None:
        if self._loop not in (None, asyncio.get_running_loop()):
            raise Closed("this AsyncLLM was started in another event loop: create one in this loop")

    # ---------------------------------------------------------------- requests

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        suffix: str = "",
        **others: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs for one prompt as its tokens are generated; the last is `finished`.

        Tokens that are ready together come in one output. Closing the generator, or cancelling the task that reads it,
        ends the request. sampling_params: the model's defaults if None. request_id: unique among running requests, for
        `abort`; drawn if None. priority, suffix: as for `LLM.generate`. others: vLLM's arguments that change nothing.

        Iteration raises InvalidRequest naming the field, Interrupted where the engine's process ends, Unavailable while
        it starts again, and StepFailed where this request cannot be computed.
        """

        def encode(params: SamplingParams) -> _Encoded:
            [end] = suffixes(suffix, 1)
            return self._prompts.encoded(prompt, end), self._prompts.filling(params, end)

        size = _size(prompt) + _size(suffix)
        return self._stream(size, encode, sampling_params, request_id, priority, others)

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """As `generate`, for a conversation. Further arguments are those of `LLM.chat`.

        Iteration raises InvalidRequest also where the model has no chat template, or its template refuses the messages.
        """

        def encode(params: SamplingParams) -> _Encoded:
            check_continuation(add=add_generation_prompt, go_on=continue_final_message)
            talk = self._prompts.rendered(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
            )
            begun = last_text(messages) if continue_final_message else ""
            return talk, self._prompts.bound(talk.text or "", begun, params, chat_template_kwargs)

        return self._stream(UNLIMITED, encode, sampling_params, request_id, priority, others)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End these requests: their last output has what was generated, and the finish_reason 'abort'.

        Ids that do not run are ignored.
        """
        self._check()
        for id in [request_id] if isinstance(request_id, str) else list(request_id):
            running = self._running.get(id, _Running())
            running.aborted = True
            self._admission.skip(running)
            if running.live is not None:
                self._backend.end(running.live, "abort")

    async def embed(
        self,
        prompt: Prompt,
        request_id: str | None = None,
        *,
        pooling: Pooling | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate_prompt_tokens: int | None = None,
        prompt_name: str | None = None,
        priority: int = 0,
        **others: Any,
    ) -> EmbeddingRequestOutput:
        """The vector of one prompt. Arguments are those of `LLM.embed`; request_id and priority as for `generate`.

        Raises InvalidRequest naming the field, also where the executor has no hidden states.
        """
        await self.start()
        reader = self._pooling_reader()
        reader.task("embed")

        def read() -> PooledPrompts:
            return reader.texts(
                prompt,
                "embed",
                pooling=pooling,
                dimensions=dimensions,
                truncate=truncate_prompt_tokens,
                prompt_name=prompt_name,
            )

        [(call, last)] = await self._pooled(_size(prompt), read, request_id, priority, others)
        return embedding_output(call, last, dimensions, normalize, self._text.pooler)

    async def classify(
        self,
        prompt: Prompt,
        request_id: str | None = None,
        *,
        use_activation: bool | None = None,
        truncate_prompt_tokens: int | None = None,
        priority: int = 0,
        **others: Any,
    ) -> ClassificationRequestOutput:
        """What each class gets, for one prompt. Arguments are those of `LLM.classify`."""
        await self.start()
        reader = self._pooling_reader()
        reader.task("classify")

        def read() -> PooledPrompts:
            return reader.texts(prompt, "classify", truncate=truncate_prompt_tokens)

        [(call, last)] = await self._pooled(_size(prompt), read, request_id, priority, others)
        return classification_output(call, last, self._text.pooler, use_activation)

    async def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        request_id: str | None = None,
        *,
        use_activation: bool | None = None,
        truncate_prompt_tokens: int | None = None,
        instruction: str | None = None,
        priority: int = 0,
        **others: Any,
    ) -> list[ScoringRequestOutput]:
        """How well texts go together. Arguments are those of `LLM.score`."""
        await self.start()
        reader = self._pooling_reader()

        def read() -> PooledPrompts:
            return reader.pairs(data_1, data_2, truncate=truncate_prompt_tokens, instruction=instruction)

        size = sum(len(text) for side in (data_1, data_2) for text in side)
        made = await self._pooled(size, read, request_id, priority, others)
        pairs = 1 if isinstance(data_2, str) else len(data_2)
        return scoring_outputs(made, pairs, self._text.pooler, use_activation)

    async def encode(
        self,
        prompt: Prompt,
        request_id: str | None = None,
        *,
        pooling_task: str | None = None,
        use_activation: bool | None = None,
        truncate_prompt_tokens: int | None = None,
        priority: int = 0,
        **others: Any,
    ) -> PoolingRequestOutput:
        """What a task makes of one prompt. Arguments are those of `LLM.encode`."""
        await self.start()
        reader = self._pooling_reader()
        task = reader.task(pooling_task)

        def read() -> PooledPrompts:
            return reader.texts(prompt, task, truncate=truncate_prompt_tokens)

        [(call, last)] = await self._pooled(_size(prompt), read, request_id, priority, others)
        return pooling_output(call, last, task, self._text.pooler, use_activation)

    def _pooling_reader(self) -> PoolingReader:
        """Once the engine is started."""
        card = self._backend.card
        limit = card.max_model_len - card.pooler.generates
        return PoolingReader(self._text, self._prompts, limit=limit, vocab=card.vocab_size, pools=card.pools)

    async def _pooled(
        self,
        size: int,
        read: Callable[[], PooledPrompts],
        request_id: str | None,
        priority: int,
        others: dict[str, Any],
    ) -> list[tuple[Call, Delta]]:
        """Each call of what was read, and its last delta. A request of several calls has one id for each."""
        asked = await offload(size, read)

        async def one(index: int, prompt: ReadPrompt) -> tuple[Call, Delta]:
            id = request_id if request_id is None or not index else f"{request_id}-{index}"
            answering = self._answering(0, lambda params: (prompt, params), asked.params, id, priority, others)
            async with answering as (call, live):
                found = [delta async for deltas in iterate(live) for delta in deltas]
                if found[-1].finish_reason == "abort":
                    raise Interrupted("the request was aborted")
                return call, found[-1]

        calls = [asyncio.ensure_future(one(*each)) for each in enumerate(asked.prompts)]
        try:
            return list(await asyncio.gather(*calls))
        finally:
            # Where one fails, the others end before the caller may use their ids again.
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    async def _stream(
        self,
        size: int,
        encode: Callable[[SamplingParams], _Encoded],
        params: SamplingParams | None,
        request_id: str | None,
        priority: int,
        others: dict[str, Any],
    ) -> AsyncGenerator[RequestOutput, None]:
        """See `_answering`."""
        async with (
            self._answering(size, encode, params, request_id, priority, others) as (call, live),
            contextlib.aclosing(_outputs(call, live, self._text.tokenizer)) as outputs,
        ):
            async for output in outputs:
                self._check_closed(output)
                yield output

    @contextlib.asynccontextmanager
    async def _answering(
        self,
        size: int,
        encode: Callable[[SamplingParams], _Encoded],
        params: SamplingParams | None,
        request_id: str | None,
        priority: int,
        others: dict[str, Any],
    ) -> AsyncGenerator[tuple[Call, ActiveRequest], None]:
        """A request that runs while entered. size: of the prompt, in bytes. encode: makes a call's text, token ids and
        parameters."""
        count = next(self._numbers)
        id = f"async-{count}" if request_id is None else request_id
        self._check_arguments(id, params, priority, others)
        sampling = self._prompts.sampling(params)
        self._running[id] = running = _Running()
        try:
            await self.start()
            await self._admission.enter(running, sampling.n)
            try:
                self._check()
                (text, ids, images), bound = await offload(size, lambda: encode(sampling))
                self._check()
                # Outputs of an earlier request with this id may still be on their way.
                name = f"{id}-{count}"
                call = Call(id=name, prompt=ids, text=text, sampling=bound, priority=priority, images=images)
                live = self._backend.answer(call)
            except BaseException:
                self._admission.leave(sampling.n)
                raise
            with contextlib.closing(live) as running.live:
                if running.aborted:
                    self._backend.end(live, "abort")
                yield replace(call, id=id), live
        finally:
            del self._running[id]

    def _check_closed(self, output: RequestOutput) -> None:
        """Raises Interrupted for an output that was cut short by `close`."""
        if self._closing is not None and any(one.finish_reason == "abort" for one in output.outputs):
            raise Interrupted("this AsyncLLM was closed while the request was running")

    def _check_arguments(self, id: object, params: object, priority: object, others: dict[str, Any]) -> None:
        """Raise InvalidRequest naming the argument."""
        check_method(others)
        if not isinstance(id, str) or not id:
            raise InvalidRequest(f"request_id must be a non-empty string, not {id!r:.80}", param="request_id")
        if id in self._running:
            raise InvalidRequest(f"request_id {id!r:.80} is running: give each request its own", param="request_id")
        if not isinstance(params, SamplingParams | None):
            raise InvalidRequest("sampling_params must be SamplingParams", param="sampling_params")
        number("priority", priority, -UNLIMITED, UNLIMITED, whole=True)
        check_priority(cast(int, priority), self.settings.scheduler.reads_priorities)

    # ---------------------------------------------------------------- the model

    def default_sampling_params(self, **changed: Any) -> SamplingParams:
        """What the model's generation_config.json recommends, with some fields `changed`."""
        return SamplingParams(**{**self._text.defaults, **changed})

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._text.tokenizer

    async def reset_prefix_cache(self) -> None:
        """Later prompts find nothing computed before."""
        await self.start()
        self._backend.reset_prefix_cache()


async def _outputs(call: Call, live: ActiveRequest, tokenizer: Tokenizer) -> AsyncGenerator[RequestOutput, None]:
    """What the deltas of a call come to, as its `output_kind` says. Raises what ends the stream."""
    kind = call.sampling.output_kind
    so_far = [Delta(index, "") for index in range(call.sampling.n)]
    finished = False
    async for deltas in iterate(live):
        changed = {delta.index: Delta(delta.index, "") for delta in deltas}
        for delta in deltas:
            changed[delta.index] = merge(changed[delta.index], delta)
            so_far[delta.index] = merge(so_far[delta.index], delta)
        finished = all(one.finish_reason is not None for one in so_far)
        if kind is RequestOutputKind.DELTA:
            output = request_output(call, [[changed[index]] for index in sorted(changed)], tokenizer)
            yield replace(output, finished=finished)
        elif kind is RequestOutputKind.CUMULATIVE or finished:
            yield request_output(call, [[one] for one in so_far], tokenizer)


def _size(prompt: Prompt) -> int:
    """About how much work it is to encode a prompt, in bytes of text."""
    if isinstance(prompt, str):
        return len(prompt)
    return _BYTES_PER_TOKEN * len(prompt) if isinstance(prompt, Sequence) else UNLIMITED
