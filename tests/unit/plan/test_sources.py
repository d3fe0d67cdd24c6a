"""Where a value comes from, and how a line of options becomes texts and again a line."""

import argparse
import re
from pathlib import Path
from typing import Any

import pytest

from entrypoint.core.checkout import HOME
from entrypoint.core.errors import BadInput
from entrypoint.plan import sources
from entrypoint.plan.options import OPTIONS
from entrypoint.plan.passed import matches

NO_PROFILE: dict[str, Any] = {}


def resolved(
    flags: dict[str, str | None], env: dict[str, str], profile: dict[str, Any], *command: str
) -> sources.Settings:
    return sources.resolve(flags, env, profile, "lab.yaml", command)


@pytest.mark.parametrize(
    ("flags", "env", "profile", "value", "source"),
    [
        ({"peer-timeout": "1"}, {"APPTRAIN_PEER_TIMEOUT": "2"}, {"peer-timeout": 3}, 1.0, "flag"),
        ({"peer-timeout": None}, {"APPTRAIN_PEER_TIMEOUT": "2"}, {"peer-timeout": 3}, 2.0, "env:APPTRAIN_PEER_TIMEOUT"),
        ({}, {}, {"peer-timeout": 3}, 3.0, "profile:lab.yaml"),
        ({}, {}, {}, None, "default"),
    ],
)  # fmt: skip
def test_a_flag_wins_over_the_variable_and_that_over_the_profile(
    flags: dict[str, str | None], env: dict[str, str], profile: dict[str, Any], value: object, source: str
) -> None:
    settings = resolved(flags, env, profile)
    found = settings["peer-timeout"]
    if source == "default":
        (value,) = (option.default for option in OPTIONS if option.name == "peer-timeout")
    assert (found.value, str(found.source), settings.value("peer-timeout")) == (value, source, value)
    assert settings.given("peer-timeout") is (source != "default")


def test_a_profile_gives_only_what_it_may_and_a_list_as_one_text() -> None:
    profile = {"preload": ("a", "b.c"), "hang-timeout": 3, "interface": ()}
    settings = resolved({}, {}, profile)
    assert settings.value("preload") == ("a", "b.c")
    assert (settings.given("preload"), settings.given("hang-timeout"), settings.given("interface")) == (
        True,
        False,
        False,
    )


@pytest.mark.parametrize(
    ("flags", "env", "profile", "said"),
    [
        ({"peer-timeout": ""}, {}, {}, "--peer-timeout is empty: give S or leave it out"),
        ({"doctor": ""}, {}, {}, "--doctor is empty: give 1 or leave it out"),
        ({}, {"APPTRAIN_PEER_TIMEOUT": ""}, {}, "APPTRAIN_PEER_TIMEOUT is empty: give S or leave it out"),
        ({"peer-timeout": "soon"}, {}, {}, "--peer-timeout=soon: must be seconds, a number"),
        ({"nproc-per-node": "x"}, {}, {}, "--nproc-per-node=x: must be N, a whole number"),
        ({"nproc-per-node": "80000"}, {}, {}, "--nproc-per-node=80000: must be from 1 to 4096"),
        ({"omp-num-threads": "0"}, {}, {}, "--omp-num-threads=0: must be from 1 to 4096"),
        ({"nnodes": "2:1"}, {}, {}, "--nnodes=2:1: MIN is more than MAX"),
        ({}, {}, {"peer-timeout": 0}, "peer-timeout in lab.yaml=0: must be seconds, more than 0 and less than a week"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named_with_where_it_stands(
    flags: dict[str, str | None], env: dict[str, str], profile: dict[str, Any], said: str
) -> None:
    with pytest.raises(BadInput) as refused:
        resolved(flags, env, profile)
    assert str(refused.value) == said


def test_without_a_command_it_is_the_reference_job_and_the_doctor_is_a_command_of_its_own() -> None:
    reference = ("-m", "train", "--config", "digits")
    assert resolved({}, {}, NO_PROFILE).command == reference
    assert resolved({}, {}, NO_PROFILE, "my.py", "1").command == ("my.py", "1")
    assert resolved({"doctor": "1"}, {}, NO_PROFILE).command == ("-m", "entrypoint.doctor")
    as_json = resolved({}, {"APPTRAIN_DOCTOR": "1"}, NO_PROFILE, "--json")
    assert as_json.command == ("-m", "entrypoint.doctor", "--json")


@pytest.mark.parametrize("command", ["my.py --lr 0.1", "--jsno", "--json my.py", "-m train", "my.py --json"])
def test_the_doctor_takes_no_script_and_no_other_option(command: str) -> None:
    with pytest.raises(BadInput) as refused:
        resolved({"doctor": "1"}, {}, NO_PROFILE, *command.split())
    assert str(refused.value) == (
        f"--doctor takes no script, and CMD is `{command}`: leave one of them out (only --json may stand behind --)"
    )


LINE = ["--device", "cpu", "--max_restarts=2", "--doctor", "--", "my.py", "--device", "x"]
TEXTS = {"device": "cpu", "max-restarts": "2", "doctor": "1"}


def test_a_line_is_its_options_texts_and_its_cmd_and_they_are_the_line_again() -> None:
    assert sources.texts(LINE) == (TEXTS, ["my.py", "--device", "x"])
    line = ["--max-restarts=2", "--doctor", "--device=cpu"]
    for command in ([], ["my.py", "--x"]):
        assert sorted(sources.words(TEXTS, command)[:3]) == sorted(line)
        assert sources.words(TEXTS, command)[3:] == (["--", *command] if command else [])


def test_options_of_a_whole_job_are_taken_and_told_only_of_one() -> None:
    line = ["--stage", "off", "--dry-run"]
    assert sources.texts(line, job=True) == ({"stage": "off", "dry-run": "1"}, [])
    with pytest.raises(BadInput, match=r"^--stage is an option of submit, not of launch: "):
        sources.texts(line)
    texts = {"stage": "off", "device": "cpu"}
    assert sources.words(texts, []) == ["--device=cpu"]
    assert sources.words(texts, [], job=True) == ["--stage=off", "--device=cpu"]


@pytest.mark.parametrize("word", ["--devic", "--dev=cpu", "-h", "--help"])
def test_no_part_of_a_name_and_no_help_is_taken_of_what_is_inherited(word: str) -> None:
    with pytest.raises(BadInput, match=r"^unrecognized arguments: "):
        sources.texts([word])


def test_what_is_inherited_comes_from_the_file_else_the_variable(tmp_path: Path) -> None:
    file = tmp_path / "arguments"
    env = {"APPTRAIN_ARGS": "--device cpu -- 'my script.py'"}
    assert sources.inherited(env) == ({"device": "cpu"}, ["my script.py"])
    assert sources.inherited({}) == ({}, [])
    for text, found in (
        ("", ({}, [])),
        ("--device\0cpu\0--\0a b\0\0", ({"device": "cpu"}, ["a b", ""])),
        ("--doctor", ({"doctor": "1"}, [])),
    ):
        file.write_text(text)
        assert sources.inherited(env | {"APPTRAIN_ARGS_FILE": str(file)}) == found


def test_what_is_inherited_and_cannot_be_is_refused_by_its_name(tmp_path: Path) -> None:
    file = tmp_path / "arguments"
    file.write_text("--frob\0")
    of_file = {"APPTRAIN_ARGS_FILE": str(file)}
    with pytest.raises(BadInput, match=r"^in APPTRAIN_ARGS_FILE: unrecognized arguments: --frob"):
        sources.inherited(of_file)
    file.write_bytes(b"x" * ((8 << 20) + 1))
    with pytest.raises(
        BadInput, match=r"cannot be read \(it has more than 8388608 bytes\): give a path that exists$"
    ):
        sources.inherited(of_file)
    assert sources.inherited({"APPTRAIN_ARGS": "--dry-run"}, job=True) == ({"dry-run": "1"}, [])
    with pytest.raises(BadInput, match=r"^in APPTRAIN_ARGS: --dry-run is an option of submit, "):
        sources.inherited({"APPTRAIN_ARGS": "--dry-run"})


def test_own_options_win_over_inherited_ones_and_cmd_is_given_once(tmp_path: Path) -> None:
    env = {"APPTRAIN_ARGS": "--device cpu --doctor -- my.py"}
    own = {"device": "cuda", "mode": None}
    assert sources.merged(own, [], env) == ({"device": "cuda", "doctor": "1"}, ["my.py"])
    assert sources.merged(own, ["x.py"], {}) == ({"device": "cuda"}, ["x.py"])
    with pytest.raises(BadInput, match=r" and in APPTRAIN_ARGS: give it once$"):
        sources.merged({}, ["x.py"], env)
    (tmp_path / "a").write_text("--\0my.py\0")
    with pytest.raises(BadInput, match=r" and in APPTRAIN_ARGS_FILE: give it once$"):
        sources.merged({}, ["x.py"], env | {"APPTRAIN_ARGS_FILE": str(tmp_path / "a")})
    assert sources.merged({}, [], {"APPTRAIN_ARGS": "--dry-run"}, job=True)[0] == {"dry-run": "1"}


def test_the_options_of_launch_are_read_behind_those_of_another_command() -> None:
    front = argparse.ArgumentParser(prog="apptrain run")
    given = sources.of_launch(["--device", "cpu", "--doctor"], front)
    assert {name: text for name, text in given.items() if text is not None} == {
        "device": "cpu",
        "doctor": "1",
    }
    with pytest.raises(BadInput, match=r"^unrecognized arguments: --json"):
        sources.of_launch(["--json"], front)


def test_what_was_given_and_is_empty_is_refused_and_no_default_is() -> None:
    parser = sources.parser_class()(prog="apptrain x", add_help=False)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="a run directory")
    parser.add_argument("what", nargs="?", default="", metavar="WHAT", help="what to read")
    parser.add_argument("--dir", default="", metavar="DIR")
    parser.add_argument("--join_key", default="", metavar="FILE")
    for words, said in (
        (["--dir", ""], "--dir is empty: give DIR or leave it out"),
        (["--dir="], "--dir is empty: give DIR or leave it out"),
        (["--join_key", ""], "--join-key is empty: give FILE or leave it out"),
        (["a", ""], "RUN is empty: give a run directory"),
    ):
        with pytest.raises(BadInput) as refused:
            parser.parse_args(words)
        assert str(refused.value) == said
    nothing = {"runs": [], "what": "", "dir": "", "join_key": ""}
    assert vars(parser.parse_args([])) == nothing
    parser.takes_empty = True  # type: ignore[attr-defined]
    assert vars(parser.parse_args(["--dir", ""])) == nothing


@pytest.mark.parametrize(
    ("name", "meant"),
    [("IMGE", "IMAGE"), ("MAX_RESTART", "MAX_RESTARTS"), ("RUNDIR", "RUN_DIR"), ("nnodes", "NNODES"), ("BINDS", "BIND")],
)  # fmt: skip
def test_a_variable_a_letter_apart_from_one_of_ours_is_refused(name: str, meant: str) -> None:
    with pytest.raises(BadInput) as refused:
        resolved({}, {f"APPTRAIN_{name}": "x"}, NO_PROFILE)
    assert str(refused.value) == (
        f"APPTRAIN_{name} is no variable of apptrain: did you mean APPTRAIN_{meant}? Correct the name, or unset it"
    )


def test_a_variable_of_somebody_elses_with_our_prefix_is_left_alone() -> None:
    assert resolved({}, {"APPTRAIN_LOG": "x", "APPTRAIN_TEST_IMAGE": "y", "APPTRAIN_": "z"}, NO_PROFILE)


def test_every_variable_that_our_code_reads_is_known() -> None:
    """Else one that two of our processes share could be taken for a misspelled one."""
    places = [HOME / "apptrain", *(HOME / "src").rglob("*.py"), *(HOME / "entrypoint").rglob("*.py")]
    for folder in ("host", "slurm", "pbs", "containers"):
        places += [
            path
            for path in (HOME / folder).rglob("*")
            if path.suffix in (".sh", ".py", ".def", ".sbatch", ".pbs")
        ]
    found = {
        name for path in places for name in re.findall(r"\bAPPTRAIN_[A-Z][A-Z_]*[A-Z]\b", path.read_text())
    }
    known = {option.variable for option in OPTIONS}
    known |= {f"APPTRAIN_{name}" for name in (sources.OF_JOB_SCRIPTS + sources.OF_PROCESSES).split()}
    assert len(found) > 50
    assert {name for name in found if not matches(name, known)} == {"APPTRAIN_FOO_BAR"}
