"""Resolves, locks and fetches the Debian packages of the image. `resolve` makes the lock, `repository` lays
it out as a mirror on disk.

The lock is a list of entries of Debian's index (`Packages` paragraphs), one for every package of the base. So
it can be served again as an index: debootstrap and apt take the directory for a mirror that offers the locked
files and nothing else. apt checks signatures once, when the lock is made; from then on the hashes in the lock
are trusted.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Final

import requests

from containers.download import Download, fetch
from containers.stacks import Base, BuildRefused

KEYRING: Final = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
KEPT: Final = (
    "Package", "Version", "Architecture", "Multi-Arch", "Essential", "Priority", "Pre-Depends", "Depends",
    "Provides", "Breaks", "Conflicts", "Replaces", "Filename", "Size", "SHA256",
)  # fmt: skip
"""What debootstrap and apt need of an entry."""

Entry = dict[str, str]


def read_index(text: str) -> list[Entry]:
    """The paragraphs of an index, each as its fields; a field of several lines keeps its line breaks."""
    return [
        dict(re.findall(r"^([A-Za-z0-9-]+): *(.*(?:\n[ \t].*)*)", paragraph, re.MULTILINE))
        for paragraph in text.split("\n\n")
        if paragraph.strip()
    ]


def write_index(entries: Iterable[Entry]) -> str:
    """An index of these entries, by name, with the fields that matter."""
    ordered = sorted(entries, key=lambda entry: entry["Package"])
    return "\n".join(
        "".join(f"{field}: {entry[field]}\n" for field in KEPT if field in entry) for entry in ordered
    )


def mirror() -> str:
    """DEBIAN_MIRROR, else the mirror of this machine's apt, else the one that debootstrap would use."""
    given = os.environ.get("DEBIAN_MIRROR", "")
    if given:
        return given.rstrip("/")
    if Path("/etc/debian_version").exists() and shutil.which("apt-get"):
        listed = subprocess.run(
            ["apt-get", "indextargets", "--format", "$(REPO_URI) $(LABEL)", "Created-By: Packages"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        for line in listed.stdout.splitlines():
            address = line.split()[0].rstrip("/")
            if address.endswith("/debian"):
                return address
    debootstrap = shutil.which("debootstrap", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if debootstrap:
        found = re.search(r"^DEF_MIRROR=\"?([^\"\n]+)", Path(debootstrap).read_text("utf-8"), re.MULTILINE)
        if found:
            return found[1].rstrip("/")
    raise BuildRefused(
        "debian-no-mirror",
        "no Debian mirror is known here: neither apt nor debootstrap is set up: give one, DEBIAN_MIRROR=URL",
    )


def resolve(base: Base, architecture: str) -> str:
    """The index entries of the base's packages and all that they need, as the mirror offers them now."""
    if not shutil.which("apt-get") or not KEYRING.exists():
        raise BuildRefused(
            "debian-no-apt",
            f"apt-get and {KEYRING} are needed to lock Debian's packages: run `make lock` on a Debian, "
            "or inside the image: make shell",
        )
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in ("etc/apt/apt.conf.d", "etc/apt/preferences.d", "var/lib/apt/lists/partial",
                     "var/cache/apt/archives/partial", "var/lib/dpkg"):  # fmt: skip
            (root / name).mkdir(parents=True)
        (root / "var/lib/dpkg/status").touch()
        (root / "etc/apt/sources.list").write_text(
            f"deb [signed-by={KEYRING}] {mirror()} {base.suite} main\n"
        )
        options = [f"Dir={root}", f"Dir::State::status={root}/var/lib/dpkg/status",
                   f"APT::Architecture={architecture}", f"APT::Architectures={architecture}",
                   "Acquire::Languages=none", "APT::Sandbox::User=root",
                   "APT::Install-Recommends=false"]  # fmt: skip
        apt = ["apt-get", "-qq", *(word for option in options for word in ("-o", option))]
        _run([*apt, "update"])
        lists = (root / "var/lib/apt/lists").glob("*_Packages*")
        entries = {entry["Package"]: entry for file in lists for entry in read_index(_text(file))}
        needed = [
            name
            for name, entry in entries.items()
            if entry.get("Priority") == "required" or entry.get("Essential") == "yes"
        ]
        printed = _run([*apt, "install", "--print-uris", "apt", *needed, *base.packages])
        names = [line.split()[1].partition("_")[0] for line in printed.splitlines()]
        return write_index(entries[name] for name in names)


def packages(lock: Path) -> list[Entry]:
    return read_index(lock.read_text(encoding="utf-8"))


def repository(
    base: Base, architecture: str, lock: Path, cache: Path, into: Path, *, offline: Path | None = None
) -> None:
    """Fetch what is missing in `cache` and lay out a mirror of the locked packages at `into`.

    `cache` holds the files by their hashes; `offline` holds them by hash or name, at any depth, and is
    all that is asked.
    Raises BadInput where the mirror offers another version.
    """
    entries = packages(lock)
    if offline:
        _take(entries, offline, cache)
    address = "" if all(_kept(cache, entry).exists() for entry in entries) else mirror()
    fetch(
        "Debian packages",
        [
            Download(
                url=f"{address}/{entry['Filename']}",
                path=_kept(cache, entry),
                size=int(entry["Size"]),
                sha256=entry["SHA256"],
                name=f"{entry['Package']} {entry['Version']}",
                missing=partial(_gone, entry, base, architecture, address),
            )
            for entry in entries
        ],
    )
    for entry in entries:
        target = into / entry["Filename"]
        target.parent.mkdir(parents=True, exist_ok=True)
        _link(_kept(cache, entry), target)
    index = into / "dists" / base.suite / "main" / f"binary-{architecture}" / "Packages"
    index.parent.mkdir(parents=True)
    index.write_text(lock.read_text(encoding="utf-8"), encoding="utf-8")
    content = index.read_bytes()
    (into / "dists" / base.suite / "Release").write_text(
        f"Origin: apptrain\nSuite: {base.suite}\nCodename: {base.suite}\nComponents: main\n"
        f"Architectures: {architecture}\nDate: Thu, 01 Jan 1970 00:00:00 UTC\nSHA256:\n"
        f" {hashlib.sha256(content).hexdigest()} {len(content)} main/binary-{architecture}/Packages\n"
    )


def _take(entries: list[Entry], offline: Path, cache: Path) -> None:
    """Copy the files below an offline directory into the cache. Raises BadInput for one that is not there."""
    given = {path.name: path for path in offline.rglob("*.deb")}
    for entry in entries:
        kept, name = _kept(cache, entry), Path(entry["Filename"]).name
        if kept.exists():
            continue
        found = given.get(kept.name) or given.get(name)
        if not found or hashlib.sha256(found.read_bytes()).hexdigest() != entry["SHA256"]:
            state = "is not the locked file" if found else "is not there"
            raise BuildRefused(
                "offline-file-missing",
                f"OFFLINE={offline}: {name} {state}: fill the directory anew, with the APPTRAIN_CACHE of "
                "`make image-fetch` on a machine that has a network",
            )
        kept.parent.mkdir(parents=True, exist_ok=True)
        _link(found, kept)


def _link(origin: Path, target: Path) -> None:
    try:
        os.link(origin, target)
    except OSError:  # another file system or owner, or one without hard links
        shutil.copyfile(origin, target)


def _gone(entry: Entry, base: Base, architecture: str, address: str) -> str:
    """Why the mirror does not have this file, as far as its index tells."""
    reply = requests.get(f"{address}/dists/{base.suite}/main/binary-{architecture}/Packages.xz", timeout=60)
    offered = [
        other["Version"]
        for other in (read_index(lzma.decompress(reply.content).decode()) if reply.ok else [])
        if other["Package"] == entry["Package"]
    ]
    return (
        f"{entry['Package']}: the lock has {entry['Version']}, the mirror offers "
        f"{offered[0] if offered else 'none'}: "
        "take the mirror's with `make lock`, or give one that still has it: DEBIAN_MIRROR=URL "
        "(a snapshot of the day of the lock, or a site's own)"
    )


def _kept(cache: Path, entry: Entry) -> Path:
    return cache / "debs" / f"{entry['SHA256']}.deb"


def _text(file: Path) -> str:
    if file.suffix == ".xz":
        return lzma.decompress(file.read_bytes()).decode()
    return subprocess.run(
        ["/usr/lib/apt/apt-helper", "cat-file", str(file)], capture_output=True, text=True, check=True
    ).stdout


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildRefused(
            "debian-resolve-failed",
            f"{command[0]} failed while Debian's packages were resolved: {done.stderr.strip()}",
        )
    return done.stdout
