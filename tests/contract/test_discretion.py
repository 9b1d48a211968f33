"""What is logged: nothing secret, and nothing a client wrote that could pass for the server's own words."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.contract.wire import ask, request, send
from tests.live import serving

SECRET, WRONG = "sk-quire-3f9a-secret", "sk-other-77c1-guess"
FORGED = "INFO:     forged by a client"


def test_neither_keys_nor_forged_lines_reach_the_log(tmp_path: Path) -> None:
    options = ("--api-key", SECRET, "--enable-log-requests", "--uvicorn-log-level", "debug")
    said = {"prompt": f"x\r\n{FORGED}", "model": f"m\n{FORGED}", "user": f"u\n{FORGED}", "max_tokens": 4}

    async def story(port: int) -> list[int]:
        statuses = []
        for key in (SECRET, WRONG):
            for body in (said, {**said, "model": "embedded"}, {**said, f"f\n{FORGED}": 1}, {**said, "stop": FORGED}):
                headers = {"Authorization": f"Bearer {key}", "X-Request-Id": FORGED}
                answer = await ask(port, "POST", "/v1/completions", body, headers=headers)
                statuses.append(answer.status)
        path = "/v1/models/%0d%0a" + FORGED.replace(" ", "%20")
        [answer] = await send(port, request("GET", path, None, {"Authorization": f"Bearer {SECRET}"}))
        await send(port, f"\n{FORGED}\n\r\n\r\n".encode(), hang_up=True)
        return [*statuses, answer.status]

    with serving(tmp_path, *options) as live:
        assert asyncio.run(story(live.port)) == [404, 200, 400, 404, 401, 401, 401, 401, 404]
        log = live.log
    assert SECRET not in log and WRONG not in log
    assert "forged" not in log
    assert all(line.startswith(("INFO:", "DEBUG:", "WARNING:", "ERROR:")) for line in log.splitlines() if line), log
