"""The standard library's `dataclass`, for which a frozen class takes a third of the time. `dataclass` is the
entry, and the only one of this package.

That one compiles six methods for each frozen class. A launcher has 130 such classes, which each node of a job
makes before its ranks start. Here `__init__` alone is compiled, and the others are the same for all classes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

__all__ = ["dataclass"]

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(cls=None, /, *, frozen=False, order=False, **options):
        """As `dataclasses.dataclass`, with its options."""
        if order or not frozen:
            return dataclasses.dataclass(cls, frozen=frozen, order=order, **options)
        return _frozen(**options)


_Class = TypeVar("_Class", bound=type)


def _frozen(**options: Any) -> Callable[[_Class], _Class]:
    """Of a method that the class defines itself, that one stays."""

    def made(cls: _Class) -> _Class:
        own = vars(cls)
        methods = {name: method for name, method in _METHODS.items() if own.get(name) is None}
        dataclasses.dataclass(repr=False, eq=False, **options)(cls)
        for name, method in methods.items():
            setattr(cls, name, method)
        return cls

    return made


def _compared(value: Any) -> tuple[Any, ...]:
    return tuple(getattr(value, field.name) for field in dataclasses.fields(value) if field.compare)


def _repr(self: Any) -> str:
    shown = ", ".join(
        f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self) if field.repr
    )
    return f"{type(self).__qualname__}({shown})"


def _eq(self: Any, other: object) -> bool:
    return _compared(self) == _compared(other) if type(other) is type(self) else NotImplemented


def _hash(self: Any) -> int:
    return hash(_compared(self))


def _setattr(self: Any, name: str, value: object) -> None:
    """`__init__` sets each field once."""
    if name in vars(self) or name not in self.__dataclass_fields__:
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
    object.__setattr__(self, name, value)


def _delattr(_self: Any, name: str) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


_METHODS: dict[str, Callable[..., Any]] = {
    "__repr__": _repr,
    "__eq__": _eq,
    "__hash__": _hash,
    "__setattr__": _setattr,
    "__delattr__": _delattr,
}
