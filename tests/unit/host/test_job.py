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
        (["--profile=a", "x.py", "--profile", "b"], "a"),
        (["--device", "cpu", "x.py", "--profile=b"], "before"),
        (["--bind", "x.py:y.py", "--bind=x.py", "--profile", "b", "--", "x.py"], "b"),
        (["--bind", "x.py", "--profile", "b", "--profile=/dev/null", "--cpu"], "/dev/null"),
        (["--dry-run", "x.py", "--profile", "b"], "before"),
        (["--profile", "a", "--dry-run", "x.py", "--profile=b"], "a"),
        (["--profile", "a", "-m", "train.hello", "--profile", "b"], "a"),
        (["--profile"], "before"),
        (["--profile=", "--profiles", "c"], "before"),
    ],
)
def test_the_last_profile_before_the_command_counts(words: list[str], profile: str) -> None:
    assert bash('profile=before; find_option "${@:2}"; echo "$profile"', *words) == f"{profile}\n"


@pytest.mark.parametrize(
    ("words", "profile"),
    [
        ("--profile=a -- x.py", "a"),  # there is none: it is refused by this name later
        ("--profile a\nx.py", "a"),
        ("--profile 'a' -- x.py", "own"),  # the image knows more of quotes, and says which it is
        ("--profile 'FOLDER/is.yaml' x.py", "FOLDER/is.yaml"),
        ("--device cpu -- --profile a", "own"),
        ("", "own"),
    ],
)
def test_the_profile_of_apptrain_args_wins_over_that_of_the_environment(
    words: str, profile: str, tmp_path: Path
) -> None:
    (tmp_path / "is.yaml").touch()
    args = {"APPTRAIN_ARGS": words.replace("FOLDER", str(tmp_path)), "APPTRAIN_PROFILE": "own"}
    told = bash('profile=$APPTRAIN_PROFILE; find_option_of_environment; printf %s "$profile"', env=args)
    assert told == profile.replace("FOLDER", str(tmp_path))


@pytest.mark.parametrize(
    ("content", "profile"),
    [
        (b"--profile\0a b.yaml\0x.py\0", "a b.yaml"),
        (b"--profile\0c\0x.py\0--profile\0d\0", "c"),
        (None, "of-args"),
    ],
)
def test_words_of_a_file_are_taken_whole_and_in_place_of_apptrain_args(
    content: bytes | None, profile: str, tmp_path: Path
) -> None:
    """None: the file cannot be read."""
    file = tmp_path / "words"
    if content is not None:
        file.write_bytes(content)
    args = {"APPTRAIN_ARGS": "--profile of-args", "APPTRAIN_ARGS_FILE": str(file)}
    assert bash('profile=""; find_option_of_environment; printf %s "$profile"', env=args) == profile


IMAGE_SAYS = """
use_site() { echo "site of $profile"; }
begin_attempts() { echo begins; }
ask_image() { profile=$1; shift; run_dir=${1-}; }
"""


def test_the_site_is_used_again_if_the_image_finds_another_profile() -> None:
    script = "profile=a; ask_image() { run_dir=${run_dir:-$known}; known=/r profile=b; }; known=''; prepare"
    assert bash(IMAGE_SAYS + script) == "site of a\nsite of b\nbegins\n"


@pytest.mark.parametrize("found", ["a", "b"])
def test_an_image_that_finds_no_profile_to_stay_with_is_refused(found: str) -> None:
    told = bash(IMAGE_SAYS + 'profile=a; prepare "$2"', found, status=64)
    assert told == (f"apptrain: the image finds another profile ({found}) each time: give --profile\n")


HOST = os.uname().nodename


@pytest.mark.parametrize(
    ("state", "answers", "status", "told"),
    [
        ("status=0 said='a note'", True, 0, "a note"),
        (
            "status=0 said='a note'",
            False,
            1,
            f"apptrain: the image /i.sif does not start on {HOST} (status 0): a note",
        ),
        (
            "status=255 said=''",
            True,
            255,
            f"apptrain: the image /i.sif does not start on {HOST} (status 255): it says nothing",
        ),
        ("status=64 said='apptrain: --x: no such option'", True, 64, "apptrain: --x: no such option"),
        ("status=0 said='a note' asked_to_end=143", True, 143, ""),
        (
            "status=64 said=\"apptrain: argument COMMAND: invalid choice: 'prepare' (choose)\"",
            False,
            64,
            f"apptrain: the image /i.sif is of another version than the checkout {CHECKOUT}: make image",
        ),
        (
            'status=64 said="apptrain: $handover_dir/ask cannot be read (No such file or directory): the job"',
            False,
            64,
            f"apptrain: the image /i.sif is of another version than the checkout {CHECKOUT}: make image",
        ),
    ],
)
def test_what_becomes_of_a_job_is_what_the_image_says(
    state: str, answers: bool, status: int, told: str, tmp_path: Path
) -> None:
    if answers:
        said(tmp_path, "answer", "run_dir=/r")
    script = f"""
        handover_dir=$2 APPTRAIN_IMAGE=/i.sif profile=''
        ask_site() {{ :; }}
        run_in_image() {{ "${{@:3}}"; {state}; printf '%s\\n' "$said" >"$handover_dir/said"; }}
        {{ ask_image; }} 2>&1
        """
    ended = subprocess.run(
        ["bash", "-c", START + script, "bash", str(CHECKOUT), str(tmp_path)],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stdout.splitlines()[-1:], ended.stderr) == (
        status,
        [told] if told else [],
        "",
    )
    assert (tmp_path / "environment").stat().st_mode & 0o777 == 0o600


def test_a_job_without_a_directory_of_its_own_is_refused_unless_it_is_to_end() -> None:
    script = "handover_dir=/nowhere profile='' APPTRAIN_IMAGE=/i.sif; ask_site() { :; }; "
    script += 'run_in_image() { "${@:3}"; status=0; }; '
    assert bash(script + "ask_image", status=64) == (
        "apptrain: the job's own directory /nowhere cannot be written: set TMPDIR to one of this node that has room\n"
    )
    assert bash(script + "asked_to_end=143; ask_image", status=143) == ""


ASKED = """
use_site() { echo "site of $profile"; }
begin_attempts() { :; }
ask_site() { echo asked; facts+=(told=job); }
run_in_image() { echo "$1 starts"; "${@:3}"; status=0 said=''; echo "${facts[@]}"; }
read_answer() { read -r profile run_dir <<<"$answer"; }
APPTRAIN_IMAGE=/i.sif
"""


def test_while_the_image_starts_with_the_profiles_modules_the_scheduler_is_asked(tmp_path: Path) -> None:
    script = ASKED + 'handover_dir=$2 answer="a /run" profile=a; prepare; echo "$profile $run_dir"'
    assert bash(script, tmp_path) == "site of a\nprepare starts\nasked\ntold=job\na /run\n"


def test_a_job_that_is_prepared_once_more_asks_the_scheduler_no_second_time(tmp_path: Path) -> None:
    (tmp_path / "ask").write_text("of the time before")
    script = (
        ASKED
        + """handover_dir=$2 answer="a /run" profile=a run_dir=/run facts=(told=job left_out=n1)
        run_in_image() { [[ ! -e $handover_dir/ask ]] && "${@:3}"; status=0 said=''; }
        prepare_again; tr '\\0' '\\n' <"$handover_dir/ask" | grep -e told -e left"""
    )
    assert bash(script, tmp_path) == "told=job\nleft_out=n1\n"


def test_what_is_started_in_the_image_does_not_outlive_a_job_that_is_refused_meanwhile(
    tmp_path: Path,
) -> None:
    """`sleep` would hold what the test reads open for longer than the test waits."""
    script = """
        handover_dir=$2 mark='' stage_left='' cutter=kill asked_to_end=''
        trap clean_up EXIT
        begin '' sleep 100
        refuse job-dir-unwritable "no room"
        """
    assert bash(script, tmp_path / "hand", status=64) == "apptrain: no room\n"


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
    script = """
        handover_dir=$2 status=7 follows=again verdict_for=143 lines=(say=x)
        read_answer answer || echo "none <$status><$follows><$verdict_for><${lines[*]}>"
        """
    assert bash(script, tmp_path) == "none <><><><>\n"


def test_a_verdict_takes_nothing_from_an_earlier_one(tmp_path: Path) -> None:
    said(tmp_path, "first", "asked=143", "status=7", "follows=again", "say=x")
    said(tmp_path, "second", "status=1", "follows=end")
    script = """
        handover_dir=$2; read_answer first; read_answer second
        echo "<$status><$follows><$verdict_for><${lines[*]}>"
        """
    assert bash(script, tmp_path) == "<1><end><><>\n"


def test_what_the_image_says_is_printed_on_the_stream_that_it_names() -> None:
    script = "lines=(say=one tell=two=2 say=three); say_lines"
    assert bash(script) == "apptrain: two=2\n"
    assert bash(f"{script}; exit 3", status=3) == "apptrain: one\napptrain: three\n"


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
        ask_image() {{ forget_answer; read_answer second; echo "$* $APPTRAIN_ARGS"; }}
        begin_attempts() {{ :; }}
        prepare_again 1 2
        {SHOW}
        echo " ${{#start_words[@]}}${{#plan_words[@]}}${{#chain_words[@]}}${{#each_node[@]}}"
        """,
        tmp_path,
    )
    assert told == "1 2 -- 'a b'\n</s><4><a><-><0><-><-><-><> 0000\n"


@pytest.mark.parametrize("attempt", [None, "", "2"])
def test_the_image_is_asked_in_a_file_of_the_users_own(attempt: str | None, tmp_path: Path) -> None:
    script = """
        handover_dir=$2 profile=/p.yaml APPTRAIN_IMAGE=/i.sif is_batch=yes
        facts=("told=a
b" left_out=n1)
        write_request asked=143 "warned="
        echo "$$"
        """
    pid = bash(script, tmp_path, env={} if attempt is None else {"APPTRAIN_ATTEMPT": attempt}).strip()
    asked = tmp_path / "ask"
    assert asked.stat().st_mode & 0o777 == 0o600
    assert asked.read_text().split("\0") == [
        *(
            "scheduler=slurm",
            f"home={CHECKOUT}",
            "image=/i.sif",
            "profile=/p.yaml",
            "batch=yes",
            f"script={pid}",
        ),
        *(f"attempt={attempt or ''}", "told=a\nb", "left_out=n1", "asked=143", "warned=", ""),
    ]


IN_IMAGE = """
mkdir "$2/containers"
printf '#!/bin/sh\n%s\n' "$3" >"$2/containers/run.sh"
chmod 700 "$2/containers/run.sh"
APPTRAIN_HOME=$2 APPTRAIN_IMAGE='/i 1.sif' handover_dir=$2 container_words=(--option --x)
interrupt() { echo "interrupted $1"; }
"""


def test_the_image_is_run_with_the_hosts_directories_and_what_it_says_is_one_line(tmp_path: Path) -> None:
    does = "printf '<%s>' \"$@\"; echo; echo two >&2; exit 7"
    told = bash(f'{IN_IMAGE} run_in_image conclude 60; echo "$status|$said|$cutter|$child"', tmp_path, does)
    words = ["--quiet", "--all-of-host", "--tell", f"{tmp_path}/apptainer", "--option", "--x", "/i 1.sif"]
    words += ["python", "-P", "-m", "entrypoint", "conclude", str(tmp_path)]
    assert told == f"7|{''.join(f'<{word}>' for word in words)} two|interrupt|\n"


def test_what_apptainer_has_said_before_the_job_goes_to_all_that_is_run_in_the_image(tmp_path: Path) -> None:
    does = 'shift 2; printf %s "9:1 apptainer 1.4 /a b" >"$2"; [ "$3" != --known ] || printf "<%s>" "$3" "$4"'
    script = f'''{IN_IMAGE} run_in_image prepare 60
        run_in_image conclude 60; echo "$said"
        outcome=o attempt=0 dry_run=yes begin_attempts; printf '<%s>' "${{task[@]:3:2}}"'''
    assert (
        bash(script, tmp_path, does)
        == "<--known><9:1 apptainer 1.4 /a b>\n" + "<--known><9:1 apptainer 1.4 /a b>"
    )


def test_of_what_the_image_says_the_last_2000_bytes_are_kept(tmp_path: Path) -> None:
    does = "printf 'x%.0s' $(seq 3000); echo end"
    told = bash(f'{IN_IMAGE} run_in_image prepare 60; echo "$said"', tmp_path, does)
    assert told == "x" * 1996 + "end\n"


def test_an_image_that_does_not_answer_in_time_is_ended(tmp_path: Path) -> None:
    assert bash(f'{IN_IMAGE} run_in_image prepare 0.2; echo "$status"', tmp_path, "exec sleep 50") == "124\n"


def test_a_job_that_was_asked_to_end_meanwhile_does_not_wait_for_the_image(tmp_path: Path) -> None:
    script = """
        catch_signals
        (sleep 0.2; kill -INT $$) &
        run_in_image prepare 20
        echo "$((status == 124)) $asked_to_end"
        """
    assert bash(IN_IMAGE + script, tmp_path, "exec sleep 50") == "0 130\n"


@pytest.mark.parametrize(
    ("asked_for", "asked", "follows"),
    [("", "", "again"), ("143", "143", "again"), ("", "143", "requeue"), ("143", "130", "requeue")],
)
def test_a_verdict_counts_if_it_was_made_for_how_the_job_was_asked_to_end(
    asked_for: str, asked: str, follows: str, tmp_path: Path
) -> None:
    """Else the image is asked for another one."""
    said(tmp_path, "verdict", "status=1", "follows=again", f"asked={asked_for}")
    script = """
        handover_dir=$2 run_dir=$2 status=1 asked_to_end=$3 profile='' APPTRAIN_IMAGE=/i.sif
        told_of_job() { echo "told of it"; }
        run_in_image() { printf '%s\\0' status=3 follows=requeue >"$handover_dir/verdict"; }
        conclude
        echo "$follows"
        [[ ! -e $2/ask ]] || tr '\\0' '\\n' <"$2/ask" | tail -n 3
        """
    told = bash(script, tmp_path, asked).splitlines()
    assert told == [
        follows,
        *([f"asked={asked}", "warned=", "told=told of it"] if follows == "requeue" else []),
    ]


def test_an_attempt_begins_without_what_an_earlier_one_has_left(tmp_path: Path) -> None:
    for name in ("verdict", "over"):
        (tmp_path / name).touch()
    script = """
        handover_dir=$2 asked_to_end=$3
        start() { echo "starts $*"; }
        await() { shift; "$@"; }
        run_attempt
        """
    assert bash(script, tmp_path, "") == "starts launch\n"
    assert list(tmp_path.iterdir()) == []
    assert bash(script, tmp_path, "143") == ""


@pytest.mark.parametrize(("tells", "end", "text"), [("yes", "17", "end=17"), ("yes", "", ""), ("", "17", "")])
def test_the_stop_file_says_when_the_job_ends_if_it_goes_on_as_another(
    tells: str, end: str, text: str, tmp_path: Path
) -> None:
    script = 'run_dir=$2 tells_end=$3 at=$4; job_end() { printf %s "$at"; }; write_stop_file'
    bash(script, tmp_path, tells, end)
    (file,) = tmp_path.iterdir()
    assert (file.name, file.read_text(), file.stat().st_mode & 0o777) == ("stop", text, 0o600)


def test_a_stop_file_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    told = bash("run_dir=$2; request_stop 2>&1; request_stop 2>&1", tmp_path / "none")
    assert [line for line in told.splitlines() if line.startswith("apptrain: ")] == [
        "apptrain: warned of the end: asking the ranks to save and stop",
        *[f"apptrain: {tmp_path}/none/stop cannot be written: they are not asked"] * 2,
    ]


@pytest.mark.parametrize(
    ("status", "why", "told"),
    [
        (0, "no luck", "apptrain: the job will run again, and go on there\n"),
        (1, "no luck\\ntoday", "apptrain: slurm does not run it again (no luck today); do it yourself\n"),
        (1, "", "apptrain: slurm does not run it again (no answer); do it yourself\n"),
    ],
)
def test_a_job_that_is_to_run_again_says_whether_it_will(status: int, why: str, told: str) -> None:
    script = f"run_again() {{ printf '{why}'; return {status}; }}; by_hand='do it yourself'; go_on 2>&1"
    assert bash(script) == told


@pytest.mark.parametrize("asks", ["kill -TERM $PPID", "kill -TERM $$", "kill -TERM $PPID $$"])
def test_what_asks_for_another_run_outlives_the_end_of_this_one(asks: str) -> None:
    """As Slurm ends a run: TERM to each of its processes, before it has answered who asked. Not at once:
    `timeout` ends of a TERM that comes before it has noted its child."""
    script = f"trap '' TERM; shielded 30 bash -c 'sleep 0.3; {asks}; echo \"done $1\"; exit 7' bash 'a b' || echo $?"
    assert bash(script) == "done a b\n7\n"


def test_a_warning_that_comes_while_a_program_writes_to_a_file_is_said_all_the_same(tmp_path: Path) -> None:
    script = """
        handover_dir=$2 run_dir=$2
        catch_signals
        (sleep 0.3; kill -USR2 $$) &
        await '' write_said bash -c 'sleep 0.6; echo its own' 2>&1
        cat "$2/said"
        """
    said = "apptrain: warned of the end: asking the ranks to save and stop\n"
    assert bash(script, tmp_path) == f"{said}its own\n"
    assert (tmp_path / "stop").is_file()


def test_what_asks_for_another_run_is_killed_when_its_time_is_over() -> None:
    assert bash("shielded 0.2 sleep 60 || echo $?") == "137\n"


@pytest.mark.parametrize("ends", [True, False])
def test_the_script_waits_for_its_log_no_longer_than_it_may_take(ends: bool, tmp_path: Path) -> None:
    """A logger that does not end is killed, and the job's own directory is removed all the same."""
    (tmp_path / "own").mkdir()
    script = """
        handover_dir=$2/own
        exec 3>&1 4>&2
        (trap '' TERM; exec sleep "$3") & loggers=($!)
        if (($3 == 0)); then
            wait
        fi
        sleep() { naps=$((naps + 1)); }
        naps=0
        clean_up
        status="its own"
        if (($3)); then
            wait "${loggers[0]}" || status=$?
        fi
        echo "$naps $status"
        """
    told = bash(script, tmp_path, 0 if ends else 50)
    assert told == ("0 its own\n" if ends else "50 137\n")
    assert list(tmp_path.iterdir()) == []


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
        on_nodes() { printf '%s\n' '4 have' '1 have' '0 unfit its copy is not whole'; return 1; }
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
