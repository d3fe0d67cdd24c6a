"""Builds the pages as a site with search: site/index.html. `make site` calls it with the Python of a venv of
its own (requirements/site.txt). Begin at `main`.

The pages are copied to build/site, README.md as index.md; a link to a file that is no page keeps its text.
mkdocs.yml has the order. Then each link and anchor of the site is looked for: 1 if one leads nowhere. A
diagram is drawn in the browser by a script that it fetches; without a network its text is shown. All else
works without one. Browsers let the search work only with a server, such as `python3 -m http.server -d site`.

Usage: tools/site.py
"""

import os
import re
import shutil
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
WORK, SITE = CHECKOUT / "build/site", CHECKOUT / "site"
LINK = re.compile(r"(!?)\[([^]]*)\]\(([^)\s]+)\)")
IMAGE = re.compile(r'(<img[^>]* src=")([^"]+)(")')
CODE_IN_TABLE = re.compile(r"^\|.*`.*\\\|.*$", re.M)
FENCE = re.compile(r"^(```+).*?^\1 *$", re.M | re.S)
ABROAD = ("http://", "https://", "mailto:", "#")


def pages(checkout: Path = CHECKOUT) -> dict[Path, str]:
    """Each page, and its name in the site."""
    files = [*sorted(checkout.glob("*.md")), *sorted(checkout.glob("docs/*.md"))]
    return {file: "index.md" if file.name == "README.md" else file.name for file in files}


def main() -> int:
    known = pages()
    shutil.rmtree(WORK, ignore_errors=True)
    shutil.copytree(CHECKOUT / "docs/images", WORK / "pages/images")
    shutil.copy(CHECKOUT / "mkdocs.yml", WORK)
    for file, name in known.items():
        text = staged(file.read_text(encoding="utf-8"), file.parent, known)
        (WORK / "pages" / name).write_text(text, encoding="utf-8")
    done = subprocess.run([Path(sys.executable).with_name("zensical"), "build"], cwd=WORK, check=False)
    if done.returncode:
        return done.returncode
    shutil.rmtree(SITE, ignore_errors=True)
    (WORK / "site").rename(SITE)
    broken = list(leads_nowhere(SITE))
    print(
        "\n".join(broken)
        or f"{SITE.relative_to(CHECKOUT)}/index.html: {len(known)} pages, all links lead somewhere"
    )
    return int(bool(broken))


def staged(text: str, folder: Path, known: Mapping[Path, str]) -> str:
    """A page of `folder` as the site has it."""
    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [_prose(text[end : fence.start()], folder, known), fence[0]]
        end = fence.end()
    return "".join([*parts, _prose(text[end:], folder, known)])


def _prose(text: str, folder: Path, known: Mapping[Path, str]) -> str:
    def link(found: re.Match[str]) -> str:
        target = _target(found[3], folder, known)
        return f"{found[1]}[{found[2]}]({target})" if target else found[2]

    def image(found: re.Match[str]) -> str:
        return found[1] + (_target(found[2], folder, known) or found[2]) + found[3]

    return CODE_IN_TABLE.sub(_with_bars, IMAGE.sub(image, LINK.sub(link, text)))


def _with_bars(row: re.Match[str]) -> str:
    r"""GitHub reads `a\|b` in a table as a|b, Zensical as it stands."""
    return re.sub(r"`[^`]*`", lambda code: code[0].replace("\\|", "|"), row[0])


def _target(target: str, folder: Path, known: Mapping[Path, str]) -> str:
    """Where a link leads in the site; empty for a file that is not in it."""
    if target.startswith(ABROAD):
        return target
    name, _, anchor = target.partition("#")
    file = Path(os.path.normpath(folder / urllib.parse.unquote(name)))
    if file in known:
        return known[file] + (f"#{anchor}" if anchor else "")
    images = CHECKOUT / "docs/images"
    return str(file.relative_to(images.parent)) if file.is_relative_to(images) else ""


class _Page(HTMLParser):
    """Of one file of the site: its anchors, and where its links lead."""

    def __init__(self) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            if (tag, name) in (("a", "href"), ("img", "src")) and value:
                self.links.append(value)


def leads_nowhere(site: Path) -> Iterator[str]:
    """A line for each link of the site to a page or an anchor that is not there."""
    read = {file: _Page() for file in sorted(site.rglob("*.html"))}
    for file, page in read.items():
        page.feed(file.read_text(encoding="utf-8"))
    read.pop(site / "404.html", None)  # its links begin at a server's root
    for file, page in read.items():
        for link in sorted(set(page.links)):
            if link.startswith(ABROAD[:3]):
                continue
            name, _, anchor = link.partition("#")
            target = Path(os.path.normpath(file.parent / urllib.parse.unquote(name))) if name else file
            target = target / "index.html" if target.is_dir() else target
            is_there = target.exists() and (not anchor or target not in read or _has(read[target], anchor))
            if not is_there:
                yield f"{file.relative_to(site)}: {link} leads nowhere"


def _has(page: _Page, anchor: str) -> bool:
    return urllib.parse.unquote(anchor) in page.anchors


if __name__ == "__main__":
    sys.exit(main())
