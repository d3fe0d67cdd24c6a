"""What may stand in a profile, and the profiles that are there."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from entrypoint.batch import granted, login
from entrypoint.batch.survey import answer
from entrypoint.cli import profiles as render
from entrypoint.core.errors import BadInput
from entrypoint.plan import profile
from entrypoint.plan.options import FABRICS, OPTIONS
from entrypoint.schedulers.known import KNOWN, words_of
from tests.unit.cli.site import CHECKOUT, SHIPPED

GENERIC = ("generic", "generic-pbs")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("scheduler: lsf", "scheduler is 'lsf': give one of slurm, pbs"),
        ("scheduler: slurm\nstart: mpiexec", "start is 'mpiexec': give under slurm srun"),
        ("scheduler: pbs\nstart: srun", "start is 'srun': give under pbs pbsdsh or pbs_tmrsh or mpiexec or ssh"),
        ("launcher_args: --cpu-bind", "launcher_args is '--cpu-bind': give a list, as in [a, b]"),
        ("clusters: [a b]", "clusters, entry 1, is 'a b': give one word, without blanks"),
        ("clusters: [a, 7]", "clusters, entry 2, is 7: give text, in quotes where YAML takes it for something else"),
        ("title: \"a\\nb\"", "title is 'a\\nb': give one line of printable characters"),
        ("request: {stop_before: 0}", "request stop_before is 0: give a whole number from 1"),
        ("request: {stop_before: true}", "request stop_before is True: give a whole number from 1"),
        ("host_suffix: '.hsn; x'", "host_suffix is '.hsn; x': give the end of a host's name, such as -hsn"),
        ("scratch: work", "scratch is 'work': give a path from /, or one that begins with a variable"),
        ("scratch: /data/$(id)", "scratch is '/data/$(id)': give $ only in front of a variable's name, as $NAME or ${NAME}"),
        ("scratch: /data/${A", "scratch is '/data/${A': give $ only in front of a variable's name, as $NAME or ${NAME}"),
        ("nodes: {gpus: four}", "nodes gpus is 'four': give a whole number from 0"),
        (
            "stage: {read_percent: 0}",
            "stage read_percent is 0: give a whole number from 1 to 100",
        ),
        (
            "stage: {read_percent: 101}",
            "stage read_percent is 101: give a whole number from 1 to 100",
        ),
        (
            "stage: {read_percent: true}",
            "stage read_percent is True: give a whole number from 1 to 100",
        ),
        ("nodes: {whole: maybe}", "nodes whole is 'maybe': give true or false"),
        ("nodes: [4]", "nodes must be a mapping, found [4]"),
        ("nodes: {gpu: 4}", "nodes: unknown key gpu: did you mean gpus?"),
        ("request: {time: 10:00:00}", "line 1: 10:00:00 without quotes is a number in base 60: write \"10:00:00\""),
        ("request: {time: '60'}", "request time is '60': give HH:MM:SS in quotes, as in \"01:00:00\""),
        ("request: {account_option: --project}", "request account_option is '--project': give one of -A, -P"),
        ("request: {chunk: ['a=b:c=d']}", "request chunk, entry 1, is 'a=b:c=d': give NAME=VALUE, a resource of a chunk"),
        ("scheduler: slurm\nrequest: {chunk: [a=b]}", "request chunk is for pbs, and scheduler is slurm: leave it out"),
        ("scheduler: slurm\nrequest: {form: totals}", "request form totals is for pbs, and scheduler is slurm: leave it out"),
        ("scheduler: pbs\nrequest: {form: totals, chunk: [a=b]}", "request chunk has no place beside form totals: use options"),
        ("scheduler: slurm\nrequest: {nodes_only: true}", "request nodes_only goes only with whole nodes: set whole under nodes"),
        ("scheduler: slurm\nrequest: {gpus: --gres=gpu:4}", "request gpus is '--gres=gpu:4': give it as in --gpus-per-node={gpus}, or nodes_only: true instead"),
        ("scheduler: pbs\nnodes: {whole: true}\nrequest: {gpus: 'ngpus={gpus}', nodes_only: true}", "request gpus is 'ngpus={gpus}': give it as in ngpus={gpus}, or nodes_only: true instead"),
        ("nodes: {architecture: arm64}", "nodes architecture is 'arm64': give one of x86_64, aarch64"),
        ("nodes: {driver: 550}", "nodes driver is 550: give text, in quotes where YAML takes it for something else"),
        ("nodes: {driver: 'R550'}", "nodes driver is 'R550': give NVIDIA's version in quotes, as in \"550\" or \"550.54.15\""),
        ("request: {memory: 40G}", "request memory is '40G': give one of none, --mem, --mem-per-cpu, --mem-per-gpu"),
        ("request: {cpus: 4}", "request cpus is 4: give one of none"),
        ("request: {needs: [project]}", "request needs, entry 1, is 'project': give one of account, partition, time"),
        ("request: {needs: account}", "request needs is 'account': give a list, as in [a, b]"),
        ("scheduler: pbs\nrequest: {memory: --mem-per-cpu}", "request memory is '--mem-per-cpu': give none, or leave it out: pbs knows no such word"),
        ("scheduler: slurm\nnodes: {cpus: 4}\nrequest: {memory: --mem-per-cpu}", "request memory is '--mem-per-cpu': give nodes cpus and nodes memory_gib too, from which the amount follows"),
        ("scheduler: slurm\nnodes: {gpus: 0, memory_gib: 9}\nrequest: {memory: --mem-per-gpu}", "request memory is '--mem-per-gpu': give nodes gpus and nodes memory_gib too, from which the amount follows"),
        ("scheduler: slurm\nrequest: {memory: --mem}", "request memory is '--mem': give nodes memory_gib too, from which the amount follows"),
        ("scheduler: slurm\nnodes: {whole: true, memory_gib: 9}\nrequest: {memory: --mem, nodes_only: true}", "request memory is '--mem': give none, or leave it out: nodes_only names no memory"),
        ("container: {options: --fakeroot}", "container options is '--fakeroot': give a list, as in [a, b]"),
        ("container: {options: [-B /a]}", "container options, entry 1, is '-B /a': give an option of Apptainer in one word, as --fakeroot"),
        ("container: {options: [--bind=/a]}", "container options, entry 1, is '--bind=/a': give the path under binds"),
        ("container: {options: ['--env=A=b']}", "container options, entry 1, is '--env=A=b': give the variable under env"),
        ("container: {options: [--userns, --nv]}", "container options, entry 2, is '--nv': give none: NVIDIA's driver is found without"),
        ("container: {options: [--cleanenv]}", "container options, entry 1, is '--cleanenv': give another option, such as --fakeroot: every job relies on this one as it is"),
        ("container: {obey_binds: [/a]}", "container obey_binds is ['/a']: give true or false"),
        ("container: {wrappers: [adapt.sh]}", "container wrappers, entry 1, is 'adapt.sh': give a path from / in the image, without blanks"),
        ("container: {wrappers: ['/a b']}", "container wrappers, entry 1, is '/a b': give a path from / in the image, without blanks"),
        ("launch: {fabric: ib}", "launch fabric is 'ib': give one of infiniband, slingshot, efa, ethernet"),
        ("container: {program: 'a b'}", "container program is 'a b': give a program's name, or a path from /"),
        ("container: {binds: [data]}", "container binds, entry 1, is 'data': give SRC[:DST[:ro]] with paths from /"),
        ("container: {binds: ['/a:/b:no']}", "container binds, entry 1, is '/a:/b:no': give SRC[:DST[:ro]] with paths from /"),
        ("container: {pass: ['A B']}", "container pass, entry 1, is 'A B': give NAME or PREFIX_*"),
        ("container: {modules: [7]}", "container modules, entry 1, is 7: give text, in quotes where YAML takes it for something else"),
        ("launch: {interface: 'a b'}", "launch interface is 'a b': give one word, without blanks"),
        ("launch: {interface: true}", "launch interface is True: give text or a number"),
        ("launch: {interface: [a, b]}", "launch interface is ['a', 'b']: give one value"),
        ("launch: {preload: 'a,b'}", "launch preload is 'a,b': give a list, as in [a, b]"),
        ("launch: {preload: [a b]}", "launch preload is ['a b']: give names of modules with commas between them"),
        ("launch: {nproc_per_node: 1.5}", "launch nproc-per-node is 1.5: give N, a whole number"),
        ("launch: {join_timeout: -1}", "launch join-timeout is -1: give seconds, more than 0 and less than a week"),
        ("launch: {rdzv_backend: etcd}", "launch rdzv-backend is 'etcd': give one of static, c10d"),
        ("env: {A-B: x}", "env has 'A-B': give a variable's name, letters, digits and _"),
        ("env: {A: x, PET_TEE: 3}", "env sets PET_TEE: ranks get it from the plan, or not at all: leave it out"),
        ("env: {A: x,\n  HPCX_VERSION: 2.20}", 'line 2: 2.20 without quotes is the number 2.2: write "2.20"'),
        ("env: {A: [x]}", "env A is ['x']: give text in quotes, or a number"),
        ("env: {A: x, B: y, A: z}", "line 1: the key A stands twice, and only the last would count: make it one"),
        ("env: {A: x}\nnodes: {gpus: 1}\nenv: {B: y}", "line 3: the key env stands twice, and only the last would count: make it one"),
    ],
)  # fmt: skip
def test_what_may_not_stand_in_a_profile_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "lab.yaml"
    file.write_text(text)
    with pytest.raises(BadInput) as refusal:
        profile.load(str(file))
    assert str(refusal.value) == f"{file}: {message}"


def test_every_key_is_optional_and_an_empty_one_counts_as_absent(tmp_path: Path) -> None:
    file = tmp_path / "lab.yaml"
    sections: Mapping[str, Mapping[str, object]] = {
        "nodes": profile.NODES,
        "request": profile.REQUEST,
        "container": profile.CONTAINER,
        "launch": profile.LAUNCH,
    }
    empty: dict[str, object] = dict.fromkeys(profile.KEYS)
    file.write_text(
        yaml.safe_dump({**empty, **{name: dict.fromkeys(keys) for name, keys in sections.items()}})
    )
    assert profile.load(str(file)) == profile.Profile(name="lab.yaml", path=str(file))


def test_bounds_are_seconds_also_parts_of_one(tmp_path: Path) -> None:
    file = tmp_path / "lab.yaml"
    file.write_text("launch: {join_timeout: 2.5, peer_timeout: 604799}")
    assert profile.load(str(file)).launch == {"join-timeout": 2.5, "peer-timeout": 604799}


def test_the_options_that_a_profile_may_set_are_those_of_the_entrypoint() -> None:
    assert list(profile.LAUNCH) == [option.name for option in OPTIONS if option.in_profile]


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_a_committed_host_file_is_the_one_that_its_profile_makes(file: Path) -> None:
    assert file.with_suffix(".host").read_text() == render.load_checked(file)[1]


def test_every_host_file_has_its_profile() -> None:
    assert [file.with_suffix(".host") for file in SHIPPED] == sorted((CHECKOUT / "clusters").glob("*.host"))


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_a_profile_of_a_public_cluster_names_its_pages_and_that_it_was_not_run_there(file: Path) -> None:
    site = profile.load(str(file))
    if file.stem in GENERIC:
        assert (site.documented, site.clusters) == ((), ())
        return
    assert site.tested == ""
    assert "not run there" in file.read_text().split("\n\n")[0]
    assert site.documented
    assert all(page.startswith("https://") for page in site.documented)


def test_the_script_of_pbs_is_read_for_its_directives() -> None:
    words = login.directives(CHECKOUT / words_of("pbs").job_script, "#PBS ", "-l")
    assert words[:2] == ["-N", "apptrain"]
    assert {"-N", "-S", "-j"} <= set(words)
    assert "-l" not in words


def test_no_cluster_has_two_profiles() -> None:
    names = [name for file in SHIPPED for name in profile.load(str(file)).clusters]
    assert sorted(names) == sorted(set(names))


def test_the_template_shows_every_key() -> None:
    content = yaml.safe_load((CHECKOUT / "clusters" / "generic.yaml").read_text())
    assert set(content) == set(profile.KEYS)
    assert set(content["nodes"]) == set(profile.NODES)
    assert set(content["request"]) == set(profile.REQUEST)
    assert set(content["container"]) == set(profile.CONTAINER)
    assert {name.replace("_", "-") for name in content["launch"]} == set(profile.LAUNCH)


def test_each_scheduler_of_a_profile_is_known_wherever_one_is_looked_up() -> None:
    for known in KNOWN:
        assert (CHECKOUT / known.job_script).is_file()
        offered: list[tuple[type, object]] = [
            (granted.JobSide, granted.of(known.name)),
            (login.LoginSide, login.of(known.name)),
        ]
        if known.surveyed_with:
            offered.append((answer.Surveyor, answer.of(known.name)))
        for protocol, module in offered:
            names = [name for name in vars(protocol) if not name.startswith("_")]
            assert [name for name in names if not callable(getattr(module, name, None))] == []


def test_generic_names_each_fabric() -> None:
    text = (CHECKOUT / "clusters/generic.yaml").read_text()
    line = next(line for line in text.splitlines() if line.startswith("  fabric:"))
    assert [name for name in FABRICS if name not in line] == []
