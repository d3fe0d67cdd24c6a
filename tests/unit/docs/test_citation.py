"""CITATION.cff and CHANGELOG.md name the version that the package has, and one date of it."""

import re
import tomllib
from pathlib import Path

import yaml

from entrypoint import __version__

CHECKOUT = Path(__file__).resolve().parents[3]


def test_the_citation_has_what_its_format_requires_and_the_package_s_version_and_licence() -> None:
    cited = yaml.safe_load((CHECKOUT / "CITATION.cff").read_text())
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    assert cited.pop("abstract")
    released = cited.pop("date-released")
    assert cited == {
        "cff-version": "1.2.0",
        "message": "If you use this software, please cite it as below.",
        "title": project["name"],
        "type": "software",
        "authors": [{"name": "The apptrain developers"}],
        "version": __version__,
        "license": project["license"],
    }
    versions = re.findall(r"^## (\d.*)$", (CHECKOUT / "CHANGELOG.md").read_text(), re.M)
    assert versions[0] == f"{__version__} ({released})"


def test_the_package_takes_its_version_from_the_code_alone() -> None:
    settings = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
    assert "version" not in settings["project"]
    assert settings["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "entrypoint.__version__"}
