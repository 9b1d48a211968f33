"""The sandbox that chat templates are rendered in, with a bound on the time and memory of one rendering.

Templates come with checkpoints, so they are not trusted. An operation is charged for its operands before it runs and
for its result afterwards, in units of about a byte or ten nanoseconds. Operations whose result may be much larger than
their operands (a width, a count, a power) are charged for the result in advance. The bound is deterministic: it does
not depend on a clock.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NoReturn, TypeAlias

from jinja2 import BaseLoader, Environment, TemplateError, Undefined, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

_MAX_OUTPUT = 1 << 20
"""Characters that a template may write beyond its input, and iterations and calls, in one rendering."""
_MAX_WORK = 1 << 24
"""Units that one rendering may be charged, and `_PER_READ` more for each character of its input."""
_PER_READ = 128
_OPERATION = 16
"""Units for any operation."""
_CALL = 128
"""Units for a call of a macro or a function."""
_BLOCK = 1 << 12
"""Units for entering a block, for which jinja creates a context."""
_NODE = 2
"""Units for any other node of the template, each time that it is executed."""
_BITS = 1 << 14
"""Bits of the largest integer: slightly more than Python converts to decimal."""
_WIDTH = 1 << 16
"""The largest width, count or precision."""
_INDENT = 16
"""The most characters of an indent or a separator in JSON."""
_KEYS = 16
"""The most parts of a key."""
_FIELD_DIGITS = re.compile(r"\d+")
_STAR = re.compile(r"%[#0\- +.\d]*\*")
_NESTED = re.compile(r"\{[^{}]*\{")
_PADDED = re.compile(r"%[^A-Za-z%]*\d{3}")

_SECRET: Final = secrets.token_hex(8)
"""Part of the names of internal filters, since templates can name filters in strings (`map`)."""
METER: Final = f"meter-{_SECRET}"
"""The key of the budget in a rendering's context, and the name of the filter that counts an iteration."""
_READ, _JOINED, _SLICED = (f"{name}-{_SECRET}" for name in ("read", "joined", "sliced"))

_STRINGS = (str, bytes)
_LISTS: tuple[Any, ...] = (list, tuple, range, set, frozenset, type({}.keys()), type({}.values()), type({}.items()))
_BUILTIN = (*_STRINGS, int, float, complex, dict, *_LISTS, type)

_TEXT_METHODS = """
    capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit isidentifier islower
    isnumeric isprintable isspace istitle isupper lower lstrip partition removeprefix removesuffix rfind rindex
    rpartition rsplit rstrip split splitlines startswith strip swapcase title upper
"""
_TEXT = frozenset(_TEXT_METHODS.split())
"""Methods of strings whose results are no longer than their operands."""
_METHODS: Mapping[type, frozenset[str]] = {
    dict: frozenset({"get", "items", "keys", "values", "copy"}),
    list: frozenset({"count", "index", "copy"}),
    tuple: frozenset({"count", "index"}),
    int: frozenset({"bit_length"}),
    float: frozenset({"is_integer"}),
}

Cost: TypeAlias = "Callable[[Budget, Any, Sequence[Any], Mapping[str, Any]], None]"


class Refused(TemplateError):
    """The template called `raise_exception`."""


def extent(value: Any, most: int = 1 << 62) -> int:
    """The cost of writing, comparing or hashing a value with everything in it.

    Counting ends soon after `most`. A list that contains another one several times counts it each time.
    """
    total = 0
    rest = [value]
    while rest and total <= most:
        one = rest.pop()
        if isinstance(one, _STRINGS):
            total += 8 + len(one)
        elif isinstance(one, int):
            total += 8 + one.bit_length()
        elif isinstance(one, _LISTS):
            total += 16 + 8 * len(one)
            rest += one
        elif isinstance(one, float):
            total += 320
        elif one is None:
            total += 8
        elif isinstance(one, Mapping):
            total += 16 + 16 * len(one)
            rest += [*one, *one.values()]
        elif isinstance(one, Namespace):
            rest.append(object.__getattribute__(one, "_Namespace__attrs"))
        else:
            total += 8
    return total


class Budget:
    """What one rendering may still write and do. read: `extent` of its input."""

    def __init__(self, read: int) -> None:
        self._left = _MAX_OUTPUT + 8 * read
        self._work = _MAX_WORK + _PER_READ * read

    def spend(self, amount: int) -> None:
        """Count characters written, iterations or calls. Raises SecurityError when none are left."""
        self._left -= amount
        if self._left < 0:
            raise SecurityError("it does not terminate")

    def charge(self, units: int) -> None:
        """Charge units of work. Raises SecurityError when none are left."""
        self._work -= units
        if self._work < 0:
            raise SecurityError("it takes too much time or memory")

    def read(self, *values: Any) -> None:
        """Charge for reading all of the values."""
        for value in values:
            self.charge(8 + len(value) if isinstance(value, str) else extent(value, self._work))

    def made(self, value: Any) -> Any:
        """Charge for the result of an operation, and return it."""
        if isinstance(value, str):
            self.charge(_OPERATION + (len(value) if value.isascii() else 4 * len(value)))
        elif isinstance(value, int):
            if value.bit_length() > _BITS:
                raise SecurityError("it makes a number of too many digits")
        elif isinstance(value, list | tuple) and value:
            self.charge((64 if isinstance(value[0], str) else 8) * len(value))
        elif isinstance(value, dict):
            self.charge(64 * len(value))
        return value

    def range(self, *bounds: int) -> range:
        """Python's range, whose iterations are counted in advance."""
        numbers = range(*bounds)
        self.spend(len(numbers))
        return numbers

    # ---------------------------------------------------------------- operations with large results

    def binary(self, operator: str, left: Any, right: Any) -> None:
        """Charge for a binary operation. Raises SecurityError where its result would be too large."""
        self.charge(_OPERATION)
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length()
            more = right.bit_length()
            made = bits * abs(right) if operator == "**" and more < 32 else bits + more
            if max(bits, made) > _BITS or (operator == "**" and more >= 32):
                raise SecurityError(f"{operator!r} would make too large a value")
        elif operator == "*":
            length = max((len(x) for x in (left, right) if isinstance(x, str | bytes | list | tuple)), default=0)
            times = max((abs(x) for x in (left, right) if isinstance(x, int)), default=1)
            if length * times > _MAX_OUTPUT:
                raise SecurityError(f"{operator!r} would make too large a value")
            self.charge(8 * length * times)
        elif operator == "%" and isinstance(left, str):
            self.formatted(left, right, braces=False)

    def formatted(self, text: str, values: Any, *, braces: bool) -> None:
        """Charge for formatting: each field may be as wide as the largest number in the text, and show all values."""
        widest = max(map(_number, _FIELD_DIGITS.findall(text)), default=0)
        taken = _NESTED.search(text.replace("{{", "")) if braces else _STAR.search(text)
        if widest > 9999 or taken:
            raise SecurityError("it writes a value into a field of more than 9999 characters, or of another's width")
        fields = text.count("{" if braces else "%")
        self.charge(len(text) + fields * (widest + extent(values, self._work)))

    def replaced(self, text: str, old: Any, new: Any) -> None:
        """Charge for replacing all occurrences of `old`."""
        self.read(text, old, new)
        self.charge(text.count(str(old)) * len(str(new)))

    def joined(self, between: str, parts: Any) -> None:
        """Charge for joining parts."""
        self.read(parts)
        self.charge(len(between) * (len(parts) if hasattr(parts, "__len__") else 0))

    def width(self, *numbers: Any) -> None:
        """Charge for widths, counts or precisions. Raises SecurityError above `_WIDTH`."""
        for number in numbers:
            if isinstance(number, int):
                if abs(number) > _WIDTH:
                    raise SecurityError(f"it asks for a length of {str(number)[:24]}, and the limit is {_WIDTH}")
                self.charge(abs(number))

    def method(self, owner: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Charge for a method of a built-in type. Raises SecurityError for methods that templates do not need."""
        self.charge(_OPERATION)
        if not isinstance(owner, str):
            known = next((names for kind, names in _METHODS.items() if isinstance(owner, kind)), frozenset[str]())
            if name not in known:
                raise SecurityError(f"it calls {name!r} of {type(owner).__name__!r}, which a template may not call")
            if name in ("count", "index"):
                self.read(owner)
            self.read(*args)
            return
        self.charge(len(owner))
        if name in _TEXT:
            self.read(*args)
        elif name in ("center", "ljust", "rjust", "zfill"):
            self.width(*args)
        elif name == "expandtabs":
            self.width(*args, *kwargs.values())
            self.charge(
                owner.count("\t") * max((x for x in (*args, *kwargs.values()) if isinstance(x, int)), default=8)
            )
        elif name == "replace" and len(args) > 1:
            self.replaced(owner, *args[:2])
        elif name == "join" and args:
            self.joined(owner, args[0])
        elif name in ("format", "format_map"):
            given = [*args, *kwargs.values()]
            if name == "format_map" and args and isinstance(args[0], Mapping):
                given = list(args[0].values())
            if not all(isinstance(value, str | int | float | Undefined | None) for value in given):
                raise SecurityError("it formats what is neither a text nor a number")
            self.formatted(owner, given, braces=True)
        else:
            raise SecurityError(f"it calls {name!r} of a text, which a template may not call")


def _number(digits: str) -> int:
    return int(digits) if len(digits) < 9 else 1 << 30


def budget_of(context: Context) -> Budget:
    """The budget of a rendering, from its input, which the template's `set` cannot change."""
    budget: Budget = context.parent[METER]
    return budget


# -------------------------------------------------------------------- filters and tests


def _all(budget: Budget, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    budget.read(value, *args, *kwargs.values())


def _items(budget: Budget, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Each item is visited, but not its contents."""
    budget.charge(8 * len(value) if hasattr(value, "__len__") else 8)


def _sorted(budget: Budget, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    for _ in range(8):
        budget.read(value)


def _sum(budget: Budget, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    start = kwargs.get("start", args[1] if len(args) > 1 else 0)
    if not isinstance(start, int | float):
        raise SecurityError("it sums up what are not numbers")
    budget.read(value)


def _wide(budget: Budget, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    _all(budget, value, args, kwargs)
    budget.width(*args, *kwargs.values())


def _indented(budget: Budget, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    _wide(budget, value, args, kwargs)
    given = kwargs.get("width", args[0] if args else 4)
    budget.charge((len(given) if isinstance(given, str) else abs(int(given))) * (str(value).count("\n") + 1))


def _rounded(budget: Budget, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    precision = kwargs.get("precision", args[0] if args else 0)
    if not isinstance(value, int | float) or not isinstance(precision, int) or abs(precision) > 64:
        raise SecurityError("it rounds what is no number, or to more than 64 digits")


def _numbers(budget: Budget, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    if not isinstance(value, int | float):
        raise SecurityError("it divides what is no number")
    budget.read(value, *args)


def _replace(budget: Budget, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    given = [*args, *(kwargs[name] for name in ("old", "new") if name in kwargs)]
    budget.read(value)
    budget.replaced(str(value), *(given[:2] if len(given) > 1 else ("", "")))


def _join(budget: Budget, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    _all(budget, value, args, kwargs)
    budget.joined(str(kwargs.get("d", args[0] if args else "")), value)


def _format(budget: Budget, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    budget.read(value)
    budget.formatted(str(value), [*args, kwargs], braces=False)


def _each(cost: Cost, names: str) -> dict[str, Cost]:
    return dict.fromkeys(names.split(), cost)


_COSTS: Mapping[str, Cost] = {
    **_each(_all, "capitalize lower upper title trim string escape e safe int float abs truncate"),
    **_each(_all, "unique min max groupby"),
    **_each(_items, "attr count length default d first last list items map select reject"),
    **_each(_items, "selectattr rejectattr reverse"),
    **_each(_sorted, "sort dictsort"),
    **_each(_wide, "batch slice center"),
    "sum": _sum,
    "indent": _indented,
    "round": _rounded,
    "replace": _replace,
    "join": _join,
    "format": _format,
}
"""The filters that templates have, besides `tojson`. The charge covers the size of the result."""

_TESTS: Mapping[str, Cost] = {
    **_each(_all, "== eq equalto != ne > gt greaterthan >= ge < lt lessthan <= le in lower upper"),
    **_each(_numbers, "odd even divisibleby"),
}
"""The tests that read values; others only look at the type."""


def _metered(cost: Cost, own: Any, *, filters: bool) -> Callable[..., Any]:
    """A filter or test that charges for jinja's own one, stored under the key `own`, and calls it."""

    @pass_context
    def metered(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = budget_of(context)
        budget.charge(_OPERATION)
        cost(budget, value, args, kwargs)
        if not filters:
            return context.environment.call_test(own, value, args, kwargs, context)
        made = context.environment.call_filter(own, value, args, kwargs, context)
        if isinstance(made, Iterator):
            made = list(_counted(budget, made))
        return budget.made(made)

    return metered


def _metered_all(costs: Mapping[str, Cost], known: Mapping[str, Any], *, filters: bool) -> dict[Any, Any]:
    """The filters or tests of `costs`, metered, and jinja's own ones under keys that no template can name."""
    made: dict[Any, Any] = {}
    for name, cost in costs.items():
        own = object()
        made[own] = known[name]
        made[name] = _metered(cost, own, filters=filters)
    return made


def _counted(budget: Budget, items: Iterator[Any]) -> Iterator[Any]:
    for item in items:
        budget.charge(8)
        yield item


@pass_context
def _iteration(context: Context, weight: int) -> bool:
    """Count an iteration or a call, whose body has `weight` units of nodes."""
    budget = budget_of(context)
    budget.spend(1)
    budget.charge(_OPERATION + weight)
    return True


@pass_context
def _read(context: Context, value: Any, searched: bool = False) -> Any:
    """Charge for a value that is compared, or searched with `in`; a mapping is searched by hash."""
    if not isinstance(value, Mapping if searched else int):
        budget_of(context).read(value)
    return value


@pass_context
def _joined(context: Context, *values: Any) -> str:
    """The operator `~`."""
    budget = budget_of(context)
    budget.read(*values)
    return str(budget.made("".join(map(str, values))))


@pass_context
def _slice(context: Context, value: Any, start: Any, stop: Any, step: Any) -> Any:
    """The slice `value[start:stop:step]`."""
    budget = budget_of(context)
    budget.charge(_OPERATION)
    return budget.made(value[start:stop:step])


@pass_context
def _tojson(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja's own filter escapes for HTML, and the model would see the escapes."""
    budget = budget_of(context)
    if indent is not None and (len(indent) if isinstance(indent, str) else abs(indent)) > _INDENT:
        raise SecurityError(f"it asks for an indent above {_INDENT}")
    if any(len(one) > _INDENT for one in separators or ()):
        raise SecurityError(f"it asks for separators of more than {_INDENT} characters")
    budget.read(value)
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None:
        return str(budget.made(encoder.encode(value)))
    return "".join(budget.made(piece) for piece in encoder.iterencode(value))


@pass_context
def _written(context: Context, value: Any) -> Any:
    """Charge for a value that `{{ }}` writes."""
    budget = budget_of(context)
    if isinstance(value, str):
        budget.charge(len(value))
    else:
        budget.read(value)
    return value


# -------------------------------------------------------------------- global functions


@pass_context
def _raise(context: Context, message: Any = "") -> NoReturn:
    budget_of(context).read(message)
    raise Refused(str(message))


def _strftime_now(format: str) -> str:
    if len(format) > 1000 or _PADDED.search(format):
        raise SecurityError("it writes a date into a field of more than 99 characters")
    return datetime.now().strftime(format)


# -------------------------------------------------------------------- the environment


class _Generation(Extension):
    """`{% generation %}` marks the assistant's turns for training; in serving its contents are rendered as they are."""

    tags = {"generation"}  # noqa: RUF012 - as jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements up to `{% endgeneration %}`."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _NoTemplates(BaseLoader):
    """There are no other templates to include or import."""

    def get_source(self, environment: Environment, template: str) -> NoReturn:
        """Raises SecurityError."""
        raise SecurityError(f"it asks for another template, {template!r}, and there is none")


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja without access to attributes of objects, other templates, unbounded values and unmetered filters."""

    intercepted_binops = frozenset({"+", "*", "//", "%", "**"})

    def __init__(self) -> None:
        super().__init__(
            loader=_NoTemplates(),
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _Generation],
            finalize=_written,
            optimized=False,
        )
        own: dict[Any, Any] = {METER: _iteration, _READ: _read, _JOINED: _joined, _SLICED: _slice}
        self.filters = own | {"tojson": _tojson} | _metered_all(_COSTS, self.filters, filters=True)
        self.tests |= _metered_all(_TESTS, self.tests, filters=False)
        # It makes text of any length.
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now}

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """A binary operation, charged."""
        budget = budget_of(context)
        # By far the most frequent operation.
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            return budget.made(left + right)
        budget.binary(operator, left, right)
        return budget.made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as in jinja
        """A call, charged."""
        budget = budget_of(__context)
        # jinja wraps str.format.
        method = getattr(__obj, "__wrapped__", __obj)
        owner = getattr(method, "__self__", None)
        if isinstance(owner, _BUILTIN):
            given = {name: value for name, value in kwargs.items() if name not in ("_loop_vars", "_block_vars")}
            budget.method(owner, method.__name__, args, given)
        else:
            # `dict` and `loop.changed` hash their arguments.
            hashed = isinstance(__obj, type) or isinstance(owner, LoopContext)
            budget.charge(_BLOCK if isinstance(__obj, BlockReference) else _CALL)
            budget.read(*(arg for arg in args if hashed or isinstance(arg, tuple)))
        return budget.made(super().call(__context, __obj, *args, **kwargs))

    def getitem(self, obj: Any, argument: Any) -> Any:
        """`obj[argument]`. Raises SecurityError for keys that are expensive to hash."""
        parts = argument if isinstance(argument, tuple) else (argument,)
        if len(parts) > _KEYS or any(isinstance(one, list | tuple | Mapping) for one in parts):
            raise SecurityError("it looks for an item by a list of things")
        return super().getitem(obj, argument)

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """Raises SecurityError."""
        raise SecurityError(f"it accesses {attribute!r} of {type(obj).__name__!r}, which a template may not access")


class Metered(NodeTransformer):
    """Inserts the charges into a template.

    Every iteration of a loop and every call of a macro or block is counted with the size of its body, since it need not
    write anything; and operations that jinja compiles to Python's own operators become filters that charge.
    """

    def __init__(self) -> None:
        self._seen = 0

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        """Transform a node, and add up the sizes of the nodes seen."""
        data = getattr(node, "data", getattr(node, "value", None))
        self._seen += _NODE + (len(data) if isinstance(data, str) else 0)
        return super().visit(node, *args, **kwargs)

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802 - jinja's name
        """Count iterations, including those that the loop's condition filters out."""
        self._count_body(node)
        if node.test is not None:
            node.test = nodes.And(_filter(nodes.Const(8), METER, node), node.test, lineno=node.lineno)
        return node

    def _count_body(self, node: Any) -> Any:
        """Count calls."""
        before = self._seen
        self.generic_visit(node)
        turn = _filter(nodes.Const(self._seen - before), METER, node)
        node.body.insert(0, nodes.ExprStmt(turn, lineno=node.lineno))
        return node

    visit_Macro = visit_CallBlock = visit_Block = _count_body  # noqa: N815

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802
        """The operator `~`."""
        self.generic_visit(node)
        return _filter(node.nodes[0], _JOINED, node, *node.nodes[1:])

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:  # noqa: N802
        """Charge for the operands, unless one is a constant: a comparison ends with the shorter one."""
        self.generic_visit(node)
        if len(node.ops) == 1:
            [last] = node.ops
            if _is_constant(last.expr) or (last.op not in ("in", "notin") and _is_constant(node.expr)):
                return node
        if not _is_constant(node.expr):
            node.expr = _filter(node.expr, _READ, node)
        for operand in node.ops:
            operand.expr = _filter(operand.expr, _READ, node, nodes.Const(operand.op in ("in", "notin")))
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:  # noqa: N802
        """Charge for slices."""
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        ends = (node.arg.start, node.arg.stop, node.arg.step)
        return _filter(node.node, _SLICED, node, *(nodes.Const(None) if end is None else end for end in ends))

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:  # noqa: N802
        """Charge for tuples, which may be hashed."""
        self.generic_visit(node)
        return node if node.ctx != "load" or _is_constant(node) else _filter(node, _READ, node)

    def visit_Pair(self, node: nodes.Pair) -> nodes.Pair:  # noqa: N802
        """Charge for the key of a dict, which is hashed."""
        self.generic_visit(node)
        if not isinstance(node.key, nodes.Const):
            node.key = _filter(node.key, _READ, node)
        return node


def _filter(value: nodes.Expr, name: str, at: nodes.Node, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, name, list(args), [], None, None, lineno=at.lineno)


def _is_constant(node: nodes.Expr) -> bool:
    """Whether the expression is a constant."""
    if isinstance(node, nodes.List | nodes.Tuple):
        return all(isinstance(item, nodes.Const) for item in node.items)
    return isinstance(node, nodes.Const)
