"""What can be changed in Python's text, by its syntax tree.

Left alone, for no test should pin them: strings, the arguments of say and print and of exceptions, annotations,
decorators, assertions, floats, which are durations here, and comparisons with a clock. A dropped assignment to a plain
name would only make the name unknown.
"""

import ast
import re
import warnings
from collections.abc import Iterator
from itertools import pairwise

Edit = tuple[int, int, str]
"""From where, to where, and what stands there afterwards."""
Function = tuple[str, int, int]
"""Its name, its first and its last line, from 0."""

_PAIRS = ("== !=", "< <=", "> >=", "in not in", "is is not", "and or")
SWAPPED = dict(pair.split(" ", 1) for pair in _PAIRS)
SWAPPED |= {new: old for old, new in SWAPPED.items()}
COMPARISON = re.compile(r"[=!<>]=|<|>|not\s+in|is\s+not|in|is")
BOOLEAN = re.compile(r"\b(and|or)\b")
CLOCK = re.compile(r"monotonic\(\)|perf_counter\(\)|time\.time\(\)")
SPEAKS = re.compile(r"_*(say|tell|print|warn|log)(_once)?")
UNREAD = ("annotation", "returns", "decorator_list", "pattern")
"""Fields of syntax nodes in which nothing is changed."""


def parses(text: str) -> bool:
    try:
        with warnings.catch_warnings(action="ignore"):
            compile(text, "changed", "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True


def functions(text: str) -> Iterator[Function]:
    """Functions and classes, `Class.method`, the inner ones after those around them."""
    yield from _within(ast.parse(text), "")


def _within(node: ast.AST, prefix: str) -> Iterator[Function]:
    for child in ast.iter_child_nodes(node):
        name = prefix
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + child.name, child.lineno - 1, (child.end_lineno or child.lineno) - 1
            name = f"{prefix}{child.name}."
        yield from _within(child, name)


def edits(text: str) -> Iterator[Edit]:
    starts = [0]
    for line in text.split("\n"):
        starts.append(starts[-1] + len(line) + 1)
    lines = text.split("\n")

    def index(line: int, column: int) -> int:
        """The syntax tree counts bytes of UTF-8."""
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    def span(node: ast.AST) -> tuple[int, int]:
        return index(node.lineno, node.col_offset), index(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def between(left: ast.AST, right: ast.AST, operator: re.Pattern[str]) -> Iterator[Edit]:
        end = span(left)[1]
        if found := operator.search(text, end, span(right)[0]):
            yield found.start(), found.end(), SWAPPED[" ".join(found[0].split())]

    def own(node: ast.AST) -> Iterator[Edit]:
        match node:
            case ast.Compare() if not CLOCK.search(text, *span(node)):
                for left, right in pairwise([node.left, *node.comparators]):
                    yield from between(left, right, COMPARISON)
            case ast.BoolOp():
                for left, right in pairwise(node.values):
                    yield from between(left, right, BOOLEAN)
            case ast.UnaryOp(op=ast.Not()):
                start = span(node)[0]
                yield start, start + len("not "), ""
            case ast.Constant(value=bool(value)):
                yield *span(node), str(not value)
            case ast.Constant(value=int(value)):
                yield *span(node), str(value + 1)
                if value:
                    yield *span(node), str(value - 1)
            case ast.Return(value=ast.expr() as result) if not _is_false(result):
                yield *span(result), "None"
            case ast.Expr(value=ast.Constant()):
                pass
            case ast.Expr() | ast.AugAssign() | ast.Raise() | ast.Break() | ast.Continue() | ast.Delete():
                yield *span(node), "pass"
            case ast.Assign() if not any(isinstance(target, ast.Name | ast.Tuple) for target in node.targets):
                yield *span(node), "pass"
        for test in _tests(node):
            start, end = span(test)
            yield start, end, f"not ({text[start:end]})"

    for node in _read(ast.parse(text)):
        yield from own(node)


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and not node.value


def _tests(node: ast.AST) -> list[ast.expr]:
    """What a node decides by."""
    match node:
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            found = [test]
        case ast.comprehension(ifs=ifs):
            found = ifs
        case ast.match_case(guard=ast.expr() as guard):
            found = [guard]
        case _:
            found = []
    return [test for test in found if not isinstance(test, ast.Constant)]


def _read(node: ast.AST) -> Iterator[ast.AST]:
    """A node and those within that may be changed."""
    match node:
        case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Compare(left=ast.Name(id="__name__"))):
            return
        case ast.Assign(targets=[ast.Name(id="__all__" | "__slots__")]):
            return
    yield node
    match node:
        case ast.JoinedStr() | ast.Raise() | ast.Assert():
            return
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if SPEAKS.fullmatch(name):
            return
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if name not in UNREAD and isinstance(child, ast.AST):
                yield from _read(child)
