"""What a job script starts, and through which programs: `read` follows a command through srun, the
container and the shells in it down to the training. Pure functions; nothing is run.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import field, replace

from entrypoint.core.frozen import dataclass
from entrypoint.explain import request, shell
from entrypoint.explain.shell import Command, Word

STARTERS = {
    "srun",
    "mpirun",
    "mpiexec",
    "mpiexec.hydra",
    "prun",
    "pbsdsh",
    "pbs_tmrsh",
    "ssh",
    "pdsh",
    "clush",
    "parallel",
    "aprun",
    "jsrun",
    "ibrun",
}
"""What starts a task on other nodes."""
_OF_PROGRAMS = {"srun", "mpirun", "mpiexec", "mpiexec.hydra", "prun", "aprun"}
"""Those that start several programs in one step, with a colon between them."""
CONTAINERS = {"apptainer", "singularity"}
_TAKES_NAME = re.compile(r"[-+][A-Za-z]*[oO]")
"""Words of a shell behind which an option's name stands, as in -euo pipefail."""
SHELLS = {"bash", "sh", "zsh", "dash"}
_ENVIRONMENTS = {"uv", "conda", "mamba", "micromamba", "pixi", "poetry", "shifter"}
"""Programs that start another one in an environment of its own."""
_PASSES = {
    *("numactl", "nice", "timeout", "stdbuf", "taskset", "env", "time", "nsys", "ncu", "dlprof", "exec"),
    *_ENVIRONMENTS,
}
"""Programs that start another one."""
_PASSES_BY = {"nsys": ("profile", "launch"), **dict.fromkeys(_ENVIRONMENTS - {"shifter"}, ("run",))}
"""With which of their commands they do, if they have several."""
CONTAINER_VALUES = {
    *(
        "--bind",
        "-B",
        "--env",
        "--env-file",
        "--pwd",
        "--cwd",
        "--home",
        "-H",
        "--workdir",
        "-W",
        "--scratch",
        "-S",
    ),
    *(
        "--overlay",
        "-o",
        "--network",
        "--hostname",
        "--mount",
        "--no-mount",
        "--security",
        "--app",
        "--fusemount",
    ),
    *("--cpus", "--memory", "--blkio-weight", "--apply-cgroups", "--add-caps", "--drop-caps", "--pem-path"),
}
"""Options of `apptainer exec` that take the next word."""
_TORCHRUN_FLAGS = {"standalone", "module", "m", "no-python", "run-path", "use-env", "virtual-local-rank"}
_AGENT_FLAGS = {
    "torchrun": _TORCHRUN_FLAGS,
    "deepspeed": {
        *_TORCHRUN_FLAGS,
        *("no-ssh", "no-ssh-check", "force-multi", "no-local-rank", "enable-elastic-training"),
        *("elastic-training", "bind-cores-to-rank", "save-pid"),
    },
    "accelerate": {
        *_TORCHRUN_FLAGS,
        *("cpu", "multi-gpu", "tpu", "ipex", "use-xpu", "use-cpu", "use-mps-device", "quiet", "q", "debug"),
        *("use-deepspeed", "use-fsdp", "use-megatron-lm", "use-parallelism-config", "same-network"),
        *("enable-cpu-affinity", "dynamo-use-dynamic", "dynamo-use-fullgraph", "downcast-bf16"),
        *("dynamo-use-regional-compilation", "tpu-use-cluster", "no-tpu-use-cluster", "tpu-use-sudo"),
    },
}
"""Options that take no value."""
_STARTER_FLAGS = {
    *(
        "-v",
        "-s",
        "--tag-output",
        "--oversubscribe",
        "--nooversubscribe",
        "--report-bindings",
        "--display-map",
    ),
    *("--display-allocation", "--allow-run-as-root", "--pernode", "--bynode", "--byslot", "--bycore"),
    *("--nolocal", "--use-hwthread-cpus", "--timestamp-output", "--verbose", "--quiet"),
    *("--enable-recovery", "--prepend-rank", "--print-rank-map", "--envall", "--envnone", "--genvall"),
    *("--genvnone", "--no-transfer"),
}
"""The same of mpirun and its like. Those of long names have one dash or two."""
_TWO_VALUES = {"--mca", "--gmca", "--env", "--genv"}
"""Options of mpirun with a name and its value, where no = joins them."""
_AGENTS = ("torchrun", "accelerate", "deepspeed")
_AGENT_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate.commands.launch": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
}
"""Behind `python -m`; the other launchers of plan/mistakes.py have options that we do not know."""
_SSH_FLAGS = re.compile(r"-[46AaCfGgKkMNnqsTtVvXxYy]+")
"""Options of ssh that take no value."""
_VARIABLE = re.compile(r'(?P<quote>"?)\$(?:\{(?P<array>\w+)\[[@*]\]\}|\{(?P<braced>\w+)\}|(?P<name>\w+))"?')
"""A word that is nothing but a variable, or all of an array."""
_MADE = re.compile(r'"?(?:\$\(.*\)|`[^`]*`)"?', re.S)
"""A word, or several, that a command makes."""
_WHICH = re.compile(r'"?(?:\$\(|`)(?:which|command -v|type -[pP]) +(?P<name>[\w./+-]+) *[)`]"?')
"""A word that is a program's path, from its name."""
_LONGEST = 20_000
"""Characters that a variable is set to."""
_MOST_FILLED_IN = 20_000
"""Words of variables, in all commands of a script together."""
_NOT_PLAIN = frozenset("$`*?[~'\"\\")
"""Characters of a value that a shell would change, were it to read the value again."""
_NO_TRAINING = {
    *("pip", "venv", "virtualenv", "ensurepip", "compileall", "zipfile", "tarfile", "http.server"),
    *("tensorboard.main", "torch.utils.collect_env"),
}
"""Modules that `python -m` starts, and that train nothing."""
_PYTHON = re.compile(r"python[\d.]*")
_REDIRECTION = re.compile(r"\d*(?:>|<)|&>")
DEEPEST = 4


@dataclass(frozen=True)
class Launch:
    """A command, with all that it is started through."""

    line: int
    starter: str = ""
    """srun, mpirun and the like; empty: it runs where the script runs."""
    starter_line: int = 0
    starter_options: tuple[request.AskedOption, ...] = ()
    starter_words: tuple[Word, ...] = ()
    container: str = ""
    container_line: int = 0
    container_words: tuple[Word, ...] = ()
    """Options of `apptainer exec`."""
    image: str = ""
    in_shell: bool = False
    """Whether a shell reads it that the job script starts."""
    is_filled: bool = False
    """Whether the job script's own shell fills in its variables, also between single quotes: that shell's
    text stands in double ones."""
    shell_word: Word | None = None
    """That text, as the job script has it."""
    in_loop: bool = False
    """Whether a loop of the job script starts it, and not one of the task."""
    in_background: bool = False
    environment: str = ""
    """What makes its environment and starts it there, such as `conda run`; empty for none."""
    is_one_of_several: bool = False
    """Whether its step has other programs too."""
    subshells: tuple[int, ...] = ()
    """Brackets around it, from the outermost on."""
    agent: str = ""
    """torchrun, or accelerate, deepspeed: what starts the ranks; empty for none."""
    agent_options: dict[str, Word] = field(default_factory=dict)
    """By their names with dashes."""
    words: tuple[Word, ...] = ()
    """The program and its arguments."""
    assigned: tuple[Word, ...] = ()
    """Variables that are set for it."""

    @property
    def is_in_task(self) -> bool:
        return bool(self.starter)

    @property
    def trains(self) -> bool:
        """Whether this starts a training, and no helper such as hostname."""
        if self.agent:
            return True
        name = self.words[0].text.rpartition("/")[2] if self.words else ""
        own = [word.text for word in self.words_of_python] if name.startswith("python") else []
        if own[:1] == ["-c"] or (own[:1] == ["-m"] and own[1:2] and own[1] in _NO_TRAINING):
            return False
        return any(text.endswith(".py") or text == "-m" for text in own)

    @property
    def script(self) -> str:
        """The file of a shell's commands that this starts; empty for another program."""
        name, *rest = [word.text for word in self.words] or [""]
        if name.rpartition("/")[2] in SHELLS:
            file = next((text for text in rest if not text.startswith("-")), "")
            return "" if _shell_text(rest) >= 0 or _REDIRECTION.match(file) else file
        is_without_suffix = name.startswith("./") and "." not in name[2:]
        return name if is_without_suffix or name.endswith((".sh", ".bash")) else ""

    @property
    def words_of_python(self) -> tuple[Word, ...]:
        """What python starts, if it is the program: a script, or -m MODULE, with arguments."""
        rest = self.words[1:]
        return rest[options_of_python([word.text for word in rest]) :]


def read(commands: Sequence[Command]) -> list[Launch]:
    """All commands of a script."""
    settings = _Settings(commands)
    launches = [found for one in commands for found in _follow(one, Launch(one.line), 0, settings)]
    return [replace(one, words=tuple(map(settings.literal, one.words))) for one in launches]


@dataclass(frozen=True)
class _Setting:
    words: tuple[Word, ...]
    """That the shell makes of it."""
    is_array: bool


class _Settings:
    """What a script sets its variables to, of those that it sets once."""

    def __init__(self, commands: Sequence[Command]):
        set_to: dict[str, list[Word]] = {}
        for word in (word for one in commands for word in one.assigned):
            set_to.setdefault(word.raw.partition("=")[0].rstrip("+"), []).append(word)
        changed = {name for one in commands for name in set_by(one.texts)}
        self._of = {
            name: _setting(words[0])
            for name, words in set_to.items()
            if len(words) == 1 and name not in changed
        }
        self._left = _MOST_FILLED_IN

    def fill_in(self, words: Sequence[Word], depth: int = 0) -> tuple[Word, ...]:
        """With the words of variables that hold several, such as options, in their places."""
        found: list[Word] = []
        for word in words:
            setting = self._setting_of(word) if depth < DEEPEST else None
            if setting and (len(setting.words) > 1 or setting.words[0].text.startswith("-")):
                found += self.fill_in(setting.words, depth + 1)
            else:
                found.append(word)
        return tuple(found)

    def literal(self, word: Word) -> Word:
        """What a variable of one word holds, if nothing has to be filled in there."""
        setting = self._setting_of(word)
        is_plain = setting and len(setting.words) == 1 and not set(setting.words[0].raw) & _NOT_PLAIN
        return setting.words[0] if setting and is_plain else word

    def program(self, word: Word) -> Word:
        """What stands in a command's first place, if a variable names it."""
        setting = self._setting_of(word)
        found = setting.words[0] if setting and len(setting.words) == 1 else word
        return replace(found, raw=_name_of(found.raw))

    def _setting_of(self, word: Word) -> _Setting | None:
        """None for what is no variable, or one whose words are not known."""
        used = _VARIABLE.fullmatch(word.raw)
        setting = self._of.get(used["array"] or used["braced"] or used["name"]) if used else None
        if used is None or setting is None or setting.is_array != bool(used["array"]):
            return None
        if not setting.words or _MADE.fullmatch(_name_of(setting.words[0].raw)):
            return None
        if used["quote"] and not setting.is_array and len(setting.words) > 1:
            return None  # it is one word, blanks and all
        self._left -= len(setting.words)
        return setting if self._left >= 0 else None


def set_by(texts: Sequence[str]) -> Sequence[str]:
    """Words among which are the variables that a command sets."""
    name, *rest = texts or [""]
    if name in ("for", "select"):
        return rest[:1]
    return rest if name in ("read", "getopts", "mapfile", "readarray", "printf") else ()


def _setting(variable: Word) -> _Setting:
    value = variable.raw.partition("=")[2]
    is_array = value.startswith("(")
    if len(value) > _LONGEST:
        return _Setting((), is_array)
    text = value[1:].removesuffix(")") if is_array else Word(value, variable.line).script
    lines = shell.commands(text, variable.line)
    words = (replace(word, variable=variable) for one in lines for word in (*one.assigned, *one.words))
    return _Setting(tuple(words), is_array)


def _follow(command: Command, launch: Launch, depth: int, settings: _Settings) -> Iterator[Launch]:
    programs = _programs(settings.fill_in(command.words))
    launch = replace(launch, is_one_of_several=launch.is_one_of_several or len(programs) > 1)
    for words in programs:
        yield from _follow_one(words, command, launch, depth, settings)


def _programs(words: tuple[Word, ...]) -> Sequence[tuple[Word, ...]]:
    """The words of each program of a step, with what starts it; all as they are if it has one."""
    if not any(word.raw == ":" for word in words):
        return [words]
    names = [word.text.rpartition("/")[2] for word in words]
    begin = next((at for at, name in enumerate(names) if name in _OF_PROGRAMS), len(words))
    groups = itertools.groupby(words[begin + 1 :], lambda word: word.raw == ":")
    parts = [tuple(part) for is_colon, part in groups if not is_colon]
    return [(*words[: begin + 1], *part) for part in parts] if len(parts) > 1 else [words]


def _follow_one(
    words: tuple[Word, ...], command: Command, launch: Launch, depth: int, settings: _Settings
) -> Iterator[Launch]:
    launch = replace(
        launch,
        line=command.line,
        assigned=(*launch.assigned, *command.assigned),
        in_loop=launch.in_loop or (command.in_loop and not launch.starter),
        in_background=launch.in_background or command.in_background,
        subshells=(*launch.subshells, *command.subshells),
    )
    while words:
        words = (settings.program(words[0]), *words[1:])
        name = words[0].text.rpartition("/")[2]
        rest = words[1:]
        texts = [word.text for word in rest]
        if name in STARTERS and not launch.starter:
            count = _starter_words(name, texts)
            launch = replace(
                launch,
                starter=name,
                starter_line=words[0].line,
                starter_options=tuple(
                    replace(one, line=words[0].line) for one in request.slurm(texts[:count], words[0].line)
                )
                if name == "srun"
                else (),
                starter_words=rest[:count],
                in_background=launch.in_background or (name == "ssh" and _goes_to_background(texts[:count])),
            )
            words = rest[count:]
            while words and words[0].text == "--":
                words = words[1:]
            if name == "ssh":
                words = _without_redirections(words)
            if name == "ssh" and len(words) == 1 and depth < DEEPEST:
                yield from _follow_shell(
                    words[0], replace(launch, words=words), depth, settings, command.here
                )
                return
            if name == "ssh" and not words and command.here and depth < DEEPEST:
                yield from _follow_shell(command.here, launch, depth, settings)
                return
        elif name in CONTAINERS and texts[:1] and _verb(texts) >= 0:
            at = _verb(texts) + 1
            begin = at
            while at < len(texts) and texts[at].startswith("-"):
                at += 2 if texts[at] in CONTAINER_VALUES else 1
            image = settings.literal(rest[at]).text if at < len(texts) else ""
            launch = replace(
                launch,
                container=name,
                container_line=words[0].line,
                container_words=rest[begin:at],
                image=image,
            )
            words = rest[at + 1 :]
        elif name in SHELLS and (at := _shell_text(texts)) >= 0 and depth < DEEPEST:
            yield from _follow_shell(rest[at], replace(launch, words=words), depth, settings, command.here)
            return
        elif name in SHELLS and command.here and _reads_input(texts) and depth < DEEPEST:
            yield from _follow_shell(command.here, replace(launch, words=words[:1]), depth, settings)
            return
        elif name in _PASSES and (begin := _behind_verb(texts, _PASSES_BY.get(name, ()))) >= 0:
            count = begin + _own_words(name, [settings.literal(word).text for word in rest[begin:]])
            if name == "env":
                set_by_it = (word for word in rest[:count] if shell.ASSIGNMENT.match(word.text))
                launch = replace(launch, assigned=(*launch.assigned, *set_by_it))
            if name in _ENVIRONMENTS:
                launch = replace(launch, environment=" ".join([name, *texts[max(0, begin - 1) : begin]]))
            words = rest[count:]
            if name == "uv" and words and (words[0].text == "-m" or words[0].text.endswith(".py")):
                words = (Word("python", words[0].line), *words)  # as uv does
        elif found := _agent(name, texts):
            agent, own = found
            yield _with_agent(launch, agent, rest[own:], settings)
            return
        else:
            break
    yield replace(launch, words=words)


def _without_redirections(words: Sequence[Word]) -> tuple[Word, ...]:
    """Those at its end."""
    return tuple(itertools.takewhile(lambda word: not _REDIRECTION.match(word.raw), words))


def _follow_shell(
    text: Word, launch: Launch, depth: int, settings: _Settings, here: Word | None = None
) -> Iterator[Launch]:
    """`launch`: of the shell that reads this text. `here`: its here-document, which the first shell that it
    starts may read."""
    yield launch
    is_filled = launch.is_filled or not text.single_quoted
    word = launch.shell_word or text
    inside = replace(launch, words=(), in_shell=True, is_filled=is_filled, shell_word=word)
    for one in shell.commands(text.script, text.line):
        if here and not one.here and any(word.text.rpartition("/")[2] in SHELLS for word in one.words):
            one, here = replace(one, here=here), None
        yield from _follow(one, inside, depth + 1, settings)


def _starter_words(name: str, texts: Sequence[str]) -> int:
    if name == "srun":
        return request.words_behind(texts)
    at = 0
    while at < len(texts) and texts[at].startswith("-") and texts[at] != "--":
        option = f"-{texts[at]}" if re.match(r"-\w\w", texts[at]) else texts[at]
        is_flag = not _STARTER_FLAGS.isdisjoint((texts[at], option)) or (name == "pbsdsh" and option == "-o")
        is_flag = is_flag or (name == "ssh" and _SSH_FLAGS.fullmatch(texts[at]) is not None)
        takes = not is_flag and "=" not in option and at + 1 < len(texts)
        takes = takes and not texts[at + 1].startswith("-") and not _is_program(texts[at + 1])
        at += 2 if takes else 1
        if (
            option in _TWO_VALUES
            and "=" not in texts[at - 1]
            and not _is_program("".join(texts[at : at + 1]))
        ):
            at += 1
    if name == "ssh":
        at += 1  # the host
    return min(at, len(texts))


def _goes_to_background(texts: Sequence[str]) -> bool:
    """Whether ssh does, by its options."""
    return any("f" in text for text in texts if _SSH_FLAGS.fullmatch(text))


def starts_unseen(one: Launch) -> bool:
    """Whether a program that is not known here stands in front of one that may train."""
    return not one.trains and any(_is_program(word.text) for word in one.words[1:])


def _own_words(name: str, texts: Sequence[str]) -> int:
    """How many of these words are of a program that starts another one: its options, numbers and variables.
    A word behind an option is its value, if what is started stands further behind."""
    last = max((at for at, text in enumerate(texts) if _is_started(text)), default=-1)
    at = 0
    while at < len(texts) and not _is_started(texts[at]) and not (name == "uv" and texts[at] == "-m"):
        text, before = texts[at], texts[at - 1] if at else ""
        is_value = before.startswith("-") and before != "--" and "=" not in before and at < last
        if not (text[:1] == "-" or text[:1].isdigit() or shell.ASSIGNMENT.match(text) or is_value):
            break
        at += 1
    return at


def _is_started(text: str) -> bool:
    """Whether this is what is started, also if it starts something else itself."""
    name = text.rpartition("/")[2]
    is_script = text.startswith("./") or name.endswith((".sh", ".bash"))
    return is_script or name in STARTERS or name in _PASSES or _is_program(text)


def _behind_verb(texts: Sequence[str], verbs: Sequence[str]) -> int:
    """The place behind one of these commands of a program; -1 for another command."""
    return _verb(texts, verbs) + 1 or -1 if verbs else 0


def _verb(texts: Sequence[str], verbs: Sequence[str] = ("exec", "run", "shell")) -> int:
    """The place of one of these; -1 for another command, such as build."""
    for at, text in enumerate(texts[:6]):
        if text in verbs:
            return at
        if not text.startswith("-"):
            return -1
    return -1


def _shell_text(texts: Sequence[str]) -> int:
    """The place of what a shell reads from its command line; -1 for none."""
    for at, text in enumerate(texts):
        if re.fullmatch(r"-[a-z]*c[a-z]*", text):
            return at + 1 if at + 1 < len(texts) else -1
        if not text.startswith("-"):
            return -1
    return -1


def _reads_input(texts: Sequence[str]) -> bool:
    """Whether a shell with these words reads its commands from its input: it has no file of them."""
    named = {at + 1 for at, text in enumerate(texts) if _TAKES_NAME.fullmatch(text)}
    words = [text for at, text in enumerate(texts) if at not in named]
    first = next((text for text in words if text[:1] not in ("-", "+")), "")
    return "-s" in texts or not first or _REDIRECTION.match(first) is not None


def _is_no_value(word: Word) -> bool:
    return word.text.startswith("--") or _is_program(word.text)


def _is_program(text: str) -> bool:
    """Whether this is what is started, and no option's value, also if the option is not known here."""
    text = _name_of(text)
    name = text.rpartition("/")[2]
    starts = name in _AGENTS or name in CONTAINERS or name in SHELLS
    return starts or text.endswith(".py") or _PYTHON.fullmatch(name) is not None


def _name_of(raw: str) -> str:
    """The name of a program whose path the shell looks up; every other word as it is."""
    found = _WHICH.fullmatch(raw)
    return found["name"] if found else raw


def _agent(name: str, texts: Sequence[str]) -> tuple[str, int] | None:
    """What starts the ranks, and how many words stand in front of its options; None for another program."""
    if name == "accelerate" and texts[:1] == ["launch"]:
        return name, 1
    if name in ("torchrun", "deepspeed"):
        return name, 0
    if not name.startswith("python"):
        return None
    at = options_of_python(texts)
    option, module = (*texts[at : at + 2], "", "")[:2]
    return (_AGENT_MODULES[module], at + 2) if option == "-m" and module in _AGENT_MODULES else None


def options_of_python(texts: Sequence[str]) -> int:
    """How many of these words are python's own options, in front of -m, -c or a script."""
    at = 0
    while at < len(texts) and texts[at].startswith("-") and texts[at] not in ("-m", "-c", "-"):
        at += 2 if texts[at] in ("-W", "-X", "--check-hash-based-pycs") else 1
    return min(at, len(texts))


def _with_agent(launch: Launch, agent: str, rest: Sequence[Word], settings: _Settings) -> Launch:
    """`rest`: its options, and what it starts."""
    words = list(rest)
    options: dict[str, Word] = {}
    while words and words[0].text.startswith("-") and words[0].text != "--":
        word = words.pop(0)
        name, equals, _ = word.text.lstrip("-").partition("=")
        name = name.replace("_", "-")
        if agent == "torchrun" and name in ("nn", "nno", "nnod", "nnode"):
            name = "nnodes"  # its parser takes what begins so, and no other option does
        if equals:
            options[name] = replace(word, raw=word.raw.partition("=")[2])
        elif name in _AGENT_FLAGS[agent] or not words or _is_no_value(settings.literal(words[0])):
            options[name] = replace(word, raw="")
        else:
            options[name] = words.pop(0)
        if name in ("m", "module"):
            break
    return replace(launch, agent=agent, agent_options=options, words=tuple(words))
