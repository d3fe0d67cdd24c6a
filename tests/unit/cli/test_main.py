"""The command line: precedence, refusals, what a plan reads and what it leaves alone."""

import argparse
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import jsonschema
import pytest

import entrypoint
from entrypoint.cli.main import main
from entrypoint.core.errors import BadInput
from entrypoint.job import outcome
from entrypoint.job.outcome import Outcome
from entrypoint.plan import sources
from entrypoint.plan.options import OPTIONS
from entrypoint.schedulers import choice

CHECKOUT = Path(entrypoint.__file__).parents[1]
SCHEMA = json.loads((Path(entrypoint.__file__).parent / "plan/plan.schema.json").read_text())
NODE = {
    "APPTRAIN_EMBEDDED_JOB_ID": "7",
    "APPTRAIN_EMBEDDED_NODELIST": "127.0.0.[1-2]",
    "APPTRAIN_EMBEDDED_NODENAME": "127.0.0.2",
    "APPTRAIN_EMBEDDED_CPUS_ON_NODE": "8",
}
FAR = NODE | {"APPTRAIN_EMBEDDED_NODELIST": "n[1-2]", "APPTRAIN_EMBEDDED_NODENAME": "n2"}
"""The same of other machines."""


class Cli:
    """Runs `plan` on an environment of the test's own."""

    def __init__(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
        self._file = tmp_path / "recorded.env"
        self._capsys = capsys

    def run(self, env: dict[str, str], *arguments: str) -> tuple[int, str, str]:
        self._file.write_text("".join(f"{name}={value}\n" for name, value in env.items()))
        status = main(["plan", "--env-file", str(self._file), *arguments])
        captured = self._capsys.readouterr()
        return status, captured.out, captured.err

    def plan(self, env: dict[str, str], *arguments: str) -> dict[str, Any]:
        status, out, err = self.run(env, "--json", *arguments)
        assert (status, err) == (0, "")
        plan: dict[str, Any] = json.loads(out)
        jsonschema.validate(plan, SCHEMA)
        return plan

    def refusal(self, env: dict[str, str], *arguments: str) -> str:
        status, out, err = self.run(env, *arguments)
        assert (status, out) == (64, "")
        assert err.startswith("apptrain: ")
        assert err.count("\n") == 1
        return err.removeprefix("apptrain: ").removesuffix("\n")


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(tmp_path, capsys)


@pytest.fixture
def profile(tmp_path: Path) -> str:
    path = tmp_path / "site.yaml"
    path.write_text(
        "launch: {nproc_per_node: 4, omp_num_threads: 3, interface: hsn0}\nenv: {NCCL_NET: OFI}\nhost_suffix: -hsn\n"
    )
    return str(path)


def test_a_flag_beats_the_variable_which_beats_the_profile_which_beats_the_default(
    cli: Cli, profile: str
) -> None:
    flag = ("--nproc-per-node", "1")
    variable = {"APPTRAIN_NPROC_PER_NODE": "2"}
    site = {"APPTRAIN_PROFILE": profile}
    found = [
        (plan["nproc_per_node"], plan["sources"]["nproc_per_node"])
        for plan in (
            cli.plan(NODE | variable | site, *flag),
            cli.plan(NODE | variable | site),
            cli.plan(NODE | site),
            cli.plan(NODE),
        )
    ]
    assert found == [
        (1, "flag"),
        (2, "env:APPTRAIN_NPROC_PER_NODE"),
        (4, "profile:site.yaml"),
        (1, "default"),
    ]


def test_the_suffix_of_a_fast_network_goes_before_the_domain(cli: Cli, tmp_path: Path) -> None:
    nodes, site = tmp_path / "nodes", tmp_path / "site.yaml"
    nodes.write_text("r1i0n0.ice.example.org\nr1i0n1-ib0.ice.example.org\n")
    site.write_text("scheduler: pbs\nhost_suffix: -ib0\n")
    env = {"PBS_JOBID": "7.ice", "PBS_NODENUM": "1", "PBS_NODEFILE": str(nodes)}
    plan = cli.plan(env | {"APPTRAIN_PROFILE": str(site)}, "--device", "cpu")
    assert plan["master_addr"] == "r1i0n0-ib0.ice.example.org"
    assert plan["rendezvous"]["local_addr"] == "r1i0n1-ib0.ice.example.org"
    assert plan["sources"]["master_addr"] == "profile:site.yaml"


@pytest.mark.parametrize(
    ("lines", "env", "arguments", "ranks"),
    [
        (48, {"NCPUS": "48"}, (), None),
        (48, {"APPTRAIN_PROFILE": "gadi"}, (), None),
        (48, {"NCPUS": "48"}, ("--nproc-per-node", "2"), 2),
        (48, {"NCPUS": "96"}, (), 48),
        (16, {"NCPUS": "48", "APPTRAIN_PROFILE": "gadi"}, (), 16),
        (2, {"NCPUS": "2"}, (), 2),
        (8, {"NCPUS": "8"}, (), 8),
        (9, {"NCPUS": "9"}, (), None),
    ],
)
def test_a_node_file_with_a_line_a_core_gives_one_rank_a_node_on_cpus(
    cli: Cli, tmp_path: Path, lines: int, env: dict[str, str], arguments: tuple[str, ...], ranks: int | None
) -> None:
    nodes = tmp_path / "nodes"
    nodes.write_text("".join(f"gadi-gpu-v100-00{node}.gadi.nci.org.au\n" * lines for node in (1, 2)))
    job = {
        "PBS_JOBID": "7.gadi-pbs",
        "PBS_NODENUM": "1",
        "PBS_NODEFILE": str(nodes),
        "PROJECT": "ab12",
        "USER": "u",
    }
    status, out, err = cli.run(job | env, "--json", "--device", "cpu", *arguments, "--", "x.py")
    plan = json.loads(out)
    said = f"PBS_NODEFILE has a line for each of the {lines} CPUs of a node, so its lines do not count as ranks: 1 rank on "
    said = f"apptrain: {said}each node (more: --nproc-per-node N)\n" if ranks is None else ""
    assert (status, plan["nproc_per_node"], err) == (0, ranks or 1, said)


def recorded(name: str) -> dict[str, str]:
    text = (Path(__file__).parents[2] / f"recordings/slurm/{name}.env").read_text()
    return dict(line.split("=", 1) for line in text.splitlines() if not line.startswith("#"))


@pytest.mark.parametrize(
    ("name", "arguments", "mode", "ranks"),
    [
        ("gpus-per-node.task0", ("--nproc-per-node", "1"), "torchrun", 1),
        ("two-tasks-step-gpus-per-task.task5", (), "rank", 2),
    ],
)
def test_a_slice_of_a_gpu_for_each_process_is_enough(
    cli: Cli, name: str, arguments: tuple[str, ...], mode: str, ranks: int
) -> None:
    given = recorded(name) | {"CUDA_VISIBLE_DEVICES": "MIG-11111111-0000-0000-0000-000000000001"}
    status, out, _ = cli.run(given, "--json", *arguments)
    plan = json.loads(out)
    assert (status, plan["mode"], plan["device"], plan["nproc_per_node"]) == (0, mode, "cuda", ranks)


@pytest.mark.parametrize(
    ("nodes", "ranks"), [("{gpus: 4, whole: true}", 4), ("{gpus: 0, whole: true}", None), ("{gpus: 4}", None)]
)
def test_the_gpus_of_a_profiles_whole_nodes_are_believed_if_slurm_counts_none(
    cli: Cli, tmp_path: Path, nodes: str, ranks: int | None
) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(f"scheduler: slurm\nnodes: {nodes}\n")
    given = recorded("whole-nodes.task0") | {"APPTRAIN_PROFILE": str(path)}
    if ranks is None:
        assert "was granted no GPU on this node that slurm tells of" in cli.refusal(given)
        return
    plan = cli.plan(given)
    assert (plan["device"], plan["nproc_per_node"]) == ("cuda", ranks)
    assert {plan["sources"][name] for name in ("device", "nproc_per_node")} == {"profile:site.yaml"}


@pytest.mark.parametrize(
    ("arguments", "profile", "start", "preload"),
    [
        ((), "", ("fork", "default"), ([], "default")),
        (("--start-ranks", "spawn"), "", ("spawn", "flag"), ([], "default")),
        ((), "start_ranks: spawn", ("spawn", "profile:site.yaml"), ([], "default")),
        (("--start-ranks", "fork", "--preload", "a,b.c"), "", ("fork", "flag"), (["a", "b.c"], "flag")),
        (
            (),
            "preload: [lightning, numpy]",
            ("fork", "default"),
            (["lightning", "numpy"], "profile:site.yaml"),
        ),
        ((), "preload: []", ("fork", "default"), ([], "default")),
        (("--no-python",), "", ("spawn", "derived:no_python"), ([], "default")),
        (("--mode", "exec"), "", ("spawn", "derived:mode"), ([], "default")),
    ],
)
def test_ranks_are_forks_where_nothing_speaks_against_it(
    cli: Cli,
    tmp_path: Path,
    arguments: tuple[str, ...],
    profile: str,
    start: tuple[str, str],
    preload: tuple[Any, str],
) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(f"launch: {{{profile}}}\n")
    plan = cli.plan(NODE | {"APPTRAIN_PROFILE": str(path)}, *arguments, "--", "my.py")
    assert (plan["start_ranks"], plan["sources"]["start_ranks"]) == start
    assert (plan["preload"], plan["sources"]["preload"]) == preload


@pytest.mark.parametrize(
    ("arguments", "profile", "env", "found"),
    [
        ((), "", {}, ("none", "default")),
        ((), "numa_binding: socket", {}, ("socket", "profile:site.yaml")),
        (
            (),
            "numa_binding: socket",
            {"APPTRAIN_NUMA_BINDING": "node"},
            ("node", "env:APPTRAIN_NUMA_BINDING"),
        ),
        (("--numa_binding", "exclusive"), "", {"APPTRAIN_NUMA_BINDING": "node"}, ("exclusive", "flag")),
        (("--mode", "exec"), "numa_binding: node", {}, ("none", "derived:mode")),
        (("--mode", "exec", "--numa-binding", "auto"), "", {}, ("none", "derived:mode")),
        (("--mode", "exec", "--numa-binding", "none"), "", {}, ("none", "flag")),
    ],
)
def test_a_plan_says_how_ranks_are_bound_and_only_launch_knows_their_cores(
    cli: Cli,
    tmp_path: Path,
    arguments: tuple[str, ...],
    profile: str,
    env: dict[str, str],
    found: tuple[str, str],
) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(f"launch: {{{profile}}}\n")
    plan = cli.plan(NODE | {"APPTRAIN_PROFILE": str(path)} | env, *arguments, "--", "my.py")
    assert (plan["numa_binding"], plan["sources"]["numa_binding"]) == found
    assert plan["cores"] is None
    assert "cores" not in plan["sources"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ("--numa-binding", "nod"),
            "--numa-binding=nod: must be one of node, socket, exclusive, auto, none: did you mean node?",
        ),
        (
            ("--numa-binding", "core-complex"),
            "--numa-binding=core-complex: must be one of node, socket, exclusive, auto, none; the closest to "
            "torchrun's core-complex is exclusive",
        ),
        (
            ("--mode", "exec", "--numa-binding", "node"),
            "--numa-binding node binds ranks that apptrain starts, and with --mode exec CMD starts them: leave one "
            "of the two out",
        ),
    ],
)
def test_a_binding_that_is_none_or_that_nothing_would_carry_out_is_refused(
    cli: Cli, arguments: tuple[str, ...], text: str
) -> None:
    assert cli.refusal(NODE, *arguments, "--", "my.py") == text


def test_what_the_reference_job_imports_is_preloaded(cli: Cli) -> None:
    plan = cli.plan(NODE, "--", "-m", "train", "--config", "digits")
    assert (plan["preload"], plan["sources"]["preload"]) == (
        ["torchvision.models", "train.loop"],
        "derived:command",
    )
    assert cli.plan(NODE, "--preload", "numpy", "--", "-m", "train", "--config", "digits")["preload"] == [
        "numpy"
    ]


@pytest.mark.parametrize(
    ("arguments", "found"), [(("--no-python",), "--no-python"), (("--mode", "exec"), "mode exec")]
)
def test_what_cannot_be_forked_is_refused(cli: Cli, arguments: tuple[str, ...], found: str) -> None:
    assert cli.refusal(NODE, "--start-ranks", "fork", *arguments, "--", "my.py") == (
        f"--start-ranks fork, but with {found} nothing of ours starts the ranks: leave it out"
    )
    assert cli.refusal(NODE, "--preload", "a b", "--", "my.py") == (
        "--preload=a b: must be names of modules with commas between them"
    )


@pytest.mark.parametrize(
    ("command", "of_node"),
    [
        (
            ("my.py",),
            [("3", "profile:site.yaml"), ("2", "derived:APPTRAIN_EMBEDDED_CPUS_ON_NODE"), ("1", "default")],
        ),
        ((), [("1", "derived:CMD")] * 3),
        (("-m", "train", "--config", "digits", "threads=4"), [("1", "derived:CMD")] * 3),
    ],
)
def test_threads_come_from_the_flag_the_user_the_profile_and_the_cpus_in_that_order(
    cli: Cli, profile: str, command: tuple[str, ...], of_node: list[tuple[str, str]]
) -> None:
    """But those of the reference program are the same on every site, unless the user chooses."""
    words = ("--", *command) if command else ()
    user = {"OMP_NUM_THREADS": "5"}
    site = {"APPTRAIN_PROFILE": profile, "APPTRAIN_NPROC_PER_NODE": "2"}
    found = [
        (plan["env"]["OMP_NUM_THREADS"], plan["sources"]["env.OMP_NUM_THREADS"])
        for plan in (
            cli.plan(NODE | user | site, "--omp-num-threads", "7", *words),
            cli.plan(NODE | user | site, *words),
            cli.plan(NODE | site, *words),
            cli.plan(NODE, "--nproc-per-node", "3", *words),
            cli.plan({name: value for name, value in NODE.items() if "CPUS" not in name}, *words),
        )
    ]
    assert found == [("7", "flag"), ("5", "env:OMP_NUM_THREADS"), *of_node]


def test_a_profile_gives_the_workers_variables_and_the_name_of_the_fast_network(
    cli: Cli, profile: str
) -> None:
    plan = cli.plan(FAR, "--profile", profile)
    assert plan["master_addr"] == "n1-hsn"
    assert plan["rendezvous"]["local_addr"] == "n2-hsn"
    assert plan["env"]["NCCL_NET"] == "OFI"
    assert plan["env"]["GLOO_SOCKET_IFNAME"] == "hsn0"
    assert plan["env"]["NCCL_SOCKET_IFNAME"] == "=hsn0"
    assert plan["sources"]["env.NCCL_NET"] == "profile:site.yaml"


def test_an_empty_key_of_a_profile_counts_as_absent_and_scratch_holds_run_directories(
    cli: Cli, tmp_path: Path
) -> None:
    path = tmp_path / "site.yaml"
    path.write_text("host_suffix:\nlaunch: {interface: }\nenv:\nscratch: /scratch/$USER\n")
    plan = cli.plan(NODE | {"USER": "alice"}, "--profile", str(path))
    assert plan["master_addr"] == "127.0.0.1"
    assert plan["env"]["GLOO_SOCKET_IFNAME"] == "lo"
    assert plan["env"]["APPTRAIN_RUN_DIR"] == "/scratch/alice/runs/job-7"
    assert plan["sources"]["env.APPTRAIN_RUN_DIR"] == "profile:site.yaml"


def test_what_the_user_set_beats_the_profiles_variables(cli: Cli, profile: str) -> None:
    user = {"NCCL_NET": "Socket", "GLOO_SOCKET_IFNAME": "ib0"}
    plan = cli.plan(FAR | user, "--profile", profile)
    assert "NCCL_NET" not in plan["env"]
    assert "GLOO_SOCKET_IFNAME" not in plan["env"]
    assert plan["env"]["NCCL_SOCKET_IFNAME"] == "=hsn0"
    assert cli.plan(NODE | user, "--interface", "eth0")["env"]["GLOO_SOCKET_IFNAME"] == "eth0"


@pytest.mark.parametrize(
    "option",
    [option for option in OPTIONS if "-" in option.name and not option.job_only],
    ids=lambda option: option.name,
)
def test_options_are_taken_with_underscores_too(cli: Cli, option: Any) -> None:
    value = () if option.metavar == "" else ("",)
    name = "--" + option.name.replace("-", "_")
    if value:
        # An empty value is refused by name, which shows that the spelling was understood.
        assert cli.refusal(NODE, name, *value).startswith(f"--{option.name} is empty")
    else:
        assert cli.run(NODE, name)[0] == 0


def test_help_lists_every_option_with_its_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--help-all"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    for option in OPTIONS:
        if option.job_only:
            continue
        assert f"--{option.name}" in text
        assert f"[{option.variable}]" in " ".join(text.split()).replace("- ", "-")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--scheduler", "slrum"), "--scheduler=slrum: must be one of auto, embedded, slurm, pbs, manual: did you mean slurm?"),
        (("--nproc-per-node", "two"), "--nproc-per-node=two: must be N, a whole number"),
        (("--nproc-per-node", "0"), "--nproc-per-node=0: must be from 1 to 4096"),
        (("script.py",), "unrecognized arguments: script.py (CMD comes behind --): see `apptrain plan --help`"),
        (("--interface",), "argument --interface: expected one argument: see `apptrain plan --help`"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_one_line_that_names_it(cli: Cli, arguments: Sequence[str], message: str) -> None:
    assert cli.refusal(NODE, *arguments) == message


def test_a_wrong_variable_is_named_as_the_variable(cli: Cli) -> None:
    assert (
        cli.refusal(NODE | {"APPTRAIN_DEVICE": "gpu"})
        == "APPTRAIN_DEVICE=gpu: must be one of auto, cpu, cuda: did you mean cuda?"
    )
    assert (
        cli.refusal(NODE | {"APPTRAIN_DEVICE": ""}) == "APPTRAIN_DEVICE is empty: give DEVICE or leave it out"
    )
    assert cli.refusal(NODE | {"OMP_NUM_THREADS": "many"}) == (
        "OMP_NUM_THREADS=many: must be a positive number: correct it, or unset it"
    )
    assert cli.refusal(NODE | {"APPTRAIN_ATTEMPT": "-1"}) == (
        "APPTRAIN_ATTEMPT=-1: must be a number from 0: unset it, the job script sets it"
    )


def test_no_command_is_exit_64(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 64
    assert capsys.readouterr().err == (
        "apptrain: the following arguments are required: COMMAND: see `apptrain --help`\n"
    )


def test_the_command_is_kept_word_for_word(cli: Cli) -> None:
    command = ["my script.py", "--lr", "0.1", "it's", "", "--", "--json", "new line".replace(" ", "\n")]
    assert cli.plan(NODE, "--", *command)["argv"][-len(command) :] == command


def test_no_command_means_the_reference_job(cli: Cli) -> None:
    assert cli.plan(NODE)["argv"][-4:] == ["-m", "train", "--config", "digits"]


def test_only_our_modules_are_kept_from_the_users_folder(cli: Cli) -> None:
    def safe(*command: str) -> bool:
        return "PYTHONSAFEPATH" in cli.plan(NODE, "--", *command)["env"]

    assert safe("-m", "train")
    assert safe("-m", "train.hello")
    assert not safe("-m", "trainer")
    assert not safe("train.py")
    assert not safe("train")


def test_arguments_from_a_variable_are_split_like_a_shell_and_never_evaluated(cli: Cli) -> None:
    text = "--device cpu --nproc-per-node=2 -- 'my script.py' --name \"a b\" '$(touch pwned)' `id`"
    plan = cli.plan(NODE | {"APPTRAIN_ARGS": text})
    assert plan["nproc_per_node"] == 2
    assert plan["argv"][-5:] == ["my script.py", "--name", "a b", "$(touch pwned)", "`id`"]


def test_arguments_from_a_file_are_one_per_nul(cli: Cli, tmp_path: Path) -> None:
    arguments = ["--nproc-per-node", "2", "--", "script.py", "new\nline", "comma, quote ' \"", ""]
    path = tmp_path / "arguments"
    path.write_text("".join(argument + "\0" for argument in arguments))
    plan = cli.plan(NODE | {"APPTRAIN_ARGS_FILE": str(path)})
    assert plan["nproc_per_node"] == 2
    assert plan["argv"][-4:] == arguments[-4:]


@pytest.mark.parametrize(
    ("env", "arguments", "message"),
    [
        (
            {"APPTRAIN_ARGS": "-- 'open"},
            (),
            "APPTRAIN_ARGS is not a shell-quoted string: No closing quotation",
        ),
        (
            {"APPTRAIN_ARGS": "-- a.py"},
            ("--", "b.py"),
            "CMD stands both on the command line and in APPTRAIN_ARGS: give it once",
        ),
        (
            {"APPTRAIN_ARGS": "--frob"},
            (),
            "in APPTRAIN_ARGS: unrecognized arguments: --frob: see `apptrain launch --help`",
        ),
        (
            {"APPTRAIN_ARGS_FILE": "/nowhere/args"},
            (),
            "APPTRAIN_ARGS_FILE=/nowhere/args cannot be read (No such file or directory): give a path that exists",
        ),
    ],
)
def test_wrong_arguments_from_a_variable_are_refused(
    cli: Cli, env: dict[str, str], arguments: Sequence[str], message: str
) -> None:
    assert cli.refusal(NODE | env, *arguments) == message


def test_a_recording_is_read_verbatim_and_nothing_else_is(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APPTRAIN_DEVICE", "gpu")
    plan = cli.plan({"# comment": "x", **NODE, "OMP_NUM_THREADS": "3"})
    assert plan["env"]["OMP_NUM_THREADS"] == "3"
    path = tmp_path / "broken.env"
    path.write_text("A=1\nno equals sign\n")
    assert main(["plan", "--env-file", str(path)]) == 64


def test_a_line_that_is_no_assignment_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "broken.env"
    path.write_text("A=1\n# skipped\nno equals sign\n")
    assert main(["plan", "--env-file", str(path)]) == 64
    assert (
        capsys.readouterr().err
        == f"apptrain: --env-file {path}, line 3: 'no equals sign' is not NAME=VALUE: if a value has several lines, "
        "write the file with `env -0 >FILE`\n"
    )


def test_the_text_shows_each_value_with_its_source_and_a_line_to_paste(cli: Cli) -> None:
    status, out, err = cli.run(NODE, "--", "my script.py")
    lines = out.splitlines()
    assert (status, err) == (0, "")
    assert "node_rank                1  [derived:APPTRAIN_EMBEDDED_NODENAME]" in lines
    assert lines[-1] == (
        "  torchrun --nnodes=2 --nproc-per-node=1 --node-rank=1 --rdzv-backend=static "
        "--rdzv-endpoint=127.0.0.1:61336 --rdzv-id=7.0 --local-addr=127.0.0.2 --max-restarts=0 'my script.py'"
    )


def test_c10d_says_what_it_risks_and_names_the_store_s_host(cli: Cli) -> None:
    status, out, err = cli.run(NODE, "--json", "--rdzv-backend", "c10d")
    plan = json.loads(out)
    assert status == 0
    assert "can run code in torchrun's agents" in err
    assert plan["rendezvous"]["backend"] == "c10d"
    assert "--rdzv-conf=is_host=0" in plan["argv"]


RANK, EXEC = ("--mode", "rank"), ("--mode", "exec")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((*RANK, "--rdzv-backend", "c10d"), "--rdzv-backend c10d needs --mode torchrun, this is rank: leave it out"),
        ((*EXEC, "--rdzv-backend", "c10d"), "--rdzv-backend c10d needs --mode torchrun, this is exec: leave it out"),
        ((*EXEC, "--max-restarts", "2"), "--max-restarts 2 needs --mode torchrun, this is exec: leave it out"),
        ((*RANK, "--on-failure", "restart"), "--on-failure restart needs one task on every node, and --mode rank has one for each rank: start one task per node, or use --on-failure requeue"),
        ((*EXEC, "--doctor"), "--doctor starts a rank on each device, and --mode exec does not: leave --mode exec out"),
        (("--doctor", "--on-failure", "requeue"), "--doctor looks once: leave --on-failure requeue out"),
    ],
)  # fmt: skip
def test_what_nothing_would_carry_out_is_in_no_plan(cli: Cli, options: Sequence[str], message: str) -> None:
    assert cli.refusal(NODE, *options) == message


def test_what_goes_with_the_mode_is_planned(cli: Cli) -> None:
    for options in (
        (*RANK, "--rdzv-backend", "static"),
        (*RANK, "--on-failure", "requeue", "--max-restarts", "2"),
        (*EXEC, "--on-failure", "restart"),
        ("--max-restarts", "2"),
    ):
        assert cli.plan(NODE, *options)["rendezvous"]["backend"] == "static"


def test_a_site_s_c10d_is_for_torchrun_and_a_flag_puts_it_aside(cli: Cli, tmp_path: Path) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("launch: {rdzv_backend: c10d}")
    given = ("--profile", str(site))
    status, out, _ = cli.run(NODE, "--json", *given)
    assert (status, json.loads(out)["rendezvous"]["backend"]) == (0, "c10d")
    assert cli.refusal(NODE, *given, *RANK) == (
        "rdzv_backend c10d of the profile site.yaml needs --mode torchrun, this is rank: give --rdzv-backend static"
    )
    assert cli.plan(NODE, *given, *RANK, "--rdzv-backend", "static")["rendezvous"]["backend"] == "static"


def test_an_ipv6_rendezvous_is_in_brackets(cli: Cli) -> None:
    plan = cli.plan(NODE, "--master-addr", "fd00::1", "--master-port", "29500")
    assert plan["master_addr"] == "fd00::1"
    assert plan["rendezvous"]["endpoint"] == "[fd00::1]:29500"
    assert cli.plan(NODE, "--master-addr", "[fd00::1]")["master_addr"] == "fd00::1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a list", "must hold a mapping with the keys title, documented, tested, scheduler, clusters, start, launcher_args, host_suffix, scratch, nodes, request, container, stage, launch, env"),
        ("nproc: 4", "site.yaml: unknown key nproc: valid are title, documented, tested, scheduler, clusters, start, launcher_args, host_suffix, scratch, nodes, request, container, stage, launch, env"),
        ("launch: {nodes: 4}", "site.yaml: launch: unknown key nodes: valid are nproc-per-node, rdzv-backend, interface, join-timeout, peer-timeout, omp-num-threads"),
        ("env: {A: on}", "env A is True: give text in quotes, or a number"),
        ("env: {OMP_NUM_THREADS: 2}", "env sets OMP_NUM_THREADS: set omp_num_threads under launch"),
        ("launch: 4", "launch must be a mapping, found 4"),
        ("launch: {nproc_per_node: four}", "site.yaml: launch nproc-per-node is 'four': give N, a whole number"),
        ("{", "site.yaml: line 1: it is not YAML: while parsing a flow node expected the node content, but found '<stream end>'"),
        ("x: !!python/object/apply:os.system [id]", "site.yaml: line 1: the tag tag:yaml.org,2002:python/object/apply:os.system is not taken: leave tags out"),
    ],
)  # fmt: skip
def test_a_wrong_profile_is_refused(cli: Cli, tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(text)
    assert message in cli.refusal(NODE, "--profile", str(path))


def test_an_unknown_profile_is_refused_with_the_path_it_was_sought_at(cli: Cli) -> None:
    assert cli.refusal(NODE, "--profile", "nowhere") == (
        f"--profile nowhere: there is no {CHECKOUT / 'clusters' / 'nowhere.yaml'}: give one of delta, derecho, gadi, "
        "generic, generic-pbs, gwdg-grete, isambard-ai, leonardo, perlmutter, polaris, snellius, vista, or the path of a profile"
    )


REFUSAL = "APPTRAIN_JOIN_TIMEOUT=soon: must be seconds, a number"


@pytest.mark.parametrize(
    ("env", "said"),
    [({"APPTRAIN_ATTEMPT": "0"}, ""), ({}, f"apptrain: {REFUSAL}\n")],
    ids=["with a job script, which says it", "without one"],
)
def test_a_refused_launch_leaves_its_outcome_where_it_is_told_to(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    env: dict[str, str],
    said: str,
) -> None:
    path = tmp_path / "0.3"
    given = {**NODE, **env, "APPTRAIN_OUTCOME": str(path), "APPTRAIN_JOIN_TIMEOUT": "soon"}
    for name in [name for name in os.environ if name.startswith("APPTRAIN_")]:
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert main(["launch"]) == 64
    assert capsys.readouterr().err == said
    found = outcome.read(path)
    assert found is not None
    assert abs(found.time - time.time()) < 60
    node = os.uname().nodename.partition(".")[0]
    assert found == Outcome(status=64, node=node, time=found.time, error=REFUSAL)


def test_an_outcome_that_is_there_is_kept_and_one_that_cannot_be_written_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("APPTRAIN_ATTEMPT", "0")
    (tmp_path / "0.3").write_text("status=5\n")
    monkeypatch.setenv("APPTRAIN_OUTCOME", str(tmp_path / "0.3"))
    assert main(["launch", "--device", "tpu"]) == 64
    assert (capsys.readouterr().err, (tmp_path / "0.3").read_text()) == ("", "status=5\n")
    monkeypatch.setenv("APPTRAIN_OUTCOME", "/proc/none/0.3")
    assert main(["launch", "--device", "tpu"]) == 64
    assert capsys.readouterr().err.startswith("apptrain: --device=tpu: must be one of ")


def imported(*arguments: str) -> set[str]:
    """Modules that a bare interpreter has loaded at the end of the command, run from the checkout."""
    code = (
        "import sys, runpy\nsys.argv[0] = 'entrypoint'\n"
        "try: runpy.run_module('entrypoint', run_name='__main__')\n"
        "except SystemExit as end: print('status', end.code or 0, file=sys.stderr)\n"
        "print('\\n'.join(sys.modules), file=sys.stderr)"
    )
    ended = subprocess.run(
        [sys.executable, "-S", "-E", "-c", code, *arguments],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "status 0" in ended.stderr
    return set(ended.stderr.split())


HEAVY = (
    "torch",
    "yaml",
    "psutil",
    "asyncio",
    "socket",
    "subprocess",
    "multiprocessing",
    "email",
    "http",
    "logging",
)


def test_help_imports_only_what_it_needs() -> None:
    modules = imported("--help")
    assert not modules.intersection(HEAVY)
    assert not modules.intersection(f"entrypoint.schedulers.{name}" for name in choice.NAMES)


def test_a_plan_imports_one_scheduler_and_no_machinery(tmp_path: Path) -> None:
    env = tmp_path / "recorded.env"
    env.write_text("".join(f"{name}={value}\n" for name, value in NODE.items()))
    modules = imported("plan", "--env-file", str(env))
    assert not modules.intersection(HEAVY)
    assert "entrypoint.run" not in modules


def test_a_plan_for_16384_nodes_lists_them_all(cli: Cli) -> None:
    env = NODE | {"APPTRAIN_EMBEDDED_NODELIST": "nid[00001-16384]", "APPTRAIN_EMBEDDED_NODENAME": "nid16384"}
    plan = cli.plan(env)
    assert plan["nodes"] == [f"nid{number:05}" for number in range(1, 16385)]
    assert plan["node_rank"] == 16383


def test_ports_differ_over_the_attempts(cli: Cli) -> None:
    used = [cli.plan(NODE | {"APPTRAIN_ATTEMPT": str(attempt)})["master_port"] for attempt in range(3)]
    assert len(set(used)) == 3
    assert all(abs(one - other) >= 2 for one, other in itertools.combinations(used, 2))


def test_only_the_doctor_is_told_the_scheduler_the_device_the_fabric_and_the_profile(cli: Cli) -> None:
    def told(*arguments: str) -> dict[str, str]:
        env = cli.plan(NODE, *arguments)["env"]
        return {
            name: env[name]
            for name in ("APPTRAIN_SCHEDULER", "APPTRAIN_DEVICE", "APPTRAIN_FABRIC", "APPTRAIN_PROFILE")
            if name in env
        }

    assert told("--fabric", "infiniband") == {}
    assert told("--doctor") == {"APPTRAIN_SCHEDULER": "embedded", "APPTRAIN_DEVICE": "cpu"}
    assert told("--doctor", "--fabric", "infiniband") == {
        "APPTRAIN_SCHEDULER": "embedded",
        "APPTRAIN_DEVICE": "cpu",
        "APPTRAIN_FABRIC": "infiniband",
    }
    generic = str(CHECKOUT / "clusters/generic.yaml")
    assert told("--doctor", "--profile", generic)["APPTRAIN_PROFILE"] == generic


def test_an_option_that_the_command_itself_takes_is_meant_too() -> None:
    front = argparse.ArgumentParser(prog="apptrain run")
    front.add_argument("--tasks-per-node")
    with pytest.raises(
        BadInput, match=r"^unrecognized .* --task-per-node 2: did you mean --tasks-per-node\?$"
    ):
        sources.of_launch(["--task-per-node", "2"], front)


@pytest.mark.parametrize(
    ("line", "begins"),
    [
        (["--", "my.py"], True),
        (["--no-python", "--", "/bin/true"], True),  # torchrun itself needs it
        (["--mode", "rank", "--nproc-per-node", "1", "--no-python", "--", "/bin/true"], False),
        (["--", "gone.py"], False),
    ],
)
def test_launch_has_torch_read_ahead_once_it_has_its_plan(
    line: list[str], begins: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And does not wait for it."""
    launched, read = threading.Event(), threading.Event()

    def read_ahead() -> None:
        if launched.wait(60):
            read.set()

    imports = SimpleNamespace(read_ahead=read_ahead)
    monkeypatch.setitem(sys.modules, "apptrain_imports", cast(ModuleType, imports))
    monkeypatch.setattr("entrypoint.run.launch.launch", lambda *_: launched.set())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").touch()
    for name, value in NODE.items():
        monkeypatch.setenv(name, value)
    main(["launch", "--device", "cpu", "--run-dir", str(tmp_path / "run"), *line])
    assert launched.is_set() == ("gone.py" not in line)
    assert read.wait(60 if begins else 0) == begins


@pytest.mark.parametrize("kind", ["fifo", "/dev/zero", "large"])
def test_a_recorded_environment_that_is_no_file_is_refused_at_once(
    cli: Cli, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "env"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "large":
        path.write_bytes(b"A=b\n" * (1 << 22))
    else:
        path.symlink_to(kind)
    assert f"--env-file {path} cannot be read (it " in cli.refusal({}, "--env-file", str(path))


def test_a_launch_loads_no_tls_and_its_process_can_all_the_same() -> None:
    code = (
        "import sys; from entrypoint.cli import main; main._import_asyncio(); import entrypoint.run.launch; "
        "print('asyncio' in sys.modules, 'ssl' in sys.modules, '_ssl' in sys.modules); import ssl; print(ssl.HAS_TLSv1_3)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.stderr, ended.stdout) == ("", "True False False\nTrue\n")
