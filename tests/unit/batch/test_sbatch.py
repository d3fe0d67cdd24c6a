"""What sbatch is asked for, what a job of Slurm gets, and how it is told of."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from entrypoint.batch import login as any_login
from entrypoint.batch import native
from entrypoint.batch.login import JobRequest, Wish
from entrypoint.batch.native import NativeOption
from entrypoint.batch.slurm import login, options
from entrypoint.core.errors import BadInput
from entrypoint.plan.profile import Nodes, Profile, Request

NODES = Nodes(gpus=4, cpus=48, memory_gib=400)


def site(nodes: Nodes = NODES, **request: Any) -> Profile:
    return Profile(name="lab.yaml", scheduler="slurm", nodes=nodes, request=Request(**request))


@pytest.mark.parametrize(
    ("profile", "wish", "words"),
    [
        (site(), Wish(nodes=2, gpus=4), "--nodes=2 --gpus-per-node=4 --cpus-per-task=48 --mem=400G"),
        (site(), Wish(nodes=1, gpus=1), "--nodes=1 --gpus-per-node=1 --cpus-per-task=12 --mem=100G"),
        (site(Nodes(gpus=0, cpus=8)), Wish(nodes=2, gpus=0), "--nodes=2 --cpus-per-task=8"),
        (site(Nodes(cpus=8)), Wish(nodes=2, given=("--ntasks-per-node=2",)), "--nodes=2 --cpus-per-task=4"),
        (site(Nodes(cpus=8)), Wish(nodes=2, given=("--ntasks-per-node=2",), options=("--ntasks-per-node", "3")), "--nodes=2 --cpus-per-task=2"),
        (site(Nodes(cpus=8)), Wish(nodes=2, options=("--ntasks-per-node=16",)), "--nodes=2 --cpus-per-task=1"),
        (site(Nodes(cpus=8)), Wish(nodes=2, options=("--ntasks-per-node=0",)), "--nodes=2 --cpus-per-task=8"),
        (site(Nodes(cpus=8)), Wish(nodes=2, options=("--ntasks-per-node=x",)), "--nodes=2 --cpus-per-task=8"),
        (site(Nodes(gpus=4, whole=True)), Wish(nodes=2, gpus=4), "--nodes=2 --gpus-per-node=4 --mem=0"),
        (site(Nodes(gpus=4)), Wish(nodes=2, gpus=4), "--nodes=2 --gpus-per-node=4"),
        (site(nodes_only=True), Wish(nodes=2, gpus=4), "--nodes=2"),
        (site(cpus="none"), Wish(nodes=2, gpus=4), "--nodes=2 --gpus-per-node=4 --mem=400G"),
        (site(memory="none"), Wish(nodes=2, gpus=4), "--nodes=2 --gpus-per-node=4 --cpus-per-task=48"),
        (site(memory="--mem-per-cpu"), Wish(nodes=2, gpus=4), "--nodes=2 --gpus-per-node=4 --cpus-per-task=48 --mem-per-cpu=8533M"),
        (site(memory="--mem-per-gpu"), Wish(nodes=2, gpus=4), "--nodes=2 --gpus-per-node=4 --cpus-per-task=48 --mem-per-gpu=100G"),
        (site(Nodes(), stop_before=60), Wish(nodes=2, partition="p", account="a", time="90"), "--nodes=2 --partition=p --account=a --time=90 --signal=B:USR2@60"),
    ],
)  # fmt: skip
def test_a_request_says_what_each_node_has(profile: Profile, wish: Wish, words: str) -> None:
    assert login._words(profile, wish) == words.split()


def test_the_line_is_the_script_with_its_profile_and_what_is_of_the_job(tmp_path: Path) -> None:
    env = {"A": "1", "SLURM_JOB_ID": "7", "PBS_JOBID": "7"}
    wish = Wish(
        nodes=2,
        gpus=4,
        arguments=("--", "my.py"),
        options=("-J", "x", "--nodes=3"),
        variables={"APPTRAIN_PASS": "A"},
    )
    made = login.submission(site(Nodes(gpus=4)), "lab", wish, env, any_login.CHECKOUT)
    assert made.words == [
        *("sbatch", "--gpus-per-node=4", "-J", "x", "--nodes=3"),
        *("slurm/multinode.sbatch", "--profile", "lab", "--", "my.py"),
    ]
    assert (dict(made.env), dict(made.variables), made.file) == ({"A": "1"}, {"APPTRAIN_PASS": "A"}, None)
    assert list(made.said) == ["--nodes=3 in place of --nodes=2"]
    elsewhere = login.submission(site(Nodes(gpus=4)), "lab", wish, env, tmp_path)
    assert elsewhere.words[5] == f"{any_login.CHECKOUT}/slurm/multinode.sbatch"


def test_nodes_without_gpus_are_asked_for_with_none() -> None:
    made = login.submission(site(Nodes(gpus=0)), "lab", Wish(nodes=2, gpus=0), {}, any_login.CHECKOUT)
    assert made.words[:4] == ["sbatch", "--nodes=2", "--gpus-per-node=0", "slurm/multinode.sbatch"]
    wish = Wish(nodes=2, gpus=0, options=("--gpus-per-node=1",))
    asked = login.submission(site(Nodes(gpus=0)), "lab", wish, {}, any_login.CHECKOUT)
    assert asked.words[:3] == ["sbatch", "--nodes=2", "--gpus-per-node=1"]


@pytest.mark.parametrize(
    ("profile", "words", "wrapped"),
    [
        (site(Nodes(gpus=4)), (), False),
        (site(Nodes(gpus=4)), ("--gres=gpu:2",), True),
        (site(Nodes(gpus=4)), ("--gres=nvme:2",), False),
        (site(Nodes(gpus=4)), ("--mem=1G",), False),
        (site(Nodes(gpus=4)), ("--mem-per-cpu=1G",), True),
        (site(Nodes(gpus=4)), ("--exclusive",), False),
        (site(Nodes(gpus=4)), ("--oversubscribe",), False),
        (site(Nodes(gpus=4), form="wrapped"), (), True),
        (site(Nodes(gpus=4), memory="none"), (), True),
        (site(Nodes(gpus=4), cpus="none"), (), True),
        (site(Nodes(gpus=4, whole=True), nodes_only=True), (), True),
    ],
)  # fmt: skip
def test_the_script_is_wrapped_if_its_own_lines_would_contradict(
    profile: Profile, words: tuple[str, ...], wrapped: bool
) -> None:
    wish = Wish(nodes=2, gpus=4, options=words, arguments=("--", "a b.py"))
    line = login.submission(profile, "lab", wish, {}, any_login.CHECKOUT).words
    assert line[-1].startswith("--wrap=exec bash ") is wrapped
    if wrapped:
        script = f"{any_login.CHECKOUT}/slurm/multinode.sbatch"
        assert shlex.split(line[-1].removeprefix("--wrap=exec "))[:2] == ["bash", script]
        assert line[-1].endswith("--profile lab -- 'a b.py'")


def test_what_a_site_takes_not_is_told_of_the_users_words_alone() -> None:
    wish = Wish(nodes=2, gpus=4, options=("--mem=1G", "--gres=gpu:1", "-J", "x"))
    against = "lab.yaml says that a request there names no such thing: sbatch may refuse it"
    whole = Nodes(gpus=4, whole=True)
    for profile, told in (
        (site(whole), []),
        (site(whole, memory="none"), ["--mem=1G"]),
        (site(whole, nodes_only=True), ["--mem=1G", "--gres=gpu:1"]),
    ):
        _, said = login._asked(profile, wish)
        assert [line for line in said if line.endswith(against)] == [f"{word}: {against}" for word in told]


@pytest.mark.parametrize(
    ("export", "said"),
    [
        ("ALL", ""), ("ALL,A=1", ""), ("APPTRAIN_PASS", ""), ("ALL,HF_TOKEN", ""),
        ("NONE", "--export=NONE keeps APPTRAIN_PASS from the job, which is set here: add ALL"),
        ("A,B=2", "--export=A,B=2 keeps APPTRAIN_PASS from the job, which is set here: add ALL"),
        ("ALL,HF_TOKEN=x", "--export with HF_TOKEN: sacct would show its value to others: put NAME=VALUE into a file of mode 600, and give --secrets FILE"),
    ],
)  # fmt: skip
def test_an_export_shows_no_secret_and_loses_nothing(export: str, said: str) -> None:
    wish = Wish(nodes=2, gpus=4, options=(f"--export={export}", "-J", "x"), variables={"APPTRAIN_PASS": "X"})
    if not said:
        assert f"--export={export}" in login.submission(site(), "lab", wish, {}, any_login.CHECKOUT).words
        return
    with pytest.raises(BadInput) as refused:
        login.submission(site(), "lab", wish, {}, any_login.CHECKOUT)
    assert str(refused.value) == said


@pytest.mark.parametrize(
    ("options", "env", "said"),
    [
        ("--export=ALL", {"SBATCH_EXPORT": "NONE", "APPTRAIN_IMAGE": "/x.sif"}, ""),
        ("", {"SBATCH_EXPORT": "ALL", "APPTRAIN_IMAGE": "/x.sif"}, ""),
        ("", {"SBATCH_EXPORT": "", "APPTRAIN_IMAGE": "/x.sif"}, ""),
        ("", {"SBATCH_EXPORT": "NONE", "APPTRAIN_IMAGE": "", "APPTRAIN_PROFILE": "lab", "APPTRAIN_AT_HAND": "/p", "APPTRAIN_CACHE": "/c"}, ""),
        ("", {"SBATCH_EXPORT": "NONE", "APPTRAIN_IMAGE": "/x.sif"}, "SBATCH_EXPORT=NONE keeps APPTRAIN_IMAGE from the job, which is set here: give --export=ALL"),
        ("--export=NONE", {"SBATCH_EXPORT": "ALL", "APPTRAIN_ARGS": "--device cpu"}, "--export=NONE keeps APPTRAIN_ARGS from the job, which is set here: add ALL"),
        ("", {"SBATCH_EXPORT": "ALL,HF_TOKEN=x"}, "SBATCH_EXPORT with HF_TOKEN: sacct would show its value to others: put NAME=VALUE into a file of mode 600, and give --secrets FILE"),
    ],
)  # fmt: skip
def test_the_variable_of_an_export_counts_where_there_is_no_option_and_our_variables_are_not_lost(
    options: str, env: dict[str, str], said: str
) -> None:
    wish = Wish(nodes=2, gpus=4, options=tuple(options.split()))
    if not said:
        login.submission(site(), "lab", wish, env, any_login.CHECKOUT)
        return
    with pytest.raises(BadInput) as refused:
        login.submission(site(), "lab", wish, env, any_login.CHECKOUT)
    assert str(refused.value) == said


@pytest.mark.parametrize(
    ("new", "old", "replaces"),
    [
        ("--qos=a", "-q b", True), ("--qos=a", "--mem=1", False), ("--gres=gpu:1", "--gpus-per-node=4", True),
        ("--gres=nvme", "--gpus-per-node=4", False), ("--gres=nvme", "--gres=gpu:1", False), ("--gres=gpu:2", "--gres=gpu:1", True),
        ("--tres-per-task=gpu:1", "--gpus=4", True), ("--mem-per-gpu=1", "--mem=1", True), ("--mem=1", "--cpus-per-task=1", False),
        ("--cpus-per-gpu=1", "-c 1", True), ("--exclusive", "--oversubscribe", True), ("--hold", "--exclusive", False),
        ("--array=1", "--gpus=1", False), ("--gres=x:gpux", "--gpus=1", False),
    ],
)  # fmt: skip
def test_an_option_gives_way_to_the_same_and_to_what_asks_in_another_way(
    new: str, old: str, replaces: bool
) -> None:
    (one,), (other,) = (native.read_all(text.split(), options.TABLE) for text in (new, old))
    assert options.replaces(one, other) is replaces
    assert not options.replaces(NativeOption("", "", ("x",)), NativeOption("", "", ("x",)))


@pytest.mark.parametrize(
    ("given", "joined"),
    [
        ("--gres=gpu:4 --mem=1 --gres nvme:1", "--gres=gpu:4,nvme:1 --mem=1"),
        ("--gres=gpu:4 --tres-per-task=a:1 --gres=x:1,y:1 --tres-per-task=b:1", "--gres=gpu:4,x:1,y:1 --tres-per-task=a:1,b:1"),
        ("--gres nvme:1 --qos=a --array=1", "--gres nvme:1 --qos=a --array=1"),
        ("-l a -l b", "-l a -l b"),
    ],
)  # fmt: skip
def test_of_a_list_there_is_one_option_with_all_that_is_asked_for(given: str, joined: str) -> None:
    """sbatch takes the last one alone."""
    found = options.joined(native.read_all(given.split(), options.TABLE))
    assert native.words(found) == joined.split()


def request(*words: str) -> JobRequest:
    return JobRequest(
        profile=site(), nodes=2, gpus=4, cpus=8, time="1", warns=9, words=words, arguments=(), image=Path("i")
    )


@pytest.mark.parametrize(
    ("words", "granted", "unclear"),
    [
        ("", (2, 1, 4, "1", 9), ""),
        ("-N 3 --time=5 -J 7", (3, 1, 4, "5", 9), ""),
        ("-t 6 --ntasks-per-node=2", (2, 2, 4, "6", 9), ""),
        ("--tasks-per-node=2", (2, 2, 4, "1", 9), ""),
        ("--gpus-per-node=a100:2", (2, 1, 2, "1", 9), ""),
        ("--gres=gpu", (2, 1, 1, "1", 9), ""),
        ("--gres=gpu:2", (2, 1, 2, "1", 9), ""),
        ("--gres=nvme:1,gpu:a100:3", (2, 1, 3, "1", 9), ""),
        ("--gres=nvme:5", (2, 1, 4, "1", 9), ""),
        ("--signal=B:USR2@60", (2, 1, 4, "1", 60), ""),
        ("--signal=USR2", (2, 1, 4, "1", 9), ""),
        ("--nodes=2-4 -t 9", (2, 1, 4, "1", 9), "--nodes 2-4"),
        ("-t 9 --gpus=8", (2, 1, 4, "9", 9), "--gpus"),
        ("-G 8", (2, 1, 4, "1", 9), "-G"),
        ("-n 8", (2, 1, 4, "1", 9), "-n"),
    ],
)
def test_further_words_change_what_is_granted_or_leave_it_open(
    words: str, granted: tuple[Any, ...], unclear: str
) -> None:
    found, word = login.granted(request(*words.split()))
    assert ((found.nodes, found.tasks, found.gpus, found.time, found.warns), word) == (granted, unclear)


def test_the_job_scripts_own_time_and_warning_are_found() -> None:
    text = "#!/bin/bash\n#SBATCH --time=01:00:00 # SITE\n#SBATCH --signal=B:USR2@120\n"
    assert login.limits(text) == ("01:00:00", 120)
    assert login.limits("##SBATCH --time=1\n #SBATCH --signal=B:USR2@120\n") == ("", 0)


@pytest.mark.parametrize(
    ("state", "code", "status"),
    [
        ("COMPLETED", "0:0", 0), ("COMPLETED", "", 0), ("FAILED", "75:0", 75), ("FAILED", "0:9", 137), ("FAILED", "3:9", 3),
        ("TIMEOUT", "0:0", 1), ("CANCELLED by 7", "0:0", 143), ("CANCELLED", "0:15", 143), ("OUT_OF_MEMORY", "x:y", 1),
    ],
)  # fmt: skip
def test_a_job_that_did_not_complete_has_not_ended_well(state: str, code: str, status: int) -> None:
    assert login._status(state, code) == status


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What a program answers, by its name and its words; any other question fails."""
    answers: dict[str, str] = {}
    monkeypatch.setattr(login, "run", lambda *words: answers.get(" ".join(words), ""))
    return answers


def test_a_job_of_another_cluster_is_asked_for_there(told: dict[str, str]) -> None:
    told["scontrol -M other --oneliner show job 7"] = "JobId=7 JobState=RUNNING Reason=None NodeList=n1\n"
    told["sacct -M other -X -n -P -j 8_1 -o State,ExitCode"] = "FAILED|3:0\n"
    running, ended = login.ask("7;other", None), login.ask("8_1;other", None)
    assert running is not None
    assert ended is not None
    assert (running.state, ended.status) == ("RUNNING on n1", 3)


SHOW, ACCOUNTS = "scontrol --oneliner show job 7", "sacct -X -n -P -j 7 -o State,ExitCode"


@pytest.mark.parametrize(
    ("answer", "state", "output", "status"),
    [
        ("JobState=PENDING Reason=Priority", "PENDING (Priority)", [], None),
        ("JobState=PENDING Reason=None", "PENDING", [], None),
        ("JobState=RUNNING Reason=None NodeList=n[1-2] StdOut=/a b.out Power=", "RUNNING on n[1-2]", ["/a b.out"], None),
        ("JobState=RUNNING Reason=Prolog", "RUNNING on ", [], None),
        ("JobState=STAGE_OUT Reason=None", "STAGE_OUT", [], None),
        ("JobState=FAILED Reason=NonZeroExitCode ExitCode=3:0 StdOut=/x TresPerNode=y", "FAILED (NonZeroExitCode)", ["/x"], 3),
        ("JobState=COMPLETED Reason=None ExitCode=0:0 StdOut=/x", "COMPLETED", ["/x"], 0),
    ],
)  # fmt: skip
def test_the_controller_tells_of_a_job(
    told: dict[str, str], answer: str, state: str, output: list[str], status: int | None
) -> None:
    told[SHOW] = f"JobId=7 {answer}\n"
    found = login.ask("7", None)
    assert found is not None
    assert (found.state, [str(path) for path in found.output], found.status) == (state, output, status)


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ("", None),
        ("RUNNING|0:0\n", None),
        ("REQUEUED|0:0", None),
        ("CANCELLED by 7|0:0\nx", ("CANCELLED by 7", 143)),
        ("FAILED|2:0\n", ("FAILED", 2)),
    ],
)
def test_of_one_that_the_controller_has_forgotten_the_accounts_tell(
    told: dict[str, str], answer: str, found: tuple[str, int] | None
) -> None:
    told[ACCOUNTS] = answer
    status = login.ask("7", None)
    assert (None if status is None else (status.state, status.status)) == found


def test_the_processor_is_that_of_a_node_of_the_partition(told: dict[str, str]) -> None:
    told["sinfo -h -p big -o %n"] = "n1\nn2\n"
    told["sinfo -h -o %n"] = "n3\n"
    told["scontrol --oneliner show node n1"] = "NodeName=n1 Arch=aarch64 X=1"
    told["scontrol --oneliner show node n3"] = "NodeName=n3 OldArch=x CPUs=2"
    assert login.architecture(["sbatch", "-p", "big", "--wrap=x"]) == "aarch64"
    assert login.architecture(["sbatch", "--nodes=2"]) == ""
    assert login.architecture(["sbatch", "--partition=none"]) == ""
