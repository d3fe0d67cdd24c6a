"""`entrypoint` with shorter bounds where there is no option for one, or where giving the option would change the rule:
nobody waits a minute in a test.

    python -P -m tests.embedded.hasty BOUND=SECONDS ... launch ...
    python -P -m tests.embedded.hasty BOUND=SECONDS ... embedded ...

The embedded scheduler starts its nodes with the same bounds.
"""

import dataclasses
import itertools
import sys
from collections.abc import Sequence

from entrypoint.cli import embedded
from entrypoint.cli import main as cli
from entrypoint.core.frozen import dataclass
from entrypoint.meet import terms
from entrypoint.plan import options
from entrypoint.ranks import ranks
from entrypoint.run import given as launch_given
from entrypoint.run import restart, supervise


def first_step(seconds: float) -> None:
    launch_given.FIRST_STEP = seconds
    supervise.WORKERS_LOOKS = 6  # they go on for as long as two imports of torch may take on a busy machine


def hang_timeout(seconds: float) -> None:
    options.OPTIONS = tuple(
        dataclasses.replace(option, default=seconds) if option.name == "hang-timeout" else option
        for option in options.OPTIONS
    )


def window(seconds: float) -> None:
    restart.WINDOW = seconds


def stopped(seconds: float) -> None:
    embedded.STOPPED = seconds


def agent_stopped(seconds: float) -> None:
    ranks.AGENT_STOPPED = seconds


def answer(seconds: float) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Timeouts(terms.Timeouts):
        answer: float = seconds

    terms.Timeouts = Timeouts  # type: ignore[misc]


BOUNDS = {
    shorten.__name__: shorten
    for shorten in (first_step, hang_timeout, window, stopped, agent_stopped, answer)
}


def main(argv: Sequence[str]) -> int:
    given = list(itertools.takewhile(lambda word: "=" in word, argv))
    for word in given:
        name, _, seconds = word.partition("=")
        BOUNDS[name](float(seconds))
    what, *rest = argv[len(given) :]
    if what == "embedded":
        embedded.ENTRYPOINT = (*embedded.ENTRYPOINT[:-1], "tests.embedded.hasty", *given)
        return embedded.main(rest)
    return cli.main([what, *rest])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
