"""Writes docs/reference/parsers.md from the registries of parsers: `make docs`."""

from __future__ import annotations

from quire.parsers.reasoning import THOUGHTS
from quire.parsers.tools.styles import STYLES, Nested, Notation, Style, TaggedStyle
from quire.server.calls import EFFORTS

_TOOLS = """# Parsers

Written by `make docs` from `src/quire/parsers`; do not edit. The names are those of vLLM; `nemotron_json` is
that of NVIDIA's plugin for it, and `gemma`, `cohere_command_r`, `functionary_v3_1`, `functionary_v3_2`,
`solar_open` and `apriel` are our own. `functionary_v3_2`, `inkling`, `muse`, `muse_glimmer` and `solar_open` go
together with the reasoning parser of the same name, as `openai` does with `openai_gptoss`. Of vLLM 0.33's, `hf` and
`beam` are not here: they read a response template that a checkpoint brings; name the parser of the model's family. The
marks of `hy_v3` and `hy_v4` have the suffix that the checkpoint's vocabulary has.

## Tool calls

`--tool-call-parser`; `auto` chooses by the chat template. In all of these formats a forced call binds name and
arguments; `strict: true` binds the calls that a model chooses to make where the last column says so.

| name | models | arguments | strict |
|---|---|---|---|
"""

_REASONING = """
## Reasoning

`--reasoning-parser`; `auto` chooses by the chat template. Where the prompt does not show whether thoughts come first,
the last column says what is expected.

| name | models | begins with | ends with | expected |
|---|---|---|---|---|
"""

_EFFORT = """
## Effort

`reasoning_effort` is given to the chat template if the template reads that name. Otherwise it is a
`thinking_token_budget`, unless the request has one of its own:

| `reasoning_effort` | most tokens of thoughts |
|---|---|
"""


def _arguments(style: Style) -> str:
    if not isinstance(style, TaggedStyle):
        python = "python" in style.marks.values() or not style.marks
        return "Python or JSON" if python else "JSON"
    if style.form is None:
        return "JSON"
    if isinstance(style.form, Nested):
        return "elements within elements"
    return "Gemma's notation" if isinstance(style.form, Notation) else "an element for each"


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|")


def markdown() -> str:
    """The page."""
    lines = [
        f"| `{name}` | {style.models} | {_arguments(style)} | {'yes' if style.before and not style.bare else 'no'} |"
        for name, style in STYLES.items()
    ]
    thoughts = [
        f"| `{name}` | {style.models} | {_code(style.opens[0])} | {_code(style.closes[0])} "
        f"| {'thoughts' if style.first == 'open' else 'either'} |"
        if style.opens
        else f"| `{name}` | {style.models} | | | an answer |"
        for name, style in THOUGHTS.items()
    ]
    efforts = [f"| `{effort}` | {'any number' if most < 0 else most} |" for effort, most in EFFORTS.items()]
    return (
        _TOOLS + "\n".join(lines) + "\n" + _REASONING + "\n".join(thoughts) + "\n" + _EFFORT + "\n".join(efforts) + "\n"
    )


if __name__ == "__main__":
    print(markdown(), end="")
