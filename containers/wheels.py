"""Fetches the locked wheels of an image, and locks the packages that a user adds. `fetch` and `lock_extra`
are the entries.

pip is asked for wheels of the image's Python rather than its own, uv for a lock that fits a stack. Indexes,
proxies, certificates and caches are pip's and uv's own settings: PIP_INDEX_URL, PIP_CERT, UV_INDEX_URL, ...
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from containers import stacks
from containers.download import NoAnswer
from containers.stacks import BuildRefused, Stack

PLATFORMS: Final = {
    "amd64": [f"manylinux_2_{minor}_x86_64" for minor in range(41, 4, -1)] + ["manylinux2014_x86_64"],
    "arm64": [f"manylinux_2_{minor}_aarch64" for minor in range(41, 16, -1)] + ["manylinux2014_aarch64"],
}
"""What the base's glibc (2.41) can load."""
UV_PLATFORMS: Final = {"amd64": "x86_64-manylinux_2_28", "arm64": "aarch64-manylinux_2_28"}
_PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;]+)", re.MULTILINE)
_INCLUDES = re.compile(r"^[ \t]*(?:-r|-c|--requirement|--constraint)[ \t=]*([^\s#]+)", re.MULTILINE)
"""Lines of a requirements file that name another."""


def digest(*files: Path) -> str:
    """SHA-256 over the files' contents, in order."""
    found = hashlib.sha256()
    for file in files:
        found.update(file.read_bytes())
    return found.hexdigest()


def _with_included(requirements: Path) -> list[Path]:
    """The file, and all that it and those include. One that is not there, uv refuses."""
    found = [requirements.resolve()]
    for file in found:
        for name in _INCLUDES.findall(file.read_text(encoding="utf-8", errors="replace")):
            path = (file.parent / name).resolve()
            if path.is_file() and path not in found:
                found.append(path)
    return found


def room(lock: Path, cache: Path, download: int, offline: Path | None) -> int:
    """Megabytes that the lock's wheels take in the cache while they are fetched; `download` stay. Until pip
    has all of them it keeps them in a temporary folder, unless they come from a directory."""
    times = 1 if offline else 2
    return 0 if _is_complete(_folder(lock, cache)) else times * download


def _folder(lock: Path, cache: Path) -> Path:
    return cache / "wheels" / digest(lock)[:16]


def _is_complete(folder: Path) -> bool:
    return (folder / "complete").exists()


def fetch(lock: Path, python: str, architecture: str, cache: Path, offline: Path | None) -> Path:
    """A directory with every wheel of the lock. pip checks each against the lock's hashes."""
    target = _folder(lock, cache)
    if _is_complete(target):
        return target
    target.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-I", "-m", "pip", "download", "--require-hashes", "--no-deps"]
    command += ["--only-binary", ":all:", "--disable-pip-version-check", "--no-input", "-r", str(lock)]
    command += ["--implementation", "cp", "--python-version", python, "--dest", str(target)]
    for abi in (f"cp{python.replace('.', '')}", "abi3", "none"):
        command += ["--abi", abi]
    for platform in PLATFORMS[architecture]:
        command += ["--platform", platform]
    if offline:
        command.append("--no-index")
        for folder in sorted({wheel.parent for wheel in offline.rglob("*.whl")}):
            command += ["--find-links", str(folder)]
    with tempfile.TemporaryDirectory(dir=target) as temporary:
        env = {**os.environ, "TMPDIR": temporary}
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, env=env)
    sys.stderr.write(done.stderr)
    if done.returncode:
        raise _refusal(lock, done.stderr, offline)
    (target / "complete").touch()
    return target


def _refusal(lock: Path, said: str, offline: Path | None) -> Exception:
    """What pip's words come down to."""
    name = lock.name
    differs = "DO NOT MATCH THE HASHES" in said
    gone = re.search(r"No matching distribution found for (\S+)", said)
    found = re.search(r"^\s+([A-Za-z0-9._-]+==\S+).*?:$", said, re.MULTILINE) if differs else gone
    package = found[1] if found else "a package"
    if offline and (differs or gone):
        state = "is not the locked file" if differs else "is not there"
        return stacks.lacking(offline, f"the wheel of {package}", state)
    if differs:
        return BuildRefused(
            "wheel-hash-differs",
            f"{package}: the index's wheel does not have the hash that {name} has: the file was changed "
            "there or on the way: use another index (PIP_INDEX_URL), or `make lock` if you trust it",
        )
    # pip says "none" also of an index that it could not reach, or that refused to answer.
    offered = re.search(r"\(from versions: (?!none\))(.*)\)", said)
    if gone and offered:
        return BuildRefused(
            "wheel-gone",
            f"{package}: locked in {name}, the index offers {offered[1].split(', ')[-1]}: take what it "
            "offers with `make lock`, or give an index that still has it: PIP_INDEX_URL=URL",
        )
    return NoAnswer(
        "wheels-no-answer",
        f"pip could not fetch the wheels of {name}; the reason stands above: if no index was reached, set "
        "HTTPS_PROXY or PIP_INDEX_URL",
    )


def lock_extra(stack: Stack, architecture: str, extra: Path) -> Path:
    """The hash lock beside the user's own requirements, made where it is not there or no longer fits.

    Holds what the stack does not have already; torch, torchvision, NCCL and all else in the stack's lock keep
    their versions. Raises BuildRefused naming both sides of a conflict, and NoAnswer.
    """
    stacks.check_extra(extra)
    base = stack.lock(architecture)
    target = extra.with_name(f"{extra.stem}.{stack.name}-{architecture}.lock")
    mark = f"# For {extra.name} and {base.name}: {digest(*_with_included(extra), base)}\n"
    if target.exists():
        found = target.read_text(encoding="utf-8")
        if found.startswith(mark) and not _by_place(found):
            return target
    pins = pinned(base)
    with tempfile.TemporaryDirectory() as folder:
        held, out = Path(folder, base.name), Path(folder, "lock")
        held.write_text("".join(f"{name}=={version}\n" for name, version in pins.items()))
        command = [
            str(uv()),
            "pip",
            "compile",
            "--quiet",
            "--generate-hashes",
            "--no-header",
            "--no-annotate",
        ]
        command += ["--no-emit-index-url", "--no-emit-find-links", "--only-binary", ":all:"]
        command += ["--python-version", stack.base.python, "--python-platform", UV_PLATFORMS[architecture]]
        command += ["--constraint", str(held), str(extra), "-o", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if "Failed to fetch" in done.stderr and done.returncode:
            raise NoAnswer(
                "extra-no-answer",
                f"EXTRA={extra}: uv could not ask the index: {' '.join(done.stderr.split())}: set "
                "HTTPS_PROXY or UV_INDEX_URL",
            )
        if done.returncode:
            raise BuildRefused("extra-conflict", _conflict(stack, extra, pins, done.stderr))
        blocks = re.split(r"^(?=[^\s#])", out.read_text(encoding="utf-8"), flags=re.MULTILINE)
    new = "".join(block for block in blocks if block.strip() and _name(block) not in pins)
    if by_place := _by_place(new):
        raise BuildRefused(
            "extra-by-place",
            f"EXTRA={extra}: {by_place[0]} names a place, and the build has no network: give NAME==VERSION, "
            "and the page or directory that has the wheel in UV_FIND_LINKS and PIP_FIND_LINKS",
        )
    fresh = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        fresh.write_text(mark + new, encoding="utf-8")
        fresh.replace(target)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise BuildRefused(
            "extra-lock-unwritable",
            f"EXTRA={extra}: its lock {target} cannot be written ({error.strerror}): copy EXTRA into a "
            "folder where you may write",
        ) from None
    return target


def _by_place(lock: str) -> list[str]:
    """What a lock has by a URL or a path. `fetch` would have no wheel for the build then."""
    requirements = re.findall(r"^[^\s#].*?(?= *\\?$)", lock, re.MULTILINE)
    return [requirement for requirement in requirements if not _PIN.match(requirement)]


def uv() -> Path:
    """The program uv of this venv, or UV."""
    return Path(os.environ.get("UV") or Path(sys.executable).with_name("uv"))


def pinned(lock: Path) -> dict[str, str]:
    """Names to versions."""
    return {_name(name): version for name, version in _PIN.findall(lock.read_text(encoding="utf-8"))}


def _name(requirement: str) -> str:
    """The package's name as indexes compare it."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    return re.sub(r"[-_.]+", "-", found[0]).lower() if found else ""


def _conflict(stack: Stack, extra: Path, pins: dict[str, str], said: str) -> str:
    """One line from uv's explanation: what the user asked for and what the stack holds."""
    for line in extra.read_text(encoding="utf-8").splitlines():
        requirement = line.partition("#")[0].strip()
        version = pins.get(_name(requirement))
        if requirement and version and _name(requirement) in _mentioned(said):
            return (
                f"EXTRA={extra}: {requirement} does not go with {_name(requirement)}=={version} of stack "
                f"{stack.name}: ask for what the stack has, or choose another with STACK=NAME"
            )
    return f"EXTRA={extra} does not go with stack {stack.name}: {' '.join(said.split())}"


def _mentioned(said: str) -> set[str]:
    return {_name(word) for word in re.findall(r"[A-Za-z0-9._-]+(?=[=<>!~]=?)", said)}
