"""Where a value comes from: a flag, a variable, the profile, something else that is known, or the default.
`ValueSource` is what a setting and a plan keep of it; its text stands in `sources` of the plan's JSON.

Runs with Python 3.9.
"""

from __future__ import annotations

from enum import Enum

from entrypoint.core.frozen import dataclass


class Origin(Enum):
    """The kinds of source, by the word that stands for each in the plan's JSON."""

    FLAG = "flag"
    ENVIRONMENT = "env"
    PROFILE = "profile"
    DERIVED = "derived"
    DEFAULT = "default"

    @property
    def is_user(self) -> bool:
        """Whether the user gave the value, by a flag or a variable."""
        return self in (Origin.FLAG, Origin.ENVIRONMENT)


@dataclass(frozen=True)
class ValueSource:
    """What gave one value. Its text is `flag`, `env:NAME`, `profile:FILE`, `derived:NAME` or `default`."""

    origin: Origin
    name: str = ""
    """The variable, the profile's file, or what the value is derived from; empty for a flag and a default."""

    def __str__(self) -> str:
        return f"{self.origin.value}:{self.name}" if self.name else self.origin.value


FLAG = ValueSource(Origin.FLAG)
DEFAULT = ValueSource(Origin.DEFAULT)


def from_variable(name: str) -> ValueSource:
    return ValueSource(Origin.ENVIRONMENT, name)


def from_profile(file: str) -> ValueSource:
    return ValueSource(Origin.PROFILE, file)


def derived_from(name: str) -> ValueSource:
    return ValueSource(Origin.DERIVED, name)
