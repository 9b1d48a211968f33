"""Child processes without their imports: `python -m MODULE` as a fork of a process that has imported torch, the server
and the engine. For tests of what such a process does; how it starts is tested with processes that are started.

Of a server that answers one short request, nine tenths of the processor time are imports. A template process imports
them once for each process of tests, and forks whatever `Popen` of this module is asked to run. A child is the child of
who asked, as always. One that serves gets a template of its own, for its engines.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import inspect
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
NAME = "template"
"""What the system calls a template process, instead of python."""

PRELOADED = (
    "quire.assembly.engine_child",
    "quire.assembly.rank_process",
    "quire.assembly.server",
    "quire.cli.serve",
    "quire.models.registry",
    "quire.ops.native.ops",
    "uvloop",
)
MODULES = (
    "quire",
    "quire.assembly.engine_child",
    "quire.assembly.engine_main",
    "quire.assembly.rank_child",
    "tests.agent",
    "tests.contract.limited",
    "tests.contract.starved",
    "tests.contract.unreliable",
    "tests.ops.triton.peers",
    "tests.surface.ahead",
    "tests.thinker",
)
"""What is forked. Whatever else is run is started."""

READ_LATE = (
    *("QUIRE_", "OTEL_", "PYTEST_", "GLOO_", "NCCL_", "TORCH_SYMM_", "ONEDNN_PRIMITIVE_", "LRU_CACHE_"),
    *("HF_", "OLLAMA_"),  # huggingface_hub is not among what a template imports
)
"""Beginnings of the variables that may differ from a template's: nothing reads them while it is imported."""

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER, _SET_NAME = 1, 36, 15


def _prctl(option: int, value: Any) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


class Start(NamedTuple):
    """What a fork becomes. targets: the numbers that the descriptors sent with it get."""

    module: str
    argv: list[str]
    cwd: str
    environ: dict[str, str]
    session: bool
    targets: list[int]


# ---------------------------------------------------------------- in the template


def _serve(sock: socket.socket) -> tuple[Start, list[int]]:
    """Fork whenever it is asked for, and return in the fork. Ends the process with the connection."""
    while True:
        data, fds, _, _ = socket.recv_fds(sock, 1 << 18, 32)
        if not data:
            os._exit(0)
        between = os.fork()
        if between == 0:
            between = os.getpid()
            if os.fork():
                os._exit(0)  # so that its child falls to whoever asked: see Template.fork
            while os.getppid() == between:
                time.sleep(0.0005)
            start = Start(*json.loads(data))
            _prctl(_SET_NAME, ctypes.c_char_p(start.module.rpartition(".")[2].encode()))
            sock.send(str(os.getpid()).encode())
            sock.close()
            return start, fds
        os.waitpid(between, 0)
        for fd in fds:
            os.close(fd)


def _nested(fds: list[int]) -> tuple[Start, list[int]] | None:
    """Give this process a template, for what it starts. In a fork of that: what it becomes."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        _prctl(_SET_NAME, ctypes.c_char_p(NAME.encode()))
        here.close()
        for fd in fds:
            os.close(fd)
        return _serve(there)
    there.close()
    _template.template = Template(here)  # type: ignore[attr-defined]
    subprocess.Popen = Popen  # type: ignore[misc]
    return None


def _become(start: Start, fds: list[int]) -> None:
    if start.session:
        os.setsid()
    kept = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 512) for fd in fds]  # beyond all targets
    for fd in fds:
        os.close(fd)
    for fd, target in zip(kept, start.targets, strict=True):
        os.dup2(fd, target)
        os.close(fd)
    os.chdir(start.cwd)
    sys.path[0] = start.cwd
    os.environ.clear()
    os.environ.update(start.environ)
    sys.stdin = sys.__stdin__ = _standard(0, "r")
    sys.stdout = sys.__stdout__ = _standard(1, "w")
    sys.stderr = sys.__stderr__ = _standard(2, "w", buffering=1, errors="backslashreplace")
    sys.argv = [start.module, *start.argv]
    code: Any = None
    try:
        runpy.run_module(start.module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    if code is None or isinstance(code, int):
        _end(code or 0)
    sys.exit(code)


def _standard(fd: int, mode: str, **how: Any) -> Any:
    return open(fd, mode, closefd=False, **how)


def _end(code: int) -> None:
    """As an interpreter ends, but for freeing each module, which would copy half of the template's memory."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    _prctl(_SET_NAME, ctypes.c_char_p(NAME.encode()))
    sock = socket.socket(fileno=int(sys.argv[1]))
    for name in PRELOADED:
        importlib.import_module(name)
    for name in MODULES:
        sys.modules.pop(name, None)  # or runpy warns of what it runs
    assert "huggingface_hub" not in sys.modules, "it reads HF_ variables as it is imported: see READ_LATE"
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked"
    for each in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        each.atexit = False  # libraries of torch, which take 50 ms at each end
    gc.collect()
    gc.freeze()
    start, fds = _serve(sock)
    # Or a killed pytest would leave its servers. Not of what these start: that must end by itself.
    _prctl(_SET_PDEATHSIG, signal.SIGKILL)
    if start.argv[:1] == ["serve"]:
        start, fds = _nested(fds) or (start, fds)
    _become(start, fds)


# ---------------------------------------------------------------- in who asks for forks


class Template:
    """The connection to a process that forks."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(600)
        self._sock, self._lock = sock, threading.Lock()

    def fork(self, start: Start, fds: list[int]) -> int:
        """The new child of this process."""
        with self._lock:
            # The parent of a process whose parent has ended is the nearest ancestor that has asked for it.
            _prctl(_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self._sock, [json.dumps(start).encode()], fds)
                pid = self._sock.recv(64)
            finally:
                _prctl(_SET_CHILD_SUBREAPER, 0)
        assert pid, "the template has ended"
        return int(pid)

    def close(self) -> None:
        self._sock.close()


class _Templates:
    """The template of this process."""

    template: Template | None = None

    def __call__(self) -> Template:
        if self.template is None:
            here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with there:
                argv = [sys.executable, "-m", "tests.forked", str(there.fileno())]
                process = _Started(
                    argv,
                    pass_fds=[there.fileno()],
                    cwd=ROOT,
                    env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # or numpy has threads as soon as it is imported
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            self.template = Template(here)
            atexit.register(process.wait)
            atexit.register(self.template.close)
        return self.template


_Started = subprocess.Popen
_template = _Templates()
_NAMES = tuple(inspect.signature(_Started._execute_child).parameters)[1:]  # type: ignore[attr-defined]


def _forkable(args: Any, env: Mapping[str, str] | None) -> bool:
    """Whether a command is one of `MODULES`, with variables that say to imports what this process's do.

    Nothing is where there is a GPU: a process in which its driver was asked anything cannot be forked.
    """
    if sys.platform != "linux" or Path("/dev/nvidiactl").exists():
        return False
    if isinstance(args, str) or list(args[:2]) != [sys.executable, "-m"] or args[2] not in MODULES:
        return False
    ours, theirs = os.environ, os.environ if env is None else env
    changed = {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)}
    return all(name.startswith((*READ_LATE, "OPENAI_", "NO_PROXY")) or _same_path(name, theirs) for name in changed)


def _same_path(name: str, theirs: Mapping[str, str]) -> bool:
    known = {str(ROOT / "src"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    return name == "PYTHONPATH" and set(theirs.get(name, "").split(os.pathsep)) <= known


class Popen(_Started):  # type: ignore[type-arg]
    """A `subprocess.Popen` that forks what can be forked."""

    def _execute_child(self, *given: Any) -> None:
        said = dict(zip(_NAMES, given, strict=True))
        if not _forkable(said["args"], said["env"]):
            super()._execute_child(*given)  # type: ignore[misc]
            return
        ends = [said[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        fds = [own if fd == -1 else fd for own, fd in enumerate(ends)] + list(said["pass_fds"])
        _, _, module, *argv = map(str, said["args"])
        env = os.environ if said["env"] is None else said["env"]
        cwd = os.fspath(said["cwd"] or os.getcwd())
        start = Start(module, argv, cwd, dict(env), said["start_new_session"], [0, 1, 2, *said["pass_fds"]])
        try:
            self.pid = _template().fork(start, fds)
        finally:
            pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            self._close_pipe_fds(*(said[name] for name in pipes))  # type: ignore[attr-defined]
        self._child_created = True


def runs(pid: int | str, module: str) -> bool:
    """Whether a process is `python -m` of a module with this last name, started or forked."""
    process = Path(f"/proc/{pid}")
    return process.joinpath("comm").read_text().strip() == module or module in process.joinpath("cmdline").read_text()


@contextmanager
def forking() -> Iterator[None]:
    """Inside, what this process starts is forked if it can be."""
    before, subprocess.Popen = subprocess.Popen, Popen  # type: ignore[misc]
    try:
        yield
    finally:
        subprocess.Popen = before  # type: ignore[misc]


if __name__ == "__main__":
    main()
