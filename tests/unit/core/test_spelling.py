"""What a misspelled word was probably meant to be."""

import pytest

from entrypoint.core.spelling import guesses, meant, near

OPTIONS = [
    "--nodes",
    "--gpus-per-node",
    "--nproc-per-node",
    "--device",
    "--time",
    "--profile",
    "--partition",
    "--qos",
]


@pytest.mark.parametrize(
    ("word", "known", "found"),
    [
        ("Nodes", ["nodes"], ["nodes"]),
        ("--gpus_per_node", OPTIONS, ["--gpus-per-node"]),
        ("nod", ["nodes", "node", "nothing"], ["node", "nodes"]),
        ("par", ["x", "partition"], ["partition"]),
        ("pa", ["x", "partition"], []),
        ("step", ["steps", "stepped", "stepper"], ["steps", "stepped"]),
        ("devise", ["device", "advise", "service"], ["device", "advise"]),
        ("xyz", ["nodes"], []),
        ("abcde", ["abxyz"], []),
        ("abcdefg", ["abcdexx"], ["abcdexx"]),
    ],
)
def test_what_is_alike_is_near_and_what_it_begins_too(word: str, known: list[str], found: list[str]) -> None:
    assert near(word, known) == found


def test_at_most_so_many_are_near() -> None:
    known = ["steps", "stepp", "steqp"]
    assert [len(near("step", known, most=most)) for most in (1, 2, 3)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("word", "known", "found"),
    [
        ("--gpu", OPTIONS, ["--gpus-per-node"]),
        ("--gpu", ["--device"], ["--device cuda"]),
        ("--gpus", ["--nproc-per-node", "--nodes"], ["--nproc-per-node"]),
        ("--image", OPTIONS, ["APPTRAIN_IMAGE"]),
        ("--num_processes", OPTIONS, ["--nproc-per-node"]),
        ("--cluster", OPTIONS, ["--profile"]),
        ("-n", OPTIONS, ["--nodes", "--nproc-per-node"]),
        ("-n", ["--nodes"], ["--nodes"]),
        ("-q", [*OPTIONS, "-Q"], ["--partition"]),
        ("-x", OPTIONS, []),
        ("--profil", OPTIONS, ["--profile"]),
        ("--cpu", ["--device", "--cpus"], ["--cpus"]),
        ("--cpu", ["--device"], ["--device cpu"]),
    ],
)
def test_a_letter_apart_wins_over_what_other_programs_call_it_and_that_over_what_is_vague(
    word: str, known: list[str], found: list[str]
) -> None:
    assert guesses(word, known) == found


def test_a_guess_is_the_end_of_a_sentence_and_no_guess_is_nothing() -> None:
    assert meant("gpu", ["cuda", "cpu"]) == ": did you mean cuda?"
    assert meant("-n", OPTIONS) == ": did you mean --nodes or --nproc-per-node?"
    assert meant("xyz", OPTIONS) == ""
