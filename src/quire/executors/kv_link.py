"""A connection between a prefill engine and a decode engine: a handshake by a shared secret, and frames.

Both sides prove that they know the secret, without sending it, and derive a key for each direction. Each frame has an
HMAC of its number, its header and the digests of its payload's pieces, which threads make: what is changed, repeated,
left out or added ends the connection. Without a secret anyone could make an HMAC, so that pieces have a CRC-32, which
shows faults at a third of the cost. Nothing is encrypted. Before a peer is known, a few fixed bytes are read of it;
afterwards no frame is larger than a bound, and a block goes straight to where it is kept.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import select
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from enum import IntEnum
from typing import NamedTuple

from quire.errors import QuireError

MAGIC = b"quire\0pd"
VERSION = 2
_HELLO = struct.Struct("<8sH32s")
"""Magic, version, a nonce."""
_HEAD = struct.Struct("<BQII")
"""Kind, number of the request, number of the block, bytes of the payload."""
_COUNT = struct.Struct("<Q")
_DIGEST = 32
PIECE = 512 << 10
"""Bytes of a payload that have a digest of their own."""
HASHERS = 4
"""Threads of a connection that make digests: SHA-256 takes a core for each 1 or 2 GB/s."""
MAX_ABOUT = 1 << 16
"""Bytes of what the engines have in common."""
MAX_PREFILL = 8 << 20
"""Bytes of a prompt: 1.6 million tokens."""
MAX_REASON = 32


class Kind(IntEnum):
    """What a frame is."""

    ABOUT = 1
    PREFILL = 2
    CANCEL = 3
    BLOCK = 4
    FAILED = 5


class Head(NamedTuple):
    """The header of a frame. number: of the request. block: of the block. size: bytes of the payload."""

    kind: int
    number: int
    block: int
    size: int


class LinkLost(QuireError):
    """The connection is of no use. reason: closed, timeout, secret, version, fingerprint, format or checksum. detail:
    more of it, for the log."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail or f"the connection ended: {reason}")
        self.reason = reason


def _sha256(piece: memoryview) -> bytes:
    return hashlib.sha256(piece).digest()


def _crc32(piece: memoryview) -> bytes:
    return zlib.crc32(piece).to_bytes(4, "big")


class Link:
    """An authenticated connection. Any thread may send while one receives. timeout: seconds for a frame that has begun,
    either way. secret: whether others cannot know the keys."""

    def __init__(self, sock: socket.socket, out_key: bytes, in_key: bytes, timeout: float, *, secret: bool) -> None:
        # Two objects, so that neither thread changes the time that the other waits; both stay non-blocking below.
        self._in, self._out = sock, sock.dup()
        self._keys = out_key, in_key
        self._sent = self._received = 0
        self._digest_of: Callable[[memoryview], bytes] = _sha256 if secret else _crc32
        self._hashers = ThreadPoolExecutor(HASHERS, "quire-kv-hash")
        self.timeout = timeout
        self._sending, self._ending = threading.Lock(), threading.Lock()
        self._closed = False

    def send(self, kind: Kind, number: int = 0, block: int = 0, payload: bytes | memoryview = b"") -> None:
        """Send a frame. Raises LinkLost, also where it has been closed."""
        view = memoryview(payload).cast("B")
        head = _HEAD.pack(kind, number, block, len(view))
        with self._sending:
            if self._closed:
                raise LinkLost("closed")
            self._send(head, view)

    def _send(self, head: bytes, view: memoryview) -> None:
        digest = hmac.new(self._keys[0], _COUNT.pack(self._sent) + head, "sha256")
        self._update(digest, view)
        self._sent += 1
        try:
            self._out.settimeout(self.timeout)
            for part in (head, view, digest.digest()):
                self._out.sendall(part)
        except OSError as error:
            raise LinkLost("timeout" if isinstance(error, TimeoutError) else "closed") from error

    def _update(self, digest: hmac.HMAC, view: memoryview) -> None:
        """Add a payload, or whole pieces of one."""
        pieces = [view[at : at + PIECE] for at in range(0, len(view), PIECE)]
        made = map(self._digest_of, pieces) if len(pieces) < 2 else self._hashers.map(self._digest_of, pieces)
        digest.update(b"".join(made))

    def wait(self, seconds: float | None, wake: int | None = None) -> bool:
        """Whether a frame begins within `seconds`, or before the descriptor `wake` can be read; None: without limit."""
        poll = select.poll()
        poll.register(self._in, select.POLLIN)
        if wake is not None:
            poll.register(wake, select.POLLIN)
        ready = poll.poll(None if seconds is None else max(0.0, seconds) * 1e3)
        return any(fd != wake for fd, _ in ready)

    def head(self) -> Head:
        """The header of the next frame, whose payload is read by `payload`, at once. Raises LinkLost."""
        self._deadline = time.monotonic() + self.timeout
        raw = bytearray(_HEAD.size)
        _read(self._in, memoryview(raw), self._deadline)
        self._digest = hmac.new(self._keys[1], _COUNT.pack(self._received) + raw, "sha256")
        self._received += 1
        return Head(*_HEAD.unpack(raw))

    def payload(self, head: Head, most: int) -> bytes:
        """The payload of a frame of at most `most` bytes. Raises LinkLost for a larger one, before it is read."""
        if head.size > most:
            raise LinkLost("format")
        into = bytearray(head.size)
        self.payload_into(memoryview(into))
        return bytes(into)

    def payload_into(self, view: memoryview) -> None:
        """Read the payload into `view`, of just its size. Raises LinkLost; then what was written is of no use."""
        _read(self._in, view, self._deadline)
        self._update(self._digest, view)
        found = bytearray(_DIGEST)
        _read(self._in, memoryview(found), self._deadline)
        if not hmac.compare_digest(self._digest.digest(), found):
            raise LinkLost("checksum")

    def discard(self, head: Head) -> None:
        """Read a payload that has no place any more."""
        scratch = memoryview(bytearray(min(head.size, PIECE)))
        for left in range(head.size, 0, -len(scratch)):
            piece = scratch[:left]
            _read(self._in, piece, self._deadline)
            self._update(self._digest, piece)
        self.payload_into(scratch[:0])

    def shutdown(self) -> None:
        """End it, from any thread: threads that send or receive raise LinkLost."""
        with self._ending, suppress(OSError):
            if not self._closed:
                self._in.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Free it, once a thread that sends has heard of its end; no thread may receive any more."""
        self.shutdown()
        # A descriptor that is closed under a thread that writes may be another file's by then.
        with self._sending, self._ending:
            self._closed = True
            self._hashers.shutdown(wait=False)
            self._in.close()
            self._out.close()


def _read(sock: socket.socket, view: memoryview, deadline: float) -> None:
    """Fill `view` by then. Raises LinkLost."""
    done = 0
    while done < len(view):
        left = deadline - time.monotonic()
        if left <= 0:
            raise LinkLost("timeout")
        try:
            sock.settimeout(left)
            got = sock.recv_into(view[done:])
        except OSError as error:
            raise LinkLost("timeout" if isinstance(error, TimeoutError) else "closed") from error
        if not got:
            raise LinkLost("closed")
        done += got


def _sent(sock: socket.socket, data: bytes, timeout: float) -> None:
    try:
        sock.settimeout(timeout)
        sock.sendall(data)
    except OSError as error:
        raise LinkLost("closed") from error


def _hello(sock: socket.socket, deadline: float) -> bytes:
    """The other side's nonce."""
    raw = bytearray(_HELLO.size)
    _read(sock, memoryview(raw), deadline)
    magic, version, nonce = _HELLO.unpack(raw)
    if magic != MAGIC:
        raise LinkLost("format", "what answers there is not an engine of a prefill/decode split")
    if version != VERSION:
        raise LinkLost("version", f"it speaks version {version} of the protocol, this one {VERSION}: upgrade either")
    return bytes(nonce)


def _proof(secret: bytes, label: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, label + nonces, "sha256")


def accept(sock: socket.socket, secret: bytes, about: dict[str, str], timeout: float) -> Link:
    """The side that was connected to. about: what both must have in common. Raises LinkLost, within `timeout`."""
    deadline = time.monotonic() + timeout
    mine = secrets.token_bytes(32)
    _sent(sock, _HELLO.pack(MAGIC, VERSION, mine), timeout)
    nonces = mine + _hello(sock, deadline)
    proof = bytearray(_DIGEST)
    _read(sock, memoryview(proof), deadline)
    if not hmac.compare_digest(proof, _proof(secret, b"client", nonces)):
        raise LinkLost("secret", "it does not know the secret")
    _sent(sock, _proof(secret, b"server", nonces), timeout)
    keys = _proof(secret, b"to client", nonces), _proof(secret, b"to server", nonces)
    link = Link(sock, *keys, timeout, secret=bool(secret))
    _agree(link, about)
    return link


def connect(sock: socket.socket, secret: bytes, about: dict[str, str], timeout: float) -> Link:
    """The side that connects. Raises LinkLost, within `timeout`."""
    deadline = time.monotonic() + timeout
    theirs = _hello(sock, deadline)
    mine = secrets.token_bytes(32)
    nonces = theirs + mine
    _sent(sock, _HELLO.pack(MAGIC, VERSION, mine) + _proof(secret, b"client", nonces), timeout)
    proof = bytearray(_DIGEST)
    try:
        _read(sock, memoryview(proof), deadline)
    except LinkLost as error:
        if error.reason != "closed":
            raise
        raise LinkLost(
            "secret", "it ended the connection: the secrets differ, or it has too many connections"
        ) from None
    if not hmac.compare_digest(proof, _proof(secret, b"server", nonces)):
        raise LinkLost("secret", "it does not know the secret")
    keys = _proof(secret, b"to server", nonces), _proof(secret, b"to client", nonces)
    link = Link(sock, *keys, timeout, secret=bool(secret))
    _agree(link, about)
    return link


def _agree(link: Link, about: dict[str, str]) -> None:
    """Raise LinkLost, and free the link, unless the blocks of both sides are of the same."""
    try:
        _compare(about, _exchange(link, about))
    except BaseException:
        link.close()
        raise


def _exchange(link: Link, about: dict[str, str]) -> dict[str, str]:
    """Send what this side's blocks are of, and return what the other's are of."""
    link.send(Kind.ABOUT, payload=json.dumps(about).encode())
    head = link.head()
    if head.kind != Kind.ABOUT:
        raise LinkLost("format")
    try:
        found = json.loads(link.payload(head, MAX_ABOUT))
        return {str(name): str(value) for name, value in found.items()}
    except (ValueError, AttributeError, RecursionError) as error:
        raise LinkLost("format") from error


def _compare(mine: dict[str, str], theirs: dict[str, str]) -> None:
    """Raise LinkLost where K/V of the two sides would not be the same bits, with what differs."""
    differing = [name for name in sorted({*mine, *theirs}) if mine.get(name) != theirs.get(name)]
    if differing:
        what = "; ".join(
            f"{name}: {theirs.get(name, '')[:80]!r} there, {mine.get(name)!r} here" for name in differing[:3]
        )
        raise LinkLost("fingerprint", f"its K/V differs in {', '.join(differing)[:200]} ({what})")
