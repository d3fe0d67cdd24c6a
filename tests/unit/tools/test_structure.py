"""What tools/structure.py counts, on small sources."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools import structure

CHECKOUT = Path(__file__).resolve().parents[3]
FORMULA = "The secret" + ":"


def measured(*, run: str = "", **files: str) -> structure.Structure:
    """Of a module in `entrypoint/run`, and of bash by name."""
    scripts = {f"host/{name}.sh": text for name, text in files.items()}
    return structure.measure({"entrypoint/run/one.py": run, **scripts})


def state(body: str, *others: str) -> tuple[int, int]:
    """Attributes of a class A with these lines, and how many of them change."""
    lines = [f"    {line}" for line in body.splitlines()]
    text = "\n".join(["class A:", "    def __init__(self):", "        self.a = self.b = 0", *lines, *others])
    return measured(run=text).state.by_class["entrypoint/run/one.py A"]


@pytest.mark.parametrize(
    ("statement", "counted"),
    [
        ("self.a.append(1)", (2, 0)),
        ("self.a[0] = 1", (2, 0)),
        ("self.a = 1", (2, 1)),
        ("self.a += 1", (2, 1)),
        ("self.c: int = 1", (3, 1)),
        ("x, (self.a, *self.b) = 1, (2, 3)", (2, 2)),
        ("del self.a", (2, 1)),
        ("for self.a in x: pass", (2, 1)),
        ("with x as self.a: pass", (2, 1)),
        ("setattr(self, 'a', 1)", (2, 1)),
        ("object.__setattr__(self, 'c', 1)", (3, 1)),
        ("def inner(): self.a = 1", (2, 1)),
    ],
)
def test_an_attribute_changes_if_it_is_assigned_after_construction(
    statement: str, counted: tuple[int, int]
) -> None:
    assert state(f"def later(self):\n    {statement}") == counted


def test_who_assigns_to_another_object_changes_its_class() -> None:
    assert state("pass", "def other(a):", "    a.b = 1") == (2, 1)


def test_an_owner_that_cannot_be_told_is_listed() -> None:
    found = measured(run="def other(a):\n    a.b = 1").state
    assert found.elsewhere == ("entrypoint/run/one.py:2 a.b",)


def test_a_function_in_a_constructor_runs_later() -> None:
    text = "class A:\n    def __init__(self):\n        self.a = 0\n        def later(): self.a = 1"
    assert measured(run=text).state.by_class["entrypoint/run/one.py A"] == (1, 1)


def test_fields_of_a_dataclass_and_of_its_base_count() -> None:
    text = (
        "from dataclasses import dataclass\n@dataclass\nclass A:\n    a: int\n    def later(self): self.a = 1\n"
        "@dataclass\nclass B(A):\n    b: int"
    )
    found = measured(run=text).state
    assert found.by_class == {"entrypoint/run/one.py A": (1, 1), "entrypoint/run/one.py B": (2, 1)}
    assert (found.attributes, found.changed) == (2, 1)


def test_each_way_to_pass_a_callable_is_counted_by_itself() -> None:
    text = """
class A:
    def __init__(self, say: Callable[[str], None]):
        self.say = say
    def hear(self): pass
    def meet(self, other):
        def inner(): pass
        f(self.hear, say=other.hear, key=lambda x: x)
        f(inner, partial(self.hear, 1))
        self.hear()
        return lambda: 1
"""
    found = measured(run=text).callables
    assert found == structure.Callables(
        lambdas=2,
        lambdas_as_arguments=1,
        partials=1,
        own_methods_as_arguments=2,
        others_methods_as_arguments=1,
        inner_functions_as_arguments=1,
        parameters_and_fields=1,
    )


def test_kinds_of_messages_are_those_that_are_made_and_those_that_are_matched() -> None:
    text = """
def tell(how):
    send({"type": "stop", "left": 1})
    send({"type": how})
def hear(message):
    match message:
        case {"type": "stop"}: pass
        case {"type": "done"}: pass
    if message == "done" or message in ("a", "b"): pass
"""
    found = measured(run=text).messages
    assert found.kinds == ("done", "stop")
    assert (found.literals, found.patterns, found.texts_decided_on) == (2, 2, 4)
    assert found.matching_functions == ("entrypoint/run/one.py hear",)


def test_public_classes_of_one_name_are_named_with_their_modules() -> None:
    files = {"entrypoint/a.py": "class A: pass\nclass _B: pass", "src/b.py": "class A: pass\nclass _B: pass"}
    assert structure.measure(files).twice == {"A": ("entrypoint/a.py", "src/b.py")}


def test_the_formula_is_found_in_text_and_in_openings() -> None:
    files = {
        "entrypoint/a.py": f'"""Does this.\n\n{FORMULA} that."""',
        "host/b.sh": f"#!/bin/bash\n# {FORMULA} this.\necho\n",
        "tests/c.py": f"x = 1\n# {FORMULA} what.",
    }
    found = structure.measure(files)
    assert (found.formula, found.formula_opens) == (tuple(files), 2)


def test_code_is_neither_blank_nor_a_comment_nor_a_docstring() -> None:
    files = {
        "src/a.py": '"""One.\n\nTwo."""\n\n# three\nx = """\nfour"""  # five\n',
        "pbs/b.sh": "# one\n\nf\n",
    }
    found = structure.measure(files).lines
    assert found["src, Python"] == structure.Lines(files=1, lines=7, code=2)
    assert found["pbs, bash"] == structure.Lines(files=1, lines=3, code=1)
    assert found["product"] == structure.Lines(files=2, lines=10, code=3)


@pytest.mark.parametrize(
    ("line", "several"),
    [
        ("a && b || c", False),
        ("for ((i = 0; i < 3; i++)); do", False),
        ("if a; then", False),
        ("case $x in", False),
        ("a ;;", False),
        ("echo 'a; b' # c; d", False),
        ("a; b", True),
        ("if a; then b; fi", True),
        ("while a; do b; done", True),
        ("end() { a; b; }", True),
        ("local a=1 b=2", False),
        ("b; }", False),
    ],
)
def test_a_line_of_bash_with_several_statements(line: str, several: bool) -> None:
    assert measured(a=line).bash["of a job"].several_statements == several


def test_lines_of_bash_that_are_long_or_set_several_variables() -> None:
    text = f"a='x y' b=$c d=()\n{'x' * 101}\na=1 command\nlocal a=1 b=2\n"
    found = measured(a=text).bash["of a job"]
    assert (found.several_set, found.too_long, found.code) == (1, 1, 4)
    assert found.wrong == (
        "host/a.sh:1: more than one variable is set: give each a line",
        "host/a.sh:2: 101 characters: at most 100",
    )


def test_texts_over_several_lines_and_here_documents_are_no_bash() -> None:
    text = "python -c 'a; b\nif c: d; fi'\ncat <<EOF | f\nit's; if a; then b; fi\nEOF\na; b # c's\nd; e\n"
    assert measured(a=text).bash["of a job"].wrong == tuple(
        f"host/a.sh:{number}: more than one statement: give each a line" for number in (6, 7)
    )


def test_each_place_where_bash_goes_one_way_or_another_is_a_decision() -> None:
    text = """
if a && ! b; then # if c
    until d; do
        echo "if && ||"
    done
elif [[ -e f || -n $if ]]; then
    case $x in
        y) for x in 1; do f; done ;;
    esac
fi
"""
    assert measured(a=text).bash["of a job"].decisions == 7


def test_a_variable_crosses_files_if_one_sets_it_for_all_and_another_reads_it() -> None:
    found = measured(
        a='f() {\n    local own=1\n    read -r got\n    printf -v made "%s" 1\n    set+=(1)\n}\nunread=1\nSOME_NAME=1\n',
        b="# shellcheck source=host/a.sh\n. a.sh\ng() {\n"
        '    echo "$own $got ${set[@]} $SOME_NAME $((made + 1))"\n}\n',
        c='echo "$got $unread"\n',
    )
    assert found.bash["of a job"].crossing == dict.fromkeys(("got", "made", "set"), "host/a.sh")


def test_a_variable_that_crosses_files_is_named_in_the_header_of_each_that_sets_it() -> None:
    source = "# shellcheck source=host/{}.sh\n. {}.sh\n"
    found = measured(
        a="# Does this.\n# Reads: one\n# Sets: other   what it is\n#       more\n\none=1\nother=2\nmore=3\n",
        b="one=1\n# Sets: one\n",
        c="# Sets: one   this\none=1\n",
        d=f'{"".join(source.format(name, name) for name in "abc")}echo "$one $other $more"\n',
    )
    assert found.bash["of a job"].unnamed == {"host/a.sh": ("one",), "host/b.sh": ("one",)}


def test_the_command_prints_the_counts_of_a_checkout(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src/a.py").write_text("x = 1\n")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    command = [sys.executable, str(CHECKOUT / "tools/structure.py")]
    shown = subprocess.check_output([*command, "--json", str(tmp_path)], text=True, timeout=60)
    assert json.loads(shown)["lines"]["src, Python"] == {"files": 1, "lines": 1, "code": 1}
    words = subprocess.check_output([*command, str(tmp_path)], text=True, timeout=60)
    assert "  src, Python               1       1       1" in words.splitlines()


def test_lint_names_wrong_lines_of_bash_and_variables_that_no_header_names() -> None:
    other = "# shellcheck source=host/a.sh\n. a.sh\necho $found\n"
    assert list(structure.wrongs(measured(a="# Finds it.\nfound=1; f\n", b=other))) == [
        "host/a.sh:2: more than one statement: give each a line",
        "host/a.sh: other files read found: say so in its header, under `# Sets:`",
    ]


def test_lint_names_classes_of_one_name_and_the_formula() -> None:
    twice = {"clusters/one.py": "class A: ...\n", "src/train/two.py": "class A: ...\n"}
    assert list(structure.wrongs(structure.measure(twice))) == [
        "the public class A stands in clusters/one.py, src/train/two.py: give each a name of its own"
    ]
    found = structure.measure({"clusters/one.py": f'"""One.\n\n{FORMULA} all.\n"""\n'})
    assert list(structure.wrongs(found)) == [
        f"clusters/one.py: {FORMULA!r}: say what the module does, and where to begin reading"
    ]
    assert list(structure.wrongs(structure.measure({"clusters/one.py": "class A: ...\n"}))) == []
