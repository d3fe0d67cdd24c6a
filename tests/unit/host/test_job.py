"""host/job.sh and host/staging.sh, one function at a time: what is set before a job, what the image's answer sets, which
nodes have a copy of the image."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[3]
START = 'set -euo pipefail; APPTRAIN_HOME=$1; source "$1/host/job.sh"; scheduler=slurm is_batch=; begin_job; '
SET = [
    *("asked_to_end", "warned", "is_stop_said", "child", "show_only", "cluster", "facts", "loggers"),
    *(
        "run_dir",
        "attempt",
        "outcome",
        "starter",
        "stop_at",
        "end_at",
        "goes_on",
        "tells_end",
        "over",
        "dry_run",
    ),
    *(
        "by_hand",
        "no_chain",
        "stage",
        "staged",
        "each_node",
        "exported",
        "given_options",
        "hosts",
        "host_lines",
    ),
    *("start_words", "plan_words", "launch_words", "chain_words", "task"),
]
"""What this file, the signals and the image set."""


def bash(script: str, *arguments: object, status: int = 0, env: Mapping[str, str] | None = None) -> str:
    """What these lines print; of a refusal, what it says."""
    ended = subprocess.run(
        ["bash", "-c", START + script, "bash", str(CHECKOUT), *map(str, arguments)],
        env={"PATH": os.environ["PATH"], **(env or {})},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == status, ended.stderr
    return ended.stdout if status == 0 else ended.stderr


def said(folder: Path, name: str, *entries: str) -> Path:
    """What the image leaves in this file."""
    (folder / name).write_bytes(b"".join(entry.encode() + b"\0" for entry in entries))
    return folder


# --- before the job -----------------------------------------------------------------------------------------------


def test_a_variable_of_the_environment_is_not_taken_for_what_a_job_sets() -> None:
    told = bash('for name in "${@:2}"; do echo "$name=${!name-}"; done', *SET, env=dict.fromkeys(SET, "junk"))
    assert told.splitlines() == [f"{name}=" for name in SET]
    assert bash('echo "$given_image"', env={"APPTRAIN_IMAGE": "my.sif"}) == "my.sif\n"


@pytest.mark.parametrize(
    ("words", "profile"),
    [
        (["--profile", "a", "--profile=b", "--", "--profile", "c"], "b"),
        (["--profile=a", "x.py", "--profile", "b"], "b"),
        (["--profile"], "before"),
        (["--profile=", "--profiles", "c"], "before"),
    ],
)
def test_the_last_profile_before_the_command_counts(words: list[str], profile: str) -> None:
    assert bash('profile=before; find_option "${@:2}"; echo "$profile"', *words) == f"{profile}\n"


@pytest.mark.parametrize(("machine", "name"), [("x86_64", "image.sif"), ("aarch64", "image-aarch64.sif")])
def test_the_image_is_that_of_the_nodes_processor(machine: str, name: str) -> None:
    told = bash('kind=$2; uname() { echo "$kind"; }; own_image image.sif', machine)
    assert told == f"{CHECKOUT}/containers/{name}"


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("$A/x", "/one/x"),
        ("${A}$B-${A}", "/one$A-/one"),  # what a value has is not looked at again
        ("$(id) `id` $1 ~", "$(id) `id` $1 ~"),
    ],
)
def test_a_text_of_the_profile_has_the_values_of_variables_and_runs_nothing(text: str, expanded: str) -> None:
    assert bash('expand "$2"', text, env={"A": "/one", "B": "$A"}) == expanded


# --- the image's answer -------------------------------------------------------------------------------------------

ANSWER = (
    "run_dir=/r",
    "attempt=3",
    "host=a",
    "host=b c",
    "line=0",
    "line=40",
    "launch=--x=1 2",
    "run=--bind",
)
SHOW = """
printf '<%s>' "$run_dir" "$attempt" "${hosts[@]}" - "${host_lines[@]}" - ${launch_words[@]+"${launch_words[@]}"} \
    - ${task[@]+"${task[@]}"} - "${APPTRAIN_RUN_DIR-}"
"""


def test_what_the_image_says_is_set_as_it_stands(tmp_path: Path) -> None:
    said(tmp_path, "answer", *ANSWER, "export=APPTRAIN_RUN_DIR=/r s", "asked=143", "status=7", "say=no luck")
    told = bash(
        f'handover_dir=$2; read_answer answer; {SHOW} printf "<%s>" "$verdict_for" "$status" "${{lines[@]}}"',
        tmp_path,
    )
    assert told == "</r><3><a><b c><-><0><40><-><--x=1 2><-><--bind><-></r s><143><7><say=no luck>"


@pytest.mark.parametrize("there", [False, True])
def test_without_an_answer_nothing_is_set(there: bool, tmp_path: Path) -> None:
    if there:
        (tmp_path / "answer").touch()
    told = bash('handover_dir=$2; status=7; read_answer answer || echo "none $status"', tmp_path)
    assert told == "none \n"


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        *(
            (f"attempt={text}", "must be a number")
            for text in ("", "x", "-1", "01", "1.5", "a[$(id)]", "9" * 16)
        ),
        *((f"{name}=x", "must be a number") for name in ("status", "stop_at", "end_at", "line")),
        *((f"stage_{name}=x", "must be a number") for name in ("bytes", "needs", "least")),
        ("export=APPTRAIN_x=1", "no such variable"),
        ("export=PATH=/x", "the image says export, which means nothing here"),
        (
            "nothing=1",
            "the image says nothing, which means nothing here: it is of another version: make image",
        ),
    ],
)
def test_an_answer_that_cannot_be_is_refused(entry: str, why: str, tmp_path: Path) -> None:
    assert why in bash("handover_dir=$2; read_answer answer", said(tmp_path, "answer", entry), status=64)


def test_a_second_answer_takes_the_place_of_the_first(tmp_path: Path) -> None:
    """A node was left out: the image is asked again, with what the user gave."""
    said(
        tmp_path,
        "answer",
        *ANSWER,
        "export=APPTRAIN_RUN_DIR=/r",
        "start=--x",
        "plan=p",
        "chain=c",
        "each_node=e",
    )
    said(tmp_path, "second", "run_dir=/s", "attempt=4", "host=a", "line=0")
    told = bash(
        f"""
        handover_dir=$2 given_options=("APPTRAIN_ARGS=-- 'a b'")
        read_answer answer
        ask_image() {{ read_answer second; echo "$* $APPTRAIN_ARGS"; }}
        begin_attempts() {{ :; }}
        prepare_again 1 2
        {SHOW}
        echo " ${{#start_words[@]}}${{#plan_words[@]}}${{#chain_words[@]}}${{#each_node[@]}}"
        """,
        tmp_path,
    )
    assert told == "1 2 -- 'a b'\n</s><4><a><-><0><-><-><-><> 0000\n"


@pytest.mark.parametrize(
    ("ended", "asked", "warned", "stops", "follows", "status"),
    [
        ("0", "", "", False, "end", "1"),
        ("7", "", "yes", True, "end", "7"),
        ("0", "", "yes", False, "requeue", "1"),
        ("0", "", "", True, "requeue", "1"),
        ("0", "143", "yes", True, "end", "143"),
    ],
)
def test_if_the_image_does_not_say_what_follows_only_a_planned_end_goes_on(
    ended: str, asked: str, warned: str, stops: bool, follows: str, status: str, tmp_path: Path
) -> None:
    if stops:
        (tmp_path / "stop").touch()
    told = bash(
        """
        handover_dir=$2 run_dir=$2 status=$3 asked_to_end=$4 warned=$5 profile='' APPTRAIN_IMAGE=/i.sif
        told_of_job() { :; }
        run_in_image() { said='FATAL: no luck'; }
        conclude
        echo "$follows $status ${lines[*]}"
        """,
        *(tmp_path, ended, asked, warned),
    )
    say = f"say=the image does not say what follows (FATAL: no luck): ended with status {asked or ended}"
    assert told == f"{follows} {status} {say}\n"


# --- host/staging.sh ----------------------------------------------------------------------------------------------


def test_a_node_has_a_copy_only_if_it_says_so_itself(tmp_path: Path) -> None:
    """A node that could not have one stays so."""
    told = bash(
        r"""
        handover_dir=$2 hosts=(a b c d e) states=() whys=()
        on_nodes() { printf '%s\n' '0 have' '1 unfit no disk' '2 gone' '03 have' '9 have' 'x have' '4 room'; }
        look_at_nodes 5 look
        on_nodes() { printf '%s\n' '4 have' '1 have' '0 unfit its copy is not whole'; }
        for rank in 0 1 2 3 4; do echo "${states[rank]} ${whys[rank]}"; done
        look_at_nodes 5 check
        echo "${states[*]}"
        """,
        tmp_path,
    )
    never = "unfit it did not answer"
    assert told.splitlines() == [
        "have ",
        "unfit no disk",
        never,
        never,
        "room ",
        "unfit unfit unfit unfit have",
    ]


@pytest.mark.parametrize(
    ("by_name", "least", "asked", "is_enough"),
    [
        ("yes", 3, "have room", True),
        ("yes", 4, "have room", False),
        ("yes", 2, "have", True),
        ("", 9, "room", True),
        ("", 1, "gone", False),
    ],
)
def test_one_node_is_enough_unless_the_user_asked_for_the_directory(
    by_name: str, least: int, asked: str, is_enough: bool
) -> None:
    script = (
        "states=(have unfit have room) stage_by_name=$2 stage_least=$3; if has_enough $4; then echo yes; fi"
    )
    assert bash(script, by_name, least, asked) == "yes\n" * is_enough


@pytest.mark.parametrize(
    ("count", "told"),
    [
        (2, "n0 (full), n1 (full)"),
        (8, ", ".join(f"n{at} (full)" for at in range(8))),
        (10, ", ".join(f"n{at} (full)" for at in range(8)) + " and 2 more"),
    ],
)
def test_of_many_nodes_without_a_copy_some_are_named(count: int, told: str) -> None:
    script = 'for ((i = 0; i < $2; i++)); do hosts+=("n$i"); whys+=(full); done; name_nodes "${!hosts[@]}"'
    assert bash(script, count) == told
