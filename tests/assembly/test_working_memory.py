"""How much memory there is: what the kernel can give, within the container's limit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire.assembly.limits import host_bytes

MEMINFO = "MemTotal: 64000 kB\nMemFree: 100 kB\nMemAvailable:   48000 kB\n"


def machine(root: Path, **group: str) -> Path:
    (root / "proc").mkdir()
    (root / "proc/meminfo").write_text(MEMINFO)
    (root / "sys/fs/cgroup").mkdir(parents=True)
    for name, text in group.items():
        (root / f"sys/fs/cgroup/memory.{name}").write_text(text)
    return root


def test_caches_that_give_way_count_as_free(tmp_path: Path) -> None:
    assert host_bytes(machine(tmp_path)) == 48_000 << 10


@pytest.mark.parametrize(("limit", "room"), [("max", 48_000 << 10), ("20480000", 12_480_000), ("1000000", 0)])
def test_a_container_has_what_its_limit_leaves(limit: str, room: int, tmp_path: Path) -> None:
    stat = "anon 5000000\nfile 7000000\ninactive_file 2000000\n"
    assert host_bytes(machine(tmp_path, max=f"{limit}\n", current="10000000\n", stat=stat)) == room


def test_where_there_is_no_proc_it_is_all_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf_names", {"SC_PHYS_PAGES": 1, "SC_PAGE_SIZE": 2})
    asked = {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", asked.__getitem__)
    assert host_bytes(tmp_path) == 4_096_000
