"""The same job as one of ours: the line that submits it, and what it does not carry over. `convert` is a pure
function of a job script that was read.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace

from entrypoint.core.frozen import dataclass
from entrypoint.core.plain import shell_word
from entrypoint.explain import request, traps
from entrypoint.explain.launches import CONTAINER_VALUES, Launch, set_by, starts_unseen
from entrypoint.explain.request import AskedOption, ScriptRequest
from entrypoint.explain.shell import Word
from entrypoint.explain.traps import Found, Script
from entrypoint.plan import mistakes
from entrypoint.schedulers.option_names import QSUB_SIZES

OURS = "slurm/multinode.sbatch"
_STARTS_OURS = re.compile(
    r"(?m)^[^#\n]*(?:\bmultinode\.(?:sbatch|pbs)|\bAPPTRAIN_HOME\b|\bapptrain (?:run|launch|submit)\b)"
)
_OUTPUTS = {"output", "error", "o", "e"}
_AS_WE_ASK = {"requeue": "", "open-mode": "append", "j": "oe", "r": "y"}
"""Options that our job scripts give, with the value that they give: none is handed on with that one."""
MOST = 100_000
"""Characters of a line. A longer one is left out: its beginning alone would start another training."""
_STOP_BEFORE = "120"
"""Seconds before the end at which slurm/multinode.sbatch asks for a signal."""
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
        "time",
        "comment",
        "licenses",
    ),
    *("begin", "nice", "hint", "switches", "output", "error", "requeue", "no-requeue", "open-mode"),
}
"""Options of sbatch that stay as they are."""
_OF_TASKS = ("ntasks", "ntasks-per-node")
_SHAPE = {
    *(
        "nodes",
        "ntasks",
        "ntasks-per-node",
        "gpus-per-node",
        "gpus",
        "gres",
        "gpus-per-task",
    ),
    *("cpus-per-task", "kill-on-bad-exit"),
}
"""Options of sbatch that say how large a job is, or that our job script decides."""
_PASSED_ON_BY_QSUB = {"select", "place", "walltime", *"qPANWMmpJoejr"}
"""As they are, like all resources but those of a chunk."""
_OF_SUBMIT = {
    *("partition", "account", "time", "mem", "exclusive"),
    *("q", "A", "P", "select", "place", "walltime"),
}
"""What `apptrain submit` has options of its own for, or takes from the profile."""
_QSUB_HAS = _PASSED_ON_BY_QSUB | {"S"}
"""With the shell, which is ours."""
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
    "CUDA_VISIBLE_DEVICES",
}
_IN_CONTAINER = re.compile(r"(?:APPTAINER|SINGULARITY)ENV_")
"""In front of a variable that the image is given."""
_IN_JOB = re.compile(r"\b(?:SLURMD?_\w+|PBS_\w+|RANDOM)\b|\b(?:scontrol|hostname|shuf)\b")
"""What only a job has, or what is drawn in it."""
_OF_MEETING = re.compile(
    r"SLURMD_NODENAME|SLURM_LAUNCH_NODE_IPADDR|SLURM_(?:JOB_|STEP_)?(?:NODELIST|NUM_NODES|NNODES|NUM_TASKS"
    r"|NTASKS(?:_PER_NODE)?|TASKS_PER_NODE|NPROCS|PROCID|NODEID|LOCALID|GPUS_(?:ON|PER)_NODE)"
    r"|PBS_(?:NODEFILE|NUM_NODES|NUM_PPN|NP|NODENUM|TASKNUM)"
)
"""Variables that say which nodes and ranks a job has."""
_NAMED = re.compile(r"\b(?:SLURMD?|PBS)_\w+|(?<=\$)[A-Za-z_]\w*|(?<=\$\{)[A-Za-z_]\w*")
_FILLED_IN = re.compile(r"\$?\([^()]*\)|\$\{[^{}]*\}|\$\w+|`[^`]*`")
"""What the shell fills in, from the innermost on."""
_DEEPEST = 8
"""Brackets in brackets that are looked into."""
_OF_CPU = re.compile(
    r"(?i)--(?:use[-_])?cpu(?![-\w])|\bdevice[ =]cpu\b|\bno[-_]cuda\b|\bpartition=\S{0,80}cpu"
    r"|CUDA_VISIBLE_DEVICES=(?:-1|\"\"|''|\s|$)"
)
_OF_GPU = re.compile(r"(?i)cuda|nccl|nvidia|rocm|gpu|--nv\b|\b(?:fp16|bf16|amp|[abhv]\d00|mi\d{3})")
"""In a script whose request names no GPUs: that it is for CPUs, or for GPUs that are not counted."""
_BARE = re.compile(r"\$(?:(?P<name>\w+)|\{(?P<braced>\w+)(?::\?)?\})")
"""A variable without quotes, of which the shell makes as many words as it holds."""
_OF_ARRAY = re.compile(r"\$\{\w+\[[@*]\][^{}]*\}")
"""Several words of an array: maybe none."""
_CALLED_WITH = re.compile(r"\$(?:[@*1-9]|\{#?(?:[@*]|[1-9]\d*)(?![\w\[])[^{}]*\})")
"""What fills in words with which a script or a function is called."""
_FILLS_IN = re.compile(r"`|\$[\w{(@*#?!$-]")
"""Where the shell begins to fill something in."""
_REDIRECTION = re.compile(r"(?:\d*[<>]|(?P<before>[^'\"\\`<>&({]*)&?[<>])(?!\()")
"""Of a command, maybe behind a word without a blank; `<(...)` is none."""
_BY_CHUNKS = "our job asks by chunks: put it into -l select"
_TOTALS = "of one node or of all together, as the site has it: give --nodes and --gpus-per-node to submit"
_NO_GPUS = {
    "cpu": "the request names no GPUs: taken for a job on CPUs; where GPUs are not counted: --device cuda",
    "cuda": "the request names no GPUs: taken for nodes whose GPUs the scheduler does not count",
    "": "the request does not tell whether the nodes have GPUs: add --device cuda, or cpu, in front of --",
}
_HETEROGENEOUS = "a heterogeneous job: in ours all nodes are alike: submit the component that trains, alone"
_SEVERAL = "several programs in one step: our jobs start one on all nodes"
_GIVE_TO_SBATCH = "give it to sbatch if it is needed"
_NODES = ("nnodes", "num-machines", "num-nodes")
"""Options of what starts the ranks for the number of nodes."""
_UNTOLD_DEVICE = (
    "the script does not tell whether it trains on GPUs: if so, --gpus-per-node for --nproc-per-node"
)
_UNKNOWN_GPUS = "the GPUs of a node are not known: give --gpus-per-node"
_IN_IMAGE = "jobs run in the image (own packages: make venv, --venv)"
_STARTS_IN = "ranks start in the folder from which you submit"
_WITHOUT = "our jobs start the image without it"
_SUBMITTED_FROM = re.compile(r"\$\{?(?:SLURM_SUBMIT_DIR|PBS_O_WORKDIR|PWD)(?::?-[^{}]*)?\}?/?|\./?|-")
"""Where a `cd` leads that our jobs need not: there they start."""
_CONTAINER_AS_WE_DO = {
    *("--bind", "-B", "--nv", "--rocm", "--nvccli", "--cleanenv", "-e", "--contain", "-c", "--containall"),
    *("-C", "--no-home", "--no-mount", "--no-eval"),
}
"""Options of `apptainer exec` that our jobs give themselves, or that a line has."""
_FOLDERS = ("wdir", "wd")
"""Options of mpirun for the folder in which the ranks start."""
_BACKTICKS = re.compile(r"(?<!\\)`([^`]*)`")
_PORT = re.compile(r"(?:\w*_|MASTER|RDZV|HEAD)?PORT\d*")
_QUOTED = re.compile(r"([A-Za-z_]\w*)(?:=(?:\"[^\"]*\"|'[^']*'|[^\s'\"])*)?(?:$|, )")
"""A variable, as a trap quotes it."""
_SIGNAL = re.compile(r"(?P<who>[BR]{1,2}:)?(?:SIG)?(?P<name>\w+)(?:@(?P<seconds>\d+))?")
_PLAIN = re.compile(r"[\w./-]+")
"""A value that YAML takes as it is."""
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


def is_ours(script: Script) -> bool:
    """Whether it starts apptrain already."""
    return _STARTS_OURS.search(script.text) is not None


def convert(script: Script, found: Sequence[Found]) -> Converted:
    """`found`: the traps of this script."""
    training = script.training
    if training is None:
        why = "no line was found that starts a training: torchrun, or python with a script"
        hidden = [*_left_wrappers(script), *_left_unknown(script)]
        told = ["it starts apptrain already"] if is_ours(script) else hidden or [why]
        return Converted((), (), tuple(told))
    if script.request.others:
        return Converted((), (), (_HETEROGENEOUS,))
    if training.is_one_of_several:
        return Converted((), (), (f"line {training.line}: {_SEVERAL}",))
    script = replace(script, request=_meant(script, training, found))
    arguments = [_argument(word, is_filled=training.is_filled) for word in _program(training)]
    why = _launched(training) or _refused(training, arguments)
    if arguments:  # without a word behind -- the reference job would start
        arguments[0] = _never_empty(arguments[0])
    lines = [] if why else [" ".join(words) for words in _lines(script, training, arguments)]
    if any(len(line) > MOST for line in lines):
        lines = []
        why = f"line {training.line}: more than {MOST:,} characters: give the arguments in a file"
    variables = _variables(script, training, found)
    return Converted(
        tuple(lines),
        tuple(dict.fromkeys(_profile(script, training, variables))),
        (*filter(None, [why]), *dict.fromkeys(_left(script, training, variables))),
    )


def _never_empty(text: str) -> str:
    """The same; of a variable alone, with what makes the shell refuse an empty one."""
    bare = _BARE.fullmatch(text)
    return f"${{{bare['name'] or bare['braced']}:?}}" if bare else text


def _launched(training: Launch) -> str:
    """Why there is no line for a training that a launcher starts whose options we do not read; else empty."""
    found = mistakes.launcher_of([word.text for word in _program(training)])
    how = "starts the ranks itself: give apptrain the script that it starts: there is no line"
    return f"line {training.line}: {found} {how}" if found else ""


def _refused(training: Launch, arguments: Sequence[str]) -> str:
    """Why there is no line for these arguments; empty if there is one."""
    program = arguments[arguments[:1] == ["-m"] :]
    if not program or program[0].startswith("-"):
        return (
            f"line {training.line}: what {training.agent or 'python'} starts was not found: there is no line"
        )
    name = program[0].strip('"')
    if _CALLED_WITH.fullmatch(name) or _OF_ARRAY.fullmatch(name):
        return f"line {training.line}: {name} names what is started: write it out: there is no line"
    if any(word.startswith('"') and "$(" in word and not word.isprintable() for word in arguments):
        return f"line {training.line}: a command of several lines in the arguments: write out what it prints"
    return ""


def _lines(script: Script, training: Launch, arguments: Sequence[str]) -> Iterator[Sequence[str]]:
    """The words of each line."""
    image = _never_empty(training.image)  # an empty one would be the image of the checkout
    images = [f"APPTRAIN_IMAGE={_word(_from_home(image))}"] if image and "://" not in image else []
    binds = _binds(training)
    before = [*images, *(["APPTRAIN_BIND=" + _word("\n".join(binds))] if binds else [])]
    of_job = _options_of_job(script, training) if script.request.scheduler else _by_hand(script, training)
    of_program = ["--no-python"] if _is_any_program(training) else []
    own = [*of_program, "--", *map(_in_one_line, arguments)]
    of_ours = [*of_job, *own]
    if script.request.scheduler == "slurm":
        yield [*before, "sbatch", *_sbatch(script), OURS, *of_ours]
    elif script.request.scheduler == "pbs":
        if not script.request.has_totals:  # else our job script would ask for a size of its own
            yield _qsub(
                script.request, [*images, *_binds_of_qsub(binds)], [*of_job, *of_program, "--", *arguments]
            )
    else:
        yield [*before, "apptrain run", *(["--image"] if image else []), *of_ours]
        return
    # The profile tells submit of GPUs that are not counted.
    yield [*images, *_submit(script, binds), *(of_ours if "cpu" in of_job else own)]


def _options_of_job(script: Script, training: Launch) -> Sequence[str]:
    """What a job of ours is told if no GPUs are asked for: else it has as many ranks as GPUs."""
    if script.request.gpus_per_node != 0:
        return []
    device, ranks = _device(script), _ranks(script, training)
    return [*(["--device", device] if device else []), *(["--nproc-per-node", str(ranks)] if ranks else [])]


def _by_hand(script: Script, training: Launch) -> Sequence[str]:
    """What `apptrain run` is told of a job that no scheduler starts: by itself it has two nodes, no GPU."""
    nodes, ranks, device = _nodes_by_hand(script, training), _ranks(script, training), _device(script)
    of_ranks = ["--nproc-per-node", str(ranks)] if ranks and ranks > 1 else []
    if device == "cuda":
        of_ranks = ["--gpus-per-node", str(ranks)] if ranks else []
    of_nodes = ["--nodes", str(nodes)] if nodes else []
    return [*of_nodes, *(["--device", device] if device == "cpu" else []), *of_ranks]


def _nodes_by_hand(script: Script, training: Launch) -> int | None:
    """None where they are not known."""
    options = training.agent_options
    given = next((options[name] for name in _NODES if name in options), None)
    if given and "standalone" not in options:
        return traps.number(given)
    is_told_elsewhere = training.is_in_task or training.in_loop or "nnodes" in script.torchruns_options
    return None if is_told_elsewhere or "hostfile" in options else 1


def _device(script: Script) -> str:
    """On what a job trains whose request names no GPUs; empty where nothing tells."""
    asked = script.request
    where = asked.find("partition", "q")
    commands = [line for line in script.lines if not line.lstrip().startswith("#")]
    text = "\n".join([f"partition={where.value}" if where else "", *commands])
    if _OF_CPU.search(text):
        return "cpu"
    if _OF_GPU.search(text):
        return "cuda"
    select = asked.find("select")
    says_sizes = asked.has_totals or (select is not None and "ncpus=" in select.value)
    return "cpu" if asked.scheduler == "slurm" or says_sizes else ""


def _ranks(script: Script, training: Launch) -> int | None:
    """Of a node; None where they are not known."""
    options = training.agent_options
    if training.agent == "accelerate" and "num-processes" in options:
        total = traps.number(options["num-processes"]) or 0
        nodes = script.nodes if script.request.scheduler else _nodes_by_hand(script, training)
        return total // nodes if nodes and total % nodes == 0 else None
    given = options.get("nproc-per-node") or options.get("num-gpus")
    return traps.number(given) if given else traps.ranks_of_node(script, training)


def _meant(script: Script, training: Launch, found: Sequence[Found]) -> ScriptRequest:
    """With the directives that stand too late and GPUs that srun asks for, and without outputs that a trap
    names."""
    late = {one.line for one in found if one.trap is traps.LATE}
    lines = [
        line if line.startswith("#") and (number in late or number not in script.request.late) else ""
        for number, line in enumerate(script.lines, 1)
    ]
    lost = {one.line for one in found if one.trap in (traps.OUTPUT_NULL, traps.OUTPUT_FOLDER)}
    asked = request.read(lines)
    kept = [one for one in asked.options if one.name not in _OUTPUTS or one.line not in lost]
    asked = replace(asked, options=tuple(kept))
    if asked.scheduler == "slurm" and asked.gpus_per_node == 0:
        # At a site that gives whole nodes, srun alone may ask for their GPUs.
        sizes = [one for one in training.starter_options if one.name in (*request.OF_GPUS, *_OF_TASKS)]
        nodes = AskedOption("nodes", f"{asked.nodes or ''}", training.starter_line)
        with_step = traps.step(asked, sizes if asked.find("nodes") else [nodes, *sizes])
        return asked if with_step.gpus_per_node == 0 else with_step
    return asked


def _word(text: str) -> str:
    """For a person to paste; a variable stays one."""
    text = _BACKTICKS.sub(r"$(\1)", text)
    is_filled = "$" in text and not set(text) & set('"`\\')
    return _in_one_line(f'"{text}"' if is_filled else shlex.quote(text))


def _in_one_line(word: str) -> str:
    """The same word of a shell, whose quotes begin it: in between, what is not printable has its own."""
    return "".join(
        letter if letter.isprintable() else f"{word[0]}{shell_word(letter)}{word[0]}" for letter in word
    )


def _from_home(text: str) -> str:
    """With the variable for the tilde, which no shell fills in between quotes."""
    return f"$HOME{text[1:]}" if text.startswith("~/") else text


def _argument(word: Word, *, is_filled: bool) -> str:
    """The same of a word of the script: what its shell leaves as it is stays so. `is_filled`: a shell around
    it fills in also what stands in single quotes."""
    word = replace(word, raw=_from_home(word.raw))
    if _BARE.fullmatch(word.raw):
        return word.raw
    if not _FILLS_IN.search(_read(word, is_filled=is_filled)):
        return shlex.quote(word.text)
    escaped = (
        f"\\{letter}" if letter in '"\\' or (is_kept and not is_filled and letter in "$`") else letter
        for letter, is_kept in word.letters
    )
    return '"' + _BACKTICKS.sub(r"$(\1)", "".join(escaped)) + '"'


def _read(word: Word, *, is_filled: bool) -> str:
    """What of a word is read for something to fill in."""
    return "".join(letter for letter, is_kept in word.letters if is_filled or not is_kept)


def _program(one: Launch) -> list[Word]:
    """The script with its arguments, or -m MODULE."""
    words = one.words if one.agent else one.words_of_python
    if words and words[0].text == "--":
        words = words[1:]
    if one.agent and ("m" in one.agent_options or "module" in one.agent_options):
        words = (Word("-m", one.line), *words)
    return list(_without_redirections(words))


def _is_any_program(one: Launch) -> bool:
    """Whether the ranks run it as it is, and not Python."""
    return bool(one.agent) and "no-python" in one.agent_options


def _without_redirections(words: Sequence[Word]) -> Iterator[Word]:
    """And without their targets."""
    rest = iter(words)
    for word in rest:
        found = _REDIRECTION.match(word.raw)
        if found is None:
            yield word
            continue
        if found["before"]:
            yield replace(word, raw=found["before"])
        if word.raw.endswith(("<", ">", "<&", ">&")):
            next(rest, None)  # the target


def _binds(one: Launch) -> list[str]:
    given = [value for name, value in _container_options(one) if name in ("--bind", "-B")]
    return [_from_home(bind) for value in given for bind in value.split(",") if bind]


def _container_options(one: Launch) -> Iterator[tuple[str, str]]:
    """The names and values of options of `apptainer exec`."""
    words = (word.text for word in one.container_words)
    for word in words:
        name, equals, value = word.partition("=")
        yield name, (next(words, "") if not equals and name in CONTAINER_VALUES else value)


def _binds_of_qsub(binds: Sequence[str]) -> Iterator[str]:
    """A variable for each: `qsub -v` carries no line break, and pbs/host.sh puts them together."""
    for number, bind in enumerate(binds, 1):
        yield f"APPTRAIN_BIND{f'_{number}' if number > 1 else ''}={_word(bind)}"


def _sbatch(script: Script) -> Iterator[str]:
    asked = script.request
    if script.nodes:
        yield f"--nodes={script.nodes}"
    if asked.gpus_per_node:
        typed = asked.find("gpus-per-node") or asked.find("gres")
        kind = _gpu_type(typed.value) if typed else ""
        yield f"--gpus-per-node={_word(f'{kind}{asked.gpus_per_node}')}"
    elif asked.gpus_per_node == 0:
        yield "--gpus-per-node=0"
    if cpus := _cpus(asked):
        yield f"--cpus-per-task={cpus}"
    for option in _last(asked):
        yield from _words_of_sbatch(option)


def _words_of_sbatch(option: AskedOption) -> Iterator[str]:
    """What sbatch is given for it; nothing for an option that our job script decides."""
    if option.name in _PASSED_ON and not _is_as_we_ask(option):
        yield f"--{option.name}" + (f"={_word(option.value)}" if option.value else "")
    signal = _SIGNAL.fullmatch(option.value) if option.name == "signal" else None
    if signal and signal["seconds"] and signal["seconds"] != _STOP_BEFORE:
        yield f"--signal=B:USR2@{signal['seconds']}"


def _words_of_qsub(option: AskedOption) -> Iterator[str]:
    """The same of qsub."""
    if option.name in ("select", "place", "walltime"):
        yield f"-l {option.name}={_word(option.value)}"
    elif option.name in _PASSED_ON_BY_QSUB and not _is_as_we_ask(option):
        yield f"-{option.name} {_word(option.value)}"


def _gpu_type(value: str) -> str:
    """Of a --gpus-per-node, or of the GPUs of a --gres; with its colon."""
    of_gpus = next((one for one in value.split(",") if one.startswith("gpu")), value)
    parts = of_gpus.removeprefix("gpu:").split(":")
    return f"{parts[0]}:" if len(parts) > 1 and not parts[0].isdigit() else ""


def _cpus(asked: ScriptRequest) -> int | None:
    """Of a node's one task: what all tasks of a node had."""
    each, tasks = asked.number("cpus-per-task"), asked.tasks_per_node or 1
    if each is None and asked.gpus_per_node == 0 and tasks > 1:
        each = 1  # as sbatch counts; with GPUs a site may give some for each of them
    return each * tasks if each else None


def _last(asked: ScriptRequest) -> list[AskedOption]:
    """Those that count; -W of PBS is given once for each of its attributes."""
    last = {(one.name, one.value.partition("=")[0] * (one.name == "W")): one for one in asked.options}
    return list(last.values())


def _is_as_we_ask(option: AskedOption) -> bool:
    return _AS_WE_ASK.get(option.name) == option.value


def _is_whole_jobs(option: AskedOption) -> bool:
    """Whether this is a resource of PBS that the job has as a whole, and no chunk of it."""
    return len(option.name) > 1 and option.name not in QSUB_SIZES and option.name not in _PASSED_ON_BY_QSUB


def _resources(asked: ScriptRequest) -> list[str]:
    """Of the job as a whole, as qsub takes them."""
    whole = [one for one in _last(asked) if _is_whole_jobs(one)]
    return ["-l " + _word(f"{one.name}={one.value}" if one.value else one.name) for one in whole]


def _qsub(asked: ScriptRequest, before: Sequence[str], arguments: Sequence[str]) -> Sequence[str]:
    words = ["qsub"]
    for option in _last(asked):
        words += _words_of_qsub(option)
    words += _resources(asked)
    if not asked.find("place") and (asked.nodes or 1) > 1:
        words.append("-l place=scatter")
    exports = [*before, f"APPTRAIN_ARGS={_in_one_line(_assigned(arguments))}"]
    names = ",".join(["APPTRAIN_ARGS", *(one.partition("=")[0] for one in before)])
    return [*exports, *words, f"-v {names} pbs/multinode.pbs"]


def _assigned(words: Sequence[str]) -> str:
    """These words of a shell as the value of a variable, in which it fills in what it would in the words:
    in those in double quotes, and in variables without."""
    if not any(word.startswith(('"', "$")) for word in words):
        return shlex.quote(" ".join(words))
    texts = (
        word
        if _BARE.fullmatch(word)
        else re.sub(r'\\["\\]|"' if word.startswith('"') else r'["\\$`]', _escaped, word)
        for word in words
    )
    return '"' + " ".join(texts) + '"'


def _escaped(found: re.Match[str]) -> str:
    return "".join(f"\\{letter}" for letter in found[0])


def _time(option: AskedOption) -> str:
    """As submit takes it, for which a number alone is minutes; for PBS it is seconds."""
    if option.name == "walltime" and re.fullmatch("[0-9]{1,8}", option.value):
        seconds = int(option.value)
        return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    return option.value


def _submit(script: Script, binds: Sequence[str]) -> Sequence[str]:
    asked = script.request
    words = ["apptrain submit --cluster NAME", *(f"--bind {_word(bind)}" for bind in binds)]
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
            words.append(f"--{name} {_word(_time(found) if name == 'time' else found.value)}")
    words_of = _words_of_qsub if asked.scheduler == "pbs" else _words_of_sbatch
    words += [word for one in _last(asked) if one.name not in _OF_SUBMIT for word in words_of(one)]
    if asked.scheduler == "pbs":
        words += _resources(asked)
    return words


@dataclass(frozen=True)
class _Variables:
    made_inside: frozenset[str]
    """Those of which a job alone knows the value."""
    unneeded: frozenset[str]
    """Ours, those that a trap names, and those that only say where the nodes meet."""

    def needs(self, name: str) -> bool:
        return name not in self.unneeded and _inner(name) not in self.unneeded


def _assigned_to(script: Script, training: Launch) -> list[tuple[Word, str, str]]:
    """Variables that the script sets, and those that are set for its training alone."""
    others = {word for word, _, _ in script.assigned}
    own = [word for word in _set_for(training) if word not in others]
    return [*script.assigned, *((word, *traps.split(word)) for word in own)]


def _set_for(one: Launch) -> list[Word]:
    """In front of it, by env, or by options of what starts it."""
    exports = [option for option in one.starter_options if option.name == "export"]
    by_srun = [Word(part, option.line) for option in exports for part in option.value.split(",")]
    by_mpi = [Word(value, line) for name, value, line in _options_of_mpi(one) if name not in _FOLDERS]
    return [*one.assigned, *(word for word in (*by_srun, *by_mpi) if "=" in word.raw)]


def _options_of_mpi(one: Launch) -> Iterator[tuple[str, str, int]]:
    """(name, value, line) of the options of mpirun about variables and the folder."""
    words = iter(one.starter_words if one.starter in traps.MPI else ())
    for word in words:
        name, equals, value = word.text.lstrip("-").partition("=")
        if not word.text.startswith("-") or name not in ("x", "env", "genv", *_FOLDERS):
            continue
        value = value if equals else _next(words)
        is_in_two = name in ("env", "genv") and "=" not in value
        yield name, f"{value}={_next(words)}" if is_in_two else value, word.line


def _next(words: Iterator[Word]) -> str:
    return next((word.text for word in words), "")


def _variables(script: Script, training: Launch, found: Sequence[Found]) -> _Variables:
    quoted = (_QUOTED.match(one.text) for one in found)
    unneeded = _SET_BY_US | {match[1] for match in quoted if match}
    made_inside: set[str] = set()
    for _, name, value in _assigned_to(script, training):
        names = set(_NAMED.findall(value))
        is_inside = _IN_JOB.search(value) is not None or bool(names & made_inside)
        if is_inside:
            made_inside.add(name)
        others = [one for one in names if one not in unneeded and not _OF_MEETING.fullmatch(one)]
        if _PORT.fullmatch(_inner(name)) or (is_inside and not others and _is_filled_in(value)):
            unneeded.add(name)
    return _Variables(frozenset(made_inside), frozenset(unneeded))


def _inner(name: str) -> str:
    """As the ranks see it."""
    return _IN_CONTAINER.sub("", name, count=1)


def _is_filled_in(value: str) -> bool:
    """Whether the shell makes all of it, but for the colon in front of a port."""
    for _ in range(_DEEPEST):
        value = _FILLED_IN.sub("", value)
    return set(value) <= set(":0123456789'\"")


def _is_for_profile(name: str, value: str) -> bool:
    """A profile has no variable filled in."""
    return name.startswith(_PROFILE_ENV) and not _SECRET.search(name) and not set(value) & set("$`")


def _profile(script: Script, training: Launch, variables: _Variables) -> Iterator[str]:
    modules = [
        word.text
        for one in script.launches
        if not one.container
        and [word.text for word in one.words[:2]] in (["module", "load"], ["module", "add"], ["ml", "load"])
        for word in one.words[2:]
    ]
    if modules:
        yield f"modules: [{', '.join(modules)}]"
    for word, name, value in _assigned_to(script, training):
        if _is_for_profile(_inner(name), value) and variables.needs(name):
            plain = word.text.partition("=")[2]
            yield f"env: {{{_inner(name)}: {plain if _PLAIN.fullmatch(plain) else json.dumps(plain)}}}"


def _left(script: Script, training: Launch, variables: _Variables) -> Iterator[str]:
    yield from _left_of_no_gpus(script, training)
    yield from _left_options(script)
    if script.rocm_line:
        yield f"line {script.rocm_line}: ROCm: a job of apptrain runs on NVIDIA GPUs or CPUs alone"
    yield from _left_of_container(training)
    if training.environment:
        yield f"line {training.line}: {training.environment}: {_IN_IMAGE}"
    for line, folder in _folders(script, training):
        if _IN_JOB.search(folder) or variables.made_inside & set(_NAMED.findall(folder)):
            yield f"line {line}: cd {folder}: made inside the job: change to it in your script"
        else:
            how = "submit" if script.request.scheduler else "start it"
            yield f"line {line}: cd {folder}: {how} from there, or give the script by its whole path"
    for one in script.launches:
        texts = [word.text for word in one.words[:2]]
        if _makes_environment(one):
            yield f"line {one.line}: the environment: {_IN_IMAGE}"
        elif texts[:1] in (["cp"], ["rsync"], ["tar"], ["mkdir"]) and not one.is_in_task:
            yield f"line {one.line}: {texts[0]}: do it before you submit, or in the script"
    for one in script.helpers:
        when = "before you submit" if one.line < training.line else "afterwards"
        program = next((word.text for word in _program(one) if word.text != "-m"), "python")
        yield f"line {one.line}: {program}: it runs on one node alone: do it {when}"
    yield from _left_wrappers(script)
    filled_in = {word.variable for word in (*training.words, *training.agent_options.values())}
    for_training = set(_set_for(training))
    for word, name, value in _assigned_to(script, training):
        inner = _inner(name)
        is_own = word not in filled_in and variables.needs(name) and not _is_for_profile(inner, value)
        is_seen = word in for_training or _is_exported(script, word.line)
        if not is_own or not inner.isupper() or not is_seen:
            continue
        if name in variables.made_inside:
            how = "made inside the job: make it in your script"
        else:
            how = _exported(inner)
        yield f"line {word.line}: {inner}: {how}"
    texts = [_read(word, is_filled=training.is_filled) for word in _program(training)]
    names = {name for text in texts for name in _NAMED.findall(text)}
    inside = {one for one in names if one in variables.made_inside or _IN_JOB.fullmatch(one)}
    for name in sorted(inside):
        yield f"line {training.line}: {name} in the arguments: made inside the job: make it in your script"
    by_loop = (names - inside) & {name for one in script.heads_of_loops for name in set_by(one.texts)}
    by_script = (names - inside - by_loop) & {name for _, name, _ in script.assigned}
    for name in sorted(by_loop):
        yield f"line {training.line}: {name} in the arguments: of a loop: submit a job for each of its values"
    for name in sorted(by_script):
        yield f"line {training.line}: {name} in the arguments: set in the script: write it out"
    own = {found[0] for text in texts for found in _CALLED_WITH.finditer(text)}
    for name in sorted(own):
        yield f"line {training.line}: {name} in the arguments: what the script is called with: write it out"
    others = [_CALLED_WITH.sub("", text) for text in texts]
    is_told = names and names <= inside | by_loop | by_script
    if any(map(_FILLS_IN.search, others)) and not is_told:
        yield f"line {training.line}: variables in the arguments are filled in where you submit"
    further = [one for one in script.trainings if one is not training]
    for one in further[:3]:
        yield f"line {one.line}: a second training: a job of its own"


def _left_wrappers(script: Script) -> Iterator[str]:
    for one in script.wrappers[:3]:
        yield f"line {one.line}: what {one.script} starts is not looked into: give explain that file too"


def _left_unknown(script: Script) -> Iterator[str]:
    """Programs in tasks that seem to start the training, and that we do not know."""
    unknown = [one for one in script.launches if one.is_in_task and not one.script and starts_unseen(one)]
    for one in unknown[:3]:
        name = one.words[0].text
        yield f"line {one.line}: what {name} starts is not looked into: give explain a copy without {name}"


def _left_of_no_gpus(script: Script, training: Launch) -> Iterator[str]:
    if not script.request.scheduler:
        yield from _left_by_hand(script, training)
    select = script.request.find("select")
    if script.request.scheduler == "pbs" and script.request.gpus_per_node is None and select:
        yield f"line {select.line}: -l select: {_UNKNOWN_GPUS}"
    if script.request.gpus_per_node != 0:
        return
    yield _NO_GPUS[_device(script)]
    if _ranks(script, training) is None:
        yield f"line {training.line}: the number of ranks on a node: give --nproc-per-node"


def _left_by_hand(script: Script, training: Launch) -> Iterator[str]:
    device = _device(script)
    if not device:
        yield _UNTOLD_DEVICE
    if _nodes_by_hand(script, training) is None:
        yield f"line {training.line}: the number of nodes: give --nodes"
    if _ranks(script, training) is None:
        option = "--gpus-per-node" if device == "cuda" else "--nproc-per-node"
        yield f"line {training.line}: the number of ranks on a node: give {option}"


def _exported(name: str) -> str:
    return f"export it where you submit; APPTRAIN_PASS={name} for the ranks"


def _folders(script: Script, training: Launch) -> Sequence[tuple[int, str]]:
    """(line, folder) of each `cd` that leads to where the training starts, from where it was submitted."""
    found: list[tuple[int, str]] = []
    for one in itertools.takewhile(lambda one: one is not training, script.launches):
        is_around = one.subshells == training.subshells[: len(one.subshells)]
        if not is_around or one.shell_word not in (None, training.shell_word):
            continue
        name, folder, *_ = [*(word.text for word in one.words[:2]), "~", ""]
        is_back = name == "cd" and found and (folder == "-" or (folder == ".." and _is_below(found[-1][1])))
        if name == "popd" or is_back:
            found = found[:-1]
        elif name in ("cd", "pushd") and not _SUBMITTED_FROM.fullmatch(folder):
            found.append((one.line, folder))
    return found


def _is_below(folder: str) -> bool:
    """Whether this is a folder in the one from which it is changed to."""
    return re.fullmatch(r"(?:\./)?[\w.-]*\w[\w.-]*/?", folder) is not None


def _left_of_container(training: Launch) -> Iterator[str]:
    for option in training.starter_options:
        if option.name == "chdir":
            yield f"line {option.line}: --chdir={option.value}: {_STARTS_IN}"
        elif told := _left_of_pyxis(option):
            yield told
    for option_of_mpi, folder, line in _options_of_mpi(training):
        if option_of_mpi in _FOLDERS:
            yield f"line {line}: -{option_of_mpi} {folder}: {_STARTS_IN}"
    where = f"line {training.container_line}: "
    if "://" in training.image:
        yield f"{where}{_image(training.image)}"
    for name, value in _container_options(training):
        if name in ("--pwd", "--cwd"):
            yield f"{where}{name} {value}: {_STARTS_IN}"
        elif name == "--env":
            variables = (part.partition("=")[0] for part in value.split(",") if "=" in part)
            yield from (f"{where}{variable}: {_exported(variable)}" for variable in variables)
        elif name not in _CONTAINER_AS_WE_DO:
            yield f"{where}{name}: {_WITHOUT}"
    if "$" in training.image or any("$" in bind for bind in _binds(training)):
        yield f"{where}variables of the image and its binds are filled in where you submit"


def _left_of_pyxis(option: AskedOption) -> str:
    """What is not carried over of an option of srun, or of sbatch, about a container; empty for another."""
    where = f"line {option.line}: "
    if option.name in ("container-image", "environment"):
        return where + _image(option.value)
    if option.name == "container-mounts":
        return f"{where}--container-mounts={option.value}: APPTRAIN_BIND shows folders in the image"
    if option.name == "container-workdir":
        return f"{where}--container-workdir={option.value}: {_STARTS_IN}"
    is_pyxis = option.name.startswith(("container-", "no-container-"))
    return f"{where}--{option.name}: {_WITHOUT}" if is_pyxis else ""


def _image(name: str) -> str:
    return f"the image {name}: make a .sif file of it, and give that in APPTRAIN_IMAGE"


def _makes_environment(one: Launch) -> bool:
    """Whether it activates an environment, or installs into one."""
    texts = [word.text for word in one.words[:2]]
    if texts[:1] in (["source"], ["."]):
        return len(texts) > 1 and "activate" in texts[1]
    if texts and texts[0].rpartition("/")[2].startswith("python"):
        texts = [word.text for word in one.words_of_python[1:3]]
    installs = texts[:1] == ["venv"] or texts in (["pip", "install"], ["pip3", "install"])
    return installs or texts in (["conda", "activate"], ["mamba", "activate"])


def _left_options(script: Script) -> Iterator[str]:
    asked = script.request
    for option in _last(asked):
        where = f"line {option.line}: "
        signal = _SIGNAL.fullmatch(option.value) if option.name == "signal" else None
        if asked.scheduler == "slurm" and signal:
            name = signal["name"]
            if "B" not in (signal["who"] or "") and name != "USR2":
                instead = f"if they have a handler for {name}: --stop-signal {name}"
                yield f"{where}--signal: the ranks get USR2; {instead}"
        elif asked.scheduler == "slurm" and option.name in ("mem-per-cpu", "mem-per-gpu"):
            yield (
                f"{where}--{option.name}: sbatch refuses it beside the --mem of our job script: give --mem, "
                f"or submit with a profile that has `memory: --{option.name}`"
            )
        elif asked.scheduler == "slurm" and (told := _left_of_pyxis(option)):
            yield told
        elif asked.scheduler == "slurm" and not _is_carried_over(option, script):
            is_of_gpus = option.name in request.OF_GPUS and "gpu" in f"{option.name}={option.value}"
            is_unknown = is_of_gpus and asked.gpus_per_node is None
            yield f"{where}--{option.name}: {_UNKNOWN_GPUS if is_unknown else _GIVE_TO_SBATCH}"
        elif asked.scheduler == "pbs" and option.name in QSUB_SIZES and option.name != "select":
            if option.name == "ngpus" and "ngpus" not in script.lines[option.line - 1]:
                continue  # -l nodes=N:gpus=M, which is told itself
            yield f"{where}-l {option.name}: {_TOTALS if asked.has_totals else _BY_CHUNKS}"
        elif asked.scheduler == "pbs" and not _is_whole_jobs(option) and option.name not in _QSUB_HAS:
            yield f"{where}-{option.name}: give it to qsub if it is needed"


def _is_carried_over(option: AskedOption, script: Script) -> bool:
    """Of sbatch: handed on, ours too, or seen in the number of nodes and GPUs."""
    if option.name == "nodes":
        return script.nodes is not None
    kinds = option.value.split(",") if option.name in request.OF_ALL_KINDS else []
    if not all(one.removeprefix("gres/").startswith("gpu") for one in kinds):
        return False
    if option.name in request.OF_GPUS:
        return script.request.gpus_per_node is not None
    return option.name in _PASSED_ON | _SHAPE or (option.name, option.value) == ("export", "ALL")


def _is_exported(script: Script, line: int) -> bool:
    return 0 < line <= len(script.lines) and script.lines[line - 1].lstrip().startswith("export ")
