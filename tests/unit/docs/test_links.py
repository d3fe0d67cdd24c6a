"""Every link of the pages leads somewhere: a file of the checkout, and a heading in it."""

import re
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[3]
PAGES = sorted([*CHECKOUT.glob("*.md"), *CHECKOUT.glob("docs/*.md")])
LINK = re.compile(r"(?<!!)\[[^]]+\]\(([^)\s]+)\)|<img[^>]* src=\"([^\"]+)\"|!\[[^]]*\]\(([^)\s]+)\)")
ABROAD = ("https://", "http://", "mailto:")


def prose(page: Path) -> str:
    """The page without what stands in fences or between backticks."""
    text = re.sub(r"^(```+).*?^\1$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", lambda found: "" if "](" in found[0] else found[0], text)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings: small letters, no punctuation, hyphens for blanks, numbered if repeated."""
    found: dict[str, int] = {}
    names = set()
    for heading in re.findall(r"^#{1,6} (.*)$", prose(page), re.MULTILINE):
        text = re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", heading).replace("`", "")
        name = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
        names.add(f"{name}-{found[name]}" if name in found else name)
        found[name] = found.get(name, 0) + 1
    return names


def links(page: Path) -> list[str]:
    targets = ["".join(groups) for groups in LINK.findall(prose(page))]
    return [target for target in targets if not target.startswith(ABROAD)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(CHECKOUT)))
def test_every_link_and_anchor_of_a_page_resolves(page: Path) -> None:
    for target in links(page):
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), f"{page.name}: {target}: there is no {file}"
        if anchor:
            assert anchor in anchors(file), f"{page.name}: {target}: {file.name} has {sorted(anchors(file))}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(CHECKOUT)))
def test_every_test_that_a_page_names_is_there_also_in_a_comment(page: Path) -> None:
    for name, function in re.findall(r"\b(tests/[\w/.-]*\w)(?:::(test_\w+))?", page.read_text()):
        assert (CHECKOUT / name).exists(), f"{page.name}: {name}"
        if function:
            assert f"def {function}(" in (CHECKOUT / name).read_text(), f"{page.name}: {name}::{function}"


def test_links_are_found_at_all() -> None:
    readme = links(CHECKOUT / "README.md")
    assert "docs/slurm.md" in readme
    assert any("#" in link for page in PAGES for link in links(page))


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.parent == CHECKOUT / "docs"], ids=lambda page: page.name
)
def test_every_page_is_linked_from_the_readme_or_from_a_page_that_is(page: Path) -> None:
    seen, left = set(), [CHECKOUT / "README.md"]
    while left:
        at = left.pop()
        if at in seen:
            continue
        seen.add(at)
        found = [
            (at.parent / link.partition("#")[0]).resolve() for link in links(at) if not link.startswith("#")
        ]
        left += [file for file in found if file.suffix == ".md"]
    assert page in seen
