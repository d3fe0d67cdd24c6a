"""The exit statuses: what runs apart from the entrypoint has copies of them, which say the same."""

import re
import signal
from pathlib import Path

import pytest

from containers import download, stacks
from entrypoint import errors
from entrypoint.run import agent
from train import status, stop

CHECKOUT = Path(__file__).resolve().parents[2]
JOB_SCRIPT = [
    (r"^trap 'exit (\d+)' INT", errors.INTERRUPTED),
    (r"exit (\d+) # as host/common.sh has it", errors.BAD_INPUT),
    (r"^# Exit: .* (\d+) bad input", errors.BAD_INPUT),
    (r"^# Exit: .* (\d+) a port or peer not available", errors.UNAVAILABLE),
    (r"^# Exit: .* (\d+) saved, wants to go on", errors.SAVED),
    (r"^# Exit: .*\n# .* (\d+) a rank was stuck", errors.STUCK),
    (r"^# Exit: .*\n# .* (\d+) interrupted", errors.INTERRUPTED),
    (r"^# Exit: .*\n# .* (\d+) (?:cancelled|deleted)", stop.TERMINATED),
]
BASH = {
    "slurm/multinode.sbatch": JOB_SCRIPT,
    "pbs/multinode.pbs": JOB_SCRIPT,
    "host/common.sh": [(r"^readonly REFUSED=(\d+)$", errors.BAD_INPUT)],
    "host/job.sh": [(r"trap 'end (\d+); cut_short' INT", errors.INTERRUPTED)],
    "tools/venv.sh": [
        (r"^refuse\(\) \{\n.*\n    exit (\d+)$", errors.BAD_INPUT),
        (r"^fail\(\) \{\n.*\n    exit (\d+)$", errors.UNAVAILABLE),
    ],
}
"""Where bash has a status, and which one it means."""


def test_a_training_and_torchruns_agent_and_the_builder_of_images_mean_the_same_statuses() -> None:
    assert status.DONE == errors.DONE
    assert {status.BAD_INPUT, stacks.BadInput.status} == {errors.BAD_INPUT}
    assert download.Unavailable.status == errors.UNAVAILABLE
    assert {status.SAVED, stop.SAVED, agent.SAVED} == {errors.SAVED}
    assert stop.TERMINATED == 128 + signal.SIGTERM
    assert 128 + signal.SIGINT == errors.INTERRUPTED


@pytest.mark.parametrize("file", BASH)
def test_bash_means_the_same_statuses(file: str) -> None:
    text = (CHECKOUT / file).read_text()
    found = [(place, *map(int, re.findall(place, text, re.MULTILINE))) for place, _ in BASH[file]]
    assert found == BASH[file]


def test_help_lists_the_statuses() -> None:
    from entrypoint.cli import EXIT_STATUS

    listed = map(int, re.findall(r"^  (\d+) ", EXIT_STATUS, re.MULTILINE))
    wanted = (errors.DONE, errors.BAD_INPUT, errors.UNAVAILABLE, errors.SAVED, errors.STUCK)
    assert tuple(listed) == (*wanted, errors.INTERRUPTED)
    assert f"; {stop.TERMINATED}: cancelled" in EXIT_STATUS
