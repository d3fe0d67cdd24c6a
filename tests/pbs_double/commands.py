"""The commands of PBS, each by its own name: how they read their arguments, and what they print and return.

pbsdsh merges nothing, waits for all, and returns 0 whatever its tasks return.

A job calls half a dozen of them, so a call must not cost more than the start of an interpreter: what takes longer to
import (getopt, json, signal, typing ...) is done without.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]  # the other one makes enums of all it has
import os
import pwd
import select
import sys

from tests.pbs_double import wire
from tests.pbs_double.wire import Line, Lost

TYPE_CHECKING = False  # typing has it too
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import NoReturn

    from tests.pbs_double.config import Config
    from tests.pbs_double.wire import Message

WIDTH = 78
TM_VARIABLES = (
    *("PBS_JOBID", "PBS_JOBCOOKIE", "PBS_ENVIRONMENT", "PBS_NODENUM", "PBS_TASKNUM", "PBS_MOMPORT"),
)
QSUB_OPTIONS = "a:A:c:C:e:j:J:k:l:m:M:N:o:p:P:q:r:R:S:u:v:VW:zhf"
QUEUE = "workq"
FINISHED, UNKNOWN = 35, 153
PROGRAM = """\
#!{interpreter}
import sys
sys.path.insert(0, {library!r})
from tests.pbs_double import commands
commands.SERVER = {server!r}
sys.exit(commands.COMMANDS[{name!r}](sys.argv[1:]))
"""
SERVER = ("", "", 0)
"""Its name, address and port."""


def programs(config: Config, interpreter: str, library: str) -> dict[str, str]:
    """The text of each command, for an interpreter that finds this package in `library`."""
    server = (config.server, config.address, config.port)
    return {
        name: PROGRAM.format(interpreter=interpreter, library=library, server=server, name=name)
        for name in COMMANDS
    }


def fail(text: str, status: int = 1) -> NoReturn:
    print(text, file=sys.stderr)
    sys.exit(status)


def server(message: Message) -> Message:
    name, address, port = SERVER
    try:
        return wire.call(address, port, message)
    except Lost as error:
        fail(f"cannot connect to server {name} ({error})", 111)


def user() -> str:
    return pwd.getpwuid(os.getuid()).pw_name


# --- qsub -----------------------------------------------------------------------------------------------------------


def qsub(argv: list[str]) -> int:
    options, rest = _getopt(argv, QSUB_OPTIONS, "qsub")
    if len(rest) > 1:
        fail("usage: qsub [options] [script]", 2)
    script = _text(rest[0]) if rest else sys.stdin.read()
    prefix = dict(options).get("-C", "#PBS")
    directives: list[tuple[str, str]] = []
    for words in _directives(script, prefix):
        directives += _getopt(words, QSUB_OPTIONS, "qsub")[0]
    given = dict(directives) | dict(options)
    resources = _resources(directives)
    overriding = _resources(options)
    sent: Message = {
        "op": "submit",
        "user": user(),
        "script": script,
        "name": given.get("-N") or (os.path.basename(rest[0]) if rest else "STDIN"),
        "resources": {**resources, **overriding},
        "given": _variables(given.get("-v", "")),
        "submitted": _submitted(given.get("-q", QUEUE)),
        "queue": given.get("-q", QUEUE),
        "array": _array(given.get("-J", "")),
        "out": given.get("-o", "").rpartition(":")[2],
        "err": given.get("-e", "").rpartition(":")[2],
        "join": given.get("-j") == "oe",
        "mail": (given.get("-m", "a"), given.get("-M", "")),
        "priority": given.get("-p", "0"),
        "keep": given.get("-k", "n"),
        "rerunnable": given.get("-r", "y") == "y",
        "shell": given.get("-S", ""),
        "sandbox": dict(part.partition("=")[::2] for part in given.get("-W", "").split(",")).get(
            "sandbox", ""
        ),
        "argv": argv,
    }
    answer = server(sent)
    if "error" in answer:
        fail(f"qsub: {answer['error']}")
    print(answer["id"])
    return 0


def _text(file: str) -> str:
    with open(file) as opened:
        return opened.read()


def _directives(script: str, prefix: str) -> list[list[str]]:
    """The words of each directive; the first line that is no comment ends them."""
    import shlex

    found = []
    for line in script.splitlines():
        if prefix and line.startswith(prefix):
            found.append(shlex.split(line.removeprefix(prefix), comments=True))
        elif line.strip() and not line.startswith((":", "#")):
            break
    return found


def _resources(options: Sequence[tuple[str, str]]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in options:
        if name == "-l":
            found |= dict(part.partition("=")[::2] for part in value.split(","))
    return found


def _variables(text: str) -> dict[str, str]:
    """`-v A=1,B`: a bare name takes its value from the environment as it is; a value that is given ends at the first
    comma outside quotes, which are taken away."""
    found = {}
    while text:
        name, at = _upto(",=", text)
        if text[at : at + 1] == "=":
            found[name], length = _unquoted(text[at + 1 :])
            at += 1 + length
        elif name in os.environ:
            found[name] = os.environ[name]
        else:
            name = ""
        if not name:
            fail("qsub: cannot send environment with the job")
        text = text[at + 1 :]
    return found


def _upto(ends: str, text: str) -> tuple[str, int]:
    at = next((at for at, char in enumerate(text) if char in ends), len(text))
    return text[:at], at


def _unquoted(text: str) -> tuple[str, int]:
    """A value, and how many characters of the text it took."""
    value, quote = "", ""
    for at, char in enumerate(text):
        if char == "," and not quote and not value.endswith("\\"):
            return value, at
        if char == quote:
            quote = ""
        elif char in "'\"" and not quote:
            quote = char
        elif char == "," and not quote:
            value = value[:-1] + char
        else:
            value += char
    if quote:
        fail("qsub: cannot send environment with the job")
    return value, len(text)


def _submitted(queue: str) -> dict[str, str]:
    names = ("HOME", "LOGNAME", "MAIL", "PATH", "SHELL")
    found = {f"PBS_O_{name}": os.environ[name] for name in names if name in os.environ}
    here = {"PBS_O_HOST": os.uname().nodename, "PBS_O_WORKDIR": os.environ.get("PWD", os.getcwd())}
    return {**found, **here, "PBS_O_QUEUE": queue, "PBS_O_SYSTEM": "Linux"}


def _array(text: str) -> tuple[int, int, int] | None:
    if not text:
        return None
    span, _, step = text.partition(":")
    first, _, last = span.partition("-")
    return int(first), int(last), int(step or 1)


def _getopt(
    argv: list[str], letters: str, name: str, *, mixed: bool = False, status: int = 2
) -> tuple[list[tuple[str, str]], list[str]]:
    """Options with their values, and the rest; `mixed` as GNU's, which looks for options behind other words too."""
    options: list[tuple[str, str]] = []
    rest: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if word == "--":
            return options, rest + words
        if not word.startswith("-") or word == "-":
            rest.append(word)
            if not mixed:
                return options, rest + words
            continue
        letter, value = word[1], word[2:]
        if letter == ":" or letter not in letters:
            fail(f"{name}: option -{letter} not recognized", status)
        if letters[letters.index(letter) + 1 :].startswith(":"):
            if not value and not words:
                fail(f"{name}: option -{letter} requires argument", status)
            options.append((f"-{letter}", value or words.pop(0)))
        else:
            options.append((f"-{letter}", ""))
            if value:
                words.insert(0, f"-{value}")
    return options, rest


# --- qstat, qdel, qalter, qrerun, qsig ----------------------------------------------------------------------------


def qstat(argv: list[str]) -> int:
    options, ids = _getopt(argv, "fxBQ", "qstat")
    flags = dict(options)
    if "-Q" in flags:
        return _queues(ids)
    for id in ids or [""]:
        jobs = server({"op": "stat", "id": id})["jobs"]
        if id and not jobs:
            fail(f"qstat: Unknown Job Id {id}", UNKNOWN)
        for job in jobs:
            if job["job_state"] == "F" and "-x" not in flags:
                if not id:
                    continue
                text = f"qstat: {id} Job has finished, use -x or -H to obtain historical job information"
                fail(text, FINISHED)
            if "-f" in flags:
                print(f"Job Id: {job.pop('Job Id')}")
                for name, value in job.items():
                    print(_wrapped(f"    {name} = {value}"))
                print()
            else:
                print(
                    f"{job['Job Id']:17} {job['Job_Name']:16} {user():16} {'0':>8} {job['job_state']} {job['queue']}"
                )
    return 0


def _queues(names: Sequence[str]) -> int:
    """`qstat -Q -f`: what is not set is not listed."""
    known = server({"op": "queues"})["queues"]
    for name in names or known:
        if name not in known:
            fail(f"qstat: Unknown queue {name}", 170)
        print(f"Queue: {name}")
        for attribute, value in known[name].items():
            print(_wrapped(f"    {attribute} = {value}"))
        print()
    return 0


def _wrapped(line: str) -> str:
    pieces = []
    while len(line) > WIDTH:
        pieces.append(line[:WIDTH])
        line = line[WIDTH:]
    return "\n\t".join([*pieces, line])


def qdel(argv: list[str]) -> int:
    options, ids = _getopt(argv, "W:x", "qdel")
    force = dict(options).get("-W") == "force"
    return _each(ids, "qdel", lambda id: {"op": "delete", "id": id, "force": force, "user": user()})


def qalter(argv: list[str]) -> int:
    """`-l walltime=` alone, which a running job's owner may lower."""
    options, ids = _getopt(argv, "l:", "qalter")
    walltime = _resources(options)["walltime"]
    return _each(ids, "qalter", lambda id: {"op": "alter", "id": id, "walltime": walltime, "user": user()})


def qrerun(argv: list[str]) -> int:
    return _each(argv, "qrerun", lambda id: {"op": "rerun", "id": id, "user": user()})


def qsig(argv: list[str]) -> int:
    options, ids = _getopt(argv, "s:", "qsig")
    name = dict(options).get("-s", "SIGTERM")
    signum = int(getattr(signal, "SIG" + name.removeprefix("SIG")))
    return _each(ids, "qsig", lambda id: {"op": "signal", "id": id, "signum": signum})


def _each(ids: list[str], name: str, message: Callable[[str], Message]) -> int:
    status = 0
    for id in ids:
        answer = server(message(id))
        if "error" in answer:
            print(f"{name}: {answer['error']} {id}", file=sys.stderr)
            status = {"Unknown Job Id": UNKNOWN, "Job has finished": FINISHED}.get(answer["error"], 159)
    return status


# --- pbsdsh, pbs_tmrsh --------------------------------------------------------------------------------------------


class Mom:
    """This host's MoM, as a process of the job reaches it."""

    def __init__(self, name: str):
        self.name = name
        if any(variable not in os.environ for variable in TM_VARIABLES):
            self._fail()
        self.port = int(os.environ["PBS_MOMPORT"])
        answer = self._call({"op": "init"}).receive()
        if "error" in answer:
            self._fail()
        self.lines: list[str] = answer["lines"]
        self.addresses: dict[str, str] = answer["addresses"]

    def spawn(self, line: int, argv: Sequence[str]) -> tuple[Line, int]:
        """The connection that will carry the task's status, and the task's id."""
        connection = self._call({"op": "spawn", "at": line, "argv": list(argv)})
        return connection, connection.receive()["task"]

    def signal(self, task: int, line: int, signum: int) -> None:
        """Does not wait for an answer, which a host that is lost does not give."""
        self._call({"op": "signal_task", "task": task, "at": line, "signum": signum})

    def _call(self, message: Message) -> Line:
        environ = os.environ
        job = {"job": environ["PBS_JOBID"], "cookie": environ["PBS_JOBCOOKIE"]}
        try:
            connection = wire.connect("127.0.0.1", self.port)
        except Lost:
            self._fail()
        connection.send({**message, **job})
        return connection

    def _fail(self) -> NoReturn:
        fail(f"{self.name}: tm_init failed, rc = bad environment (17005) (17005)")


def pbsdsh(argv: list[str]) -> int:
    found, command = _getopt(argv, "c:n:svo", "pbsdsh", mixed=True, status=1)
    options = dict(found)
    if not command:
        fail("Usage: pbsdsh [-c copies][-s][-v][-o] -- program [args...]")
    mom = Mom("pbsdsh")
    count = len(mom.lines)
    if "-n" in options:
        lines = [_atoi(options["-n"]) % count]
    else:
        copies = _atoi(options["-c"]) if "-c" in options else count
        lines = [at % count for at in range(copies)]
    running: dict[int, tuple[Line, int, int]] = {}

    def bail_out(signum: int, _: object) -> NoReturn:
        for _, task, line in list(running.values()):
            print(f"pbsdsh: killing task 0x{task:08X} signal {signum}", flush=True)
            mom.signal(task, line, signum)
        os._exit(1)

    signals = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
    for signum in signals:
        signal.signal(signum, bail_out)
    for spawned, line in enumerate(lines):
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # or a task could run that nobody would end
        connection, task = mom.spawn(line, command)
        running[spawned] = (connection, task, line)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        if "-v" in options:
            print(
                f"pbsdsh: spawned task 0x{spawned:08X} on logical node {line} event {spawned + 2}", flush=True
            )
        if "-s" in options:
            _wait(running)
    if "-o" not in options:
        _wait(running)
    return 0


def _wait(running: dict[int, tuple[Line, int, int]]) -> None:
    """Says what did not return 0, as it comes."""
    poll = select.poll()
    of = {line.connection.fileno(): spawned for spawned, (line, _, _) in running.items()}
    for descriptor in of:
        poll.register(descriptor, select.POLLIN)
    while running:
        for descriptor, _ in poll.poll():
            spawned = of[descriptor]
            try:
                status = running[spawned][0].receive()["status"]
            except Lost:
                sys.exit(2)
            poll.unregister(descriptor)
            del running[spawned]
            if status:
                print(f"pbsdsh: task 0x{spawned:08X} exit status {status}", flush=True)


def _atoi(text: str) -> int:
    digits = ""
    for char in text:
        if not char.isdecimal():
            break
        digits += char
    return int(digits or 0)


def pbs_tmrsh(argv: list[str]) -> int:
    if len(argv) < 2:
        fail("usage: pbs_tmrsh host command [args...]")
    host, command = argv[0], argv[1:]
    if command[:1] == ["-l"]:
        command = command[2:]
    nodefile = os.environ.get("PBS_NODEFILE")
    if nodefile is None:
        fail("/opt/pbs/bin/pbs_tmrsh: cannot find PBS_NODEFILE", 255)
    mom = Mom("pbs_tmrsh")
    name = mom.addresses.get(host, host)
    if name not in mom.lines:
        fail(f'/opt/pbs/bin/pbs_tmrsh: host "{host}" not found in PBS_NODEFILE', 255)
    connection, _ = mom.spawn(mom.lines.index(name), command)
    try:
        status = int(connection.receive()["status"])
    except Lost:
        return 2
    return status - 256 if status > 256 else status


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    function.__name__: function for function in (qsub, qstat, qdel, qalter, qrerun, qsig, pbsdsh, pbs_tmrsh)
}
