"""How rows are sampled, as the device has it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

CHUNK = 4096
"""Tokens a program of `survey` looks at."""

BLOCK = 32
"""Tokens that share a hash, as in `runner.noise`."""

FINE, BROKEN, STUCK = 0, 1, 2
"""What became of a row: it has a token; its logits are not finite; nothing is allowed."""


class SamplingTensors(NamedTuple):
    """How each of the store's rows is sampled: columns on the device, a number a row, and lists for those with lists.

    temperature float32, 0: the greatest logit. stream int64: of `runner.noise.stream`, a uint32. top_k int32, off:
    the vocabulary's size or more. top_p and min_p float32, off: above 1, and 0. repetition, frequency, presence
    float32, off: 1, 0, 0. masked int32: the row of `masks` that applies, -1 for none. masks int32 [., ceil(V / 32)]:
    bit t says whether token t may be. listed int32 [rows + 1]: row r's entries of the lists begin at listed[r].
    token int32, amount float32, until int32 [entries]: `amount` is added to a token's logit while fewer than `until`
    tokens of the answer are there (a ban is -inf).
    """

    temperature: Tensor
    stream: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    masked: Tensor
    masks: Tensor
    listed: Tensor
    token: Tensor
    amount: Tensor
    until: Tensor


class RequestedFeatures(NamedTuple):
    """What any of the rows may ask for: the rest is left out.

    hot: a temperature. cut: top_k, top_p or min_p. edited: a mask, an entry of the lists, a penalty.
    """

    random: bool = True
    truncated: bool = True
    processed: bool = True


ALL_FEATURES = RequestedFeatures()
