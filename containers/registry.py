"""Asks a registry for the digests of an image, for the lock of BASE=docker. `digests` is the entry.

It speaks the registry's HTTP API: tokens, and lists of images behind a tag, one for each architecture.
"""

from __future__ import annotations

import os
import re
from typing import Final

import requests

from containers.download import TIMEOUT_S, NoAnswer
from containers.stacks import BuildRefused

LISTS: Final = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
IMAGES: Final = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)


def address() -> str:
    """REGISTRY, HOST[:PORT][/PATH], or '' where Apptainer's own default is meant."""
    return os.environ.get("REGISTRY", "").rstrip("/")


def digests(image: str, architectures: list[str]) -> dict[str, str]:
    """Of NAME:TAG in REGISTRY, `sha256:...` for each architecture.

    Raises BadInput where the registry has no such image, or not for all architectures; Unavailable where it
    does not answer.
    """
    host, _, path = address().partition("/")
    name, _, tag = image.partition(":")
    scheme = "http" if os.environ.get("APPTAINER_NOHTTPS", "").lower() in ("1", "true", "yes") else "https"
    url = f"{scheme}://{host}/v2/{path + '/' if path else ''}{name}/manifests/{tag or 'latest'}"
    try:
        reply = _get(url)
    except requests.RequestException as error:
        raise NoAnswer("registry-no-answer", f"REGISTRY={address()}: {error}") from None
    if reply.status_code in (401, 403, 404):
        raise BuildRefused(
            "registry-no-image",
            f"REGISTRY={address()}: it does not give {image} ({reply.status_code} {reply.reason})",
        )
    if not reply.ok:
        raise NoAnswer("registry-no-answer", f"REGISTRY={address()}: {reply.status_code} {reply.reason}")
    found: dict[str, str] = {}
    if reply.headers.get("Content-Type", "").partition(";")[0] in LISTS:
        for entry in reply.json()["manifests"]:
            platform = entry.get("platform", {})
            if platform.get("os") == "linux":
                found.setdefault(platform.get("architecture"), entry["digest"])
    elif len(architectures) == 1:
        found[architectures[0]] = reply.headers["Docker-Content-Digest"]
    missing = [architecture for architecture in architectures if architecture not in found]
    if missing:
        raise BuildRefused(
            "registry-no-architecture",
            f"REGISTRY={address()}: {image} is not there for {', '.join(missing)}, only for "
            f"{', '.join(sorted(map(str, found))) or 'one architecture that it does not name'}",
        )
    return {architecture: found[architecture] for architecture in architectures}


def _get(url: str) -> requests.Response:
    """The manifest, with the token that an anonymous user gets where one is asked for."""
    headers = {"Accept": ", ".join((*LISTS, *IMAGES))}
    reply = requests.get(url, headers=headers, timeout=TIMEOUT_S)
    asked = dict(re.findall(r'(\w+)="([^"]*)"', reply.headers.get("WWW-Authenticate", "")))
    if reply.status_code == requests.codes.unauthorized and "realm" in asked:
        realm = asked.pop("realm")
        token = requests.get(realm, params=asked, timeout=TIMEOUT_S).json()
        headers["Authorization"] = f"Bearer {token.get('token') or token.get('access_token')}"
        reply = requests.get(url, headers=headers, timeout=TIMEOUT_S)
    return reply
