"""What an option's value may be, and what comes of it."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from entrypoint.plan import options
from entrypoint.plan.failure_policy import FailurePolicy

GOOD: list[tuple[Callable[[str], Any], str, Any]] = [
    (options.word, "a'b", "a'b"),
    (options.positive_int, "1", 1),
    (options.count, "0", 0),
    (options.port, "1024", 1024),
    (options.port, "65534", 65534),
    (options.seconds, "0.5", 0.5),
    (options.seconds, "604799.5", 604799.5),
    (options.stage, "auto", "auto"),
    (options.stage, "off", "off"),
    (options.stage, "/tmp", "/tmp"),
    (options.numa_binding, "exclusive", "exclusive"),
    (options.node_count, "3:3", (3, 3)),
    (options.seconds_or_0, "0", 0.0),
    (options.seconds_or_0, "604799", 604799.0),
    (options.seconds_before, "0", 0),
    (options.seconds_before, "9999999", 9999999),
    (options.one_of("cpu", "cuda"), "cuda", "cuda"),
    (options.failure_policy, "restart", FailurePolicy.RESTART),
    (options.flag, "1", True),
    (options.flag, "true", True),
    (options.flag, "0", False),
    (options.flag, "false", False),
    (options.node_count, "3", (3, 3)),
    (options.node_count, "2:3", (2, 3)),
    (options.module_names, "torchvision,a.b", ("torchvision", "a.b")),
    (options.stop_signal, "sigusr2", "USR2"),
    (options.stop_signal, "TERM", "TERM"),
]
BAD: list[tuple[Callable[[str], Any], str, str]] = [
    (options.word, "", "must be one word, without blanks"),
    (options.word, "a b", "must be one word, without blanks"),
    (options.word, "a\x1b", "must be one word, without blanks"),
    (options.positive_int, "0", "must be at least 1"),
    (options.node_count, "0", "must be N or MIN:MAX"),
    (options.node_count, "1:0", "must be N or MIN:MAX"),
    (options.seconds, "604800", "must be seconds, more than 0 and less than a week"),
    (options.seconds_before, "-1", "must be seconds; 0 leaves it out"),
    (options.seconds_before, "٣", "must be seconds; 0 leaves it out"),
    (options.stage, "tmp", "must be auto, off, or a directory of each node's own, a path from /"),
    (options.numa_binding, "core-complex", "must be one of node, socket, exclusive, auto, none; the closest to torchrun's core-complex is exclusive"),
    (options.module_names, "", "must be names of modules with commas between them"),
    (options.count, "-1", "must not be negative"),
    (options.port, "1023", "must be from 1024 to 65534: the join takes the next higher port"),
    (options.port, "65535", "must be from 1024 to 65534: the join takes the next higher port"),
    (options.seconds, "0", "must be seconds, more than 0 and less than a week"),
    (options.seconds, "nan", "must be seconds, more than 0 and less than a week"),
    (options.seconds_or_0, "-0.1", "must be seconds, less than a week, or 0"),
    (options.seconds_or_0, "604800", "must be seconds, less than a week, or 0"),
    (options.seconds_before, "1.5", "must be seconds; 0 leaves it out"),
    (options.seconds_before, "10000000", "must be seconds; 0 leaves it out"),
    (options.one_of("cpu", "cuda"), "gpu", "must be one of cpu, cuda"),
    (options.failure_policy, "RESTART", "must be one of stop, requeue, restart"),
    (options.flag, "yes", "must be 1 or 0"),
    (options.node_count, "3:2", "MIN is more than MAX"),
    (options.module_names, "a,,b", "must be names of modules with commas between them"),
    (options.module_names, "a-b", "must be names of modules with commas between them"),
    (options.stop_signal, "USR3", "must be a signal's name, such as USR2"),
    (options.stop_signal, "_DFL", "must be a signal's name, such as USR2"),
    (options.stop_signal, "KILL", "must be one that can ask a program to save, such as USR2: KILL cannot be caught"),
    (options.stop_signal, "chld", "must be one that can ask a program to save, such as USR2: CHLD comes for other reasons, and is ignored by default"),
    (options.stop_signal, "SEGV", "must be one that can ask a program to save, such as USR2: SEGV is for crashes"),
]  # fmt: skip


@pytest.mark.parametrize(("parse", "text", "value"), GOOD)
def test_a_value_is_what_its_text_says(parse: Callable[[str], Any], text: str, value: object) -> None:
    assert parse(text) == value
    assert type(parse(text)) is type(value)


@pytest.mark.parametrize(("parse", "text", "why"), BAD)
def test_any_other_text_is_refused(parse: Callable[[str], Any], text: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(why)}"):
        parse(text)


OF_PLAN = {"env-file", "nodefile", "hostname", "json"}
OF_JOB = {"start", "stop-before", "stage", "dry-run"}
IN_PROFILE = {
    *("nproc-per-node", "rdzv-backend", "interface", "join-timeout", "peer-timeout", "omp-num-threads"),
    *("numa-binding", "fabric", "start-ranks", "preload"),
}


def test_an_option_belongs_to_launch_too_unless_it_is_of_a_plan_or_of_a_whole_job() -> None:
    assert {option.name for option in options.OPTIONS if option.plan_only} == OF_PLAN
    assert {option.name for option in options.OPTIONS if option.job_only} == OF_JOB
    assert {option.name for option in options.OPTIONS if option.in_profile} == IN_PROFILE


def test_what_takes_no_value_is_off_by_default_and_anything_else_shows_what_it_takes() -> None:
    for option in options.OPTIONS:
        is_flag = option.parse is options.flag
        assert (option.metavar == "") is is_flag, option.name
        if is_flag:
            assert option.default is False, option.name


def test_an_option_has_the_variable_of_its_name() -> None:
    assert options.BY_NAME["join-timeout"].variable == "APPTRAIN_JOIN_TIMEOUT"
