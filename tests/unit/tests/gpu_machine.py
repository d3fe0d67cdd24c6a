"""`make test-gpu` where there is no GPU: its refusals, its table, what each trial asks for and what it makes of the
answers, which are written here as such a machine gives them; and those trials that a CPU can make, for real.
"""

from pathlib import Path

from benchmarks.bounded import CommandResult

CHECKOUT = Path(__file__).resolve().parents[3]
BOUND = 280.0  # s, for anything started here


def ended(status: int = 0, out: str = "", err: str = "") -> CommandResult:
    return CommandResult(status=status, out=out, err=err, seconds=1.0)
