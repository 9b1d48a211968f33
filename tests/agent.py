"""A server whose model uses tools as an agent does: `python -m tests.agent serve`.

It calls two tools, one after the other, by the names that the client's tools have, and then says so; structures bind
it. No weights run, since the prompts of agents have tens of thousands of tokens. The engine's process is this module
too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from quire.assembly.engine_child import main as child
from quire.assembly.server import serve
from quire.assembly.text import build_text
from quire.config import Settings
from quire.engine.executor import Executor
from quire.executors.synthetic import FREE, SyntheticExecutor, SyntheticHandle
from quire.scheduler.plan import Mask, Plan, Result
from quire.scheduler.step_time import StepCost
from quire.tokenization.tokenizer import Tokenizer

CONTEXT = 1 << 17
SLOW = StepCost(base=0.002)
"""Of steps with an answer of great length: it takes minutes, so that a slow client leaves before its end."""
SAYS = "It is done."
RESULT = "<tool_response>"
COMMAND = "echo written by a scripted model > made.txt"

_SHELL = [{"command": "ls", "description": "List"}, {"command": COMMAND, "description": "Write"}]
_SIMPLE_SHELL = [{"command": "ls"}, {"command": COMMAND}]
CALLS: Mapping[str, list[dict[str, Any]]] = {
    "exec_command": [{"cmd": "ls"}, {"cmd": COMMAND}],
    "weather": [{"city": "Rome"}, {"city": "Paris"}],
    "Bash": _SHELL,
    "bash": _SHELL,
    "run_shell_command": [{**call, "is_background": False} for call in _SHELL],
    "run_commands": [{"commands": [call["command"]]} for call in _SHELL],
    "shell": _SIMPLE_SHELL,
}
"""The arguments of the two calls, by the name of a tool, such as those that agents have for commands."""

ON_AND_ON = "Count to a million."
AS_JSON = "Answer with an object."
JUST_SAY = "Only say so."
"""Prompts that are not answered with calls: the first at great length, the second with an object of a city."""


def answer(prompt: str) -> str:
    """What the model writes next: a call for each result that is missing, then text."""
    if ON_AND_ON in prompt:
        return " and on" * 20_000
    if AS_JSON in prompt:
        by_tool = '"name": "StructuredOutput"' in prompt  # as Claude Code asks for objects
        call = {"name": "StructuredOutput", "arguments": {"city": "Rome"}}
        said = f"<tool_call>\n{json.dumps(call)}\n</tool_call>" if by_tool else '{"city": "Rome"}'
        return SAYS if by_tool and RESULT in prompt else said
    if JUST_SAY in prompt:
        return SAYS
    for name, arguments in CALLS.items():
        if f'"name": "{name}"' in prompt and (done := prompt.count(RESULT)) < len(arguments):
            call = {"name": name, "arguments": arguments[done]}
            return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    return SAYS


class Scripted(SyntheticExecutor):
    """A row's tokens are those of `answer`, but for those that its mask forbids."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        super().__init__(pages=4 * CONTEXT // 16, max_model_len=CONTEXT, vocab_size=vocab_size)
        self.description = replace(self.description, supports_masks=True)
        self._tokenizer = tokenizer
        self._scripts: dict[int, tuple[int, tuple[int, ...]]] = {}

    def launch(self, plan: Plan) -> Bound:
        """See Executor."""
        for opened in plan.new_sequences:
            prompt = tuple(opened.tokens[: opened.prompt_length])
            said = self._tokenizer.encode(answer(self._tokenizer.decode(prompt)), add_special_tokens=False)
            self._scripts[opened.row] = opened.prompt_length, (*said, min(self._tokenizer.eos))
        at_length = any(len(self._scripts[span.row][1]) > 10_000 for span in plan.spans)
        self.cost = SLOW if at_length else FREE
        made = super().launch(plan)
        for tokens, span in zip(made.tokens, plan.spans, strict=True):
            if tokens:
                begin, script = self._scripts[span.row]
                tokens[0] = script[min(self.lengths[span.row] - begin, len(script) - 1)]
        return Bound(made, plan)


class Bound(SyntheticHandle):
    """A step whose masked tokens are replaced by the first that their masks allow."""

    def __init__(self, made: SyntheticHandle, plan: Plan) -> None:
        super().__init__(made.clock, made.done, made.tokens, made.logprobs)
        self._masked = plan.masked_spans

    def sample(self, masks: Sequence[Sequence[Mask]]) -> None:
        """See StepHandle."""
        for span, [mask] in zip(self._masked, masks, strict=True):
            if mask is None:
                continue
            allowed = int.from_bytes(mask, "little")
            if not allowed >> self.tokens[span][0] & 1:
                self.tokens[span][0] = (allowed & -allowed).bit_length() - 1

    def result(self) -> Result:
        """See StepHandle."""
        made = super().result()
        return Result(made.tokens, [[] for _ in self._masked], made.logprobs)


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
