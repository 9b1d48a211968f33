"""An upstream of fixed speed: `python -m benchmarks.stub PORT FIRST_MS EACH_MS`.

Each answer gets its first token after FIRST_MS and one more every EACH_MS, by its own clock, whatever the load.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import uvloop

_EVENT = (
    b'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"stub","choices":[{"index":0,"text":" word"'
)
_EVENT += b',"logprobs":null,"finish_reason":null,"stop_reason":null}],"usage":null}\n\n'
_CHUNK = b"%x\r\n%s\r\n" % (len(_EVENT), _EVENT)
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


class Stub:
    """first, each: seconds."""

    def __init__(self, first: float, each: float) -> None:
        self.first, self.each = first, each

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                if head.startswith(b"get"):
                    known = b'{"object":"list","data":[{"id":"stub","object":"model"}]}'
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(known), known))
                    continue
                size = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
                asked = json.loads(await reader.readexactly(size))
                await self._answer(writer, asked["max_tokens"], len(asked["prompt"]))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, new: int, prompt: int) -> None:
        due = time.monotonic() + self.first
        writer.write(_HEAD)
        for _ in range(new):
            await asyncio.sleep(due - time.monotonic())
            writer.write(_CHUNK)
            due += self.each
        usage = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
        last = b"data: " + json.dumps({"choices": [], "usage": usage}, separators=(",", ":")).encode() + b"\n\n"
        last += b"data: [DONE]\n\n"
        writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(last), last))
        await writer.drain()


async def main(port: int, first: float, each: float) -> None:
    server = await asyncio.start_server(Stub(first, each).serve, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), float(sys.argv[2]) / 1e3, float(sys.argv[3]) / 1e3))
