"""entrypoint/plan/commands.py: what belongs to which command."""

import sys

import pytest

from entrypoint.core import checkout
from entrypoint.plan import commands


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["/home/alice/bin/apptrain", "run", "--", "x.py"], ["run", "--", "x.py"]),
        (["apptrain", "plan"], ["plan"]),
        (["apptrain", "doctor", "--json"], []),
        (["apptrain"], []),
        (["/usr/lib/python3/entrypoint/cli.py", "plan"], []),
    ],
)
def test_only_what_is_typed_behind_apptrain_is_quoted_back(
    argv: list[str], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    assert commands.typed() == words


@pytest.mark.parametrize(
    ("argv", "before", "command"),
    [
        (["a", "b"], ["a", "b"], []),
        (["a", "--", "b", "--", "c"], ["a"], ["b", "--", "c"]),
        (["--"], [], []),
        ([], [], []),
    ],
)
def test_a_line_is_cut_at_the_first_dashes(argv: list[str], before: list[str], command: list[str]) -> None:
    assert commands.split_command(argv) == (before, command)


@pytest.mark.parametrize(
    ("command", "mode", "no_python", "started"),
    [
        (["x.py", "--", "a"], "torchrun", False, ["x.py", "a"]),
        (["x.py", "--", "--", "a"], "rank", False, ["x.py", "--", "a"]),
        (["x.py", "a", "--"], "torchrun", False, ["x.py", "a", "--"]),
        (["x.py", "--", "a"], "exec", False, ["x.py", "--", "a"]),
        (["-m", "mod", "--", "a"], "torchrun", False, ["-m", "mod", "a"]),
        (["-m", "--", "a"], "torchrun", True, ["-m", "a"]),
        (["prog", "x", "--"], "torchrun", True, ["prog", "x", "--"]),
        (["x.py"], "torchrun", False, ["x.py"]),
    ],
)
def test_a_program_gets_its_words_as_torchruns_parser_leaves_them(
    command: list[str], mode: str, no_python: bool, started: list[str]
) -> None:
    before = list(command)
    assert commands.program(command, mode=mode, no_python=no_python) == started
    assert command == before


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("a x.py b", "a -- x.py b"),
        ("a -m mod", "a -- -m mod"),
        ("a -- x.py", "a -- x.py"),
        ("a b", "a b"),
        ("x.py y.py", "-- x.py y.py"),
    ],
)
def test_dashes_are_put_in_front_of_the_first_script(words: str, found: str) -> None:
    assert commands.with_dashes(words.split()) == found.split()


@pytest.mark.parametrize(
    ("words", "command", "ours", "others"),
    [
        ("--nodes 2 x.py --lr 1", "run", "--nodes 2", "x.py --lr 1"),
        ("x.py --nodes=2 --doctor y", "run", "--nodes=2 --doctor", "x.py y"),
        ("--nproc_per_node 2 --frob", "run", "--nproc_per_node 2", "--frob"),
        ("--cluster a --nodes", "submit", "--cluster a --nodes", ""),
        ("--cluster a", "run", "", "--cluster a"),
        ("--json --env-file f", "plan", "--json --env-file f", ""),
    ],
)
def test_options_of_a_command_are_told_from_a_script_and_its_own(
    words: str, command: str, ours: str, others: str
) -> None:
    assert commands.sorted_out(words.split(), command) == (ours.split(), others.split())


@pytest.mark.parametrize(
    ("word", "is_script"),
    [("x.py", True), ("x.sh", True), ("x.ipynb", True), ("-m", True), ("x", False), ("x.yaml", False)],
)
def test_a_word_that_looks_like_a_script(word: str, is_script: bool) -> None:
    assert commands.is_script(word) is is_script


@pytest.mark.parametrize(
    ("command", "package"),
    [
        (["-m", "train"], "train"),
        (["-m", "train.hello"], "train"),
        (["-m", "entrypoint.doctor"], "entrypoint"),
        (["-m", "other"], ""),
        (["-m"], ""),
        (["train"], ""),
        (["x", "train"], ""),
    ],
)
def test_a_module_of_this_project_is_known(command: list[str], package: str) -> None:
    assert commands.our_package(command) == package


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("install", ": did you mean make venv, or {us} image build?"),
        ("run", ": did you mean {us} run?"),
        ("train", ": did you mean {us} demo?"),
        ("tesst", ": did you mean test?"),
        ("frobnicate", ""),
    ],
)
def test_a_word_that_is_none_of_makes_targets(word: str, said: str) -> None:
    assert commands._of_make(word, ["test", "lint"]) == said.format(us=checkout.apptrain())
