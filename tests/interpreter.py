"""Triton's interpreter, in which kernels run where there is no CUDA device: what it finds out anew for each launch, or
for each value, is found out once. What kernels compute, and what is checked while they do, stays the interpreter's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

from triton import language
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
            self._changes[languages] = [(owner, name, vars(owner)[name]) for owner, name, _ in looked._changes]
            looked.restore()
        scope = Scope()
        for change in self._changes[languages]:
            scope.set_attr(*change)
        active.append(languages)
        return scope


def _remember_types() -> None:
    """A type of a block, and what a tensor derives from its type, is the same for the same elements and shape."""
    make_block, make_tensor = language.block_type.__init__, language.tensor.__init__
    blocks: dict[Any, dict[str, Any]] = {}
    tensors: dict[Any, tuple[Any, dict[str, Any]]] = {}

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        key = (id(element_ty), *(getattr(size, "value", size) for size in shape))
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = dict(vars(self))  # has the elements' type, so that no other gets its id
        vars(self).update(blocks[key])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        key = (type.name, id(type.scalar))
        if key not in tensors:
            make_tensor(self, handle, type)
            tensors[key] = type, dict(vars(self), handle=None)
        vars(self).update(tensors[key][1], handle=handle, type=type)

    language.block_type.__init__, language.tensor.__init__ = block, tensor


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
        if one.is_block() and other.is_block() and one.shape.values == other.shape.values:
            return lhs, rhs
        return plain(self, lhs, rhs)

    interpreter.TritonSemantic.broadcast_impl_value = broadcast


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


@cache
def install() -> None:
    """Before the first launch, once in a process however often it is asked for."""
    _return_plain_indices()
    interpreter._patch_lang = _Patches()
    _remember_types()
    _remember_dtypes()
    _leave_equal_shapes()
    _compute_no_unread_overflow()
