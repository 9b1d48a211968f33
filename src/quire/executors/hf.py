"""Any causal language model of transformers, one sequence after another: slow, and there for models we have no layers
for. The one place where transformers runs.

A page is as long as a sequence, so a page is a sequence, and its K/V is transformers' own cache, kept by page.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from quire.errors import InvalidModel, StepFailed
from quire.layers.basic import NO_ROPE
from quire.models.spec import ModelSpec
from quire.ops.ragged import LayerKV, RaggedBatch

LENGTHS = ("max_position_embeddings", "n_positions", "seq_length", "n_ctx", "max_seq_len")
"""Where configs say how long a sequence may be."""


class HfModel:
    """See `models.registry.Model`. Its hidden states are logits already, as models name their heads differently.

    folder: of the checkpoint. dtype: "auto" is the checkpoint's own. Raises InvalidModel.
    """

    def __init__(self, folder: Path, dtype: str, device: torch.device) -> None:
        number = "auto" if dtype == "auto" else getattr(torch, dtype)
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=number, local_files_only=True)
        except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
            raise InvalidModel(f"transformers cannot load {folder.name}: {str(error).splitlines()[0]}") from error
        self.model: Any = model.eval().to(device)
        self.dtype: torch.dtype = model.dtype
        self.device = device
        self.spec = read(model.config, type(model).__name__)
        self.caches: dict[int, Any] = {}

    def forward(self, batch: RaggedBatch, kv: Sequence[LayerKV]) -> Tensor:
        """Logits [N, V] of the batch's tokens, one sequence after another."""
        out = []
        ends, pages = batch.query_start.tolist(), batch.page_table[:, 0].tolist()
        for (start, stop), length, page in zip(pairwise(ends), batch.kv_len.tolist(), pages, strict=True):
            out.append(self._feed(page, batch.tokens[start:stop], length - (stop - start)))
        return torch.cat(out)

    def _feed(self, page: int, tokens: Tensor, past: int) -> Tensor:
        """[n, V] after feeding tokens [n] to the sequence in `page`, which has been fed `past`."""
        if past == 0:
            self.caches[page] = transformers.DynamicCache(config=self.model.config)
        cache = self.caches.get(page)
        if cache is None or cache.get_seq_length() != past:
            raise StepFailed(f"page {page} does not hold {past} tokens")
        seen = torch.ones(1, past + len(tokens), dtype=torch.int64, device=self.device)
        said = self.model(tokens[None], attention_mask=seen, past_key_values=cache, use_cache=True)
        logits: Tensor = said.logits[0]
        return logits

    def logits(self, hidden: Tensor) -> Tensor:
        """The identity: hidden states are logits already."""
        return hidden.float()


def read(config: Any, architecture: str) -> ModelSpec:
    """Vocabulary and context. K/V is kept by transformers, so there are no layers."""
    text = config.get_text_config()
    known = text.to_dict()
    context = next((known[name] for name in LENGTHS if isinstance(known.get(name), int)), 2048)
    stop = text.eos_token_id
    return ModelSpec(
        architecture=architecture,
        hidden=text.vocab_size,
        layers=0,
        heads=0,
        kv_heads=0,
        head_dim=0,
        mlp=0,
        vocab=text.vocab_size,
        context=context,
        norm_eps=0.0,
        rope=NO_ROPE,
        windows=(),
        stop=tuple(stop) if isinstance(stop, list) else () if stop is None else (stop,),
    )
