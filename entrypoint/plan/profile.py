"""Reads and checks a site's profile, clusters/NAME.yaml. `load` is the entry; clusters/generic.yaml says what
each key means.

The entrypoint uses `launch`, `env`, `host_suffix` and `scratch`; cli/submit.py `nodes` and `request`.
cli/profiles.py writes what the job scripts use into a host file. An image of one's own may lack PyYAML:
then the same content is read from that file, as JSON. Runs with the Python of a login node, from 3.9 on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, Final

from entrypoint.core import files, spelling
from entrypoint.core.checkout import make
from entrypoint.core.errors import BadInput
from entrypoint.core.frozen import dataclass
from entrypoint.core.plain import plain
from entrypoint.plan import passed
from entrypoint.plan.options import OPTIONS, Option
from entrypoint.schedulers.known import KNOWN, words_of

CLUSTERS = Path(__file__).parents[2] / "clusters"
CONTENT = "profile"
"""The line of a host file that has all of the profile."""
LARGEST = 1 << 20
"""Bytes of a profile, and of its host file."""
VARIABLE = re.compile(r"\$(?:\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*))")
"""What is replaced in a path, an account or an option: nothing else of a shell's syntax is."""
FORMS = dict(sorted((form, known.name) for known in KNOWN for form in known.forms))
"""Of a request, with the scheduler that has it."""
NONE = "none"
"""A request must not name it."""
MEMORY_WORDS = tuple(word for known in KNOWN for word in known.memory_words)
NEEDED = ("account", "partition", "time")
"""What a request may have to name, by the options of `apptrain submit`."""
ARCHITECTURES = ("x86_64", "aarch64")
"""Of nodes, as `uname -m` has them; the usual one first."""
TAKEN = {
    **dict.fromkeys(("--bind", "--mount"), "the path under binds"),
    **dict.fromkeys(("--env", "--env-file"), "the variable under env"),
    "--nv": "none: NVIDIA's driver is found without",
    "--unsquash": "none: APPTRAIN_UNPACK=1 unpacks the image",
}
"""Options of Apptainer that apptrain has another way for, with that way."""
FIXED = (
    *("--cleanenv", "--no-eval", "--no-mount", "--pwd", "--cwd", "--home", "--no-home"),
    *("--contain", "--containall", "--writable", "--hostname", "--pid", "--net"),
)
"""Options of Apptainer on which every job relies as they are."""


@dataclass(frozen=True)
class Nodes:
    """One node of the partition, as a job gets it."""

    gpus: int | None = None
    cpus: int | None = None
    memory_gib: int | None = None
    whole: bool = False
    """Jobs get whole nodes, whatever they ask for."""
    architecture: str = ""
    """As `uname -m` says on the node; empty: that of the login node."""
    driver: str = ""
    """NVIDIA's, its version or branch."""


@dataclass(frozen=True)
class Request:
    """How `make submit` asks for them. $NAME stands for a variable of whoever submits."""

    partition: str = ""
    """The queue, under PBS."""
    account: str = ""
    account_option: str = "-A"
    time: str = ""
    """HH:MM:SS."""
    stop_before: int | None = None
    """Seconds before the end of it at which ranks are asked to save."""
    gpus: str = ""
    """A word of sbatch, or a resource of PBS, with {gpus} for their number; empty: the scheduler's own."""
    cpus: str = ""
    """`none`: a request must not name CPUs."""
    memory: str = ""
    """The word of sbatch that asks for memory, or `none`: a request must not name it. Empty: the scheduler's
    own."""
    nodes_only: bool = False
    """Whole nodes come with all they have, and a request must not name it."""
    needs: tuple[str, ...] = ()
    """What no job there may lack, of `NEEDED`."""
    options: tuple[str, ...] = ()
    chunk: tuple[str, ...] = ()
    """Under PBS, further resources of each chunk of `select`."""
    form: str = ""
    """Under PBS `select`, or `totals` where the site wants -l ncpus= and the like for all nodes together.
    Under Slurm `wrapped` where its sbatch refuses a line that the job script has, such as --gpus-per-node."""


@dataclass(frozen=True)
class Container:
    """What starts the image on a node."""

    module_paths: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    program: str = ""
    """Empty: apptainer, else singularity, from PATH."""
    stack: str = ""
    """Of containers/stacks.yaml; empty: its default."""
    options: tuple[str, ...] = ()
    """Words of Apptainer for `exec`."""
    binds: tuple[str, ...] = ()
    obey_binds: bool = False
    """What a module has in APPTAINER_BIND is shown too."""
    wrappers: tuple[str, ...] = ()
    """Programs inside, each of which is started with the rest of the command as its arguments."""
    passed: tuple[str, ...] = ()
    """Further variables that cross into the image."""


@dataclass(frozen=True)
class Stage:
    """How the image comes to the nodes (entrypoint/batch/staging.py)."""

    to: str = ""
    """As --stage; empty: auto."""
    digest: bool = False
    """Every node compares the SHA-256 of its copy."""
    shared_mb_s: int | None = None
    """MB a second that the shared file system gives to all nodes together."""
    node_mb_s: int | None = None
    """MB a second that one node sends, receives and writes."""
    read_percent: int | None = None
    """Share of the image that the start of a job reads on each node."""


@dataclass(frozen=True)
class Profile:
    """What a site has written down of itself; every field may be left out."""

    name: str = ""
    """The file's name, as `sources` shows it; empty for no profile."""
    path: str = ""
    """The file, as messages name it."""
    title: str = ""
    documented: tuple[str, ...] = ()
    """The public pages that the values are from."""
    tested: str = ""
    """When and on what it ran; empty: never, there."""
    scheduler: str = ""
    clusters: tuple[str, ...] = ()
    """Slurm's names of the clusters, or those of PBS's servers, that this is for."""
    nodes: Nodes = field(default_factory=Nodes)
    request: Request = field(default_factory=Request)
    container: Container = field(default_factory=Container)
    stage: Stage = field(default_factory=Stage)
    start: str = ""
    """What starts the tasks, as --start; empty: the scheduler's usual one."""
    launcher_args: tuple[str, ...] = ()
    launch: Mapping[str, Any] = field(default_factory=dict)
    """Option name (with dashes) to value."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables for every worker, such as NCCL's."""
    host_suffix: str = ""
    """Appended to a node's name to get the name of its address for the rendezvous."""
    scratch: str = ""
    """Where run directories lie, with $USER and other variables; empty: the submit directory."""


# --- what a value may be ------------------------------------------------------------------------------------

Kind = Callable[[str, Any], Any]
"""Takes where a value stands, for the message, and the value; returns what is kept of it."""


def _wrong(where: str, value: Any, what: str) -> BadInput:
    return BadInput("profile-wrong-value", f"{where} is {_shown(value)}: give {what}")


def _shown(value: Any) -> str:
    """A value of a profile, short enough for a line."""
    text = str(plain(repr(value)))
    return text if len(text) <= 80 else f"{text[:80]}..."


def _text(where: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _wrong(where, value, "text, in quotes where YAML takes it for something else")
    if not value.isprintable():
        raise _wrong(where, value, "one line of printable characters")
    return value


def _matching(pattern: str, what: str) -> Kind:
    def kind(where: str, value: Any) -> str:
        if not re.fullmatch(pattern, _text(where, value)):
            raise _wrong(where, value, what)
        return str(value)

    return kind


def _expanded(kind: Kind) -> Kind:
    """That kind, in which $NAME stands for a variable."""

    def checked(where: str, value: Any) -> str:
        text = str(kind(where, value))
        if "$" in VARIABLE.sub("", text):
            raise _wrong(where, value, "$ only in front of a variable's name, as $NAME or ${NAME}")
        return text

    return checked


def _count(least: int) -> Kind:
    def kind(where: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise _wrong(where, value, f"a whole number from {least}")
        return value

    return kind


def _percent(where: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 100:
        raise _wrong(where, value, "a whole number from 1 to 100")
    return value


def _flag(where: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong(where, value, "true or false")
    return value


def _one_of(*choices: str) -> Kind:
    def kind(where: str, value: Any) -> str:
        if value not in choices:
            raise _wrong(where, value, "one of " + ", ".join(choices))
        return str(value)

    return kind


def _list(kind: Kind) -> Kind:
    def all_of(where: str, value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise _wrong(where, value, "a list, as in [a, b]")
        return tuple(kind(f"{where}, entry {i},", each) for i, each in enumerate(value, 1))

    return all_of


def _of_option(option: Option) -> Kind:
    """Of what a flag and a variable say too, by the rule of these."""

    def kind(where: str, value: Any) -> Any:
        if value == []:
            return ()  # absent
        parts = value if isinstance(value, list) else [value]
        if any(isinstance(part, bool) or not isinstance(part, (str, int, float)) for part in parts):
            raise _wrong(where, value, "text or a number")
        try:
            found = option.parse(",".join(map(str, parts)))
        except ValueError as error:
            raise _wrong(where, value, option.wants(error).removeprefix("must be ")) from None
        if isinstance(found, tuple) != isinstance(value, list):
            raise _wrong(where, value, "a list, as in [a, b]" if isinstance(found, tuple) else "one value")
        return found

    return kind


def _variable(where: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)) or "\0" in str(value):
        raise _wrong(where, value, "text in quotes, or a number")
    return str(value)


_word = _matching(r"\S+", "one word, without blanks")
_path = _expanded(_matching(r"[/$].*", "a path from /, or one that begins with a variable"))
_program = _expanded(_matching(r"[/$].*|[^/\s]+", "a program's name, or a path from /"))
BIND_FORM: Final = r"[/$][^:]*(:([/$][^:]*)?(:ro)?)?"
"""Of a path that the image shows, SRC[:DST[:ro]]."""
_bind = _expanded(_matching(BIND_FORM, "SRC[:DST[:ro]] with paths from /"))
_passed = _matching(r"[A-Za-z_][A-Za-z0-9_]*\*?", "NAME or PREFIX_*")
_inside = _matching(r"/\S*[^/\s]", "a path from / in the image, without blanks")
_driver = _matching(
    r"[1-9][0-9]{2}(\.[0-9]{1,4}){0,2}", 'NVIDIA\'s version in quotes, as in "550" or "550.54.15"'
)
_time = _matching(r"[0-9]{1,4}:[0-5][0-9]:[0-5][0-9]", 'HH:MM:SS in quotes, as in "01:00:00"')


def _container_word(where: str, value: Any) -> str:
    """One of Apptainer's own options, in one word."""
    word = _matching(r"--[a-z][a-z0-9-]*(=\S+)?", "an option of Apptainer in one word, as --fakeroot")(
        where, value
    )
    name = word.partition("=")[0]
    if name in TAKEN:
        raise _wrong(where, value, TAKEN[name])
    if name in FIXED:
        raise _wrong(
            where, value, "another option, such as --fakeroot: every job relies on this one as it is"
        )
    return str(word)


# --- the layout ---------------------------------------------------------------------------------------------

NODES: Mapping[str, Kind] = {
    "gpus": _count(0),
    "cpus": _count(1),
    "memory_gib": _count(1),
    "whole": _flag,
    "architecture": _one_of(*ARCHITECTURES),
    "driver": _driver,
}
REQUEST: Mapping[str, Kind] = {
    "partition": _expanded(_word),
    "account": _expanded(_word),
    "account_option": _one_of("-A", "-P"),
    "time": _time,
    "stop_before": _count(1),
    "gpus": _word,
    "cpus": _one_of(NONE),
    "memory": _one_of(NONE, *MEMORY_WORDS),
    "nodes_only": _flag,
    "needs": _list(_one_of(*NEEDED)),
    "options": _list(_expanded(_text)),
    "chunk": _list(_expanded(_matching(r"[^\s:,+=]+=[^\s:,+]+", "NAME=VALUE, a resource of a chunk"))),
    "form": _one_of(*FORMS),
}
CONTAINER: Mapping[str, Kind] = {
    "module_paths": _list(_path),
    "modules": _list(_word),
    "program": _program,
    "stack": _word,
    "options": _list(_container_word),
    "binds": _list(_bind),
    "obey_binds": _flag,
    "wrappers": _list(_inside),
    "pass": _list(_passed),
}
STAGE: Mapping[str, Kind] = {
    "to": _expanded(
        _matching(r"auto|off|[/$].*", "auto, off, or a path from / or one that begins with a variable")
    ),
    "digest": _flag,
    "shared_mb_s": _count(1),
    "node_mb_s": _count(1),
    "read_percent": _percent,
}
LAUNCH: Mapping[str, Kind] = {option.name: _of_option(option) for option in OPTIONS if option.in_profile}
PLAIN: Mapping[str, Kind] = {
    "title": _text,
    "documented": _list(_word),
    "tested": _text,
    "scheduler": _one_of(*(known.name for known in KNOWN)),
    "clusters": _list(_word),
    "start": _one_of(*(name for known in KNOWN for name in known.starters)),
    "launcher_args": _list(_text),
    "host_suffix": _matching(r"[A-Za-z0-9.-]+", "the end of a host's name, such as -hsn"),
    "scratch": _path,
}
KEYS = (*PLAIN, "nodes", "request", "container", "stage", "launch", "env")


def find(name: str, clusters: Path = CLUSTERS) -> Path:
    """Where the profile of that name or path lies."""
    return Path(name) if "/" in name or name.endswith(".yaml") else clusters / f"{name}.yaml"


def load(name: str, clusters: Path = CLUSTERS, asked: str = "") -> Profile:
    """The profile of that name or path; `asked` is how it was given (--profile NAME).

    Raises BadInput when it cannot be read, or naming the key whose value may not stand there.
    """
    path = find(name, clusters)
    if path.parent == clusters and not files.is_there(path):
        known = sorted(file.stem for file in clusters.glob("*.yaml"))
        meant = spelling.meant(name, known) or f": give one of {', '.join(known)}, or the path of a profile"
        raise BadInput("profile-missing", f"{asked or f'--profile {name}'}: there is no {path}{meant}")
    return checked(read(path, asked or f"--profile {name}"), path)


def checked(content: Mapping[Any, Any], path: Path) -> Profile:
    """The profile that was read at `path`. Raises BadInput, naming the key whose value may not stand
    there."""
    _only(content, KEYS, f"{path}:")
    passed = _section(content, "container", CONTAINER, path)
    profile = Profile(
        name=path.name,
        path=str(path),
        nodes=Nodes(**_section(content, "nodes", NODES, path)),
        request=Request(**_section(content, "request", REQUEST, path)),
        container=Container(**{"passed" if key == "pass" else key: value for key, value in passed.items()}),
        stage=Stage(**_section(content, "stage", STAGE, path)),
        launch=_section(content, "launch", LAUNCH, path, dashes=True),
        env=_variables(_mapping(content, "env", path), path),
        **_values({key: content[key] for key in PLAIN if key in content}, PLAIN, f"{path}:"),
    )
    _agrees(profile, path)
    return profile


def host_file(path: Path) -> Path:
    """What entrypoint/cli/profiles.py makes of a profile."""
    return path.with_suffix(".host")


def is_in_clusters(path: Path) -> bool:
    """Whether a profile lies where a job that names none looks for one of its cluster."""
    return path.resolve().parent == CLUSTERS.resolve()


def remedy(path: Path) -> str:
    """The command that makes a profile's host file."""
    if is_in_clusters(path):
        return make("profiles")
    return make(f"profiles PROFILE={_quoted(str(path.absolute()))}")


def _quoted(text: str) -> str:
    """A word of bash that stands for the text, whatever it holds."""
    return "'" + text.replace("'", "'\\''") + "'"


def read(path: Path, asked: str) -> Mapping[Any, Any]:
    """What a profile holds, not yet checked; `asked` is how it was given. Raises BadInput."""
    try:
        from entrypoint.core import strict_yaml
    except ImportError:
        return _read_host_file(path, asked)
    try:
        content = strict_yaml.load(path, texts="env")
    except OSError as error:
        raise BadInput("profile-unreadable", f"{asked}: {path} cannot be read: {error.strerror}") from None
    except files.Unfit as error:
        raise BadInput("profile-not-yaml", f"{path}: {error}") from None
    if not isinstance(content, dict):
        raise BadInput(
            "profile-no-mapping", f"{asked}: {path} must hold a mapping with the keys {', '.join(KEYS)}"
        )
    return content


def _read_host_file(path: Path, asked: str) -> Mapping[Any, Any]:
    """The same, from the host file. Raises BadInput if that is not made from this profile."""
    import hashlib  # OpenSSL, which a Python with PyYAML does not need here

    made = host_file(path)
    try:
        digest = hashlib.sha256(files.read(path, LARGEST)).hexdigest()
    except (OSError, files.Unfit) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise BadInput("host-file-unreadable", f"{asked}: {path} cannot be read: {why}") from None
    try:
        lines = files.read_text(made, LARGEST).split("\n")
        found = dict(line.partition("=")[::2] for line in lines)
        content = files.parse_json(found[CONTENT]) if found.get("digest") == digest else None
    except (OSError, ValueError, KeyError):
        content = None
    if not isinstance(content, dict):
        raise BadInput(
            "profile-no-pyyaml",
            f"{asked} needs the Python package pyyaml: use the project's venv ({make('venv')}), "
            "or python3 -m pip install --user pyyaml; "
            f"an image without it needs {made}, made from {path.name} as that is now: {remedy(path)}",
        )
    return content


def expanded(text: str, env: Mapping[str, str], path: str) -> str:
    """A value of the profile at `path` with $NAME replaced. Raises BadInput where one is not set, or
    empty."""

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        if not env.get(name):
            raise BadInput(
                "profile-variable-unset",
                f"{text} in the profile {path}: {name} is not set here: set it, or correct the profile",
            )
        return env[name]

    return VARIABLE.sub(value, text)


def _section(
    content: Mapping[Any, Any], key: str, kinds: Mapping[str, Kind], path: Path, *, dashes: bool = False
) -> dict[str, Any]:
    given = _mapping(content, key, path)
    if dashes:
        given = {str(name).replace("_", "-"): value for name, value in given.items()}
    _only(given, kinds, f"{path}: {key}:")
    return _values(given, kinds, f"{path}: {key}")


def _values(given: Mapping[Any, Any], kinds: Mapping[str, Kind], where: str) -> dict[str, Any]:
    """What was given, checked; an empty value counts as absent."""
    found = {name: value for name, value in given.items() if value is not None and value != ""}
    return {name: kinds[name](f"{where} {name}", value) for name, value in found.items()}


def _variables(given: Mapping[Any, Any], path: Path) -> dict[str, str]:
    for name in given:
        if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", str(name)):
            raise BadInput(
                "profile-variable-name",
                f"{path}: env has {_shown(name)}: give a variable's name, letters, digits and _",
            )
    if "OMP_NUM_THREADS" in given:
        raise BadInput(
            "profile-omp-threads", f"{path}: env sets OMP_NUM_THREADS: set omp_num_threads under launch"
        )
    if of_torchrun := passed.preset({str(name): "" for name in given}):
        raise BadInput(
            "profile-torchrun-variable",
            f"{path}: env sets {of_torchrun[0]}: ranks get it from the plan, or not at all: leave it out",
        )
    if ours := [str(name) for name in given if str(name).startswith("APPTRAIN_")]:
        raise BadInput(
            "profile-own-variable",
            f"{path}: env sets {ours[0]}: env is for the ranks alone: set an option under launch",
        )
    return {str(name): _variable(f"{path}: env {name}", value) for name, value in given.items()}


def _mapping(content: Mapping[Any, Any], key: str, path: Path) -> Mapping[Any, Any]:
    value = content.get(key) or {}
    if not isinstance(value, dict):
        raise BadInput("profile-key-no-mapping", f"{path}: {key} must be a mapping, found {_shown(value)}")
    return value


def _only(content: Mapping[Any, Any], known: Mapping[str, Any] | Sequence[str], where: str) -> None:
    if unknown := [str(plain(str(key))) for key in content if key not in known]:
        meant = spelling.meant(unknown[0], known) if len(unknown) == 1 else ""
        valid = f": valid are {', '.join(known)}"
        raise BadInput("profile-unknown-key", f"{where} unknown key {', '.join(unknown[:5])}{meant or valid}")


def _agrees(profile: Profile, path: Path) -> None:
    """Raises BadInput where one value rules out another."""
    scheduler, request = profile.scheduler, profile.request
    if not scheduler:
        return
    known = words_of(scheduler)
    if profile.start and profile.start not in known.starters:
        raise _wrong(f"{path}: start", profile.start, f"under {scheduler} {' or '.join(known.starters)}")
    if request.chunk and not known.has_chunks:
        others = " or ".join(each.name for each in KNOWN if each.has_chunks)
        raise BadInput(
            "profile-chunk-scheduler",
            f"{path}: request chunk is for {others}, and scheduler is {scheduler}: leave it out",
        )
    if request.form and scheduler != FORMS[request.form]:
        raise BadInput(
            "profile-form-scheduler",
            f"{path}: request form {request.form} is for {FORMS[request.form]}, and scheduler is "
            f"{scheduler}: leave it out",
        )
    if request.form == "wrapped" and not (request.nodes_only or request.gpus):
        raise BadInput(
            "profile-wrapped-no-gpus",
            f"{path}: request form wrapped needs request gpus, such as --gres=gpu:{{gpus}}",
        )
    if request.chunk and request.form == "totals":
        raise BadInput(
            "profile-chunk-and-totals", f"{path}: request chunk has no place beside form totals: use options"
        )
    if request.memory not in ("", NONE):
        _memory_agrees(profile, path)
    if request.nodes_only and not profile.nodes.whole:
        raise BadInput(
            "profile-nodes-only",
            f"{path}: request nodes_only goes only with whole nodes: set whole under nodes",
        )
    if request.gpus and (request.nodes_only or re.findall(r"{.*?}", request.gpus) != ["{gpus}"]):
        what = f"it as in {known.gpus}, or nodes_only: true instead"
        raise _wrong(f"{path}: request gpus", request.gpus, what)


def _memory_agrees(profile: Profile, path: Path) -> None:
    """Raises BadInput where the word for memory has nothing to ask for."""
    request, nodes = profile.request, profile.nodes
    where = f"{path}: request memory"
    if not words_of(profile.scheduler).memory_words:
        raise _wrong(where, request.memory, f"none, or leave it out: {profile.scheduler} knows no such word")
    if request.nodes_only:
        raise _wrong(where, request.memory, "none, or leave it out: nodes_only names no memory")
    units = {"--mem-per-cpu": ("cpus", nodes.cpus), "--mem-per-gpu": ("gpus", nodes.gpus)}
    unit, count = units.get(request.memory, ("memory_gib", nodes.memory_gib))
    if not nodes.memory_gib or not count:
        needed = " and ".join(dict.fromkeys((f"nodes {unit}", "nodes memory_gib")))
        raise _wrong(where, request.memory, f"{needed} too, from which the amount follows")
