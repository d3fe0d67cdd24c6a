"""What a job script starts, and through which programs."""

import shlex
from dataclasses import fields
from typing import Any

import pytest

from entrypoint.explain import launches, shell
from entrypoint.explain.launches import Launch
from entrypoint.explain.request import AskedOption
from entrypoint.explain.shell import Word


def read(text: str) -> list[Launch]:
    return launches.read(shell.commands(text))


def told(launch: Launch) -> dict[str, Any]:
    """All that is not as in `Launch(1)`, words by their text; without the text of a shell."""
    names = [field.name for field in fields(launch) if field.name != "shell_word"]
    found = {name: getattr(launch, name) for name in names}
    usual = {name: getattr(Launch(1), name) for name in names}
    return {name: _text(value) for name, value in found.items() if value != usual[name]}


def _text(value: Any) -> Any:
    match value:
        case Word():
            return value.text
        case AskedOption():
            return (value.name, value.value)
        case tuple():
            return [_text(one) for one in value]
        case dict():
            return {name: _text(one) for name, one in value.items()}
    return value


SRUN = {"starter": "srun", "starter_line": 1}
TORCHRUN = {"agent": "torchrun"}
X_SIF = {"container_line": 1, "image": "x.sif"}
PYTHON = {"words": ["python", "t.py"]}


@pytest.mark.parametrize(
    ("line", "launch"),
    [
        ("python t.py", PYTHON),
        ("A=1 B=2 python t.py", {"assigned": ["A=1", "B=2"], **PYTHON}),
        ("A=1", {"assigned": ["A=1"]}),
        (
            "srun -N 2 --label -- python t.py",
            {
                **SRUN,
                "starter_options": [("nodes", "2"), ("label", "")],
                "starter_words": ["-N", "2", "--label"],
                **PYTHON,
            },
        ),
        ("/usr/bin/srun python t.py", {**SRUN, **PYTHON}),
        ("srun", {**SRUN}),
        ("srun mpirun python t.py", {**SRUN, "words": ["mpirun", "python", "t.py"]}),
        (
            "apptainer exec --nv -B /d:/d --pwd=/w --env A=1 x.sif python t.py",
            {
                "container": "apptainer",
                **X_SIF,
                "container_words": ["--nv", "-B", "/d:/d", "--pwd=/w", "--env", "A=1"],
                **PYTHON,
            },
        ),
        ("/opt/singularity -d run x.sif python t.py", {"container": "singularity", **X_SIF, **PYTHON}),
        ("apptainer shell x.sif", {"container": "apptainer", **X_SIF}),
        ("apptainer -d -q -s -v -c exec x.sif", {"container": "apptainer", **X_SIF}),
        ("apptainer exec", {"container": "apptainer", "container_line": 1}),
        (
            "apptainer exec --bind",
            {"container": "apptainer", "container_line": 1, "container_words": ["--bind"]},
        ),
        ("apptainer build x.sif exec", {"words": ["apptainer", "build", "x.sif", "exec"]}),
        ("apptainer -d -q", {"words": ["apptainer", "-d", "-q"]}),
        ("apptainer", {"words": ["apptainer"]}),
        ("torchrun", TORCHRUN),
        (
            "torchrun --nnodes=2 --nproc_per_node 4 --standalone --rdzv_id='$X' t.py --nnodes 3",
            {
                **TORCHRUN,
                "agent_options": {"nnodes": "2", "nproc-per-node": "4", "standalone": "", "rdzv-id": "$X"},
                "words": ["t.py", "--nnodes", "3"],
            },
        ),
        ("torchrun --rdzv_conf=a=1 t.py", {**TORCHRUN, "agent_options": {"rdzv-conf": "a=1"}, "words": ["t.py"]}),
        ("torchrun --nnodes", {**TORCHRUN, "agent_options": {"nnodes": ""}}),
        ("torchrun --nnodes 2", {**TORCHRUN, "agent_options": {"nnodes": "2"}}),
        ("torchrun --nnode=2 t.py", {**TORCHRUN, "agent_options": {"nnodes": "2"}, "words": ["t.py"]}),
        (
            "torchrun --virtual-local-rank t.py",
            {**TORCHRUN, "agent_options": {"virtual-local-rank": ""}, "words": ["t.py"]},
        ),
        ("torchrun -- t.py", {**TORCHRUN, "words": ["--", "t.py"]}),
        ("torchrun -m pkg.t --x", {**TORCHRUN, "agent_options": {"m": ""}, "words": ["pkg.t", "--x"]}),
        ("torchrun --module pkg.t --x", {**TORCHRUN, "agent_options": {"module": ""}, "words": ["pkg.t", "--x"]}),
        ("torchrun --no_python t", {**TORCHRUN, "agent_options": {"no-python": ""}, "words": ["t"]}),
        ("torchrun --run-path t", {**TORCHRUN, "agent_options": {"run-path": ""}, "words": ["t"]}),
        ("torchrun --use_env t", {**TORCHRUN, "agent_options": {"use-env": ""}, "words": ["t"]}),
        (
            "python3.11 -u -m torch.distributed.run --nnodes 2 t.py",
            {**TORCHRUN, "agent_options": {"nnodes": "2"}, "words": ["t.py"]},
        ),
        ("python -m torch.distributed.launch t.py", {**TORCHRUN, "words": ["t.py"]}),
        ("python -u -B -m torch.distributed.run t.py", {**TORCHRUN, "words": ["t.py"]}),
        ("python -m torch.distributed.run", TORCHRUN),
        (
            "python -m torch.distributed.run -m pkg.t --x",
            {**TORCHRUN, "agent_options": {"m": ""}, "words": ["pkg.t", "--x"]},
        ),
        (
            "python t.py -m torch.distributed.run",
            {"words": ["python", "t.py", "-m", "torch.distributed.run"]},
        ),
        ("python -m", {"words": ["python", "-m"]}),
        ("python -m pkg", {"words": ["python", "-m", "pkg"]}),
        (
            "accelerate launch --num_machines 2 t.py --lr 1",
            {"agent": "accelerate", "agent_options": {"num-machines": "2"}, "words": ["t.py", "--lr", "1"]},
        ),
        ("accelerate config", {"words": ["accelerate", "config"]}),
        ("accelerate", {"words": ["accelerate"]}),
        (
            "/x/deepspeed --num_gpus=4 t.py",
            {"agent": "deepspeed", "agent_options": {"num-gpus": "4"}, "words": ["t.py"]},
        ),
        ("stdbuf -oL taskset -c 0-3 env A=1 python t.py", {**PYTHON, "assigned": ["A=1"]}),
        ("numactl --membind=0 timeout -s INT 1h python t.py", PYTHON),
        ("timeout 1h nice -n 5 dlprof --mode=x python t.py", PYTHON),
        ("uv run python t.py", {"environment": "uv run", **PYTHON}),
        (
            "python -m accelerate.commands.launch --num_machines 2 t.py",
            {"agent": "accelerate", "agent_options": {"num-machines": "2"}, "words": ["t.py"]},
        ),
        (
            "python3 -u -m deepspeed.launcher.runner --hostfile h t.py",
            {"agent": "deepspeed", "agent_options": {"hostfile": "h"}, "words": ["t.py"]},
        ),
        ("uv --quiet run --with x t.py", {"environment": "uv run", **PYTHON}),
        ("uv run -p 3.12 -m t", {"environment": "uv run", "words": ["python", "-m", "t"]}),
        ("uv pip install t.py", {"words": ["uv", "pip", "install", "t.py"]}),
        ("conda activate x", {"words": ["conda", "activate", "x"]}),
        ("uv run pytest t.py", {"environment": "uv run", "words": ["pytest", "t.py"]}),
        ("timeout -k 9 1h ./bind.sh python t.py", {"words": ["./bind.sh", "python", "t.py"]}),
        ("numactl -l bind.sh python t.py", {"words": ["bind.sh", "python", "t.py"]}),
        ("nice -n 19 cp a t.py", {"words": ["cp", "a", "t.py"]}),
        ("nsys stats x", {"words": ["nsys", "stats", "x"]}),
        ("nice", {}),
        ("bash t.sh -c x", {"words": ["bash", "t.sh", "-c", "x"]}),
        ("bash -c", {"words": ["bash", "-c"]}),
        ("bash -x", {"words": ["bash", "-x"]}),
        ("bash", {"words": ["bash"]}),
        (
            "A=1 srun env B=1 apptainer exec x.sif torchrun t.py",
            {
                **SRUN,
                "container": "apptainer",
                **X_SIF,
                **TORCHRUN,
                "words": ["t.py"],
                "assigned": ["A=1", "B=1"],
            },
        ),
    ],
)  # fmt: skip
def test_a_command_is_followed_through_what_starts_it(line: str, launch: dict[str, Any]) -> None:
    (one,) = read(line)
    assert told(one) == launch


@pytest.mark.parametrize(
    ("starter", "options"),
    [
        ("mpirun", "-np 8 -x A=1 -v --mca a b --tag-output -gmca c d --host=a,b"),
        ("mpirun", "--oversubscribe -s -mca a b --gmca c d --hostfile f"),
        ("mpirun", "-np -v --host=a -x B"),
        ("mpirun", "-np 8 --report-bindings"),
        ("mpirun", "-np 8 -allow-run-as-root"),
        ("mpirun", "-np 8 --not-known-here"),
        ("mpiexec", "-n 2"),
        ("mpiexec", "-n 2 -envall"),
        ("mpiexec", "-genv A 1 -env B=2 -genv C 3"),
        ("mpiexec.hydra", "-ppn 1"),
        ("prun", "-n 2"),
        ("pbsdsh", "-v -o -n 1 -s"),
        ("pbs_tmrsh", "-v"),
        ("ssh", "-o BatchMode=yes -p 22 gpu1"),
        ("ssh", "gpu1"),
        ("ssh", "-l me gpu1"),
        ("pdsh", "-w gpu[1-2] -o x"),
        ("clush", "-w gpu[1-2]"),
        ("parallel", "-j 4"),
        ("aprun", "-n 2"),
        ("jsrun", "-n 2"),
        ("ibrun", ""),
    ],
)
@pytest.mark.parametrize("end", ["", "-- "])
def test_the_options_of_a_starter_are_no_part_of_the_program(starter: str, options: str, end: str) -> None:
    (one,) = read(f"{starter} {options} {end}python t.py")
    assert (one.starter, one.starter_options, one.is_in_task) == (starter, (), True)
    assert [word.text for word in one.starter_words] == options.split()
    assert [word.text for word in one.words] == ["python", "t.py"]


@pytest.mark.parametrize("line", ["mpirun -np", "mpirun -np 2", "mpirun --mca a", "ssh"])
def test_a_starter_may_lack_a_program(line: str) -> None:
    (one,) = read(line)
    assert [word.text for word in one.starter_words] == line.split()[1:]
    assert one.words == ()


@pytest.mark.parametrize(
    "option",
    [
        *("--bind", "-B", "--env", "--env-file", "--pwd", "--cwd", "--home", "-H", "--workdir", "-W"),
        *("--scratch", "-S", "--overlay", "-o", "--network", "--hostname", "--mount", "--no-mount"),
        *("--security", "--app", "--fusemount", "--cpus", "--memory", "--blkio-weight"),
        *("--apply-cgroups", "--add-caps", "--drop-caps", "--pem-path"),
    ],
)
def test_these_options_of_apptainer_take_the_next_word(option: str) -> None:
    (one,) = read(f"apptainer exec {option} value --nv x.sif python t.py")
    assert (one.image, [word.text for word in one.words]) == ("x.sif", ["python", "t.py"])


SHELL = {"in_shell": True}


@pytest.mark.parametrize(
    ("text", "inner"),
    [
        ("bash -c 'python t.py'", [{**SHELL, **PYTHON}]),
        ('sh -ec "python t.py"', [{**SHELL, "is_filled": True, **PYTHON}]),
        ("zsh -x --login -c 'python t.py' b", [{**SHELL, **PYTHON}]),
        ("/bin/dash -cl 'python t.py'", [{**SHELL, **PYTHON}]),
        (
            "A=1 srun bash -c 'B=2\nC=3 python t.py; true'",
            [
                {**SHELL, **SRUN, "assigned": ["A=1", "B=2"]},
                {**SHELL, **SRUN, "line": 2, "assigned": ["A=1", "C=3"], **PYTHON},
                {**SHELL, **SRUN, "line": 2, "assigned": ["A=1"], "words": ["true"]},
            ],
        ),
        (
            "bash -c \"sh -c 'python t.py'\"",
            [
                {**SHELL, "is_filled": True, "words": ["sh", "-c", "python t.py"]},
                {**SHELL, "is_filled": True, **PYTHON},
            ],
        ),
    ],
)
def test_what_a_shell_is_given_is_followed_behind_the_shell_itself(
    text: str, inner: list[dict[str, Any]]
) -> None:
    begun, *others = read(text)
    assert not begun.in_shell
    assert not begun.trains
    assert [told(one) for one in others] == inner


def test_shells_in_shells_are_followed_four_deep() -> None:
    text = "python t.py"
    for _ in range(5):
        text = f"bash -c {shlex.quote(text)}"
    found = read(text)
    assert [one.in_shell for one in found] == [False, True, True, True, True]
    assert [word.text for word in found[-1].words] == ["bash", "-c", "python t.py"]


def test_each_command_has_its_line() -> None:
    text = "true\nsrun \\\n  -N2 apptainer \\\n  exec x.sif \\\n  torchrun \\\n  t.py\n"
    first, second = read(text)
    assert (first.line, second.line) == (1, 2)
    assert (second.starter_line, second.starter_options[0].line) == (2, 2)
    assert (second.container_line, second.words[0].line) == (3, 6)


@pytest.mark.parametrize(
    ("line", "trains"),
    [
        ("torchrun", True),
        ("/usr/bin/python3 -u t.py", True),
        ("python -m pkg", True),
        ("python -c t", False),
        ("python -c t t.py", False),
        ("python -m pip install -e .", False),
        ("python3.11 -u -m venv v", False),
        ("python -m", True),
        ("python -W ignore t.py", True),
        ("python", False),
        ("t.py", False),
        ("cat python t.py", False),
        ("hostname", False),
        ("A=1", False),
    ],
)
def test_a_training_is_what_an_agent_starts_or_a_program_of_python(line: str, trains: bool) -> None:
    (one,) = read(line)
    assert one.trains == trains


@pytest.mark.parametrize(
    ("line", "starter", "agent", "words"),
    [
        ("env A=1 nice -n 5 timeout 60 torchrun --nnodes=2 t.py --x 1", "", "torchrun", "t.py --x 1"),
        ("exec numactl --cpunodebind=0 python t.py", "", "", "python t.py"),
        ("mpirun --oversubscribe -np 8 -x A --mca btl tcp,self -x B=1 python t.py", "mpirun", "", "python t.py"),
        ("mpiexec -mca btl ^openib --tag-output python t.py", "mpiexec", "", "python t.py"),
        ("ssh -o BatchMode=yes -p 22 gpu1 python t.py", "ssh", "", "python t.py"),
        ("pdsh -w gpu[1-2] python t.py", "pdsh", "", "python t.py"),
        ("pbsdsh -o -n 1 python t.py", "pbsdsh", "", "python t.py"),
        ("/usr/bin/srun -N 2 -- python -u -m torch.distributed.run --nnodes 2 t.py", "srun", "torchrun", "t.py"),
        ("singularity -d exec --nv -B /d:/d x.sif accelerate launch --num_processes 8 t.py", "", "accelerate", "t.py"),
        ("torchrun --standalone -m pkg.train --x", "", "torchrun", "pkg.train --x"),
        ("deepspeed --num_gpus 4 t.py", "", "deepspeed", "t.py"),
    ],
)  # fmt: skip
def test_a_training_is_found_behind_all_that_starts_it(
    line: str, starter: str, agent: str, words: str
) -> None:
    (one,) = launches.read(shell.commands(line))
    assert one.trains
    assert (one.starter, one.agent, [word.text for word in one.words]) == (starter, agent, words.split())


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("accelerate launch --multi_gpu --num_machines 2", {"multi-gpu": "", "num-machines": "2"}),
        ("accelerate launch --num_processes 4 --use_deepspeed", {"num-processes": "4", "use-deepspeed": ""}),
        (
            "accelerate launch --use-fsdp --same_network --cpu",
            {"use-fsdp": "", "same-network": "", "cpu": ""},
        ),
        ("accelerate launch --mixed_precision bf16", {"mixed-precision": "bf16"}),
        ("deepspeed --hostfile=h --bind_cores_to_rank", {"hostfile": "h", "bind-cores-to-rank": ""}),
        ("deepspeed --save_pid --num_gpus 2", {"save-pid": "", "num-gpus": "2"}),
        ("torchrun --not-known-here", {"not-known-here": ""}),
        ("python -W ignore -X dev -u -m torch.distributed.run --nnodes 2", {"nnodes": "2"}),
    ],
)
@pytest.mark.parametrize("program", ["t.py --lr 1", "'my folder/t.py'", "$SCRIPT -x"])
def test_an_option_of_an_agent_that_takes_no_value_leaves_it_its_program(
    line: str, options: dict[str, str], program: str
) -> None:
    *_, one = read(f"SCRIPT=s.py\n{line} {program}")
    words = shlex.split(program.replace("$SCRIPT", "s.py"))
    assert (_text(one.agent_options), _text(one.words)) == (options, words)


@pytest.mark.parametrize(
    "line", ["python -W ignore -m pkg -W", "python3 -X dev -u --check-hash-based-pycs never -m pkg -W"]
)
def test_options_of_python_and_their_values_are_not_what_it_starts(line: str) -> None:
    (one,) = read(line)
    assert one.trains
    assert _text(one.words_of_python) == ["-m", "pkg", "-W"]


@pytest.mark.parametrize("line", ["hostname", "apptainer build x.sif t.py", "accelerate config", "python -V"])
def test_what_starts_no_training_is_told_from_one(line: str) -> None:
    assert not any(one.trains for one in launches.read(shell.commands(line)))


@pytest.mark.parametrize("command", ["$L t.py", "${L} t.py", "bash -c '$L t.py'", "srun $L t.py"])
@pytest.mark.parametrize(
    "value", ['"torchrun --nnodes=2"', "'python -u -m torch.distributed.run --nnodes 2'"]
)
def test_a_launcher_in_a_variable_is_read_from_what_sets_it(value: str, command: str) -> None:
    one = read(f"L={value}\n{command}\n")[-1]
    assert (one.line, one.agent, _text(one.agent_options), _text(one.words)) == (
        *(2, "torchrun"),
        {"nnodes": "2"},
        ["t.py"],
    )


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ('L=(torchrun --nnodes=2)\n"${L[@]}" t.py', {"nnodes": "2"}, ["t.py"]),
        ("L=(\n  torchrun # why\n  --nnodes '2'\n)\nsrun ${L[*]} t.py", {"nnodes": "2"}, ["t.py"]),
        ("O=(--nnodes $N)\nsrun torchrun ${O[@]} t.py", {"nnodes": "$N"}, ["t.py"]),
        ('O="--nnodes 2 \\\n --m"\nsrun torchrun $O pkg.t', {"nnodes": "2", "m": ""}, ["pkg.t"]),
        ('O=--nnodes=2\nsrun torchrun "$O" t.py', {"nnodes": "2"}, ["t.py"]),
        ('O="--nnodes 2"\nL="torchrun $O"\n$L t.py', {"nnodes": "2"}, ["t.py"]),
        ('C="t.py --lr 1"\ntorchrun --nnodes 2 $C', {"nnodes": "2"}, ["t.py", "--lr", "1"]),
        ('L=/opt/bin/torchrun\n"$L" --nnodes 2 t.py', {"nnodes": "2"}, ["t.py"]),
        ("T=t.py\ntorchrun --nnodes 2 $T", {"nnodes": "2"}, ["t.py"]),
        (
            'T=conf/a.yaml\ntorchrun --nnodes 2 t.py --config "$T"',
            {"nnodes": "2"},
            ["t.py", "--config", "conf/a.yaml"],
        ),
        ("T=$1\ntorchrun --nnodes 2 $T", {"nnodes": "2"}, ["$T"]),
        ("T=a*.py\ntorchrun --nnodes 2 $T", {"nnodes": "2"}, ["$T"]),
        ("H=$(hostname)\ntorchrun --nnodes 2 t.py $H", {"nnodes": "2"}, ["t.py", "$H"]),
        ('C="t.py 1"\ntorchrun --nnodes 2 "$C"', {"nnodes": "2"}, ["$C"]),
        ("C=($(ls) t.py)\ntorchrun --nnodes 2 ${C[@]}", {"nnodes": "2"}, ["${C[@]}"]),
    ],
)
def test_what_a_variable_holds_stands_in_its_place(
    text: str, options: dict[str, str], words: list[str]
) -> None:
    one = read(f"{text}\n")[-1]
    assert (one.agent, _text(one.agent_options), _text(one.words)) == ("torchrun", options, words)


def test_variables_that_hold_one_another_come_to_an_end() -> None:
    doubling = "".join(f'V{number}="$V{number + 1} $V{number + 1}"\n' for number in range(40))
    *_, one = read(f'{doubling}A="$A x"\ntorchrun $A t.py $V0\n')
    assert _text(one.words) == ["$A", "x", "x", "x", "x", "t.py", *["$V4"] * 16]


def test_variables_are_filled_in_up_to_a_bound() -> None:
    found = read(f"V=({'x ' * 5000})\n" + "torchrun t.py ${V[@]}\n" * 1000)
    assert [len(one.words) for one in found if one.agent] == [5001] * 4 + [2] * 996


@pytest.mark.parametrize(
    "text",
    [
        'L="torchrun --nnodes=2"\nL="torchrun --nnodes=4"\n$L t.py',
        'L="torchrun --nnodes=2"\nL+=" --standalone"\n$L t.py',
        'L="echo torchrun --nnodes=2"\n$L t.py',
        'L="$HOW --nnodes=2"\n$L t.py',
        'L="torchrun --nnodes=2"\n"$L" t.py',
        'L="torchrun --nnodes=2"\n$LL t.py',
        "L=(torchrun --nnodes=2)\n$L t.py",
    ],
)
def test_a_variable_that_may_be_something_else_is_left_alone(text: str) -> None:
    assert [one for one in read(f"{text}\n") if one.agent] == []
