"""Noise as a function of (seed, choice, position, token): the whole of sampling's randomness. No state, no generator.

Gumbel-max: the sample from softmax(l) is the token with the greatest `l - log(e)`, e being independent exponentials
of mean 1, one a token. They come from a 32-bit integer hash, so that any device can make the same ones:

    mix(x)        x ^= x>>16; x *= 0x7feb352d; x ^= x>>15; x *= 0x846ca68b; x ^= x>>16      (uint32, wrapping)
    fold(h, v)    mix(h ^ mix(v + 0x9e3779b9))
    key           fold(fold(fold(fold(0, seed low word), seed high word), choice), position)
    unit(h)       -log(1 - (h + 0.5) / 2^32), an exponential; fine-grained near 0, where winners are
    block b       tokens 32b to 32b + 31; head = fold(key, 2^30 + b); least = unit(head) / 32;
                  holder = fold(head, 0) & 31
    e(token t)    least of its block, plus unit(fold(key, t)) unless t is its block's holder

`position` is the index in the sequence of the token being drawn. The blocks are what makes it fast: the least of 32
exponentials is an exponential of mean 1/32, its holder is any of the 32 alike, and the others exceed it by fresh
exponentials (they have no memory). So `max(l in block) - log(least)` bounds every score in a block from one hash, and
only the blocks whose bound reaches the best score are opened: a V-wide maximum is all that grows with the vocabulary.
mix is C. Wellons' `lowbias32` (hash-prospector, public domain); opening top-down only what can win is A* sampling
(Maddison et al., 2014).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

Words = npt.NDArray[np.uint32]
Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.intp]

BLOCK = 32
_HEADS = 1 << 30
_15, _16 = np.uint32(15), np.uint32(16)


def mix(x: Words) -> Words:
    """The finalizer of the hash."""
    x = (x ^ (x >> _16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> _15)) * np.uint32(0x846CA68B)
    return x ^ (x >> _16)


def fold(h: Words, v: Ids | Words) -> Words:
    """Hash `v` into `h`; they broadcast."""
    return mix(h ^ salted(v))


def salted(v: Ids | Words) -> Words:
    """`fold`'s second argument, mixed."""
    return mix(v.astype(np.uint32) + np.uint32(0x9E3779B9))


def exponential(h: Words) -> Floats:
    """Exponentials of mean 1. Double precision on the way, so that 1 - w keeps every bit of h."""
    exact: npt.NDArray[np.float64] = np.log((float(1 << 32) - 0.5 - h) * 2.0**-32)
    return np.negative(exact).astype(np.float32)


def stream(seed: int, choice: int) -> int:
    """What a row's seed (64 bits, any sign) and choice contribute to its keys."""
    h = np.zeros(1, np.uint32)
    for word in (seed, seed >> 32, choice):
        h = fold(h, np.array([word & 0xFFFFFFFF], np.uint32))
    return int(h[0])


def keys(streams: Words, positions: Ids) -> Words:
    """[R] keys of streams [R] at positions [R]."""
    return fold(streams, positions)


_HOLDER = salted(np.zeros(1, np.intp))


class Draw:
    """Draws tokens from logits over one vocabulary, whose hashes are precomputed."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab = vocab_size
        self.blocks = -(-vocab_size // BLOCK)
        self._heads = salted(np.arange(_HEADS, _HEADS + self.blocks))
        self._words = salted(np.arange(self.blocks * BLOCK)).reshape(-1, BLOCK)
        self._begin: Ids = np.zeros((0, self.blocks), np.intp)

    def __call__(self, logits: Floats, temperature: Floats, key: Words) -> Ids:
        """One token a row from softmax(logits / temperature).

        logits [R, V], -inf for what cannot be; temperature [R, 1]; key [R]. A row of nothing but -inf, or with NaN,
        gets some token: it is for the caller to look.
        """
        blocked = self._blocked(logits)
        tiles = blocked.numpy().reshape(-1, BLOCK)
        head = mix(key[:, None] ^ self._heads)
        least = exponential(head) / np.float32(BLOCK)
        holder = (mix(head ^ _HOLDER) & np.uint32(BLOCK - 1)).astype(np.intp)
        gain = -np.log(least)
        bound = blocked.amax(2).numpy() / temperature + gain
        held = tiles.ravel().take(holder + self._starts(len(key))) / temperature + gain
        rows, blocks = np.nonzero((bound >= held.max(1)[:, None]) & (bound > -np.inf))
        each = np.arange(len(rows))
        noise = exponential(mix(key[rows, None] ^ self._words[blocks]))
        noise[each, holder[rows, blocks]] = 0.0
        noise += least[rows, blocks][:, None]
        score = tiles[rows * self.blocks + blocks] / temperature[rows] - np.log(noise)
        at = score.argmax(1)
        score = score[each, at]
        top = np.full(len(key), -np.inf, np.float32)
        np.maximum.at(top, rows, score)
        wins = score == top[rows]
        token = np.zeros(len(key), np.intp)
        token[rows[wins]] = blocks[wins] * BLOCK + at[wins]
        return token

    def _starts(self, rows: int) -> Ids:
        """Where each row's blocks begin in the flattened logits, [rows, blocks]."""
        if len(self._begin) != rows:
            self._begin = np.arange(0, rows * self.blocks * BLOCK, BLOCK).reshape(rows, self.blocks)
        return self._begin

    def _blocked(self, logits: Floats) -> torch.Tensor:
        """[R, blocks, 32]: past the end nothing can be."""
        x = torch.from_numpy(logits)
        if self.vocab % BLOCK:
            x = torch.nn.functional.pad(x, (0, self.blocks * BLOCK - self.vocab), value=-torch.inf)
        return x.view(len(logits), self.blocks, BLOCK)
