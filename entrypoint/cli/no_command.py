"""Says what was probably meant by a line that begins with no command of ours, such as another launcher's.
`remedy` is the entry. Runs with a login node's Python, from 3.9 on.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from entrypoint.core import spelling
from entrypoint.core.checkout import HOME, apptrain, make
from entrypoint.plan import mistakes
from entrypoint.plan.commands import COMMANDS, MEANT, OF_JOBS, OF_SUBMIT, with_dashes
from entrypoint.schedulers.known import KNOWN

OF_MAKE = ("shell", "venv", "test", "test-unit", "test-gpu", "lint", "cluster", "profiles", "clean", "bench")
"""Targets of make that users take for a command of ours."""
OF_CLUSTERS = tuple(word for known in KNOWN for word in known.of_cluster)
"""Words with which other commands bring a job to a cluster."""
OF_RUNNING = (
    *("status", "logs", "log", "follow", "tail", "queue", "stop", "cancel", "kill"),
    *(program for known in KNOWN for program in (known.lists, known.cancels)),
)
"""Words for a job that is there."""


def remedy(arguments: Sequence[str]) -> str:
    """What to type instead. `arguments`: the words, of which the first is none of our commands."""
    name, found, us = arguments[0], f"{arguments[0]} is no command: did you mean", apptrain()
    if name in MEANT:
        return f"{found} `{us} {MEANT[name]}`? (see apptrain --help)"
    if name in OF_MAKE and (HOME / "Makefile").exists():
        return f"{found} `{make(name)}`? (see apptrain --help)"
    if name in OF_CLUSTERS:
        line, left = mistakes.instead(arguments, "submit")
        return f"{found} `{us} submit --cluster NAME {line}`?{left}"
    if name in OF_RUNNING:
        ends = " or ".join(f"{known.cancels} JOB" for known in KNOWN)
        return (
            f"{name} is no command: a job is followed with `{us} submit --follow JOB` or tail -f RUN/job.log"
            f", and ended with {ends}"
        )
    if name == "-m" or name == "--" or name.endswith(".py"):
        return f"{found} `{us} run -- {shlex.join(word for word in arguments if word != '--')}`?"
    if name in mistakes.SHELLS:
        return f"{found} `{us} run --no-python -- {shlex.join(arguments)}`?"
    if mistakes.is_launcher(name):
        line, left = mistakes.instead(arguments, "run")
        return f"{found} `{us} run {line}`?{left}"
    meant = spelling.meant(name, [*COMMANDS, "--help", "--version"])
    if name.startswith("-") and not meant:
        return _option_first(arguments)
    meant = meant or f": give one of {', '.join(COMMANDS)}"
    return f"{name} is no command{meant} (see apptrain --help)"


def _option_first(arguments: Sequence[str]) -> str:
    words = list(arguments)
    name, equals, value = words[0].partition("=")
    found = spelling.guesses(name, [*OF_JOBS, *OF_SUBMIT])
    if not found:
        return f"{name} is neither a command nor an option of one (see apptrain --help)"
    words[0] = found[0] + equals + value
    command = "run"
    if found[0] in OF_SUBMIT:
        command = "submit" if found[0] == "--cluster" else "submit --cluster NAME"
    line = f"{command} {shlex.join(with_dashes(words))}"
    return f"{name} stands before the command: did you mean `{apptrain()} {line}`?"
