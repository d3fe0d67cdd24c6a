"""What qsub is asked for, what a job of PBS is told by it, and how qstat tells of one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from entrypoint.batch import login as any_login
from entrypoint.batch import native
from entrypoint.batch.login import JobRequest, Wish
from entrypoint.batch.native import NativeOption
from entrypoint.batch.pbs import login, options, qstat, qsub_environment
from entrypoint.core.errors import BadInput
from entrypoint.plan.profile import Container, Nodes, Profile, Request, Stage

NODES = Nodes(gpus=4, cpus=48, memory_gib=400)


def site(nodes: Nodes = NODES, **request: Any) -> Profile:
    return Profile(scheduler="pbs", nodes=nodes, request=Request(**request))


# --- variables ----------------------------------------------------------------------------------------------


def test_a_job_is_told_our_variables_what_the_profile_names_and_what_is_asked_for(tmp_path: Path) -> None:
    env = {
        "APPTRAIN_DEVICE": "cpu", "APPTRAIN_PASS": "MINE W_*", "MINE": "1", "W_A": "2", "W_TOKEN": "hush", "OTHER": "x",
        "SCRATCH": "/s", "HOME": "/h", "USER": "u", "DATA": "/d", "SW": "/w", "FAST": "/f",
    }  # fmt: skip
    profile = replace(
        site(stop_before=60),
        scratch="${SCRATCH}/$USER",
        container=Container(
            module_paths=("$SW/modules",), binds=("$DATA:/data", "$NOT_SET"), program="$HOME/bin/apptainer"
        ),
        stage=Stage(to="$FAST"),
    )
    told = qsub_environment.needed(profile, "lab", env, tmp_path)
    assert told == {
        "APPTRAIN_DEVICE": "cpu", "APPTRAIN_PASS": "MINE W_*", "MINE": "1", "W_A": "2", "SCRATCH": "/s", "DATA": "/d", "SW": "/w", "FAST": "/f",
        "APPTRAIN_STOP_BEFORE": "60", "APPTRAIN_PROFILE": "lab", "APPTRAIN_HOME": str(any_login.CHECKOUT),
    }  # fmt: skip
    own = qsub_environment.needed(
        site(stop_before=60), "x", {"APPTRAIN_STOP_BEFORE": "9"}, any_login.CHECKOUT
    )
    assert own == {"APPTRAIN_STOP_BEFORE": "9", "APPTRAIN_PROFILE": "x"}
    assert qsub_environment.needed(site(), "x", {}, any_login.CHECKOUT) == {"APPTRAIN_PROFILE": "x"}


def test_a_secret_that_is_asked_for_by_its_name_is_refused() -> None:
    with pytest.raises(BadInput, match=r"^--pass with W_TOKEN: qstat -f would show its value to others: "):
        qsub_environment.asked_for({"APPTRAIN_PASS": "NOT_SET W_TOKEN", "W_TOKEN": "hush"})


def test_arguments_stand_in_a_variable_if_qsub_carries_them_else_in_a_file(tmp_path: Path) -> None:
    assert qsub_environment.arguments((), tmp_path) == ({}, None)
    assert qsub_environment.arguments(("--", "my.py", "a"), tmp_path) == (
        {"APPTRAIN_ARGS": "-- my.py a"},
        None,
    )
    told, file = qsub_environment.arguments(("--", "a,b"), tmp_path)
    assert file is not None
    assert told == {"APPTRAIN_ARGS_FILE": str(file)}
    assert (file.parent, len(file.name)) == (tmp_path / "runs/arguments", 16)
    assert qsub_environment.arguments(("--", "a,b"), tmp_path) == (told, file)
    assert qsub_environment.arguments(("--", "a,c"), tmp_path)[1] != file


@pytest.mark.parametrize(
    ("names", "lines"),
    [
        ("", []),
        ("NCCL_DEBUG", ["qsub does not carry NCCL_DEBUG: --pass 'NAME PREFIX_*' does"]),
        ("NCCL_A NCCL_B NCCL_C", ["qsub does not carry NCCL_A, NCCL_B, NCCL_C: --pass 'NAME PREFIX_*' does"]),
        ("NCCL_D NCCL_C NCCL_B NCCL_A", ["qsub does not carry NCCL_A, NCCL_B, NCCL_C and 1 more: --pass 'NAME PREFIX_*' does"]),
        ("HF_TOKEN NCCL_A", ["qsub does not carry NCCL_A: --pass 'NAME PREFIX_*' does", "qsub does not carry HF_TOKEN: put NAME=VALUE into a file of mode 600, and give --secrets FILE"]),
        ("APPTRAIN_DEVICE USER TERM MINE CUDA_VISIBLE_DEVICES", []),
    ],
)  # fmt: skip
def test_what_would_reach_ranks_elsewhere_and_is_not_carried_is_told(names: str, lines: list[str]) -> None:
    env = dict.fromkeys(names.split(), "x")
    assert qsub_environment.not_carried({**env, "NCCL_GIVEN": "1"}, {"NCCL_GIVEN": "1"}) == lines


def test_variables_of_the_users_own_list_have_values_or_are_set_here() -> None:
    assert qsub_environment.given(["A=1,B", "A=,C=x=y"], {"B": "b"}) == {"A": "", "B": "b", "C": "x=y"}
    for text, said in (
        ("A=1,", "-v : give NAME or NAME=VALUE, and no quotes and commas in a VALUE"),
        ("1A=x", "-v 1A=x: give NAME or NAME=VALUE, and no quotes and commas in a VALUE"),
        ("B", "-v B: B is not set here: give B=VALUE"),
        ("APPTRAIN_ARGS_FILE=x", "-v APPTRAIN_ARGS_FILE: give its words to submit: options, -- and CMD"),
        ("HF_TOKEN=x", "-v with HF_TOKEN: qstat -f would show its value to others: "),
    ):
        with pytest.raises(BadInput) as refused:
            qsub_environment.given([text], {})
        assert str(refused.value).startswith(said)


def test_each_bind_has_a_variable_of_its_own() -> None:
    assert qsub_environment.listed({"B": "2", "A": "1"}) == "A=1,B=2"
    assert (
        qsub_environment.listed({"APPTRAIN_BIND": "/a\n\n/b\n/c"})
        == "APPTRAIN_BIND=/a,APPTRAIN_BIND_2=/b,APPTRAIN_BIND_3=/c"
    )
    assert qsub_environment.listed({"APPTRAIN_BIND": ""}) == "APPTRAIN_BIND="
    for value in ("a,b", "a'b", 'a"b', "a\\b", "a\nb"):
        with pytest.raises(BadInput) as refused:
            qsub_environment.listed({"A": value})
        assert str(refused.value).startswith(f"A={value!r}: qsub -v carries no commas, quotes, ")


# --- the request --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("profile", "wish", "words"),
    [
        (site(), Wish(nodes=2, gpus=4), "-l select=2:ncpus=48:ngpus=4:mem=400gb -l place=scatter"),
        (site(), Wish(nodes=1, gpus=1), "-l select=1:ncpus=12:ngpus=1:mem=100gb -l place=scatter"),
        (site(), Wish(nodes=2, gpus=0), "-l select=2:ncpus=1:mem=1gb -l place=scatter"),
        (site(Nodes(gpus=0, cpus=4)), Wish(nodes=2), "-l select=2:ncpus=4 -l place=scatter"),
        (site(form="totals"), Wish(nodes=3, gpus=2), "-l ncpus=72 -l ngpus=6 -l mem=600gb"),
        (site(nodes_only=True), Wish(nodes=2, gpus=4), "-l select=2 -l place=scatter"),
        (site(cpus="none"), Wish(nodes=2, gpus=4), "-l select=2:ngpus=4:mem=400gb -l place=scatter"),
        (site(memory="none"), Wish(nodes=2, gpus=4), "-l select=2:ncpus=48:ngpus=4 -l place=scatter"),
        (site(Nodes(), chunk=("a=b", "c=d")), Wish(nodes=2), "-l select=2:a=b:c=d -l place=scatter"),
        (site(Nodes()), Wish(nodes=2, time="90", partition="q", account="a"), "-l select=2 -l place=scatter -l walltime=01:30:00 -q q -A a"),
        (site(Nodes(), account_option="-P"), Wish(nodes=2, account="a"), "-l select=2 -l place=scatter -P a"),
    ],
)  # fmt: skip
def test_a_request_is_in_chunks_or_in_totals(profile: Profile, wish: Wish, words: str) -> None:
    assert login._words(profile, wish) == words.split()


def test_the_line_has_one_list_of_variables_and_the_users_own_win(tmp_path: Path) -> None:
    wish = Wish(
        nodes=2, arguments=("--", "my.py"), options=("-v", "A=1", "-N", "x", "-v", "APPTRAIN_PROFILE=mine")
    )
    made = login.submission(
        site(Nodes()), "lab", wish, {"HOME": "/h", "APPTRAIN_ARGS": "old"}, any_login.CHECKOUT
    )
    assert made.words == [
        *("qsub", "-l", "select=2", "-l", "place=scatter", "-N", "x"),
        *("-v", "A=1,APPTRAIN_ARGS=-- my.py,APPTRAIN_PROFILE=mine", "pbs/multinode.pbs"),
    ]
    assert (dict(made.env), made.file) == ({"HOME": "/h", "APPTRAIN_PROFILE": "mine", "A": "1"}, None)
    keeps = login.submission(
        site(Nodes()), "lab", Wish(nodes=2), {"APPTRAIN_ARGS": "old"}, any_login.CHECKOUT
    )
    assert keeps.words[-2] == "APPTRAIN_ARGS=old,APPTRAIN_PROFILE=lab"
    assert (
        login.submission(site(Nodes()), "lab", wish, {}, tmp_path).words[-1]
        == f"{any_login.CHECKOUT}/pbs/multinode.pbs"
    )


def test_what_is_not_carried_is_told_unless_all_is() -> None:
    env = {"NCCL_DEBUG": "INFO"}
    for words, said in (((), ["qsub does not carry NCCL_DEBUG: --pass 'NAME PREFIX_*' does"]), (("-V",), [])):
        made = login.submission(site(Nodes()), "lab", Wish(nodes=2, options=words), env, any_login.CHECKOUT)
        assert list(made.said) == said
    with pytest.raises(BadInput, match=r"^-V with HF_TOKEN: "):
        login.submission(
            site(Nodes()), "lab", Wish(nodes=2, options=("-V",)), {"HF_TOKEN": "x"}, any_login.CHECKOUT
        )


@pytest.mark.parametrize("word", ["ncpus=4", "ngpus=1", "mem=9gb", "mpiprocs=2", "ompthreads=1"])
def test_a_size_beside_a_select_is_refused_and_in_totals_taken(word: str) -> None:
    wish = Wish(nodes=2, options=("-l", word))
    with pytest.raises(BadInput) as refused:
        login._asked(site(Nodes()), wish)
    assert str(refused.value) == (
        f"-l {word}: qsub refuses it beside -l select=2: say what each node has in that: -l select=N:{word}"
    )
    asked, _ = login._asked(site(Nodes(), form="totals"), wish)
    assert native.words(asked) == ["-l", word]


@pytest.mark.parametrize("others", [(), ("-l", "nodes=2:ppn=4")])
def test_a_place_without_a_select_is_refused(others: tuple[str, ...]) -> None:
    totals, place = site(form="totals"), ("-l", "walltime=1:00:00,place=scatter")
    with pytest.raises(BadInput) as refused:
        login._asked(totals, Wish(nodes=2, gpus=4, options=(*others, *place)))
    assert str(refused.value) == (
        "-l place=scatter: qsub refuses it without select, and this request has none: leave it out, or give "
        "-l select=N:... too"
    )
    asked, _ = login._asked(totals, Wish(nodes=2, gpus=4, options=("-l", "select=2:ncpus=4", *place)))
    assert native.words(asked)[-2:] == ["-l", "place=scatter"]


@pytest.mark.parametrize(
    ("new", "old", "replaces"),
    [
        ("-N x", "-N y", True), ("-N x", "-M y", False), ("-v A", "-v B", False),
        ("-l mem=1", "-l mem=2", True), ("-l mem=1", "-l ncpus=2", False), ("-l select=1", "-l ncpus=2", True),
        ("-l nodes=1", "-l select=2", True), ("-l nodes=1", "-l place=x", True), ("-l select=1", "-l place=x", False),
        ("-l mem=1", "-l select=2", False), ("-W a=1", "-W a=2", True), ("-W a=1", "-W b=2", False),
        ("-l select=1", "-l storage=x", False), ("-W select=1", "-W mem=2", False),
    ],
)  # fmt: skip
def test_a_resource_gives_way_to_the_same_and_sizes_to_a_whole_request(
    new: str, old: str, replaces: bool
) -> None:
    one, other = (NativeOption(text.split()[0], text.split()[1], tuple(text.split())) for text in (new, old))
    assert options.replaces(one, other) is replaces
    assert not options.replaces(NativeOption("", "", ("x",)), NativeOption("", "", ("x",)))


def test_resources_that_commas_join_are_told_apart_if_they_surely_are() -> None:
    typed = ["-la=1,b=2", "-l", "c=1", "-l", "d=1,2", "-l", "e='1,f=2'", "-W", "g=1,h=2"]
    found = options.separated(native.read_all(typed, options.TABLE))
    assert native.words(found) == ["-l", "a=1", "-l", "b=2", *typed[1:]]


# --- what it gets, and how it goes --------------------------------------------------------------------------


def request(*words: str, chunk: tuple[str, ...] = ()) -> JobRequest:
    profile = site(chunk=chunk)
    return JobRequest(
        profile=profile, nodes=2, gpus=4, cpus=8, time="", warns=0, words=words, arguments=(), image=Path("i")
    )


def test_further_words_change_the_time_or_leave_open_what_is_granted() -> None:
    for words, time in (
        (("-l", "walltime=90"), "00:01:30"),
        (("-lwalltime=1:00:00",), "1:00:00"),
        (("-N", "walltime=9"), ""),
    ):
        found, unclear = login.granted(request(*words))
        assert (found.time, unclear) == (time, "")
    sizes = ("select=3:a=b", "ncpus=1", "ngpus=1", "nodes=2")
    for word in (*sizes, "place=pack", "place=free:excl", "place=group=rack", "place=vscatter"):
        assert login.granted(request("-l", word))[1] == f"-l {word}"
        assert login.granted(request("-l", f"mem=1gb,{word}"))[1] == f"-l {word}"
    for word in ("mem=1gb", "place=scatter", "place=scatter:excl:group=rack", "place=excl:scatter"):
        assert login.granted(request("-l", word))[1] == ""
    assert login.granted(replace(request("-l", "place=excl"), nodes=1))[1] == "", "one chunk shares no host"


def test_a_chunk_has_as_many_slots_as_it_says_else_one() -> None:
    assert login.slots(request()) == (1, 1)
    assert login.slots(request(chunk=("a=b", "mpiprocs=4"))) == (4, 4)
    assert login.slots(request(chunk=("mpiprocs=all",))) == (1, 1), "which qsub refuses"


def test_the_job_scripts_own_time_is_found() -> None:
    assert login.limits("#!/bin/bash\n#PBS -l walltime=01:00:00\n") == ("01:00:00", 0)
    assert login.limits("##PBS -l walltime=1\n #PBS -l walltime=2\n") == ("", 0)


@pytest.mark.parametrize(
    ("told", "status"),
    [
        ("0", 0),
        ("3", 3),
        ("255", 255),
        ("256", 128),
        ("271", 143),
        ("265", 137),
        ("-1", 1),
        ("", 1),
        ("x", 1),
        (None, 1),
    ],
)
def test_the_status_of_a_job_is_that_of_its_script_or_of_its_signal(told: str | None, status: int) -> None:
    assert login.exit_status({} if told is None else {"Exit_status": told}) == status


def test_what_qstat_says_is_read_with_its_broken_lines() -> None:
    text = "Job Id: 7.s\n    Job_Name = a = b\n    Variable_List = A=1,B=x,\n\ty,C=\n    empty\n"
    found = qstat.attributes(text)
    assert found == {"Job_Name": "a = b", "Variable_List": "A=1,B=x,y,C="}
    assert qstat.variables(found) == {"A": "1", "B": "x,y", "C": ""}
    assert (qstat.variables({}), qstat.variables({"Variable_List": "lost,A=1"})) == ({}, {"A": "1"})


QSTAT = "Job Id: 7.s\n    Job_Name = my job\n    Job_Owner = u@h\n    job_state = {}\n"


@pytest.mark.parametrize(
    ("text", "state", "output", "late", "status"),
    [
        ("Q\n    comment = not enough", "queued (not enough)", None, None, None),
        ("Q", "queued", None, None, None),
        ("R\n    comment = runs", "running", None, None, None),
        ("H", "held", None, None, None),
        ("X", "X", None, None, None),
        ("F\n    Exit_status = 3\n    Output_Path = h:/o/x.o7", "over", None, "/o/x.o7", 3),
        ("C\n    Exit_status = 0", "over", None, None, 0),
        ("R\n    Variable_List = PBS_O_WORKDIR=/w,APPTRAIN_PROFILE=/no", "running", "/w/runs/my_job-7/job.log", None, None),
        ("R\n    Variable_List = PBS_O_WORKDIR=/w,APPTRAIN_RUN_DIR=r", "running", "/w/r/job.log", None, None),
        ("R\n    Variable_List = PBS_O_WORKDIR=/w,APPTRAIN_RUN_DIR=/r,APPTRAIN_ARGS=--run-dir s --stage off", "running", "/w/s/job.log", None, None),
        ("R\n    Variable_List = PBS_O_WORKDIR=/w,APPTRAIN_ARGS=--frob", "running", None, None, None),
    ],
)  # fmt: skip
def test_a_job_is_told_with_where_its_output_is(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    state: str,
    output: str | None,
    late: str | None,
    status: int | None,
) -> None:
    told = tmp_path / "told"
    told.write_text(QSTAT.format(text))
    (tmp_path / "qstat").write_text(
        f'#!/bin/sh\n[ "$1" = -f ] && [ "$2" = 7.s ] && while read -r line; do echo "$line"; done <{told}\n'
    )
    (tmp_path / "qstat").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = login.ask("7.s", None)
    assert found is not None
    assert (found.state, found.status) == (state, status)
    assert [str(path) for path in found.output] == ([output] if output else [])
    assert str(found.late or "") == (late or "")
    assert login.ask("8.s", None) is None
