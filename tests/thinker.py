"""A server whose model thinks aloud before it answers: `python -m tests.thinker serve`.

It writes `SAYS` whatever it is asked, as far as masks let it. The engine's process is this module too.
"""

from __future__ import annotations

import sys
from typing import Any, cast

import torch

from quire.assembly.engine_child import main as child
from quire.assembly.server import serve
from quire.assembly.text import build_text
from quire.config import Settings
from quire.engine.executor import Executor
from quire.executors.local import LocalExecutor
from quire.model_runner.row_state import RowState, StepShape
from quire.model_runner.sampling.sampler import Sampled, Sampler

THOUGHT, ANSWER = "I know.", "Yes."
SAYS = f"{THOUGHT}</think>\n\n{ANSWER}"
TEMPLATE = "{% for m in messages %}<|user|>\n{{ m.content }}{% endfor %}<|assistant|><think>\n"


def settings() -> Settings:
    return Settings.of(dtype="float32", port=0, chat_template=TEMPLATE, reasoning_parser="qwen3")


class Scripted:
    """A sampler that prefers the next token of a script to all others."""

    def __init__(self, inner: Sampler, script: tuple[int, ...]) -> None:
        self.inner, self.script, self.vocab_size = inner, script, inner.vocab_size

    def __call__(self, logits: torch.Tensor, rows: RowState, shape: StepShape, masks: Any = ()) -> Sampled:
        written = rows.num_known[shape.sample_row] + shape.sample_offset - rows.prompt_length[shape.sample_row]
        for i, at in enumerate(written.tolist()):
            if at < len(self.script):
                logits[i, self.script[at]] = 1e4
        return self.inner(logits, rows, shape, masks)


def thinking(executor: Executor) -> Executor:
    tokenizer = build_text(settings()).tokenizer
    script = (*tokenizer.encode(SAYS, add_special_tokens=False), min(tokenizer.eos))
    runner = cast(LocalExecutor, executor).runner
    runner.sampler = cast(Sampler, Scripted(runner.sampler, script))
    return executor


def main() -> int:
    if sys.argv[1] != "serve":
        return child(thinking)
    serve(settings(), child="tests.thinker")
    return 0


if __name__ == "__main__":
    sys.exit(main())
