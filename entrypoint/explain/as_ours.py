"""The same job as one of ours: the line that submits it, and what it does not carry over. `convert` is a pure
function of a job script that was read.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from entrypoint.explain import request
from entrypoint.explain.launches import Launch
from entrypoint.explain.request import ScriptRequest
from entrypoint.explain.traps import Script

OURS = "slurm/multinode.sbatch"
_STARTS_OURS = re.compile(
    r"(?m)^[^#\n]*(?:\bmultinode\.(?:sbatch|pbs)|\bAPPTRAIN_HOME\b|\bapptrain (?:run|launch|submit)\b)"
)
_PASSED_ON = {
    *(
        "partition",
        "account",
        "qos",
        "constraint",
        "exclude",
        "nodelist",
        "reservation",
        "array",
        "dependency",
    ),
    *(
        "mail-user",
        "mail-type",
        "exclusive",
        "job-name",
        "mem",
        "cpus-per-task",
        "time",
        "comment",
        "licenses",
    ),
    *("begin", "nice", "hint", "switches"),
}
"""Options of sbatch that stay as they are."""
_OURS_ALREADY = {
    *(
        "nodes",
        "ntasks",
        "ntasks-per-node",
        "gpus-per-node",
        "gpus",
        "gres",
        "gpus-per-task",
        "signal",
        "output",
    ),
    *("error", "open-mode", "requeue", "no-requeue", "kill-on-bad-exit", "gpu-bind", "export"),
}
"""Options of sbatch that our job script has, or decides."""
_SET_BY_US = {
    *(
        "MASTER_ADDR",
        "MASTER_PORT",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "NODE_RANK",
        "GROUP_RANK",
        "SRUN_CPUS_PER_TASK",
    ),
    *("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE", "NNODES", "GPUS_PER_NODE", "NPROC_PER_NODE", "RDZV_ID"),
}
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASS|CREDENTIAL", re.I)
"""In the name of a variable whose value is not shown."""
_PROFILE_ENV = ("NCCL_", "GLOO_", "FI_", "UCX_", "TORCH_", "PYTORCH_", "CUDA_", "HF_", "OMP_")


@dataclass(frozen=True)
class Converted:
    lines: tuple[str, ...]
    """That submit it; empty where no training was found."""
    profile: tuple[str, ...]
    """Keys that a profile of the site would have."""
    left: tuple[str, ...]
    """What was not carried over, and why."""


def convert(script: Script) -> Converted:
    training = next((one for one in script.trainings), None)
    if training is None:
        why = "no line was found that starts a training: torchrun, or python with a script"
        return Converted((), (), ("it starts apptrain already" if _STARTS_OURS.search(script.text) else why,))
    words = _program(training)
    image = training.image
    before = [f"APPTRAIN_IMAGE={_word(image)}"] if image and "://" not in image else []
    if binds := _binds(training):
        before.append(f"APPTRAIN_BIND={_word(binds)}")
    own = " ".join(_word(word) for word in words)
    if script.request.scheduler == "pbs":
        line = _qsub(script.request, before, f"-- {own}")
    elif script.request.scheduler == "slurm":
        line = " ".join([*before, "sbatch", *_sbatch(script), OURS, "--", own])
    else:
        line = " ".join([*before, "apptrain run", "--image" if image else "", "--", own]).replace("  ", " ")
    submit = _submit(script, before, own) if script.request.scheduler else ""
    return Converted(
        tuple(filter(None, (line, submit))), tuple(_profile(script)), tuple(_left(script, training))
    )


def _word(text: str) -> str:
    """For a person to paste; a variable stays one."""
    return f'"{text}"' if "$" in text and not set(text) & set('"`\\') else shlex.quote(text)


def _program(one: Launch) -> list[str]:
    """The script with its arguments, or -m MODULE."""
    words = [word.text for word in one.words]
    if not one.agent:
        words = words[1:]
        while words and words[0].startswith("-") and words[0] != "-m":
            words.pop(0)
    if one.agent and ("m" in one.agent_options or "module" in one.agent_options):
        words = ["-m", *words]
    cut = next(
        (at for at, word in enumerate(words) if word in (">", ">>", "2>", "2>&1", "&>", "|")), len(words)
    )
    return [word for word in words[:cut] if not word.startswith((">", "2>", "&>"))]


def _binds(one: Launch) -> str:
    words = [word.text for word in one.container_words]
    found = []
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in ("--bind", "-B"):
            found += (value if equals else "".join(words[at + 1 : at + 2])).split(",")
    return "\n".join(found)


def _sbatch(script: Script) -> Iterator[str]:
    asked = script.request
    if script.nodes:
        yield f"--nodes={script.nodes}"
    if asked.gpus_per_node:
        typed = asked.find("gres", "gpus-per-node")
        kind = _gpu_type(typed.value) if typed else ""
        yield f"--gpus-per-node={kind}{asked.gpus_per_node}"
    elif asked.gpus_per_node == 0:
        yield "--gpus-per-node=0"
    if cpus := _cpus(asked):
        yield f"--cpus-per-task={cpus}"
    for option in _last(asked):
        if option.name in _PASSED_ON and option.name != "cpus-per-task":
            yield f"--{option.name}" + (f"={_word(option.value)}" if option.value else "")


def _gpu_type(value: str) -> str:
    parts = value.removeprefix("gpu:").split(":")
    return f"{parts[0]}:" if len(parts) > 1 and not parts[0].isdigit() else ""


def _cpus(asked: ScriptRequest) -> int | None:
    """Of a node's one task: what all tasks of a node had."""
    each = asked.number("cpus-per-task")
    return each * (asked.tasks_per_node or 1) if each else None


def _last(asked: ScriptRequest) -> list[request.AskedOption]:
    return list({option.name: option for option in asked.options}.values())


def _qsub(asked: ScriptRequest, before: list[str], arguments: str) -> str:
    words = ["qsub"]
    for option in _last(asked):
        if option.name in ("select", "place", "walltime"):
            words.append(f"-l {option.name}={_word(option.value)}")
        elif option.name in ("q", "P", "A", "N", "W", "M", "m", "p", "J"):
            words.append(f"-{option.name} {_word(option.value)}")
    if not asked.find("place") and (asked.nodes or 1) > 1:
        words.append("-l place=scatter")
    exports = " ".join([*before, f"APPTRAIN_ARGS={shlex.quote(arguments)}"])
    names = ",".join(["APPTRAIN_ARGS", *(one.partition("=")[0] for one in before)])
    return f"{exports} {' '.join(words)} -v {names} pbs/multinode.pbs"


def _submit(script: Script, before: list[str], own: str) -> str:
    asked = script.request
    words = [*before, "apptrain submit --cluster NAME"]
    if script.nodes:
        words.append(f"--nodes {script.nodes}")
    if asked.gpus_per_node:
        words.append(f"--gpus-per-node {asked.gpus_per_node}")
    for name, found in (
        ("partition", asked.find("partition", "q")),
        ("account", asked.find("account", "A", "P")),
        ("time", asked.find("time", "walltime")),
    ):
        if found and found.value:
            words.append(f"--{name} {_word(found.value)}")
    return " ".join([*words, "--", own])


def _profile(script: Script) -> Iterator[str]:
    modules = [
        word.text
        for one in script.launches
        if not one.container
        and [word.text for word in one.words[:2]] in (["module", "load"], ["module", "add"], ["ml", "load"])
        for word in one.words[2:]
    ]
    if modules:
        yield f"modules: [{', '.join(modules)}]"
    for _, name, value in script.assigned:
        if _SECRET.search(name):
            continue
        if name.startswith(_PROFILE_ENV) and name not in _SET_BY_US and "$(" not in value:
            yield f"env: {{{name}: {value}}}"


def _left(script: Script, training: Launch) -> Iterator[str]:
    if script.request.scheduler == "slurm":
        for option in _last(script.request):
            if option.name not in _PASSED_ON | _OURS_ALREADY:
                yield f"line {option.line}: --{option.name}: give it to sbatch if it is needed"
    for one in script.launches:
        texts = [word.text for word in one.words[:2]]
        if texts in (["conda", "activate"], ["mamba", "activate"]) or (
            texts[:1] in (["source"], ["."]) and len(texts) > 1 and "activate" in texts[1]
        ):
            yield f"line {one.line}: the environment: jobs run in the image (own packages: make venv, --venv)"
        elif texts[:1] in (["cp"], ["rsync"], ["tar"], ["mkdir"]) and not one.is_in_task:
            yield f"line {one.line}: {texts[0]}: do it before you submit, or in the script"
    for word, name, _ in script.assigned:
        is_own = name not in _SET_BY_US and (not name.startswith(_PROFILE_ENV) or _SECRET.search(name))
        if is_own and name.isupper() and _is_exported(script, word.line):
            yield f"line {word.line}: {name}: export it where you submit; APPTRAIN_PASS={name} for the ranks"
    if any("$" in word.text for word in training.words):
        yield f"line {training.line}: variables in the arguments are filled in where you submit"
    others = [one for one in script.trainings if one is not training]
    for one in others[:3]:
        yield f"line {one.line}: a second training: a job of its own"


def _is_exported(script: Script, line: int) -> bool:
    return 0 < line <= len(script.lines) and script.lines[line - 1].lstrip().startswith("export ")
