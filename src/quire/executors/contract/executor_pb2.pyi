from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Hello(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class Description(_message.Message):
    __slots__ = ("version", "instance", "pages", "page_size", "rows", "max_model_len", "vocab_size", "depth", "drafts", "masks", "kv_bytes", "device", "dtype", "facts", "tokens", "paces", "catch_up", "draft_kv", "pools", "bidirectional")
    class FactsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    MASKS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PACES_FIELD_NUMBER: _ClassVar[int]
    CATCH_UP_FIELD_NUMBER: _ClassVar[int]
    DRAFT_KV_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    BIDIRECTIONAL_FIELD_NUMBER: _ClassVar[int]
    version: int
    instance: int
    pages: int
    page_size: int
    rows: int
    max_model_len: int
    vocab_size: int
    depth: int
    drafts: int
    masks: bool
    kv_bytes: int
    device: str
    dtype: str
    facts: _containers.ScalarMap[str, float]
    tokens: int
    paces: _containers.RepeatedCompositeFieldContainer[Pace]
    catch_up: float
    draft_kv: float
    pools: bool
    bidirectional: bool
    def __init__(self, version: _Optional[int] = ..., instance: _Optional[int] = ..., pages: _Optional[int] = ..., page_size: _Optional[int] = ..., rows: _Optional[int] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., depth: _Optional[int] = ..., drafts: _Optional[int] = ..., masks: _Optional[bool] = ..., kv_bytes: _Optional[int] = ..., device: _Optional[str] = ..., dtype: _Optional[str] = ..., facts: _Optional[_Mapping[str, float]] = ..., tokens: _Optional[int] = ..., paces: _Optional[_Iterable[_Union[Pace, _Mapping]]] = ..., catch_up: _Optional[float] = ..., draft_kv: _Optional[float] = ..., pools: _Optional[bool] = ..., bidirectional: _Optional[bool] = ...) -> None: ...

class Pace(_message.Message):
    __slots__ = ("rows", "drafts", "seconds")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    rows: int
    drafts: int
    seconds: float
    def __init__(self, rows: _Optional[int] = ..., drafts: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class Command(_message.Message):
    __slots__ = ("epoch", "step", "begin", "plan", "masks")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    MASKS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step: int
    begin: Begin
    plan: Plan
    masks: Masks
    def __init__(self, epoch: _Optional[int] = ..., step: _Optional[int] = ..., begin: _Optional[_Union[Begin, _Mapping]] = ..., plan: _Optional[_Union[Plan, _Mapping]] = ..., masks: _Optional[_Union[Masks, _Mapping]] = ...) -> None: ...

class Begin(_message.Message):
    __slots__ = ("version", "instance")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    version: int
    instance: int
    def __init__(self, version: _Optional[int] = ..., instance: _Optional[int] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("opened", "grown", "same_spans", "spans", "masked", "drafts", "snapshots")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    GROWN_FIELD_NUMBER: _ClassVar[int]
    SAME_SPANS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    MASKED_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    opened: _containers.RepeatedCompositeFieldContainer[Open]
    grown: _containers.RepeatedCompositeFieldContainer[Growth]
    same_spans: bool
    spans: _containers.RepeatedScalarFieldContainer[int]
    masked: _containers.RepeatedScalarFieldContainer[int]
    drafts: _containers.RepeatedScalarFieldContainer[int]
    snapshots: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, opened: _Optional[_Iterable[_Union[Open, _Mapping]]] = ..., grown: _Optional[_Iterable[_Union[Growth, _Mapping]]] = ..., same_spans: _Optional[bool] = ..., spans: _Optional[_Iterable[int]] = ..., masked: _Optional[_Iterable[int]] = ..., drafts: _Optional[_Iterable[int]] = ..., snapshots: _Optional[_Iterable[int]] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("row", "tokens", "start", "prompt", "seed", "choice", "stop", "limit", "sampling", "snapshot")
    ROW_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    row: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    start: int
    prompt: int
    seed: int
    choice: int
    stop: _containers.RepeatedScalarFieldContainer[int]
    limit: int
    sampling: Sampling
    snapshot: int
    def __init__(self, row: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., start: _Optional[int] = ..., prompt: _Optional[int] = ..., seed: _Optional[int] = ..., choice: _Optional[int] = ..., stop: _Optional[_Iterable[int]] = ..., limit: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., snapshot: _Optional[int] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "logit_bias", "bad_words", "allowed", "logprobs", "prompt_logprobs", "pooling", "repeat_last_n")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    REPEAT_LAST_N_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    min_tokens: int
    logit_bias: _containers.ScalarMap[int, float]
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenList]
    allowed: TokenList
    logprobs: int
    prompt_logprobs: int
    pooling: str
    repeat_last_n: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., min_tokens: _Optional[int] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., bad_words: _Optional[_Iterable[_Union[TokenList, _Mapping]]] = ..., allowed: _Optional[_Union[TokenList, _Mapping]] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., pooling: _Optional[str] = ..., repeat_last_n: _Optional[int] = ...) -> None: ...

class TokenList(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class Growth(_message.Message):
    __slots__ = ("row", "pages")
    ROW_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    row: int
    pages: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, row: _Optional[int] = ..., pages: _Optional[_Iterable[int]] = ...) -> None: ...

class Masks(_message.Message):
    __slots__ = ("spans",)
    SPANS_FIELD_NUMBER: _ClassVar[int]
    spans: _containers.RepeatedCompositeFieldContainer[SpanMasks]
    def __init__(self, spans: _Optional[_Iterable[_Union[SpanMasks, _Mapping]]] = ...) -> None: ...

class SpanMasks(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[Mask]
    def __init__(self, rows: _Optional[_Iterable[_Union[Mask, _Mapping]]] = ...) -> None: ...

class Mask(_message.Message):
    __slots__ = ("allowed",)
    ALLOWED_FIELD_NUMBER: _ClassVar[int]
    allowed: bytes
    def __init__(self, allowed: _Optional[bytes] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("epoch", "step", "result", "failure")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step: int
    result: Result
    failure: str
    def __init__(self, epoch: _Optional[int] = ..., step: _Optional[int] = ..., result: _Optional[_Union[Result, _Mapping]] = ..., failure: _Optional[str] = ...) -> None: ...

class Result(_message.Message):
    __slots__ = ("tokens", "counts", "drafts", "logprobs", "prompt_logprobs", "errors", "pooled")
    class LogprobsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: Scores
        def __init__(self, key: _Optional[int] = ..., value: _Optional[_Union[Scores, _Mapping]] = ...) -> None: ...
    class PromptLogprobsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: Scores
        def __init__(self, key: _Optional[int] = ..., value: _Optional[_Union[Scores, _Mapping]] = ...) -> None: ...
    class ErrorsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: str
        def __init__(self, key: _Optional[int] = ..., value: _Optional[str] = ...) -> None: ...
    class PooledEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: bytes
        def __init__(self, key: _Optional[int] = ..., value: _Optional[bytes] = ...) -> None: ...
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    POOLED_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    drafts: _containers.RepeatedCompositeFieldContainer[TokenList]
    logprobs: _containers.MessageMap[int, Scores]
    prompt_logprobs: _containers.MessageMap[int, Scores]
    errors: _containers.ScalarMap[int, str]
    pooled: _containers.ScalarMap[int, bytes]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., counts: _Optional[_Iterable[int]] = ..., drafts: _Optional[_Iterable[_Union[TokenList, _Mapping]]] = ..., logprobs: _Optional[_Mapping[int, Scores]] = ..., prompt_logprobs: _Optional[_Mapping[int, Scores]] = ..., errors: _Optional[_Mapping[int, str]] = ..., pooled: _Optional[_Mapping[int, bytes]] = ...) -> None: ...

class Scores(_message.Message):
    __slots__ = ("scores",)
    SCORES_FIELD_NUMBER: _ClassVar[int]
    scores: _containers.RepeatedCompositeFieldContainer[Score]
    def __init__(self, scores: _Optional[_Iterable[_Union[Score, _Mapping]]] = ...) -> None: ...

class Score(_message.Message):
    __slots__ = ("token", "logprob", "rank", "top_tokens", "top_logprobs")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token: int
    logprob: float
    rank: int
    top_tokens: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token: _Optional[int] = ..., logprob: _Optional[float] = ..., rank: _Optional[int] = ..., top_tokens: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...
