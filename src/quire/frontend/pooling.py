"""What pooling requests have in common, over HTTP and in Python.

How inputs are written and checked, and what becomes of the numbers that the engine makes of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.engine.executor import Description
from quire.errors import InvalidRequest
from quire.frontend.processor import embedding_vector
from quire.tokenization.tokenizer import PoolingText, PoolingTokens
from quire.types import Pooling, SamplingParams
from quire.weights.pooling import Activation, PoolerConfig

Floats = npt.NDArray[np.float32]

Encode = Callable[..., list[PoolingTokens]]
"""`Tokenizer.encode_inputs`."""


def longest(about: Description, pooler: PoolerConfig) -> int:
    """The longest prompt and answer of an engine, in tokens; without an answer the longest prompt."""
    limit = min(about.max_model_len, about.num_blocks * about.block_size)
    # Sequences of models that only pool end with a token that is no answer.
    return limit if pooler.generates else min(about.max_model_len - 1, about.num_blocks * about.block_size)


def pooling_params(pooling: Pooling) -> SamplingParams:
    """The parameters of a request that is pooled."""
    return SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, pooling=pooling)


# ---------------------------------------------------------------- what a model can do


def check_task(pooler: PoolerConfig, task: str, *, pools: bool) -> None:
    """Raises InvalidRequest for a task that the model, or the executor, has not. task: of `PoolerConfig.tasks`, or
    score."""
    if not pools:
        raise InvalidRequest(
            "this engine does not support embeddings: its executor returns no hidden states; "
            "serve with --executor local",
            code="unsupported",
        )
    if task == "embed" and pooler.classes:
        raise _unsupported("this model is a classifier: use /classify and /score, or serve it with --convert embed")
    if task == "classify" and not pooler.classes:
        raise _unsupported("this model has no classifier: its architecture must end in ForSequenceClassification")
    if task == "score" and pooler.generates:
        raise _unsupported("this model is served for text: scores need a pooling model; serve it with --runner pooling")
    if task == "score" and len(pooler.classes) > 1:
        raise _unsupported(f"scores need a classifier with one class, and this one has {len(pooler.classes)}")
    if task == "token_embed" and (pooler.generates or pooler.classes):
        raise _unsupported("vectors of each token need a model that embeds; serve it with --runner pooling")


def _unsupported(why: str) -> InvalidRequest:
    return InvalidRequest(why, param="model", code="unsupported")


def check_dimensions(dimensions: int | None, pooler: PoolerConfig) -> None:
    """Raises InvalidRequest for dimensions that vectors of this model may not be cut to."""
    if dimensions is None:
        return
    if dimensions < 1:
        raise InvalidRequest("dimensions must be at least 1", param="dimensions")
    allowed = pooler.dimensions
    if allowed is not None and dimensions not in allowed:
        which = f"only {', '.join(map(str, allowed))}" if allowed else "config.json says is_matryoshka false"
        raise InvalidRequest(
            f"dimensions: vectors of this model cannot be cut to {dimensions}: {which}", param="dimensions"
        )


# ---------------------------------------------------------------- inputs


class EncodedInput(NamedTuple):
    """Token ids as the engine is fed them, and how many were left out."""

    ids: tuple[int, ...]
    truncated: int = 0


def with_prompt(text: str, name: str | None, pooler: PoolerConfig) -> str:
    """The text after the prompt of this name, or after the model's default prompt. Raises InvalidRequest."""
    chosen = pooler.default_prompt if name is None else name
    if chosen is None:
        return text
    if chosen not in pooler.prompts:
        known = ", ".join(pooler.prompts) or "none"
        raise InvalidRequest(
            f"prompt_name: this model has no prompt {chosen[:64]!r} (it has {known})", param="prompt_name"
        )
    return pooler.prompts[chosen] + text


def kept_tokens(given: int | None, limit: int) -> int | None:
    """Tokens that inputs are cut to; None: they are not. given: `truncate_prompt_tokens`, -1 for as many as the model
    takes. Raises InvalidRequest."""
    if given is None:
        return None
    if given == -1:
        return limit
    if not 1 <= given <= limit:
        raise InvalidRequest(
            f"truncate_prompt_tokens must be from 1 to {limit}, the tokens this model takes, or -1 for that many",
            param="truncate_prompt_tokens",
        )
    return given


def encode_texts(
    texts: Sequence[PoolingText],
    encode: Encode,
    pooler: PoolerConfig,
    vocab: int,
    *,
    special: bool = True,
    most: int | None = None,
) -> list[EncodedInput]:
    """Texts, and pairs for a cross-encoder. vocab: token ids of the model. most: see `Tokenizer.encode_inputs`."""
    made = encode(texts, add_special_tokens=special, most=most)
    if pooler.token_types == 1:
        return [EncodedInput(one.ids, one.truncated) for one in made]
    return [EncodedInput(typed(one, vocab, pooler.token_types), one.truncated) for one in made]


def typed(tokens: PoolingTokens, vocab: int, types: int) -> tuple[int, ...]:
    """Token ids with their types, as `ModelSpec.token_types` says."""
    pairs = zip(tokens.ids, tokens.types or (0,) * len(tokens.ids), strict=True)
    return tuple(id + vocab * min(type, types - 1) for id, type in pairs)


RERANKER_BEGIN = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
RERANKER_END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
RERANKER_TASK = "Given a web search query, retrieve relevant passages that answer the query"
"""How Qwen3-Reranker was trained to read a pair, by its model card; the last one is its usual instruction."""


def encode_pairs(
    pairs: Sequence[tuple[str, str]],
    encode: Encode,
    pooler: PoolerConfig,
    vocab: int,
    *,
    special: bool = True,
    most: int | None = None,
    instruction: str | None = None,
    render: Callable[[str, str], str] | None = None,
) -> list[EncodedInput]:
    """Pairs as the model's classifier reads them. render: by a chat template. Raises InvalidRequest."""
    if instruction is not None and not pooler.by_template:
        raise InvalidRequest("instruction is for rerankers that read one, as Qwen3-Reranker", param="instruction")
    if pooler.by_template:
        begin, end = (encode([part], add_special_tokens=False)[0].ids for part in (RERANKER_BEGIN, RERANKER_END))
        task = RERANKER_TASK if instruction is None else instruction
        texts = [f"<Instruct>: {task}\n<Query>: {query}\n<Document>: {document}" for query, document in pairs]
        room = None if most is None else max(1, most - len(begin) - len(end))
        inner = encode(texts, add_special_tokens=False, most=room)
        return [EncodedInput((*begin, *one.ids, *end), one.truncated) for one in inner]
    if render is not None:
        if most is not None:
            raise InvalidRequest(
                "truncate_prompt_tokens would cut off the end of the chat template: send shorter texts",
                param="truncate_prompt_tokens",
            )
        return encode_texts([render(*pair) for pair in pairs], encode, pooler, vocab, special=False)
    return encode_texts(pairs, encode, pooler, vocab, special=special, most=most)


# ---------------------------------------------------------------- results


def embedding(pooled: bytes, dimensions: int | None, normalize: bool | None, pooler: PoolerConfig) -> Floats:
    """A vector. normalize: None for what the model does. Raises InvalidRequest for more dimensions than there are."""
    return embedding_vector(pooled, dimensions, normalize=pooler.normalize if normalize is None else normalize)


def token_embeddings(pooled: bytes, tokens: int, normalize: bool | None, pooler: PoolerConfig) -> Floats:
    """A vector for each token, [tokens, n]."""
    table: Floats = np.frombuffer(pooled, dtype="<f4").reshape(tokens, -1)
    if pooler.normalize if normalize is None else normalize:
        table = table / np.maximum(np.linalg.norm(table, axis=1, keepdims=True), 1e-12)
    return table.astype("<f4")


def activated(logits: Floats, activation: Activation) -> Floats:
    """Classes' numbers [..., n] as probabilities or scores."""
    exact = logits.astype(np.float64)
    if activation == "sigmoid":
        exact = np.where(exact >= 0, 1 / (1 + np.exp(-np.abs(exact))), 1 - 1 / (1 + np.exp(-np.abs(exact))))
    elif activation == "softmax":
        exact = np.exp(exact - exact.max(-1, keepdims=True))
        exact = exact / exact.sum(-1, keepdims=True)
    return exact.astype("<f4")


def probabilities(pooled: bytes, pooler: PoolerConfig, use_activation: bool | None = None) -> Floats:
    """A classifier's numbers, [classes]; without activation as they come from its last matrix."""
    logits: Floats = np.frombuffer(pooled, dtype="<f4")
    return activated(logits, "identity" if use_activation is False else pooler.activation)


def similarity(first: bytes, second: bytes) -> float:
    """The cosine of the angle between two vectors."""
    a, b = (np.frombuffer(one, dtype="<f4").astype(np.float64) for one in (first, second))
    return float(a @ b / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-12))


def matched(first: Sequence[str], second: Sequence[str], names: tuple[str, str]) -> list[tuple[str, str]]:
    """Pairs of texts: one with each of several, or as many with as many. Raises InvalidRequest."""
    if not first or not second:
        name = names[0] if not first else names[1]
        raise InvalidRequest(f"{name} is empty: give at least one text", param=name)
    if len(first) == 1:
        return [(first[0], other) for other in second]
    if len(first) != len(second):
        raise InvalidRequest(
            f"{names[0]} has {len(first)} texts and {names[1]} {len(second)}: give one of the first, or as many as of "
            "the second",
            param=names[1],
        )
    return list(zip(first, second, strict=True))
