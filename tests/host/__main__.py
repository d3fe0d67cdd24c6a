"""The command line of the test host: argparse's names to calls of the other modules."""

import argparse
import sys

from tests.host import host, root
from tests.host.console import SHELL, become, of_commands, of_up
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

    online = of_up("with the way out that this machine has")
    commands.add_parser("up", parents=[which, online], help="bring a host up, unless it is up")
    commands.add_parser("shell", parents=[which, of_commands()], help="work on a host")
    run = commands.add_parser("run", parents=[which, of_commands()], help="run one command on a host")
    run.add_argument("argv", nargs="+", metavar="CMD")
    commands.add_parser("down", parents=[which], help="end a host with all that runs on it")
    commands.add_parser("status", help="list the hosts that are up")
    commands.add_parser("root", help="make the file tree that hosts start from, and print where it is")
    return parser.parse_args(argv)


def the(name: str) -> host.Host:
    found = host.find(name)
    if found is None:
        raise Refused(f"host {name} is not up: python -m tests.host up --name {name}")
    return found


def main(argv: list[str] | None = None) -> None:
    given = parse(argv)
    match given.command:
        case "up":
            if host.find(given.name) is None:
                host.boot(given.name, online=given.online, binds=given.bind)
            print(f"{given.name} is up: python -m tests.host shell --name {given.name}")
        case "shell":
            become(the(given.name), SHELL, given)
        case "run":
            become(the(given.name), given.argv, given)
        case "down":
            if found := host.find(given.name):
                found.down()
        case "status":
            print("".join(f"{name}\n" for name in host.list_up()), end="")
        case "root":
            print(root.make())


if __name__ == "__main__":
    try:
        main()
    except Refused as refusal:
        print(f"host: {refusal}", file=sys.stderr)
        sys.exit(64)
