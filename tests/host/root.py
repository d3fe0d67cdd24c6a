"""The file tree that all test hosts start from: Debian 13 with Slurm, Apptainer from unstable, two users.

mmdebstrap makes it, as root, once for each recipe. It is kept outside the checkout and never written to again. A
plain Debian can be had too.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.host import site
from tests.host.places import Refused, cache, locked, remove

PACKAGES = (
    *("apptainer", "uidmap", "squashfuse", "fuse2fs", "fakeroot", "squashfs-tools", "debootstrap"),
    *("python3", "python3-venv", "make", "git", "ca-certificates", "iproute2", "procps", "less", "tcsh"),
    *("xz-utils", "zstd", "catatonit", "iputils-ping", "nftables", "openssh-server", "sshfs"),
    *("slurmctld", "slurmd", "slurm-client", "slurm-wlm-torque", "munge", "openmpi-bin", "mpich"),
)
HOOKS = (
    # Apptainer is in unstable only; nothing else may come from there.
    """--setup-hook=printf '%s\\n' 'Package: *' 'Pin: release n=sid' 'Pin-Priority: -1' '' \
        'Package: apptainer' 'Pin: release n=sid' 'Pin-Priority: 990' >"$1/etc/apt/preferences.d/sid"
    """,
    # alice has a range of subordinate ids; bob, like most directory accounts, has none.
    '--customize-hook=chroot "$1" useradd -m -u 2001 -s /bin/bash alice',
    '--customize-hook=chroot "$1" useradd -m -u 2002 -s /bin/bash -K SUB_UID_COUNT=0 -K SUB_GID_COUNT=0 bob',
    # Both reach every host of a cluster, where homes are shared, by ssh.
    """--customize-hook=for user in alice bob; do
        chroot "$1" runuser - $user -c "umask 077 && mkdir .ssh && cd .ssh && ssh-keygen -q -t ed25519 -N '' -f id_ed25519 &&
            cp id_ed25519.pub authorized_keys"
    done""",
    """--customize-hook=cd "$1/etc/ssh" && printf '* %s\n' "$(cat ssh_host_ed25519_key.pub)" >ssh_known_hosts""",
    '--customize-hook=mkdir -m 1777 "$1/scratch"',
)
PLAIN = ("--mode=root", "--variant=minbase")
RECIPE = (*PLAIN, f"--include={','.join(PACKAGES)}", *HOOKS, "trixie")
"""mmdebstrap's arguments, less what the machine's administrator decides: options of apt, and the mirror."""
BUILD_LIMIT = 1800.0
"""Seconds for making the root, and for waiting while another process does; it takes about a minute."""


def path() -> Path:
    """Where the root of this recipe is, or will be."""
    return cache() / f"root-{hashlib.sha256(json.dumps(RECIPE).encode()).hexdigest()[:16]}"


def make() -> Path:
    """Makes the root unless it is there, and says where. It gets its name once it is whole."""
    if os.geteuid():
        raise Refused("a test host needs root: mounts, namespaces and users of its own")
    root = path()
    if root.is_dir():
        return root
    root.parent.mkdir(parents=True, exist_ok=True)
    with locked(root.with_suffix(".lock"), BUILD_LIMIT) as lock:
        if not root.is_dir():
            print(f"host: making {root}, once; this takes about a minute", file=sys.stderr, flush=True)
            unfinished = root.with_suffix(".unfinished")
            remove(unfinished)
            _mmdebstrap(unfinished, RECIPE, ("trixie", "sid"), [lock])
            unfinished.rename(root)
    return root


def plain(target: Path, packages: Sequence[str]) -> None:
    """Makes a Debian 13 with these packages and nothing else."""
    _mmdebstrap(target, (*PLAIN, f"--include={','.join(packages)}", "trixie"), ("trixie",))


def _mmdebstrap(
    target: Path, recipe: Sequence[str], suites: Sequence[str], locks: Sequence[int] = ()
) -> None:
    """Inherits the locks, and so holds them to its end, should this process be killed."""
    mirror = site.debian_mirror()
    sources = [f"deb {mirror} {suite} main" for suite in suites]
    options = [f"--aptopt={line}" for line in site.apt_options()]
    argv = ["mmdebstrap", *options, *recipe, str(target), *sources]
    how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "umask": 0o022}
    try:
        ended = subprocess.run(argv, **how, pass_fds=locks, timeout=BUILD_LIMIT)
    except FileNotFoundError:
        needed = Path(__file__).with_name("packages").read_text().split()
        raise Refused(f"there is no mmdebstrap: apt-get install {' '.join(needed)}") from None
    if ended.returncode:
        raise Refused(f"mmdebstrap ended with {ended.returncode}:\n{ended.stderr.rstrip()}")
