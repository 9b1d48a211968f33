"""A mixture of experts as data: read off a config, printed, compared. Torch-free; `experts` computes with it."""

from __future__ import annotations

from dataclasses import dataclass

from quire.errors import InvalidModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Experts of a layer: `count` MLPs of inner `width`, of which each token takes `used`.

    renormalise: the weights of those used are made to sum to 1. dense: layers that have one plain MLP instead.
    """

    count: int
    used: int
    width: int
    renormalise: bool = True
    dense: frozenset[int] = frozenset()

    def checked(self) -> Mixture:
        """Itself. Raises InvalidModel for numbers that cannot be."""
        if not 1 <= self.used <= self.count or not self.width:
            raise InvalidModel(f"config.json: {self.used} of {self.count} experts of width {self.width} cannot be used")
        return self
