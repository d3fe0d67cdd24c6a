"""`apptrain submit --follow`: shows a job from the queue to its end, and ends with its status. `follow` is
the entry.

It asks the scheduler and reads the job's output. It does not change the job: whoever stops following leaves
it running. Runs with Python 3.9.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from entrypoint.batch.pbs.qstat import attributes, variables
from entrypoint.core import files
from entrypoint.core.errors import INTERRUPTED, BadInput, Unavailable
from entrypoint.plan import profile, rules, sources
from entrypoint.plan.profile import CLUSTERS, Profile
from entrypoint.schedulers import pbs
from entrypoint.schedulers.known import KNOWN, words_of

ANSWER = 30.0
"""Seconds that a scheduler's command has to answer."""
SILENCE = 600.0
"""Seconds without an answer after which nobody follows any more."""
LEAST, MOST = 1.0, 15.0
"""Seconds between two questions: at first, and for a job that stays as it is."""
READ = 0.5
"""Seconds between two looks for new output."""
CARRIED = 1 << 20
"""Bytes of what a job of a chain is given in a file."""


@dataclass(frozen=True)
class JobStatus:
    """A job, as its scheduler tells of it."""

    state: str
    """For people."""
    output: Sequence[Path] = ()
    """Where its output may be; the first that exists is shown."""
    late: Path | None = None
    """What to show at the end where none of those was there."""
    status: int | None = None
    """None while it is not over."""


def find(scheduler: str = "") -> str:
    """This scheduler, or the one that is here. Raises BadInput where nobody here can tell of a job."""
    programs = {known.name: known.tells for known in KNOWN}
    for name in (scheduler,) if scheduler else programs:
        if shutil.which(programs[name]):
            return name
    lacking = (
        f"{programs[scheduler]} is not" if scheduler else f"neither {' nor '.join(programs.values())} is"
    )
    raise BadInput(
        "follow-no-scheduler", f"--follow: {lacking} in PATH: follow a job on a login node of its cluster"
    )


def follow(job: str, scheduler: str = "", site: Profile | None = None) -> int:
    """Shows the job until it ends; returns its status, 130 after Ctrl-C. `site`: the profile that the job was
    submitted with, if that is known here. Raises BadInput for what is no job, or where nobody here can tell
    of one, Unavailable where the scheduler does not answer."""
    if not any(re.fullmatch(known.job_id, job) for known in KNOWN if scheduler in ("", known.name)):
        programs = " or ".join(known.submits for known in KNOWN)
        raise BadInput("follow-job-id", f"--follow {job}: give a job's id, as {programs} has printed it")
    scheduler = find(scheduler)
    ask = _ASKED[scheduler]
    try:
        return _follow(job, lambda: ask(job, site))
    except KeyboardInterrupt:
        cancel = f"{words_of(scheduler).cancels} {job}"
        _say(f"job {job} goes on; again: apptrain submit --follow {job}; to cancel it: {cancel}")
        return INTERRUPTED


def _follow(job: str, ask: Callable[[], JobStatus | None]) -> int:
    shown, at, state, pause = None, 0, "", LEAST
    answered = time.monotonic()
    while True:
        seen = ask()
        if seen is None:
            if not state:
                state = "nobody tells of it yet"
                _say(f"job {job}: {state}")
            if time.monotonic() - answered > SILENCE:
                raise Unavailable(
                    "follow-silence",
                    f"nobody has told of job {job} for {SILENCE:.0f} s, it may go on: "
                    f"apptrain submit --follow {job}",
                )
            time.sleep(pause)
            continue
        answered = time.monotonic()
        if seen.state != state:
            state, pause = seen.state, LEAST
            _say(f"job {job}: {state}")
        shown = shown or next((path for path in seen.output if path.exists()), None)
        if seen.status is not None:
            at = _show(shown or seen.late, at)
            _say(f"job {job} ended with status {seen.status}")
            return seen.status
        deadline = time.monotonic() + pause
        while time.monotonic() < deadline:
            at = _show(shown, at)
            time.sleep(min(READ, pause))
        pause = min(MOST, pause * 1.5)


def _show(path: Path | None, at: int) -> int:
    """Prints what was added to the file; returns up to where."""
    if path is None:
        return at
    try:
        with path.open("rb") as file:
            file.seek(at)
            text = file.read()
    except OSError:
        return at
    sys.stdout.write(text.decode(errors="replace"))
    sys.stdout.flush()
    return at + len(text)


def _say(text: str) -> None:
    print(f"submit: {text}", file=sys.stderr, flush=True)


def _run(*command: str) -> str:
    """What it prints; empty where it fails or does not answer."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=ANSWER, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if done.returncode else done.stdout


# --- Slurm --------------------------------------------------------------------------------------------------


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


def _ask_slurm(job: str, _site: Profile | None) -> JobStatus | None:
    told = _run("scontrol", "--oneliner", "show", "job", job)
    if not told:
        return _ask_accounting(job)
    found = dict(re.findall(r"(\w+)=(\S*)", told))
    state, reason = found.get("JobState", ""), found.get("Reason", "None")
    output = re.search(r" StdOut=(.*?)(?: Power=| TresPerNode=| \w+=|$)", told.strip())
    shown = state if reason in ("None", "") or state == "RUNNING" else f"{state} ({reason})"
    if state == "RUNNING":
        shown = f"RUNNING on {found.get('NodeList', '')}"
    return JobStatus(
        state=shown,
        output=[Path(output[1])] if output and output[1] else (),
        status=None if state in (*GOES_ON, *MORE) else _status(state, found.get("ExitCode", "")),
    )


def _ask_accounting(job: str) -> JobStatus | None:
    """Of a job that the controller has forgotten; None where nobody knows it."""
    line = _run("sacct", "-X", "-n", "-P", "-j", job, "-o", "State,ExitCode").strip().partition("\n")[0]
    state, bar, code = line.partition("|")
    if not bar or state.split()[0] in (*GOES_ON, *MORE):
        return None
    return JobStatus(state=state, status=_status(state, code))


def _status(state: str, code: str) -> int:
    """Of `75:0`, or `0:9` for a signal; a job that did not complete has not ended well."""
    status, _, signum = code.partition(":")
    if status.isdecimal() and int(status):
        return int(status)
    if signum.isdecimal() and int(signum):
        return 128 + int(signum)
    if state.startswith("CANCELLED"):
        return 128 + signal.SIGTERM
    return 0 if state.startswith("COMPLETED") else 1


# --- PBS ----------------------------------------------------------------------------------------------------


def _ask_pbs(job: str, site: Profile | None) -> JobStatus | None:
    told = _run("qstat", "-x", "-f", job) or _run("qstat", "-f", job)
    found = attributes(told)
    if "job_state" not in found:
        return None
    names = {
        "Q": "queued",
        "H": "held",
        "W": "waiting",
        "R": "running",
        "E": "ending",
        "F": "over",
        "C": "over",
    }
    letter = found["job_state"]
    comment = f" ({found['comment']})" if letter == "Q" and "comment" in found else ""
    over = letter in ("F", "C")
    folder = _run_directory(job, found, site)
    return JobStatus(
        state=names.get(letter, letter) + comment,
        output=[folder / "job.log"] if folder else (),
        late=Path(found["Output_Path"].partition(":")[2]) if "Output_Path" in found else None,
        status=_of_pbs(found) if over else None,
    )


def _of_pbs(found: Mapping[str, str]) -> int:
    """PBS has 256 and more for a signal, and negative ones for a job that it could not run."""
    text = found.get("Exit_status", "")
    if not re.fullmatch(r"-?\d+", text):
        return 1
    status = int(text)
    return 1 if status < 0 else 128 + status % 256 if status > 255 else status


def _run_directory(job: str, found: Mapping[str, str], site: Profile | None) -> Path | None:
    """Where the job's files are, by the rules that it goes by itself; None if that cannot be told here."""
    env = _environment(job, found)
    folder = env.get("PBS_O_WORKDIR")
    if not folder:
        return None
    try:
        flags, _ = sources.inherited(env, job=True)
        given = flags.get("run-dir") or env.get("APPTRAIN_RUN_DIR")
        if given:
            return Path(folder, given)
        site = site or _profile(flags.get("profile") or env.get("APPTRAIN_PROFILE", ""), job, env)
        one = pbs.job(env)
        # What qsub was not told to carry, the site may set on all its machines.
        known = {**os.environ, **env}
        return Path(rules.run_directory(known, one.name, one.run_id, one.submit_dir, site))
    except BadInput:
        return None


def _environment(job: str, found: Mapping[str, str]) -> dict[str, str]:
    """The job's variables, as far as PBS tells them."""
    env = variables(found)
    user = found.get("Job_Owner", "").partition("@")[0]
    of_login = {"HOME": env.get("PBS_O_HOME"), "USER": user, "LOGNAME": user}
    env = {**{name: value for name, value in of_login.items() if value}, **env}
    chain = env.get("APPTRAIN_CHAIN_FILE", "")
    with contextlib.suppress(OSError, ValueError):
        entries = files.read_text(Path(chain), CARRIED).split("\0") if chain else []
        env.update(entry.partition("=")[::2] for entry in entries if entry)
    return {**env, "PBS_JOBID": job, "PBS_JOBNAME": found.get("Job_Name", "job")}


def _profile(name: str, job: str, env: Mapping[str, str]) -> Profile:
    """The one of that name or path, else the one for the job's server, as the job script finds it; an empty
    one if there is none, or it cannot be read here."""
    clusters = Path(env["APPTRAIN_HOME"], "clusters") if env.get("APPTRAIN_HOME") else CLUSTERS
    server = job.partition(".")[2]
    with contextlib.suppress(BadInput):
        if name:
            return profile.load(str(Path(env["PBS_O_WORKDIR"], profile.find(name, clusters))))
        for file in sorted(clusters.glob("*.yaml")) if server else ():
            if server in (one := profile.load(str(file))).clusters:
                return one
    return Profile()


_ASKED = {"slurm": _ask_slurm, "pbs": _ask_pbs}
