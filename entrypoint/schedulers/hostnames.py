"""When two spellings name one host: `pbsn1` and `pbsn1.cluster.org`. The only module that compares names, and
the one that makes the name of a host's fast network (`with_suffix`).

A short name stands for the one host of its list whose first label it is. Two full names are two hosts
wherever they differ, and a short name beside two such hosts is refused, not guessed at.
"""

from __future__ import annotations

from collections.abc import Sequence

from entrypoint.core.errors import BadInput


def merge(names: Sequence[str], source: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """(hosts in order of first appearance and spelled as there, how often each was named).

    Raises BadInput where a short name may be either of two hosts.
    """
    full_names: dict[str, set[str]] = {}
    for name in names:
        if not _short(name):
            full_names.setdefault(_label(name), set()).add(name.lower())
    counts: dict[str, int] = {}
    spelling: dict[str, str] = {}
    for name in names:
        candidates = full_names.get(name.lower(), set()) if _short(name) else {name.lower()}
        if len(candidates) > 1:
            raise BadInput(
                "node-name-ambiguous",
                f"{source}: {name} may be {' or '.join(sorted(candidates))}: use full names throughout",
            )
        host = next(iter(candidates), name.lower())
        counts[host] = counts.get(host, 0) + 1
        spelling.setdefault(host, name)
    return tuple(spelling.values()), tuple(counts.values())


def find(hostname: str, hosts: Sequence[str]) -> list[int]:
    """The positions in `hosts` that `hostname` may be: several where it is too short to tell."""
    wanted = hostname.lower()
    exact = [at for at, host in enumerate(hosts) if host.lower() == wanted]
    return exact or [at for at, host in enumerate(hosts) if _alike(host, hostname)]


def find_interface(hostname: str, hosts: Sequence[str]) -> list[int]:
    """The same, where one of the names may be that of another network of the host: `n1` and `n1-ib0`. For
    lists that one scheduler has made of one job."""
    label = _label(hostname)
    return find(hostname, hosts) or [
        at
        for at, host in enumerate(hosts)
        if _label(host).startswith(f"{label}-") or label.startswith(f"{_label(host)}-")
    ]


def with_suffix(name: str, suffix: str) -> str:
    """The name of this host's address on the network whose names end with `suffix`: `n1-ib0.cluster.org` for
    `n1.cluster.org` and `-ib0`. A suffix that brings a domain takes the place of the name's own.

    A name that has the suffix stays as it is, and so does an address.
    """
    label = _label(name)
    if _is_address(name) or name.lower().endswith(suffix.lower()) or label.endswith(suffix.lower()):
        return name
    domain = "" if "." in suffix else name[len(label) :]
    return f"{name[: len(label)]}{suffix}{domain}"


def _alike(one: str, other: str) -> bool:
    return _short(one) != _short(other) and _label(one) == _label(other)


def _short(name: str) -> bool:
    """Whether the name leaves its domain out. An address has none to leave out."""
    return "." not in name and ":" not in name


def _label(name: str) -> str:
    """What a short name of this host would be."""
    return name.lower() if _is_address(name) else name.lower().partition(".")[0]


def _is_address(name: str) -> bool:
    return ":" in name or name.replace(".", "").isdigit()
