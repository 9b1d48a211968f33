"""Splits an answer into reasoning, such as `<think>...</think>`, and content.

The names of parsers are those of vLLM's registry, which has none for `apriel`, `functionary_v3_2` and `solar_open`.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from quire.parsers.parts import PLAIN, Splitter, TextPart, possible
from quire.parsers.suffix import DECLARED, styled
from quire.parsers.tools.tape import Tape
from quire.types import Ahead, StructuredOutputsParams

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelMarks:
    """How the messages of an answer are marked, where thoughts and answer are messages of their own.

    begun: the beginning of a header, where prompts end with it. first: what may follow at the very beginning of an
    answer, within a header that the prompt has begun. heads: what headers begin with; ends: what they end with, which
    may be the whole header. closes: marks that end a message. header: what is one; anything else is content, if `bare`
    without the marks around it. thought: headers of thoughts. call: headers of messages to tools, of which `passed`
    with the name is content, for the tool parser, as is the message's closing mark.
    """

    begun: str = ""
    first: tuple[str, ...] = ()
    heads: tuple[str, ...]
    ends: tuple[str, ...]
    closes: tuple[str, ...]
    header: str = ""
    bare: bool = False
    thought: str = "(?!)"
    call: str = "(?!)"
    passed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThoughtStyle:
    """How the models of one family mark their thoughts.

    models: those that do so, for the documentation. opens, closes: the marks, the usual one first. ends: marks that end
    thoughts, too, and belong to the answer. first: whether answers begin with thoughts where the prompt does not show
    it. special: the marks are special tokens, which decoding omits by default. between, answer: text after the closing
    mark, and before an answer that is no call of a tool. around: marks that may stand around an answer, and belong to
    neither; finish: marks that may follow it. channels: how thoughts and answer are messages of their own, if they are.
    shown: thoughts are content, with their marks.
    """

    name: str
    models: str
    opens: tuple[str, ...] = (OPEN,)
    closes: tuple[str, ...] = (CLOSE,)
    ends: tuple[str, ...] = ()
    first: Ahead = "possible"
    special: bool = False
    between: str = ""
    answer: str = ""
    around: tuple[tuple[str, str], ...] = ()
    finish: tuple[str, ...] = ()
    channels: ChannelMarks | None = None
    shown: bool = False

    def splitter(self, *, inside: bool) -> ThoughtSplitter:
        """A Splitter of reasoning and content. inside: the text begins within a thought, even without a mark."""
        if self.channels is not None:
            return Channels(self.channels, self.opens[0] if inside else self.channels.begun)
        thinking = Thinking(inside=inside, style=self)
        return Shown(thinking, self.opens[0] if inside else "") if self.shown else thinking


_QWEN3 = ThoughtStyle(name="qwen3", models="Qwen 3")
_INKLING = tuple(
    f"<|content_{kind}|>" for kind in ("thinking", "text", "invoke_tool_json", "invoke_tool_text", "tool_error")
)
_INKLING_CLOSES = ("<|end_message|>", "<|content_model_end_sampling|>")
_RESPONSE = ("<response>", "</response>")
_HY3 = replace(
    _QWEN3, name="hy_v3", models="Hy3", opens=(f"<think{DECLARED}>",), closes=(f"</think{DECLARED}>",), special=True
)
_MESSAGES = ChannelMarks(
    first=("to=",),
    heads=("<|start|>",),
    ends=("<|message|>",),
    closes=("<|eom|>", "<|eot|>"),
    thought=r"\bto=self<",
)
_GLIMMER = ThoughtStyle(
    name="muse_glimmer",
    models="Muse Glimmer",
    opens=("to=self<|message|>",),
    closes=("<|eom|>",),
    special=True,
    between="<|start|>assistant",
    answer=" to=user<|message|>",
    channels=_MESSAGES,
)
_MUSE = replace(
    _GLIMMER,
    name="muse",
    models="Muse Spark: messages without a recipient, or to the developer, are thoughts",
    channels=replace(_MESSAGES, first=("to=", "<|message|>"), thought=r"(?s)^(?!.*\bto=)|\bto=(self|developer)<"),
)
_COHERE = ThoughtStyle(
    name="cohere_command3",
    models="Command R7B, Command A",
    opens=("<|START_THINKING|>",),
    closes=("<|END_THINKING|>",),
    special=True,
    answer="<|START_RESPONSE|>",
    around=(("<|START_RESPONSE|>", "<|END_RESPONSE|>"), ("<|START_TEXT|>", "<|END_TEXT|>")),
)

THOUGHTS: Mapping[str, ThoughtStyle] = {
    style.name: style
    for style in (
        ThoughtStyle(name="deepseek_r1", models="DeepSeek R1, QwQ", first="open"),
        replace(_QWEN3, name="deepseek_v3", models="DeepSeek V3.1"),
        _QWEN3,
        replace(_QWEN3, name="deepseek_v4", models="DeepSeek V4"),
        replace(_QWEN3, name="glm45", models="GLM 4.5 to 4.7"),
        replace(_QWEN3, name="glm47", models="GLM 4.7"),
        replace(_QWEN3, name="mimo", models="MiMo V2"),
        replace(_QWEN3, name="nemotron_v3", models="Nemotron 3"),
        replace(_QWEN3, name="step3", models="Step 3", first="open"),
        replace(_QWEN3, name="step3p5", models="Step 3.5", first="open"),
        replace(
            _QWEN3, name="kimi_k2", models="Kimi K2 Thinking", ends=("<|tool_calls_section_begin|>",), special=True
        ),
        replace(_QWEN3, name="minimax_m2", models="MiniMax M2", first="open"),
        replace(
            _QWEN3,
            name="minimax_m2_append_think",
            models="MiniMax M2, with its thoughts as content",
            first="open",
            shown=True,
        ),
        replace(_QWEN3, name="holo2", models="Holo 2", first="open"),
        replace(_QWEN3, name="poolside_v1", models="Laguna"),
        replace(
            _QWEN3,
            name="hunyuan_a13b",
            models="Hunyuan A13B",
            around=(("<answer>", "</answer>"),),
        ),
        _HY3,
        replace(_HY3, name="hy_v4", models="Hy4", first="open"),
        replace(
            _QWEN3,
            name="kimi_k3",
            models="Kimi K3",
            opens=("<|open|>think<|sep|>",),
            closes=("<|close|>think<|sep|>",),
            special=True,
            answer="<|open|>response<|sep|>",
            around=(("<|open|>response<|sep|>", "<|close|>response<|sep|>"),),
            finish=("<|close|>message<|sep|>",),
        ),
        replace(
            _QWEN3,
            name="solar_open2",
            models="Solar Open 2",
            opens=("<|think:start|>",),
            closes=("<|think:end|>",),
            special=True,
        ),
        replace(
            _QWEN3,
            name="apriel",
            models="Apriel 1.5 and 1.6",
            opens=("Here are my reasoning steps:",),
            closes=("[BEGIN FINAL RESPONSE]",),
            finish=("[END FINAL RESPONSE]",),
        ),
        replace(_QWEN3, name="ling3", models="Ling 3", ends=("<tool_call>",)),
        replace(_QWEN3, name="deepseek_v41", models="DeepSeek V4.1"),
        replace(_QWEN3, name="granite_thinking_parser", models="Granite 4.2"),
        replace(_QWEN3, name="minicpmv", models="MiniCPM-V 4.5"),
        replace(_QWEN3, name="step5", models="Step 5", first="open"),
        replace(
            _QWEN3,
            name="k2_horizon",
            models="K2 Horizon",
            opens=("<ifm|think>", "<ifm|think_fast>", "<ifm|think_faster>"),
            closes=("</ifm|think>", "</ifm|think_fast>", "</ifm|think_faster>"),
            ends=("<ifm|tool_calls>",),
            first="open",
            special=True,
        ),
        replace(
            _QWEN3,
            name="plamo3",
            models="PLaMo 3",
            opens=("<|plamo:begin_think:plamo|>",),
            closes=("<|plamo:end_think:plamo|>",),
            ends=("<|plamo:begin_tool_requests:plamo|>",),
            first="open",
            special=True,
        ),
        replace(_QWEN3, name="olmo3", models="OLMo 3 Think", first="open"),
        replace(_QWEN3, name="seed_oss", models="Seed-OSS", opens=("<seed:think>",), closes=("</seed:think>",)),
        replace(_QWEN3, name="mistral", models="Magistral", opens=("[THINK]",), closes=("[/THINK]",), special=True),
        ThoughtStyle(
            name="granite",
            models="Granite 3.2 and 3.3",
            opens=("Here is my thought process:", "Here's my thought process:", OPEN),
            closes=("Here is my response:", "Here's my response:", CLOSE),
            around=(_RESPONSE,),
        ),
        replace(_QWEN3, name="ernie45", models="ERNIE 4.5 Thinking", around=(_RESPONSE,)),
        _COHERE,
        replace(_COHERE, name="cohere_command4", models="Command A+", answer="<|START_TEXT|>"),
        replace(
            _QWEN3,
            name="apertus",
            models="Apertus",
            opens=("<|inner_prefix|>",),
            closes=("<|inner_suffix|>",),
            special=True,
        ),
        replace(_QWEN3, name="minimax_m3", models="MiniMax M3", opens=("<mm:think>",), closes=("</mm:think>",)),
        ThoughtStyle(
            name="gemma4", models="Gemma 4", opens=("<|channel>thought",), closes=("<channel|>",), special=True
        ),
        ThoughtStyle(
            name="openai_gptoss",
            models="gpt-oss",
            opens=("<|channel|>analysis<|message|>",),
            closes=("<|end|>",),
            special=True,
            between="<|start|>assistant",
            answer="<|channel|>final<|message|>",
            channels=ChannelMarks(
                # Prompts end with `<|start|>assistant`, which the recipient of a call may follow.
                first=("to=functions.",),
                heads=("<|start|>", "<|channel|>"),
                ends=("<|message|>",),
                closes=("<|end|>", "<|call|>", "<|return|>"),
                header=r"<\|channel\|>\s*\w",
                thought=r"<\|channel\|>\s*analysis\b",
                call=r"to=(functions\.[^\s<]+)",
                passed="<|channel|>commentary to={name}<|message|>",
            ),
        ),
        _GLIMMER,
        _MUSE,
        replace(_MUSE, name="musespark1x"),
        ThoughtStyle(
            name="inkling",
            models="Inkling",
            opens=("<|content_thinking|>",),
            closes=("<|end_message|>",),
            special=True,
            between="<|message_model|>",
            answer="<|content_text|>",
            channels=ChannelMarks(
                begun="<|message_model|>",
                heads=("<|message_model|>", *_INKLING, *_INKLING_CLOSES),
                ends=(*_INKLING, *_INKLING_CLOSES),
                closes=_INKLING_CLOSES,
                header=r"<\|content_(?!model_end)\w+\|>$",
                bare=True,
                thought=r"<\|content_thinking\|>",
                # A name may stand before the mark, and stands in the call.
                call=r"([\w.:/-]*)<\|content_invoke_tool_json\|>",
                passed="<|content_invoke_tool_json|>",
            ),
        ),
        ThoughtStyle(
            name="solar_open",
            models="Solar Open",
            opens=("<|think|>",),
            closes=("<|end|>",),
            special=True,
            between="<|begin|>assistant",
            answer="<|content|>",
            channels=ChannelMarks(
                heads=("<|begin|>", "<|think|>", "<|content|>", "<|tool_calls|>"),
                ends=("<|think|>", "<|content|>", "<|tool_calls|>"),
                closes=("<|end|>", "<|calls|>"),
                thought=r"<\|think\|>",
            ),
        ),
        ThoughtStyle(
            name="functionary_v3_2",
            models="Functionary 3.2, which does not think: its answers have a recipient",
            opens=(),
            closes=(),
            first="none",
            answer="all\n",
            channels=ChannelMarks(
                begun=">>>",
                heads=(">>>",),
                ends=("\n",),
                closes=(),
                header=r"^>>>[\w.-]{1,64}\n",
                call=r"^>>>(?!all\n)([\w.-]{1,64})\n",
                passed=">>>{name}\n",
            ),
        ),
    )
}
"""By the parser's name."""


def thought_style(parser: str) -> ThoughtStyle | None:
    """The style of a parser's name, which may have a suffix (`parsers.suffix`); None for "none"."""
    return styled(THOUGHTS, parser)


_SIGNS: Sequence[tuple[str, ...]] = (
    ("kimi_k3", "<|open|>", "<|close|>", "think"),
    ("inkling", "<|content_thinking|>"),
    ("k2_horizon", "<ifm|think"),
    ("plamo3", "plamo:begin_think"),
    ("qwen3", CLOSE, "<function name=", "<param name="),
    ("hy_v3", "<tool_sep", "think"),
    ("muse_glimmer", "<|message|>", "to=self"),
    ("solar_open2", "<|think:start|>"),
    ("solar_open", "<|think|>", "<|content|>"),
    ("apriel", "[BEGIN FINAL RESPONSE]"),
    ("functionary_v3_2", ">>>all"),
    ("openai_gptoss", "<|channel|>", "analysis"),
    ("gemma4", "<|channel>", "<channel|>"),
    ("mistral", "[THINK]"),
    ("seed_oss", "</seed:think>"),
    ("granite", "Here is my thought process:"),
    ("granite", "<|start_of_role|>", "<response>"),
    ("minimax_m3", "</mm:think>"),
    ("cohere_command4", "<|START_THINKING|>", "<|START_TEXT|>"),
    ("cohere_command3", "<|START_THINKING|>"),
    ("apertus", "<|inner_prefix|>"),
    ("minimax_m2", CLOSE, "<minimax:tool_call>"),
    ("glm45", CLOSE, "<arg_key>"),
    ("kimi_k2", CLOSE, "<|tool_calls_section_begin|>"),
    ("deepseek_v3", CLOSE, "｜DSML｜", "function_calls"),
    ("deepseek_v4", CLOSE, "｜DSML｜"),
    ("deepseek_v3", CLOSE, "<｜Assistant｜>", "thinking"),
    ("qwen3", CLOSE, "enable_thinking"),
    ("olmo3", CLOSE, "<function_calls>"),
    ("step3", CLOSE, "<steptml:invoke"),
    ("deepseek_r1", CLOSE, "<｜Assistant｜><think>"),
    ("deepseek_v3", CLOSE, "<｜Assistant｜>"),
    ("ernie45", CLOSE, "<response>"),
    ("qwen3", CLOSE),
)
"""Parsers and the texts that templates of their families contain, the more particular ones first."""


def parser_of(template: str | None) -> str:
    """The parser that a model with this chat template needs."""
    found = (name for name, *texts in _SIGNS if template is not None and all(text in template for text in texts))
    return next(found, "none")


SWITCHES = ("enable_thinking", "thinking")
"""Arguments of chat templates that turn reasoning on and off."""


def turned_off(*template_kwargs: Mapping[str, object] | None) -> bool:
    """Whether arguments of a chat template disable reasoning; later ones come before those that go ahead of them."""
    merged = {name: value for given in template_kwargs for name, value in (given or {}).items()}
    return any(merged.get(name) is False for name in SWITCHES)


def thoughts_ahead(parser: str, prompt: str, begun: str = "", *, off: bool = False) -> Ahead:
    """Which reasoning may precede an answer to `prompt`.

    begun: the part of the answer that is already there, when an answer is continued. off: the client disabled
    reasoning. The last mark in `begun`, or a mark at the end of the prompt, decides; without one, DeepSeek's models
    always reason first, and Qwen's may write an opening mark.
    """
    style = thought_style(parser)
    if style is None:
        return "none"
    if begun:
        opened, closed = (max(map(begun.rfind, marks), default=-1) for marks in (style.opens, style.closes))
        return "open" if opened > closed else "none"
    end = prompt[-64:].rstrip()
    if end.endswith(style.opens):
        return "open"
    if end.endswith((*style.closes, *(mark for mark, _ in style.around))) and not style.channels:
        return "none"
    return "none" if off and not style.channels else style.first


def bounded(
    structure: StructuredOutputsParams | None, parser: str, ahead: Ahead, budget: int | None
) -> StructuredOutputsParams | None:
    """`structure` behind the thoughts that may come `ahead`, at most `budget` tokens of them; None or -1: any."""
    budget = None if budget == -1 or ahead == "none" else budget
    if structure is None and budget is None:
        return None
    if structure is None:
        structure = StructuredOutputsParams(thought_budget=budget, param="thinking_token_budget")
    if ahead == "none":
        style = thought_style(parser)
        begin = structure.begin if style is not None and not style.opens else ""
        return replace(structure, thoughts=ahead, thought_budget=budget, begin=begin)
    return replace(structure, thoughts=ahead, reasoning_parser=parser, thought_budget=budget)


State = Literal["begin", "inside", "after", "answer"]
"""'begin' while it is not known what comes, then 'inside' a thought, 'after' it, and 'answer' within the content."""


class ThoughtSplitter(Splitter):
    """A Splitter of reasoning and content that says where it is."""

    state: State


class Thinking(ThoughtSplitter):
    """A Splitter of reasoning and content; white space around the marks belongs to neither.

    inside: the text begins with reasoning, even without an opening mark.
    """

    __slots__ = ("_answer_end", "_around", "_ends", "_inside", "_said", "_space", "_style", "_text", "state")

    def __init__(self, *, inside: bool, style: ThoughtStyle = _QWEN3) -> None:
        self._style = style
        # The mark that ends the answer, once one has begun it.
        self._answer_end = ""
        self._around = style.around
        self._ends = (*style.closes, *style.ends)
        self._inside = inside
        self._said = False
        self.state: State = "begin"
        self._text = ""
        self._space: list[str] = []

    def feed(self, text: str) -> Sequence[TextPart]:
        """See Splitter."""
        if self.state == "answer" and not self._answer_end:
            return (TextPart("content", text),) if text else ()
        self._text += text
        parts: list[TextPart] = []
        if self.state == "begin":
            self._begin(parts)
        if self.state == "inside":
            self._think(parts)
        if self.state == "after":
            self._after(parts)
        if self.state == "answer" and self._answer_end:
            self._answer(parts)
        if self.state == "after":
            self._after(parts)
        return parts

    def _begin(self, parts: list[TextPart]) -> None:
        bare = self._text.lstrip()
        self._space.append(self._text[: len(self._text) - len(bare)])
        self._text = bare
        opens, closes = self._style.opens, self._style.closes
        others = () if self._inside else (*closes, *(mark for mark, _ in self._around))
        if any(len(bare) < len(mark) and mark.startswith(bare) for mark in (*opens, *others)):
            return
        opened = next((mark for mark in opens if bare.startswith(mark)), "")
        if opened or self._inside:
            self.state, self._text = "inside", bare.removeprefix(opened)
            self._space.clear()
        elif bare.startswith(others):
            # Thoughts that are empty, or an answer without any.
            closed = next((mark for mark in closes if bare.startswith(mark)), "")
            self.state, self._text = "after", bare.removeprefix(closed)
            self._space.clear()
        elif self._style.special and self._around:
            # The prompt may have begun the answer.
            self.state, self._answer_end = "answer", self._around[0][1]
        else:
            self.state = "answer"
            parts.append(TextPart("content", "".join(self._space) + bare))
            self._text = ""

    def _think(self, parts: list[TextPart]) -> None:
        places = [(at, mark) for mark in self._ends if (at := self._text.find(mark)) >= 0]
        if places:
            at, mark = min(places)
            said = self._text[:at]
            self.state, self._text = "after", self._text[at + (len(mark) if mark in self._style.closes else 0) :]
        else:
            kept = possible(self._text, self._ends)
            said, self._text = self._text[: len(self._text) - kept], self._text[len(self._text) - kept :]
        self._say(said, parts)

    def _say(self, text: str, parts: list[TextPart], kind: Literal["content", "reasoning"] = "reasoning") -> None:
        """Emit all but trailing white space, which may turn out to precede the closing mark."""
        said = text.rstrip()
        if said:
            before = "".join(self._space)
            self._space.clear()
            parts.append(TextPart(kind, before + said if self._said else said.lstrip()))
            self._said = True
        self._space.append(text[len(said) :])

    def _after(self, parts: list[TextPart]) -> None:
        self._text = bare = self._text.lstrip()
        marks = (*(mark for mark, _ in self._around), *self._style.finish)
        if not bare or any(len(bare) < len(mark) and mark.startswith(bare) for mark in marks):
            return
        if found := next(filter(bare.startswith, self._style.finish), ""):
            self._text = bare.removeprefix(found)
            self._after(parts)
            return
        self.state = "answer"
        for mark, end in self._around:
            if bare.startswith(mark):
                self._answer_end, self._text = end, bare.removeprefix(mark)
                self._space.clear()
                self._said = False
                return
        self._text = ""
        parts.append(TextPart("content", bare))

    def _answer(self, parts: list[TextPart]) -> None:
        """Within marks around the answer."""
        before, found, after = self._text.partition(self._answer_end)
        kept = 0 if found else possible(before, (self._answer_end,))
        self._say(before[: len(before) - kept], parts, "content")
        self._text = after if found else before[len(before) - kept :]
        if found:
            # What may follow is a call.
            self.state, self._answer_end, self._around = "after", "", ()

    def flush(self) -> Sequence[TextPart]:
        """See Splitter."""
        parts: list[TextPart] = []
        if self.state == "begin" and not self._inside:
            parts.append(TextPart("content", "".join(self._space) + self._text))
        elif self.state in ("begin", "inside"):
            self._say(self._text, parts)
        elif self.state == "after":
            parts.append(TextPart("content", self._text))
        elif self._answer_end:
            parts.append(TextPart("content", "".join(self._space) * self._said + self._text))
        self.state, self._text = "answer", ""
        return [part for part in parts if part.text]


class Shown(ThoughtSplitter):
    """A Splitter to which all is content, with thoughts and their marks. begun: a mark that the prompt ends with."""

    __slots__ = ("_begun", "_thinking", "state")

    def __init__(self, thinking: Thinking, begun: str) -> None:
        self._begun = begun
        self._thinking = thinking
        self.state: State = thinking.state

    def feed(self, text: str) -> Sequence[TextPart]:
        """See Splitter."""
        self._thinking.feed(text)
        self.state = self._thinking.state
        begun, self._begun = self._begun, ""
        return PLAIN.feed(begun + text)

    def flush(self) -> Sequence[TextPart]:
        """See Splitter."""
        return PLAIN.flush()


class Channels(ThoughtSplitter):
    """A Splitter of messages with headers: `<|start|>assistant<|channel|>analysis<|message|>...<|end|>` and so on.

    Thoughts are reasoning; other messages are content. Text without a header is content.
    """

    __slots__ = ("_marks", "_parts", "_reading", "_tape", "state")

    def __init__(self, marks: ChannelMarks, begun: str = "") -> None:
        """begun: a header that the prompt ends with, or the beginning of one."""
        self.state: State = "begin"
        self._marks = marks
        self._tape = Tape()
        self._tape.append(begun)
        self._parts: list[TextPart] = []
        self._reading: Iterator[None] = self._read()

    def feed(self, text: str) -> Sequence[TextPart]:
        """See Splitter."""
        self._tape.append(text)
        next(self._reading, None)
        return self._taken()

    def flush(self) -> Sequence[TextPart]:
        """See Splitter."""
        self._tape.ended = True
        next(self._reading, None)
        return self._taken()

    def _taken(self) -> Sequence[TextPart]:
        parts = [part for part in self._parts if part.text]
        self._parts = []
        return parts

    def _content(self, text: str) -> None:
        self._parts.append(TextPart("content", text))

    def _reasoning(self, text: str) -> None:
        self._parts.append(TextPart("reasoning", text))

    def _read(self) -> Iterator[None]:
        tape, marks = self._tape, self._marks
        first = yield from tape.mark(marks.first)
        self._content("" if first else tape.space)
        while first or not tape.exhausted:
            mark = first or (yield from tape.until(marks.heads, self._content))
            first = ""
            if not mark:
                return
            head, end = ("", mark) if mark in marks.ends else (yield from tape.head(marks.ends, _LONGEST_HEADER))
            whole = mark + head + (end if head or end != mark else "")
            if not end or not re.search(marks.header, whole):
                self._content(head if marks.bare else whole)
                self.state = "answer"
                continue
            yield from self._message(whole)

    def _message(self, header: str) -> Generator[None]:
        """The rest of a message."""
        tape, marks = self._tape, self._marks
        say = self._content
        if to := re.search(marks.call, header):
            self._content(marks.passed.replace("{name}", to[1]))
        elif re.search(marks.thought, header):
            say = self._reasoning
        self.state = "inside" if say == self._reasoning else "answer"
        end = yield from tape.until((*marks.closes, *(mark for mark in marks.heads if mark not in marks.closes)), say)
        if end in marks.heads:
            tape.back(end)
        elif to:
            self._content(end)
        self.state = "begin" if say == self._reasoning else self.state


_LONGEST_HEADER = 400


class AnswerSplitter:
    """Two Splitters in sequence: the content that `thinking` finds is fed to `calls`."""

    __slots__ = ("_calls", "_thinking")

    def __init__(self, thinking: Splitter, calls: Splitter = PLAIN) -> None:
        self._thinking = thinking
        self._calls = calls

    def feed(self, text: str) -> Sequence[TextPart]:
        """See Splitter."""
        return list(self._read(self._thinking.feed(text)))

    def flush(self) -> Sequence[TextPart]:
        """See Splitter."""
        return [*self._read(self._thinking.flush()), *self._calls.flush()]

    def _read(self, parts: Sequence[TextPart]) -> Iterator[TextPart]:
        for part in parts:
            if part.kind == "content":
                yield from self._calls.feed(part.text)
            else:
                yield part


class ReasoningCounter:
    """Counts the reasoning tokens of an answer, marks included."""

    __slots__ = ("_thinking", "_undecided", "count")

    def __init__(self, *, inside: bool, style: ThoughtStyle = _QWEN3) -> None:
        self._thinking = style.splitter(inside=inside)
        self._undecided = 0
        self.count = 0

    @property
    def over(self) -> bool:
        """Whether the reasoning has ended."""
        return self._thinking.state in ("after", "answer")

    def feed(self, texts: Sequence[str]) -> None:
        """Count new tokens, given the text of each."""
        for text in texts:
            if self.over:
                return
            was = self._thinking.state
            self._thinking.feed(text)
            self._undecided += 1
            if was == "inside" or self._thinking.state in ("inside", "after"):
                self.count += self._undecided
                self._undecided = 0
            elif self._thinking.state != "begin":
                self._undecided = 0
