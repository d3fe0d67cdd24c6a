"""The file of --secrets: what may be in it, and that no message has a value of it."""

import os
from pathlib import Path

import pytest

from entrypoint.core.errors import BadInput
from entrypoint.plan import passed, secret_file


def test_each_line_is_a_variable_and_wins_over_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "secrets"
    file.write_text("# mine\n\nWANDB_API_KEY=a=b c'd\nHF_TOKEN=hf_1\n")
    file.chmod(0o600)
    env = {"HF_TOKEN": "old", "X": "1", passed.NOT_PASSED: "HF_TOKEN OTHER"}
    assert secret_file.added(env, file) == {
        "WANDB_API_KEY": "a=b c'd",
        "HF_TOKEN": "hf_1",
        "X": "1",
        passed.NOT_PASSED: "OTHER",
    }
    assert secret_file.added(env, None) == env


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("A=1\nexport B=hush\n", "line 2: it is not NAME=VALUE, without export and blanks before the ="),
        ("hush\n", "line 1: it is not NAME=VALUE, without export and blanks before the ="),
        ("A = hush\n", "line 1: it is not NAME=VALUE, without export and blanks before the ="),
        ("A=hush\nA=hush\n", "line 2: A stands twice: remove one"),
        ("A=hush\r\n", "line 1: the value of A has blanks at an end, or characters that do not print: remove them"),
        ("A='hush'\n", "line 1: the value of A stands in quotes, which would be part of it: remove them"),
        ("LD_PRELOAD=hush\n", "line 1: LD_PRELOAD is not for ranks: leave it out"),
        ("SLURM_JWT=hush\n", "line 1: SLURM_JWT is not for ranks: leave it out"),
        ("APPTRAIN_BIND=/hush\n", "line 1: APPTRAIN_BIND is not for ranks: leave it out"),
    ],
)  # fmt: skip
def test_a_line_that_is_no_variable_for_ranks_is_refused_without_its_value(
    tmp_path: Path, text: str, said: str
) -> None:
    file = tmp_path / "secrets"
    file.write_bytes(text.encode())
    file.chmod(0o600)
    with pytest.raises(BadInput) as refused:
        secret_file.read(file)
    assert str(refused.value) == f"--secrets {file}, {said}"


def test_a_value_may_have_quotes_inside_and_a_line_may_be_blank(tmp_path: Path) -> None:
    file = tmp_path / "secrets"
    file.write_text("  \nA=\n#B=1\nC='\nD='x\nE=x'y'\nF=aa\n_g1=é\n")
    file.chmod(0o400)
    assert secret_file.read(file) == {"A": "", "C": "'", "D": "'x", "E": "x'y'", "F": "aa", "_g1": "é"}


@pytest.mark.parametrize("value", [" hush", "hush ", "hu\x1bsh", '"hush"', "''"])
def test_a_value_has_no_blanks_at_an_end_and_stands_in_no_quotes(tmp_path: Path, value: str) -> None:
    file = tmp_path / "secrets"
    file.write_text(f"# first\n\nA={value}\n")
    file.chmod(0o600)
    with pytest.raises(BadInput, match=r"line 3: the value of A (has blanks|stands in quotes)"):
        secret_file.read(file)


def test_a_file_of_text_is_taken_up_to_its_bound(tmp_path: Path) -> None:
    file = tmp_path / "secrets"
    file.write_bytes(b"A=".ljust(1 << 16, b"x"))
    file.chmod(0o600)
    assert len(secret_file.read(file)["A"]) == (1 << 16) - 2
    file.write_bytes(b"A=\xff")
    with pytest.raises(BadInput, match=r"cannot be read \(no text\)"):
        secret_file.read(file)


def test_an_environment_that_lacks_nothing_is_told_nothing(tmp_path: Path) -> None:
    file = tmp_path / "secrets"
    file.write_text("A=1\n")
    file.chmod(0o600)
    assert secret_file.added({}, file) == {"A": "1"}


def test_a_file_that_others_may_read_or_that_is_none_is_refused_at_once(tmp_path: Path) -> None:
    file, fifo = tmp_path / "secrets", tmp_path / "fifo"
    file.write_text("A=hush\n")
    os.mkfifo(fifo, 0o600)
    large = tmp_path / "large"
    large.write_bytes(b"A" * (secret_file.MOST + 1))
    for mode in (0o640, 0o604, 0o620):
        file.chmod(mode)
        with pytest.raises(BadInput, match=f"is open to others .mode {mode:o}, user .*: chmod 600 {file}"):
            secret_file.read(file)
    for path, why in ((fifo, "a FIFO"), (large, "more than 65536 bytes"), (tmp_path / "no", "No such file")):
        with pytest.raises(BadInput, match=why):
            secret_file.read(path)
