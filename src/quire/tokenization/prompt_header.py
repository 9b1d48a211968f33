"""Lines of a conversation's first message that change with every request, found by a pattern and taken out.

Agents put such a line (a billing header, the time) at the front of the system prompt, and as every token behind it
depends on it, no prefix is ever found in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

from llguidance import LLMatcher, LLTokenizer

from quire.errors import InvalidConfig

HeaderOutcome = Literal["removed", "too_long", "whole"]
"""What became of lines that match: removed; or kept, as they have more than MAX_REMOVED characters, or are all that the
message says."""

MAX_EXAMINED = 1 << 14
"""Characters at the beginning of a message that are searched."""

MAX_REMOVED = 512
"""Most characters that are taken out."""

_ROLES = ("system", "developer", "user")


class Removal(NamedTuple):
    """Messages without their header, what became of it (None: there is none), and the lines that were taken out."""

    messages: list[dict[str, Any]]
    outcome: HeaderOutcome | None = None
    text: str = ""

    def headers(self) -> dict[str, str]:
        """The header field of an answer that says what became of it; the text percent-encoded."""
        if self.outcome is None:
            return {}
        value = f"removed={quote(self.text, safe=' :;=,./')}" if self.outcome == "removed" else f"kept={self.outcome}"
        return {"x-quire-prompt-header": value}


NO_REMOVAL = Removal([])
"""Of a prompt that is no conversation."""


@dataclass(frozen=True)
class PromptHeader:
    """Finds the lines that `pattern` matches as a whole, by llguidance's regular expressions: those of Rust without
    look-around, in time linear in the line. An empty pattern matches no line. May be used from any thread.

    Raises InvalidConfig for a pattern that is no such expression, or that matches an empty line.
    """

    pattern: str = ""
    _matcher: LLMatcher | None = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        if not (pattern := self.pattern):
            return
        # An alternation is to be one expression, and an anchor would be redundant: lines are matched as a whole.
        grammar = LLMatcher.grammar_from_regex(f"(?:{pattern})")
        matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
        if matcher.is_error() or "\n" in pattern:
            why = "it has a line break" if "\n" in pattern else _reason(matcher.get_error())
            raise InvalidConfig(f"prompt_header: not a valid regular expression: {why}", param="prompt_header")
        if matcher.is_accepting():
            raise InvalidConfig(
                "prompt_header: the pattern matches an empty line, so it matches any line: begin it with the "
                "header's name",
                param="prompt_header",
            )
        object.__setattr__(self, "_matcher", matcher)

    def remove(self, messages: Sequence[Mapping[str, Any]]) -> Removal:
        """The messages without the lines of the first one that match, which are at most MAX_REMOVED characters.

        Only a message of the system, the developer or the user is searched. What is no valid message stays as it is.
        """
        kept = [dict(message) for message in messages]
        if self._matcher is None or not kept or kept[0].get("role") not in _ROLES:
            return Removal(kept)
        content = kept[0].get("content")
        texts = list(_texts(content))
        split = self._split(texts)
        removed = "\n".join(line for _, lines in split for line in lines)
        if not removed:
            return Removal(kept)
        if len(removed) > MAX_REMOVED:
            return Removal(kept, "too_long")
        if not any(text.strip() for text, _ in split):
            return Removal(kept, "whole")
        if isinstance(content, str):
            kept[0]["content"] = split[0][0]
        else:
            left = iter(split)
            kept[0]["content"] = [part for part in (_without(part, left) for part in content or ()) if part is not None]
        return Removal(kept, "removed", removed)

    def _split(self, texts: Sequence[str]) -> list[tuple[str, list[str]]]:
        """For each text, what is left of it, and the lines that match."""
        assert self._matcher is not None
        matcher, room, split = self._matcher.deep_copy(), MAX_EXAMINED, []
        for text in texts:
            lines = text[:room].split("\n")
            whole = lines if len(text) <= room else lines[:-1]
            taken = {i for i, line in enumerate(whole) if _matches(matcher, line)}
            left = [line for i, line in enumerate(lines) if i not in taken]
            split.append(("\n".join(left) + text[room:], [lines[i] for i in sorted(taken)]))
            room = max(0, room - len(text))
        return split


def _matches(matcher: LLMatcher, line: str) -> bool:
    """Whether a line matches as a whole."""
    if not line or len(line) > 2 * MAX_REMOVED:
        return False
    matcher.reset()
    data = line.removesuffix("\r").encode("utf-8", "surrogatepass")
    found = matcher.try_consume_tokens(list(data)) == len(data) and matcher.is_accepting()
    return bool(found and not matcher.is_error())


def _texts(content: Any) -> Iterator[str]:
    """The texts of a message."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        yield from (part["text"] for part in content if _is_text(part))


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def _without(part: Any, left: Iterator[tuple[str, list[str]]]) -> Any:
    """A part of a message with what is left of its text; None where that is nothing."""
    if not _is_text(part):
        return part
    text, taken = next(left)
    if not taken:
        return part
    return {**part, "text": text} if text else None


def _reason(error: str) -> str:
    """The library's message, without the grammar around the pattern."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    named = next((line for line in lines if line.startswith("error:")), lines[0] if lines else "")
    return named.removeprefix("error:").strip()
