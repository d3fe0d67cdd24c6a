"""Frozen classes are as the standard library makes them, but for the time that it takes."""

import copy
import dataclasses
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

import entrypoint
from entrypoint.core import frozen

Decorator = Callable[..., Any]


def point(decorator: Decorator) -> Any:
    @decorator(frozen=True, kw_only=True)
    class Point:
        of_all: ClassVar[int] = 3
        x: int
        y: float = 2.5
        unseen: str = dataclasses.field(default="u", repr=False)
        uncompared: list[int] = dataclasses.field(default_factory=list, compare=False)

        @property
        def double(self) -> int:
            return self.x * 2

    return Point


def ends(does: Callable[[], object]) -> object:
    """What it returns, or its error."""
    try:
        return does()
    except (AttributeError, TypeError) as error:
        return type(error), str(error)


CASES: dict[str, Callable[[Any], object]] = {
    "repr": lambda made: repr(made(x=1)),
    "equal": lambda made: made(x=1, uncompared=[1]) == made(x=1),
    "different": lambda made: made(x=1) == made(x=2),
    "not a tuple": lambda made: made(x=1) == (1, 2.5, "u"),
    "not another class's": lambda made: made(x=1) == type("Other", (made,), {})(x=1),
    "in a set": lambda made: len({made(x=1), made(x=1, uncompared=[2]), made(x=2)}),
    "not set": lambda made: setattr(made(x=1), "x", 2),
    "not deleted": lambda made: delattr(made(x=1), "x"),
    "nothing else set": lambda made: setattr(made(x=1), "z", 2),
    "no position": lambda made: ends(lambda: made(1))[0],  # type: ignore[index]
    "missing": lambda made: ends(made),
    "replaced": lambda made: dataclasses.replace(made(x=1), x=2).double,
    "a dict": lambda made: dataclasses.asdict(made(x=1)),
    "copied": lambda made: copy.deepcopy(made(x=1)) == made(x=1),
    "fields": lambda made: [field.name for field in dataclasses.fields(made)],
}


@pytest.mark.parametrize("case", CASES)
def test_a_frozen_class_does_as_the_standard_one(case: str) -> None:
    does = CASES[case]
    standard = ends(lambda: does(point(dataclasses.dataclass)))
    assert ends(lambda: does(point(frozen.dataclass))) == standard


def test_a_method_of_the_class_itself_stays() -> None:
    @frozen.dataclass(frozen=True)
    class Name:
        text: str

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Name) and self.text.lower() == other.text.lower()

        def __hash__(self) -> int:
            return hash(self.text.lower())

        def __repr__(self) -> str:
            return self.text

    assert {Name("A")} == {Name("a")}
    assert repr(Name("A")) == "A"


def test_a_class_with_the_fields_of_another_and_more() -> None:
    @frozen.dataclass(frozen=True)
    class Base:
        a: int

    @frozen.dataclass(frozen=True)
    class More(Base):
        b: int

    assert (More(1, 2), More(1, 2) == More(1, 3)) == (More(a=1, b=2), False)
    assert repr(More(1, 2)).endswith("More(a=1, b=2)")


@frozen.dataclass(frozen=True)
class Sent:
    a: int


def test_one_can_be_sent_to_another_process() -> None:
    assert pickle.loads(pickle.dumps(Sent(1))) == Sent(1)


def test_others_than_frozen_ones_are_the_standard_librarys() -> None:
    @frozen.dataclass
    class Count:
        number: int = 0

    @frozen.dataclass(frozen=True, order=True)
    class Version:
        number: int

    count = Count()
    count.number += 1
    assert count == Count(1)
    assert Version(1) < Version(2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Version(1).number = 2  # type: ignore[misc]


def test_all_of_the_entrypoint_are_made_so() -> None:
    """Each other would cost every node a quarter of a millisecond."""
    standard = re.compile(r"^from dataclasses import .*\bdataclass\b|@dataclasses\.dataclass", re.MULTILINE)
    modules = [path for path in Path(entrypoint.__file__).parent.rglob("*.py") if path.name != "frozen.py"]
    assert [str(path) for path in modules if standard.search(path.read_text())] == []
