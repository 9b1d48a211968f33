"""Writes docs/reference/configuration.md from the options' fields: `make docs`."""

from __future__ import annotations

from quire.config.option import SHORT, Option
from quire.config.settings import OPTIONS, SECTIONS

HEAD = """# Configuration

Written from the fields of `src/quire/config/settings.py` by `make docs`; do not edit.

Every option has one name. `max_num_seqs` is `--max-num-seqs` on the command line, `QUIRE_MAX_NUM_SEQS` in the
environment, `max-num-seqs` or `max_num_seqs` in a YAML file, and `max_num_seqs` as an argument of `LLM(...)`. Names are
vLLM's where vLLM has the option. Later wins:

    defaults < file (--config FILE.yaml, or QUIRE_CONFIG) < QUIRE_* environment < flags

`quire config` prints the values that result and where each came from. What is unknown is refused, by the nearest
known name, with exit code 2: no option is ignored in silence. Variables that Kubernetes injects for a Service named
`quire` are no options and are passed over: `QUIRE_SERVICE_HOST`, `QUIRE_SERVICE_PORT*`, `QUIRE_PORT_8000_TCP*`, and
`QUIRE_PORT` where its value is `tcp://...`.

A file is a flat list:

```yaml
model: embedded
max-model-len: 1k
max-num-seqs: 32
enable-prefix-caching: true
```

Whole numbers take units: `32k` is 32,000 and `32K` 32,768; `4GB` is 4,000,000,000 and `4GiB` 4,294,967,296. Switches
take `true` and `false` (also `yes`, `on`, `1` and so on); as flags they are `--enforce-eager` and `--no-enforce-eager`.
`auto` is a value: what it becomes is decided when the device and the model are known.
"""

FOOT = """## Options of other servers

What Quire does not have is refused by name, with what to do instead: [vLLM's](vllm.md), of which those whose values
change nothing are taken, and named; [SGLang's, llama.cpp's, TGI's and Ollama's](other-servers.md). A command says it of
all its options at once. Short forms that vLLM has are taken: {short}.
"""


def markdown() -> str:
    """The whole page."""
    parts = [HEAD]
    for section, config in SECTIONS.items():
        rows = [_row(known) for known in OPTIONS.values() if known.section == section]
        about = (config.__doc__ or "").strip()
        parts.append(f"## {section.capitalize()}\n\n{about}\n\n| option | value | default | |\n|---|---|---|---|\n")
        parts[-1] += "\n".join(rows) + "\n"
    parts.append(FOOT.format(short=", ".join(f"`{short}` of {OPTIONS[name].flag}" for name, short in SHORT.items())))
    return "\n".join(parts)


def _row(known: Option) -> str:
    default = known.show(known.default)
    cells = (f"`{known.flag}`", known.wants().removeprefix("must be "), f"`{default}`" if default else "", known.help)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    print(markdown(), end="")
