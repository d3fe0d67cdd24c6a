"""The exit statuses that the halves agree on, and the errors that carry them.

Nothing else in the package calls sys.exit with a number of its own: a refusal is raised as one of
these, and the command line prints its one line and ends with its status.
"""

from entrypoint.core.plain import one_line

DONE = 0
BAD_INPUT = 64  # EX_USAGE of sysexits.h: trying again will not help
UNAVAILABLE = 69  # EX_UNAVAILABLE: a port or a peer; another attempt may help
SAVED = 75  # EX_TEMPFAIL: saved at a planned end, wants to go on
STUCK = 124  # timeout's own: a rank was ended because it hung
INTERRUPTED = 130  # 128 + SIGINT


def of_signal(signum: int) -> int:
    """The status of what a signal has ended, as shells have it."""
    return 128 + signum


def of_returncode(code: int) -> tuple[int, int]:
    """(status, signal) of a return code as subprocess and torch give it; signal 0: none."""
    return (of_signal(-code), -code) if code < 0 else (code, 0)


class Refusal(Exception):
    """An end with a message for the user: what was given, what was found, what to do.

    The text is one line without the leading `apptrain: `. What it quotes may be anything.
    """

    status = BAD_INPUT
    told = False
    """Whether another node has said it already, to all."""

    def __init__(self, id: str, text: str) -> None:
        super().__init__(text)
        self.id = id
        """Names the cause, as in `join-port-taken`. It is not printed, and stays when the text changes."""

    def __str__(self) -> str:
        return one_line(super().__str__())


class BadInput(Refusal):
    """What the user or the scheduler gave cannot be run; exit 64."""


class Unavailable(Refusal):
    """A port or a peer is not available; exit 69."""

    status = UNAVAILABLE
