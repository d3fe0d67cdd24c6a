"""The command line of the test host: argparse's names to calls of the other modules."""

import argparse
import os
import sys
from pathlib import Path

from tests.host import host, root
from tests.host.places import Refused

EPILOG = """\
examples:
  python -m tests.host up --online --bind "$PWD"     bring up a host that shows the checkout, read-only
  python -m tests.host shell                         work on it as alice
  python -m tests.host run --user root -- chmod 600 /dev/fuse
  python -m tests.host down

alice has a range of subordinate ids, bob has none. What is done to a host is gone when it is down. Needs root on
Linux, the Debian packages named in tests/host/packages, and in APPTRAIN_TEST_CACHE (~/.cache/apptrain) a folder on
a local disk, which may be removed whenever no host is up.
"""


def bind(text: str) -> host.Bind:
    source, _, rest = text.partition(":")
    target, _, mode = rest.partition(":")
    path = Path(source).absolute()
    if not path.exists() or mode not in ("", "ro", "rw"):
        raise argparse.ArgumentTypeError(f"{text!r}: give SOURCE[:[TARGET][:rw]] with a SOURCE that exists")
    return host.Bind(source=path, target=Path(target or path), mode="rw" if mode == "rw" else "ro")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.host",
        description="A host with Debian 13 and real Apptainer, in namespaces of this machine.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    which = argparse.ArgumentParser(add_help=False)
    which.add_argument("--name", default="login1", help="which host (%(default)s)")
    who = argparse.ArgumentParser(add_help=False, parents=[which])
    who.add_argument("--user", default="alice", help="alice, bob or root (%(default)s)")
    who.add_argument("--cwd", default=argparse.SUPPRESS, help="where to start (the home directory)")

    up = commands.add_parser("up", parents=[which], help="bring a host up, unless it is up")
    up.add_argument("--online", action="store_true", help="with the way out that this machine has")
    where = "SOURCE[:[TARGET][:rw]]"
    up.add_argument(
        "--bind", type=bind, action="append", default=[], metavar=where, help="show a file or folder"
    )
    commands.add_parser("shell", parents=[who], help="work on a host")
    run = commands.add_parser("run", parents=[who], help="run one command on a host")
    run.add_argument("argv", nargs="+", metavar="CMD")
    commands.add_parser("down", parents=[which], help="end a host with all that runs on it")
    commands.add_parser("status", help="list the hosts that are up")
    commands.add_parser("root", help="make the file tree that hosts start from, and print where it is")
    return parser.parse_args(argv)


def enter(name: str, argv: list[str], **how: str) -> None:
    """Becomes the command, so that the terminal and its signals are the command's own."""
    found = host.find(name)
    if found is None:
        raise Refused(f"host {name} is not up: python -m tests.host up --name {name}")
    os.umask(0o022)
    line, env = found.command(argv, env={"TERM": os.environ.get("TERM", "dumb")}, **how)
    os.execvpe(line[0], line, env)


def main(argv: list[str] | None = None) -> None:
    given = parse(argv)
    how = {name: value for name, value in vars(given).items() if name in ("user", "cwd")}
    match given.command:
        case "up":
            if host.find(given.name) is None:
                host.boot(given.name, online=given.online, binds=given.bind)
            print(f"{given.name} is up: python -m tests.host shell --name {given.name}")
        case "shell":
            # `script` gives it a terminal of the host's own: this machine's has no name there.
            enter(given.name, ["script", "--quiet", "--return", "--command=bash --login", "/dev/null"], **how)
        case "run":
            enter(given.name, given.argv, **how)
        case "down":
            if found := host.find(given.name):
                found.down()
        case "status":
            print("".join(f"{name}\n" for name in host.names()), end="")
        case "root":
            print(root.make())


if __name__ == "__main__":
    try:
        main()
    except Refused as refusal:
        print(f"host: {refusal}", file=sys.stderr)
        sys.exit(64)
