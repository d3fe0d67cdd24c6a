"""Where an option's value comes from: the command line, APPTRAIN_ARGS or its file, the variables APPTRAIN_*,
the profile, else the default.

They are ways to give the same options; which of them counts is decided here alone.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from entrypoint.core import files, spelling
from entrypoint.core.errors import BadInput
from entrypoint.core.frozen import dataclass
from entrypoint.plan import commands, options
from entrypoint.plan.commands import split_command, typed
from entrypoint.plan.failure_policy import FailurePolicy
from entrypoint.plan.options import Option, flag
from entrypoint.plan.origin import DEFAULT, FLAG, Origin, ValueSource, from_profile, from_variable
from entrypoint.plan.passed import matches

DOCTOR = ("-m", "entrypoint.doctor")
REFERENCE_JOB = ("-m", "train", "--config", "digits")
COLUMNS = 100
"""Of help, at most."""
MOST_ARGUMENTS = 1 << 23
"""Bytes: a kernel passes 6 MB at most."""
PREFIX = "APPTRAIN_"
OF_JOB_SCRIPTS = """
    ANSWER_TIMEOUT APPTAINER ARGS ARGS_FILE ATTEMPT BIND CACHE CHAIN CUDA_COMPAT HOME IMAGE NCPUS NGPUS PASS
    UNPACK
"""
"""What people may set besides the options' variables, without the prefix."""
OF_PROCESSES = """
    AT_HAND BIND_* CHAIN_FILE EMBEDDED_* HAND HEARTBEAT IMAGE_ID IMAGE_PARTITION JOB_ID NODE NOT_PASSED
    OUTCOME PASSED PLACE PROGRESS PYTHON STACK TASK TEMPLATE WORK
"""
"""What one of our processes tells another."""


@dataclass(frozen=True)
class Setting:
    """A value and where it came from."""

    value: Any
    source: ValueSource

    @property
    def origin(self) -> Origin:
        return self.source.origin


class Settings:
    """The options of one call; `settings["join-timeout"]` is a Setting."""

    def __init__(self, settings: Mapping[str, Setting], command: Sequence[str]):
        self._settings = dict(settings)
        self.command = tuple(command) or REFERENCE_JOB

    def __getitem__(self, name: str) -> Setting:
        return self._settings[name]

    def value(self, name: str) -> Any:
        return self._settings[name].value

    @property
    def on_failure(self) -> FailurePolicy:
        policy: FailurePolicy = self.value("on-failure")
        return policy

    def given(self, name: str) -> bool:
        return self._settings[name].origin is not Origin.DEFAULT


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """One that fits a screen."""

    def __init__(self, prog: str) -> None:
        super().__init__(
            prog, max_help_position=26, width=min(COLUMNS, shutil.get_terminal_size().columns) - 2
        )

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return super()._fill_text(text, width, indent)
        return argparse.HelpFormatter._fill_text(self, text, width, indent)


class _Parser(argparse.ArgumentParser):
    taken_before: Sequence[str] = ()
    """Options of the same command line that another parser has taken."""
    takes_empty = False
    """Whether an empty value is none, as where make hands on settings that nobody gave."""

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """What was given to an option or argument: an action cannot tell it from a default."""
        if "" in arg_strings and not self.takes_empty and action.nargs != argparse.PARSER:
            metavar = str(action.metavar or action.dest)
            if not action.option_strings:
                raise BadInput("argument-empty", f"{metavar} is empty: give {action.help or metavar}")
            _refuse_empty(action.option_strings[0].replace("_", "-"), metavar)
        return super()._get_values(action, arg_strings)

    def error(self, message: str) -> NoReturn:
        start = "unrecognized arguments: "
        if message.startswith(start) and (unknown := message[len(start) :].split()):
            known = [*self.taken_before, *_own_names(self), "--help"]
            raise BadInput("unknown-option", commands.refusal(unknown, known, self.prog))
        raise BadInput(
            "command-usage",
            f"{message}: see `{' '.join(['apptrain', *typed()[:1]]) if typed() else self.prog} --help`",
        )


def _own_names(parser: argparse.ArgumentParser) -> list[str]:
    """Those of the command that stands in the parser's `prog`, too."""
    names = [*parser._option_string_actions]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            chosen = action.choices.get(parser.prog.rpartition(" ")[2])
            names += chosen._option_string_actions if chosen else []
    return [name for name in names if name not in ("-h", "--help") and "_" not in name]


def of_launch(words: Sequence[str], front: argparse.ArgumentParser) -> dict[str, str | None]:
    """The texts of the options of `launch` that the parser of another command has left."""
    parser = _Parser(prog=front.prog, allow_abbrev=False, add_help=False)
    parser.taken_before = _own_names(front)
    add_to(parser)
    return vars(parser.parse_args(words))


def add_to(
    parser: argparse.ArgumentParser,
    *,
    plan: bool = False,
    job: bool = False,
    everything: bool = False,
    without: Container[str] = (),
) -> None:
    """Adds the table's options to a parser, each also with underscores, as torchrun takes them. Help shows
    the common ones, or with `everything` all, in groups, those first that people use first; a group of which
    it shows none has no title. `without`: names that the parser has already."""
    groups: dict[str, argparse._ActionsContainer] = {}
    for title, names in options.GROUPS.items():
        groups.update(dict.fromkeys(names, parser.add_argument_group(title)))
    for option in map(options.BY_NAME.__getitem__, groups):
        if (option.plan_only and not plan) or (option.job_only and not job) or option.name in without:
            continue
        group = groups[option.name]
        shown = f"{option.help} [{option.variable}]" if everything else option.help
        flags = [f"--{option.name}"]
        kind: dict[str, Any] = {
            "dest": option.name,
            "default": None,
            "help": shown if everything or option.name in options.COMMON else argparse.SUPPRESS,
        }
        if option.parse is flag:
            kind |= {"action": "store_const", "const": "1"}
        else:
            kind |= {"metavar": option.metavar}
        group.add_argument(*flags, **kind)
        if "-" in option.name:
            group.add_argument("--" + option.name.replace("-", "_"), **(kind | {"help": argparse.SUPPRESS}))


def parser_class() -> type[argparse.ArgumentParser]:
    return _Parser


def inherited(env: Mapping[str, str], *, job: bool = False) -> tuple[dict[str, str], list[str]]:
    """(the options' texts, CMD) from APPTRAIN_ARGS_FILE (one argument per NUL) or APPTRAIN_ARGS
    (shell-quoted), for schedulers whose scripts get no arguments. Raises BadInput where one cannot be
    read."""
    if path := env.get("APPTRAIN_ARGS_FILE"):
        name = "APPTRAIN_ARGS_FILE"
        try:
            text = files.read_text(Path(path), MOST_ARGUMENTS)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise BadInput(
                "inherited-unreadable", f"{name}={path} cannot be read ({why}): give a path that exists"
            ) from None
        arguments = text.removesuffix("\0").split("\0") if text else []
    else:
        name = "APPTRAIN_ARGS"
        try:
            arguments = shlex.split(env.get(name, ""))
        except ValueError as error:
            raise BadInput("inherited-not-quoted", f"{name} is not a shell-quoted string: {error}") from None
    try:
        return texts(arguments, job=job)
    except BadInput as error:
        raise BadInput(error.id, f"in {name}: {error}") from None


def texts(arguments: Sequence[str], *, job: bool = False) -> tuple[dict[str, str], list[str]]:
    """(the options' texts, CMD) of a command line."""
    before, command = split_command(arguments)
    if not before:
        return {}, command  # without a parser, which takes a start 2 ms
    parser = _Parser(prog="apptrain launch", allow_abbrev=False, add_help=False)
    add_to(parser, job=job)
    given = vars(parser.parse_args(before))
    return {name: text for name, text in given.items() if text is not None}, command


def merged(
    given: Mapping[str, str | None], command: Sequence[str], env: Mapping[str, str], *, job: bool = False
) -> tuple[dict[str, str], list[str]]:
    """The same with what the command line inherits, of which its own options are worth more. Raises BadInput
    where CMD stands in both."""
    more, inherited_command = inherited(env, job=job)
    if command and inherited_command:
        name = "APPTRAIN_ARGS_FILE" if env.get("APPTRAIN_ARGS_FILE") else "APPTRAIN_ARGS"
        raise BadInput("cmd-given-twice", f"CMD stands both on the command line and in {name}: give it once")
    own = {name: text for name, text in given.items() if text is not None}
    return {**more, **own}, list(command or inherited_command)


def words(flags: Mapping[str, str], command: Sequence[str], *, job: bool = False) -> list[str]:
    """The command line that says this again: of `launch` or `plan`, or of a whole `job`."""
    found = []
    for name, text in flags.items():
        if job or not options.BY_NAME[name].job_only:
            found.append(f"--{name}" if options.BY_NAME[name].parse is flag else f"--{name}={text}")
    return [*found, "--", *command] if command else found


def resolve(
    given: Mapping[str, str | None],
    env: Mapping[str, str],
    profile: Mapping[str, Any],
    profile_name: str,
    command: Sequence[str],
) -> Settings:
    """Each option's value by precedence. `given` holds the flags' texts, None where absent.

    Raises BadInput naming the flag or variable, the value, and what it must be.
    """
    check_spelling(env)
    settings = {}
    for option in options.OPTIONS:
        if (text := given.get(option.name)) is not None:
            settings[option.name] = Setting(value=_parse(option, f"--{option.name}", text), source=FLAG)
        elif option.variable in env:
            value = _parse(option, option.variable, env[option.variable])
            settings[option.name] = Setting(value=value, source=from_variable(option.variable))
        elif option.in_profile and (own := profile.get(option.name, ())) != ():
            text = ",".join(own) if isinstance(own, tuple) else str(own)
            value = _parse(option, f"{option.name} in {profile_name}", text)
            settings[option.name] = Setting(value=value, source=from_profile(profile_name))
        else:
            settings[option.name] = Setting(value=option.default, source=DEFAULT)
    if settings["doctor"].value:
        command = _doctor(command)
    return Settings(settings, command)


def _doctor(command: Sequence[str]) -> Sequence[str]:
    """What --doctor starts. Raises BadInput for a script: each rank would refuse it, after the wait in the
    queue."""
    if tuple(command) not in ((), ("--json",)):
        raise BadInput(
            "doctor-cmd",
            f"--doctor takes no script, and CMD is `{shlex.join(command)}`: leave one of them out "
            "(only --json may stand behind --)",
        )
    return (*DOCTOR, *command)


def check_spelling(env: Mapping[str, str]) -> None:
    """Raises BadInput for a variable a letter apart from one of ours: it would count for nothing. Others
    with our prefix may be somebody's own."""
    known = [*(option.variable.removeprefix(PREFIX) for option in options.OPTIONS), *OF_JOB_SCRIPTS.split()]
    for name in sorted(env):
        own = name.removeprefix(PREFIX)
        if own == name or matches(own, [*known, *OF_PROCESSES.split()]):
            continue
        if meant := spelling.near(own, known, 1, spelling.LITERAL):
            raise BadInput(
                "variable-unknown",
                f"{name} is no variable of apptrain: did you mean {PREFIX}{meant[0]}? Correct the name, or "
                "unset it",
            )


def _parse(option: Option, name: str, text: str) -> Any:
    if not text:
        _refuse_empty(name, option.metavar or "1")
    try:
        return option.parse(text)
    except ValueError as error:
        raise BadInput("option-value", f"{name}={text}: {option.wants(error)}") from None


def _refuse_empty(name: str, metavar: str) -> NoReturn:
    raise BadInput("option-empty", f"{name} is empty: give {metavar} or leave it out")
