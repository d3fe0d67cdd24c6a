"""The rooms of the entrypoint: who may import whom."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
ENTRYPOINT = CHECKOUT / "entrypoint"
ROOMS = [
    "core",
    "schedulers",
    "plan",
    "node",
    "record",
    "job",
    "report",
    "explain",
    "batch",
    "scaling",
    "meet",
    "doctor",
    "ranks",
    "run",
    "cli",
]
"""Each imports from those before it."""
FLOORS = ["", *ROOMS, "__main__"]
"""The same between what all may import, the package itself, and the module that imports the last."""


def modules() -> dict[str, Path]:
    """Each module of the entrypoint by its name."""
    found = {}
    for path in sorted(ENTRYPOINT.rglob("*.py")):
        parts = path.relative_to(CHECKOUT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """The modules of the entrypoint that a file imports, at its top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name in known)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            for name in node.names:
                full = f"{node.module}.{name.name}"
                if full in known or node.module in known:
                    yield full if full in known else str(node.module)


def room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def is_package(path: Path) -> bool:
    return path.name == "__init__.py"


def test_a_room_imports_only_from_those_before_it() -> None:
    known = modules()
    wrong = []
    for module, path in known.items():
        for other in imports(path, known):
            if FLOORS.index(room(other)) > FLOORS.index(room(module)):
                wrong.append(f"{module} imports {other}")
    assert wrong == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    known = modules()
    left = {module: set(imports(path, known)) - {module} for module, path in known.items()}
    while leaves := {module for module, others in left.items() if not others & left.keys()}:
        left = {module: others for module, others in left.items() if module not in leaves}
    assert left == {}


def test_each_folder_is_a_room() -> None:
    folders = {str(path.parent.relative_to(ENTRYPOINT)).partition("/")[0] for path in modules().values()}
    assert folders == {*ROOMS, "."}


def test_every_folder_is_installed() -> None:
    """A folder without an __init__.py is not."""
    folders = {path.parent for path in modules().values()}
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_says_at_its_door_what_it_knows(name: str) -> None:
    assert ast.get_docstring(ast.parse((ENTRYPOINT / name / "__init__.py").read_text()))


def test_train_imports_only_what_it_shares_with_the_entrypoint() -> None:
    known = modules()
    found = {other for path in (CHECKOUT / "src" / "train").glob("*.py") for other in imports(path, known)}
    core = ("files", "plain", "proc", "spelling", "strict_yaml")
    shared = {"entrypoint.record.tokens", *(f"entrypoint.core.{name}" for name in core)}
    assert found - {"entrypoint"} <= shared
