"""What the command lines of the host and of the cluster have in common: how to say who, where and what is shown."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from tests.host.host import As, Bind, Host

SHELL = ("script", "--quiet", "--return", "--command=bash --login", "/dev/null")
"""A shell on a host, with a terminal of the host's own: this machine's has no name there."""


def bind(text: str) -> Bind:
    source, _, rest = text.partition(":")
    target, _, mode = rest.partition(":")
    path = Path(source).absolute()
    if not path.exists() or mode not in ("", "ro", "rw"):
        raise argparse.ArgumentTypeError(f"{text!r}: give SOURCE[:[TARGET][:rw]] with a SOURCE that exists")
    return Bind(source=path, target=Path(target or path), mode="rw" if mode == "rw" else "ro")


def of_up(online: str) -> argparse.ArgumentParser:
    """The options of `up`; `online` says who is."""
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--online", action="store_true", help=online)
    where = "SOURCE[:[TARGET][:rw]]"
    options.add_argument(
        "--bind", type=bind, action="append", default=[], metavar=where, help="show a file or folder"
    )
    return options


def of_commands() -> argparse.ArgumentParser:
    """The options of what runs a command on a host."""
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--user", default="alice", help="alice, bob or root (%(default)s)")
    options.add_argument("--cwd", default=argparse.SUPPRESS, help="where to start (the home directory)")
    return options


def become(host: Host, argv: Sequence[str], given: argparse.Namespace) -> NoReturn:
    """This process becomes the command, so that the terminal and its signals are the command's own."""
    how = As(user=given.user, env={"TERM": os.environ.get("TERM", "dumb")})
    if "cwd" in given:
        how["cwd"] = given.cwd
    os.umask(0o022)
    line, env = host.command(argv, **how)
    os.execvpe(line[0], line, env)
