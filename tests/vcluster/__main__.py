"""The command line of the test cluster: argparse's names to calls of the other modules."""

import argparse
import sys

from tests.host import Refused
from tests.host.console import SHELL, become, of_commands, of_up
from tests.vcluster import cluster
from tests.vcluster.layout import HIGH_SPEED, MANAGEMENT, MEMBERS

EPILOG = """\
examples:
  python -m tests.vcluster up --bind "$PWD"              bring up a cluster that shows the checkout, read-only
  python -m tests.vcluster shell                         work on its login host as alice
  python -m tests.vcluster run -- srun -N3 hostname
  python -m tests.vcluster cut gpu-b07 --network hsn0    drop a node's packets; `heal` ends that
  python -m tests.vcluster off gpu-b07                   pull a node's plug; `on` starts it again
  python -m tests.vcluster down

docs/cluster.md says what it is like. What is done to a cluster is gone when it is down. Needs root on Linux, the
Debian packages named in tests/host/packages, and in APPTRAIN_TEST_CACHE (~/.cache/apptrain) a folder on a local disk.
"""
NETWORKS = {network.name: network for network in (MANAGEMENT, HIGH_SPEED)}


def setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: give NAME=VALUE, a line of slurm.conf")
    return name, value


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.vcluster",
        description="A Slurm cluster with real Apptainer, in namespaces of this machine.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    which = argparse.ArgumentParser(add_help=False)
    which.add_argument("--name", default="cluster", help="which cluster (%(default)s)")
    names = [member.name for member in MEMBERS]
    one = argparse.ArgumentParser(add_help=False, parents=[which])
    one.add_argument("host", choices=names, metavar="HOST", help=", ".join(names))
    some = argparse.ArgumentParser(add_help=False, parents=[one])
    some.add_argument(
        "--network", choices=NETWORKS, action="append", default=[], help="only this (both, if none is given)"
    )
    where = argparse.ArgumentParser(add_help=False, parents=[which, of_commands()])
    where.add_argument("--on", choices=names, default="login1", metavar="HOST", help="where (%(default)s)")

    online = of_up("give the login host the way out that this machine has")
    up = commands.add_parser(
        "up", parents=[which, online], help="bring a cluster up, or what is down of one that is up"
    )
    up.add_argument("--proctrack", choices=["linuxproc", "cgroup"], default="linuxproc")
    up.add_argument(
        "--set", type=setting, action="append", default=[], metavar="NAME=VALUE", help="a line of slurm.conf"
    )
    commands.add_parser("shell", parents=[where], help="work on a host")
    run = commands.add_parser("run", parents=[where], help="run one command on a host")
    run.add_argument("argv", nargs="+", metavar="CMD")
    commands.add_parser("cut", parents=[some], help="drop all packets from and to a host")
    commands.add_parser("heal", parents=[some], help="let them through again")
    commands.add_parser("off", parents=[one], help="end a host as a power cut does")
    commands.add_parser("on", parents=[one], help="start it again")
    commands.add_parser("status", parents=[which], help="say what is up, and where the logs are")
    commands.add_parser("logs", parents=[which], help="print the last lines of Slurm's logs")
    commands.add_parser("down", parents=[which], help="end a cluster with all that runs on it")
    return parser.parse_args(argv)


def the(name: str) -> cluster.Cluster:
    found = cluster.find(name)
    if found is None:
        raise Refused(f"cluster {name} is not up: python -m tests.vcluster up --name {name}")
    return found


def up(given: argparse.Namespace) -> None:
    found = cluster.find(given.name)
    if found is None:
        found = cluster.boot(
            given.name,
            online=given.online,
            binds=given.bind,
            proctrack=given.proctrack,
            settings=dict(given.set),
        )
    for member in MEMBERS:
        if member.name not in found.hosts:
            found.power_on(member.name)
    print(f"{given.name} is up: python -m tests.vcluster shell --name {given.name}")


def status(found: cluster.Cluster) -> None:
    states = found.node_states()
    for member in MEMBERS:
        on = "on" if member.name in found.hosts else "off"
        print(f"{member.name:10} {member.role:10} {on:3} {states.get(member.name, '')}".rstrip())
    print(f"logs: {found.folder / 'log'}")


def main(argv: list[str] | None = None) -> None:
    given = parse(argv)
    if given.command == "up":
        up(given)
        return
    if given.command == "down":
        cluster.down(given.name)
        return
    found = the(given.name)
    match given.command:
        case "shell":
            become(found[given.on], SHELL, given)
        case "run":
            become(found[given.on], given.argv, given)
        case "cut":
            found.cut(given.host, *(NETWORKS[name] for name in given.network))
        case "heal":
            found.heal(given.host, *(NETWORKS[name] for name in given.network))
        case "off":
            found.power_off(given.host)
        case "on":
            found.power_on(given.host)
        case "status":
            status(found)
        case "logs":
            print(found.logs())


if __name__ == "__main__":
    try:
        main()
    except (Refused, TimeoutError) as refusal:
        print(f"cluster: {refusal}", file=sys.stderr)
        sys.exit(64 if isinstance(refusal, Refused) else 1)
