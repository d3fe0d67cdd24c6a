"""What PBS says of a job, in the words of `qstat -f`.

`attributes` reads the answer, `variables` takes out what the job was given. Runs with the Python of a login
node, from 3.9 on.
"""

from __future__ import annotations

from collections.abc import Mapping


def attributes(text: str) -> dict[str, str]:
    """What qstat -f (or -Q -f) says, by name; of several jobs or queues the last counts."""
    found = {}
    for line in text.replace("\n\t", "").splitlines():
        name, equals, value = line.strip().partition(" = ")
        if equals:
            found[name] = value
    return found


def variables(found: Mapping[str, str]) -> dict[str, str]:
    """The variables that qsub gave the job. Of a value with a comma, what follows belongs to it."""
    given: dict[str, str] = {}
    name = ""
    for item in found.get("Variable_List", "").split(","):
        key, equals, value = item.partition("=")
        if equals:
            name = key
            given[name] = value
        elif name:
            given[name] += f",{item}"
    return given
