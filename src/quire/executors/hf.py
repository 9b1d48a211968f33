"""Any causal language model of transformers, for those that we have no layers for. The one place where transformers
runs.

A step is cut into groups of spans of one length, and a group is one forward of the model. Its past is handed to it as
transformers' own kind of cache, see `hf_cache`. How a model's past is kept is tried out when it is loaded.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers.models.auto import modeling_auto

from quire.errors import InvalidModel
from quire.executors.hf_cache import OneByOne, PagedCache, Past, Places
from quire.layers.basic import NO_ROPE
from quire.model_runner.memory import LayerShape, allocate
from quire.models.spec import ModelSpec
from quire.ops.paged_attention import FEW, alike
from quire.ops.ragged import LayerKV, RaggedBatch
from quire.types import UNLIMITED

log = logging.getLogger(__name__)

LENGTHS = ("max_position_embeddings", "n_positions", "seq_length", "n_ctx", "max_seq_len")
"""Where configs say how long a sequence may be."""

PROBE = (9, 5)
"""Tokens of the two sequences that every way of keeping the past is tried with."""

TOLERANCE: Mapping[torch.dtype, float] = {torch.float32: 1e-3}
"""The largest error of the probe's logits, as a share of their norm; 0.1 for narrower dtypes."""


class HfModel:
    """See `models.registry.Model`. Heads differ from model to model, so a forward makes logits at once, of the tokens
    that they are wanted of; its hidden states [T, 1] are the rows of the tokens' logits.

    model: of transformers. device: where its tokens are, if its embeddings are on disk. ways: of keeping its past, the
    first that agrees with the model without one is taken.
    """

    classify = head = None

    def __init__(self, model: Any, device: torch.device, ways: Sequence[type[Past]] = (PagedCache, OneByOne)) -> None:
        self.model = model
        self.dtype: torch.dtype = model.dtype
        place: torch.device = model.get_input_embeddings().weight.device
        self.device = device if place.type == "meta" else place
        self.spec = read(model.config, type(model).__name__)
        self.takes = frozenset(inspect.signature(model.forward).parameters)
        self.found = torch.empty(0)
        self.past = self._choose(ways)

    @classmethod
    def unloaded(cls, model: Any) -> HfModel:
        """A model on the meta device, which can be fed and makes nothing."""
        made = cls.__new__(cls)
        made.model, made.device = model, torch.device("meta")
        made.takes = frozenset(inspect.signature(model.forward).parameters)
        return made

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        """The K/V that blocks hold, by layer; none where the model keeps its own."""
        return self.past.layers

    def forward(self, batch: RaggedBatch, kv: Sequence[LayerKV]) -> Tensor:
        """The row [T, 1] of each token's logits, see `logits`; of tokens that none are wanted of, any."""
        wanted = range(len(batch.tokens)) if batch.output_indices is None else batch.output_indices.tolist()
        rows = torch.zeros(len(batch.tokens), 1, dtype=torch.int64)
        found, count = list[Tensor](), 0
        for places in self._groups(batch):
            kept, at = offsets(places, wanted)
            made = self.past.feed(places, kv, kept)
            rows[at, 0] = count + torch.arange(len(at))
            count += len(at)
            if len(at):
                found.append(made.reshape(-1, made.shape[-1]))
        self.found = torch.cat(found) if found else self.found[:0]
        # Where the caller's indices are: it selects rows before it asks for logits.
        return rows.to(batch.tokens.device)

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, 1] rows of the last forward's logits -> logits [R, V] float32."""
        return self.found[hidden[:, 0].to(self.found.device)].float()

    def __call__(self, tokens: Tensor, kept: Sequence[int] | None = None, **past: Any) -> Any:
        """The model's answer to tokens [S, n]: logits of the offsets `kept`, None for all; none for an empty one.

        past: what its forward takes, if it takes it.
        """
        given = {name: value for name, value in past.items() if name in self.takes}
        if kept is not None and "logits_to_keep" in self.takes:
            # An empty list would keep every token's: 0 means all to transformers.
            given["logits_to_keep"] = torch.tensor(list(kept) or [tokens.shape[1] - 1], device=self.device)
            return self.model(tokens.to(self.device), **given)
        output = self.model(tokens.to(self.device), **given)
        if kept is not None:
            output.logits = output.logits[:, list(kept)]
        return output

    def _groups(self, batch: RaggedBatch) -> Iterator[Places]:
        """Spans that are fed in one forward: of as many tokens each, and of similar length if they are short."""
        starts, lengths = batch.query_start.tolist(), batch.kv_len.tolist()
        together: dict[tuple[int, int], list[int]] = {}
        for span, (start, stop) in enumerate(pairwise(starts)):
            n = stop - start
            together.setdefault((n, self.past.kind(lengths[span] - n)), []).append(span)
        for (n, _), every in together.items():
            for spans in alike(every, lengths) if n <= FEW else [every]:
                yield Places.of(batch, spans, n)

    def _choose(self, ways: Sequence[type[Past]]) -> Past:
        """The first way whose logits are those of the model without a past. Raises InvalidModel if there is none."""
        with torch.inference_mode():
            asked = [torch.arange(3 + i, 3 + i + n) * 7 % self.spec.vocab for i, n in enumerate(PROBE)]
            try:
                want = [self(tokens[None], use_cache=False).logits[0].float().cpu() for tokens in asked]
            except RuntimeError as error:
                if "out of memory" in str(error):
                    raise
                raise InvalidModel(
                    f"transformers cannot run {self.spec.architecture} here: {str(error).splitlines()[0]}"
                ) from error
            for past in self._variants(ways):
                if self._agrees(past, asked, want):
                    log.info("transformers runs %s; %s", self.spec.architecture, past.about)
                    return past
        raise InvalidModel(f"transformers' {self.spec.architecture} gives different answers with and without its cache")

    def _variants(self, ways: Sequence[type[Past]]) -> Iterator[Past]:
        for way in ways:
            try:
                yield from way.variants(self)
            except Exception as error:
                # As in `_agrees`.
                log.debug("%s: %s", way.__name__, error)

    def _agrees(self, past: Past, asked: Sequence[Tensor], want: Sequence[Tensor]) -> bool:
        """Whether two sequences, in chunks and together, get the logits they get alone and at once."""
        self.past, size = past, 16 if past.whole else 4
        kv = allocate(past.layers, pages=8, page_size=size, device=self.device)
        got: list[list[Tensor]] = [[], []]
        done = [0, 0]
        try:
            for step in ((4, 0), (3, 3), (1, 1), (1, 1)):
                batch = probe_batch(asked, done, step, size, self.device)
                every = torch.arange(sum(step), device=self.device)
                logits = self.logits(self.forward(batch, kv)[every]).cpu()
                got[0].append(logits[: step[0]])
                got[1].append(logits[step[0] :])
                done = [at + n for at, n in zip(done, step, strict=True)]
        except Exception as error:
            # Of whatever class: what a model does with a cache that it was not written for.
            log.debug("%s: %s", past.about, error)
            return False
        finally:
            past.reset()
        limit = TOLERANCE.get(self.dtype, 0.1)
        return all(
            bool(torch.linalg.norm(torch.cat(one) - whole) <= limit * torch.linalg.norm(whole))
            for one, whole in zip(got, want, strict=True)
        )


def offsets(places: Places, wanted: Sequence[int]) -> tuple[list[int], Tensor]:
    """The offsets in their spans whose logits a group makes, and the tokens [.] that those are of, span by span."""
    known = frozenset(wanted)
    kept = [i for i in range(places.n) if any(start + i in known for start in places.starts)]
    return kept, torch.tensor([start + i for start in places.starts for i in kept], dtype=torch.int64)


def probe_batch(
    asked: Sequence[Tensor], done: Sequence[int], step: Sequence[int], size: int, device: torch.device
) -> RaggedBatch:
    """The next `step` tokens of each sequence, after `done`; sequence i has 4 blocks of `size` from 1 + 4 i on."""
    used = [i for i in range(len(asked)) if step[i]]
    table = torch.tensor([[1 + 4 * i + j for j in range(4)] for i in used], dtype=torch.int32)
    ends = [done[i] + step[i] for i in used]
    positions = torch.cat([torch.arange(done[i], done[i] + step[i]) for i in used])
    row = torch.repeat_interleave(torch.arange(len(used)), torch.tensor([step[i] for i in used]))
    starts = list(accumulate((step[i] for i in used), initial=0))
    return RaggedBatch(
        tokens=torch.cat([asked[i][done[i] : done[i] + step[i]] for i in used]).to(device),
        positions=positions.to(device),
        slots=(table[row, positions // size].long() * size + positions % size).to(device),
        query_start=torch.tensor(starts, dtype=torch.int32, device=device),
        kv_len=torch.tensor(ends, dtype=torch.int32, device=device),
        page_table=table.to(device),
        page_size=size,
        max_query=max(step),
        max_kv=max(ends),
    )


def load(folder: Path, dtype: str, device: torch.device, **placing: Any) -> Any:
    """transformers' model of a checkpoint, without running code of it. dtype: "auto" is the checkpoint's own.

    placing: device_map and max_memory, as from_pretrained takes them. Raises InvalidModel.
    """
    if folder.is_file():
        raise InvalidModel(
            f"{folder.name} is a file, and transformers loads folders: name the folder of the checkpoint that it was "
            "made of, or use --executor local"
        )
    number = "auto" if dtype == "auto" else getattr(torch, dtype)
    own: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        check_name(transformers.AutoConfig.from_pretrained(folder, **own))
        model, about = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=number, output_loading_info=True, **own, **placing
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise InvalidModel(f"transformers cannot load {folder.name}: {str(error).splitlines()[0]}") from error
    if missing := sorted(about["missing_keys"]):
        raise InvalidModel(
            f"{folder.name} lacks {len(missing)} tensors of {type(model).__name__}, such as {missing[0]}"
        )
    return model.eval() if placing else model.eval().to(device)


def check_name(config: Any) -> None:
    """Raise InvalidModel unless transformers' class for a config's `model_type` is the one that the config names: a
    look-alike would answer, too."""
    named, found = (config.architectures or [""])[0], class_of(config.model_type)
    if named and found and named != found:
        raise InvalidModel(
            f"config.json names {named}, but its model_type {config.model_type!r} is {found} to transformers: correct "
            "the one that is wrong"
        )


def class_of(model_type: str) -> str:
    """The name of transformers' causal language model of a `model_type`, empty if it has none."""
    name = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, "")
    return str(name if isinstance(name, str) else name[0])


class Sketch(NamedTuple):
    """A model from its config.json alone. spec: sizes as far as every config has them. layers: K/V that is kept in
    blocks, None where that is known once it is loaded. whole: see `Past`."""

    spec: ModelSpec
    parameters: int
    layers: tuple[LayerShape, ...] | None
    whole: bool


def sketch(folder: Path, dtype: torch.dtype) -> Sketch:
    """What a model would be, built without weights. Raises InvalidModel for one that transformers cannot build."""
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        check_name(config)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise InvalidModel(f"transformers cannot build {folder.name}: {str(error).splitlines()[0]}") from error
    spec = read(config, type(model).__name__)
    count = sum(each.numel() for each in model.parameters())
    made = HfModel.unloaded(model)
    try:
        with torch.inference_mode(), torch.device("meta"):
            past = next(PagedCache.variants(made), None)
    except Exception as error:
        # As in `HfModel._agrees`: some forwards look at numbers, which are not there.
        log.debug("%s: %s", spec.architecture, error)
        past = None
    return Sketch(spec, count, None if past is None else past.layers, past is None or past.whole)


def read(config: Any, architecture: str) -> ModelSpec:
    """Sizes, as far as every config has them. What a token keeps is found by trying, so there are no layers."""
    text = config.get_text_config()
    known = text.to_dict()
    hidden = getattr(text, "hidden_size", 1)
    heads = getattr(text, "num_attention_heads", None) or 1
    context = next((known[name] for name in LENGTHS if isinstance(known.get(name), int)), 2048)
    stop = text.eos_token_id
    return ModelSpec(
        architecture=architecture,
        hidden=hidden,
        layers=0,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        mlp=known.get("intermediate_size") or 4 * hidden,
        vocab=text.vocab_size,
        context=min(context, UNLIMITED),
        norm_eps=0.0,
        rope=NO_ROPE,
        windows=(),
        stop=tuple(stop) if isinstance(stop, list) else () if stop is None else (stop,),
    )


def knows(fields: Mapping[str, Any], architecture: str) -> bool:
    """Whether transformers has a causal language model of this name for a config.json."""
    return class_of(str(fields.get("model_type"))) == architecture
