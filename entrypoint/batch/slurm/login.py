"""Asks for a job of Slurm on a login node, foretells what it gets, and tells how it goes. `submission`,
`granted` and `ask` are the entries. Runs with Python 3.9.
"""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from entrypoint.batch import login, native, secrets
from entrypoint.batch.login import JobRequest, JobStatus, Submission, Wish, on_cluster, pairs, run, share
from entrypoint.batch.native import NativeOption
from entrypoint.batch.slurm.options import GROUPS, TABLE, group, joined, kind, replaces
from entrypoint.core.errors import BadInput, of_signal
from entrypoint.plan.profile import NONE, Profile

GPUS: Final = GROUPS[0]
"""Options that ask for GPUs."""
AS_SCRIPT: Final = (*(names[0] for names in GROUPS), *GROUPS[3])
"""Options that ask as the job script's own lines do, or for what these do not ask for."""
NODES_ONLY: Final = ("--mem=", "--cpus-per-task=")
"""Lines of the script that a site may forbid. One that gives whole nodes alone forbids all."""
SLURM = {
    "--nodes": "nodes",
    "-N": "nodes",
    **dict.fromkeys(("--ntasks-per-node", "--tasks-per-node"), "tasks"),
    "--gpus-per-node": "gpus",
    "--time": "time",
    "-t": "time",
    "--signal": "signal",
}
"""Words of sbatch that change what is granted, with what they name."""
UNCLEAR = ("--gpus", "-G", "--gpus-per-task", "--gpus-per-socket", "--tres-per-task", "--ntasks", "-n")
"""Those after which nobody knows what a node gets before it is granted."""
OF_LOGIN: Final = ("APPTRAIN_HOME", "APPTRAIN_PROFILE", "APPTRAIN_AT_HAND", "APPTRAIN_CACHE")
"""Variables of ours that the job does not need: the line that submits says the same, or the login node alone
reads them."""
GOES_ON = (
    "PENDING",
    "CONFIGURING",
    "RUNNING",
    "COMPLETING",
    "SUSPENDED",
    "REQUEUED",
    "REQUEUE_HOLD",
    "REQUEUE_FED",
)
MORE = ("RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "SPECIAL_EXIT", "RESV_DEL_HOLD")


def submission(profile: Profile, name: str, wish: Wish, env: Mapping[str, str], cwd: Path) -> Submission:
    """As LoginSide says."""
    script = login.script(profile)
    job = ["--profile", name, *wish.arguments]
    seen = {key: value for key, value in env.items() if not key.startswith(("SLURM_", "PBS_"))}
    asked, said = _asked(profile, wish)
    _check_export(asked, {**env, **wish.variables})
    words = native.words(asked)
    if not _is_wrapped(profile, asked):
        if not wish.gpus and not any(kind(option) in GPUS for option in asked):
            words.insert(1, GPUS[0] + "=0")  # in place of the script's own
        line = ["sbatch", *words, login.script_word(profile, cwd), *job]
        return Submission(line, seen, variables=wish.variables, said=said)
    wrap = "exec " + shlex.join(["bash", str(script), *job])
    left_out = ("--nodes=", f"{GPUS[0]}=", *_forbidden(profile))
    directives = native.read_all(login.directives(script, "#SBATCH ", *left_out), TABLE)
    directives = [line for line in directives if not any(replaces(option, line) for option in asked)]
    return Submission(
        ["sbatch", *native.words(directives), *words, f"--wrap={wrap}"],
        seen,
        variables=wish.variables,
        said=said,
    )


def _asked(profile: Profile, wish: Wish) -> tuple[list[NativeOption], list[str]]:
    """(what sbatch is asked for, each option once; a line for each of ours that the user's have replaced)."""
    own = native.read_all(_words(profile, wish), TABLE)
    given = native.read_all(wish.given, TABLE)
    ours, _ = native.merged(own, given, replaces)
    users = native.read_all(wish.options, TABLE)
    asked, said = native.merged(ours, users, replaces)
    return joined(asked), [*wish.said, *said, *_against(profile, users)]


def _against(profile: Profile, users: Sequence[NativeOption]) -> list[str]:
    """A line for each option of the user's that this site does not take, as its profile says."""
    names = [line.rstrip("=") for line in _forbidden(profile)]
    if profile.request.nodes_only:
        names += GPUS
    lines = [NativeOption(name, "", (name,)) for name in names]
    return [
        f"{option}: {profile.name} says that a request there names no such thing: sbatch may refuse it"
        for option in users
        if any(replaces(option, line) for line in lines)
    ]


def _check_export(asked: Sequence[NativeOption], env: Mapping[str, str]) -> None:
    """Raises BadInput if --export, or SBATCH_EXPORT in its place, shows a secret, or keeps from the job
    what is set for it in `env`."""
    exports = [(str(option), option.value, "add ALL") for option in asked if option.name == "--export"]
    if not exports and (text := env.get("SBATCH_EXPORT")):
        exports = [(f"SBATCH_EXPORT={text}", text, "give --export=ALL")]
    for said, value, remedy in exports:
        items = value.split(",")
        values = {name: value for name, equals, value in (item.partition("=") for item in items) if equals}
        secrets.check(said.partition("=")[0], values, "sacct")
        lost = [name for name in _of_job(env) if name not in items and "ALL" not in items]
        if lost:
            raise BadInput(
                "export-loses", f"{said} keeps {lost[0]} from the job, which is set here: {remedy}"
            )


def _of_job(env: Mapping[str, str]) -> list[str]:
    """The variables of ours with which a job would run otherwise than without them."""
    ours = [name for name, value in env.items() if name.startswith("APPTRAIN_") and value]
    return [name for name in ours if name not in OF_LOGIN]


def given(profile: Profile, wish: Wish) -> tuple[list[str], list[str]]:
    """As LoginSide says."""
    typed = native.read_all([word for what, word in _own(profile, wish) if what in wish.typed], TABLE)
    left, said = native.without_rivals(native.read_all(wish.given, TABLE), typed, replaces)
    return native.words(left), said


def _words(profile: Profile, wish: Wish) -> list[str]:
    """Options that win over each of the script's own directives that are of a site."""
    return [word for _, word in _own(profile, wish)]


def _own(profile: Profile, wish: Wish) -> list[tuple[str, str]]:
    """The same, each behind what of the wish it asks for; empty: nothing that has a name there."""
    gpus, nodes_only = wish.gpus or 0, profile.request.nodes_only
    cpus = share(profile.nodes.cpus, profile, gpus)
    words = [("nodes", f"--nodes={wish.nodes}")]
    if wish.partition:
        words.append(("partition", f"--partition={wish.partition}"))
    if wish.account:
        words.append(("account", f"--account={wish.account}"))
    if gpus and not nodes_only:
        words.append(("gpus", login.gpus_word(profile, gpus)))
    if cpus and not nodes_only and not profile.request.cpus:
        words.append(("", f"--cpus-per-task={max(1, cpus // _tasks(wish))}"))
    if not nodes_only:
        words += (("", word) for word in _memory(profile, gpus))
    if wish.time:
        words.append(("time", f"--time={wish.time}"))
    if profile.request.stop_before:
        words.append(("", f"--signal=B:USR2@{profile.request.stop_before}"))
    return words


def _tasks(wish: Wish) -> int:
    """Those of a node, which share its CPUs."""
    options = native.read_all([*wish.given, *wish.options], TABLE)
    counts = [option.value for option in options if option.name == "--ntasks-per-node"]
    return max(1, int(counts[-1])) if counts and counts[-1].isdecimal() else 1


def _memory(profile: Profile, gpus: int) -> list[str]:
    """The word that asks for memory as the site wants it, if any does."""
    nodes, word = profile.nodes, profile.request.memory or "--mem"
    if word == NONE:
        return []
    if word == "--mem":
        amount = share(nodes.memory_gib, profile, gpus)
        return [f"--mem={amount}G" if amount else "--mem=0"] if amount or nodes.whole else []
    units = (nodes.cpus if word == "--mem-per-cpu" else nodes.gpus) or 1
    each = (nodes.memory_gib or 0) * 1024 // units  # MiB
    return [f"{word}={each}M" if each % 1024 else f"{word}={each // 1024}G"]


def _forbidden(profile: Profile) -> tuple[str, ...]:
    """The lines of the script, beside those for nodes and GPUs, that this site forbids."""
    request = profile.request
    if request.nodes_only:
        return NODES_ONLY
    asked = {"--mem=": request.memory, "--cpus-per-task=": request.cpus}
    return tuple(line for line in NODES_ONLY if asked[line] == NONE)


def _is_wrapped(profile: Profile, asked: Sequence[NativeOption]) -> bool:
    """Whether the script is submitted without its directives. A word of the command line does not take a
    directive away, and sbatch refuses memory that is asked for in two ways, and from 26.05 on GPUs."""
    request = profile.request
    otherwise = [option for option in asked if group(option) and kind(option) not in AS_SCRIPT]
    return request.form == "wrapped" or bool(_forbidden(profile)) or bool(otherwise)


def limits(script: str) -> tuple[str, int]:
    """As LoginSide says."""
    time = re.search(r"^#SBATCH --time=(\S+)", script, re.MULTILINE)
    warns = re.search(r"^#SBATCH --signal=B:USR2@(\d+)", script, re.MULTILINE)
    return time[1] if time else "", int(warns[1]) if warns else 0


def granted(request: JobRequest) -> tuple[JobRequest, str]:
    for name, value in pairs(request.words):
        if name in UNCLEAR:
            return request, name
        if name == "--gres" and (gpus := re.search(r"\bgpu(:[^\W\d][\w.-]*)?(:(\d+))?", value)):
            request = replace(request, gpus=int(gpus[3] or 1))
        what = SLURM.get(name)
        number = value.rpartition(":")[2]
        if what in ("nodes", "tasks", "gpus"):
            if not number.isdecimal():
                return request, f"{name} {value}"
            request = replace(request, **{what: int(number)})  # type: ignore[arg-type]
        elif what == "time":
            request = replace(request, time=value)
        elif what == "signal" and value.rpartition("@")[2].isdecimal():
            request = replace(request, warns=int(value.rpartition("@")[2]))
    return request, ""


def architecture(words: Sequence[str]) -> str:
    """As LoginSide says: of one node of the partition."""
    partition = [option.value for option in native.read_all(words[1:], TABLE) if option.name == "--partition"]
    chosen = ["-p", partition[0]] if partition else []
    node = run("sinfo", "-h", *chosen, "-o", "%n").partition("\n")[0].strip()
    told = run("scontrol", "--oneliner", "show", "node", node) if re.fullmatch(r"[\w.-]+", node) else ""
    found = re.search(r"(?:^|\s)Arch=(\S+)", told)
    return found[1] if found else ""


def slots(_request: JobRequest) -> None:
    """As LoginSide says."""


def submitted(answer: str) -> str:
    """As LoginSide says, with the cluster if sbatch names one: JOB;CLUSTER, as with --parsable."""
    found = re.findall(
        r"^(?:Submitted batch job )?(\d+)(?:(?: on cluster |;)(\S+))?\s*$", answer, re.MULTILINE
    )
    return ";".join(filter(None, found[-1])) if found else ""


def ask(job: str, _site: Profile | None) -> JobStatus | None:
    """As LoginSide says. A job array is told with a line for each element, or for several that wait: one that
    runs is shown."""
    where, number = on_cluster(job)
    told = run("scontrol", *where, "--oneliner", "show", "job", number)
    lines = [line for line in told.splitlines() if "JobState=" in line]
    if not lines:
        return _ask_accounting(job)
    records = [dict(re.findall(r"(\w+)=(\S*)", line)) for line in lines]
    states = [found["JobState"] for found in records]
    front = min(range(len(lines)), key=lambda at: (states[at] != "RUNNING", states[at] not in GOES_ON))
    state, reason = states[front], records[front].get("Reason", "None")
    output = re.search(r" StdOut=(.*?)(?: Power=| TresPerNode=| \w+=|$)", lines[front].strip())
    shown = state if reason in ("None", "") or state == "RUNNING" else f"{state} ({reason})"
    if state == "RUNNING":
        shown = f"RUNNING on {records[front].get('NodeList', '')}"
    if "ArrayTaskId" in records[front] and len(lines) > 1:
        shown += f" (element {records[front]['ArrayTaskId']})"
    ends = [(found["JobState"], found.get("ExitCode", "")) for found in records]
    status = _of_all(ends)
    if status == 0 and "ArrayTaskId" in records[front]:
        # Of an array the controller forgets elements that ended while others go on.
        status = _of_all([*_accounts(job), *ends])
    return JobStatus(state=shown, output=[Path(output[1])] if output and output[1] else (), status=status)


def has_forgotten(job: str) -> bool:
    where, number = on_cluster(job)
    return "Invalid job id" in login.refusal("scontrol", *where, "show", "job", number)


def _ask_accounting(job: str) -> JobStatus | None:
    """Of a job that the controller has forgotten; None where nobody knows it."""
    ends = _accounts(job)
    status = _of_all(ends) if ends else None
    if status is None:
        return None
    ended = next((state for state, code in ends if _status(state, code) == status), ends[0][0])
    return JobStatus(state=ended, status=status)


def _accounts(job: str) -> list[tuple[str, str]]:
    """(state, exit code) of a job, or of each element of an array; empty where there are no accounts."""
    where, number = on_cluster(job)
    lines = run("sacct", *where, "-X", "-n", "-P", "-j", number, "-o", "State,ExitCode").splitlines()
    return [(state, code) for state, bar, code in (line.partition("|") for line in lines) if bar]


def _of_all(ends: Sequence[tuple[str, str]]) -> int | None:
    """The status of a job, or of an array of them: the first that is not 0; None while one goes on. `ends`:
    the state and exit code of each."""
    if any(state.partition(" ")[0] in (*GOES_ON, *MORE) for state, _ in ends):
        return None
    return next((status for state, code in ends if (status := _status(state, code))), 0)


def _status(state: str, code: str) -> int:
    """Of `75:0`, or `0:9` for a signal; a job that did not complete has not ended well."""
    status, _, signum = code.partition(":")
    if status.isdecimal() and int(status):
        return int(status)
    if signum.isdecimal() and int(signum):
        return of_signal(int(signum))
    if state.startswith("CANCELLED"):
        return of_signal(signal.SIGTERM)
    return 0 if state.startswith("COMPLETED") else 1
