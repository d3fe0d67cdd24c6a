"""Checks that what runs with a login node's Python needs none newer than 3.9: `make lint`. Begin at
`closure`, which finds the files.

`BEGIN` names where `apptrain plan`, `submit` and the refusals of the others begin, `NEWER` what they import
only in the image or in the venv. All that is imported from there, also inside functions, is read by vermin,
and for types like `int | None` in code that runs, which it takes for annotations, by us.

Usage: tools/oldest.py [--list]    --list: print the files, read nothing
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
OLDEST = "3.9"
BEGIN = (
    "entrypoint.cli.apptrain",
    "entrypoint.cli.submit",
    "entrypoint.cli.profiles",
    "entrypoint.cli.site",
    "entrypoint.schedulers.*",
    "entrypoint.batch.*.login",
    "entrypoint.batch.*.survey",
    "containers.build",
)
"""With the modules that are imported by a name made at run time."""
NEWER = {
    "entrypoint.node.check": "asked for once torch is there",
    "entrypoint.batch.conclude": "in the image",
    "entrypoint.cli.embedded": "in the venv",
    "entrypoint.run.launch": "in the venv or the image",
    "entrypoint.scaling.local": "in the venv or the image",
    "entrypoint.batch.prepare": "in the image",
    "train.__main__": "in the venv",
}
"""Imported inside a function by one that runs there only; with where it runs."""


def main(arguments: list[str]) -> int:
    files = sorted(str(path.relative_to(CHECKOUT)) for path in closure().values())
    if arguments == ["--list"]:
        print("\n".join(files))
        return 0
    options = [
        f"--target={OLDEST}-",
        "--violations",
        "--no-tips",
        "--no-parse-comments",
    ]
    done = subprocess.run(
        [sys.executable, "-c", "import vermin; vermin.main()", *options, *files],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        print(done.stdout + done.stderr, end="", file=sys.stderr)
    unions = [f"{name}:{line}: a type with | needs Python 3.10" for name in files for line in _unions(name)]
    print("".join(f"{text}\n" for text in unions), end="", file=sys.stderr)
    return done.returncode or int(bool(unions))


def _unions(name: str) -> Iterator[int]:
    """The lines with a type like `int | None` that Python evaluates."""
    tree = ast.parse((CHECKOUT / name).read_text(encoding="utf-8"))
    if any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body):
        for node in ast.walk(tree):
            for field in ("annotation", "returns"):
                if getattr(node, field, None) is not None:
                    setattr(node, field, None)
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            words = {ast.unparse(side) for side in (node.left, node.right)}
            if words & {
                "None",
                "int",
                "str",
                "float",
                "bool",
                "bytes",
                "dict",
                "list",
                "tuple",
                "set",
                "Path",
            }:
                yield node.lineno


def closure() -> dict[str, Path]:
    """Our modules that are imported from BEGIN on, with their files."""
    found: dict[str, Path] = {}
    names = [name for begun in BEGIN for name in _expanded(begun)]
    while names:
        name = names.pop()
        path = _file(name)
        if path is None or name in found or name in NEWER:
            continue
        found[name] = path
        names += [name.rpartition(".")[0], *_imports(path)]
    return found


def _expanded(name: str) -> Iterator[str]:
    """The modules that a name with * stands for."""
    if "*" not in name:
        yield name
        return
    for path in CHECKOUT.glob(f"{name.replace('.', '/')}.py"):
        yield ".".join(path.relative_to(CHECKOUT).with_suffix("").parts)


def _file(name: str) -> Path | None:
    """None for what is not ours, or is no module."""
    for root in (CHECKOUT, CHECKOUT / "src"):
        path = root / name.replace(".", "/")
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if name and file.is_file():
                return file
    return None


def _imports(path: Path) -> Iterator[str]:
    """What may be modules among the names that a file imports; not those for its types alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typed = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test).endswith("TYPE_CHECKING")
        for line in block.body
        for node in ast.walk(line)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and id(node) not in typed:
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and id(node) not in typed:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
