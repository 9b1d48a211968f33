"""The hint for an unknown option compares names, not the dashes and prefixes that all of them begin with."""

from __future__ import annotations

import pytest

from quire.config.unknown import refuse


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("--prot", " Did you mean '--port'?"),
        ("QUIRE_PROT", " Did you mean 'QUIRE_PORT'?"),
        ("prot", " Did you mean 'port'?"),
        ("--nonsense", ""),
        ("QUIRE_NONSENSE", ""),
    ],
)
def test_a_hint_is_of_a_name_that_is_alike(name: str, hint: str) -> None:
    prefix = name[: len(name) - len(name.lstrip("-").removeprefix("QUIRE_"))]
    alike = [prefix + (one.upper() if prefix == "QUIRE_" else one) for one in ("port", "seed")]
    assert str(refuse(name, "here", alike)) == f"here: there is no option {name}.{hint}"
