"""Responses with state on a real server: what the prefix cache saves, and what a killed server leaves."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from tests.live import serving


def test_a_continued_conversation_hits_the_prefix_cache_and_outlives_kill_9(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    options = ("--state-dir", str(folder), "--block-size", "16", "--max-model-len", "1024")
    with serving(tmp_path, *options, ends=-signal.SIGKILL) as live:
        client, made, before = live.openai, None, 0
        for turn in range(4):
            rest: Any = {} if made is None else {"previous_response_id": made.id}
            made = client.responses.create(
                input=f"turn {turn}: a dog and a boat", max_output_tokens=48, temperature=0, **rest
            )
            assert made.usage is not None
            cached = made.usage.input_tokens_details.cached_tokens
            if turn:
                # All of the last turn's prompt, and the answer as far as its text is what the template writes again.
                assert cached >= before // 16 * 16, (turn, cached, before)
            before = made.usage.input_tokens
        assert made is not None
        running = client.responses.create(
            input="go on", background=True, max_output_tokens=900, extra_body={"ignore_eos": True}
        )
        assert running.status in ("queued", "in_progress")
        os.kill(live.process.pid, signal.SIGKILL)
        live.process.wait(60)
    with serving(tmp_path, *options) as live:
        client = live.openai
        assert client.responses.retrieve(made.id).output_text == made.output_text
        lost = client.responses.retrieve(running.id)
        assert lost.status == "failed" and lost.error is not None and "server ended" in lost.error.message
        on = client.responses.create(input="more", previous_response_id=made.id, max_output_tokens=4)
        assert on.usage is not None and on.usage.input_tokens > before
        cancelled = client.responses.create(
            input="go on", background=True, max_output_tokens=900, extra_body={"ignore_eos": True}
        )
        ended = client.responses.cancel(cancelled.id)
        assert ended.status == "cancelled", ended
        deadline = time.monotonic() + 60
        while live.stats()["active_requests"] and time.monotonic() < deadline:
            time.sleep(0.02)
        assert live.stats()["active_requests"] == 0
        assert live.metric("quire:stored_responses") == 7
        assert "a dog and a boat" not in live.log
