"""Log-probabilities of the model's raw distribution, natural log, whatever sampling then does to it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.model_runner.sampling.noise import Ids
from quire.types import TokenLogprobs


def score(logits: Tensor, tokens: Ids, wanted: Ids) -> list[TokenLogprobs]:
    """One TokenLogprobs a row. logits [R, V] float32; tokens [R] the chosen ones; wanted [R]: how many of the likeliest
    to tell beside, -1 for all. Equal logits are told in order of token id; a chosen token's rank counts those above.
    """
    vocab = logits.shape[1]
    out: list[TokenLogprobs | None] = [None] * len(tokens)
    counts = np.minimum(np.where(wanted < 0, vocab, wanted), vocab)
    for count in np.unique(counts).tolist():
        which = np.flatnonzero(counts == count)
        rows = logits if len(which) == len(tokens) else logits[torch.from_numpy(which)]
        chosen = rows.gather(1, torch.from_numpy(tokens[which])[:, None].to(torch.int64))
        total = torch.stack([row.logsumexp(0) for row in rows])[:, None]  # many at once are summed otherwise than one
        ranks = (rows > chosen).sum(1).add_(1).tolist()
        own = (chosen - total).squeeze(1).tolist()
        values, ids = _likeliest(rows, count)
        tops = (values - total).tolist()
        for i, r in enumerate(which.tolist()):
            top = tuple(zip(ids[i], tops[i], strict=True))
            out[r] = TokenLogprobs(int(tokens[r]), own[i], ranks[i], top)
    return [each for each in out if each is not None]


def _likeliest(logits: Tensor, count: int) -> tuple[Tensor, list[list[int]]]:
    """The greatest `count` logits of each row, best first, and their tokens; equal ones by token id."""
    ids = logits.topk(count, 1).indices.sort(1).values
    values, order = logits.gather(1, ids).sort(stable=True, dim=1, descending=True)
    return values, ids.gather(1, order).tolist()
