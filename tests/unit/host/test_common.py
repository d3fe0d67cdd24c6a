"""host/common.sh: the wait for a child, through signals."""

import subprocess
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[3]
ROUNDS = 150
"""bash forgets about one of thirty children that end as a signal comes."""
WAITS = """
set -uo pipefail
source "$1/host/common.sh"
trap interrupted=yes USR2
sleep 100 &
other=$!
for ((i = 0; i < $2; i++)); do
    (sleep 0.01; exit 7) &
    child=$!
    (sleep 0.01; for ((j = 0; j < 5; j++)); do kill -USR2 $$; done) &
    await_end "$child" 77
    echo "$status"
done
kill "$other"
"""


def test_a_child_that_ends_as_a_signal_comes_is_not_waited_for_for_ever() -> None:
    ended = subprocess.run(
        ["bash", "-c", WAITS, "bash", CHECKOUT, str(ROUNDS)], capture_output=True, text=True, timeout=90
    )
    statuses = ended.stdout.split()
    assert (len(statuses), ended.stderr) == (ROUNDS, "")
    assert set(statuses) <= {"7", "77", "140"}, "or the signal's, which bash may tell late"
    assert "7" in statuses
