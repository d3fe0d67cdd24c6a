"""Counts what makes code hard to follow: state that changes, callables passed about, untyped messages.

For whoever reshapes the code and has to show that it became simpler, and not merely different. It reads the
files that git knows, and runs none of them. Begin at `measure`; each section of the output has one function.

Usage: tools/structure.py [--json | --lint] [DIR]    DIR: a checkout, else this one

How it counts, and where that is an approximation:

State (classes in `entrypoint/{meet,run,watch,ranks}`). The attributes of a class are the fields of its body
if it is a dataclass, and whatever is assigned to the first argument of a method. Names in tuples, `+=`,
`setattr`, `del`, and the targets of `for` and `with` count; `self.x.append` and `self.x[0] = y` do not. An
attribute changes if that is assigned outside `__init__`, `__new__` and `__post_init__`, or in a function
inside of these. Who assigns to another object (`attempt.asked = 3`) changes the class that has an attribute
of that name, if there is one such class only; else it is counted by itself. In the lists of classes what a
base class of these rooms has counts too. A value that is replaced as a whole (`self.state = replace(...)`)
is one attribute that changes.

Callables (same rooms). Each way to hand one object a piece of another is counted by itself, so that none of
them is a gain over the rest: lambdas (all, whatever they are for), `functools.partial`, methods as an
argument (`f(self.hear)`; of other objects those whose name is that of a method in these rooms, or of
Python's containers and queues), inner functions as an argument, and parameters and fields that are Callable.

Messages (same rooms). A kind is a text that stands for "type" in a dict literal or in a pattern. `texts
decided on` counts patterns with a text in them and comparisons with a text, so a chain of `if` in place of
a pattern shows.

Classes: public ones at the top of a module of the product.

Lines: product and tests, as wc counts them. `code` leaves out blank lines, comments and texts that stand by
themselves (docstrings).

Bash. Here-documents, comments and quoted texts are taken out first, by a scanner that takes `"$(f "a")"` for
two texts. A line holds more than one statement if it opens and closes a compound (`if ... fi`), or joins
statements by `;`, not counting `; then`, `; do`, `;;` and `for ((a; b; c))`. `a && b` is one statement, and
so is `local a=1 b=2`; other lines of nothing but assignments, two or more, are counted by themselves. A
decision is an `if`, `elif`, `case`, `for`, `while` or `until`, and each `&&` and `||`, also of a test.

A variable crosses files if one file assigns it outside of a function's `local`, and another that does not
assign it reads it; of these two one sources the other, or a third one both, as `# shellcheck source=FILE`
says. Names in capitals with an underscore are taken for the environment. It is named if the header of each
file that sets it has it in a paragraph that begins with `# Sets:` (a heading like `# Reads:` ends that).

`--lint` refuses what may not be: two public classes of one name, the formula, and in bash lines that are too
long or hold more than one statement or assignment, and variables that cross files and are not named.
"""

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath

CHECKOUT = Path(__file__).resolve().parent.parent
ROOMS = ("meet", "run", "watch", "ranks")
PRODUCT = ("entrypoint", "src", "clusters", "containers", "host", "slurm", "pbs", "tools")
OTHERS = ("benchmarks", "tests")
SCRIPTS = ("apptrain", ".ci")
"""Where there is bash too, which is neither a job's nor a test's."""
WORST = 10
CONSTRUCTORS = ("__init__", "__new__", "__post_init__")
LIBRARY_METHODS = frozenset(
    ("put_nowait", "get_nowait", "get", "put", "set", "add", "append", "discard", "remove", "pop", "cancel")
)
"""Of containers and of asyncio, as far as they are passed about."""
OF_A_JOB = ("host/", "slurm/", "pbs/", "containers/run.sh")
FORMULA = "The secret" + ":"
LONG = 100
"""Characters of a line of bash."""
Functions = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(kw_only=True)
class Class:
    """What was found of one class."""

    name: str
    file: str
    bases: tuple[str, ...] = ()
    is_frozen: bool = False
    own: set[str] = field(default_factory=set)
    """Attributes."""
    changed: set[str] = field(default_factory=set)
    """Those of them that are assigned after construction."""
    methods: set[str] = field(default_factory=set)


@dataclass(frozen=True, kw_only=True)
class State:
    classes: int
    attributes: int
    """Of all classes, inherited ones once."""
    of_frozen: int
    """Those of dataclasses that are frozen."""
    changed: int
    elsewhere: tuple[str, ...]
    """Assignments to attributes of other objects whose class is not known."""
    rebound: int
    """Names that `global` or `nonlocal` let a function assign."""
    by_class: Mapping[str, tuple[int, int]]
    """Attributes with inherited ones, and those that change; of each class."""


@dataclass(frozen=True, kw_only=True)
class Callables:
    lambdas: int
    lambdas_as_arguments: int
    partials: int
    own_methods_as_arguments: int
    others_methods_as_arguments: int
    inner_functions_as_arguments: int
    parameters_and_fields: int


@dataclass(frozen=True, kw_only=True)
class Messages:
    kinds: tuple[str, ...]
    literals: int
    """Dict literals with a "type"."""
    patterns: int
    """Cases that match one."""
    matching_functions: tuple[str, ...]
    texts_decided_on: int


@dataclass(frozen=True, kw_only=True)
class Lines:
    files: int
    lines: int
    code: int


@dataclass(frozen=True, kw_only=True)
class Bash:
    lines: int
    code: int
    several_statements: int
    whole_compounds: int
    """Of these, those that open and close a compound."""
    several_set: int
    too_long: int
    decisions: int
    crossing: Mapping[str, str]
    """Variable: the files that set it."""
    unnamed: Mapping[str, tuple[str, ...]]
    """File: those of them that it sets and its header does not name."""
    wrong: tuple[str, ...]
    """The lines that are counted above, each with its place and what is wrong."""


@dataclass(frozen=True, kw_only=True)
class Structure:
    state: State
    callables: Callables
    messages: Messages
    twice: Mapping[str, tuple[str, ...]]
    """Class name: the modules that have one."""
    formula: tuple[str, ...]
    """Files with the formula."""
    formula_opens: int
    """Of these, modules whose docstring or header has it."""
    lines: Mapping[str, Lines]
    bash: Mapping[str, Bash]
    """What a job runs on the host, and the rest."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="tools/structure.py", description="Count what makes the code hard to follow."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--lint", action="store_true", help="print only what is wrong; 1 if anything is")
    parser.add_argument("checkout", nargs="?", type=Path, default=CHECKOUT, metavar="DIR")
    options = parser.parse_args(arguments)
    report = measure(read(options.checkout))
    if options.lint:
        wrong = list(wrongs(report))
        print("\n".join(wrong), end="\n" * bool(wrong))
        return bool(wrong)
    if options.json:
        print(json.dumps(asdict(report), indent=2))
    else:
        print("\n".join(in_words(report)))
    return 0


def read(checkout: Path) -> dict[str, str]:
    """Python and bash that git knows in this checkout, by path; also what is not committed yet."""
    git = ["git", "-c", f"safe.directory={checkout}", "-C", str(checkout), "ls-files", "-z"]
    listed = subprocess.run(
        [*git, "--cached", "--others", "--exclude-standard", *PRODUCT, *OTHERS, *SCRIPTS],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = {}
    for name in sorted(set(filter(None, listed.split("\0")))):
        path = checkout / name
        if path.is_file() and not path.is_symlink():
            text = path.read_text(encoding="utf-8", errors="replace")
            if kind(name, text):
                found[name] = text
    return found


def kind(name: str, text: str) -> str:
    """`Python`, `bash`, or empty for what is neither."""
    suffix = PurePosixPath(name).suffix
    if suffix == ".py":
        return "Python"
    first = text.partition("\n")[0]
    is_script = not suffix and re.match(r"#!.*[/ ](ba|da)?sh( |$)", first) is not None
    return "bash" if suffix in (".sh", ".sbatch", ".pbs") or is_script else ""


def measure(files: Mapping[str, str]) -> Structure:
    """Of sources by path."""
    python = {name: ast.parse(text) for name, text in files.items() if kind(name, text) == "Python"}
    rooms = {name: tree for name, tree in python.items() if _is_in_rooms(name)}
    scripts = {
        name: text
        for name, text in files.items()
        if kind(name, text) == "bash" and not name.startswith("tests/")
    }
    classes = _classes(rooms)
    formula = tuple(name for name, text in files.items() if FORMULA in text)
    return Structure(
        state=_state(rooms, classes),
        callables=_callables(rooms, classes),
        messages=_messages(rooms),
        twice=_twice({name: tree for name, tree in python.items() if name.split("/")[0] != "tests"}),
        formula=formula,
        formula_opens=sum(FORMULA in _opening(files[name], python.get(name)) for name in formula),
        lines=_lines(files, python),
        bash={
            what: _bash(
                {name: text for name, text in scripts.items() if name.startswith(OF_A_JOB) is of_a_job}
            )
            for what, of_a_job in (("of a job", True), ("of builds and tools", False))
        },
    )


def _is_in_rooms(name: str) -> bool:
    return any(name.startswith(f"entrypoint/{room}/") for room in ROOMS)


# --- state ----------------------------------------------------------------------------------------


def _classes(trees: Mapping[str, ast.Module]) -> list[Class]:
    found = []
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found.append(_class(name, node))
    return found


def _class(file: str, node: ast.ClassDef) -> Class:
    bases = tuple(_last_name(base) for base in node.bases)
    decorated = " ".join(map(ast.unparse, node.decorator_list))
    made = Class(name=node.name, file=file, bases=bases, is_frozen="frozen=True" in decorated)
    if "dataclass" in decorated:
        made.own = {
            item.target.id
            for item in node.body
            if isinstance(item, ast.AnnAssign)
            and isinstance(item.target, ast.Name)
            and "ClassVar" not in ast.unparse(item.annotation)
        }
    for method in node.body:
        if not isinstance(method, Functions):
            continue
        decorators = {_last_name(decorator) for decorator in method.decorator_list}
        if not decorators & {"property", "cached_property", "setter"}:
            made.methods.add(method.name)
        me = "" if decorators & {"staticmethod", "classmethod"} else _first_argument(method)
        for target, is_later in _assigned(method, inside=method.name not in CONSTRUCTORS):
            attribute = _attribute_of(target, me)
            if attribute:
                made.own.add(attribute)
                made.changed |= {attribute} if is_later else set()
    return made


def _first_argument(function: Functions) -> str:
    arguments = [*function.args.posonlyargs, *function.args.args]
    return arguments[0].arg if arguments else ""


def _assigned(node: ast.AST, *, inside: bool) -> Iterator[tuple[ast.expr, bool]]:
    """What is assigned here, and whether after construction, which a function inside of this one is."""
    for child in ast.iter_child_nodes(node):
        yield from ((target, inside) for target in _targets(child))
        later = inside or isinstance(child, ast.Lambda | Functions)
        yield from _assigned(child, inside=later)


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    match node:
        case ast.Assign(targets=targets) | ast.Delete(targets=targets):
            for target in targets:
                yield from _parts(target)
        case ast.AugAssign(target=target) | ast.For(target=target) | ast.AsyncFor(target=target):
            yield from _parts(target)
        case ast.AnnAssign(target=target, value=ast.expr()):
            yield from _parts(target)
        case ast.With(items=items) | ast.AsyncWith(items=items):
            for item in items:
                if item.optional_vars is not None:
                    yield from _parts(item.optional_vars)
        case ast.Call(func=func, args=[owner, ast.Constant(value=str(name)), *_]) if _last_name(func) in (
            "setattr",
            "__setattr__",
            "delattr",
        ):
            yield ast.copy_location(ast.Attribute(value=owner, attr=name, ctx=ast.Store()), node)


def _parts(target: ast.expr) -> Iterator[ast.expr]:
    match target:
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            for element in elements:
                yield from _parts(element)
        case ast.Starred(value=value):
            yield from _parts(value)
        case _:
            yield target


def _attribute_of(target: ast.expr, owner: str) -> str:
    match target:
        case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name == owner:
            return attribute
    return ""


def _last_name(node: ast.expr) -> str:
    """`b` of `a.b`, `b(...)` and `b[...]`."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Call(func=inner) | ast.Subscript(value=inner):
            return _last_name(inner)
    return ""


def _state(trees: Mapping[str, ast.Module], classes: list[Class]) -> State:
    elsewhere = []
    for name, tree in trees.items():
        for target, owner in _assignments_to_others(tree):
            having = [one for one in classes if target.attr in one.own]
            if len(having) == 1:
                having[0].changed.add(target.attr)
            else:
                elsewhere.append(f"{name}:{target.lineno} {owner}.{target.attr}")
    by_name = {one.name: one for one in classes}
    rebound = sum(
        len(node.names)
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Global | ast.Nonlocal)
    )
    return State(
        classes=len(classes),
        attributes=sum(len(one.own) for one in classes),
        of_frozen=sum(len(one.own) for one in classes if one.is_frozen),
        changed=sum(len(one.changed) for one in classes),
        elsewhere=tuple(elsewhere),
        rebound=rebound,
        by_class={f"{one.file} {one.name}": _with_inherited(one, by_name) for one in classes},
    )


def _assignments_to_others(tree: ast.Module) -> Iterator[tuple[ast.Attribute, str]]:
    """Assigned attributes whose owner is not the first argument of the method."""
    own = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, Functions):
                    me = _first_argument(method)
                    mine = [one for one, _ in _assigned(method, inside=True) if _attribute_of(one, me)]
                    own |= {(target.lineno, target.col_offset) for target in mine}
    for target, _ in _assigned(tree, inside=True):
        if isinstance(target, ast.Attribute) and (target.lineno, target.col_offset) not in own:
            yield target, ast.unparse(target.value)


def _with_inherited(one: Class, by_name: Mapping[str, Class]) -> tuple[int, int]:
    own, changed, waiting = set(one.own), set(one.changed), list(one.bases)
    while waiting:
        base = by_name.get(waiting.pop())
        if base is not None and base is not one:
            own |= base.own
            changed |= base.changed
            waiting += base.bases
    return len(own), len(changed)


# --- callables ------------------------------------------------------------------------------------


def _callables(trees: Mapping[str, ast.Module], classes: list[Class]) -> Callables:
    attributes = {name for one in classes for name in one.own}
    methods = {name for one in classes for name in one.methods} - attributes | LIBRARY_METHODS
    count: Counter[str] = Counter()
    for tree in trees.values():
        _count_callables(tree, methods, frozenset(), count)
        for node in ast.walk(tree):
            annotation = node.annotation if isinstance(node, ast.arg | ast.AnnAssign) else None
            count["typed"] += annotation is not None and "Callable[" in ast.unparse(annotation)
    return Callables(
        lambdas=count["lambda"],
        lambdas_as_arguments=count["lambda passed"],
        partials=count["partial"],
        own_methods_as_arguments=count["own"],
        others_methods_as_arguments=count["other"],
        inner_functions_as_arguments=count["inner"],
        parameters_and_fields=count["typed"],
    )


def _count_callables(
    node: ast.AST, methods: set[str], inner: frozenset[str], count: Counter[str], me: str = ""
) -> None:
    if isinstance(node, Functions):
        if _first_argument(node) in ("self", "cls"):
            me = _first_argument(node)
        within = {
            child.name for child in ast.walk(node) if isinstance(child, Functions) and child is not node
        }
        inner = inner | within
    if isinstance(node, ast.Lambda):
        count["lambda"] += 1
    if isinstance(node, ast.Call):
        count["partial"] += _last_name(node.func) == "partial"
        for value in [*node.args, *(keyword.value for keyword in node.keywords)]:
            match value:
                case ast.Lambda():
                    count["lambda passed"] += 1
                case ast.Name(id=name) if name in inner:
                    count["inner"] += 1
                case ast.Attribute(value=ast.Name(id=owner), attr=name) if owner == me and name in methods:
                    count["own"] += 1
                case ast.Attribute(attr=name) if name in methods:
                    count["other"] += 1
    for child in ast.iter_child_nodes(node):
        _count_callables(child, methods, inner, count, me)


# --- messages, names ------------------------------------------------------------------------------


def _messages(trees: Mapping[str, ast.Module]) -> Messages:
    kinds: set[str] = set()
    literals = patterns = texts = 0
    functions: dict[str, int] = {}
    for name, tree in trees.items():
        for node in ast.walk(tree):
            match node:
                case ast.Dict(keys=keys, values=values):
                    for key, value in zip(keys, values, strict=True):
                        if isinstance(key, ast.Constant) and key.value == "type":
                            literals += 1
                            kinds |= {str(ast.literal_eval(value))} if _is_text(value) else set()
                case ast.MatchMapping(keys=keys, patterns=values):
                    for key, pattern in zip(keys, values, strict=True):
                        if isinstance(key, ast.Constant) and key.value == "type":
                            patterns += 1
                            if isinstance(pattern, ast.MatchValue) and _is_text(pattern.value):
                                kinds.add(str(ast.literal_eval(pattern.value)))
                case ast.MatchValue(value=ast.Constant(value=str())):
                    texts += 1
                case ast.Compare(ops=[ast.Eq() | ast.NotEq() | ast.In() | ast.NotIn()]):
                    sides = [node.left, *node.comparators]
                    texts += any(_is_text(side) or _are_texts(side) for side in sides)
        functions |= {
            f"{name} {node.name}": 1
            for node in ast.walk(tree)
            if isinstance(node, Functions) and _matches_type(node)
        }
    return Messages(
        kinds=tuple(sorted(kinds)),
        literals=literals,
        patterns=patterns,
        matching_functions=tuple(functions),
        texts_decided_on=texts,
    )


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _are_texts(node: ast.expr) -> bool:
    return isinstance(node, ast.Tuple | ast.List | ast.Set) and any(map(_is_text, node.elts))


def _matches_type(function: Functions) -> bool:
    return any(
        isinstance(key, ast.Constant) and key.value == "type"
        for node in ast.walk(function)
        if isinstance(node, ast.MatchMapping)
        for key in node.keys
    )


def _twice(trees: Mapping[str, ast.Module]) -> dict[str, tuple[str, ...]]:
    where: defaultdict[str, list[str]] = defaultdict(list)
    for name, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where[node.name].append(name)
    return {name: tuple(files) for name, files in sorted(where.items()) if len(files) > 1}


def _opening(text: str, tree: ast.Module | None) -> str:
    """A module's docstring, a script's comments before its first command."""
    if tree is not None:
        return ast.get_docstring(tree) or ""
    lines = text.splitlines()
    first = next((at for at, line in enumerate(lines) if line and not line.startswith("#")), len(lines))
    return "\n".join(lines[:first])


# --- lines ----------------------------------------------------------------------------------------


def _lines(files: Mapping[str, str], python: Mapping[str, ast.Module]) -> dict[str, Lines]:
    groups: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for name, text in files.items():
        which, top = kind(name, text), name.split("/")[0]
        code = _code_of_python(text, python[name]) if which == "Python" else len(_code_of_bash(text))
        size = text.count("\n"), code
        groups[f"{top}, {which}"].append(size)
        if top in PRODUCT:
            groups[f"product, {which}"].append(size)
            groups["product"].append(size)
    return {
        name: Lines(files=len(sizes), lines=sum(a for a, _ in sizes), code=sum(b for _, b in sizes))
        for name, sizes in sorted(groups.items())
    }


def _code_of_python(text: str, tree: ast.Module) -> int:
    """Lines with more than a comment or a text that stands by itself."""
    texts = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and _is_text(node.value)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    unread = (
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENCODING,
        tokenize.ENDMARKER,
    )
    found = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in unread
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(found - texts)


def _code_of_bash(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]


# --- bash -----------------------------------------------------------------------------------------

_HERE = re.compile(r"<<-?[ \t]*(['\"]?)(\w+)\1([^\n]*\n)(.*?\n)?[ \t]*\2$", re.DOTALL | re.MULTILINE)
_QUOTED = re.compile(
    r"""\\.|(?:^|(?<=[\s;&|(]))\#[^\n]*|'[^']*'|"(?:\\.|[^"\\])*\"""", re.DOTALL | re.MULTILINE | re.VERBOSE
)
_DECISION = re.compile(
    r"(?:^|[;&|(){}!]|\b(?:then|do|else)\s)\s*(?:if|elif|case|for|while|until)\b|&&|\|\|", re.MULTILINE
)
_SOURCED = re.compile(r"^\s*# shellcheck source=(\S+)", re.MULTILINE)
_HEADING = re.compile(r"^#\s*([A-Z]\w*):", re.MULTILINE)
_COMMENT = re.compile(r"(^|\s)#.*$")
_COMPOUND = re.compile(r"\bif\b.*\bfi\b|\b(for|while|until)\b.*\bdone\b|\bcase\b.*\besac\b")
_FOR = re.compile(r"\bfor\s*\(\(.*?\)\)")
_JOINED = re.compile(r"(?<!;);(?!;)(?!\s*(?:then\b|do\b|\}|$))")
_ASSIGNED = re.compile(r"(?:[A-Za-z_]\w*\+?=(?:\([^)]*\)|(?:\$\{[^}]*\}|\S)*)\s*)")
_SET = re.compile(
    r"(?:^|[\s;&|({!])(?:export\s+|readonly\s+)?([A-Za-z_]\w*)(?:\[[^]]*\])?\+?=(?!=)|\bfor\s+([A-Za-z_]\w*)\s+in\b"
)
_FILLED = re.compile(r"\b(?:printf\s+-v|read(?:\s+-\w+(?:\s+\S+)?)*|mapfile(?:\s+-\w+(?:\s+\S+)?)*)\s+(\w+)")
_READ = re.compile(r"\$\{?[#!]?([A-Za-z_]\w*)")
_ARITHMETIC = re.compile(r"\(\((.*?)\)\)|\[([A-Za-z_]\w*)\]")
_LOCAL = re.compile(r"^\s*(?:local|declare)\b(.*)$")
_FUNCTION = re.compile(r"^([A-Za-z_]\w*)\(\)")


SHELLS = ("HOME", "PATH", "PYTHONPATH", "SECONDS", "TMPDIR")
"""Variables of every shell, not ours."""


def _bash(files: Mapping[str, str]) -> Bash:
    bare = {name: _bare(text).splitlines() for name, text in files.items()}
    every = [line for lines in bare.values() for line in lines]
    crossing = _crossing(files)
    return Bash(
        lines=sum(text.count("\n") for text in files.values()),
        code=sum(len(_code_of_bash(text)) for text in files.values()),
        several_statements=sum(map(_has_several_statements, every)),
        whole_compounds=sum(_COMPOUND.search(line) is not None for line in every),
        several_set=sum(map(_sets_several, every)),
        too_long=sum(len(line) > LONG for text in files.values() for line in text.splitlines()),
        decisions=sum(len(_DECISION.findall("\n".join(lines))) for lines in bare.values()),
        crossing={variable: ", ".join(sorted(by)) for variable, by in crossing.items()},
        unnamed=_unnamed(files, crossing),
        wrong=tuple(
            f"{name}:{number}: {what}"
            for name, text in files.items()
            for number, (line, left) in enumerate(zip(text.splitlines(), bare[name], strict=True), 1)
            for what in _wrong_with(line, left)
        ),
    )


def _wrong_with(line: str, bare: str) -> Iterator[str]:
    """Of a line of bash, as it is and without texts and comment."""
    if len(line) > LONG:
        yield f"{len(line)} characters: at most {LONG}"
    if _has_several_statements(bare):
        yield "more than one statement: give each a line"
    if _sets_several(bare):
        yield "more than one variable is set: give each a line"


def _bare(text: str) -> str:
    """Without texts and comments, in the same lines."""
    return _QUOTED.sub(_without_text, _HERE.sub(_without_document, text))


def _without_text(found: re.Match[str]) -> str:
    breaks = "\n" * found[0].count("\n")
    if found[0].startswith("\\"):
        return found[0] if breaks else "_"
    return breaks if found[0].startswith("#") else f"_{breaks}"


def _without_document(found: re.Match[str]) -> str:
    rest = found[3].removesuffix("\n")
    return rest + "\n" * found[0].count("\n")


def _has_several_statements(line: str) -> bool:
    """Of a line without texts and comment."""
    if _COMPOUND.search(line):
        return True
    return _JOINED.search(_FOR.sub("for _", line)) is not None


def _sets_several(line: str) -> bool:
    """Of a line without texts and comment: whether it assigns, and does nothing else."""
    return len(_ASSIGNED.findall(line)) > 1 and not _ASSIGNED.sub("", line.strip()).strip()


def _crossing(files: Mapping[str, str]) -> dict[str, set[str]]:
    """Variable: the files that set it."""
    names = {name: _names(text) for name, text in files.items()}
    found: defaultdict[str, set[str]] = defaultdict(set)
    for together in (_sourced(name, files) for name in files):
        for reader in together:
            sets, reads = names[reader]
            for setter in together - {reader}:
                for variable in names[setter][0] & (reads - sets):
                    found[variable].add(setter)
    return {
        variable: by
        for variable, by in sorted(found.items())
        if variable not in SHELLS and not re.fullmatch(r"[A-Z]+_[A-Z_]+", variable)
    }


def _sourced(name: str, files: Mapping[str, str]) -> set[str]:
    """The files that run in one shell if this one is started."""
    found = {name}
    waiting = [name]
    while waiting:
        more = {file for file in _SOURCED.findall(files[waiting.pop()]) if file in files} - found
        found |= more
        waiting += more
    return found


def _unnamed(files: Mapping[str, str], crossing: Mapping[str, set[str]]) -> dict[str, tuple[str, ...]]:
    found = {}
    for name, text in files.items():
        named = _named(_opening(text, None))
        lacking = tuple(one for one, by in crossing.items() if name in by and one not in named)
        if lacking:
            found[name] = lacking
    return found


def _named(header: str) -> set[str]:
    """The words under `# Sets:`."""
    parts = _HEADING.split(header)
    sets = (text for heading, text in zip(parts[1::2], parts[2::2], strict=True) if heading == "Sets")
    return {word for text in sets for word in re.findall(r"[A-Za-z_]\w*", text)}


def _names(text: str) -> tuple[set[str], set[str]]:
    """(variables that are set for all, variables that are read and are no function's own)."""
    sets: set[str] = set()
    reads: set[str] = set()
    for lines in _functions(text):
        own = {
            name
            for line in lines
            if (found := _LOCAL.match(line))
            for name in re.findall(r"(?:^|\s)([A-Za-z_]\w*)", _QUOTED.sub("_", found[1]))
        }
        for line in lines:
            bare = "" if _LOCAL.match(line) else _QUOTED.sub("_", line)
            given = {one or other for one, other in _SET.findall(bare)} | set(_FILLED.findall(bare))
            sets |= given - own
            counted = " ".join("".join(one) for one in _ARITHMETIC.findall(line))
            reads |= {*_READ.findall(line), *re.findall(r"[A-Za-z_]\w*", counted)} - own
    return sets, reads


def _functions(text: str) -> Iterator[list[str]]:
    """The lines of each function, and those between functions."""
    lines: list[str] = []
    for line in _code_of_bash(text):
        if _FUNCTION.match(line):
            yield lines
            lines = []
        lines.append(_COMMENT.sub("", line))
        if line.rstrip() in ("}", ")"):
            yield lines
            lines = []
    yield lines


# --- the output -----------------------------------------------------------------------------------


def wrongs(report: Structure) -> Iterator[str]:
    """What no count excuses, a line each."""
    for name, files in report.twice.items():
        yield f"the public class {name} stands in {', '.join(files)}: give each a name of its own"
    for file in report.formula:
        yield f"{file}: {FORMULA!r}: say what the module does, and where to begin reading"
    for bash in report.bash.values():
        yield from bash.wrong
        for file, names in bash.unnamed.items():
            yield f"{file}: other files read {', '.join(names)}: say so in its header, under `# Sets:`"


def in_words(report: Structure) -> Iterable[str]:
    state, calls, messages = report.state, report.callables, report.messages
    rooms = f"entrypoint/{{{','.join(ROOMS)}}}"
    yield f"State of the {state.classes} classes in {rooms}"
    yield f"  attributes {state.attributes}, of which {state.of_frozen} are of frozen dataclasses"
    yield f"  and {state.changed} change after construction"
    yield f"  assigned to another object whose class is not known: {len(state.elsewhere)}"
    yield from (f"    {one}" for one in state.elsewhere)
    yield f"  names that global or nonlocal rebinds: {state.rebound}"
    yield "  most attributes, inherited ones too (changing):"
    worst = sorted(state.by_class.items(), key=lambda item: (-item[1][0], -item[1][1], item[0]))
    yield from (f"    {total:3} ({changed:2})  {name}" for name, (total, changed) in worst[:WORST])
    yield "  most that change:"
    worst = sorted(state.by_class.items(), key=lambda item: (-item[1][1], item[0]))
    yield from (f"    {changed:3}  {name}" for name, (_, changed) in worst[:WORST])
    yield f"Callables passed about in {rooms}"
    yield from (f"  {count:3} {name.replace('_', ' ')}" for name, count in asdict(calls).items())
    yield f"Messages in {rooms}"
    yield f"  {len(messages.kinds):3} kinds: {', '.join(messages.kinds)}"
    yield f"  {messages.literals:3} dict literals with a type"
    where = ", ".join(messages.matching_functions) or "none"
    number = len(messages.matching_functions)
    yield f"  {messages.patterns:3} cases that match one, in {number} functions: {where}"
    yield f"  {messages.texts_decided_on:3} texts decided on"
    yield f"Public class names of the product that stand more than once: {len(report.twice)}"
    yield from (f"  {name}: {', '.join(files)}" for name, files in report.twice.items())
    yield f"Files with {FORMULA!r}: {len(report.formula)}, of which {report.formula_opens} open with it"
    by_top = Counter(name.split("/")[0] for name in report.formula)
    yield f"  {', '.join(f'{top} {number}' for top, number in sorted(by_top.items()))}"
    yield "Lines                   files   lines    code"
    yield from (f"  {name:22}{one.files:5} {one.lines:7} {one.code:7}" for name, one in report.lines.items())
    for what, bash in report.bash.items():
        yield f"Bash {what}: {bash.lines} lines, {bash.code} of code"
        yield f"  {bash.several_statements:4} lines with more than one statement"
        yield f"  {bash.whole_compounds:4} of them hold a whole if, loop or case"
        yield f"  {bash.several_set:4} lines that set several variables"
        yield f"  {bash.too_long:4} lines of more than {LONG} characters"
        yield f"  {bash.decisions:4} decisions"
        yield f"  {len(bash.crossing):4} variables that one file sets and another reads:"
        yield from (f"       {name}: {files}" for name, files in bash.crossing.items())
        unnamed = sum(map(len, bash.unnamed.values()))
        yield f"  {unnamed:4} times the file that sets one does not name it:"
        yield from (f"       {file}: {', '.join(names)}" for file, names in bash.unnamed.items())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
