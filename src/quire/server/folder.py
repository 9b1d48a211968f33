"""A folder that belongs to one server: its lock and format, private files, and writes that happen completely or not at
all."""

from __future__ import annotations

import errno
import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Literal

from quire.errors import InvalidConfig, Unavailable, reason


class WriteFailed(Unavailable):
    """Writing failed: the disk is full, or gone. It may work again later."""


@contextmanager
def durable_write() -> Iterator[None]:
    """Within, errors of writing are raised as WriteFailed."""
    try:
        yield
    except OSError as error:
        raise WriteFailed(f"this server cannot write it to disk: {error.strerror}", code="storage") from error


@contextmanager
def usable(folder: Path, option: str) -> Iterator[None]:
    """Within, errors of using `folder` are raised as InvalidConfig. option: that which names it."""
    try:
        yield
    except OSError as error:
        raise InvalidConfig(f"{option}: {error.filename or folder}: {reason(error)}") from error


def make_private(folder: Path) -> None:
    """Create a folder that this server's user only can use, or make it one."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)


def open_private(path: Path, mode: Literal["wb", "ab"]) -> FileIO:
    """Open a file, unbuffered. A new one can be read by this server's user only."""
    return FileIO(path, mode, opener=lambda name, flags: os.open(name, flags, 0o600))


def write_all(file: FileIO, data: bytes) -> None:
    """Write all of `data`. Raises OSError where only a part fits."""
    view = memoryview(data)
    # One write takes at most 2 GiB.
    while (done := file.write(view)) < len(view):
        if not done:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        view = view[done:]


def replace_file(path: Path, data: bytes, *, sync: bool) -> None:
    """Write a file whole, or leave the old one. sync: also where the machine stops. Raises WriteFailed."""
    new = path.with_suffix(".new")
    with durable_write():
        try:
            with open_private(new, "wb") as file:
                write_all(file, data)
                if sync:
                    os.fsync(file.fileno())
            new.replace(path)
        except OSError:
            with suppress(OSError):
                new.unlink(missing_ok=True)
            raise


def lock(folder: Path, what: str, version: int, option: str) -> FileIO:
    """Lock a folder until the returned file is closed, or the process ends.

    what: the kind of documents in it. version: of their format, which the file `lock` in the folder names; a folder
    whose lock names none has version 1. option: that which names the folder.
    Raises InvalidConfig if another process holds the lock, the format is another, or the folder cannot be used.
    """
    with usable(folder, option), ExitStack() as undo:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = undo.enter_context(open_private(folder / "lock", "ab"))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidConfig(f"{folder} is in use by another server: choose another {option}") from None
        _check_format(folder, file, what, version, option)
        undo.pop_all()
    return file


def _check_format(folder: Path, file: FileIO, what: str, version: int, option: str) -> None:
    """Write the format's version into an empty lock file. Raises InvalidConfig where it contains another version."""
    noted = (folder / "lock").read_bytes()
    found = re.fullmatch(rb"quire ([a-z]+), format (\d+)\n", noted)
    if found and (found[1].decode(), int(found[2])) != (what, version):
        kind = "" if found[1].decode() == what else f"{what} of "
        raise InvalidConfig(
            f"{folder} holds {found[1].decode()} of format {int(found[2])}, and this version of Quire reads "
            f"{kind}format {version}: choose another {option}, or the version of Quire that wrote it"
        )
    if not noted:
        # A full disk does not prevent a server from starting.
        with suppress(OSError):
            write_all(file, f"quire {what}, format {version}\n".encode())
