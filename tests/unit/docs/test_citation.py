"""CITATION.cff names the version and the licence that the package has."""

import tomllib
from pathlib import Path

import yaml

from entrypoint import __version__

CHECKOUT = Path(__file__).resolve().parents[3]


def test_the_citation_has_what_its_format_requires_and_the_package_s_version_and_licence() -> None:
    cited = yaml.safe_load((CHECKOUT / "CITATION.cff").read_text())
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    assert cited.pop("abstract")
    assert cited == {
        "cff-version": "1.2.0",
        "message": "If you use this software, please cite it as below.",
        "title": project["name"],
        "type": "software",
        "authors": [{"name": "The apptrain developers"}],
        "version": __version__,
        "license": project["license"],
    }
    assert project["version"] == __version__
