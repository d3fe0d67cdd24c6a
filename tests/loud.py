"""What a failing test shows of the logs that explain it: at most 100 lines, the end of each.

Whoever starts something that logs names the log here; nothing is read unless the test fails. The list belongs to the
test that runs, in its worker.
"""

from collections.abc import Callable

LINES = 100
_named: dict[str, Callable[[], str]] = {}


def explain(title: str, read: Callable[[], str]) -> None:
    """Has a failure of the running test show what `read` gives then, under this title; the last of a title counts."""
    _named.pop(title, None)
    _named[title] = read


def forget() -> None:
    _named.clear()


def explanations() -> list[tuple[str, str]]:
    """Titles and texts, the latest first; each the last lines of its log, all together LINES lines."""
    found = []
    left = LINES
    for title, read in reversed(_named.items()):
        lines = _text(read).splitlines()
        shown = lines[-max(1, left * 2 // 3) :] if len(lines) > left else lines
        if not lines or left <= 0:
            continue
        cut = f" (the last {len(shown)} of {len(lines)} lines)" if len(shown) < len(lines) else ""
        found.append((title + cut, "\n".join(shown)))
        left -= len(shown)
    return found


def _text(read: Callable[[], str]) -> str:
    try:
        return read()
    except Exception as error:  # whatever it is, it must not hide why the test failed
        return f"cannot be read: {error!r}"
