"""A mixture of experts as data: read off a config, printed, compared. Torch-free; `experts` computes with it."""

from __future__ import annotations

from dataclasses import dataclass

from quire.errors import InvalidModel


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """Experts of a layer: `count` MLPs of inner `width`, of which each token takes `used`.

    renormalise: the weights of those used are made to sum to 1. dense: layers that have one plain MLP instead.
    """

    num_experts: int
    num_experts_per_token: int
    width: int
    normalize_weights: bool = True
    dense_layers: frozenset[int] = frozenset()

    def checked(self) -> MoEConfig:
        """Itself. Raises InvalidModel for numbers that cannot be."""
        if not 1 <= self.num_experts_per_token <= self.num_experts or not self.width:
            raise InvalidModel(
                f"config.json: {self.num_experts_per_token} of {self.num_experts} experts of width {self.width} "
                "cannot be used"
            )
        return self
