"""docs/recipes.md: each recipe says which test runs it, and that test is there."""

import ast
import re
import runpy
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[3]
TEXT = (CHECKOUT / "docs/recipes.md").read_text()
RECIPES = dict(re.findall(r"^## (.+)\n((?:(?!^## ).*\n?)*)", TEXT, re.M))
NAMED = re.findall(r"(tests/[\w/]+\.py)::(test_\w+)", TEXT)


def test_the_recipes_are_found() -> None:
    assert {"Frameworks and examples", "Remove"} <= RECIPES.keys()
    assert len(NAMED) > 20


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_which_test_runs_it_or_that_none_does(name: str) -> None:
    *_, last = RECIPES[name].strip().split("\n\n")
    assert re.search(r"tests/[\w/]+\.py::test_\w+|[Nn]o\s+test\s+runs", last)


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_a_test_that_a_recipe_names_is_there(file: str, name: str) -> None:
    tree = ast.parse((CHECKOUT / file).read_text())
    assert name in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]


@pytest.mark.parametrize("code", re.findall(r"^```python\n(.*?)^```$", TEXT, re.M | re.S))
def test_code_of_a_recipe_is_python(code: str) -> None:
    ast.parse(code)


def test_the_array_of_the_sweep_has_the_elements_of_its_grid() -> None:
    script = CHECKOUT / "examples/sweep.py"
    grid = runpy.run_path(str(script))["GRID"]
    found = re.findall(
        r"(?:--array[= ]|-J )(\S+)", script.read_text() + RECIPES["A sweep, or another job array"]
    )
    assert found == [f"0-{len(grid) - 1}"] * 5


EXAMPLES = [
    path for path in sorted((CHECKOUT / "examples").iterdir()) if path.is_file() and path.name != "stop.py"
]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short_and_its_head_says_how_to_start_it(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= 120
    head = "\n".join(lines[:12])
    kinds = {".py": ("This machine:", "Slurm:", "PBS:"), ".sh": ("This machine:", "Slurm:", "PBS:")}
    for word in kinds.get(path.suffix, (f"{'PBS' if path.suffix == '.pbs' else 'Slurm'}:",)):
        assert word in head
    assert path.name in TEXT


def test_the_copy_of_stop_py_is_the_one_of_the_reference_training() -> None:
    assert (CHECKOUT / "examples/stop.py").samefile(CHECKOUT / "src/train/stop.py")
