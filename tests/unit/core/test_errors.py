"""The exit statuses: what runs apart from the entrypoint has copies of them, which say the same."""

import re
import signal
from pathlib import Path

import pytest

from containers import download, stacks
from entrypoint.core import errors
from entrypoint.ranks import agent
from train import status, stop

CHECKOUT = Path(__file__).resolve().parents[3]
SHELL = (
    *("host/*.sh", "slurm/*", "pbs/*", "containers/*.sh", "tools/*.sh"),
    *("Makefile", "apptrain", ".ci/run"),
)
CODE = ("entrypoint", "clusters", "containers", "src/train", "tools")
JOB_SCRIPT: list[tuple[object, ...]] = [
    (r"^trap 'exit (\d+)' INT", errors.INTERRUPTED),
    (r"^refuse\(\) \{\n.*\n    exit (\d+)$", errors.BAD_INPUT),
    (r"^# Exit: .* (\d+) bad input", errors.BAD_INPUT),
    (r"^# Exit: .* (\d+) a port or peer not available", errors.UNAVAILABLE),
    (r"^# Exit: .* (\d+) saved, wants to go on", errors.SAVED),
    (r"^# Exit: .*\n# .* (\d+) a rank was stuck", errors.STUCK),
    (r"^# Exit: .*\n# .* (\d+) interrupted", errors.INTERRUPTED),
    (r"^# Exit: .*\n# .* (\d+) (?:cancelled|deleted)", stop.TERMINATED),
]
KILLED = (r"\bawait_end \S+ (\d+)\b", stop.TERMINATED)
REFUSES = (r"^ +exit (\d+)$", errors.BAD_INPUT)
BASH: dict[str, list[tuple[object, ...]]] = {
    "host/image.sh": [(r"tried == (\d+) ", errors.STUCK)],  # timeout's own
    "slurm/multinode.sbatch": JOB_SCRIPT,
    "pbs/multinode.pbs": JOB_SCRIPT,
    "pbs/host.sh": [
        (r"\[\[ \$1 == (\d+)", stop.TERMINATED),
        (r"\btrap '.* exit (\d+)' TERM", stop.TERMINATED),
    ],
    "pbs/keep.sh": [KILLED],
    "pbs/task.sh": [KILLED, (r"^# Exit: .*\n# +(\d+) with an outcome", errors.BAD_INPUT)],
    "host/common.sh": [(r"^readonly REFUSED=(\d+)$", errors.BAD_INPUT), KILLED],
    "host/job.sh": [
        (r"trap 'on_end_signal (\d+)' TERM", stop.TERMINATED),
        (r"trap 'on_end_signal (\d+); cut_short' INT", errors.INTERRUPTED),
        (r"\$1 == (\d+)", stop.TERMINATED),
    ],
    "host/share.sh": [
        (r"== @\(0\|(\d+)\|\d+\)", errors.INTERRUPTED),
        (r"== @\(0\|\d+\|(\d+)\)", stop.TERMINATED),
    ],
    "containers/run.sh": [(r"^# Exit: .* (\d+) it cannot run", errors.BAD_INPUT)],
    "tools/venv.sh": [
        (r"^refuse\(\) \{\n    shift\n.*\n    exit (\d+)$", errors.BAD_INPUT),
        (r"^# Exit: .* (\d+) it cannot be made", errors.BAD_INPUT),
        (r"^fail\(\) \{\n    shift\n.*\n    exit (\d+)$", errors.UNAVAILABLE),
        (r"^# Exit: .* (\d+) pip failed", errors.UNAVAILABLE),
    ],
    "tools/gpu.sh": [REFUSES, (r"^# Exit:  (\d+) no Python", errors.BAD_INPUT)],
    "tools/image-venv.sh": [
        REFUSES,
        (r"^# Exit: .* (\d+) it cannot be made", errors.BAD_INPUT),
    ],
    "tools/login-python.sh": [REFUSES, (r"^# Exit: .* (\d+) no Python", errors.BAD_INPUT)],
    ".ci/run": [
        (*REFUSES, errors.BAD_INPUT),
        (r"^# Exit: .* (\d+) a Debian package", errors.BAD_INPUT),
    ],
    "apptrain": [(r"^sys\.exit\((\d+)\)$", errors.BAD_INPUT)],
}
"""Where bash has a status, and which one it means; as often as it stands there."""
PYTHON = {
    "entrypoint/core/errors.py",
    "entrypoint/ranks/agent.py",
    "src/train/status.py",
    "src/train/stop.py",
    "containers/stacks.py",
    "containers/download.py",
}
"""Where Python has one; the others say it by its name."""
_IN_BASH = r"(?:exit[ (]|end |await_end \S+ |REFUSED=|== |@\(0\|)(64|69|75|124|130|143)\b"
_IN_PYTHON = r"(?:return|else|exit\(|(?:status|BAD_INPUT|UNAVAILABLE|SAVED|STUCK|INTERRUPTED|TERMINATED) =) ?(64|69|75|124|130|143)\b"
"""What a status looks like, but for one in a comment."""


def test_a_training_and_torchruns_agent_and_the_builder_of_images_mean_the_same_statuses() -> None:
    assert status.DONE == errors.DONE
    assert {status.BAD_INPUT, stacks.BuildRefused.status} == {errors.BAD_INPUT}
    assert download.NoAnswer.status == errors.UNAVAILABLE
    assert {status.SAVED, stop.SAVED, agent.SAVED} == {errors.SAVED}
    assert stop.TERMINATED == 128 + signal.SIGTERM
    assert 128 + signal.SIGINT == errors.INTERRUPTED


@pytest.mark.parametrize("file", BASH)
def test_bash_means_the_same_statuses(file: str) -> None:
    text = (CHECKOUT / file).read_text()
    found = [(place, *map(int, re.findall(str(place), text, re.MULTILINE))) for place, *_ in BASH[file]]
    assert found == BASH[file]


def test_the_lists_above_have_every_place_with_a_status() -> None:
    unlisted = []
    for path in (path for pattern in SHELL for path in CHECKOUT.glob(pattern) if path.is_file()):
        name, text = str(path.relative_to(CHECKOUT)), path.read_text()
        places = [str(place) for place, *_ in BASH.get(name, ())]
        known = {found.start(1) for place in places for found in re.finditer(place, text, re.MULTILINE)}
        wrong = [found[0] for found in re.finditer(_IN_BASH, text) if found.start(1) not in known]
        unlisted += [f"{name}: {text}" for text in wrong]
    assert unlisted == []
    files = [file for folder in CODE for file in (CHECKOUT / folder).rglob("*.py")]
    found = {str(file.relative_to(CHECKOUT)) for file in files if re.search(_IN_PYTHON, file.read_text())}
    assert found == PYTHON


def test_help_lists_the_statuses() -> None:
    from entrypoint.cli.main import EXIT_STATUS

    listed = map(int, re.findall(r"^  (\d+) ", EXIT_STATUS, re.MULTILINE))
    wanted = (errors.DONE, errors.BAD_INPUT, errors.UNAVAILABLE, errors.SAVED, errors.STUCK)
    assert tuple(listed) == (*wanted, errors.INTERRUPTED)
    assert f"; {stop.TERMINATED}: cancelled" in EXIT_STATUS


@pytest.mark.parametrize("error", [errors.BadInput, errors.Unavailable, status.TrainingRefused])
def test_what_a_refusal_quotes_stays_in_its_line(error: type[Exception]) -> None:
    assert str(error("some-cause", "x is 'a\x1b[31m\nb\udcc3': give é")) == "x is 'a?[31m b?': give é"
    said = str(error("some-cause", "x is '" + "a" * 10**6 + "': give a word"))
    assert len(said) < 2100
    assert said.startswith("x is 'aaa")
    assert said.endswith("aaa': give a word")


@pytest.mark.parametrize(
    "refusal",
    [
        errors.BadInput("port-taken", "the port is taken"),
        errors.Unavailable("port-taken", "the port is taken"),
        stacks.BuildRefused("port-taken", "the port is taken"),
        download.NoAnswer("port-taken", "the port is taken"),
        status.TrainingRefused("port-taken", "the port is taken"),
    ],
    ids=repr,
)
def test_a_refusal_keeps_its_id_and_does_not_print_it(
    refusal: errors.Refusal | stacks.BuildError | status.TrainingRefused,
) -> None:
    assert (refusal.id, str(refusal)) == ("port-taken", "the port is taken")
