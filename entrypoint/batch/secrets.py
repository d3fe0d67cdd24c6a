"""Keeps secrets out of what a scheduler shows to others: its commands' arguments, and the variables of a job.
Runs with Python 3.9.
"""

from __future__ import annotations

from collections.abc import Mapping

from entrypoint.core.errors import BadInput
from entrypoint.record import tokens

REMEDY = "put NAME=VALUE into a file of mode 600, and give --secrets FILE"


def is_secret(name: str, value: str) -> bool:
    return tokens.names_secret(name) or tokens.SHAPES.search(value) is not None


def check(option: str, values: Mapping[str, str], shows: str) -> None:
    """Raises BadInput if one of these variables holds a secret. `shows`: what would tell it to others."""
    for name, value in values.items():
        if is_secret(name, value):
            raise BadInput(
                "secret-in-request", f"{option} with {name}: {shows} would show its value to others: {REMEDY}"
            )
