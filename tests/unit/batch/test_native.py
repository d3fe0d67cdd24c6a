"""The words of a scheduler's program, by a table of its options."""

from pathlib import Path

import pytest

from entrypoint.batch import login, native
from entrypoint.batch.native import NativeOption, OptionTable
from entrypoint.core.errors import BadInput
from entrypoint.plan.profile import Nodes, Profile, Request

TABLE = OptionTable(
    program="sub",
    valued=("--name", "--called", "-n", "-l"),
    optional=("--nice",),
    flags=("--hold", "-H"),
    long={"-n": "--name", "-H": "--hold", "--called": "--name"},
)


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["--name", "x", "y"], NativeOption("--name", "x", ("--name", "x"))),
        (["--name=x", "y"], NativeOption("--name", "x", ("--name=x",))),
        (["--name=", "y"], NativeOption("--name", "", ("--name=",))),
        (["--name", "-1"], NativeOption("--name", "-1", ("--name", "-1"))),
        (["--name", "-"], NativeOption("--name", "-", ("--name", "-"))),
        (["--called", "x", "y"], NativeOption("--name", "x", ("--called", "x"))),
        (["--called=x"], NativeOption("--name", "x", ("--called=x",))),
        (["-n", "x"], NativeOption("--name", "x", ("-n", "x"))),
        (["-nx", "y"], NativeOption("--name", "x", ("-nx",))),
        (["-l", "x"], NativeOption("-l", "x", ("-l", "x"))),
        (["-lx"], NativeOption("-l", "x", ("-lx",))),
        (["--nice", "3"], NativeOption("--nice", "", ("--nice",))),
        (["--nice=3"], NativeOption("--nice", "3", ("--nice=3",))),
        (["--hold", "x"], NativeOption("--hold", "", ("--hold",))),
        (["-H", "x"], NativeOption("--hold", "", ("-H",))),
        (["-Hx"], None),
        (["-"], None),
        (["n"], None),
        (["--nam", "x"], None),
        (["-x"], None),
    ],
)
def test_an_option_is_read_with_its_value_and_its_words(
    words: list[str], option: NativeOption | None
) -> None:
    assert native.read(words, TABLE) == option


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--name"], "--name of sub needs a value: give --name VALUE"),
        (["--name", "--hold"], "--name of sub needs a value: give --name VALUE"),
        (["-n", "-H"], "-n of sub needs a value: give -n VALUE"),
        (["--hold=1"], "--hold=1: sub takes no value for --hold"),
    ],
)
def test_a_value_that_is_missing_or_needless_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(BadInput) as refused:
        native.read(words, TABLE)
    assert str(refused.value) == said


def test_a_line_is_all_its_words_again() -> None:
    words = ["-n", "x", "--frob", "y", "--hold", "-lz", "--nice=3"]
    options = native.read_all(words, TABLE)
    assert [option.name for option in options] == ["--name", "", "", "--hold", "-l", "--nice"]
    assert native.words(options) == words
    assert [str(option) for option in options[:2]] == ["-n x", "--frob"]


def test_of_the_same_option_the_users_stands_last_and_that_is_said_if_it_differs() -> None:
    own = native.read_all(["--name=a", "-l", "x", "--hold"], TABLE)
    users = native.read_all(["-n", "b", "-l", "x", "--nice"], TABLE)
    kept, said = native.merged(own, users, lambda new, old: new.name == old.name)
    assert native.words(kept) == ["--hold", "-n", "b", "-l", "x", "--nice"]
    assert said == ["-n b in place of --name=a"]


# --- what a login node makes of words and times -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("1", 60),
        ("9999999", 9_999_999 * 60),
        ("0:01", 1),
        ("90:30", 5430),
        ("1:00:00", 3600),
        ("99999:59:59", 99999 * 3600 + 3599),
        ("1-0", 86400),
        ("1-2:3", 86400 + 2 * 3600 + 180),
        ("1-02:03:04", 86400 + 2 * 3600 + 184),
        *(
            (text, None)
            for text in ("", "0", "0:00", "0-0", "x", "1:60", "1:2:60", "12345678", "1-", "-1", "1 ", "٣")
        ),
    ],
)
def test_a_time_of_slurm_is_seconds(time: str, seconds: int | None) -> None:
    assert login.seconds(time) == seconds


@pytest.mark.parametrize(
    ("seconds", "clock"), [(0, "00:00:00"), (3599, "00:59:59"), (3661, "01:01:01"), (360_000, "100:00:00")]
)
def test_seconds_are_a_clock(seconds: int, clock: str) -> None:
    assert login.clock(seconds) == clock


def test_options_have_their_values_from_one_word_or_the_next() -> None:
    words = ["--a=1", "--b", "2", "-c3", "-d", "4", "x", "-e"]
    assert login.pairs(words) == [("--a", "1"), ("--b", "2"), ("-c", "3"), ("-d", "4"), ("-e", "")]


@pytest.mark.parametrize(
    ("whole", "of", "gpus", "share"),
    [
        (64, 4, 1, 16),
        (64, 4, 4, 64),
        (1, 4, 1, 1),
        (10, 4, 3, 7),
        (64, 0, 0, 64),
        (64, None, 2, 64),
        (None, 4, 1, None),
    ],
)
def test_a_part_of_a_nodes_gpus_comes_with_its_share(
    whole: int | None, of: int | None, gpus: int, share: int | None
) -> None:
    assert login.share(whole, Profile(nodes=Nodes(gpus=of)), gpus) == share


def test_gpus_are_asked_for_in_the_sites_words_else_in_the_schedulers() -> None:
    assert login.gpus_word(Profile(scheduler="slurm"), 2) == "--gpus-per-node=2"
    assert (
        login.gpus_word(Profile(scheduler="slurm", request=Request(gpus="--gres=gpu:{gpus}")), 2)
        == "--gres=gpu:2"
    )


def test_the_scripts_own_lines_are_words_without_those_that_are_left_out(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text(
        "#!/bin/bash\n#S --a=1 # why\n##S --b\n#S\n#S --name 'x y'\n# S -c\n#S --ab\n#S # nothing\n"
    )
    assert login.directives(script, "#S", "--a=") == ["--name", "x y", "--ab"]
    assert login.directives(script, "#S ") == ["--a=1", "--name", "x y", "--ab"]


def test_a_job_asks_by_hand_in_words_of_the_site_or_of_its_own_or_in_a_variable() -> None:
    def asks(
        what: str, scheduler: str = "slurm", *words: str, given: tuple[str, ...] = (), **env: str
    ) -> bool:
        return login.is_asked_by_hand(scheduler, what, login.Wish(nodes=1, options=words, given=given), env)

    assert asks("account", "slurm", "-A", "x")
    assert asks("account", "slurm", given=("--account=x",))
    assert asks("account", SBATCH_ACCOUNT="x")
    assert not asks("account", SBATCH_ACCOUNT="")
    assert not asks("account", "slurm", "--comment=-A")
    assert asks("time", "pbs", "-l", "walltime=1:00:00")
    assert not asks("time", "pbs", "-l", "mem=1gb")
    assert not asks("nothing", "slurm", "-A", "x")


def test_what_a_command_prints_counts_if_it_ends_well(tmp_path: Path) -> None:
    for name, text in (
        ("well", "echo said"),
        ("ill", "echo said; exit 3"),
        ("bytes", "printf 'a\\377b'; echo lost >&2"),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    said = [login.run(str(tmp_path / name)) for name in ("well", "ill", "bytes", "none")]
    assert said == ["said\n", "", "a\ufffdb", ""]


def test_the_job_script_is_named_as_it_is_found_from_here(tmp_path: Path) -> None:
    profile = Profile(scheduler="slurm")
    assert login.script(profile) == login.CHECKOUT / "slurm/multinode.sbatch"
    assert login.script_word(profile, login.CHECKOUT) == "slurm/multinode.sbatch"
    assert login.script_word(profile, tmp_path) == str(login.CHECKOUT / "slurm/multinode.sbatch")
    (tmp_path / "link").symlink_to(login.CHECKOUT)
    assert login.script_word(profile, tmp_path / "link") == "slurm/multinode.sbatch"
