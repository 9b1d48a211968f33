"""Renders templates one after the other, each in a process with little memory and processor time: what becomes of each.

Run as `python -m tests.tokenization.hostile < templates.json`; a line of JSON for each: what was said, or that it died,
and the most memory in MiB that it took above what it had.
"""

from __future__ import annotations

import json
import os
import resource
import sys

from quire.errors import InvalidModel, InvalidRequest
from quire.tokenization.chat_template import ChatTemplate

SECONDS = 60
"""Of processor time: ten times what any template takes, and on an idle machine as on a busy one."""
MEMORY = 2 << 30
MESSAGES = [{"role": "user", "content": "hi"}]


def attempt(source: str) -> str:
    try:
        return "made " + ChatTemplate(source).render(MESSAGES)[:100]
    except (InvalidRequest, InvalidModel) as error:
        return str(error)


def alone(source: str) -> dict[str, object]:
    """`attempt` in a process of its own."""
    there, here = os.pipe()
    child = os.fork()
    if not child:
        os.close(there)
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        said = attempt(source)
        more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        os.write(here, json.dumps({"said": said, "mib": more >> 10}).encode())
        os._exit(0)
    os.close(here)
    with os.fdopen(there, "rb") as pipe:
        output = pipe.read()
    _, status = os.waitpid(child, 0)
    made: dict[str, object] = json.loads(output) if output else {"said": f"died of {status}", "mib": 0}
    return made


if __name__ == "__main__":
    for one in json.load(sys.stdin):
        print(json.dumps(alone(one)), flush=True)
