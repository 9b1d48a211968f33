"""Grammars are tried in a process of its own: `python -m quire.structured_output.trial FD`.

The library's compiler is native and recursive: a chain of a few thousand rules or references overflows its stack, which
ends the process that it runs in, and others keep it busy for minutes. So a process that has nothing to lose reads and
compiles a structure first, over the special tokens of the model's vocabulary and single bytes, since neither depends on
other tokens. What it survives is compiled by the engine.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import NamedTuple

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from quire.errors import InvalidRequest
from quire.structured_output.source import LIMITS, grammar_source
from quire.types import StructuredOutputsParams

TIMEOUT = 10.0
"""Seconds that a structure may take."""

MEMORY = 4 << 30
"""Bytes of address space that the process may have."""


Reply = str | tuple[str, str | None, str | None]
"""The source of a grammar, or what a refusal says, with its field and code."""


class FewTokens(NamedTuple):
    """What of a vocabulary grammars name: its size, those that end a text, and the bytes of special tokens."""

    size: int
    eos: list[int]
    special: dict[int, bytes]


class Trials:
    """What `source.grammar_source` returns, for structures that can be compiled. Used from any number of threads, each
    with a process, which begins with its first structure."""

    def __init__(self, timeout: float = TIMEOUT, start: Callable[[float, FewTokens], Trial] | None = None) -> None:
        self._timeout = timeout
        self._start = start or Trial
        self._idle: list[Trial] = []
        self._lock = threading.Lock()

    def __call__(self, structure: StructuredOutputsParams, tokens: Callable[[], FewTokens]) -> str:
        """Raises InvalidRequest naming the request's field. tokens: called where a process is started."""
        killed = 0
        # Twice, since others may kill a process as well.
        for _ in range(2):
            try:
                trial = self._take(tokens)
            except OSError:
                break
            reply = trial(structure)
            if not isinstance(reply, int):
                with self._lock:
                    self._idle.append(trial)
                return _source_of(reply)
            killed = -reply
            if killed in (signal.SIGALRM, 0):
                break
        if killed <= 0:
            # Processes cannot be started here, which is no reason to refuse.
            return grammar_source(structure)
        slow = f"compiling it takes longer than {self._timeout:g} s: simplify it"
        why = slow if killed == signal.SIGALRM else "compiling it takes too much memory, or nests too deep: simplify it"
        raise InvalidRequest(f"{structure.param}: {why}", param=structure.param)

    def _take(self, tokens: Callable[[], FewTokens]) -> Trial:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return self._start(self._timeout, tokens())

    def close(self) -> None:
        """End the processes that wait for structures."""
        with self._lock:
            idle, self._idle = self._idle, []
        for trial in idle:
            trial.close()


class Trial:
    """One process, and the connection to it. It ends when the connection is closed."""

    def __init__(self, timeout: float, tokens: FewTokens) -> None:
        self._connection, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", __spec__.name, str(theirs.fileno()), str(timeout)],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self.close = weakref.finalize(self, _end, self._connection, self.process)
        with suppress(OSError):
            self._connection.send(tokens)

    def __call__(self, structure: StructuredOutputsParams) -> Reply | int:
        """What it says, or the exit code of a process that has ended: negative, the number of the signal."""
        try:
            self._connection.send(structure)
            reply: Reply = self._connection.recv()
        except (EOFError, OSError):
            code = self.process.wait()
            self.close()
            return code
        return reply


def _source_of(reply: Reply) -> str:
    if isinstance(reply, str):
        return reply
    why, param, code = reply
    raise InvalidRequest(why, param=param, code=code)


def _end(connection: Connection, process: subprocess.Popen[bytes]) -> None:
    connection.close()
    process.kill()
    process.wait()


class _Tokens:
    """The interface that the library expects of a tokenizer: special tokens at their places, and bytes elsewhere."""

    def __init__(self, few: FewTokens) -> None:
        taken = {*few.special, *few.eos}
        free = (token for token in range(few.size) if token not in taken)
        self._ids = dict(zip(range(256), free, strict=False))
        self.tokens = [b""] * few.size
        for byte, token in self._ids.items():
            self.tokens[token] = bytes([byte])
        for token, piece in few.special.items():
            self.tokens[token] = piece
        self.bos_token_id = None
        self.eos_token_id = min(few.eos)
        self.special_token_ids = sorted(few.special)

    def __call__(self, text: bytes) -> list[int]:
        return [self._ids[byte] for byte in text if byte in self._ids]


def main() -> None:
    """Answer until the other side goes."""
    connection, timeout = Connection(int(sys.argv[1])), float(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(EOFError, ConnectionError):
        few: FewTokens = connection.recv()
        vocabulary = LLTokenizer(TokenizerWrapper(_Tokens(few)), eos_token=few.eos)
        while True:
            structure = connection.recv()
            # Ends the process whatever it does, also while the library runs.
            signal.setitimer(signal.ITIMER_REAL, timeout)
            reply = _reply(structure, vocabulary)
            signal.setitimer(signal.ITIMER_REAL, 0)
            connection.send(reply)


def _reply(structure: StructuredOutputsParams, vocabulary: LLTokenizer) -> Reply:
    try:
        source = grammar_source(structure)
        with suppress(ValueError):  # which the engine will say, of the same source
            LLMatcher(vocabulary, source, log_level=0, limits=LIMITS).compute_bitmask()
    except InvalidRequest as error:
        return str(error), error.param, error.code
    except MemoryError:
        os.abort()
    return source


if __name__ == "__main__":
    main()
