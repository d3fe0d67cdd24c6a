"""What is said of a line that begins with no command of ours."""

import shlex
from pathlib import Path

import pytest

from entrypoint.cli import no_command
from entrypoint.core import checkout

HOME = Path(checkout.__file__).resolve().parents[2]
LISTED = "give one of demo, run, submit, site, image, plan, launch, check, doctor, rerun, report, explain, scaling, compare"
FOLLOWED = (
    "{} is no command: a job is followed with `{us} submit --follow JOB` or tail -f RUN/job.log, and ended with "
    "scancel JOB or qdel JOB"
)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("train", "train is no command: did you mean `{us} demo`? (see apptrain --help)"),
        ("build", "build is no command: did you mean `{us} image build`? (see apptrain --help)"),
        ("venv x", "venv is no command: did you mean `make -C {home} venv`? (see apptrain --help)"),
        ("sbatch -N 3 -p gpu x.py", "sbatch is no command: did you mean `{us} submit --cluster NAME --nodes 3 --partition gpu -- x.py`?"),
        ("qsub --frob x.py", "qsub is no command: did you mean `{us} submit --cluster NAME -- x.py`? (left out: --frob)"),
        ("slurm x.py", "slurm is no command: did you mean `{us} submit --cluster NAME -- x.py`?"),
        *((word, FOLLOWED.replace("{}", word)) for word in ("status", "logs", "squeue", "qstat", "scancel", "qdel")),
        ("my.py --lr 1", "my.py is no command: did you mean `{us} run -- my.py --lr 1`?"),
        ("-m mod --lr 1", "-m is no command: did you mean `{us} run -- -m mod --lr 1`?"),
        ("-- my.py -- x", "-- is no command: did you mean `{us} run -- my.py x`?"),
        ("bash run.sh", "bash is no command: did you mean `{us} run --no-python -- bash run.sh`?"),
        ("torchrun --max-restarts 3 x.py 1", "torchrun is no command: did you mean `{us} run --max-restarts 3 -- x.py 1`?"),
        ("python -u x.py 1", "python is no command: did you mean `{us} run -- x.py 1`? (left out: -u)"),
        ("submitt", "submitt is no command: did you mean submit? (see apptrain --help)"),
        ("--hlep", "--hlep is no command: did you mean --help? (see apptrain --help)"),
        ("frobnicate", "frobnicate is no command: {listed} (see apptrain --help)"),
        ("--frob", "--frob is neither a command nor an option of one (see apptrain --help)"),
        ("--nodes 3 x.py", "--nodes stands before the command: did you mean `{us} run --nodes 3 -- x.py`?"),
        ("--node=3 x.py --lr 1", "--node stands before the command: did you mean `{us} run --nodes=3 -- x.py --lr 1`?"),
        ("--cluster lab x.py", "--cluster stands before the command: did you mean `{us} submit --cluster lab -- x.py`?"),
        ("--partition=gpu -- x.py", "--partition stands before the command: did you mean `{us} submit --cluster NAME --partition=gpu -- x.py`?"),
        ("--follow", "--follow stands before the command: did you mean `{us} submit --cluster NAME --follow`?"),
    ],
)  # fmt: skip
def test_what_was_meant_is_a_line_to_paste(
    line: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    us, home = shlex.quote(str(HOME / "apptrain")), shlex.quote(str(HOME))
    assert no_command.remedy(line.split()) == said.format(us=us, home=home, listed=LISTED)


def test_a_word_keeps_its_quotes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HOME)
    monkeypatch.setenv("PATH", "")
    assert no_command.remedy(["my script.py", "a b"]).endswith(
        " did you mean `./apptrain run -- 'my script.py' 'a b'`?"
    )


def test_without_a_makefile_no_target_of_it_is_meant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(no_command, "HOME", tmp_path)
    assert "make" not in no_command.remedy(["venv"])
