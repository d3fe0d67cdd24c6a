"""Downloads files with known hashes into a cache. `fetch` is the entry.

A file is written under a temporary name, hashed on the way, and renamed only if the hash is right. Proxies
and certificates come from the environment (HTTPS_PROXY, REQUESTS_CA_BUNDLE).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import requests
from tqdm import tqdm

from containers.stacks import BuildError, BuildRefused

TIMEOUT_S: Final = 60  # without a byte
TRIES: Final = 3


class NoAnswer(BuildError):
    """Something did not answer; another try may help."""

    status = 69


@dataclass(frozen=True)
class Download:
    """One file to have."""

    urls: Sequence[str]
    """Where it may be: the next is asked if one does not have the file."""
    path: Path
    size: int
    """Bytes."""
    sha256: str
    name: str
    """What it is called in messages."""
    missing: Callable[[], str]
    """What to say where there is no such file."""


def fetch(what: str, downloads: list[Download]) -> None:
    """Have all of them. Files that are there already are taken as they are: their names are their hashes."""
    wanted = [download for download in downloads if not download.path.exists()]
    if not wanted:
        return
    total = sum(download.size for download in wanted)
    with requests.Session() as session, tqdm(
        desc=what, total=total, unit="B", unit_scale=True, unit_divisor=1000, leave=True
    ) as bar:  # fmt: skip
        for download in wanted:
            _one(session, download, bar)


def _one(session: requests.Session, download: Download, bar: tqdm) -> None:
    download.path.parent.mkdir(parents=True, exist_ok=True)
    part = download.path.with_name(f".{download.path.name}.{os.getpid()}")
    problem, urls = "", list(download.urls)
    tries = TRIES
    while tries:
        digest, got = hashlib.sha256(), 0
        try:
            with session.get(urls[0], stream=True, timeout=TIMEOUT_S) as reply:
                if reply.status_code == requests.codes.not_found:
                    if not urls[1:]:
                        raise BuildRefused("download-gone", download.missing())
                    del urls[0]
                    continue
                reply.raise_for_status()
                with part.open("wb") as file:
                    for block in reply.iter_content(1 << 20):
                        file.write(block)
                        digest.update(block)
                        got += len(block)
                        bar.update(len(block))
        except requests.RequestException as error:
            problem = str(error)
            tries -= 1
            bar.update(-got)
        except OSError as error:
            raise NoAnswer(
                "download-not-written",
                f"{download.name} cannot be written to {part.parent}: {error.strerror}: make room there, or "
                "set APPTRAIN_CACHE=DIR",
            ) from None
        else:
            if digest.hexdigest() != download.sha256:
                raise BuildRefused(
                    "download-hash-differs",
                    f"{download.name}: the lock has SHA-256 {download.sha256}, {urls[0]} gave "
                    f"{digest.hexdigest()}: the mirror's file is not the locked one: use another mirror",
                )
            part.replace(download.path)
            return
        finally:
            part.unlink(missing_ok=True)
    raise NoAnswer("download-no-answer", f"{download.name} could not be fetched in {TRIES} tries: {problem}")
