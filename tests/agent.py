"""A server whose model uses tools as an agent does: `python -m tests.agent serve`.

It calls two tools, one after the other, by the names that the client's tools have, and then says so. No weights run,
since the prompts of agents have tens of thousands of tokens. The engine's process is this module too.
"""

from __future__ import annotations

import json
import sys

from quire.assembly.engine_child import main as child
from quire.assembly.server import serve
from quire.assembly.text import build_text
from quire.config import Settings
from quire.engine.executor import Executor
from quire.executors.synthetic import SyntheticExecutor, SyntheticHandle
from quire.scheduler.plan import Plan
from quire.tokenization.tokenizer import Tokenizer

CONTEXT = 1 << 17
SAYS = "I wrote the file."
RESULT = "<tool_response>"
COMMAND = "echo written by a scripted model > made.txt"

CALLS = {
    "exec_command": [{"cmd": "ls"}, {"cmd": COMMAND}],
    "Bash": [{"command": "ls", "description": "List"}, {"command": COMMAND, "description": "Write"}],
}
"""The arguments of the two calls, by the tool that an agent has for commands."""


def answer(prompt: str) -> str:
    """What the model writes next: a call for each result that is missing, then text."""
    for name, arguments in CALLS.items():
        if f'"name": "{name}"' in prompt and (done := prompt.count(RESULT)) < len(arguments):
            call = {"name": name, "arguments": arguments[done]}
            return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    return SAYS


class Scripted(SyntheticExecutor):
    """A row's tokens are those of `answer`, whatever comes after them."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        super().__init__(pages=4 * CONTEXT // 16, max_model_len=CONTEXT, vocab_size=vocab_size)
        self._tokenizer = tokenizer
        self._scripts: dict[int, tuple[int, tuple[int, ...]]] = {}

    def launch(self, plan: Plan) -> SyntheticHandle:
        """See Executor."""
        for opened in plan.new_sequences:
            prompt = tuple(opened.tokens[: opened.prompt_length])
            said = self._tokenizer.encode(answer(self._tokenizer.decode(prompt)), add_special_tokens=False)
            self._scripts[opened.row] = opened.prompt_length, (*said, min(self._tokenizer.eos))
        handle = super().launch(plan)
        for tokens, span in zip(handle.tokens, plan.spans, strict=True):
            if tokens:
                begin, script = self._scripts[span.row]
                tokens[0] = script[min(self.lengths[span.row] - begin, len(script) - 1)]
        return handle


def scripted(executor: Executor) -> Executor:
    size = executor.describe().vocab_size
    executor.close()
    return Scripted(build_text(Settings()).tokenizer, size)


def main() -> int:
    if sys.argv[1] != "serve":
        return child(scripted)
    port = int(sys.argv[sys.argv.index("--port") + 1])
    serve(Settings.of(port=port, load_format="dummy"), child="tests.agent")
    return 0


if __name__ == "__main__":
    sys.exit(main())
