"""entrypoint/cli/submit.py: the line that submits, and what is refused."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from entrypoint.core.errors import BadInput
from entrypoint.plan import profile
from tests.unit.cli.site import Site

SLURM = """\
scheduler: slurm
tested: on two nodes
nodes: {gpus: 4, cpus: 64, memory_gib: 400}
request: {partition: gpu, account: $PROJECT, time: "02:00:00", stop_before: 300, gpus: '--gpus-per-node=a100:{gpus}', options: [--qos=short]}
"""
PBS = """\
scheduler: pbs
tested: on two nodes
scratch: ${WORK}/$USER
nodes: {gpus: 4, cpus: 48, memory_gib: 380}
request: {partition: gpu, account: ab12, time: "02:00:00", stop_before: 600, gpus: 'ngpus={gpus}:gpu_type=v100'}
container: {binds: ['$DATA:/data:ro'], program: $HOME/bin/apptainer}
"""


def test_what_is_wished_for_wins_over_the_profile(site: Site) -> None:
    site.write(SLURM)
    wishes = ["--partition", "big", "--account", "other", "--time", "00:10:00"]
    line = site.submit(
        "--nodes", "8", *wishes, "--options", "--qos=long --comment='two words'", "--device=cuda"
    )
    assert line == [
        *("sbatch", "--nodes=8", "--partition=big", "--account=other"),
        *("--gpus-per-node=a100:4", "--cpus-per-task=64", "--mem=400G"),
        *("--time=00:10:00", "--signal=B:USR2@300", "--qos=long", "--comment=two words"),
        *("slurm/multinode.sbatch", "--profile", "lab", "--device=cuda"),
    ]


def test_an_empty_wish_is_none(site: Site) -> None:
    """As make passes on what was not set."""
    site.write(SLURM)
    empty = ["--gpus", "", "--partition", "", "--account", "", "--time", "", "--options", ""]
    assert site.submit(*empty, PROJECT="ab12") == site.submit(PROJECT="ab12")


def test_fewer_gpus_of_a_shared_node_come_with_their_share_of_it(site: Site) -> None:
    site.write(SLURM)
    line = site.submit("--gpus", "1", PROJECT="ab12")
    assert line[4:7] == ["--gpus-per-node=a100:1", "--cpus-per-task=16", "--mem=100G"]
    site.write(PBS)
    line = site.submit("--gpus", "1", WORK="/w", DATA="/d")
    assert line[:3] == ["qsub", "-l", "select=2:ncpus=12:ngpus=1:gpu_type=v100:mem=95gb"]


DIRECTIVES = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --gpus-per-node=1  # SITE
#SBATCH --cpus-per-task=8
#SBATCH --mem=32G
##SBATCH -p gpu
#SBATCH --requeue
"""


@pytest.mark.parametrize(
    ("nodes", "request_", "wishes", "words"),
    [
        ("gpus: 4", "gpus: '--gpus-per-node={gpus}'", (), None),
        ("gpus: 0", "gpus: '--gres=gpu:{gpus}'", ("--device=cpu",), None),
        ("gpus: 4", "gpus: '--gres=gpu:{gpus}'", (), ["--cpus-per-task=8", "--mem=32G", "--requeue", "--nodes=2", "--gres=gpu:4"]),
        ("gpus: 4", "", ("--options=--gres=gpu:a100:2",), ["--cpus-per-task=8", "--mem=32G", "--requeue", "--nodes=2", "--gres=gpu:a100:2"]),
        ("gpus: 4", "", ("--options=--gres=nvme:1",), None),
        ("gpus: 4, memory_gib: 9", "options: [--mem-per-cpu=4G]", (), ["--cpus-per-task=8", "--requeue", "--nodes=2", "--gpus-per-node=4", "--mem-per-cpu=4G"]),
        ("gpus: 4, cpus: 9, whole: true", "nodes_only: true", (), ["--requeue", "--nodes=2"]),
        ("gpus: 4, cpus: 9, memory_gib: 9", "memory: none", (), ["--requeue", "--nodes=2", "--gpus-per-node=4", "--cpus-per-task=9"]),
        ("gpus: 4", "memory: none, form: wrapped, gpus: '--gres=gpu:{gpus}'", (), ["--cpus-per-task=8", "--requeue", "--nodes=2", "--gres=gpu:4"]),
        ("gpus: 4, memory_gib: 10", "cpus: none", (), ["--requeue", "--nodes=2", "--gpus-per-node=4", "--mem=10G"]),
        ("gpus: 4, cpus: 8", "cpus: none, memory: none", (), ["--requeue", "--nodes=2", "--gpus-per-node=4"]),
        ("gpus: 4, cpus: 48, memory_gib: 240", "memory: --mem-per-cpu", (), ["--requeue", "--nodes=2", "--gpus-per-node=4", "--cpus-per-task=48", "--mem-per-cpu=5G"]),
        ("gpus: 4, cpus: 48, memory_gib: 250", "memory: --mem-per-cpu", ("--gpus=2",), ["--requeue", "--nodes=2", "--gpus-per-node=2", "--cpus-per-task=24", "--mem-per-cpu=5333M"]),
        ("gpus: 4, memory_gib: 240", "memory: --mem-per-gpu", (), ["--cpus-per-task=8", "--requeue", "--nodes=2", "--gpus-per-node=4", "--mem-per-gpu=60G"]),
        ("gpus: 4, memory_gib: 240", "memory: --mem", (), None),
    ],
)  # fmt: skip
def test_nothing_is_asked_for_in_two_ways(
    site: Site, nodes: str, request_: str, wishes: tuple[str, ...], words: list[str] | None
) -> None:
    """sbatch refuses --gres beside --gpus-per-node, --mem beside --mem-per-cpu, also if one is the script's own line."""
    (site.checkout / "slurm/multinode.sbatch").write_text(DIRECTIVES)
    site.write(f"scheduler: slurm\ntested: x\nnodes: {{{nodes}}}\nrequest: {{{request_}}}\n")
    line = site.submit(*wishes)
    assert any(word.startswith("--wrap=exec bash ") for word in line) == (words is not None)
    if words is not None:
        assert line[1:-1] == words
    assert len([word for word in line if word.startswith(("--gpus-per-node=", "--gres=gpu"))]) == int(
        "whole" not in nodes
    )


def test_a_request_of_pbs_names_neither_memory_nor_cpus_where_it_must_not(site: Site) -> None:
    site.write(
        "scheduler: pbs\nnodes: {gpus: 4, cpus: 8, memory_gib: 9}\nrequest: {memory: none, cpus: none}\n"
    )
    assert site.submit()[:5] == ["qsub", "-l", "select=2:ngpus=4", "-l", "place=scatter"]


NEEDS = "scheduler: {}\nnodes: {{gpus: 4}}\nrequest: {{needs: [account, partition]{}}}\n"


@pytest.mark.parametrize(
    ("scheduler", "further", "arguments", "missing"),
    [
        ("slurm", "", [], "account"),
        ("slurm", "", ["--account", "a"], "partition"),
        ("slurm", "", ["--options=-A a -p gpu"], ""),
        ("slurm", "", ["--options=--account=a --partition gpu"], ""),
        ("slurm", ", account: a, options: [-p, gpu]", [], ""),
        ("slurm", ", account: a, partition: gpu", [], ""),
        ("slurm", "", ["--options=--comment=-A"], "account"),
        ("pbs", "", [], "account"),
        ("pbs", "", ["--options=-P a", "--partition=gpu"], ""),
        ("pbs", "", ["--options=-A a -q gpu"], ""),
        ("pbs", ", account: a", ["--options=-l q=gpu"], "partition"),
    ],
)  # fmt: skip
def test_a_job_is_refused_without_what_its_site_needs(
    site: Site, scheduler: str, further: str, arguments: list[str], missing: str
) -> None:
    site.write(NEEDS.format(scheduler, further))
    if not missing:
        assert site.submit(*arguments)
        return
    assert site.refused("--cluster", "lab", *arguments) == (
        f"apptrain: --{missing} is missing: lab.yaml says that a job there needs it: give --{missing} NAME"
    )


def test_an_account_in_a_variable_of_sbatch_is_one_and_time_is_asked_for_in_its_form(site: Site) -> None:
    site.write("scheduler: slurm\nnodes: {gpus: 4}\nrequest: {needs: [account, time]}\n")
    assert site.refused("--cluster", "lab", SBATCH_ACCOUNT="a") == (
        "apptrain: --time is missing: lab.yaml says that a job there needs it: give --time HH:MM:SS"
    )
    assert "--time=01:00:00" in site.submit("--time", "01:00:00", SBATCH_ACCOUNT="a")


OF_DRIVER = "scheduler: slurm\ntested: x\nnodes: {{gpus: 4, {}}}\ncontainer: {{{}}}\n"


@pytest.mark.parametrize(
    ("nodes", "container", "image"),
    [
        ("driver: '580'", "", "image.sif"),
        ("driver: '550.54.15'", "", "image-cu128.sif"),
        ("driver: '550'", "stack: cu126", "image-cu126.sif"),
        ("driver: '595', architecture: aarch64", "", "image-aarch64.sif"),
    ],
)
def test_the_sites_driver_and_processor_choose_the_image(
    site: Site, nodes: str, container: str, image: str
) -> None:
    site.write(OF_DRIVER.format(nodes, container))
    done = site.run("submit.py", "--cluster", "lab", "--dry-run")
    assert f"apptrain: image {site.checkout}/containers/{image}" in done.stderr
    (site.checkout / "containers" / "image.sif").unlink(missing_ok=True)
    assert site.refused("--cluster", "lab").startswith(
        f"apptrain: there is no image {site.checkout}/containers/{image}: make image"
        + {"image-cu128.sif": " STACK=cu128, or", "image-cu126.sif": " STACK=cu126, or"}.get(image, "")
        + {"image-aarch64.sif": " on a node with aarch64, or"}.get(image, "")
    )
    if image != "image-aarch64.sif":
        assert f"image={image}\n" in site.lab.with_suffix(".host").read_text()


@pytest.mark.parametrize(
    ("nodes", "container", "message"),
    [
        (
            "driver: '550'",
            "stack: cu132",
            "lab.yaml: container stack cu132 needs NVIDIA driver 580, and nodes driver is 550: give stack cu128 or "
            "leave it out, or name CUDA's forward compatibility in APPTRAIN_CUDA_COMPAT",
        ),
        (
            "driver: '565.57.01', architecture: aarch64",
            "",
            "no stack has CUDA builds for aarch64 and NVIDIA driver 565.57.01 (cu132 needs 580): have the driver "
            "updated, or take an image that exists: apptainer pull FILE.sif docker://NAME, then "
            "APPTRAIN_IMAGE=FILE.sif, one of NVIDIA's own for this driver",
        ),
    ],
)
def test_a_driver_that_is_too_old_is_refused_before_the_queue(
    site: Site, nodes: str, container: str, message: str
) -> None:
    site.write(OF_DRIVER.format(nodes, container))
    assert site.refused("--cluster", "lab", "--dry-run") == f"apptrain: {message}"
    own = site.run("submit.py", "--cluster", "lab", "--dry-run", APPTRAIN_IMAGE="/ngc.sif")
    assert (own.returncode, "apptrain: image /ngc.sif (not there" in own.stderr) == (0, True)


def test_a_stack_without_builds_for_the_processor_is_no_profile(site: Site) -> None:
    site.lab.write_text(OF_DRIVER.format("architecture: aarch64", "stack: cu128"))
    assert site.refused("clusters/lab.yaml", program="profiles.py") == (
        "apptrain: clusters/lab.yaml: container stack is cu128, which has no builds for aarch64: give cu132, or leave "
        "it out"
    )


def test_where_sbatch_knows_no_gpus_per_node_the_script_is_wrapped_without_its_line(site: Site) -> None:
    directives = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --gpus-per-node=1  # SITE\n##SBATCH -p gpu\n#SBATCH --requeue\n"
    (site.checkout / "slurm/multinode.sbatch").write_text(directives)
    site.write("scheduler: slurm\nnodes: {gpus: 4}\nrequest: {form: wrapped, gpus: '--gres=gpu:{gpus}'}\n")
    line = site.submit("--device=cuda", "--", "my script.py")
    inside = [*("exec", "bash", f"{site.checkout}/slurm/multinode.sbatch", "--profile", "lab")]
    assert line[:-1] == ["sbatch", "--requeue", "--nodes=2", "--gres=gpu:4"]
    assert shlex.split(line[-1].removeprefix("--wrap=")) == [*inside, "--device=cuda", "--", "my script.py"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "scheduler: pbs\nrequest: {form: wrapped}",
            "request form wrapped is for slurm, and scheduler is pbs: leave it out",
        ),
        (
            "scheduler: slurm\nrequest: {form: totals}",
            "request form totals is for pbs, and scheduler is slurm: leave it out",
        ),
        (
            "scheduler: slurm\nrequest: {form: wrapped}",
            "request form wrapped needs request gpus, such as --gres=gpu:{gpus}",
        ),
    ],
)
def test_a_form_that_does_not_fit_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "lab.yaml").write_text(text)
    with pytest.raises(BadInput) as refused:
        profile.load(str(tmp_path / "lab.yaml"))
    assert str(refused.value) == f"{tmp_path}/lab.yaml: {message}"


def test_nodes_without_gpus_are_asked_for_without(site: Site) -> None:
    site.write("scheduler: slurm\nnodes: {gpus: 0, cpus: 64}\n")
    line = site.submit("--device", "cpu")
    assert line[:4] == ["sbatch", "--nodes=2", "--gpus-per-node=0", "--cpus-per-task=64"]


def test_whole_nodes_that_a_request_must_not_describe_are_only_counted(site: Site) -> None:
    site.write("scheduler: slurm\nnodes: {gpus: 4, cpus: 16, whole: true}\nrequest: {nodes_only: true}\n")
    assert site.submit()[:-1] == ["sbatch", "--nodes=2"]


def test_the_line_that_is_printed_is_the_one_that_is_run(site: Site) -> None:
    site.write(SLURM)
    arguments = ["--", "my script.py", "it's", "", "a\nb", "$HOME", "--", "--nodes=9"]
    done = site.run("submit.py", "--cluster", "lab", *arguments, PROJECT="ab12", FAKE_STATUS="3")
    line, answer = done.stdout.rsplit("job 7", 1)
    assert (done.returncode, answer) == (3, "\n")
    (call,) = site.calls()
    assert call["cwd"] == str(site.checkout)
    assert shlex.split(line)[1:] == call["argv"][1:]  # type: ignore[index]
    assert shlex.split(line)[-len(arguments) :] == arguments


def test_from_elsewhere_the_checkout_is_named(site: Site) -> None:
    site.write(SLURM)
    assert site.submit(cwd=site.folder, PROJECT="x")[-3] == f"{site.checkout}/slurm/multinode.sbatch"
    site.write(PBS)
    line = site.submit(cwd=site.folder, WORK="/w", DATA="/d")
    assert line[-1] == f"{site.checkout}/pbs/multinode.pbs"
    assert f"APPTRAIN_HOME={site.checkout}" in line[-2].split(",")


def test_a_profile_of_ones_own_is_named_by_its_path(site: Site) -> None:
    mine = site.folder / "mine.yaml"
    mine.write_text(SLURM)
    assert site.run("profiles.py", str(mine)).returncode == 0
    done = site.run("submit.py", "--dry-run", APPTRAIN_PROFILE="../mine.yaml", PROJECT="x")
    assert shlex.split(done.stdout)[-2:] == ["--profile", str(mine)]
    (site.folder / "theirs").mkdir()
    mine.rename(site.folder / "theirs" / "of-all.yaml")
    mine.symlink_to("theirs/of-all.yaml")  # the host file stays beside the link
    done = site.run("submit.py", "--dry-run", APPTRAIN_PROFILE="../mine.yaml", PROJECT="x")
    assert shlex.split(done.stdout)[-2:] == ["--profile", str(mine)]


def test_a_job_of_pbs_is_told_the_variables_that_its_profile_and_its_user_name(site: Site) -> None:
    site.write(PBS.replace("{binds", "{module_paths: [$SW/modules], binds") + "stage: {to: $FAST}\n")
    paths: dict[str, Any] = {"WORK": "/w", "DATA": "/d", "SW": "/s", "FAST": "/f"}
    line = site.submit(**paths, USER="alice", APPTRAIN_IMAGE="/i.sif", OTHER="x")
    assert line[-3] == "-v"
    assert line[-2].split(",") == [
        *("APPTRAIN_IMAGE=/i.sif", "APPTRAIN_PROFILE=lab", "APPTRAIN_STOP_BEFORE=600"),
        *("DATA=/d", "FAST=/f", "SW=/s", "WORK=/w"),
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--device=cuda", "--", "a,b.py"],
        ["--", "my script.py"],
        ["--", "a,b"],
        ["--", "my.py", 'say "no"', "it's", "two\nlines", ""],
    ],
)
def test_arguments_that_qsub_cannot_carry_go_through_a_file(site: Site, arguments: list[str]) -> None:
    site.write(PBS)
    paths: dict[str, Any] = {"WORK": "/w", "DATA": "/d"}
    line = site.submit(*arguments, APPTRAIN_ARGS="-- old.py", **paths)
    carried = dict(word.split("=", 1) for word in line[-2].split(","))
    file = Path(carried.pop("APPTRAIN_ARGS_FILE"))
    assert carried == {"APPTRAIN_PROFILE": "lab", "APPTRAIN_STOP_BEFORE": "600", **paths}
    assert file.parent == site.checkout / "runs" / "arguments"
    assert not file.parent.exists()
    done = site.run("submit.py", "--cluster", "lab", *arguments, **paths)
    assert (done.returncode, site.calls()[0]["argv"]) == (0, [str(site.bin / "qsub"), *line[1:]])
    assert file.read_bytes() == b"".join(word.encode() + b"\0" for word in arguments)
    modes = [oct(path.stat().st_mode & 0o777) for path in (file, file.parent)]
    assert modes == ["0o600", "0o700"]


def test_a_file_of_arguments_that_the_user_gave_stays_as_it_is(site: Site) -> None:
    site.write(PBS)
    file = site.folder / "arguments"
    file.write_text("--\0my.py\0")
    done = site.run("submit.py", "--cluster", "lab", WORK="/w", DATA="/d", APPTRAIN_ARGS_FILE=str(file))
    assert (done.returncode, file.read_text()) == (0, "--\0my.py\0")
    assert f"APPTRAIN_ARGS_FILE={file}," in done.stdout


KNOWN = "delta, derecho, gadi, generic, generic-pbs, gwdg-grete, isambard-ai, lab, leonardo, perlmutter, polaris, snellius, vista, or the path of a profile"
CLOCKS = "MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS"
TIMES = f"minutes, {CLOCKS}"
WRITES = "or run `apptrain site -o {}` on your cluster's login node, which writes one"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--cluster", ""],
            f"--cluster is missing: give one of {KNOWN}, {WRITES.format('clusters/mine.yaml')}; without a profile: sbatch slurm/multinode.sbatch -- CMD, qsub pbs/multinode.pbs",
        ),
        (
            ["--cluster", "nowhere"],
            f"--cluster nowhere: there is no {{clusters}}/nowhere.yaml: give one of {KNOWN}, {WRITES.format('clusters/nowhere.yaml')}",
        ),
        (
            ["--cluster", "./no.yaml"],
            f"--cluster ./no.yaml: there is no no.yaml: check the path, {WRITES.format('no.yaml')}",
        ),
        (["--nodes", "0"], "--nodes 0: give a whole number from 1"),
        (["--nodes", "2:4"], "--nodes 2:4: give a whole number from 1"),
        (["--gpus-per-node", "8"], "--gpus-per-node 8: a node of lab.yaml has 4: ask for more nodes"),
        (["--time", "2h"], f"--time 2h: give {TIMES}"),
        (["--time", "00:00:00"], f"--time 00:00:00: give {TIMES}"),
        (["--walltime", "abc"], f"--walltime abc: give {CLOCKS}; a number alone could be seconds or minutes"),
        (["--walltime", "90"], f"--walltime 90: give {CLOCKS}; a number alone could be seconds or minutes"),
        (["--partition", "a b"], "--partition a b: give one word"),
        (["--options=--comment='x"], "--options --comment='x: No closing quotation: quote it as for a shell"),
        (
            [],
            "$PROJECT in the profile {clusters}/lab.yaml: PROJECT is not set here: set it, or correct the profile",
        ),
    ],
)
def test_a_wish_that_cannot_be_is_refused(site: Site, arguments: list[str], message: str) -> None:
    site.write(SLURM)
    text = site.refused("--cluster", "lab", *arguments)
    assert text == "apptrain: " + message.format(clusters=site.checkout / "clusters")


def test_a_part_of_a_whole_node_is_refused(site: Site) -> None:
    site.write("scheduler: slurm\nnodes: {gpus: 4, whole: true}")
    assert site.refused("--cluster", "lab", "--gpus-per-node", "2") == (
        "apptrain: --gpus-per-node 2: nodes of lab.yaml come whole, with 4: leave it out (fewer ranks: --nproc-per-node 2)"
    )


def test_a_profile_that_does_not_describe_its_nodes_is_refused(site: Site) -> None:
    site.write("scheduler: slurm")
    assert site.refused("--cluster", "lab") == (
        "apptrain: lab.yaml: nodes gpus is missing: say how many GPUs a node has, or 0"
    )


def test_a_profile_that_was_changed_since_is_refused(site: Site) -> None:
    site.write(SLURM)
    site.lab.write_text(SLURM + "title: changed\n")
    assert site.refused("--cluster", "lab") == (
        f"apptrain: --cluster lab: {site.lab.with_suffix('.host')} is not made from lab.yaml as that is now: make profiles"
    )


def test_a_job_that_could_not_start_is_not_submitted(site: Site) -> None:
    site.write(SLURM + "container: {stack: cu126}\n")
    assert site.refused("--cluster", "lab", PROJECT="x") == (
        f"apptrain: there is no image {site.checkout}/containers/image-cu126.sif: "
        "make image STACK=cu126, or give another with --image"
    )
    (site.bin / "sbatch").unlink()
    image = str(site.checkout / "containers" / "image.sif")
    url = "docker://nvcr.io/nvidia/pytorch:25.10-py3"
    assert site.refused("--cluster", "lab", PROJECT="x", APPTRAIN_IMAGE=url) == (
        f"apptrain: {url}: an image is a file: apptainer pull image.sif {url}, then --image image.sif"
    )
    assert site.refused("--cluster", "lab", PROJECT="x", APPTRAIN_IMAGE=image) == (
        "apptrain: sbatch is not in PATH: submit on a login node of that cluster"
    )


def test_what_qsub_cannot_carry_is_refused(site: Site) -> None:
    site.write(PBS)
    binds = "/a\n/b,c"
    assert site.refused("--cluster", "lab", WORK="/w", DATA="/d", APPTRAIN_BIND=binds) == (
        "apptrain: APPTRAIN_BIND_2='/b,c': qsub -v carries no commas, quotes, backslashes and line breaks: "
        "use a path without them, or the profile"
    )


@pytest.mark.parametrize("program", ["submit.py", "profiles.py"])
def test_wrong_options_end_with_64_and_help_with_0(site: Site, program: str) -> None:
    shown_as = {"submit.py": "apptrain submit", "profiles.py": "entrypoint/cli/profiles.py"}[program]
    message = f"apptrain: unrecognized arguments: --wrong: see `{shown_as} --help`"
    if program == "submit.py":
        message = (
            "apptrain: --wrong: no option of submit, of a job or of sbatch or qsub (see apptrain submit --help; "
            "sbatch or qsub gets it with --options=--wrong)"
        )
    assert site.refused("--wrong", program=program) == message
    shown = site.run(program, "--help")
    assert shown.returncode == 0
    assert shown.stdout.startswith(f"usage: {shown_as}")
