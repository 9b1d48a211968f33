"""Uploads as browsers and clients send them (multipart/form-data, RFC 7578), read as they come."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from email.message import Message

from quire.errors import InvalidRequest, TooLarge

_NAME = re.compile(r'(?:^|;)\s*(name|filename)="((?:[^"\\]|\\.)*)"')
_MOST_HEAD = 4096
_MOST_FIELD = 4096
_MOST_PARTS = 16


Sink = Callable[[bytes], object]
"""Where a file goes, piece by piece."""


def boundary(content_type: str) -> bytes:
    """Raises InvalidRequest if the body is no upload."""
    message = Message()
    message["content-type"] = content_type
    mark = message.get_param("boundary")
    if message.get_content_type() != "multipart/form-data" or not isinstance(mark, str) or not 0 < len(mark) <= 70:
        raise InvalidRequest("send the file as multipart/form-data, with a boundary", code="invalid_upload")
    return b"\r\n--" + mark.encode("latin-1", "replace")


class Form:
    """One upload in the making. `fields` are its texts; the part called `file` goes to what `opens` returns.

    most: bytes of the file.
    """

    def __init__(self, mark: bytes, opens: Callable[[str], Sink], most: int) -> None:
        self.fields: dict[str, str] = {}
        self._mark, self._opens, self._left = mark, opens, most
        self._data = bytearray(b"\r\n")  # so that the first mark looks like the others
        self._sink: Sink | None = None
        self._name: str | None = None
        self._text = bytearray()
        self._parts = 0
        self._over = False

    async def read(self, stream: AsyncIterator[bytes]) -> None:
        """Raises InvalidRequest for a broken upload, and TooLarge as soon as the file is."""
        async for data in stream:
            if not self._over:
                self._data += data
                while self._step():
                    pass
        if not self._over:
            raise _broken("it ends in the middle")

    def _step(self) -> bool:
        """Take what is certain. Whether to look again."""
        mark = len(self._mark)
        at = self._data.find(self._mark)
        self._take(at if at >= 0 else len(self._data) - mark)
        if at < 0:
            return False
        self._part_ends()
        if self._data[mark : mark + 2] == b"--":
            self._over = True
            return False
        end = self._data.find(b"\r\n\r\n", mark)
        if end < 0:
            if len(self._data) > _MOST_HEAD:
                raise _broken("a part has no end of its headers")
            return False
        self._begin(self._data[mark:end].decode("utf-8", "replace"))
        del self._data[: end + 4]
        return True

    def _take(self, size: int) -> None:
        if size <= 0:
            return
        data = bytes(self._data[:size])
        del self._data[:size]
        if self._sink is not None:
            self._left -= size
            if self._left < 0:
                raise TooLarge("the file is larger than this server takes", param="file", code="file_too_large")
            self._sink(data)
        elif self._name is not None:
            self._text += data
            if len(self._text) > _MOST_FIELD:
                raise TooLarge(f"the field {self._name[:64]!r} is too long", param=self._name[:64])

    def _part_ends(self) -> None:
        if self._name is not None and self._sink is None:
            self.fields[self._name] = self._text.decode("utf-8", "replace")
        self._name, self._sink = None, None
        self._text.clear()

    def _begin(self, head: str) -> None:
        self._parts += 1
        line = next((x for x in head.split("\r\n") if x.lower().startswith("content-disposition:")), "")
        found = dict(_NAME.findall(line.partition(":")[2]))
        if "name" not in found or self._parts > _MOST_PARTS or found["name"] in self.fields:
            raise _broken("its parts need names of their own, and must be few")
        if found["name"] == "file":
            self.fields["file"] = found.get("filename", "")
            self._sink = self._opens(found.get("filename", ""))
        self._name = found["name"]


def _broken(why: str) -> InvalidRequest:
    return InvalidRequest(f"the upload cannot be read: {why}", param="file", code="invalid_upload")
