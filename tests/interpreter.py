"""Triton's interpreter, in which kernels run where there is no CUDA device: what it finds out anew for each launch, or
for each value, is found out once. What kernels compute, and what is checked while they do, stays the interpreter's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from threading import RLock
from types import ModuleType
from typing import Any

import numpy as np
from triton import knobs, language
from triton.runtime import interpreter

LANGUAGES: tuple[ModuleType, ...] = (language, language.core)


class _Patches:
    """For each launch the functions of Triton's language are replaced by those of the interpreter, and so they are by
    each device function that a kernel calls. All names of the language are looked through for it, which takes longer
    than most calls. Here they are looked through once and set at each launch, and what is set already is left."""

    def __init__(self) -> None:
        self._look = interpreter._patch_lang
        self._changes: dict[tuple[bool, ...], list[tuple[object, str, object]]] = {}
        self._modules: dict[int, tuple[dict[str, Any], tuple[bool, ...]]] = {}
        self._active: list[tuple[bool, ...]] = []

    def _languages(self, fn: Any) -> tuple[bool, ...]:
        """Which of the languages the module of a kernel names."""
        names = fn.__globals__
        if id(names) not in self._modules:  # kept with the names, so that no others get their id
            values = [value for value in names.values() if isinstance(value, ModuleType)]
            self._modules[id(names)] = (names, tuple(any(one is each for each in values) for one in LANGUAGES))
        return self._modules[id(names)][1]

    def __call__(self, fn: Any) -> Any:
        languages, active = self._languages(fn), self._active
        if any(all(a or not b for a, b in zip(done, languages, strict=True)) for done in active):
            return interpreter._LangPatchScope()

        class Scope(interpreter._LangPatchScope):  # type: ignore[name-defined, misc]
            def restore(self) -> None:
                super().restore()
                active.remove(languages)

        if languages not in self._changes:
            looked = self._look(fn)
            self._changes[languages] = [(owner, name, _direct(vars(owner)[name])) for owner, name, _ in looked._changes]
            looked.restore()
        scope = Scope()
        for change in self._changes[languages]:
            scope.set_attr(*change)
        active.append(languages)
        return scope


def _direct(function: Any) -> Any:
    """A function of Triton's language as the interpreter calls it, without the two that only pass on `_semantic`."""
    wrapper = (getattr(function, "__kwdefaults__", None) or {}).get("member")
    wrapped = getattr(wrapper, "__wrapped__", None)
    if wrapped is None or not language.core.is_builtin(wrapper):
        return function
    semantic = interpreter.interpreter_semantic

    def direct(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return wrapped(*args, **kwargs)

    return direct


def _remember_types() -> None:
    """There is one type of blocks of the same elements and shape, and what a tensor derives from its type is derived
    once for each type."""
    make_block, make_tensor = language.block_type.__init__, language.tensor.__init__
    blocks: dict[Any, Any] = {}

    def block(cls: Any, element_ty: Any, shape: Any) -> Any:
        key = (id(element_ty), *[getattr(size, "value", size) for size in getattr(shape, "values", shape)])
        made = blocks.get(key)
        if made is None:
            blocks[key] = made = object.__new__(cls)  # has the elements' type, so that no other gets its id
            make_block(made, element_ty, shape)
        return made

    def tensor(self: Any, handle: Any, type: Any) -> None:
        made = type.__dict__.get("_of_tensors")
        if made is None:
            make_tensor(self, handle, type)
            type._of_tensors = made = dict(vars(self), handle=None)
        values = self.__dict__
        values.update(made)
        values["handle"], values["type"] = handle, type

    language.block_type.__new__, language.block_type.__init__ = block, lambda self, element_ty, shape: None
    language.tensor.__init__ = tensor


def _remember_dtypes() -> None:
    """The table of NumPy's types is written down once for each type, not for each value."""
    plain: Callable[[Any], Any] = interpreter._get_np_dtype
    of_elements = cache(plain)

    def numpy_dtype(dtype: Any) -> Any:
        element = dtype.element_ty if isinstance(dtype, language.block_type) else dtype
        return of_elements(element) if type(element) is language.dtype else plain(dtype)

    interpreter._get_np_dtype = numpy_dtype


def _leave_equal_shapes() -> None:
    """Blocks of one shape are what broadcasting makes of them, which is found out by several comparisons otherwise."""
    plain = interpreter.TritonSemantic.broadcast_impl_value

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        one, other = lhs.type, rhs.type
        if one is other:
            return lhs, rhs
        if one.is_block() and other.is_block() and one.shape.values == other.shape.values:
            return lhs, rhs
        return plain(self, lhs, rhs)

    interpreter.TritonSemantic.broadcast_impl_value = broadcast


def _compare_types_once() -> None:
    """Operands of one type are of the type that the operation has, and so is a number beside a tensor in most cases:
    the type's name is compared with twenty others for each operation otherwise."""
    semantic, tensor = interpreter.TritonSemantic, language.tensor
    plain, plain_equal = semantic.binary_op_type_checking_impl, language.dtype.__eq__
    alike: dict[tuple[int, bool], tuple[Any, bool]] = {}
    numbers: dict[Any, tuple[Any, Any]] = {}

    def scalar(dtype: Any) -> Any:
        return tensor(interpreter.TensorHandle(np.zeros(1, interpreter._get_np_dtype(dtype)), dtype), dtype)

    def stays(self: Any, dtype: Any, divided: bool) -> bool:
        """Whether operands of this type, if both have it, are taken as they are."""
        if (key := (id(dtype), divided)) not in alike:
            one = None if dtype.is_ptr() else scalar(dtype)
            alike[key] = dtype, one is not None and plain(self, one, one, div_or_mod=divided)[0] is one
        return alike[key][1]

    def constant(self: Any, dtype: Any, number: Any, *how: Any) -> Any:
        """The number as a tensor of this type, if that is what it is beside one; else None."""
        key = (id(dtype), type(number), number, *how)
        if key not in numbers:
            if len(numbers) > 4096:
                numbers.clear()
            one = scalar(dtype)
            left, right = plain(self, one, number, *how)
            numbers[key] = dtype, right if left is one and right.dtype is dtype else None
        return numbers[key][1]

    def common(left: Any, right: Any) -> tuple[Any, Any] | None:
        """The types that two operands have for an operation on their elements; None where the interpreter finds out."""
        if not left.is_block() and not right.is_block():
            return left, right
        if not left.is_block():
            return right.with_element_ty(left), right
        if not right.is_block():
            return left, left.with_element_ty(right)
        sizes = [*zip(left.shape, right.shape, strict=False)]
        if len(left.shape) != len(right.shape) or any(a != b and 1 not in (a, b) for a, b in sizes):
            return None
        shape = [*map(max, sizes)]
        return language.block_type(left.scalar, shape), language.block_type(right.scalar, shape)

    def fit(self: Any, lhs: Any, rhs: Any) -> Any:
        """Operands have the type of their result, and their numbers are left to NumPy to broadcast."""
        left, right = lhs.type, rhs.type
        if left is right:
            return lhs, rhs
        known = left.__dict__.setdefault("_beside", {})
        if id(right) not in known:
            known[id(right)] = common(left, right), right  # so that no other gets its id
        types = known[id(right)][0]
        if types is None:
            return self.broadcast_impl_value(lhs, rhs)
        one, other = types
        return lhs if one is left else tensor(lhs.handle, one), rhs if other is right else tensor(rhs.handle, other)

    def checked(
        self: Any, lhs: Any, rhs: Any, left_ptr: bool = False, right_ptr: bool = False, check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:  # fmt: skip
        if type(lhs) is tensor:
            if type(rhs) is tensor:
                if lhs.dtype is rhs.dtype and stays(self, lhs.dtype, div_or_mod):
                    return fit(self, lhs, rhs)
            # Not 0.0, which equals -0.0, nor what does not equal itself.
            elif type(rhs) in (int, float) and (type(rhs) is int or abs(rhs) > 0) and not lhs.dtype.is_ptr():
                number = constant(self, lhs.dtype, rhs, left_ptr, right_ptr, check, div_or_mod)
                if number is not None:
                    return fit(self, lhs, number)
        return plain(self, lhs, rhs, left_ptr, right_ptr, check, div_or_mod)

    semantic.binary_op_type_checking_impl = checked
    language.dtype.__eq__ = lambda self, other: self is other or plain_equal(self, other)


def _unwrap_constants_alone() -> None:
    """What is no constant and has none in it is found out by one look, not by four."""
    plain, bare = language.core._unwrap_if_constexpr, {language.tensor, int, float, bool, str, type(None)}
    language.core._unwrap_if_constexpr = lambda value: value if type(value) in bare else plain(value)


def _compute_no_unread_overflow() -> None:
    """Sums and products of integers are computed again in 64 bits for an assertion that is made in debug mode only."""
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)


def _return_plain_indices() -> None:
    """Triton 3.6 turns its scalars, which are arrays of one, into ints in a way that NumPy 2.4 no longer allows."""
    plain = interpreter._patch_lang_tensor

    def with_index(tensor: Any, scope: Any) -> None:
        plain(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = with_index


def _launch_alone() -> None:
    """A launch patches the language, and counts programs, for the whole process: threads take turns."""
    plain, lock = interpreter.GridExecutor.__call__, RLock()

    def alone(self: Any, *args: Any, **kwargs: Any) -> Any:
        with lock:
            return plain(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = alone


@cache
def install() -> None:
    """Before the first launch, once in a process however often it is asked for; nothing where kernels are compiled,
    since what is remembered here of a value is of another compiler's context there."""
    if not knobs.runtime.interpret:
        return
    _return_plain_indices()
    interpreter._patch_lang = _Patches()
    _remember_types()
    _remember_dtypes()
    _leave_equal_shapes()
    _compare_types_once()
    _unwrap_constants_alone()
    _compute_no_unread_overflow()
    _launch_alone()
