"""The command `apptrain`: from any directory, by any way to it, with the Python of a login node."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from containers import stacks

CHECKOUT = Path(__file__).resolve().parents[3]
BOUND = 30  # s
SIF = bytes(32) + b"SIF_MAGIC\0" + b"01\0" + b"02\0"
"""The first bytes of an image."""
COMMANDS = ("demo", "run", "submit", "site", "image", "plan", "launch", "check")
NO_CONFIG = "apptrain: train: the following arguments are required: --config: see python -m train --help\n"
NODES = ("--nodes", "a,b", "--node-rank", "1", "--json", "--", "-m", "my")


def pythons() -> Iterator[Path]:
    """A Python of each version that is here and that a login node may have."""
    folders = [*os.environ["PATH"].split(":"), *map(str, Path.home().glob(".pyenv/versions/*/bin"))]
    found: dict[int, Path] = {}
    for minor in range(9, 15):
        for folder in folders:
            path = Path(folder) / f"python3.{minor}"
            if path.exists() and ".pyenv/shims" not in folder:
                found.setdefault(minor, path)
    yield from found.values()


def run(*command: str | Path, cwd: Path = CHECKOUT, **env: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent", "PWD": str(cwd), **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=BOUND,
        check=False,
    )


def bare(python: Path, folder: Path, *, has_yaml: bool = False) -> dict[str, str]:
    """A login node's: this Python alone, without a venv."""
    folder.mkdir(exist_ok=True)
    (folder / "python3").symlink_to(python)
    (folder / "no venv").mkdir()  # one that is missing would be made
    env = {"PATH": f"{folder}:/usr/bin:/bin", "IMAGE_VENV": "/none", "PYTHON": str(python)}
    env["VENV"] = f"{folder}/no venv"
    if has_yaml:  # PyYAML's own Python files serve every version
        (folder / "packages").mkdir()
        (folder / "packages" / "yaml").symlink_to(Path(yaml.__file__).parent)
        env["PYTHONPATH"] = str(folder / "packages")
    return env


@pytest.mark.parametrize("columns", ["80", "100", "250"])
@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--help",),
        ("image", "build", "--help"),
        *((name, "--help") for name in (*COMMANDS, "doctor", "explain", "compare", "rerun", "scaling")),
    ],
    ids=" ".join,
)
def test_help_fits_a_screen_and_names_the_next_step(arguments: tuple[str, ...], columns: str) -> None:
    shown = run(CHECKOUT / "apptrain", *arguments, COLUMNS=columns)
    assert (shown.returncode, shown.stderr) == (0, "")
    lines = shown.stdout.splitlines()
    assert len(lines) <= 50
    assert columns != "80" or max(map(len, lines)) <= 80
    assert max(map(len, lines)) <= 100
    assert [line for line in lines if line.startswith(("Begin", "Then", "First", "The last"))]


@pytest.mark.parametrize(
    "arguments", [("--help",), *((name, "--help") for name in COMMANDS if name != "image")]
)
def test_each_help_has_the_one_list_of_exit_statuses(arguments: tuple[str, ...]) -> None:
    """Those that start nothing have the part that they can end with."""
    from entrypoint.cli.main import EXIT_STATUS

    shown = run(CHECKOUT / "apptrain", *arguments).stdout
    if arguments[0] in ("plan", "site"):
        assert shown.endswith("\n".join(EXIT_STATUS.splitlines()[:3]) + "\n")
    elif arguments[0] == "check":
        assert shown.endswith("exit status: 0 it fits, 1 it does not, 64 bad input\n")
    elif arguments[0] == "submit":  # alone it waits for no job
        assert "\n".join(EXIT_STATUS.splitlines()[:3]) + "\n  N   otherwise that of sbatch or qsub" in shown
        assert "\n  75 " not in shown
    else:
        assert EXIT_STATUS in shown


def test_a_line_that_begins_with_an_option_of_submit_is_known_as_one() -> None:
    """The help has each of its options, with what it takes."""
    from entrypoint.plan import commands

    shown = run(CHECKOUT / "apptrain", "submit", "--help").stdout.partition("options of sbatch")[0]
    options = dict(re.findall(r"^  (--[a-z-]+)(?: ([A-Z][\w:\[\]]*))?(?:,| |$)", shown, re.M))
    for name in ("--nodes", "--gpus-per-node", "--image"):  # `run` has them too
        del options[name]
    others = {"--gpus", "--queue", "--project", "--walltime"}  # the words of others for the same
    assert set(options) == set(commands.OF_SUBMIT) - others
    assert {name for name, value in options.items() if not value} == set(options) & set(commands.FLAGS)


def test_all_options_are_in_help_all_alone() -> None:
    common, everything = (
        run(CHECKOUT / "apptrain", "launch", word).stdout for word in ("--help", "--help-all")
    )
    assert "--hang-timeout" not in common
    assert "--hang-timeout S" in everything
    assert "[APPTRAIN_HANG_TIMEOUT]" in everything
    assert "--help-all" in common


@pytest.mark.parametrize("name", ["plan", "launch"])
def test_the_common_options_have_the_titles_of_their_groups(name: str) -> None:
    from entrypoint.plan.options import COMMON, GROUPS

    shown = run(CHECKOUT / "apptrain", name, "--help").stdout
    titles = re.findall(r"^(\S.*):$", shown.partition("\n\n--foo-bar")[0], re.M)
    assert titles == ["options", *(title for title, names in GROUPS.items() if set(names) & set(COMMON))]
    assert set(re.findall(r"^  --([a-z-]+)", shown, re.M)) == {*COMMON, "help-all"} - (
        set() if name == "plan" else {"env-file", "json"}
    )


@pytest.mark.parametrize("name", ["run", "demo", "submit"])
def test_help_all_of_what_starts_jobs_has_its_own_options_and_all_of_the_job(name: str) -> None:
    from entrypoint.plan.options import GROUPS, OPTIONS

    shown = run(CHECKOUT / "apptrain", name, "--help-all")
    assert (shown.returncode, shown.stderr) == (0, "")
    found = re.findall(r"^  (--[a-z-]+)", shown.stdout, re.M)
    assert len(found) == len(set(found))
    wanted = {
        f"--{option.name}"
        for option in OPTIONS
        if not option.plan_only and (name == "submit" or not option.job_only)
    } - {"--run-dir", "--dry-run", "--node-rank"}
    assert wanted <= set(found)
    assert "--node-rank" not in found
    own = "--cluster" if name == "submit" else "--tasks-per-node"
    assert found.index("--nodes") < found.index("--nproc-per-node")
    assert own in found
    assert all(f"\n{title}:\n" in shown.stdout for title in GROUPS)


def test_each_option_is_in_one_group_of_the_help() -> None:
    from entrypoint.plan.options import GROUPS, OPTIONS

    names = [name for group in GROUPS.values() for name in group]
    assert sorted(names) == sorted(option.name for option in OPTIONS)


def test_make_help_lists_first_what_users_need_first() -> None:
    shown = run("make", "help").stdout
    first, _, others = shown.partition("\nfor those who")
    lines = [line.split()[1] for line in first.splitlines() if line.startswith("make ")]
    assert lines == ["demo", "test", "venv", "image", "shell", "submit"]
    assert "make lint " in others
    assert "make demo " not in others


@pytest.mark.parametrize("python", list(pythons()), ids=lambda path: path.name)
def test_a_plan_is_made_with_the_bare_python_of_a_login_node(python: Path, tmp_path: Path) -> None:
    made = run(CHECKOUT / "apptrain", "plan", *NODES, cwd=tmp_path, **bare(python, tmp_path))
    assert (made.returncode, made.stderr) == (0, "")
    assert made.stdout == run(CHECKOUT / "apptrain", "plan", *NODES, cwd=tmp_path).stdout


@pytest.mark.parametrize("python", list(pythons()), ids=lambda path: path.name)
def test_with_pyyaml_that_python_reads_profiles_too(python: Path, tmp_path: Path) -> None:
    env = bare(python, tmp_path, has_yaml=True)
    made = run(CHECKOUT / "apptrain", "plan", "--profile", "generic", *NODES, cwd=tmp_path, **env)
    assert (made.returncode, made.stderr) == (0, "")
    assert (
        made.stdout == run(CHECKOUT / "apptrain", "plan", "--profile", "generic", *NODES, cwd=tmp_path).stdout
    )


@pytest.mark.parametrize("python", list(pythons()), ids=lambda path: path.name)
def test_with_pyyaml_that_python_writes_a_first_profile_too(python: Path, tmp_path: Path) -> None:
    env = bare(python, tmp_path, has_yaml=True)
    sinfo = tmp_path / "sinfo"
    sinfo.write_text("#!/bin/sh\necho 'gpu* up 1-00:00:00 2 32 262144 NO gpu:a100:4 g[1-2]'\n")
    sinfo.chmod(0o755)
    made = run(CHECKOUT / "apptrain", "site", "-o", "lab.yaml", cwd=tmp_path, **env)
    assert made.returncode == 0, made.stderr
    assert made.stdout.startswith("sbatch --nodes=2 --partition=gpu --gpus-per-node=4 ")
    assert "\n  gpus: 4 " in (tmp_path / "lab.yaml").read_text()


def test_the_venv_has_it_too(tmp_path: Path) -> None:
    """By the link that tools/venv.sh makes."""
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/pyvenv.cfg").touch()
    (tmp_path / "venv/bin/python").symlink_to(sys.executable)
    (tmp_path / "venv/bin/apptrain").symlink_to(CHECKOUT / "apptrain")
    made = run("apptrain", "plan", *NODES, PATH=f"{tmp_path}/venv/bin:/usr/bin:/bin", VENV="/none")
    assert (made.returncode, made.stderr) == (0, "")


@pytest.mark.parametrize("python_path", ["", ".", "{folder}"])
@pytest.mark.parametrize("linked", [False, True])
def test_nothing_of_the_users_folder_stands_in_for_ours(
    linked: bool, python_path: str, tmp_path: Path
) -> None:
    for name in ("train", "entrypoint", "clusters", "yaml", "spelling", "argparse", "cli"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('planted')\n")
    (tmp_path / "entrypoint").mkdir()
    (tmp_path / "entrypoint" / "__init__.py").write_text("raise SystemExit('planted')\n")
    program = CHECKOUT / "apptrain"
    if linked:
        (tmp_path / "it").symlink_to(program)
        program = tmp_path / "it"
    env = {"PYTHONPATH": python_path.format(folder=tmp_path)} if python_path else {}
    for profile in ((), ("--profile", "generic")):
        made = run(program, "plan", *profile, *NODES, cwd=tmp_path, **env)
        assert (made.returncode, made.stderr) == (0, "")


def test_a_train_py_of_the_users_in_the_checkout_is_not_run(tmp_path: Path) -> None:
    for name in ("entrypoint", "clusters", "containers", "slurm", "src", "tools"):
        (tmp_path / name).symlink_to(CHECKOUT / name)
    shutil.copy(CHECKOUT / "apptrain", tmp_path)
    (tmp_path / "train.py").write_text("raise SystemExit('planted')\n")
    line = ("submit", "--cluster", "generic", "--dry-run", "--", "-m", "train", "steps=2")
    asked = run("./apptrain", *line, cwd=tmp_path, VENV=sys.prefix)
    assert (asked.returncode, asked.stderr) == (64, NO_CONFIG)


def test_the_first_step_is_one_that_works_here(tmp_path: Path) -> None:
    env = bare(Path(sys.executable).resolve(), tmp_path)
    first = [
        line
        for line in run("./apptrain", cwd=CHECKOUT, **env).stdout.splitlines()
        if line.startswith("Begin")
    ]
    assert first == ["Begin with `make demo`; on a cluster with `./apptrain image build`."]
    shown = run("./apptrain", "help", VENV=sys.prefix).stdout
    assert "\nBegin with `./apptrain demo`; " in shown
    assert "\n           ./apptrain submit --cluster NAME --nodes 4 -- my_script.py --lr 0.1\n" in shown


def test_the_images_help_names_the_stacks() -> None:
    said = run("./apptrain", "image", "--help").stdout
    assert "which CUDA: cu132 (default), cu128, cu126 (" in said
    assert all(word in said for word in ("DEBIAN_MIRROR=URL", "DEBIAN_SNAPSHOT=URL", "image-aarch64.sif"))


def test_the_help_of_a_command_has_two_spellings() -> None:
    assert run("./apptrain", "help", "plan").stdout == run("./apptrain", "plan", "--help").stdout


def test_a_plan_says_what_launch_would_refuse(tmp_path: Path) -> None:
    words = ("--nodes", "a", "--node-rank", "0", "--", "my.py")
    planned = run(CHECKOUT / "apptrain", "plan", *words, cwd=tmp_path)
    assert (planned.returncode, planned.stderr.count("\n")) == (0, 1)
    assert planned.stderr.startswith("apptrain: launch would refuse this here: CMD my.py does not exist in ")
    assert planned.stdout.endswith(" my.py\n")
    (tmp_path / "my.py").touch()
    assert run(CHECKOUT / "apptrain", "plan", *words, cwd=tmp_path).stderr == ""


def test_the_long_spellings_go_on_working() -> None:
    made = run(sys.executable, "-P", "-m", "entrypoint", "plan", *NODES)
    assert (made.returncode, made.stderr) == (0, "")
    assert made.stdout == run(CHECKOUT / "apptrain", "plan", *NODES).stdout
    shown = run(sys.executable, "-P", "-m", "entrypoint.cli.embedded", "--help")
    assert shown.stdout == run(CHECKOUT / "apptrain", "run", "--help", VENV=sys.prefix).stdout


@pytest.mark.parametrize("python", list(pythons()), ids=lambda path: path.name)
def test_the_doctor_misses_pyyaml_only_if_the_image_depends_on_the_nodes_driver(
    python: Path, tmp_path: Path
) -> None:
    env = {**bare(python, tmp_path), "PYTHONPATH": str(tmp_path / "none"), "PROJECT": "p", "USER": "u"}
    (tmp_path / "none").mkdir()
    (tmp_path / "none/yaml.py").write_text("raise ImportError\n")
    for profile, is_unknown in ((), False), (("--profile", "gadi"), False), (("--profile", "derecho"), True):
        asked = run(CHECKOUT / "apptrain", "doctor", "--json", *profile, cwd=tmp_path, **env)
        assert asked.stderr == ""
        remedies = [one["remedy"] for one in json.loads(asked.stdout)["findings"] if one["check"] == "image"]
        remedy = f"python3 -m pip install --user pyyaml, or make -C {CHECKOUT} venv-image"
        assert (remedy in remedies) == is_unknown


@pytest.mark.parametrize("command", ["demo", "run", "check"])
def test_what_needs_torch_says_where_to_run_it_where_there_is_none(command: str, tmp_path: Path) -> None:
    python = min(pythons(), key=lambda path: int(path.name.rpartition(".")[2]))
    asked = run(CHECKOUT / "apptrain", command, cwd=tmp_path, **bare(python, tmp_path))
    assert (asked.returncode, asked.stdout, asked.stderr.count("\n")) == (64, "", 1)
    assert "torch" in asked.stderr
    assert f"make -C {CHECKOUT} venv, which gets it, or run it " in asked.stderr
    asked = run(CHECKOUT / "apptrain", command, cwd=CHECKOUT, **bare(python, tmp_path / "again"))
    assert ": make venv, which gets it, or run it " in asked.stderr


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("run --hlep", "unrecognized arguments: --hlep"),
        ("run --nodes two", "--nodes=two: must be a number from 1"),
        ("run -- nothere.py", "CMD nothere.py does not exist in "),
        ("run -- python my.py", "CMD begins with python: leave it out"),
        ("demo step=2", "train: override: unknown key 'step': did you mean steps?"),
        ("demo --nodes 0", "--nodes=0: must be a number from 1"),
        ("launch --nodes a --node-rank 0 -- nothere.py", "CMD nothere.py does not exist in "),
        ("run -- my.py", "run needs torch, and this Python "),
    ],
)
def test_a_mistake_is_told_before_torch_is_missed(line: str, found: str, tmp_path: Path) -> None:
    env = bare(Path(sys.executable).resolve(), tmp_path, has_yaml=True)
    (tmp_path / "my.py").touch()
    asked = run(CHECKOUT / "apptrain", *line.split(), cwd=tmp_path, **env)
    assert (asked.returncode, asked.stdout, asked.stderr.count("\n")) == (64, "", 1)
    assert asked.stderr.startswith(f"apptrain: {found}")
    assert not (tmp_path / "runs").exists()


def test_the_image_is_offered_with_the_whole_line(tmp_path: Path) -> None:
    env = bare(Path(sys.executable).resolve(), tmp_path)
    (tmp_path / "my.py").touch()
    asked = run(CHECKOUT / "apptrain", "run", "--nodes", "2", "--", "my.py", "--lr", "1", cwd=tmp_path, **env)
    assert asked.returncode == 64
    assert asked.stderr.endswith("apptrain run --image --nodes 2 -- my.py --lr 1\n")


@pytest.mark.parametrize("arguments", [("--help",), ("plan", "--help"), ("help", "run")], ids=" ".join)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_nobody_who_reads_is_no_traceback(arguments: tuple[str, ...], unbuffered: str) -> None:
    line = f"'{CHECKOUT}/apptrain' {shlex.join(arguments)} | true; exit ${{PIPESTATUS[0]}}"
    asked = run("bash", "-c", line, PYTHONUNBUFFERED=unbuffered)
    assert (asked.returncode in (0, 141), asked.stderr) == (True, "")


def test_a_node_without_torch_cannot_launch(tmp_path: Path) -> None:
    env = bare(Path(sys.executable).resolve(), tmp_path)
    (tmp_path / "my.py").touch()
    asked = run(CHECKOUT / "apptrain", "launch", "--nodes", "a", "--", "my.py", cwd=tmp_path, **env)
    assert (asked.returncode, asked.stdout, asked.stderr.count("\n")) == (64, "", 1)
    assert "--node-rank is not given" in asked.stderr
    placed = ("--nodes", "a", "--node-rank", "0")
    asked = run(CHECKOUT / "apptrain", "launch", *placed, "--", "my.py", cwd=tmp_path, **env)
    assert (asked.returncode, asked.stdout, asked.stderr.count("\n")) == (64, "", 1)
    assert f"has none: make -C {CHECKOUT} venv" in asked.stderr


def test_without_a_python_that_is_new_enough_that_is_said(tmp_path: Path) -> None:
    for name in ("python3", *(f"python3.{minor}" for minor in range(9, 15))):
        (tmp_path / name).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    asked = run(CHECKOUT / "apptrain", PATH=f"{tmp_path}:/usr/bin:/bin", VENV="/none", IMAGE_VENV="/none")
    assert (asked.returncode, asked.stdout) == (64, "")
    assert asked.stderr == (
        "apptrain: no python3 here is 3.9 or newer: load the site's module for Python, or name one in PYTHON\n"
    )


@pytest.fixture
def builds(tmp_path: Path) -> dict[str, str]:
    """The environment of a checkout with tools that only tell how they are called, and with no Apptainer."""
    for folder in ("tools", "containers"):
        (tmp_path / folder).mkdir()
    modules = (f"containers/{name}.py" for name in ("__init__", "stacks", "description"))
    for name in ("Makefile", "containers/stacks.yaml", *modules):
        shutil.copy(CHECKOUT / name, tmp_path / name)
    unfinished = shutil.ignore_patterns("*.pyc.*")  # bytecode that another test's Python writes just now
    shutil.copytree(CHECKOUT / "entrypoint", tmp_path / "entrypoint", ignore=unfinished)
    (tmp_path / "apptrain").write_text((CHECKOUT / "apptrain").read_text())
    (tmp_path / "apptrain").chmod(0o755)
    (tmp_path / "tools/login-python.sh").write_text(f"#!/bin/sh\necho {sys.executable}\n")
    (tmp_path / "tools/venv.sh").write_text('#!/bin/sh\necho "venv $*"\n')
    (tmp_path / "v/bin").mkdir(parents=True)
    (tmp_path / "v/bin/python").write_text('#!/bin/sh\necho "python $*"\n')
    for name in ("tools/login-python.sh", "tools/venv.sh", "v/bin/python"):
        (tmp_path / name).chmod(0o755)
    (tmp_path / "bin").mkdir()
    for name in ("sh", "make", "env", "sed", "readlink", "dirname", "bash"):
        (tmp_path / "bin" / name).symlink_to(str(shutil.which(name)))
    return {"PATH": str(tmp_path / "bin"), "IMAGE_VENV": f"{tmp_path}/v"}


@pytest.mark.parametrize("program", ["apptainer", "singularity"])
@pytest.mark.parametrize(
    "line", ["./apptrain image verify --stack cu126", "make --no-print-directory image-verify STACK=cu126"]
)
def test_the_image_is_built_with_a_venv_of_its_own_also_by_make(
    line: str, program: str, builds: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "bin" / program).symlink_to("/bin/true")
    image = tmp_path / "containers" / stacks.image_here("cu126", "").name
    image.write_bytes(SIF)
    image.with_suffix(".json").write_text('{"sif_sha256": ""}')
    built = run(*line.split(), cwd=tmp_path, **builds)
    assert built.returncode == 0, built.stderr
    venv, python = built.stdout.splitlines()
    assert venv == f"venv {tmp_path}/v image"
    assert python.endswith("containers/build.py --stack cu126 --extra  --offline  --image  verify")


@pytest.mark.parametrize("python", list(pythons()), ids=lambda path: path.name)
def test_a_login_nodes_python_compares_runs(python: Path, tmp_path: Path) -> None:
    manifest = {"format": 1, "attempts": [{"command": ["my.py"], "nodes": ["a"]}]}
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(json.dumps(manifest))
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    shown = run(CHECKOUT / "apptrain", "compare", "one", "two", cwd=tmp_path, **bare(python, tmp_path))
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.endswith("traces: identical, bit for bit, over 1 step\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "inspect --image no.sif",
            "{}/no.sif: there is no such image: make image, or give another with --image",
        ),
        (
            "verify --image no.sif",
            "{}/no.sif: there is no such image: make image, or give another with --image",
        ),
        (
            "inspect --image cut.sif",
            "the image {}/cut.sif (40 bytes) does not begin as one: it was not copied or built to its end",
        ),
        (
            "inspect --image other.sif",
            "{}/other.json cannot be read (No such file or directory): the build writes it beside its image: build "
            "that anew (make image); of an image from elsewhere `apptainer inspect {}/other.sif` tells what is in it",
        ),
        (
            "verify --stack cu126 my.sif",
            "my.sif stands without --image: did you mean `./apptrain image verify --stack cu126 --image my.sif`?",
        ),
        ("build --extra no.txt", "EXTRA=no.txt: there is no such file: give a requirements file"),
    ],
)
def test_a_file_that_is_missing_or_no_image_is_told_before_a_venv_is_made_for_the_image(
    words: str, said: str, builds: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "bin/apptainer").symlink_to("/bin/true")
    (tmp_path / "cut.sif").write_bytes(SIF[:40])
    (tmp_path / "other.sif").write_bytes(SIF)
    asked = run("./apptrain", "image", *words.split(), cwd=tmp_path, **builds)
    assert (asked.returncode, asked.stdout) == (64, "")
    assert asked.stderr == f"apptrain: image {words.split()[0]}: {said.format(tmp_path, tmp_path)}\n"


@pytest.mark.parametrize("words", [("inspect", "--image", "no"), ("build", "--extra", "no")], ids=" ".join)
def test_that_needs_no_package_of_the_venv(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "apptainer").symlink_to("/bin/true")
    code = "import sys; sys.path.insert(0, sys.argv[1]); from entrypoint.cli.apptrain import main; sys.exit(main(sys.argv[2:]))"
    bare = (sys.executable, "-S", "-P", "-c", code, CHECKOUT)
    asked = run(*bare, "image", *words, cwd=tmp_path, PATH=str(tmp_path))
    assert (asked.returncode, asked.stdout, asked.stderr.count("\n")) == (64, "", 1), asked.stderr


@pytest.mark.parametrize("what", ["build", "verify", "inspect"])
def test_without_apptainer_no_venv_is_made_for_the_image(
    what: str, builds: dict[str, str], tmp_path: Path
) -> None:
    asked = run("./apptrain", "image", what, cwd=tmp_path, **builds)
    assert (asked.returncode, asked.stdout) == (64, "")
    assert asked.stderr == (
        f"apptrain: image {what}: neither apptainer nor singularity is on PATH: load it (module avail apptainer), "
        "or build on a node that has it\n"
    )


def test_what_an_image_is_made_from_is_fetched_without_apptainer(
    builds: dict[str, str], tmp_path: Path
) -> None:
    fetched = run("./apptrain", "image", "fetch", cwd=tmp_path, **builds)
    assert (fetched.returncode, fetched.stdout.count("\n")) == (0, 2)


@pytest.mark.parametrize(
    ("words", "given", "image"),
    [
        ("--image", "", "{here}/containers/image.sif"),
        ("--image", "my.sif", "my.sif"),
        ("--image other", "my.sif", "other"),
        ("--image=other.sif", "my.sif", "other.sif"),
        ("--image unpacked.py", "my.sif", "unpacked.py"),
    ],
)
def test_a_run_is_in_the_image_that_is_given_else_in_that_of_the_variable_else_in_the_checkouts(
    words: str, given: str, image: str, builds: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "containers/run.sh").write_text('#!/bin/sh\necho "$*"\n')
    (tmp_path / "containers/run.sh").chmod(0o755)
    (tmp_path / "unpacked.py/.singularity.d").mkdir(parents=True)
    env = {**builds, **({"APPTRAIN_IMAGE": given} if given else {})}
    ran = run("./apptrain", "run", *words.split(), "--nodes", "3", "--", "my.py", cwd=tmp_path, **env)
    assert (ran.returncode, ran.stderr) == (0, "")
    image = image.format(here=tmp_path)
    assert ran.stdout == f"{image} python -P -m entrypoint.cli.embedded --nodes 3 -- my.py\n"


@pytest.mark.parametrize("python", list(pythons()), ids=lambda path: path.name)
def test_a_stack_that_is_not_there_is_refused_before_a_venv_is_made(python: Path, tmp_path: Path) -> None:
    """Also without PyYAML."""
    words = ("image", "fetch", "--stack", "cu999")
    asked = run("./apptrain", *words, cwd=CHECKOUT, **bare(python, tmp_path))
    assert (asked.returncode, asked.stdout) == (64, "")
    said = "image fetch: STACK=cu999: there is no such stack: give one of cu132, cu128, cu126\n"
    assert asked.stderr == f"apptrain: {said}"


def test_what_was_meant_is_told_as_it_works_from_here(tmp_path: Path) -> None:
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    for folder, us in ((CHECKOUT, "./apptrain"), (tmp_path, shlex.quote(str(CHECKOUT / "apptrain")))):
        ended = subprocess.run(
            [str(CHECKOUT / "apptrain"), "train.py"], cwd=folder, env=env, capture_output=True, text=True
        )
        found = f"apptrain: train.py is no command: did you mean `{us} run -- train.py`?\n"
        assert (ended.returncode, ended.stderr) == (64, found)


LONG = "l" * 300
"""No file can have that name."""


@pytest.mark.parametrize(
    "line",
    [
        *("explain LONG", "explain LONG.py", "compare LONG LONG", "report LONG", "rerun LONG", "scaling LONG"),
        *("run -- LONG.py", "run --run-dir LONG", "run --venv LONG", "demo --config LONG", "plan --profile LONG"),
        *("submit --cluster LONG", "submit --cluster generic --nodes 1 --image LONG -- x", "doctor --profile LONG"),
        *("image build --extra LONG", "VENV=/tmp/LONG run"),
    ],
)  # fmt: skip
def test_a_path_that_no_file_can_have_is_refused_in_a_line(line: str, tmp_path: Path) -> None:
    words = line.replace("LONG", LONG).split()
    env = {"VENV": sys.prefix}
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        env[name] = value
    ended = run(CHECKOUT / "apptrain", *words, cwd=tmp_path, **env)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (64, "", 1), ended.stderr
    assert "File name too long" in ended.stderr


def test_a_venv_with_a_name_that_no_file_can_have_is_refused(tmp_path: Path) -> None:
    ended = run(CHECKOUT / "tools/venv.sh", LONG, "run", cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (64, "")
    assert ended.stderr == (
        f"apptrain: VENV={tmp_path}/{LONG}: no file system takes a name of so many letters: choose another "
        "place, make VENV=DIR\n"
    )


def test_an_option_of_run_that_is_empty_is_refused(tmp_path: Path) -> None:
    ended = run(CHECKOUT / "apptrain", "run", "--run-dir", "", cwd=tmp_path, VENV=sys.prefix)
    said = "apptrain: --run-dir is empty: give DIR or leave it out\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (64, "", said)
