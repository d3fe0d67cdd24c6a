"""The same job as one of ours: the lines that submit it, what a profile has of it, and what is left."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from entrypoint.explain import as_ours, traps
from entrypoint.explain.as_ours import Converted
from entrypoint.plan import mistakes

CHECKOUT = Path(__file__).resolve().parents[3]
RECORDINGS = CHECKOUT / "tests/recordings"
NODES = "#!/bin/bash\n#SBATCH --nodes=2\n"
ASKED = "#!/bin/bash\n#SBATCH --nodes=2 --gpus-per-node=4\n"


def converted(text: str) -> Converted:
    return as_ours.convert(traps.read(text), traps.find(text))


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("torchrun --nnodes=1 t.py a\n", ["apptrain run --nodes 1 -- t.py a"]),
        ("apptainer exec x.sif torchrun t.py\n", ["APPTRAIN_IMAGE=x.sif apptrain run --image --nodes 1 -- t.py"]),
        (
            "apptainer exec -B ~/a:/a ~/x.sif torchrun t.py\n",
            ['APPTRAIN_IMAGE="$HOME/x.sif" APPTRAIN_BIND="$HOME/a:/a" apptrain run --image --nodes 1 -- t.py'],
        ),
        ("apptainer exec docker://x torchrun t.py\n", ["apptrain run --image --nodes 1 -- t.py"]),
        ("apptainer exec '/my images/x' torchrun t.py\n", ["APPTRAIN_IMAGE='/my images/x' apptrain run --image --nodes 1 -- t.py"]),
        (
            f"{NODES}#SBATCH --gres=gpu:a100:4 -A lab -q high -p gpu -t 5 -J 'a b'\nsrun torchrun t.py\n",
            [
                "sbatch --nodes=2 --gpus-per-node=a100:4 --account=lab --qos=high --partition=gpu --time=5 "
                "--job-name='a b' slurm/multinode.sbatch -- t.py",
                "apptrain submit --cluster NAME --nodes 2 --gpus-per-node 4 --partition gpu --account lab --time 5 "
                "--qos=high --job-name='a b' -- t.py",
            ],
        ),
        (
            f"{NODES}#SBATCH --gpus-per-node=h100:2 --exclusive --mem=1G -p a\n#SBATCH -p b\nsrun torchrun t.py\n",
            [
                "sbatch --nodes=2 --gpus-per-node=h100:2 --exclusive --mem=1G --partition=b slurm/multinode.sbatch "
                "-- t.py",
                "apptrain submit --cluster NAME --nodes 2 --gpus-per-node 2 --partition b -- t.py",
            ],
        ),
        (
            f"{NODES}#SBATCH --gres=nvme:1,gpu:a100:2\nsrun torchrun t.py\n",
            [
                "sbatch --nodes=2 --gpus-per-node=a100:2 slurm/multinode.sbatch -- t.py",
                "apptrain submit --cluster NAME --nodes 2 --gpus-per-node 2 -- t.py",
            ],
        ),
        (
            f"{NODES}#SBATCH --ntasks-per-node=4 --cpus-per-task=8 --gres=gpu:4\nsrun python t.py\n",
            [
                "sbatch --nodes=2 --gpus-per-node=4 --cpus-per-task=32 slurm/multinode.sbatch -- t.py",
                "apptrain submit --cluster NAME --nodes 2 --gpus-per-node 4 -- t.py",
            ],
        ),
        (
            f"{NODES}#SBATCH --tasks-per-node=4 --cpus-per-task=8 --gres=gpu:4\nsrun python t.py\n",
            [
                "sbatch --nodes=2 --gpus-per-node=4 --cpus-per-task=32 slurm/multinode.sbatch -- t.py",
                "apptrain submit --cluster NAME --nodes 2 --gpus-per-node 4 -- t.py",
            ],
        ),
        (
            f"{NODES}srun torchrun t.py\n",
            [
                "sbatch --nodes=2 --gpus-per-node=0 slurm/multinode.sbatch --device cpu --nproc-per-node 1 -- t.py",
                "apptrain submit --cluster NAME --nodes 2 --device cpu --nproc-per-node 1 -- t.py",
            ],
        ),
        (
            f"{NODES}#SBATCH --gres=gpu\nsrun torchrun t.py\n",
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
            "#!/bin/bash\n#PBS -l select=1:ncpus=8:ngpus=1 -q gpu\n#PBS -N a -P p -A acc -W x=1 -M me@x -m be -p 5 -J 1-3 -V\n"
            "torchrun t.py\n",
            [
                "APPTRAIN_ARGS='-- t.py' qsub -l select=1:ncpus=8:ngpus=1 -q gpu -N a -P p -A acc -W x=1 -M me@x -m be -p 5 "
                "-J 1-3 -v APPTRAIN_ARGS pbs/multinode.pbs",
                "apptrain submit --cluster NAME --nodes 1 --gpus-per-node 1 --partition gpu --account acc -N a -W x=1 "
                "-M me@x -m be -p 5 -J 1-3 -- t.py",
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
                "APPTRAIN_IMAGE=x.sif apptrain submit --cluster NAME --bind /a --nodes 2 --gpus-per-node 4 "
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
            "APPTRAIN_IMAGE=x.sif apptrain submit --cluster NAME --bind /d:/data --nodes 2 --gpus-per-node 4 "
            "--partition gpu --time 1:00:00 --hint=nomultithread -- train.py --lr 0.1",
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
        ("python -W ignore t.py --lr 1", "t.py --lr 1"),
        ("python -X dev -W ignore -m pkg.t", "-m pkg.t"),
        ("torchrun -- t.py --x", "t.py --x"),
        ("torchrun -m pkg.t --x", "-m pkg.t --x"),
        ("torchrun --module pkg.t", "-m pkg.t"),
        ("python t.py > log 2>&1", "t.py"),
        ("python t.py >>log", "t.py"),
        ("python t.py 2>err a", "t.py a"),
        ("python t.py &> log", "t.py"),
        ("python t.py 2> log b", "t.py b"),
        ("python t.py >> log b", "t.py b"),
        ("python t.py >& log <in 2>> err a", "t.py a"),
        ("python t.py &>> log a < in 1> log 2>&1", "t.py a"),
        ("python t.py a>log 2.5&>log b <<< x", "t.py a 2.5 b"),
        ("python t.py 2> >(tee '>&2') a '>' '|' '2>b' \\>c", "t.py a '>' '|' '2>b' '>c'"),
        ("torchrun 2> err t.py a", "t.py a"),
        ("python t.py | tee log", "t.py"),
        ("python t.py 'a b' $X", "t.py 'a b' $X"),
        ('python t.py ${X} "$X" --x=$X', 't.py ${X} "$X" "--x=$X"'),
        ("python t.py '$X\"'", "t.py '$X\"'"),
    ],
)
def test_the_program_keeps_its_arguments_and_loses_its_redirections(command: str, program: str) -> None:
    assert converted(f"{command}\n").lines == (f"apptrain run --nodes 1 -- {program}",)


@pytest.mark.parametrize(
    ("options", "binds"),
    [
        ("-B /a", "/a"),
        ("--bind=/a:/b,/c --nv -B /d,", "'/a:/b'$'\\012''/c'$'\\012''/d'"),
        ("--bind /a --bindings=/b", "/a"),
        ("--bind $DATA:/data,~/x:/x", '"$DATA:/data"$\'\\012\'"$HOME/x:/x"'),
    ],
)
def test_binds_of_the_container_are_those_of_the_job(options: str, binds: str) -> None:
    (line,) = converted(f"apptainer exec {options} x.sif torchrun t.py\n").lines
    gpus = " --gpus-per-node 1" if "--nv" in options else ""
    assert line == f"APPTRAIN_IMAGE=x.sif APPTRAIN_BIND={binds} apptrain run --image --nodes 1{gpus} -- t.py"


def test_each_bind_has_a_line_of_its_own_an_option_or_a_variable_that_qsub_carries() -> None:
    launch = "apptainer exec --bind '/my data:/data' --bind ~/proj:/proj x.sif torchrun t.py\n"
    slurm, submit = converted(f"{ASKED}srun {launch}").lines
    assert in_bash(slurm, "APPTRAIN_BIND") == "/my data:/data\n/home/me/proj:/proj"
    assert "--cluster NAME --bind '/my data:/data' --bind \"$HOME/proj:/proj\" --nodes 2" in submit
    qsub, _ = converted(f"#PBS -l select=2\npbsdsh -- {launch}").lines
    assert in_bash(qsub, "APPTRAIN_BIND", "APPTRAIN_BIND_2") == "/my data:/data\n/home/me/proj:/proj"
    assert "-v APPTRAIN_ARGS,APPTRAIN_IMAGE,APPTRAIN_BIND,APPTRAIN_BIND_2 pbs/multinode.pbs" in qsub


def in_bash(line: str, *names: str) -> str:
    """These variables, as bash gives them to the program of a line."""
    script = f"HOME=/home/me; sbatch() {{ printenv {' '.join(names)}; }}; qsub() {{ sbatch; }}; {line}"
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("asked", [ASKED, "#PBS -l select=2\n", ""])
def test_a_long_line_is_whole_and_one_that_is_too_long_is_refused(asked: str) -> None:
    options = "".join(f" --option-{number} value-{number}" for number in range(3500))
    made = converted(f"{asked}torchrun t.py{options}\n")
    assert all(len(line) > 80_000 and options in line for line in made.lines)
    assert len(made.lines) == (2 if asked else 1)
    made = converted(f"{asked}torchrun t.py{options}{options}\n")
    told = "more than 100,000 characters: give the arguments in a file"
    assert (made.lines, made.left[0].partition(": ")[2]) == ((), told)


@pytest.mark.parametrize(
    "training",
    [
        "accelerate launch --not-known-here my_program --lr 1",
        "accelerate launch --not-known-here my_program",
        "torchrun",
        "torchrun --nnodes 2 -m",
    ],
)
@pytest.mark.parametrize("asked", [ASKED, "#PBS -l select=2\n", ""])
def test_there_is_no_line_without_a_program(asked: str, training: str) -> None:
    made = converted(f"{asked}{training}\n")
    why = f"what {training.split()[0]} starts was not found: there is no line"
    assert (made.lines, made.left[0].partition(": ")[2]) == ((), why)


def test_the_lines_of_a_command_in_an_argument_are_not_made_one() -> None:
    made = converted('torchrun t.py "$(\n  first\n  second\n)"\n')
    told = "line 1: a command of several lines in the arguments: write out what it prints"
    assert (made.lines, made.left[0]) == ((), told)


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
        ("srun python u.py\n" * 5, [f"line {at}: a second training: a job of its own" for at in (4, 5, 6)]),
        (
            "python -m pip install -e .\npip install x\npython3 -m venv v\npython -m compileall .\n",
            [f"line {at}: {ENVIRONMENT}" for at in (4, 5, 6)],
        ),
        (
            "python get.py --out d\npython -m nltk.downloader x\n",
            [
                f"line {at}: {what}: it runs on one node alone: do it before you submit"
                for at, what in ((4, "get.py"), (5, "nltk.downloader"))
            ],
        ),
    ],
)
def test_what_is_not_carried_over_is_told_with_its_line(body: str, left: list[str]) -> None:
    made = converted(f"{JOB}{body}srun torchrun t.py\n")
    assert list(made.left) == ["line 3: --gres-flags: give it to sbatch if it is needed", *left]


NOT_TAKEN = "our jobs start the image without it"
STARTS_IN = "ranks start in the folder from which you submit"


def image_of(name: str) -> str:
    return f"the image {name}: make a .sif file of it, and give that in APPTRAIN_IMAGE"


@pytest.mark.parametrize(
    ("launch", "left"),
    [
        (
            "srun --container-image=nvcr.io/nvidia/nemo:24.07 --container-mounts=/d:/data,$PWD:/w "
            "--container-workdir=/w --container-writable --no-container-mount-home -N2 torchrun t.py",
            [
                image_of("nvcr.io/nvidia/nemo:24.07"),
                "--container-mounts=/d:/data,$PWD:/w: APPTRAIN_BIND shows folders in the image",
                f"--container-workdir=/w: {STARTS_IN}",
                f"--container-writable: {NOT_TAKEN}",
                f"--no-container-mount-home: {NOT_TAKEN}",
            ],
        ),
        ("srun apptainer exec --nv docker://x/y:1 torchrun t.py", [image_of("docker://x/y:1")]),
        (
            "srun apptainer exec --nv --pwd /w --env A=1,HF_TOKEN=abc --writable-tmpfs -e --home=/h -B /d x.sif python t.py",
            [
                f"--pwd /w: {STARTS_IN}",
                *(f"{one}: export it where you submit; APPTRAIN_PASS={one} for the ranks" for one in ("A", "HF_TOKEN")),
                f"--writable-tmpfs: {NOT_TAKEN}",
                f"--home: {NOT_TAKEN}",
            ],
        ),
        ("srun apptainer exec --nv -B /d $SIF torchrun t.py", ["variables of the image and its binds are filled in where you submit"]),
    ],
)  # fmt: skip
def test_what_no_line_has_of_the_container_is_told(launch: str, left: list[str]) -> None:
    assert list(converted(f"{ASKED}{launch}\n").left) == [f"line 3: {one}" for one in left]


@pytest.mark.parametrize(
    ("launch", "folder", "names"),
    [
        ("FOO=1 srun -D /w env BAR=2 python t.py", "--chdir=/w", ["FOO", "BAR"]),
        ("srun --chdir=/w --export=ALL,FOO=1,HOME,low=2 torchrun t.py", "--chdir=/w", ["FOO"]),
        ("mpirun -np 8 -x FOO=1 -x PATH -x RANK=3 -wdir /w python t.py", "-wdir /w", ["FOO"]),
        ("mpiexec -genv FOO 1 -env BAR=2 -wd /w python t.py", "-wd /w", ["FOO", "BAR"]),
        ("mpiexec --env=FOO=1 --wdir=/w python t.py", "-wdir /w", ["FOO"]),
        ("srun -D /w bash -c 'FOO=1 torchrun t.py'", "--chdir=/w", ["FOO"]),
    ],
)
def test_folder_and_variables_of_what_starts_the_ranks_are_told(
    launch: str, folder: str, names: list[str]
) -> None:
    told = [f"{one}: export it where you submit; APPTRAIN_PASS={one} for the ranks" for one in names]
    assert list(converted(f"{ASKED}{launch}\n").left) == [
        f"line 3: {one}" for one in (f"{folder}: {STARTS_IN}", *told)
    ]


def test_settings_of_libraries_for_the_training_alone_are_for_a_profile_too() -> None:
    made = converted(f"{ASKED}mpirun -np 8 -x NCCL_DEBUG=INFO env HF_HOME=/h python t.py\n")
    assert made.profile == ("env: {HF_HOME: /h}", "env: {NCCL_DEBUG: INFO}")
    made = converted(f"{ASKED}srun --export=ALL,OUT=$SLURM_JOB_ID torchrun t.py\n")
    assert made.left == (f"line 3: OUT: {INSIDE}",)


@pytest.mark.parametrize("where", ["#SBATCH --environment=ngc-pt\nsrun", "srun --environment=ngc-pt"])
def test_an_environment_of_the_container_engine_is_told_as_an_image(where: str) -> None:
    assert converted(f"{ASKED}{where} torchrun t.py\n").left == (f"line 3: {image_of('ngc-pt')}",)


def test_a_container_that_sbatch_is_asked_for_is_told_as_one_of_srun() -> None:
    made = converted(f"{ASKED}#SBATCH --container-image=x.sqsh --container-name=a\nsrun torchrun t.py\n")
    assert made.left == (f"line 3: {image_of('x.sqsh')}", f"line 3: --container-name: {NOT_TAKEN}")


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ("cd $HOME/llm\nsrun torchrun t.py", ["line 3: cd $HOME/llm: "]),
        ("cd /a && pushd b\ncd\nsrun torchrun t.py\ncd /c", ["line 3: cd /a: ", "line 3: cd b: ", "line 4: cd ~: "]),
        ('cd "$SLURM_SUBMIT_DIR"; cd ${SLURM_SUBMIT_DIR:-.}/; cd $PBS_O_WORKDIR; cd $PWD; cd .; cd -\nsrun torchrun t.py', []),
        ("srun bash -c 'cd /a\ntorchrun t.py'", ["line 3: cd /a: "]),
        ("bash -c 'cd /a; make'\nsrun torchrun t.py", []),
        ("(cd x; make)\n(cd y && (make)) | tee log\nsrun torchrun t.py", []),
        ("(cd x\nsrun torchrun t.py)", ["line 3: cd x: "]),
        ("(cd x; (cd y); srun bash -c 'cd z; torchrun t.py')", ["line 3: cd x: ", "line 3: cd z: "]),
        ("pushd /x; make; popd\npushd /y\nsrun torchrun t.py\npopd", ["line 4: cd /y: "]),
        ("cd data && make && cd ..\ncd /a; cd -\nsrun torchrun t.py; cd b", []),
        ("cd /a/b; cd ..\nsrun torchrun t.py", ["line 3: cd /a/b: ", "line 3: cd ..: "]),
    ],
)  # fmt: skip
def test_a_folder_in_which_the_training_starts_is_told(body: str, left: list[str]) -> None:
    how = "submit from there, or give the script by its whole path"
    assert list(converted(f"{ASKED}{body}\n").left) == [f"{one}{how}" for one in left]


def test_a_folder_of_the_job_is_for_the_script_and_one_by_hand_for_who_starts_it() -> None:
    made = converted(f"{ASKED}d=/tmp/$SLURM_JOB_ID\ncd $d/src\nsrun torchrun t.py\n")
    assert made.left == ("line 4: cd $d/src: made inside the job: change to it in your script",)
    made = converted("cd src\ntorchrun t.py --device cpu\n")
    assert made.left == ("line 1: cd src: start it from there, or give the script by its whole path",)


@pytest.mark.parametrize(
    ("body", "program"),
    [
        ("python get.py\nsrun python t.py --lr 1\npython look.py\n", "t.py --lr 1"),
        ("python get.py\ntorchrun t.py\n", "t.py"),
        ("srun -n1 python get.py\nsrun torchrun t.py\n", "t.py"),
        ("torchrun t.py\nsrun torchrun u.py\n", "u.py"),
        ("python -m pip install -e .\npython t.py\npython u.py\n", "t.py"),
    ],
)
def test_the_training_is_what_a_launcher_starts_else_srun_else_the_script(body: str, program: str) -> None:
    assert converted(f"{ASKED}{body}").lines[1].endswith(f" -- {program}")


@pytest.mark.parametrize(
    ("launch", "file"),
    [
        ("srun -K1 bash launch.sh --config big.yaml", "launch.sh"),
        ("srun ./train.sh", "./train.sh"),
        ("srun ./train", "./train"),
        ("srun apptainer exec --nv x.sif bash -x launch.sh", "launch.sh"),
        ("mpirun -np 8 /lab/launch.sh", "/lab/launch.sh"),
        ("srun bash -c 'source env.sh; ./train.sh'", "./train.sh"),
    ],
)
def test_a_helper_is_no_training_if_srun_starts_a_script_that_may_be_one(launch: str, file: str) -> None:
    script = f"{ASKED}python prepare.py\n{launch}\npython evaluate.py --ckpt out\n"
    told = f"line 4: what {file} starts is not looked into: give explain that file too"
    assert converted(script) == Converted((), (), (told,))
    assert not any(one.trap is traps.FIRST_NODE_ONLY for one in traps.find(script))
    beside = converted(f"{script}srun torchrun t.py\n")
    assert (beside.lines[1].endswith(" -- t.py"), told in beside.left) == (True, True)


@pytest.mark.parametrize(
    "launch", ["bash launch.sh", "srun bash -c 'hostname'", "srun hostname", "srun ./a.out"]
)
def test_a_script_is_a_training_in_python_where_srun_starts_no_script(launch: str) -> None:
    assert converted(f"{ASKED}{launch}\npython t.py\n").lines[1].endswith(" -- t.py")


def test_a_script_that_torchrun_starts_on_each_rank_is_the_training() -> None:
    made = converted(f"{ASKED}srun torchrun --nnodes 2 --no-python bash t.sh\n")
    assert (made.lines[1].endswith(" -- bash t.sh"), made.left) == (True, ())


def test_what_is_not_carried_over_of_a_line_is_told_once() -> None:
    made = converted(f"{ASKED}{'pip install x; python get.py; ' * 1000}srun torchrun t.py\n")
    assert len(made.left) == 2


def test_a_helper_behind_the_training_is_for_afterwards() -> None:
    told = "line 4: look.py: it runs on one node alone: do it afterwards"
    assert told in converted(f"{ASKED}srun torchrun t.py\npython look.py\n").left


@pytest.mark.parametrize(
    ("body", "options", "left"),
    [
        (
            "CUDA_VISIBLE_DEVICES=0,1 torchrun --standalone --nproc_per_node 2 t.py",
            "--nodes 1 --gpus-per-node 2",
            [],
        ),
        (
            "torchrun --standalone --nproc_per_node=4 t.py --cpu",
            "--nodes 1 --device cpu --nproc-per-node 4",
            [],
        ),
        ("torchrun --nproc_per_node=4 t.py --cpu", "--nodes 1 --device cpu --nproc-per-node 4", []),
        (
            "torchrun --nnodes 2 --nproc_per_node=4 t.py --cpu",
            "--nodes 2 --device cpu --nproc-per-node 4",
            [],
        ),
        ("accelerate launch --num_processes 4 t.py --amp", "--nodes 1 --gpus-per-node 4", []),
        (
            "accelerate launch --num_machines 2 --num_processes 8 t.py --amp",
            "--nodes 2 --gpus-per-node 4",
            [],
        ),
        ("deepspeed --num_gpus 4 t.py", "--nodes 1 --gpus-per-node 4", []),
        ("python t.py --device cuda", "--nodes 1 --gpus-per-node 1", []),
        (
            "torchrun --nproc_per_node 4 t.py",
            "--nodes 1 --nproc-per-node 4",
            [
                "the script does not tell whether it trains on GPUs: if so, --gpus-per-node for --nproc-per-node"
            ],
        ),
        (
            "torchrun --nnodes $N --nproc_per_node gpu t.py",
            "",
            [
                "line 1: the number of nodes: give --nodes",
                "line 1: the number of ranks on a node: give --gpus-per-node",
            ],
        ),
    ],
)
def test_a_job_that_starts_by_hand_has_its_nodes_ranks_and_gpus(
    body: str, options: str, left: list[str]
) -> None:
    made = converted(f"{body}\n")
    program = body[body.index("t.py") :]
    assert made.lines == (f"apptrain run {options} -- {program}".replace("  ", " "),)
    assert list(made.left) == left


@pytest.mark.parametrize(
    "body",
    [
        "srun bash <<'X'\ntorchrun t.py --lr 1\nX\npython plot.py",
        "srun -N1 -n1 python prep.py\nsrun bash -l <<X\ntorchrun t.py --lr 1\nX",
        "srun apptainer exec x.sif bash -s <<'X'\ncd /x\ntorchrun t.py --lr 1\nX",
        *(
            f"for n in a b; do ssh $n {words} <<X &\ntorchrun t.py --lr 1\nX\ndone\nwait\npython plot.py"
            for words in ("", "bash", "'bash -s'", "'cd && bash -l'", "bash -s")
        ),
        "srun bash -euo pipefail <<'X'\ntorchrun t.py --lr 1\nX\npython plot.py",
        "srun bash -c 'bash -s' <<'X'\ntorchrun t.py --lr 1\nX\npython plot.py",
    ],
)
def test_a_training_that_a_shell_reads_from_a_here_document_is_found(body: str) -> None:
    assert converted(f"{ASKED}{body}\n").lines[0].endswith("slurm/multinode.sbatch -- t.py --lr 1")
    assert "first-node-only" not in [one.trap.id for one in traps.find(f"{ASKED}{body}\n")]


def test_a_shell_that_was_followed_into_its_here_document_is_not_told_as_one_that_was_not() -> None:
    assert converted(f"{ASKED}srun bash -s -- 1 <<X\ntorchrun t.py\nX\n").left == ()


def test_a_here_document_that_no_shell_reads_is_none_of_its_commands() -> None:
    made = converted(f"{ASKED}cat >t.sh <<X\ntorchrun no.py\nX\nsrun bash x.sh <<X\ntorchrun no.py\nX\n")
    assert made.left == ("line 6: what x.sh starts is not looked into: give explain that file too",)


def test_in_a_here_document_the_job_script_fills_in_variables_if_its_end_is_not_quoted() -> None:
    filled, kept = (f"{ASKED}srun bash <<{end}\npython t.py --rank $RANK '$X'\nX\n" for end in ("X", "'X'"))
    assert converted(filled).lines[0].endswith('-- t.py --rank $RANK "$X"')
    assert converted(kept).lines[0].endswith("-- t.py --rank $RANK '$X'")


def test_chunks_of_pbs_with_different_gpus_are_told() -> None:
    made = converted("#PBS -l select=1:ngpus=1+3:ngpus=2\nmpirun python t.py\n")
    assert made.lines[1] == "apptrain submit --cluster NAME --nodes 4 -- t.py"
    assert made.left == ("line 1: -l select: the GPUs of a node are not known: give --gpus-per-node",)


def test_gpus_of_an_old_request_to_pbs_are_told_as_they_stand_there() -> None:
    made = converted("#PBS -l nodes=4:ppn=32:gpus=2\nmpirun python t.py\n")
    assert made.left == ("line 1: -l nodes: our job asks by chunks: put it into -l select",)


HETEROGENEOUS = (
    "#!/bin/bash\n#SBATCH --nodes=1 --ntasks=1 --cpus-per-task=32\n#SBATCH hetjob\n"
    "#SBATCH --nodes=4 --ntasks-per-node=4 --gpus-per-node=4\n"
)


def test_a_heterogeneous_job_has_no_line() -> None:
    step = "srun --het-group=0 python prep.py : --het-group=1 python train.py --dist\n"
    for text in (HETEROGENEOUS + step, HETEROGENEOUS + "srun --het-group=1 python train.py\n"):
        made = converted(text)
        told = "a heterogeneous job: in ours all nodes are alike: submit the component that trains, alone"
        assert (made.lines, made.left) == ((), (told,))
        assert [one.trap.id for one in traps.find(text) if not one.trap.is_remark] == []


def test_a_trap_that_each_component_of_a_heterogeneous_job_makes_is_told() -> None:
    text = HETEROGENEOUS.partition("\n")[2] + "srun --het-group=1 python train.py\n"
    assert [one.trap.id for one in traps.find(text) if not one.trap.is_remark] == ["no-shebang"]


@pytest.mark.parametrize(
    "step", ["srun -n1 python a.py : -n12 python t.py", "mpirun -n 1 a : -n 12 python t.py"]
)
def test_a_step_of_several_programs_has_no_line(step: str) -> None:
    made = converted(f"{ASKED}{step}\n")
    told = "line 3: several programs in one step: our jobs start one on all nodes"
    assert (made.lines, made.left) == ((), (told,))


def test_a_colon_at_the_end_is_an_argument() -> None:
    assert converted(f"{ASKED}srun python t.py --between :\n").lines[0].endswith("-- t.py --between :")


SEVERAL = "#SBATCH --nodes=2 --gpus-per-node=4 --ntasks-per-node=4\n"


@pytest.mark.parametrize(
    "helper",
    [
        *(
            "srun -N1 -n1 python get.py",
            "srun -n 1 python get.py",
            "srun -N1 --ntasks-per-node=1 python get.py",
        ),
        *("srun -N1 -n1 accelerate launch get.py", "srun -n1 torchrun --nproc-per-node 2 get.py"),
    ],
)
@pytest.mark.parametrize("training", ["srun python t.py", "srun -N2 -n2 torchrun --nnodes 2 t.py"])
def test_a_step_of_one_task_prepares_what_runs_in_several(helper: str, training: str) -> None:
    made = converted(f"{SEVERAL}{helper}\n{training}\n")
    assert made.lines[0] == "sbatch --nodes=2 --gpus-per-node=4 slurm/multinode.sbatch -- t.py"
    assert made.left[0] == "line 2: get.py: it runs on one node alone: do it before you submit"
    assert "second" not in " ".join(made.left)


def test_a_step_of_one_task_is_no_training_beside_a_script_that_srun_starts_on_all() -> None:
    made = converted(f"{SEVERAL}srun -n1 python get.py\nsrun bash launch.sh\n")
    assert made.lines == ()


@pytest.mark.parametrize(
    "body",
    [
        "srun -n1 python t.py",
        "srun -N1 -n1 torchrun --nnodes 2 t.py &\nsrun -N1 -n1 torchrun --nnodes 2 t.py",
        "for n in a b; do srun -N1 -n1 -w $n torchrun --nnodes 2 t.py & done; wait\nsrun python look.py",
    ],
)
def test_a_step_of_one_task_may_be_the_training_or_a_node_of_it(body: str) -> None:
    assert converted(f"{SEVERAL}{body}\n").lines[0].endswith(" -- t.py")


def test_on_one_node_what_starts_ranks_in_one_task_is_the_training() -> None:
    made = converted(
        "#SBATCH --nodes=1 --gpus-per-node=4 --ntasks-per-node=4\n"
        "srun -n1 torchrun --nproc-per-node 4 t.py\nsrun python look.py\n"
    )
    assert made.lines[0].endswith(" -- t.py")


def test_variables_in_the_arguments_are_filled_in_where_one_submits() -> None:
    made = converted(f"{ASKED}srun torchrun t.py --lr $LR\n")
    assert made.left == ("line 3: variables in the arguments are filled in where you submit",)
    assert made.lines[1] == "apptrain submit --cluster NAME --nodes 2 --gpus-per-node 4 -- t.py --lr $LR"


@pytest.mark.parametrize("asked", [ASKED, "#PBS -l select=2\n", ""])
@pytest.mark.parametrize("program", ["$PROGRAM", "${PROGRAM}"])
def test_a_program_that_a_variable_names_has_to_be_set(asked: str, program: str) -> None:
    for line in converted(f"{asked}torchrun {program} $ARGS\n").lines:
        assert "-- ${PROGRAM:?} $ARGS" in line
        ended = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env={}, check=False)
        assert "PROGRAM: parameter null or not set" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "program"),
    [
        ("$PWD/t.py --name 'a b'", ["/here/t.py", "--name", "a b"]),
        ("t.py 'a$PWD`b' \"a $PWD\"", ["t.py", "a$PWD`b", "a /here"]),
        ("t.py 'x-${PWD}.pt' \\$5 'a`id`b'", ["t.py", "x-${PWD}.pt", "$5", "a`id`b"]),
        (
            't.py $ARGS ${ARGS} "$ARGS" \'$ARGS\' $UNSET "$UNSET" $PWD',
            ["t.py", *["--lr", "1e-3", "--wd", "0"] * 2, "--lr  1e-3 --wd 0", "$ARGS", "", "/here"],
        ),
        (
            "~/t.py ~/'a b'-$PWD '~/c' \"~/d\" e~/f",
            ["/home/me/t.py", "/home/me/a b-/here", "~/c", "~/d", "e~/f"],
        ),
        (r't.py "\d+" "\.tmp$" "C:\$PWD" "\"\\\$"', ["t.py", r"\d+", r"\.tmp$", r"C:$PWD", r'"\$']),
        (r't.py "\d-$PWD"', ["t.py", r"\d-/here"]),
        (
            "t.py --sep 'a  b' 'x\ty' \"$PWD\t 1\" 'l\n  m' \x1b[1m",
            ["t.py", "--sep", "a  b", "x\ty", "/here\t 1", "l\n  m", "\x1b[1m"],
        ),
        ("t.py 'x-${PWD}'-$PWD\\`'\"\\'`pwd`", ["t.py", 'x-${PWD}-/here`"\\/there']),
    ],
)
def test_the_shell_fills_in_what_it_would_in_the_script(arguments: str, program: list[str]) -> None:
    made = converted(f"#PBS -l select=2:ngpus=4\npbsdsh -- torchrun {arguments}\n")
    before = "HOME=/home/me; PWD=/here; ARGS='--lr  1e-3 --wd 0'; pwd() { echo /there; }; "
    qsub, submit = (
        subprocess.run(["bash", "-c", before + script], capture_output=True, text=True, check=True).stdout
        for script in (
            made.lines[0].partition(" qsub ")[0] + '; printf %s "$APPTRAIN_ARGS"',
            made.lines[1].replace("apptrain submit", "printf '%s\\0'"),
        )
    )
    assert shlex.split(qsub) == ["--", *program]
    assert submit.split("\0")[-len(program) - 2 :] == ["--", *program, ""]
    assert all(line.isprintable() for line in made.lines)


def test_the_line_has_what_variables_of_the_script_hold() -> None:
    made = converted(
        f'{ASKED}MEET=(--nnodes 2 --master_addr $head)\nMODEL="--layers 24 --lr $LR"\n'
        'export CMD="`pwd`/t.py $MODEL"\n'
        "srun bash -c 'torchrun ${MEET[@]} --node_rank $SLURM_NODEID $CMD --save /d'\n"
    )
    line = 'apptrain submit --cluster NAME --nodes 2 --gpus-per-node 4 -- "$(pwd)/t.py" --layers 24 --lr $LR --save /d'
    assert made.lines[1] == line
    assert made.left == ("line 6: variables in the arguments are filled in where you submit",)


@pytest.mark.parametrize(
    "setting",
    [
        "LR='{\"lr\": 0.1}'",
        "LR='{\"lr\":0.1}'",
        'LR="it\'s"',
        'LR="a\\\\b"',
        "LR=0.1\nfor LR in 0.1 0.2; do true; done",
        "LR=0.1\nread -r LR < rates",
    ],
)
def test_a_value_that_has_quotes_or_changes_is_left_to_its_variable(setting: str) -> None:
    made = converted(f'{ASKED}{setting}\nsrun torchrun t.py --lr "$LR"\n')
    assert made.lines[1] == 'apptrain submit --cluster NAME --nodes 2 --gpus-per-node 4 -- t.py --lr "$LR"'


@pytest.mark.parametrize("asked", [ASKED, "#PBS -l select=2\n", ""])
@pytest.mark.parametrize(
    "program", ['"$@"', "$@", "$*", '"$1"', "$1", "${1}", '"${@:2}"', '"${CMD[@]}"', "${CMD[*]}", "-m $1"]
)
def test_there_is_no_line_if_the_script_does_not_say_what_it_starts(asked: str, program: str) -> None:
    made = converted(f"{asked}CMD=(t.py)\nCMD+=(--lr 1)\ntorchrun --nnodes=2 {program}\n")
    name = program.removeprefix("-m ").strip('"')
    told = f"{name} names what is started: write it out: there is no line"
    assert (made.lines, made.left[0].partition(": ")[2]) == ((), told)


@pytest.mark.parametrize(
    ("arguments", "called_with", "others"),
    [
        ('"$@"', ["$@"], False),
        ("$1 --x ${2:-3} --n ${#@}", ["$1", "${#@}", "${2:-3}"], False),
        ('--out=/d/$1 --lr "$LR"', ["$1"], True),
        ("$* $LR", ["$*"], True),
        ("'$1' \\$2 ${A[@]} ${#A[@]}", [], True),
    ],
)
def test_arguments_of_the_script_itself_are_told(
    arguments: str, called_with: list[str], others: bool
) -> None:
    made = converted(f"{ASKED}srun torchrun t.py {arguments}\n")
    how = "in the arguments: what the script is called with: write it out"
    at_submission = "line 3: variables in the arguments are filled in where you submit"
    assert list(made.left) == [f"line 3: {one} {how}" for one in called_with] + [at_submission] * others
    assert made.lines


def test_what_is_proposed_never_starts_the_reference_job_instead_of_a_program(tmp_path: Path) -> None:
    script = tmp_path / "x.sh"
    script.write_text(f'{ASKED}srun torchrun --nnodes=2 "$@"\n')
    told = run(f"apptrain explain {script} || true", tmp_path)
    assert "not carried over: line 3: $@ names what is started" in told
    assert "the same job as one of ours" not in told


@pytest.mark.parametrize(
    ("arguments", "inside", "others"),
    [
        ("--fold $a", ["a"], False),
        ("--seed $((SLURM_ARRAY_TASK_ID / 4)) --lr $LR", ["SLURM_ARRAY_TASK_ID"], True),
        ("--to $OUT --at ${b}", ["b"], True),
        ("--now $(date)", [], True),
        ("--lr 1", [], False),
        ("--to 'x-${b}'", [], False),
        ('--not "\\.tmp$" > $a', [], False),
    ],
)
def test_variables_in_the_arguments_that_only_a_job_has_are_told(
    arguments: str, inside: list[str], others: bool
) -> None:
    made = converted(
        f"{ASKED}a=$((2 * SLURM_ARRAY_TASK_ID)); b=$((1 + $a))\nsrun torchrun t.py {arguments}\n"
    )
    at_submission = "line 4: variables in the arguments are filled in where you submit"
    told = [f"line 4: {one} in the arguments: {INSIDE}" for one in inside]
    assert list(made.left) == told + [at_submission] * others


def test_brackets_without_an_end_take_no_time() -> None:
    deep = f"export X={'(' * 50_000}$SLURM_JOB_ID{')' * 50_000}\n" + "export Y=$SLURM_NNODES\n"
    assert converted(f"{ASKED}{deep}srun torchrun t.py\n").left == (f"line 3: X: {INSIDE}",)


CPU_JOB = "the request names no GPUs: taken for a job on CPUs; where GPUs are not counted: --device cuda"
NOT_COUNTED = "the request names no GPUs: taken for nodes whose GPUs the scheduler does not count"
NOT_TOLD = "the request does not tell whether the nodes have GPUs: add --device cuda, or cpu, in front of --"
BY_TORCHRUN = "srun torchrun --nnodes=2 --nproc_per_node=4 t.py"


@pytest.mark.parametrize(
    ("script", "options", "told"),
    [
        (f"{NODES}{BY_TORCHRUN} --device cpu", "--device cpu --nproc-per-node 4", CPU_JOB),
        (f"{NODES}{BY_TORCHRUN}", "--device cpu --nproc-per-node 4", CPU_JOB),
        (f"{NODES}#SBATCH -n 16\nsrun python t.py", "--device cpu --nproc-per-node 8", CPU_JOB),
        (f"{NODES}srun --ntasks-per-node=3 python t.py", "--device cpu --nproc-per-node 3", CPU_JOB),
        (f"{NODES}srun accelerate launch --cpu --num_processes 6 t.py", "--device cpu --nproc-per-node 3", CPU_JOB),
        (f"{NODES}srun deepspeed --num_gpus 3 t.py", "--device cuda --nproc-per-node 3", NOT_COUNTED),
        (f"{NODES}#SBATCH -p cpu\nmodule load cuda\nsrun python t.py", "--device cpu --nproc-per-node 1", CPU_JOB),
        (f"{NODES}export CUDA_VISIBLE_DEVICES=''\nsrun python t.py", "--device cpu --nproc-per-node 1", CPU_JOB),
        (f"{NODES}srun --cpu-bind=no python t.py --amp", "--device cuda --nproc-per-node 1", NOT_COUNTED),
        (f"{NODES}#SBATCH -p mi2104x\n{BY_TORCHRUN}", "--device cuda --nproc-per-node 4", NOT_COUNTED),
        (f"{NODES}# on cpu, no gpu\n{BY_TORCHRUN}", "--device cpu --nproc-per-node 4", CPU_JOB),
        ("#PBS -l select=2:ncpus=8\nmpiexec -n 8 --ppn 4 python t.py", "--device cpu --nproc-per-node 4", CPU_JOB),
        ("#PBS -l select=2:system=x\nmpiexec -n 8 --ppn 4 python t.py", "--nproc-per-node 4", NOT_TOLD),
        ("#PBS -l select=2 -q gpu\npbsdsh -- torchrun --nproc_per_node=2 t.py", "--device cuda --nproc-per-node 2", NOT_COUNTED),
    ],
)  # fmt: skip
def test_a_job_that_asks_for_no_gpus_is_told_its_device_and_ranks(
    script: str, options: str, told: str
) -> None:
    made = converted(f"{script}\n")
    line, submit = made.lines
    own = " --device cpu" if script.endswith(" --device cpu") else ""
    assert f"multinode.sbatch {options} -- t.py" in line or f"APPTRAIN_ARGS='{options} -- t.py{own}'" in line
    assert (f" {options} -- t.py" in submit) == (told == CPU_JOB)
    assert told in made.left
    assert told == CPU_JOB or "--device" not in submit


@pytest.mark.parametrize(
    ("launch", "gpus"),
    [
        ("srun --ntasks-per-node=1 --gres=gpu:4 torchrun", "--gpus-per-node=4"),
        ("srun --gpus-per-node=a100:4 torchrun", "--gpus-per-node=a100:4"),
        ("srun --gpus=8 torchrun", "--gpus-per-node=4"),
        ("srun -n 8 --gpus-per-task=1 python", "--gpus-per-node=4"),
        ("srun --ntasks-per-node=4 --tres-per-task=gres/gpu:1 python", "--gpus-per-node=4"),
    ],
)
def test_gpus_for_which_srun_alone_asks_are_those_of_the_job(launch: str, gpus: str) -> None:
    made = converted(f"{NODES}{launch} t.py\n")
    assert made.lines[0] == f"sbatch --nodes=2 {gpus} slurm/multinode.sbatch -- t.py"
    assert made.left == ()


def test_the_tasks_of_srun_leave_a_job_its_one_node() -> None:
    made = converted("#!/bin/bash\n#SBATCH -t 5\nsrun -n 4 --gres=gpu:4 python t.py\n")
    assert made.lines[0].startswith("sbatch --nodes=1 --gpus-per-node=4 --time=5 slurm/")


@pytest.mark.parametrize(
    ("asked", "option"),
    [
        ("#SBATCH --gpus-per-socket=2\nsrun torchrun", "--gpus-per-socket"),
        ("srun --gpus-per-socket=2 torchrun", "--gpus-per-socket"),
        ("srun --gres=gpu:$N torchrun", "--gres"),
        ("srun -n $((2*4)) --gpus-per-task=1 python", "--gpus-per-task"),
    ],
)
def test_gpus_that_are_not_known_before_are_told_and_the_job_is_none_on_cpus(asked: str, option: str) -> None:
    made = converted(f"{NODES}{asked} t.py\n")
    assert made.lines[0] == "sbatch --nodes=2 slurm/multinode.sbatch -- t.py"
    assert made.left == (f"line 3: {option}: the GPUs of a node are not known: give --gpus-per-node",)


@pytest.mark.parametrize(
    ("script", "ranks"),
    [
        ("#SBATCH -n 8\nmpirun -np 8 python t.py", 4),
        ("#SBATCH -n 8\nmpirun -np $SLURM_NTASKS python t.py", 4),
        ("#SBATCH -n 8\nmpirun python t.py", 4),
        ("#SBATCH -n 8\nibrun python t.py", 4),
        ("#SBATCH -n 8\nibrun -n 4 python t.py", 2),
        ("mpirun -np 2 -N 1 torchrun --nproc_per_node 3 t.py", 3),
        ("#SBATCH --ntasks-per-node=4\nsrun -n 4 python t.py", 2),
        ("#SBATCH -n 8\nsrun -n $SLURM_NTASKS python t.py", 4),
        ("srun -n $SLURM_NNODES python t.py", 1),
        ("srun -n1 python t.py", 1),
        ("python t.py", 1),
        ("mpirun -np 7 python t.py", None),
        ("#SBATCH -n 8\nmpirun -np $N python t.py", None),
        ("#SBATCH -n 8\nmpirun --map-by ppr:2:socket python t.py", None),
        ("mpirun python t.py", None),
        ("#SBATCH -n 8\nsrun -n $((SLURM_NNODES*4)) python t.py", None),
        ("srun --ntasks-per-node=$N python t.py", None),
        ("srun torchrun --nproc_per_node=$N t.py", None),
        ("export PET_NPROC_PER_NODE=4\nsrun torchrun t.py", None),
        ("srun accelerate launch --cpu t.py", None),
        ("for i in 0 1; do ssh n$i python t.py; done", None),
        ("for i in 0 1; do LOCAL_RANK=$i python t.py & done; wait", None),
    ],
)
def test_ranks_of_a_node_are_counted_or_told_as_not_known(script: str, ranks: int | None) -> None:
    made = converted(f"{NODES}{script}\n")
    given = f" --nproc-per-node {ranks}" if ranks else ""
    assert made.lines[0].endswith(f"slurm/multinode.sbatch --device cpu{given} -- t.py")
    told = any(one.endswith("the number of ranks on a node: give --nproc-per-node") for one in made.left)
    assert told == (ranks is None)


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("#PBS -l select=2:ncpus=48:mpiprocs=4\nmpiexec python t.py", "--device cpu --nproc-per-node 4"),
        ("#PBS -l select=2:ncpus=48:mpiprocs=9\nmpiexec -n 8 python t.py", "--device cpu --nproc-per-node 4"),
        ("#PBS -l select=1:ncpus=8:mpiprocs=4+1:ncpus=8:mpiprocs=2\nmpiexec python t.py", "--device cpu"),
        ("#PBS -l select=2:ncpus=48\nmpiexec python t.py", "--device cpu"),
    ],
)
def test_processes_of_mpi_under_pbs_are_counted_too(script: str, options: str) -> None:
    assert f"APPTRAIN_ARGS='{options} -- t.py'" in converted(f"{script}\n").lines[0]


def test_tasks_of_a_job_on_cpus_keep_their_cores() -> None:
    made = converted(f"{NODES}#SBATCH --ntasks-per-node=8\nsrun python t.py\n")
    assert "--gpus-per-node=0 --cpus-per-task=8 slurm" in made.lines[0]


@pytest.mark.parametrize(
    ("script", "environment"),
    [
        (f"{NODES}{BY_TORCHRUN} --device cpu\n", ["slurm/cpu-only.task0.env"]),
        (f"{NODES}#SBATCH --ntasks-per-node=4\nsrun python t.py\n", ["slurm/gres-step-none.task0.env"]),
        (f"{NODES}#SBATCH -n 8\nmpirun -np 8 python t.py\n", ["slurm/gres-step-none.task0.env"]),
        (
            "#PBS -l select=2:ncpus=8\nmpiexec -n 8 --ppn 4 python t.py\n",
            ["openpbs/sel2_scatter/tmrsh-pbsn1.env", "openpbs/sel2_scatter/nodefile"],
        ),
    ],
)
def test_what_is_proposed_for_a_job_on_cpus_starts_its_ranks(
    script: str, environment: list[str], tmp_path: Path
) -> None:
    (tmp_path / "t.py").touch()
    own, submit = converted(script).lines
    files = zip(("--env-file", "--nodefile"), environment, strict=False)
    plan = " ".join(["apptrain plan", *(f"{option} {RECORDINGS}/{name}" for option, name in files)])
    sbatch = f'sbatch() {{ while [[ $1 != *.sbatch ]]; do shift; done; {plan} "${{@:2}}"; }}'
    qsub = f'qsub() {{ eval "{plan} $APPTRAIN_ARGS"; }}'
    planned = run(f"{sbatch}; {qsub}; {own}", tmp_path)
    assert ("device cpu" in planned, "nproc_per_node 4" in planned) == (True, True)
    for profile in ("generic", "generic-pbs"):
        assert "--device cpu --nproc-per-node 4" in run(
            submit.replace("NAME", f"{profile} --dry-run"), tmp_path
        )


def run(line: str, folder: Path) -> str:
    """What bash prints, with one blank between its words."""
    environment = {"HOME": str(folder), "PATH": f"{CHECKOUT}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", line], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return " ".join(done.stdout.split())


@pytest.mark.parametrize(
    "body",
    [
        "module load rocm/6.2\nsrun torchrun t.py",
        "srun apptainer exec --rocm x.sif torchrun t.py",
        "srun apptainer exec /sw/pytorch-ROCm-6.sif torchrun t.py",
    ],
)
def test_a_script_for_gpus_of_amd_is_told_that_ours_are_nvidias(body: str) -> None:
    told = "line 3: ROCm: a job of apptrain runs on NVIDIA GPUs or CPUs alone"
    assert converted(f"{ASKED}{body}\n").left == (told,)


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


LATE = (
    "#!/bin/bash\n#SBATCH --partition=gpu\nset -eu\n#SBATCH --nodes=4 --gres=gpu:4\n#SBATCH --time=16:00:00\n"
)


def test_directives_that_stand_too_late_are_meant_all_the_same() -> None:
    made = converted(f"{LATE}srun torchrun t.py\n")
    assert made.lines == (
        "sbatch --nodes=4 --gpus-per-node=4 --partition=gpu --time=16:00:00 slurm/multinode.sbatch -- t.py",
        "apptrain submit --cluster NAME --nodes 4 --gpus-per-node 4 --partition gpu --time 16:00:00 -- t.py",
    )
    late = "#!/bin/bash\n#PBS -q gpu\ncd x\n#PBS -l select=2:ngpus=4\ntorchrun t.py\n"
    assert converted(late).lines[1] == (
        "apptrain submit --cluster NAME --nodes 2 --gpus-per-node 4 --partition gpu -- t.py"
    )


def test_a_late_directive_that_no_trap_names_is_not_meant() -> None:
    script = traps.read(f"{LATE}srun torchrun t.py\n")
    found = [one for one in traps.find(script.text) if one.trap is not traps.LATE or one.line == 5]
    assert as_ours.convert(script, found).lines[0] == (
        "sbatch --nodes=1 --gpus-per-node=0 --partition=gpu --time=16:00:00 slurm/multinode.sbatch "
        "--device cuda --nproc-per-node 1 -- t.py"
    )


@pytest.mark.parametrize(
    ("text", "profile"),
    [
        ("export NCCL_IB_DISABLE=1 NCCL_DEBUG=INFO\nsrun torchrun t.py\n", ["env: {NCCL_DEBUG: INFO}"]),
        ("export NCCL_P2P_DISABLE='1'\nNCCL_DEBUG=INFO srun torchrun t.py\n", ["env: {NCCL_DEBUG: INFO}"]),
        ("export NCCL_SOCKET_IFNAME=eth0\nexport NCCL_SOCKET_IFNAME=^lo\nsrun torchrun t.py\n", []),
        ("export CUDA_LAUNCH_BLOCKING=1 CUDA_LAUNCH=2\nsrun torchrun t.py\n", ["env: {CUDA_LAUNCH: 2}"]),
        ("export CUDA_VISIBLE_DEVICES=0,1\nsrun torchrun t.py\n", []),
        ("export APPTAINERENV_CUDA_VISIBLE_DEVICES=0\nsrun torchrun t.py\n", []),
        ("export CUDA_VISIBLE_DEVICES=0\nsrun torchrun --nnodes=2 --nproc_per_node=2 t.py\n", []),
    ],
)
def test_a_profile_has_nothing_that_a_trap_or_a_remark_names(text: str, profile: list[str]) -> None:
    assert list(converted(f"{ASKED}#SBATCH --gpus-per-node=2\n{text}").profile) == profile


@pytest.mark.parametrize(
    ("line", "profile"),
    [
        ("export NCCL_IB_HCA=mlx5_0,mlx5_1", ['env: {NCCL_IB_HCA: "mlx5_0,mlx5_1"}']),
        ("export NCCL_SOCKET_IFNAME='^lo,docker'", ['env: {NCCL_SOCKET_IFNAME: "^lo,docker"}']),
        ("export APPTAINERENV_NCCL_DEBUG=INFO", ["env: {NCCL_DEBUG: INFO}"]),
        ("export SINGULARITYENV_UCX_TLS=rc", ["env: {UCX_TLS: rc}"]),
    ],
)
def test_a_value_is_written_as_yaml_takes_it_and_named_as_the_ranks_see_it(
    line: str, profile: list[str]
) -> None:
    assert list(converted(f"{line}\ntorchrun t.py\n").profile) == profile


INSIDE = "made inside the job: make it in your script"


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ('export HEAD_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)\n', []),
        ("export HEADN=`scontrol show hostnames $SLURM_JOB_NODELIST | awk '{print $1; exit}'`\n", []),
        ("export MEET=$(hostname -s):29500\n", []),
        ('export FIRST=$(head -n 1 "$PBS_NODEFILE")\n', []),
        ("first=$(scontrol show hostnames); first=${first%% *}\nexport APPTAINERENV_MASTER_ADDR=$first\n", []),
        ("first=$(hostname)\nexport LEADER=${first}\nexport AT=$LEADER:$PORT_OF\n", [f"line 5: AT: {INSIDE}"]),
        ("export PORT=$((30000 + SLURM_JOB_ID % 20000)) MY_PORT=29500\n", []),
        ("export APPTAINERENV_MASTER_PORT=$((33000 + ${PBS_JOBID%%.*} % 9000))\n", []),
        ("export RANKS=$((SLURM_NNODES * 4)) N=$SLURM_JOB_NUM_NODES TASKS=$SLURM_NTASKS\n", []),
        ("export REPORT=1\n", ["line 3: REPORT: export it where you submit; APPTRAIN_PASS=REPORT for the ranks"]),
        ("export OUT=/scratch/$SLURM_JOB_ID\n", [f"line 3: OUT: {INSIDE}"]),
        ("export RUN=$SLURM_JOB_ID\n", [f"line 3: RUN: {INSIDE}"]),
        ("export LOG=/logs/$(hostname).log\n", [f"line 3: LOG: {INSIDE}"]),
        ("export SEED=$RANDOM\n", [f"line 3: SEED: {INSIDE}"]),
        ("x=/tmp/$SLURM_JOB_ID\nexport TORCH_HOME=$x/torch\n", [f"line 4: TORCH_HOME: {INSIDE}"]),
        (
            "export HF_HOME=$SCRATCH/hf\n",
            ["line 3: HF_HOME: export it where you submit; APPTRAIN_PASS=HF_HOME for the ranks"],
        ),
        (
            "export APPTAINERENV_DATA=/d\n",
            ["line 3: DATA: export it where you submit; APPTRAIN_PASS=DATA for the ranks"],
        ),
        (
            "export WHEN=$(date)\n",
            ["line 3: WHEN: export it where you submit; APPTRAIN_PASS=WHEN for the ranks"],
        ),
    ],
)  # fmt: skip
def test_only_what_is_known_where_one_submits_is_exported_there(body: str, left: list[str]) -> None:
    made = converted(f"{ASKED}{body}srun torchrun t.py\n")
    assert (list(made.left), made.profile) == (left, ())


@pytest.mark.parametrize(
    ("asked", "words", "left"),
    [
        ("--requeue --open-mode=append --signal=B:USR2@120", "", []),
        ("--no-requeue --open-mode=truncate", " --no-requeue --open-mode=truncate", []),
        ("-o a/%j.out -e a/%j.err", " --output=a/%j.out --error=a/%j.err", []),
        ("-o a/%j/x.out -e b -p gpu", " --partition=gpu", []),
        ("--signal=B:USR1@300", " --signal=B:USR2@300", []),
        ("--signal=B:TERM", "", []),
        (
            "--signal=SIGUSR1@90",
            " --signal=B:USR2@90",
            ["--signal: the ranks get USR2; if they have a handler for USR1: --stop-signal USR1"],
        ),
        ("--signal=R:USR2", "", []),
        ("--signal=?", "", ["--signal: give it to sbatch if it is needed"]),
        ("--export=ALL", "", []),
        ("--export=NONE", "", ["--export: give it to sbatch if it is needed"]),
        ("--gpu-bind=closest", "", ["--gpu-bind: give it to sbatch if it is needed"]),
        ("--gres=nvme:1", "", ["--gres: give it to sbatch if it is needed"]),
    ],
)
def test_each_option_of_sbatch_is_handed_on_told_or_the_same_with_us(
    asked: str, words: str, left: list[str]
) -> None:
    made = converted(f"{ASKED}#SBATCH {asked}\nsrun torchrun t.py\n")
    assert made.lines[0] == f"sbatch --nodes=2 --gpus-per-node=4{words} slurm/multinode.sbatch -- t.py"
    assert made.left == tuple(f"line 3: {one}" for one in left)


def test_sizes_that_are_not_known_before_are_told() -> None:
    made = converted("#!/bin/bash\n#SBATCH -N 2-4\n#SBATCH --gpus=8 -n 8\nsrun python t.py\n")
    assert made.left == (
        "line 2: --nodes: give it to sbatch if it is needed",
        "line 3: --gpus: the GPUs of a node are not known: give --gpus-per-node",
    )


@pytest.mark.parametrize(
    ("asked", "words", "left"),
    [
        ("-l filesystems=home:eagle", " -l filesystems=home:eagle", []),
        ("-l walltime=1:00,storage=gdata/a+gdata/b,wd", " -l walltime=1:00 -l storage=gdata/a+gdata/b -l wd", []),
        ("-j oe -r y -S /bin/bash", "", []),
        ("-j n -r n", " -j n -r n", []),
        ("-o out -e err", " -o out -e err", []),
        ("-o /dev/null", "", []),
        ("-W a=1 -W b=2 -W a=3", " -W a=3 -W b=2", []),
        ("-l ncpus=8", "", ["-l ncpus: our job asks by chunks: put it into -l select"]),
        ("-V", "", ["-V: give it to qsub if it is needed"]),
        ("-v A=1", "", ["-v: give it to qsub if it is needed"]),
    ],
)  # fmt: skip
def test_each_option_of_qsub_is_handed_on_told_or_the_same_with_us(
    asked: str, words: str, left: list[str]
) -> None:
    made = converted(f"#!/bin/bash\n#PBS -l select=1:ngpus=1\n#PBS {asked}\ntorchrun t.py\n")
    assert made.lines[0] == (
        f"APPTRAIN_ARGS='-- t.py' qsub -l select=1:ngpus=1{words} -v APPTRAIN_ARGS pbs/multinode.pbs"
    )
    assert made.left == tuple(f"line 3: {one}" for one in left)


def test_sizes_of_pbs_without_select_are_given_to_submit_alone() -> None:
    asked = "#PBS -q gpuvolta -P ab12\n#PBS -l ncpus=96,ngpus=8\n#PBS -l mem=700GB\n"
    made = converted(f"{asked}torchrun t.py\n")
    assert made.lines == ("apptrain submit --cluster NAME --partition gpuvolta --account ab12 -- t.py",)
    how = "of one node or of all together, as the site has it: give --nodes and --gpus-per-node to submit"
    assert made.left == tuple(
        f"line {at}: -l {name}: {how}" for at, name in ((2, "ncpus"), (2, "ngpus"), (3, "mem"))
    )


@pytest.mark.parametrize(
    ("walltime", "time"),
    [("45", "0:00:45"), ("5400", "1:30:00"), ("1:00", "1:00"), ("24:00:00", "24:00:00"), ("$T", '"$T"')],
)
def test_a_walltime_of_pbs_in_seconds_is_no_number_of_minutes(walltime: str, time: str) -> None:
    made = converted(f"#!/bin/bash\n#PBS -l select=1:ngpus=1 -l walltime={walltime}\ntorchrun t.py\n")
    assert (
        made.lines[1] == f"apptrain submit --cluster NAME --nodes 1 --gpus-per-node 1 --time {time} -- t.py"
    )


def test_submit_is_given_the_options_of_sbatch_that_no_profile_knows() -> None:
    made = converted(
        f"{ASKED}#SBATCH --array=0-9 --exclusive --mem=0 -o %x.out --signal=B:USR1@60 --requeue\n"
        "srun torchrun t.py\n"
    )
    options = "--array=0-9 --output=%x.out --signal=B:USR2@60"
    assert made.lines[1] == f"apptrain submit --cluster NAME --nodes 2 --gpus-per-node 4 {options} -- t.py"


def test_submit_is_given_the_resources_of_a_whole_job_of_pbs() -> None:
    made = converted("#!/bin/bash\n#PBS -l select=1:ngpus=1 -l filesystems=home:eagle\ntorchrun t.py\n")
    assert (
        made.lines[1]
        == "apptrain submit --cluster NAME --nodes 1 --gpus-per-node 1 -l filesystems=home:eagle -- t.py"
    )


def test_what_makes_an_environment_is_not_carried_over() -> None:
    made = converted(f"{ASKED}srun uv run --with x t.py --lr 1\n")
    assert made.lines[0].endswith(" -- t.py --lr 1")
    line = len(ASKED.splitlines()) + 1
    assert made.left == (f"line {line}: uv run: jobs run in the image (own packages: make venv, --venv)",)


@pytest.mark.parametrize("program", ["podman-hpc run x torchrun", "bind python", "bind $(which python)"])
def test_a_program_that_hides_the_training_is_named(program: str) -> None:
    made = converted(f"{ASKED}srun {program} t.py\n")
    name, line = program.split()[0], len(ASKED.splitlines()) + 1
    why = f"what {name} starts is not looked into: give explain a copy without {name}"
    assert (made.lines, made.left) == ((), (f"line {line}: {why}",))


@pytest.mark.parametrize(
    "line",
    [
        "torchrun --no-python ./train --lr 1",
        "accelerate launch --no_python ./train --lr 1",
        "deepspeed --no_python ./train --lr 1",
    ],
)
def test_a_program_that_is_not_pythons_stays_one(line: str) -> None:
    of_slurm = converted(f"{ASKED}srun {line}\n").lines
    assert [one.endswith(" --no-python -- ./train --lr 1") for one in of_slurm] == [True, True]
    of_pbs = converted(f"#PBS -l select=2:ngpus=1\n{line}\n").lines
    assert of_pbs[0].startswith("APPTRAIN_ARGS='--no-python -- ./train --lr 1' qsub ")
    assert of_pbs[1].endswith(" --no-python -- ./train --lr 1")
    assert converted(f"{line}\n").lines[0].endswith(" --no-python -- ./train --lr 1")


@pytest.mark.parametrize("module", mistakes.LAUNCHER_MODULES)
def test_no_line_begins_with_a_launcher_that_is_a_module(module: str) -> None:
    made = converted(f"{ASKED}srun python -m {module} t.py --lr 1\n")
    if made.lines:
        assert made.lines[0].endswith(" -- t.py --lr 1")
        return
    why = f"-m {module} starts the ranks itself: give apptrain the script that it starts: there is no line"
    assert made.left == (f"line {len(ASKED.splitlines()) + 1}: {why}",)


@pytest.mark.parametrize(
    ("settings", "image", "left"),
    [
        ("SIF=/sw/a.sif\n", "/sw/a.sif", 0),
        ("SIF=/sw/a.sif\nSIF=/sw/b.sif\n", '"${SIF:?}"', 1),
        ("", '"${SIF:?}"', 1),
    ],
)
def test_an_image_in_a_variable_is_written_out_or_must_be_set(settings: str, image: str, left: int) -> None:
    made = converted(f"{ASKED}{settings}srun apptainer exec --nv $SIF python t.py\n")
    assert [f"APPTRAIN_IMAGE={image}" in line for line in made.lines] == [True, True]
    assert len(made.left) == left


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("for s in 1 2; do\nsrun torchrun t.py $s\ndone", "of a loop: submit a job for each of its values"),
        ("cat f | while read -r s; do\nsrun torchrun t.py $s\ndone", "of a loop: submit a job for each of its values"),
        ("if x; then s=1; else s=2; fi\nsrun torchrun t.py $s", "set in the script: write it out"),
    ],
)  # fmt: skip
def test_a_variable_that_only_the_script_sets_is_told_by_name(text: str, left: str) -> None:
    made = converted(f"{ASKED}{text}\n")
    assert made.lines[0].endswith(" -- t.py $s")
    assert made.left == (f"line {len(ASKED.splitlines()) + 2}: s in the arguments: {left}",)
