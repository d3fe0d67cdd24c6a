"""The exit statuses of a training process, and the error that carries a refusal."""

DONE = 0
FAILED = 1
BAD_INPUT = 64  # EX_USAGE of sysexits.h: trying again will not help
SAVED = 75  # EX_TEMPFAIL: saved at a planned end, wants to go on
TERMINATED = 143  # 128 + SIGTERM


class BadInput(Exception):
    """What the user gave cannot be run; exit 64.

    The text is one line without the leading `train: `. `rank` is the one rank that prints it, so that
    what all ranks find is said once.
    """

    def __init__(self, message: str, *, rank: int = 0) -> None:
        super().__init__(message)
        self.rank = rank
