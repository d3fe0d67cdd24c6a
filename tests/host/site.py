"""What the machine's administrator has set for reaching packages: apt's mirror and options, pip's, proxies, certificates.

The only module that looks for them on the machine that the tests run on. A test host takes them over
when it boots, so that no mirror, index or proxy is named in this repository.
"""

import configparser
import io
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.host.places import Refused

BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
PIP_FILES = ("/etc/xdg/pip/pip.conf", "/etc/pip.conf", "~/.pip/pip.conf", "~/.config/pip/pip.conf")
VARIABLES = re.compile(
    r"PIP_(?!CONFIG_FILE)\w+|\w+_proxy|\w+_PROXY|SSL_CERT_FILE|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|GIT_SSL_CAINFO"
)
APT_OPTIONS = re.compile(r"Acquire::(https?|Check-Valid-Until|Check-Date)\b")


@dataclass(frozen=True, kw_only=True)
class Site:
    env: Mapping[str, str]
    """Variables that programs on a host start with."""
    pip_conf: str
    """The text of one pip.conf that says what this machine's say together."""
    files: tuple[Path, ...]
    """Certificate bundles and package directories that the above name; a host shows them at the same paths."""


NONE = Site(env={}, pip_conf="", files=())


def read(environ: Mapping[str, str], pip_files: tuple[str, ...] = PIP_FILES) -> Site:
    env = {name: value for name, value in environ.items() if VARIABLES.fullmatch(name)}
    pip = configparser.RawConfigParser()
    pip.read(Path(file).expanduser() for file in (*pip_files, environ.get("PIP_CONFIG_FILE", os.devnull)))
    text = io.StringIO()
    pip.write(text)
    said = [*env.values(), *(value for section in pip.values() for value in section.values())]
    words = " ".join(said).split()
    paths = {BUNDLE, *(Path(word.removeprefix("file://")) for word in words)}
    # The pages of an index on disk point to the files beside it.
    paths = {path.parent if path.name == "simple" else path for path in paths}
    found = sorted(path for path in paths if path.is_absolute() and path.exists())
    return Site(env=env, pip_conf=text.getvalue(), files=tuple(found))


def debian_mirror() -> str:
    """The mirror of Debian's main archive that apt uses on this machine."""
    format = "$(ORIGIN):$(LABEL):$(REPO_URI)"
    for line in _output("apt-get", "indextargets", "--format", format, "Created-By: Packages"):
        if line.startswith("Debian:Debian:"):
            return line.removeprefix("Debian:Debian:")
    raise Refused("apt knows no Debian mirror: add one to /etc/apt/sources.list.d and run apt-get update")


def apt_options() -> list[str]:
    """Lines of apt's configuration: proxies, certificates, and whether a mirror may lag behind."""
    return [line for line in _output("apt-config", "dump") if APT_OPTIONS.match(line)]


def _output(*argv: str) -> list[str]:
    return subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
