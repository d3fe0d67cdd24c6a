"""entrypoint/batch/survey/draft.py: the profile's text, which YAML must read as it was meant."""

import ast
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from entrypoint.batch.survey import draft
from entrypoint.batch.survey.draft import ORDER, WIDTH, Line, text
from entrypoint.cli import site


def test_values_have_where_they_come_from_and_gaps_are_questions() -> None:
    lines = [
        Line("env.NCCL_SOCKET_IFNAME", "hsn", "hsn0 here"),
        Line("container.modules", questions=("which module has apptainer?",)),
        Line("request.time", "01:00:00"),
        Line("nodes.whole", True, "sinfo"),
        Line("nodes.gpus", 4, "sinfo", ("is it 4?",)),
        Line("clusters", ("lab", "lab.example.org")),
        Line("scheduler", "slurm", "sinfo answers"),
        Line("nodes.gpus", questions=("or 8?",)),
    ]
    assert text(["The lab,", "as\tfound"], lines) == (
        "# The lab,\n"
        "# as found\n"
        "\n"
        "scheduler: slurm                 # sinfo answers\n"
        "clusters: [lab, lab.example.org]\n"
        "\n"
        "nodes:\n"
        "  # question: is it 4?\n"
        "  # question: or 8?\n"
        "  gpus: 4                        # sinfo\n"
        "  whole: true                    # sinfo\n"
        "\n"
        "request:\n"
        '  time: "01:00:00"\n'
        "\n"
        "# container:\n"
        "  # question: which module has apptainer?\n"
        "\n"
        "env:\n"
        "  NCCL_SOCKET_IFNAME: hsn        # hsn0 here\n"
    )


def test_long_questions_and_reasons_take_further_lines() -> None:
    long = " ".join(["word"] * 40)
    written = text([], [Line("nodes.gpus", 4, long, (long,))])
    assert max(map(len, written.splitlines()[2:4])) <= WIDTH
    assert written.splitlines()[2].startswith("  # question: word word")
    assert written.splitlines()[3].startswith("  #   word word")
    assert written.splitlines()[-2:] == [f"  # {long}", "  gpus: 4"]


@pytest.mark.parametrize(
    "word",
    [
        "no",
        "on",
        "Null",
        "1e3",
        "0x1",
        "12",
        "01:00:00",
        "a: b",
        "a #b",
        "[a]",
        "- a",
        "*a",
        "-hsn",
        "$SCRATCH/a",
        "--gpus-per-node={gpus}",
        'a"b',
        "\N{SNOWMAN}",
    ],
)
def test_yaml_reads_a_word_as_it_was(word: str) -> None:
    read = yaml.safe_load(text([], [Line("title", word), Line("clusters", (word, word))]))
    assert read == {"title": word, "clusters": [word, word]}


def test_what_is_empty_stays_to_be_filled_in() -> None:
    assert yaml.safe_load(text([], [Line("tested", "", "when"), Line("documented", (), "pages")])) == {
        "documented": [],
        "tested": None,
    }


@settings(max_examples=40)
@given(st.text(st.characters(codec="utf-8"), max_size=40))
@example("-")
@example("---")
@example("-0")
def test_what_a_machine_says_never_ends_its_line(said: str) -> None:
    read = yaml.safe_load(text([said], [Line("nodes.gpus", 4, said, (said,)), Line("title", said)]))
    assert read.keys() == {"title", "nodes"}
    assert read["nodes"] == {"gpus": 4}
    assert read["title"] is None or isinstance(read["title"], str)


def test_no_key_is_dropped_for_want_of_a_place_in_the_order() -> None:
    survey = Path(draft.__file__).parent
    named = set()
    files = [Path(site.__file__), *survey.glob("*.py"), *survey.parent.glob("*/survey.py")]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Line":
                named |= {word.value for word in ast.walk(node.args[0]) if isinstance(word, ast.Constant)}
    assert len(named) > 15
    assert named <= set(ORDER)
