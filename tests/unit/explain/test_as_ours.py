"""The same job as one of ours: the lines that submit it, what a profile has of it, and what is left."""

import pytest

from entrypoint.explain import as_ours, traps
from entrypoint.explain.as_ours import Converted

ASKED = "#!/bin/bash\n#SBATCH --nodes=2\n"


def converted(text: str) -> Converted:
    return as_ours.convert(traps.read(text))


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("torchrun --nnodes=1 t.py a\n", ["apptrain run -- t.py a"]),
        ("apptainer exec x.sif torchrun t.py\n", ["APPTRAIN_IMAGE=x.sif apptrain run --image -- t.py"]),
        ("apptainer exec docker://x torchrun t.py\n", ["apptrain run --image -- t.py"]),
        ("apptainer exec '/my images/x' torchrun t.py\n", ["APPTRAIN_IMAGE='/my images/x' apptrain run --image -- t.py"]),
        (
            f"{ASKED}#SBATCH --gres=gpu:a100:4 -A lab -q high -p gpu -t 5 -J 'a b'\nsrun torchrun t.py\n",
            [
                "sbatch --nodes=2 --gpus-per-node=a100:4 --account=lab --qos=high --partition=gpu --time=5 "
                "--job-name='a b' slurm/multinode.sbatch -- t.py",
                "apptrain submit --cluster NAME --nodes 2 --gpus-per-node 4 --partition gpu --account lab --time 5 "
                "-- t.py",
            ],
        ),
        (
            f"{ASKED}#SBATCH --gpus-per-node=h100:2 --exclusive --mem=1G -p a\n#SBATCH -p b\nsrun torchrun t.py\n",
            [
                "sbatch --nodes=2 --gpus-per-node=h100:2 --exclusive --mem=1G --partition=b slurm/multinode.sbatch "
                "-- t.py",
                "apptrain submit --cluster NAME --nodes 2 --gpus-per-node 2 --partition b -- t.py",
            ],
        ),
        (
            f"{ASKED}#SBATCH --ntasks-per-node=4 --cpus-per-task=8 --gres=gpu:4\nsrun python t.py\n",
            [
                "sbatch --nodes=2 --gpus-per-node=4 --cpus-per-task=32 slurm/multinode.sbatch -- t.py",
                "apptrain submit --cluster NAME --nodes 2 --gpus-per-node 4 -- t.py",
            ],
        ),
        (
            f"{ASKED}srun torchrun t.py\n",
            [
                "sbatch --nodes=2 --gpus-per-node=0 slurm/multinode.sbatch -- t.py",
                "apptrain submit --cluster NAME --nodes 2 -- t.py",
            ],
        ),
        (
            f"{ASKED}#SBATCH --gres=gpu\nsrun torchrun t.py\n",
            [
                "sbatch --nodes=2 --gpus-per-node=1 slurm/multinode.sbatch -- t.py",
                "apptrain submit --cluster NAME --nodes 2 --gpus-per-node 1 -- t.py",
            ],
        ),
        (
            "#!/bin/bash\n#SBATCH -N 2-4 -n 8 -c 3 --gpus=8\nsrun python t.py\n",
            ["sbatch --cpus-per-task=3 slurm/multinode.sbatch -- t.py", "apptrain submit --cluster NAME -- t.py"],
        ),
        (
            "#!/bin/bash\n#PBS -l select=1:ncpus=8 -q gpu\n#PBS -N a -P p -A acc -W x=1 -M me@x -m be -p 5 -J 1-3 -V\n"
            "torchrun t.py\n",
            [
                "APPTRAIN_ARGS='-- t.py' qsub -l select=1:ncpus=8 -q gpu -N a -P p -A acc -W x=1 -M me@x -m be -p 5 "
                "-J 1-3 -v APPTRAIN_ARGS pbs/multinode.pbs",
                "apptrain submit --cluster NAME --nodes 1 --partition gpu --account acc -- t.py",
            ],
        ),
        (
            "#!/bin/bash\n#PBS -l select=2:ngpus=4 -q gpu\npbsdsh -- torchrun t.py 'a b'\n",
            [
                "APPTRAIN_ARGS='-- t.py '\"'\"'a b'\"'\"'' qsub -l select=2:ngpus=4 -q gpu -l place=scatter "
                "-v APPTRAIN_ARGS pbs/multinode.pbs",
                "apptrain submit --cluster NAME --nodes 2 --gpus-per-node 4 --partition gpu -- t.py 'a b'",
            ],
        ),
        (
            "#!/bin/bash\n#PBS -l select=2:ngpus=4 -l place=pack\n#PBS -l walltime=1:00 -P p\n"
            "pbsdsh -- apptainer exec -B /a x.sif torchrun t.py\n",
            [
                "APPTRAIN_IMAGE=x.sif APPTRAIN_BIND=/a APPTRAIN_ARGS='-- t.py' qsub -l select=2:ngpus=4 -l place=pack "
                "-l walltime=1:00 -P p -v APPTRAIN_ARGS,APPTRAIN_IMAGE,APPTRAIN_BIND pbs/multinode.pbs",
                "APPTRAIN_IMAGE=x.sif APPTRAIN_BIND=/a apptrain submit --cluster NAME --nodes 2 --gpus-per-node 4 "
                "--account p --time 1:00 -- t.py",
            ],
        ),
    ],
)  # fmt: skip
def test_a_job_is_submitted_by_its_own_scheduler_or_by_submit(text: str, lines: list[str]) -> None:
    assert list(converted(text).lines) == lines


def test_a_whole_job_is_converted_and_its_secret_is_not_shown() -> None:
    asked = "#SBATCH --gpus-per-node=4 -t 1:00:00 -p gpu --cpus-per-task=8 --hint=nomultithread\n"
    start = "srun -K1 apptainer exec --nv --bind /d:/data x.sif torchrun --nnodes=2 train.py --lr 0.1\n"
    made = converted(f"{ASKED}{asked}module load cuda/12.4\nexport HF_TOKEN=abc DATA=/d\n{start}")
    assert made == Converted(
        lines=(
            "APPTRAIN_IMAGE=x.sif APPTRAIN_BIND=/d:/data sbatch --nodes=2 --gpus-per-node=4 --cpus-per-task=8 "
            "--time=1:00:00 --partition=gpu --hint=nomultithread slurm/multinode.sbatch -- train.py --lr 0.1",
            "APPTRAIN_IMAGE=x.sif APPTRAIN_BIND=/d:/data apptrain submit --cluster NAME --nodes 2 --gpus-per-node 4 "
            "--partition gpu --time 1:00:00 -- train.py --lr 0.1",
        ),
        profile=("modules: [cuda/12.4]",),
        left=(
            "line 5: HF_TOKEN: export it where you submit; APPTRAIN_PASS=HF_TOKEN for the ranks",
            "line 5: DATA: export it where you submit; APPTRAIN_PASS=DATA for the ranks",
        ),
    )


@pytest.mark.parametrize(
    ("command", "program"),
    [
        ("python -u t.py --lr 1", "t.py --lr 1"),
        ("python -u -m pkg.t -u", "-m pkg.t -u"),
        ("torchrun -m pkg.t --x", "-m pkg.t --x"),
        ("torchrun --module pkg.t", "-m pkg.t"),
        ("python t.py > log 2>&1", "t.py"),
        ("python t.py >>log", "t.py"),
        ("python t.py 2>err a", "t.py a"),
        ("python t.py &> log", "t.py"),
        ("python t.py 2> log b", "t.py"),
        ("python t.py >> log b", "t.py"),
        ("python t.py | tee log", "t.py"),
        ("python t.py 'a b' $X", "t.py 'a b' \"$X\""),
        ("python t.py '$X\"'", "t.py '$X\"'"),
    ],
)
def test_the_program_keeps_its_arguments_and_loses_its_redirections(command: str, program: str) -> None:
    assert converted(f"{command}\n").lines == (f"apptrain run -- {program}",)


@pytest.mark.parametrize(
    ("options", "binds"),
    [
        ("-B /a", "/a"),
        ("--bind=/a:/b,/c --nv -B /d", "'/a:/b\n/c\n/d'"),
        ("--bind /a --bindings=/b", "/a"),
    ],
)
def test_binds_of_the_container_are_those_of_the_job(options: str, binds: str) -> None:
    (line,) = converted(f"apptainer exec {options} x.sif torchrun t.py\n").lines
    assert line == f"APPTRAIN_IMAGE=x.sif APPTRAIN_BIND={binds} apptrain run --image -- t.py"


@pytest.mark.parametrize(
    ("begin", "profile"),
    [
        ("module load a/1 b\nml load c\nmodule add d\nmodule purge\n", ["modules: [a/1, b, c, d]"]),
        ("module list\nml e\n", []),
        (
            "export NCCL_DEBUG=INFO FI_PROVIDER=efa\nGLOO_X=1\nexport OMP_NUM_THREADS=4\nexport CUDA_A=$(b)\n",
            ["env: {NCCL_DEBUG: INFO}", "env: {FI_PROVIDER: efa}", "env: {GLOO_X: 1}"],
        ),
        (
            "export UCX_A=1 TORCH_A=1 PYTORCH_A=1 CUDA_A=1 HF_A=1 OMP_A=1\n",
            [f"env: {{{name}_A: 1}}" for name in ("UCX", "TORCH", "PYTORCH", "CUDA", "HF", "OMP")],
        ),
        ("export HF_TOKEN=a NCCL_KEY=b NCCL_secret=c HF_PASSWORD=d HF_CREDENTIALS=e MY=f\n", []),
    ],
)
def test_modules_and_settings_of_libraries_are_for_a_profile(begin: str, profile: list[str]) -> None:
    assert list(converted(f"{begin}torchrun t.py\n").profile) == profile


JOB = f"{ASKED}#SBATCH --gres-flags=x --signal=B:USR1@60 -o a -J b\n"
ENVIRONMENT = "the environment: jobs run in the image (own packages: make venv, --venv)"


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ("", []),
        ("conda activate x\n", [f"line 4: {ENVIRONMENT}"]),
        ("mamba activate x\n", [f"line 4: {ENVIRONMENT}"]),
        ("conda list\n", []),
        (
            ". v/bin/activate\nsource v/activate.sh\nsource x.sh\n",
            [f"line {at}: {ENVIRONMENT}" for at in (4, 5)],
        ),
        (
            "cp a b\nrsync a b\ntar xf a\nmkdir c\nls\nsrun cp a b\n",
            [
                f"line {at}: {what}: do it before you submit, or in the script"
                for at, what in enumerate(("cp", "rsync", "tar", "mkdir"), 4)
            ],
        ),
        (
            "export DATA=/d\nexport HF_TOKEN=x\nexport lower=1\nLOCAL=1\nexport MASTER_ADDR=a\nexport NCCL_A=1\n",
            [
                f"line {at}: {name}: export it where you submit; APPTRAIN_PASS={name} for the ranks"
                for at, name in ((4, "DATA"), (5, "HF_TOKEN"))
            ],
        ),
        ("srun python u.py\n" * 5, [f"line {at}: a second training: a job of its own" for at in (5, 6, 7)]),
    ],
)
def test_what_is_not_carried_over_is_told_with_its_line(body: str, left: list[str]) -> None:
    made = converted(f"{JOB}{body}srun torchrun t.py\n")
    assert list(made.left) == ["line 3: --gres-flags: give it to sbatch if it is needed", *left]


def test_variables_in_the_arguments_are_filled_in_where_one_submits() -> None:
    made = converted(f"{ASKED}srun torchrun t.py --lr $LR\n")
    assert made.left == ("line 3: variables in the arguments are filled in where you submit",)
    assert made.lines[1] == 'apptrain submit --cluster NAME --nodes 2 -- t.py --lr "$LR"'


def test_a_script_without_a_training_has_no_line() -> None:
    why = "no line was found that starts a training: torchrun, or python with a script"
    assert converted(f"{ASKED}module load x\necho y\n") == Converted((), (), (why,))


@pytest.mark.parametrize(
    "line",
    [
        "exec bash ~/apptrain/pbs/multinode.pbs -- my.py",
        'source "$APPTRAIN_HOME/host/job.sh"',
        "apptrain run -- my.py",
    ],
)
def test_a_script_that_starts_ours_needs_none(line: str) -> None:
    assert converted(f"{ASKED}{line}\n").left == ("it starts apptrain already",)
    assert converted(f"{ASKED}# {line}\n").left != ("it starts apptrain already",)
