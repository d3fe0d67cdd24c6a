"""Writes the bill of materials of an image, in CycloneDX's JSON: its Debian and PyPI packages with their
hashes. `text` is the entry.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

from containers import debian


def text(said: dict[str, Any], locks: list[Path]) -> str:
    """`said` is what stands in the JSON beside the image."""
    bom = Bom()
    bom.metadata.component = image = Component(
        name="apptrain",
        type=ComponentType.CONTAINER,
        version=said["stack"],
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=said["sif_sha256"])],
    )
    parts = []
    entries = {entry["Package"]: entry for entry in debian.packages(locks[1])}
    for name, version in said["debian_packages"].items():
        url = PackageURL("deb", "debian", name, version, {"arch": entries[name]["Architecture"]})
        parts.append(_component(name, version, url, [entries[name]["SHA256"]]))
    # A package of several wheels has one hash for each; the lock does not say which one was taken.
    for name, version in said["python_packages"].items():
        hashes = [one for lock in (locks[0], *locks[2:]) for one in _hashes(lock, name)]
        url = PackageURL("pypi", None, name, version)
        parts.append(_component(name, version, url, hashes if len(hashes) == 1 else []))
    for part in parts:
        bom.components.add(part)
    bom.register_dependency(image, parts)
    return JsonV1Dot6(bom).output_as_string(indent=2) + "\n"


def _component(name: str, version: str, url: PackageURL, hashes: list[str]) -> Component:
    return Component(
        name=name,
        version=version,
        type=ComponentType.LIBRARY,
        purl=url,
        bom_ref=url.to_string(),
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=one) for one in hashes],
    )


def _hashes(lock: Path, name: str) -> list[str]:
    for block in re.split(r"^(?=[A-Za-z0-9])", lock.read_text(encoding="utf-8"), flags=re.MULTILINE):
        if re.sub(r"[-_.]+", "-", block.partition("==")[0]).lower() == name:
            return re.findall(r"--hash=sha256:([0-9a-f]{64})", block)
    return []
