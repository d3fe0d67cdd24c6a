"""tests/pages.py: what an example is, and what may differ from the page."""

from pathlib import Path
from subprocess import PIPE, Popen

import pytest

from tests.pages import PAGES, Shell, as_usual, differences, examples, tell

PAGE = """\
# A page

<!-- run: here -->
```
$ export WHO=me
$ echo "Submitted batch job 41"; \\
  echo "for $WHO"
Submitted batch job 4
for me
$ echo cat apptrain-4.out took 3.1 s
cat apptrain-41.out took 2 s
```

<!-- not run: needs a GPU -->
```
$ nvidia-smi
```

```
no example
```
"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    return page


def test_examples_are_the_blocks_with_a_prompt_and_know_how_they_are_run(page: Path) -> None:
    run, left = examples(page)
    assert (run.how, run.what, run.place) == ("run", "here", "page.md:5")
    assert [(step.command, step.shown, step.place) for step in run.steps] == [
        ("export WHO=me", [], "page.md:5"),
        (
            'echo "Submitted batch job 41"; \\\n  echo "for $WHO"',
            ["Submitted batch job 4", "for me"],
            "page.md:6",
        ),
        ("echo cat apptrain-4.out took 3.1 s", ["cat apptrain-41.out took 2 s"], "page.md:10"),
    ]
    assert (left.how, left.what) == ("not run", "needs a GPU")


def test_the_examples_of_a_page_share_a_shell_and_numbers_of_jobs_are_those_of_here(page: Path) -> None:
    waited = []
    with Popen(["bash"], stdin=PIPE, stdout=PIPE, text=True) as process:
        shell = Shell(process, until_ended=lambda: waited.append("yes"))
        assert tell(page, shell, "here", {}) == []
        assert process.stdin
        process.stdin.close()
    assert shell.known == {"4": "41"}
    assert waited == ["yes"]


def test_what_a_run_prints_otherwise_is_told_with_its_place(page: Path) -> None:
    page.write_text(PAGE.replace("for me\n", "for you\n"))
    with Popen(["bash"], stdin=PIPE, stdout=PIPE, text=True) as process:
        (told,) = tell(page, Shell(process), "here", {})
        assert process.stdin
        process.stdin.close()
    assert told.startswith('page.md:6: $ echo "Submitted')
    assert "\n- for you\n+ for me\nprinted:\n" in told


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("apptrain: run directory /home/alice/runs/apptrain-3", "apptrain: run directory /home/alice/runs/apptrain-17"),
        ("job 3, attempt 0, rendezvous gpu-a01:61144", "job 12, attempt 0, rendezvous gpu-a01:60001"),
        ("1.pbssrv", "77.pbssrv"),
        ("preflight: 3 nodes, nothing found, 0.01 s", "preflight: 3 nodes, nothing found, 0.13 s"),
        ("the ranks started after 2.3 s: task 0.1, torch 2.1", "the ranks started after 9 s: task 0.1, nodes 0.0, torch 2.1"),
        ("runs/embedded-20261123-114627-25737/job.log", "runs/embedded-20261201-000000-1/job.log"),
        ("gpu-a02  2     22 GiB  31 GiB", "gpu-a02  16     9 GiB    8.1 GiB"),
    ],
)  # fmt: skip
def test_what_varies_from_run_to_run_makes_no_difference(one: str, other: str) -> None:
    assert as_usual(one) == as_usual(other)
    assert differences([one], [other]) == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("status 64", "status 69"),
        ("attempt 0, 2 nodes", "attempt 1, 2 nodes"),
        ("3 nodes, 3 ranks", "3 nodes, 4 ranks"),
        ("OMP_NUM_THREADS=1", "OMP_NUM_THREADS=2"),
        ("world_size               6", "world_size               4"),
        ("within 3 steps", "within 4 steps"),
    ],
)
def test_what_means_something_makes_a_difference(one: str, other: str) -> None:
    assert differences([one], [other]) == [f"- {as_usual(one)}", f"+ {as_usual(other)}"]


def test_lines_may_come_in_any_order_and_dots_stand_for_any_lines() -> None:
    assert differences(["a", "b", "b"], ["b", "a", "b"]) == []
    assert differences(["a", "..."], ["x", "a", "y"]) == []
    assert differences(["a", "..."], ["x"]) == ["- a"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_example_of_a_page_is_run_or_says_why_not(page: Path) -> None:
    scenes = ("here", "slurm", "pbs", "site") + (("clone",) if page == PAGES[0] else ())
    for example in examples(page):
        assert example.how, f"{example.place}: neither run nor not run: tests/pages.py says how to mark it"
        if example.how == "run":
            assert example.what in scenes, example.place
        else:
            assert len(example.what) > 9, f"{example.place}: say why"
