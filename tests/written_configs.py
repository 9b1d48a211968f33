"""A config.json in the ways in which the same is published: older names, fields at other places, fields of others."""

from __future__ import annotations

import random
from typing import Any


def as_published(config: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """`config` as some release of transformers, or some publisher, writes it."""
    made = dict(config)
    if "dtype" in made or chance.random() < 0.3:
        made.pop("dtype", None)
        made[chance.choice(("dtype", "torch_dtype"))] = "float32"
    parameters = made.get("rope_parameters")
    if isinstance(parameters, dict) and "rope_theta" in parameters:
        made |= _older_rope(made.pop("rope_parameters"), chance) if chance.random() < 0.5 else {}
    if chance.random() < 0.3:
        made |= {"auto_map": {"AutoConfig": "configuration_own.OwnConfig"}, "a_field_of_nobody": {"x": [1]}}
    if chance.random() < 0.2:
        made |= {"rope_theta": 123.0} if "rope_parameters" in made else {}
    return made


def _older_rope(parameters: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`, as before transformers 5."""
    scaling = dict(parameters)
    made = {"rope_theta": scaling.pop("rope_theta")}
    if "partial_rotary_factor" in scaling:
        made["partial_rotary_factor"] = scaling.pop("partial_rotary_factor")
    kind = scaling.pop("rope_type")
    if kind == "default":
        return made | chance.choice(({}, {"rope_scaling": None}))
    return made | {"rope_scaling": {**scaling, chance.choice(("type", "rope_type")): kind}}
