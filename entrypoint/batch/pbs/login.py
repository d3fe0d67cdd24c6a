"""Asks for a job of PBS on a login node, foretells what it gets, and tells how it goes. `submission`,
`granted` and `ask` are the entries. Runs with Python 3.9.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from entrypoint.batch import login, native, secrets
from entrypoint.batch.login import JobRequest, JobStatus, Submission, Wish, run, share
from entrypoint.batch.native import NativeOption
from entrypoint.batch.pbs import qsub_environment
from entrypoint.batch.pbs.options import TABLE, replaces, separated
from entrypoint.batch.pbs.qstat import attributes, variables
from entrypoint.core import files
from entrypoint.core.errors import BadInput, of_signal
from entrypoint.plan import profile, rules, sources
from entrypoint.plan.profile import CLUSTERS, Profile
from entrypoint.schedulers import pbs
from entrypoint.schedulers.option_names import QSUB_SIZES

CARRIED = 1 << 20
"""Bytes of what a job of a chain is given in a file."""


def submission(profile: Profile, name: str, wish: Wish, env: Mapping[str, str], cwd: Path) -> Submission:
    """As LoginSide says."""
    script = login.script(profile)
    if not script.exists():
        raise BadInput("checkout-incomplete", f"there is no {script}: use a whole checkout")
    asked, said = _asked(profile, wish)
    users = [option for option in asked if option.name == "-v"]
    asked = [option for option in asked if option not in users]
    directives = []
    if not _select(asked):
        # qsub refuses the select and place of the script beside -l nodes= or -l ncpus=.
        lines = native.read_all(login.directives(script, "#PBS ", "-l"), TABLE)
        lines = [line for line in lines if not any(replaces(option, line) for option in asked)]
        directives = ["-C", "", *native.words(lines)]
    arguments, arguments_file = qsub_environment.arguments(wish.arguments, cwd)
    needed = qsub_environment.needed(profile, name, env, cwd)
    if arguments:
        needed = {key: value for key, value in needed.items() if key not in qsub_environment.ARGUMENTS}
    given = qsub_environment.given([option.value for option in users], env)
    carried = qsub_environment.listed({**needed, **arguments, **given})
    if any(option.name == "-V" for option in asked):
        secrets.check("-V", env, "qstat -f")
    else:
        said += qsub_environment.not_carried(env, {**needed, **given})
    known = {key: env[key] for key in qsub_environment.EVERYWHERE if key in env}
    words = ["qsub", *directives, *native.words(asked), "-v", carried, login.script_word(profile, cwd)]
    return Submission(words, {**known, **needed, **given}, arguments_file, said=said)


def _asked(profile: Profile, wish: Wish) -> tuple[list[NativeOption], list[str]]:
    """(what qsub is asked for, each option once; a line for each of ours that the user's have replaced).
    Raises BadInput for a resource that qsub refuses beside select, or without it."""
    own, given, users = (_read(words) for words in (_words(profile, wish), wish.given, wish.options))
    ours, _ = native.merged(own, given, replaces)
    asked, said = native.merged(ours, users, replaces)
    whole = _select(asked)
    for option in asked if whole else ():
        if option.name == "-l" and option.value.partition("=")[0] in QSUB_SIZES[2:]:
            raise BadInput(
                "qsub-size-beside-select",
                f"{option}: qsub refuses it beside {whole}: say what each node has in that: "
                f"-l select=N:{option.value}",
            )
    places = [str(each) for each in asked if each.name == "-l" and each.value.startswith("place=")]
    if places and not whole:
        raise BadInput(
            "qsub-place-without-select",
            f"{places[0]}: qsub refuses it without select, and this request has none: leave it out, or give "
            "-l select=N:... too",
        )
    return asked, [*wish.said, *said]


def _select(asked: Sequence[NativeOption]) -> str:
    """What says how many chunks there are; empty: nothing does."""
    selects = [str(each) for each in asked if each.name == "-l" and each.value.startswith("select=")]
    return selects[0] if selects else ""


def given(profile: Profile, wish: Wish) -> tuple[list[str], list[str]]:
    """As LoginSide says. One -l may ask for nodes and for GPUs."""
    typed = [word for what, words in _own(profile, wish) if wish.typed & set(what) for word in words]
    left, said = native.without_rivals(_read(wish.given), _read(typed), replaces)
    return native.words(left), said


def _read(words: Sequence[str]) -> list[NativeOption]:
    return separated(native.read_all(words, TABLE))


def _words(profile: Profile, wish: Wish) -> list[str]:
    return [word for _, words in _own(profile, wish) for word in words]


def _own(profile: Profile, wish: Wish) -> list[tuple[tuple[str, ...], tuple[str, str]]]:
    """Options of qsub, each behind what of the wish it asks for."""
    request, gpus = profile.request, wish.gpus or 0
    cpus, memory = share(profile.nodes.cpus, profile, gpus), share(profile.nodes.memory_gib, profile, gpus)
    times = wish.nodes if request.form == "totals" else 1
    resources = []
    if cpus and not request.nodes_only and not request.cpus:
        resources.append(f"ncpus={cpus * times}")
    if gpus and not request.nodes_only:
        resources.append(login.gpus_word(profile, gpus * times))
    if memory and not request.nodes_only and not request.memory:
        resources.append(f"mem={memory * times}gb")
    of_nodes = ("nodes", "gpus")
    words: list[tuple[tuple[str, ...], tuple[str, str]]]
    if request.form == "totals":
        words = [(of_nodes, ("-l", resource)) for resource in resources]
    else:
        select = ":".join([f"select={wish.nodes}", *resources, *request.chunk])
        words = [(of_nodes, ("-l", select)), ((), ("-l", "place=scatter"))]
    if wish.time:
        words.append((("time",), ("-l", f"walltime={login.clock(login.seconds(wish.time) or 0)}")))
    if wish.partition:
        words.append((("partition",), ("-q", wish.partition)))
    if wish.account:
        words.append((("account",), (request.account_option, wish.account)))
    return words


def limits(script: str) -> tuple[str, int]:
    """As LoginSide says; the job script has a clock, and no line of its own for it."""
    time = re.search(r"^#PBS -l walltime=(\S+)", script, re.MULTILINE)
    return time[1] if time else "", 0


def granted(request: JobRequest) -> tuple[JobRequest, str]:
    for option in _read(request.words):
        value = option.value
        if option.name != "-l":
            continue
        if value.startswith("walltime="):
            time = value.partition("=")[2]
            # A bare number has seconds here.
            request = replace(request, time=login.clock(int(time)) if time.isdecimal() else time)
        elif value.startswith(("select=", "ncpus=", "ngpus=", "nodes=")) or (
            request.nodes > 1 and _shares_hosts(value)
        ):
            return request, f"-l {value}"
    return request, ""


def _shares_hosts(resource: str) -> bool:
    """Whether chunks may come to one host by it."""
    name, _, how = resource.partition("=")
    return name == "place" and "scatter" not in how.split(":")


def architecture(_words: Sequence[str]) -> str:
    """As LoginSide says: PBS knows no processors."""
    return ""


def slots(request: JobRequest) -> tuple[int, ...]:
    """As LoginSide says."""
    found = [item.partition("=")[2] for item in request.profile.request.chunk if item.startswith("mpiprocs=")]
    return (int(found[0]) if found and found[0].isdecimal() else 1,) * request.nodes  # qsub refuses others


def submitted(answer: str) -> str:
    """As LoginSide says: a site's qsub may print more before it."""
    return next(reversed(answer.split()), "")


def ask(job: str, site: Profile | None) -> JobStatus | None:
    told = run("qstat", "-x", "-f", job) or run("qstat", "-f", job)
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
        status=exit_status(found) if over else None,
    )


def has_forgotten(job: str) -> bool:
    return "Unknown Job Id" in login.refusal("qstat", "-f", job)


def exit_status(found: Mapping[str, str]) -> int:
    """PBS has 256 and more for a signal, and negative ones for a job that it could not run."""
    text = found.get("Exit_status", "")
    if not re.fullmatch(r"-?\d+", text):
        return 1
    status = int(text)
    return 1 if status < 0 else of_signal(status % 256) if status > 255 else status


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
