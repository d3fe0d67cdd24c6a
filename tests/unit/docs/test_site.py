"""The site of `make site`: mkdocs.yml has each page once and no other, and links become those of the site."""

import re
from pathlib import Path

from tools import site

CHECKOUT = site.CHECKOUT
NAV = (CHECKOUT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]


def test_nav_has_each_page_once_and_no_other() -> None:
    named = re.findall(r": (\S+\.md)$", NAV, re.M)
    assert len(named) == len(set(named))
    assert set(named) == set(site.pages().values())


def test_links_to_pages_and_images_are_those_of_the_site_and_others_keep_their_text() -> None:
    known = {CHECKOUT / "docs/run.md": "run.md", CHECKOUT / "README.md": "index.md"}
    text = (
        "[a](docs/run.md#b-c), [d](#e), [f](https://g.example), [`h`](tools/site.py) ![i](docs/images/j.svg)\n"
        "```\n[k](docs/run.md)\n```\n"
    )
    assert site.staged(text, CHECKOUT, known) == (
        "[a](run.md#b-c), [d](#e), [f](https://g.example), `h` ![i](images/j.svg)\n```\n[k](docs/run.md)\n```\n"
    )
    assert (
        site.staged("[a](../README.md#x) [b](run.md)", CHECKOUT / "docs", known)
        == "[a](index.md#x) [b](run.md)"
    )


def test_a_bar_in_code_of_a_table_stands_as_it_is_shown() -> None:
    assert site.staged("| `a\\|b` | c \\| d |\n`e\\|f`\n", CHECKOUT, {}) == "| `a|b` | c \\| d |\n`e\\|f`\n"


def test_a_link_to_a_page_or_an_anchor_that_is_not_there_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<a href="b.html#x">1</a><a href="b.html#y">2</a><a href="c.html">3</a>')
    (tmp_path / "b.html").write_text('<h1 id="x">x</h1><a href="https://d.example">4</a>')
    assert list(site.leads_nowhere(tmp_path)) == [
        "a.html: b.html#y leads nowhere",
        "a.html: c.html leads nowhere",
    ]
