"""Resolves, locks and fetches the Debian packages of the image. `resolve` makes the lock, `lay_out` puts the
packages where the recipe finds them.

The lock is a list of entries of Debian's index (`Packages` paragraphs), one for every package of the base.
apt checks signatures once, when the lock is made; from then on the hashes in the lock are trusted. So a
machine that builds needs neither apt nor any other of Debian's tools.
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

from containers import unpack
from containers.download import Download, fetch
from containers.stacks import OTHER_ROAD, Base, BuildRefused, lacking

KEYRING: Final = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
KEPT: Final = (
    "Package", "Version", "Architecture", "Multi-Arch", "Essential", "Priority", "Pre-Depends", "Depends",
    "Provides", "Breaks", "Conflicts", "Replaces", "Filename", "Size", "SHA256",
)  # fmt: skip
"""What is needed of an entry."""

APT: Final = Path("/etc/apt")
SOURCE: Final = re.compile(r"^(?:deb|URIs:)[ \t](?:.*[ \t])?(https?://\S+/debian)/?(?:\s|$)", re.MULTILINE)
"""The line of a mirror in either form of apt's sources."""
LISTED: Final = "names"
"""The file beside the packages that names them, one a line."""
FAKEROOT: Final = ("fakeroot", "libfakeroot")
"""Packages that a build may need and the image does not get."""

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
    """DEBIAN_MIRROR, else the mirror of this machine's apt."""
    given = os.environ.get("DEBIAN_MIRROR", "")
    if given:
        return given.rstrip("/")
    for file in [APT / "sources.list", *sorted((APT / "sources.list.d").glob("*"))]:
        found = SOURCE.search(file.read_text(encoding="utf-8")) if file.is_file() else None
        if found:
            return found[1]
    raise BuildRefused(
        "debian-no-mirror",
        "no Debian mirror is known here: give one near you, DEBIAN_MIRROR=URL (Debian's web site lists its "
        f"mirrors; a site may have its own), {OTHER_ROAD}",
    )


def snapshot() -> str:
    """DEBIAN_SNAPSHOT: a mirror that keeps what the first one has dropped; '' if there is none."""
    return os.environ.get("DEBIAN_SNAPSHOT", "").rstrip("/")


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
        needed = [name for name, entry in entries.items() if is_required(entry)]
        printed = _run([*apt, "install", "--print-uris", "apt", *needed, *base.packages, *FAKEROOT])
        names = [line.split()[1].partition("_")[0] for line in printed.splitlines()]
        return write_index(entries[name] for name in names)


def packages(lock: Path) -> list[Entry]:
    """The packages of the image."""
    return [entry for entry in _locked(lock) if entry["Package"] not in FAKEROOT]


def _locked(lock: Path) -> list[Entry]:
    return read_index(lock.read_text(encoding="utf-8"))


def lay_out(
    base: Base, architecture: str, lock: Path, cache: Path, into: Path, *, offline: Path | None = None
) -> None:
    """Fetch what is missing in `cache` and link the image's packages into the folder `into`, with their names
    and the list of those that are unpacked before dpkg can install any. FAKEROOT is unpacked beside it.

    `cache` holds the files by their hashes; `offline` holds them by hash or name, at any depth, and is
    all that is asked.
    Raises BuildRefused if the mirror offers another version.
    """
    entries = _locked(lock)
    if offline:
        _take(entries, offline, cache)
    address = "" if all(_kept(cache, entry).exists() for entry in entries) else mirror()
    for name, given in (("DEBIAN_MIRROR", address), ("DEBIAN_SNAPSHOT", snapshot())):
        if address and given and not given.startswith(("http://", "https://")):
            raise BuildRefused(
                "debian-mirror-address",
                f"{name}={given}: give an address that begins with http:// or https://",
            )
    fetch(
        "Debian packages",
        [
            Download(
                urls=[f"{each}/{entry['Filename']}" for each in (address, snapshot()) if each],
                path=_kept(cache, entry),
                size=int(entry["Size"]),
                sha256=entry["SHA256"],
                name=f"{entry['Package']} {entry['Version']}",
                missing=partial(_gone, entry, base, architecture, address),
            )
            for entry in entries
        ],
    )
    into.mkdir()
    for entry in entries:
        if entry["Package"] in FAKEROOT:
            unpack.unpack(_kept(cache, entry), into.with_name("fakeroot"))
    of_image = packages(lock)
    for entry in of_image:
        _link(_kept(cache, entry), into / _file(entry))
    required = seed(of_image)
    first = [entry for entry in of_image if entry["Package"] in required]
    first.sort(key=lambda entry: entry["Package"] != "base-files")  # It has the links /bin, /lib, /sbin.
    (into / unpack.SEED).write_text("".join(f"{_file(entry)}\n" for entry in first), encoding="utf-8")
    (into / LISTED).write_text("".join(f"{entry['Package']}\n" for entry in of_image), encoding="utf-8")


def seed(entries: Iterable[Entry]) -> set[str]:
    """The packages without which dpkg and the scripts of packages do not run: those that Debian calls
    required, with what they depend on."""
    by_name = {entry["Package"]: entry for entry in entries}
    providers = {
        _name(provided): name
        for name, entry in by_name.items()
        for provided in entry.get("Provides", "").split(",")
        if provided.strip()
    }
    todo = [name for name, entry in by_name.items() if is_required(entry)]
    found: set[str] = set()
    while todo:
        name = todo.pop()
        if name in found:
            continue
        found.add(name)
        for field in ("Pre-Depends", "Depends"):
            for choice in by_name[name].get(field, "").split(","):
                names = [_name(other) for other in choice.split("|") if other.strip()]
                known = [other if other in by_name else providers.get(other) for other in names]
                todo += [other for other in known if other][:1]
    return found


def is_required(entry: Entry) -> bool:
    return entry.get("Priority") == "required" or entry.get("Essential") == "yes"


def _name(relation: str) -> str:
    """The package of `libc6:any (>= 2.41)`."""
    return re.split(r"[ (:]", relation.strip(), maxsplit=1)[0]


def _file(entry: Entry) -> str:
    return Path(entry["Filename"]).name


def _take(entries: list[Entry], offline: Path, cache: Path) -> None:
    """Copy the files below an offline directory into the cache. Raises BadInput for one that is not there."""
    given = {path.name: path for path in offline.rglob("*.deb") if path.is_file()}
    for entry in entries:
        kept, name = _kept(cache, entry), Path(entry["Filename"]).name
        if kept.exists():
            continue
        found = given.get(kept.name) or given.get(name)
        if not found or hashlib.sha256(found.read_bytes()).hexdigest() != entry["SHA256"]:
            state = "is not the locked file" if found else "is not there"
            raise lacking(offline, name, state)
        kept.parent.mkdir(parents=True, exist_ok=True)
        _link(found, kept)


def _link(origin: Path, target: Path) -> None:
    """Have the file under a second name, which it gets only once it is whole."""
    try:
        os.link(origin, target)
    except OSError:  # another file system or owner, or one without hard links
        part = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            shutil.copyfile(origin, part)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)


def _gone(entry: Entry, base: Base, architecture: str, address: str) -> str:
    """Why the mirror does not have this file, as far as its index tells."""
    reply = requests.get(f"{address}/dists/{base.suite}/main/binary-{architecture}/Packages.xz", timeout=60)
    try:
        index = read_index(lzma.decompress(reply.content).decode()) if reply.ok else []
    except lzma.LZMAError:  # such as a page of a proxy
        index = []
    offered = [other["Version"] for other in index if other["Package"] == entry["Package"]]
    return (
        f"{entry['Package']}: the lock has {entry['Version']}, the mirror offers "
        f"{offered[0] if offered else 'none'}: "
        "give a second mirror that still has it, DEBIAN_SNAPSHOT=URL (a snapshot of the day of the lock, or "
        "a site's own), or take the mirror's with `make lock`"
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
