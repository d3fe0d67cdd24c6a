"""The server and its scheduler: jobs from submission to the end, and what qstat says of them.

Usage: python -m tests.pbs_double.server CONFIG
"""

import contextlib
import os
import pwd
import secrets
import socket
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field, replace
from typing import Any

from tests.pbs_double import config as configs
from tests.pbs_double import mom, request, serving, wire
from tests.pbs_double.config import KILL_DELAY
from tests.pbs_double.mom import PING
from tests.pbs_double.request import Placed, Request
from tests.pbs_double.variables import Job
from tests.pbs_double.wire import Line, Lost, Message

FOREVER = "8760:00:00"
DELETED = 271
FORCED = 265
FIRST_LOST = -20
SCHEDULE = 0.1
"""Seconds after which the scheduler looks again, although nothing has changed that it was told of."""
NODE_DOWN = 64.0
"""Seconds without an answer after which a host is down."""
PRIVATE = "PRIVATE"


@dataclass(kw_only=True, eq=False)
class Entry:
    """A job, or an element of an array."""

    id: str
    sent: Message
    """What qsub sent."""
    request: Request
    state: str = "Q"
    placed: list[Placed] = field(default_factory=list)
    run_count: int = 0
    status: int | None = None
    comment: str = ""
    started: float = 0.0
    index: str = ""

    @property
    def number(self) -> str:
        return self.id.split(".")[0].split("[")[0]


class Server:
    def __init__(self, config: configs.Config):
        self.config = config
        self.entries: dict[str, Entry] = {}
        self.count = 0
        self.silent: dict[str, float] = {}
        """When hosts that do not answer were first found so."""
        self.down: set[str] = set()
        """Hosts that get no jobs."""
        self.lock = threading.RLock()
        self.changed = threading.Event()
        """Whether there may be something to start."""

    def answer(self, line: Line, message: Message) -> None:
        with self.lock:
            line.send(getattr(self, f"_{message.pop('op')}")(**message))
        self.changed.set()

    def _submit(self, **sent: Any) -> Message:
        if sent["queue"] not in self.config.kill_delays:
            return {"error": "Unknown queue"}
        try:
            asked = request.read(sent["resources"], split=self.config.split)
        except request.Refused as error:
            return {"error": str(error)}
        self.count += 1
        first, last, step = sent["array"] or (0, 0, 1)
        if not sent["array"]:
            entry = Entry(id=f"{self.count}.{self.config.server}", sent=sent, request=asked)
            self.entries[entry.id] = entry
            return {"id": entry.id}
        for index in range(first, last + 1, step):
            id = f"{self.count}[{index}].{self.config.server}"
            self.entries[id] = Entry(id=id, sent=sent, request=asked, index=str(index))
        return {"id": f"{self.count}[].{self.config.server}"}

    def _stat(self, id: str = "") -> Message:
        found = [entry for entry in self.entries.values() if not id or entry in self._named(id)]
        return {"jobs": [self._attributes(entry) for entry in found]}

    def _queues(self) -> Message:
        found = {}
        for name, delay in self.config.kill_delays.items():
            found[name] = {"queue_type": "Execution", "enabled": "True", "started": "True"}
            if delay != KILL_DELAY:
                found[name]["kill_delay"] = f"{delay:.0f}"
        return {"queues": found}

    def _delete(self, id: str, force: bool, user: str) -> Message:
        found = self._named(id)
        if not found:
            return {"error": "Unknown Job Id"}
        for entry in found:
            if entry.state == "F":
                return {"error": "Job has finished"}
            if user not in (entry.sent["user"], "root"):
                return {"error": "Unauthorized Request"}
            if entry.state == "Q":
                entry.state, entry.status = "F", DELETED
            elif force:
                entry.status = FORCED
                self._tell(entry, {"op": "signal", "job": entry.id, "signum": 9})
            else:
                self._tell(entry, {"op": "end", "job": entry.id, "status": None})
        return {}

    def _alter(self, id: str, walltime: str, user: str) -> Message:
        for entry in self._named(id):
            if entry.state == "F":
                return {"error": "Job has finished"}
            listed, limit = entry.request.listed, request.seconds(walltime)
            raised = limit > request.seconds(listed.get("walltime", FOREVER))
            if user != entry.sent["user"] or (entry.state == "R" and raised):
                return {"error": "Unauthorized Request"}
            entry.request = replace(entry.request, listed={**listed, "walltime": request.clock(walltime)})
            if entry.state == "R":
                self._tell(entry, {"op": "alter", "job": entry.id, "walltime": limit})
        return {}

    def _rerun(self, id: str, user: str) -> Message:
        for entry in self._named(id):
            if user != "root" or not entry.sent["rerunnable"]:
                return {"error": "Unauthorized Request"}
            self._tell(entry, {"op": "end", "job": entry.id, "status": mom.RERUN, "requeue": True})
        return {}

    def _signal(self, id: str, signum: int) -> Message:
        for entry in self._named(id):
            self._tell(entry, {"op": "signal", "job": entry.id, "signum": signum})
        return {}

    def _ended(self, job: str, status: int, requeue: bool, run: int) -> Message:
        entry = self.entries[job]
        if (entry.state, entry.run_count) != ("R", run):
            return {}  # by a host that was given up
        entry.state, entry.status = "Q" if requeue else "F", status
        if requeue:
            entry.placed = []
        return {}

    def _named(self, id: str) -> list[Entry]:
        """The jobs of an id, with or without the server; of an array all its elements."""
        name = id.split(".")[0]
        if name.endswith("[]"):
            return [entry for entry in self.entries.values() if entry.index and entry.number == name[:-2]]
        return [entry for entry in self.entries.values() if entry.id.split(".")[0] == name]

    def _tell(self, entry: Entry, message: Message) -> None:
        self._send(entry.placed[0].host, message)

    def _send(self, name: str, message: Message) -> None:
        host = self.config.hosts[name]
        with contextlib.suppress(Lost):
            wire.call(host.address, host.port, message)

    def _attributes(self, entry: Entry) -> dict[str, str]:
        sent = entry.sent
        shown = {
            "Job Id": entry.id,
            "Job_Name": sent["name"],
            "Job_Owner": f"{sent['user']}@{sent['submitted']['PBS_O_HOST']}",
            "job_state": entry.state,
            "queue": sent["queue"],
            "server": self.config.server,
            "Error_Path": f"{sent['submitted']['PBS_O_HOST']}:{self._paths(entry)[1]}",
        }
        if entry.placed:
            shown["exec_host"] = request.exec_host(entry.placed)
            shown["exec_vnode"] = request.exec_vnode(entry.placed)
        shown["Join_Path"] = "oe" if sent["join"] else "n"
        shown["Keep_Files"] = sent["keep"]
        shown["Mail_Points"], users = sent["mail"]
        if users:
            shown["Mail_Users"] = users
        shown["Output_Path"] = f"{sent['submitted']['PBS_O_HOST']}:{self._paths(entry)[0]}"
        shown["Priority"] = sent["priority"]
        shown["Rerunable"] = str(sent["rerunnable"])
        if sent["sandbox"]:
            shown["sandbox"] = sent["sandbox"]
        for name, value in entry.request.listed.items():
            shown[f"Resource_List.{name}"] = value
        if entry.started:
            shown["stime"] = time.strftime("%a %b %e %H:%M:%S %Y", time.localtime(entry.started))
        given = {**sent["submitted"], **sent["given"]}
        shown["Variable_List"] = ",".join(f"{name}={value}" for name, value in given.items())
        if entry.comment:
            shown["comment"] = entry.comment
        if entry.run_count:
            shown["run_count"] = str(entry.run_count)
        if entry.status is not None:
            shown["Exit_status"] = str(entry.status)
        shown["Submit_arguments"] = " ".join(sent["argv"])
        return shown

    def _paths(self, entry: Entry) -> tuple[str, str]:
        sent, folder = entry.sent, entry.sent["submitted"]["PBS_O_WORKDIR"]
        number = entry.number + (f".{entry.index}" if entry.index else "")
        found = []
        for letter, given in (("o", sent["out"]), ("e", sent["err"])):
            path = given.replace("^array_index^", entry.index) or f"{sent['name']}.{letter}{number}"
            path = os.path.join(folder, path)  # noqa: PTH118
            name = {"o": "OU", "e": "ER"}[letter]
            found.append(f"{path.rstrip('/')}/{entry.id}.{name}" if path.endswith("/") else path)
        return found[0], found[1]

    # --- the scheduler ------------------------------------------------------------------------------------------

    def schedule(self) -> None:
        """Starts what fits, in order."""
        with self.lock:
            for entry in list(self.entries.values()):
                if entry.state == "Q":
                    self._try(entry)

    def watch(self) -> None:
        """Finds hosts that do not answer, and gives up the jobs of which one is the first."""
        for name, host in self.config.hosts.items():
            try:
                wire.call(host.address, host.port, {"op": "ping"}, PING)
                self.silent.pop(name, None)
                self.down.discard(name)
            except Lost as error:
                since = self.silent.setdefault(name, time.monotonic())
                # A host whose sockets have closed is down at once.
                if "refused" in str(error) or time.monotonic() - since > NODE_DOWN:
                    self.down.add(name)
                if time.monotonic() - since > self.config.first_lost:
                    self._give_up(name)

    def _give_up(self, first: str) -> None:
        with self.lock:
            for entry in self.entries.values():
                if entry.state == "R" and entry.placed[0].host == first:
                    requeue = entry.sent["rerunnable"]
                    for sister in request.hosts(entry.placed)[1:]:
                        self._send(sister, {"op": "leave", "job": entry.id})
                    self._ended(entry.id, FIRST_LOST, requeue, entry.run_count)

    def _try(self, entry: Entry) -> None:
        total = {name: {"ncpus": host.ncpus, "ngpus": host.ngpus} for name, host in self.config.hosts.items()}
        free = {name: dict(has) for name, has in total.items() if name not in self.down}
        slots: dict[str, int] = {}
        for other in self.entries.values():
            for one in other.placed if other.state == "R" else []:
                slots[one.host] = max(slots.get(one.host, 0), one.slot + 1)
                for name in request.CONSUMED if one.host in free else ():
                    free[one.host][name] -= one.chunk.number(name)
        placed = request.arrange(entry.request, free, slots)
        if placed is None:
            entry.comment = request.why_never(entry.request, total)
            return
        entry.placed, entry.state, entry.started = placed, "R", time.time()
        entry.run_count += 1
        entry.comment = f"Job run at {time.strftime('%a %b %d at %H:%M')} on {request.exec_vnode(placed)}"
        self._tell(entry, self._start_message(entry))

    def _start_message(self, entry: Entry) -> Message:
        sent = entry.sent
        user = pwd.getpwnam(sent["user"])
        out, err = self._paths(entry)
        home = self.config.home or user.pw_dir
        private = sent["sandbox"] == PRIVATE
        job = Job(
            id=entry.id,
            name=sent["name"],
            user=sent["user"],
            home=home,
            shell=user.pw_shell,
            queue=sent["queue"],
            cookie=secrets.token_hex(16).upper(),
            submitted=sent["submitted"],
            given=sent["given"],
            hosts=request.hosts(entry.placed),
            lines=request.node_file(entry.placed),
            chunks=request.line_chunks(entry.placed),
            array_id=f"{entry.number}[].{self.config.server}" if entry.index else "",
            array_index=entry.index,
            directory=f"{home}/pbs.{entry.id}.x8z" if private else home,
        )
        how = {
            "join": sent["join"],
            "shell": sent["shell"],
            "out": out,
            "err": err,
            "rerunnable": sent["rerunnable"],
            "run": entry.run_count,
            "kill_delay": self.config.kill_delays[sent["queue"]],
            "walltime": request.seconds(entry.request.listed.get("walltime", FOREVER)),
        }
        return {"op": "run", "job": mom.to_message(job), "script": sent["script"], "how": how}


def _watch(server: Server) -> None:
    while True:
        try:
            server.watch()
        except Exception:  # else hosts would be watched no more, and nobody told
            traceback.print_exc()
        time.sleep(server.config.look)


def run(config: configs.Config, listener: socket.socket) -> None:
    server = Server(config)
    for work in (serving.serve, _watch):
        arguments = (listener, server.answer) if work is serving.serve else (server,)
        threading.Thread(target=work, args=arguments, daemon=True).start()
    while True:
        server.schedule()
        server.changed.wait(SCHEDULE)
        server.changed.clear()


def main(path: str) -> None:
    config = configs.read(path)
    run(config, serving.listen(config.address, config.port))


if __name__ == "__main__":
    main(*sys.argv[1:])
