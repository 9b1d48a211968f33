"""Ollama's chat, generate and embed: requests as those of OpenAI, and answers in its format, whole and as lines."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from quire.errors import InvalidRequest
from quire.frontend.interface import Backend, Delta, ModelCard
from quire.frontend.offload import PER_SCORE, PER_TOKEN
from quire.frontend.processor import embedding_vector
from quire.multimodal.inputs import ImagePart
from quire.server import calls, error_responses
from quire.server.calls import Job
from quire.server.embeddings import Embedding, EmbeddingsRequest
from quire.server.embeddings import embed as embed_inputs
from quire.server.fields import Refusal, check, require_text
from quire.server.limits import Limits
from quire.server.outputs import ChoiceBuilder, Usage, bare_details, chat_logprobs_of
from quire.server.prompts import in_vocabulary, model
from quire.server.schemas import (
    ChatRequest,
    CompletionRequest,
    JsonSchema,
    ResponseFormat,
    Sampling,
    converted,
    shared_fields,
)
from quire.server.stream import Chunks
from quire.types import NUMERIC_PARAMETERS


class OllamaRequest(Sampling, kw_only=True):
    """Fields of Ollama's endpoints that generate."""

    options: dict[str, Any] | None = None
    format: str | dict[str, Any] | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    stream: bool | None = None


class OllamaChatRequest(OllamaRequest, kw_only=True):
    """`POST /api/chat`."""

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    """`POST /api/generate`."""

    prompt: str = ""
    suffix: str = ""
    system: str = ""
    context: list[int] | None = None
    images: list[str] | None = None
    raw: bool | None = None


class OllamaEmbedRequest(Embedding, kw_only=True):
    """`POST /api/embed`."""

    input: str | list[str] | None = None
    truncate: bool | None = None
    options: dict[str, Any] | None = None


class OllamaEmbeddingsRequest(Embedding, kw_only=True):
    """`POST /api/embeddings`, the older form: one text, and a vector that is not normalized."""

    prompt: str = ""
    options: dict[str, Any] | None = None


# ---------------------------------------------------------------- options


# Options that have another name as a field of a chat request.
_OTHER_NAMES: Mapping[str, str] = {"repeat_penalty": "repetition_penalty", "num_predict": "max_tokens"}

_OLLAMAS: Mapping[str, str] = {theirs: name for name, theirs in _OTHER_NAMES.items()}

if TYPE_CHECKING:
    _NumericOptions = msgspec.Struct
else:
    # Declared once, in SamplingParams.
    _NumericOptions = msgspec.defstruct(
        "_NumericOptions",
        [
            (_OLLAMAS.get(each.name, each.name), f"{each.annotation} | None", None)
            for each in NUMERIC_PARAMETERS
            if each.in_requests
        ],
        kw_only=True,
    )


class Options(_NumericOptions, kw_only=True):
    """The `options` that are honoured, the numbers of SamplingParams first."""

    num_predict: int | None = None
    stop: str | list[str] | None = None


_LOADING = "how the model is loaded is set when the server is started"

OPTION_HINTS: Mapping[str, str] = {
    "num_ctx": "the context is that of --max-model-len; a prompt that does not fit is refused, never cut",
    **dict.fromkeys(("num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram"), _LOADING),
    **dict.fromkeys(("f16_kv", "use_mmap", "use_mlock", "vocab_only", "logits_all", "embedding_only"), _LOADING),
    "num_keep": "prompts are never cut",
    "mirostat_tau": "a number of mirostat, which is off",
    "mirostat_eta": "a number of mirostat, which is off",
}
"""Options without effect."""

REFUSED_OPTIONS: Mapping[str, Refusal] = {
    "mirostat": Refusal("mirostat is not supported: use temperature or top_p", (0,)),
    "tfs_z": Refusal("tail-free sampling is not supported: use top_p", (1, 1.0)),
    "typical_p": Refusal("typical sampling is not supported: use top_p", (1, 1.0)),
    "penalize_newline": Refusal("penalties count all tokens", (True,)),
}
"""Options that would change an answer."""

# From a chat request's names of fields to those of Ollama.
FIELD_NAMES: Mapping[str, str] = {
    **{name: f"options.{name}" for name in Options.__struct_fields__ if name not in _OTHER_NAMES},
    **{theirs: f"options.{name}" for name, theirs in _OTHER_NAMES.items()},
    "response_format": "format",
    "reasoning_effort": "think",
}


def read_options(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """`options` as fields of a chat request. Raises InvalidRequest naming one that is wrong or not supported."""
    kept = check(given or {}, Options.__struct_fields__, where="options.", no_ops=OPTION_HINTS, refused=REFUSED_OPTIONS)
    options = converted(kept, Options, "options.")
    chosen = {name: value for name, value in msgspec.structs.asdict(options).items() if value is not None}
    if options.num_predict is not None and not (options.num_predict > 0 or options.num_predict in (-1, -2)):
        raise InvalidRequest(
            "options.num_predict must be above 0, or -1 for as many tokens as the context holds",
            param="options.num_predict",
        )
    # -1: any seed; -1 and -2: as many tokens as there is space for.
    unset = {"seed": (-1,), "num_predict": (-1, -2)}
    return {_OTHER_NAMES.get(name, name): value for name, value in chosen.items() if value not in unset.get(name, ())}


def _shared(request: OllamaRequest) -> dict[str, Any]:
    """Fields of a chat request. Raises InvalidRequest naming the field."""
    options = read_options(request.options)
    for name in options:
        if getattr(request, name, None) is not None:
            where = FIELD_NAMES[name]
            raise InvalidRequest(f"{name} and {where} are the same: send one", param=where)
    shared = shared_fields(request) | options
    if (wanted := _format(request.format)) is not None:
        if request.response_format is not None:
            raise InvalidRequest("format and response_format are the same: send one", param="format")
        shared["response_format"] = wanted
    return {**shared, "stream": request.stream is not False}


def _format(given: str | dict[str, Any] | None) -> ResponseFormat | None:
    if given is None or given == "":
        return None
    if given == "json":
        return ResponseFormat(type="json_object")
    if isinstance(given, str):
        raise InvalidRequest(f"format must be 'json' or a JSON schema, not {given[:40]!r}", param="format")
    return ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=given))


def _think(request: OllamaRequest, card: ModelCard) -> dict[str, Any]:
    """Fields of a chat request for `think`. Raises InvalidRequest where the model cannot."""
    think = request.think
    if think is None or think == "":
        return {}
    if card.reasoning_parser == "none":
        if think is False:
            return {}
        raise InvalidRequest(f"think: {card.id} does not support thinking: send false, or leave it out", param="think")
    if isinstance(think, str):
        return {"reasoning_effort": think}
    return {"thinking": {"type": "enabled" if think else "disabled"}}


# ---------------------------------------------------------------- requests


def chat(request: OllamaChatRequest, backend: Backend, limits: Limits) -> Job:
    """The job of `/api/chat`; without messages it generates nothing. Raises InvalidRequest naming the field."""
    card = model(request.model, backend)
    if not request.messages:
        return _loaded(request, backend)
    fields = _shared(request) | _think(request, card)
    messages = _messages(request.messages)
    continues = messages[-1]["role"] == "assistant"
    made = ChatRequest(**fields | {"messages": messages, "continue_final_message": continues, "tools": request.tools})
    return calls.chat(made, backend, limits, "chat-")


def generate(request: OllamaGenerateRequest, backend: Backend, limits: Limits) -> Job:
    """The job of `/api/generate`; without a prompt it generates nothing. Raises InvalidRequest naming the field."""
    card = model(request.model, backend)
    if not request.prompt and not request.suffix:
        return _loaded(request, backend)
    fields = _shared(request)
    if request.raw or request.suffix:
        _check_raw(request)
        return calls.completion(_as_completion(request, fields), backend, limits, None)
    context = request.context or []
    in_vocabulary(context, "context", card)
    limits.images.check_context(context)
    messages: list[dict[str, Any]] = [{"role": "system", "content": request.system}] if request.system else []
    messages.append({"role": "user", "content": _with_images(request.prompt, request.images, "images")})
    made = ChatRequest(**fields | _think(request, card) | {"messages": messages})
    return calls.chat(made, backend, limits, "gen-", tuple(context))


def _check_raw(request: OllamaGenerateRequest) -> None:
    """Raises InvalidRequest naming a field that a prompt without a template cannot have."""
    why = "raw" if request.raw else "suffix"
    for name in ("system", "context", "think", "images"):
        if getattr(request, name):
            raise InvalidRequest(f"{name} goes through the template, which {why} leaves out", param=name)


def _as_completion(request: OllamaGenerateRequest, fields: Mapping[str, Any]) -> CompletionRequest:
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    kept = {name: value for name, value in fields.items() if name in CompletionRequest.__struct_fields__}
    scores = (request.top_logprobs or 0) if request.logprobs else None
    return CompletionRequest(**kept | {"prompt": request.prompt, "suffix": request.suffix, "logprobs": scores})


def _loaded(request: OllamaRequest | OllamaEmbedRequest, backend: Backend) -> Job:
    """A job without calls: the model is loaded, which is all that an empty request asks for."""
    stream = isinstance(request, OllamaRequest) and request.stream is not False
    return Job(
        id=f"load-{uuid.uuid4().hex}", model=backend.model().id, calls=[], token_text=backend.token_text, stream=stream
    )


_MESSAGE = ("role", "content", "thinking", "tool_calls", "tool_name", "tool_call_id", "images")
_CALL = ("id", "type", "index", "function")
_FUNCTION = ("name", "arguments", "index", "description")


def _messages(given: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages of a chat request. Results of tools get the ids of their calls, which Ollama's need not have."""
    messages = []
    # (id, name) of calls without a result.
    open_calls: list[tuple[str, str]] = []
    for i, message in enumerate(given):
        where = f"messages[{i}]"
        made = {"content": "", **check(message, _MESSAGE, where=f"{where}.")}
        if not isinstance(made["content"], str):
            raise InvalidRequest(f"{where}.content must be text", param="messages")
        if (thoughts := made.pop("thinking", None)) is not None:
            made["reasoning_content"] = thoughts
        if (images := made.pop("images", None)) is not None:
            made["content"] = _with_images(made["content"], images, f"{where}.images")
        named = made.pop("tool_name", None)
        if made.get("tool_calls"):
            made["tool_calls"] = _tool_calls(made["tool_calls"], where)
            open_calls = [(call["id"], call["function"]["name"]) for call in made["tool_calls"]]
        if made.get("role") == "tool":
            made |= _result_of(open_calls, made.get("tool_call_id"), named)
        messages.append(made)
    if not isinstance(messages[-1].get("role"), str):
        raise InvalidRequest(f"messages[{len(messages) - 1}].role is required", param="messages")
    return messages


def _with_images(text: str, images: Any, where: str) -> str | list[dict[str, Any]]:
    """Content of a message with images before its text, as Ollama shows them: base64 without a type."""
    if images is None or images == []:
        return text
    if not isinstance(images, list) or not all(isinstance(one, str) for one in images):
        raise InvalidRequest(f"{where} must be a list of images in base64", param=where.partition("[")[0])
    parts = [ImagePart(f"data:image/unknown;base64,{one}", f"{where}[{i}]") for i, one in enumerate(images)]
    return [*parts, {"type": "text", "text": text}]


def _tool_calls(calls_: Any, where: str) -> list[dict[str, Any]]:
    """Calls of an assistant, each with an id: nine characters, which every family's template takes."""
    if not isinstance(calls_, list):
        raise InvalidRequest(f"{where}.tool_calls must be a list of calls", param="messages")
    made = []
    for i, call in enumerate(calls_):
        at = f"{where}.tool_calls[{i}]"
        if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
            raise InvalidRequest(f"{at} needs a function with a name", param="messages")
        kept = check(call, _CALL, where=f"{at}.")
        function = check(call["function"], _FUNCTION, where=f"{at}.function.")
        name = require_text(function, "name", f"{at}.function")
        shown = {"name": name, "arguments": function.get("arguments") or {}}
        id = kept.get("id")
        made.append({"id": id if isinstance(id, str) and id else f"call{i:05}", "type": "function", "function": shown})
    return made


def _result_of(open_calls: list[tuple[str, str]], id: Any, name: Any) -> dict[str, Any]:
    """The fields of a result that say which call it belongs to: by its id, by its name, or the first that is open."""
    matching = [call for call in open_calls if id in (None, call[0]) and name in (None, call[1])]
    found = matching[0] if matching else None
    if found is not None:
        open_calls.remove(found)
    given = {"tool_call_id": id or (found and found[0]), "name": name or (found and found[1])}
    return {key: value for key, value in given.items() if value is not None}


# ---------------------------------------------------------------- answers


def answer(job: Job, choices: Sequence[ChoiceBuilder], usage: Usage) -> dict[str, Any]:
    """The whole answer of `/api/chat` and `/api/generate`."""
    if not choices:
        return {**_head(job), **_shown(job, "content", ""), **_LOADED}
    [made] = choices
    body = _shown(job, "content", made.text())
    about = body.get("message", body)
    if thoughts := made.text("reasoning"):
        about["thinking"] = thoughts
    if made.calls:
        about["tool_calls"] = [_call(job, i, name, arguments) for i, (name, arguments) in enumerate(made.calls)]
    if job.top is not None:
        body["logprobs"] = _logprobs(job, made.logprobs)
    return _head(job) | body | _end(job, usage, made.finish_reason, made.tokens)


_LOADED: Mapping[str, Any] = {"done": True, "done_reason": "load"}


def _head(job: Job) -> dict[str, Any]:
    created = datetime.fromtimestamp(job.created, UTC)
    return {"model": job.model, "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ")}


def _shown(job: Job, kind: str, value: Any) -> dict[str, Any]:
    """The field of an answer, or of a line, with new text, thoughts or calls. kind: content, thinking, tool_calls."""
    text = value if kind == "content" else ""
    more = {} if kind == "content" else {kind: value}
    if isinstance(job.request, OllamaGenerateRequest):
        return {"response": text, **more}
    return {"message": {"role": "assistant", "content": text, **more}}


def _call(job: Job, index: int, name: str, arguments: str) -> dict[str, Any]:
    """A tool call. Its arguments are an object, whatever the model wrote."""
    try:
        value = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        value = arguments
    shown = value if isinstance(value, dict) else {"arguments": value}
    return {"id": job.tools.call_id(name, index), "function": {"index": index, "name": name, "arguments": shown}}


def _logprobs(job: Job, scores: Sequence[Any]) -> list[Any]:
    shown = chat_logprobs_of(job, scores)
    return [] if shown is None else shown["content"]


def _end(job: Job, usage: Usage, reason: str | None, tokens: Sequence[int]) -> dict[str, Any]:
    """The last fields of an answer. tokens: of the answer. Durations are in nanoseconds."""
    kept = isinstance(job.request, OllamaGenerateRequest) and not job.request.raw
    return {
        "done": True,
        "done_reason": reason,
        **({"context": [*job.calls[0].prompt, *tokens]} if kept else {}),
        **_durations(job, usage),
        "eval_count": usage.completion,
        "eval_duration": _nanoseconds(usage.first, time.perf_counter()),
        **bare_details(job, usage),
    }


def _durations(job: Job, usage: Usage) -> dict[str, int]:
    now = time.perf_counter()
    return {
        "total_duration": _nanoseconds(job.began, now),
        "load_duration": 0,
        "prompt_eval_count": usage.prompt,
        "prompt_eval_duration": _nanoseconds(job.began, usage.first or now),
    }


def _nanoseconds(since: float | None, now: float) -> int:
    """At least 1: clients divide by it. since: None for now."""
    return max(1, round((now - (now if since is None else since)) * 1e9))


class OllamaLines(Chunks[Delta]):
    """Lines of JSON: text and thoughts as they come, each tool call once it is complete, and the counts."""

    media_type: ClassVar[bytes] = b"application/x-ndjson"

    def __init__(self, job: Job) -> None:
        self._job = job
        self._usage = Usage(job)
        self._splitter = job.splitter()
        self._before = msgspec.json.encode(_head(job))[:-1]
        self._cost_per_delta = PER_TOKEN + (0 if job.top is None else PER_SCORE * (1 + job.top))
        self._tokens: list[int] = []
        # Name and pieces of the arguments of the call that has begun; how many have.
        self._call: tuple[str, list[str]] | None = None
        self._num_calls = 0
        self._finish: str | None = None

    @property
    def edge_cost(self) -> int:
        """The cost of the last line, which has token ids."""
        return PER_TOKEN * (sum(len(call.prompt) for call in self._job.calls) + len(self._tokens))

    def cost(self, ready: Sequence[Delta]) -> int:
        """The cost of these deltas."""
        return self._cost_per_delta * len(ready)

    def encode(self, delta: Delta) -> bytes:
        """The lines of a delta; log-probabilities are in the last of them."""
        self._usage.add(delta)
        self._tokens += delta.tokens
        bodies = []
        for part in self._job.shown_parts(self._splitter, delta):
            if part.kind == "arguments" and self._call is not None:
                self._call[1].append(part.text)
                continue
            bodies += self._called()
            if part.kind == "call":
                self._call = (part.text, [])
            else:
                bodies.append(_shown(self._job, "thinking" if part.kind == "reasoning" else "content", part.text))
        if delta.finish_reason is not None:
            bodies += self._called()
            self._finish = delta.finish_reason
        if self._job.top is not None and delta.logprobs:
            bodies = bodies or [_shown(self._job, "content", "")]
            bodies[-1]["logprobs"] = _logprobs(self._job, delta.logprobs)
        return b"".join(self._line(body | {"done": False}) for body in bodies)

    def _called(self) -> list[dict[str, Any]]:
        """The line's field of the call that is complete now, if there is one."""
        if self._call is None:
            return []
        name, pieces = self._call
        call = _call(self._job, self._num_calls, name, "".join(pieces))
        self._call = None
        self._num_calls += 1
        return [_shown(self._job, "tool_calls", [call])]

    def _line(self, fields: Mapping[str, Any]) -> bytes:
        return self._before + b"," + msgspec.json.encode(fields)[1:] + b"\n"

    def closing(self) -> bytes:
        """The line with the reason and the counts."""
        job = self._job
        end = _end(job, self._usage, self._finish, self._tokens) if job.calls else _LOADED
        return self._line({**_shown(job, "content", ""), **end})

    def keep_alive(self) -> bytes:
        """A line without text: JSON has no comments."""
        return self._line(_shown(self._job, "content", "") | {"done": False})

    def failed(self, error: Exception) -> bytes:
        """A line with the error."""
        return error_responses.of(error, "/api/chat") + b"\n"


# ---------------------------------------------------------------- embeddings


def embed(request: OllamaEmbedRequest | OllamaEmbeddingsRequest, backend: Backend, limits: Limits) -> Job:
    """The job of `/api/embed` and `/api/embeddings`; without a text it computes nothing.

    Raises InvalidRequest naming the field.
    """
    model(request.model, backend)
    read_options(request.options)
    if isinstance(request, OllamaEmbedRequest):
        texts, cut = request.input, bool(request.truncate)
    else:
        texts, cut = request.prompt, False
    if not texts:
        return _loaded(OllamaEmbedRequest(), backend)
    shared = {name: getattr(request, name) for name in Embedding.__struct_fields__}
    return embed_inputs(EmbeddingsRequest(**shared, input=texts), backend, limits, truncate=cut)


def embedded(job: Job, choices: Sequence[ChoiceBuilder], usage: Usage) -> dict[str, Any]:
    """The answer of `/api/embed`. Raises InvalidRequest for more dimensions than the model has."""
    return {"model": job.model, "embeddings": _vectors(job, choices), **_durations(job, usage)}


def embedded_one(job: Job, choices: Sequence[ChoiceBuilder], usage: Usage) -> dict[str, Any]:
    """The answer of `/api/embeddings`. Raises what `embedded` raises."""
    return {"embedding": next(iter(_vectors(job, choices)), [])}


def _vectors(job: Job, choices: Sequence[ChoiceBuilder]) -> list[list[float]]:
    request: Embedding = job.request
    old = isinstance(request, OllamaEmbeddingsRequest)
    normalize = not old if request.normalize is None else request.normalize
    return [embedding_vector(one.pooled, request.dimensions, normalize=normalize).tolist() for one in choices]
