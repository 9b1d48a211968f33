"""The offline door: the engine in the caller's process, in vLLM's shapes.

from quire import LLM, SamplingParams
LLM().generate(["Once upon a time"], SamplingParams(max_tokens=50))
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Self, cast

from rich.console import Console
from rich.progress import Progress

from quire import errors
from quire.backends import vectors
from quire.backends.answer import Answer
from quire.backends.base import Call, Delta
from quire.backends.spell import answer_to, requests
from quire.build.engine import build_engine
from quire.build.text import build_text
from quire.checks import token_ids
from quire.config import Settings
from quire.errors import InvalidRequest
from quire.grammar.llguidance import Compiler
from quire.grammar.workshop import Workshop
from quire.text.stop import StopStrings
from quire.text.tokenizer import Tokenizer
from quire.values import (
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Pooling,
    RequestOutput,
    SamplingParams,
)

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, {"prompt": text} or {"prompt_token_ids": ids}."""

Message = Mapping[str, Any]


class LLM:
    """A model in this process. Arguments are the options of docs/configuration.md, by name; or whole `settings`.

    Not for several threads at once. Raises InvalidConfig or InvalidModel.
    """

    def __init__(self, model: str = "embedded", *, settings: Settings | None = None, **options: Any) -> None:
        self.settings = Settings.of(model=model, **options) if settings is None else settings
        self._text = build_text(self.settings)
        self._engine = build_engine(self.settings)
        self._grammars = Workshop(Compiler(lambda: self._text.tokenizer))
        self._seeds = random.Random(self.settings.model.seed)
        self._names = itertools.count()
        self._open: dict[str, tuple[Answer, list[Delta]]] = {}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """One answer for each prompt, in order. `sampling_params`: for all, one for each, or the model's defaults.

        `use_tqdm` (vLLM's name) shows progress where somebody watches. Raises InvalidRequest naming the field.
        """
        return [job.output() for job in self._run(self._read(prompts), sampling_params, use_tqdm)]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling = "mean",
        dimensions: int | None = None,
        normalize: bool = True,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """One vector for each prompt, in order, of the model's hidden states: their mean, or the last one.

        dimensions: how many numbers, the first ones, all if None; `normalize`: of length 1. Raises InvalidRequest
        naming the field, also where the executor has no hidden states.
        """
        vectors.check(dimensions, pools=self._engine.about.pools)
        asked = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, pooling=pooling)
        return [
            job.embedding(dimensions, normalize=normalize) for job in self._run(self._read(prompts), asked, use_tqdm)
        ]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """One answer for each conversation, or for the only one.

        Raises InvalidRequest also when the model has no chat template, or its template refuses the messages.
        """
        if add_generation_prompt and continue_final_message:
            raise InvalidRequest(
                "continue_final_message goes on with the last message, add_generation_prompt begins another: set one",
                param="continue_final_message",
            )
        rendering = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            "chat_template_kwargs": chat_template_kwargs,
        }
        _check_list("messages", messages)
        alone = len(messages) > 0 and isinstance(messages[0], Mapping)
        several = cast("Sequence[Sequence[Message]]", [messages] if alone else messages)
        talks = [self._rendered(talk, **rendering) for talk in several]
        return [job.output() for job in self._run(talks, sampling_params, use_tqdm)]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Generator[str, None, None]:
        """The pieces of the first answer's text as they come. Closing the iterator ends the request.

        Raises what became of it where it failed.
        """
        return self._stream(*self._encoded(prompt), sampling_params or self.default_sampling_params())

    def stream_chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> Generator[str, None, None]:
        """As `stream`, for a conversation."""
        return self._stream(*self._rendered(messages), sampling_params or self.default_sampling_params())

    def default_sampling_params(self, **changed: Any) -> SamplingParams:
        """What the model's generation_config.json recommends, with some fields `changed`."""
        return SamplingParams(**{**self._text.defaults, **changed})

    def get_tokenizer(self) -> Tokenizer:
        return self._text.tokenizer

    def reset_prefix_cache(self) -> None:
        """Prompts from now on find nothing computed before."""
        self._engine.reset_prefix_cache()

    def close(self) -> None:
        """Give memory and device back."""
        self._engine.close()
        self._grammars.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---------------------------------------------------------------- prompts

    def _read(self, prompts: Prompt | Sequence[Prompt]) -> list[tuple[str | None, tuple[int, ...]]]:
        _check_prompt("prompts", prompts)
        alone = isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], int))
        several = cast("Sequence[Prompt]", [prompts] if alone else prompts)
        return [self._encoded(prompt) for prompt in several]

    def _encoded(self, prompt: Prompt) -> tuple[str | None, tuple[int, ...]]:
        if isinstance(prompt, Mapping):
            known = {"prompt", "prompt_token_ids"} & set(prompt)
            if not known or len(prompt) > len(known):
                raise InvalidRequest(
                    f"a prompt has 'prompt' or 'prompt_token_ids' and nothing else, not {sorted(prompt)}",
                    param="prompts",
                )
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            _check_prompt("a prompt", text or "")
            return text, self._text.tokenizer.encode(text or "") if ids is None else token_ids("prompt_token_ids", ids)
        if isinstance(prompt, str):
            return prompt, self._text.tokenizer.encode(prompt)
        _check_prompt("a prompt", prompt)
        return None, token_ids("prompts", prompt)

    def _rendered(self, messages: Sequence[Message], **rendering: Any) -> tuple[str, tuple[int, ...]]:
        if self._text.template is None:
            raise InvalidRequest("this model has no chat template: give one with chat_template=", param="messages")
        _check_mappings("messages", messages, "role", str)
        _check_mappings("tools", rendering.get("tools") or (), "function", Mapping)
        text = self._text.template.render(messages, **rendering)
        return text, self._text.tokenizer.encode(text, add_special_tokens=False)

    # ---------------------------------------------------------------- running

    def _run(
        self,
        prompts: Sequence[tuple[str | None, tuple[int, ...]]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        watch: bool,
    ) -> list[_Job]:
        each = _for_each(params or self.default_sampling_params(), len(prompts))
        jobs: list[_Job] = []
        try:
            for (text, ids), one in zip(prompts, each, strict=True):
                jobs.append(_Job(Call(id=f"llm-{next(self._names)}", prompt=ids, text=text, sampling=one)))
                self._submit(jobs[-1])
            console = Console(stderr=True)
            with Progress(console=console, transient=True, disable=not (watch and console.is_terminal)) as progress:
                going = {name for job in jobs for name in job.names}
                task = progress.add_task("answers", total=len(going))
                while going:
                    ended = self._pump()
                    going.difference_update(ended)
                    progress.advance(task, len(ended))
        finally:
            self._forget(jobs)
        return jobs

    def _stream(self, text: str | None, ids: tuple[int, ...], params: SamplingParams) -> Generator[str, None, None]:
        job = _Job(Call(id=f"llm-{next(self._names)}", prompt=ids, text=text, sampling=params))
        try:
            self._submit(job)
            told = 0
            while job.names[0] in self._open or told < len(job.choices[0]):
                if told == len(job.choices[0]):
                    self._pump()
                fresh = job.choices[0][told:]
                told += len(fresh)
                yield from (delta.text for delta in fresh if delta.text)
                if fresh[-1].error is not None:
                    raise errors.of(fresh[-1].status, fresh[-1].error, param=fresh[-1].param)
        finally:
            self._forget([job])

    def _submit(self, job: _Job) -> None:
        about, tokenizer, seed = self._engine.about, self._text.tokenizer, self._seeds.getrandbits(63)
        limit = min(about.max_model_len, about.pages * about.page_size)
        stops = StopStrings(job.call.sampling.stop)
        asked = requests(job.call, tokenizer=tokenizer, limit=limit, seed=seed)
        for request, deltas in zip(asked, job.choices, strict=True):
            self._engine.add(request, self._grammars.now(request))
            self._open[request.id] = (answer_to(request, tokenizer, stops), deltas)
            job.names.append(request.id)

    def _pump(self) -> list[str]:
        """One step of the engine; what it brought goes to whom it belongs. The answers that ended, by name."""
        ended = []
        for event in self._engine.step():
            if event.id not in self._open:
                continue
            answer, deltas = self._open[event.id]
            delta = answer.take(event)
            if delta is not None:
                deltas.append(delta)
            if delta is not None and delta.finish_reason is not None:
                del self._open[event.id]
                ended.append(event.id)
                if event.finish is None:  # a stop string: only the rim knows
                    self._engine.abort(event.id, "stop")
        return ended

    def _forget(self, jobs: Sequence[_Job]) -> None:
        """End what still runs, and let the engine come to rest when nothing else is asked of it."""
        for name in [name for job in jobs for name in job.names]:
            if self._open.pop(name, None) is not None:
                self._engine.abort(name)
        while self._engine.has_pending_work and not self._open:
            self._engine.step()


class _Job:
    """One call and what came of it: the deltas of each answer, and the engine's names for those it took."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.choices: list[list[Delta]] = [[] for _ in range(call.sampling.n)]
        self.names: list[str] = []

    def output(self) -> RequestOutput:
        first = self.choices[0]
        return RequestOutput(
            request_id=self.call.id,
            prompt=self.call.text,
            prompt_token_ids=self.call.prompt,
            outputs=tuple(self._completion(index, deltas) for index, deltas in enumerate(self.choices)),
            finished=True,
            prompt_logprobs=next((told for delta in first if (told := delta.prompt_logprobs)), None),
            num_cached_tokens=max(delta.cached for delta in first),
        )

    def embedding(self, dimensions: int | None, *, normalize: bool) -> EmbeddingRequestOutput:
        """Raises InvalidRequest for a prompt that could not be computed, and for dimensions there are not."""
        last = self.choices[0][-1]
        if not last.pooled:
            raise InvalidRequest(last.error or "the prompt came to no vector", param="prompts")
        numbers = vectors.vector(last.pooled, dimensions, normalize=normalize)
        outputs = EmbeddingOutput(tuple(numbers.tolist()))
        return EmbeddingRequestOutput(self.call.id, self.call.prompt, outputs, num_cached_tokens=last.cached)

    def _completion(self, index: int, deltas: Sequence[Delta]) -> CompletionOutput:
        wanted = self.call.sampling.logprobs is not None
        logprobs = tuple(one for delta in deltas for one in delta.logprobs)
        return CompletionOutput(
            index=index,
            text="".join(delta.text for delta in deltas),
            token_ids=tuple(token for delta in deltas for token in delta.tokens),
            cumulative_logprob=sum(one.logprob for one in logprobs) if wanted else None,
            logprobs=logprobs if wanted else None,
            finish_reason=deltas[-1].finish_reason,
            stop_reason=deltas[-1].error or deltas[-1].stop_reason,
        )


def _check_prompt(what: str, given: object) -> None:
    if not isinstance(given, Sequence | Mapping) or isinstance(given, bytes):
        kinds = "text, token ids, {'prompt': text}, {'prompt_token_ids': ids}, or a list of these"
        raise InvalidRequest(f"{what} must be {kinds}, not {type(given).__name__}", param="prompts")


def _check_list(name: str, given: object) -> Sequence[object]:
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise InvalidRequest(f"{name} must be a list, not {given!r}"[:200], param=name)
    return given


def _check_mappings(name: str, given: object, key: str, kind: type) -> None:
    for i, one in enumerate(_check_list(name, given)):
        if not isinstance(one, Mapping) or not isinstance(one.get(key), kind):
            raise InvalidRequest(f"{name}[{i}] must be a mapping with a {key}, not {one!r}"[:200], param=name)


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
