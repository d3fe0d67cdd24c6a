"""Which values a site's profile may have. tests/unit/cli/test_profiles.py has what is made of one."""

import hashlib
import json
import sys
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import yaml

import entrypoint.core.strict_yaml  # noqa: F401  a test takes it away
from entrypoint.core.errors import BadInput
from entrypoint.plan import profile
from entrypoint.plan.profile import Profile


def checked(text: str) -> Profile:
    return profile.checked(yaml.safe_load(text), Path("lab.yaml"))


def refusal(text: str) -> str:
    with pytest.raises(BadInput) as refused:
        checked(text)
    return str(refused.value).removeprefix("lab.yaml: ")


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("nodes: {gpus: 0, cpus: 1, memory_gib: 1, driver: '550.54.15'}", {"nodes.gpus": 0, "nodes.cpus": 1, "nodes.memory_gib": 1, "nodes.driver": "550.54.15"}),
        ("nodes: {whole: true}", {"nodes.whole": True, "nodes.gpus": None}),
        ("{}", {"nodes.whole": False, "request.nodes_only": False, "container.obey_binds": False, "stage.digest": False, "scheduler": "", "env": {}, "launch": {}}),
        ("request: {stop_before: 1, time: '1:00:00', needs: [time, account]}", {"request.stop_before": 1, "request.time": "1:00:00", "request.needs": ("time", "account")}),
        ("stage: {read_percent: 1, shared_mb_s: 1, node_mb_s: 1}", {"stage.read_percent": 1, "stage.shared_mb_s": 1, "stage.node_mb_s": 1}),
        ("stage: {read_percent: 100, to: $TMP/x}", {"stage.read_percent": 100, "stage.to": "$TMP/x"}),
        ("container: {pass: [A, B_*], binds: ['$A:/b:ro', /c]}", {"container.passed": ("A", "B_*"), "container.binds": ("$A:/b:ro", "/c")}),
        ("container: {options: [--fakeroot, --security=x]}", {"container.options": ("--fakeroot", "--security=x")}),
        ("launch: {peer_timeout: 3, preload: [a, b.c]}", {"launch": {"peer-timeout": 3.0, "preload": ("a", "b.c")}}),
        ("launch: {preload: [], interface: }", {"launch": {"preload": ()}}),
        ("env: {A: 1, B: 1.5, C: x}", {"env": {"A": "1", "B": "1.5", "C": "x"}}),
        ("title:\nscratch: ''\nnodes:\ndocumented: [x]", {"title": "", "scratch": "", "nodes.gpus": None, "documented": ("x",)}),
        ("scheduler: pbs\nstart: ssh", {"start": "ssh"}),
        ("scheduler: pbs\nrequest: {chunk: [a=b], form: select}", {"request.chunk": ("a=b",), "request.form": "select"}),
        ("scheduler: slurm\nrequest: {form: wrapped, gpus: 'x={gpus}'}", {"request.form": "wrapped"}),
        ("scheduler: slurm\nnodes: {whole: true}\nrequest: {form: wrapped, nodes_only: true}", {"request.nodes_only": True}),
        ("scheduler: slurm\nnodes: {memory_gib: 4}\nrequest: {memory: --mem}", {"request.memory": "--mem"}),
        ("scheduler: slurm\nrequest: {memory: none}", {"request.memory": "none"}),
        ("request: {form: totals, chunk: [a=b]}", {"request.form": "totals"}),
    ],
)  # fmt: skip
def test_a_value_that_fits_is_taken(text: str, values: dict[str, Any]) -> None:
    assert {name: attrgetter(name)(checked(text)) for name in values} == values


WHOLE = "give a whole number from"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nodes: {gpus: -1}", f"nodes gpus is -1: {WHOLE} 0"),
        ("nodes: {gpus: true}", f"nodes gpus is True: {WHOLE} 0"),
        ("nodes: {gpus: 1.0}", f"nodes gpus is 1.0: {WHOLE} 0"),
        ("nodes: {cpus: 0}", f"nodes cpus is 0: {WHOLE} 1"),
        ("nodes: {memory_gib: 0}", f"nodes memory_gib is 0: {WHOLE} 1"),
        ("nodes: {whole: 1}", "nodes whole is 1: give true or false"),
        ("nodes: {driver: 550}", "nodes driver is 550: give text, in quotes where YAML takes it for something else"),
        ("nodes: {driver: '55'}", "nodes driver is '55': give NVIDIA's version in quotes, as in \"550\" or \"550.54.15\""),
        ("nodes: {architecture: arm64}", "nodes architecture is 'arm64': give one of x86_64, aarch64"),
        ("request: {stop_before: 0}", f"request stop_before is 0: {WHOLE} 1"),
        ("request: {time: 3600}", "request time is 3600: give text, in quotes where YAML takes it for something else"),
        ("request: {partition: a b}", "request partition is 'a b': give one word, without blanks"),
        ("request: {account: '$A-${B}-$1'}", "request account is '$A-${B}-$1': give $ only in front of a variable's name, as $NAME or ${NAME}"),
        ("container: {wrappers: [/x, /opt/a b]}", "container wrappers, entry 2, is '/opt/a b': give a path from / in the image, without blanks"),
        ("request: {needs: account}", "request needs is 'account': give a list, as in [a, b]"),
        ("request: {needs: [account, qos]}", "request needs, entry 2, is 'qos': give one of account, partition, time"),
        ('request: {options: ["a\\tb"]}', "request options, entry 1, is 'a\\tb': give one line of printable characters"),
        ("stage: {read_percent: 0}", "stage read_percent is 0: give a whole number from 1 to 100"),
        ("stage: {read_percent: 101}", "stage read_percent is 101: give a whole number from 1 to 100"),
        ("stage: {read_percent: true}", "stage read_percent is True: give a whole number from 1 to 100"),
        ("stage: {shared_mb_s: 0}", f"stage shared_mb_s is 0: {WHOLE} 1"),
        ("stage: {node_mb_s: 0}", f"stage node_mb_s is 0: {WHOLE} 1"),
        ("container: {options: [--nv]}", "container options, entry 1, is '--nv': give none: NVIDIA's driver is found without"),
        ("container: {options: [--bind=/a]}", "container options, entry 1, is '--bind=/a': give the path under binds"),
        ("container: {options: [--contain]}", "container options, entry 1, is '--contain': give another option, such as --fakeroot: every job relies on this one as it is"),
        ("launch: {peer_timeout: 0}", "launch peer-timeout is 0: give seconds, more than 0 and less than a week"),
        ("launch: {peer_timeout: true}", "launch peer-timeout is True: give text or a number"),
        ("launch: {peer_timeout: [3]}", "launch peer-timeout is [3]: give one value"),
        ("launch: {preload: a}", "launch preload is 'a': give a list, as in [a, b]"),
        ("launch: {preload: [a, [b]]}", "launch preload is ['a', ['b']]: give text or a number"),
        ("launch: {mode: exec}", "launch: unknown key mode: valid are "),
        ("env: {A: [1]}", "env A is [1]: give text in quotes, or a number"),
        ('env: {A: "a\\0b"}', "env A is 'a\\x00b': give text in quotes, or a number"),
        ("env: {1A: x}", "env has '1A': give a variable's name, letters, digits and _"),
        ("env: {PET_X: 1, A: 2}", "env sets PET_X: ranks get it from the plan, or not at all: leave it out"),
        ("env: {TORCHELASTIC_USE_AGENT_STORE: 'True'}", "env sets TORCHELASTIC_USE_AGENT_STORE: ranks get it from the plan, or not at all: leave it out"),
        ("env: {A: 1, MASTER_ADDR: x}", "env sets MASTER_ADDR: ranks get it from the plan, or not at all: leave it out"),
        ("env: {WORLD_SIZE: 4, RANK: 1}", "env sets RANK: ranks get it from the plan, or not at all: leave it out"),
        ("env: {APPTRAIN_JOIN_TIMEOUT: '5'}", "env sets APPTRAIN_JOIN_TIMEOUT: env is for the ranks alone: set an option under launch"),
        ("env: [a]", "env must be a mapping, found ['a']"),
        ("nodez: 1", "unknown key nodez: did you mean nodes?"),
        ("nodez: 1\nfrob: 2", "unknown key nodez, frob: valid are title, "),
        ("frob: 1", "unknown key frob: valid are title, "),
        (f"title: [{'x' * 100}]", f"title is ['{'x' * 78}...: give text, in quotes where YAML takes it for something else"),
        (f"title: [{'x' * 76}]", f"title is ['{'x' * 76}']: give text, in quotes where YAML takes it for something else"),
        (f"title: [{'x' * 77}]", f"title is ['{'x' * 77}'...: give text, in quotes where YAML takes it for something else"),
        ("scheduler: slurm\nstart: ssh", "start is 'ssh': give under slurm srun"),
        ("scheduler: pbs\nstart: srun", "start is 'srun': give under pbs pbsdsh or pbs_tmrsh or mpiexec or ssh"),
        ("scheduler: slurm\nrequest: {chunk: [a=b]}", "request chunk is for pbs, and scheduler is slurm: leave it out"),
        ("scheduler: pbs\nrequest: {chunk: [a=b], form: totals}", "request chunk has no place beside form totals: use options"),
        ("scheduler: slurm\nrequest: {nodes_only: true}", "request nodes_only goes only with whole nodes: set whole under nodes"),
        ("scheduler: slurm\nrequest: {gpus: '--gres=gpu:{type}:{gpus}'}", "request gpus is '--gres=gpu:{type}:{gpus}': give it as in --gpus-per-node={gpus}, or nodes_only: true instead"),
        ("scheduler: slurm\nrequest: {gpus: --gpus=4}", "request gpus is '--gpus=4': give it as in --gpus-per-node={gpus}, or nodes_only: true instead"),
        ("scheduler: slurm\nnodes: {whole: true}\nrequest: {nodes_only: true, gpus: 'g={gpus}'}", "request gpus is 'g={gpus}': give it as in --gpus-per-node={gpus}, or nodes_only: true instead"),
        ("scheduler: pbs\nrequest: {memory: --mem}", "request memory is '--mem': give none, or leave it out: pbs knows no such word"),
        ("scheduler: slurm\nnodes: {whole: true}\nrequest: {nodes_only: true, memory: --mem}", "request memory is '--mem': give none, or leave it out: nodes_only names no memory"),
        ("scheduler: slurm\nrequest: {memory: --mem}", "request memory is '--mem': give nodes memory_gib too, from which the amount follows"),
        ("scheduler: slurm\nnodes: {memory_gib: 4}\nrequest: {memory: --mem-per-cpu}", "request memory is '--mem-per-cpu': give nodes cpus and nodes memory_gib too, from which the amount follows"),
        ("scheduler: slurm\nnodes: {gpus: 0, memory_gib: 4}\nrequest: {memory: --mem-per-gpu}", "request memory is '--mem-per-gpu': give nodes gpus and nodes memory_gib too, from which the amount follows"),
        ("scheduler: slurm\nnodes: {gpus: 1}\nrequest: {memory: --mem-per-gpu}", "request memory is '--mem-per-gpu': give nodes gpus and nodes memory_gib too, from which the amount follows"),
    ],
)  # fmt: skip
def test_a_value_that_does_not_fit_is_named_with_what_to_give(text: str, said: str) -> None:
    found = refusal(text)
    assert found.startswith(said) if said.endswith((" ", "title, ")) else found == said


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("lab", "c/lab.yaml"),
        ("lab.yaml", "lab.yaml"),
        ("./lab", "lab"),
        ("a/lab", "a/lab"),
        ("x.yml", "c/x.yml.yaml"),
    ],
)
def test_a_word_is_a_name_in_clusters_unless_it_is_a_path(name: str, path: str) -> None:
    assert profile.find(name, Path("c")) == Path(path)


def test_a_profile_that_is_missing_is_named_with_the_ones_that_are_there(tmp_path: Path) -> None:
    for name in ("b", "alpha"):
        (tmp_path / f"{name}.yaml").write_text("title: x")
    assert profile.load("b", tmp_path).title == "x"
    for name, said in (
        ("alpho", "did you mean alpha?"),
        ("zzz", "give one of alpha, b, or the path of a profile"),
    ):
        for asked, shown in (("", f"--profile {name}"), ("--cluster x", "--cluster x")):
            with pytest.raises(BadInput) as refused:
                profile.load(name, tmp_path, asked)
            assert str(refused.value) == f"{shown}: there is no {tmp_path}/{name}.yaml: {said}"
    missing = tmp_path / "sub/x.yaml"
    with pytest.raises(
        BadInput, match=rf"^--profile {missing}: {missing} cannot be read: No such file or directory$"
    ):
        profile.load(str(missing), tmp_path)
    (tmp_path / "list.yaml").write_text("[a]")
    with pytest.raises(BadInput, match=r"^asked: .*/list\.yaml must hold a mapping with the keys title, "):
        profile.load("list", tmp_path, "asked")


def test_without_pyyaml_the_host_file_of_this_very_profile_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "entrypoint.core.strict_yaml", None)
    monkeypatch.delattr("entrypoint.core.strict_yaml")
    file, made = tmp_path / "lab.yaml", tmp_path / "lab.host"
    file.write_text("title: of the yaml")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    made.write_text(f"# made\ndigest={digest}\nprofile={json.dumps({'title': 'a=b'})}\n")
    assert profile.load(str(file)).title == "a=b"
    for content in (
        f"digest={'0' * 64}\nprofile={{}}\n",
        f"digest={digest}\n",
        f"digest={digest}\nprofile=[]\n",
        None,
    ):
        if content is None:
            made.unlink()
        else:
            made.write_text(content)
        with pytest.raises(BadInput, match=rf"^--profile {file} needs the Python package pyyaml: "):
            profile.load(str(file))
    file.write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(BadInput, match=r" cannot be read: it has more than 1048576 bytes$"):
        profile.load(str(file))
    file.unlink()
    with pytest.raises(BadInput, match=r" cannot be read: No such file or directory$"):
        profile.load(str(file))


def test_a_variable_is_replaced_in_both_its_forms_and_must_be_set() -> None:
    env = {"A": "x", "AB": "y", "EMPTY": ""}
    assert profile.expanded("/$A/${A}B/$AB-$A", env, "p") == "/x/xB/y-x"
    for text, name in (("${NO}", "NO"), ("/$EMPTY", "EMPTY")):
        with pytest.raises(BadInput) as refused:
            profile.expanded(text, env, "p")
        assert (
            str(refused.value)
            == f"{text} in the profile p: {name} is not set here: set it, or correct the profile"
        )


def test_the_command_that_makes_a_host_file_names_a_profile_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert profile.remedy(profile.CLUSTERS / "x.yaml").endswith(" profiles")
    assert profile.remedy(Path("it's.yaml")).endswith(f" profiles PROFILE='{tmp_path}/it'\\''s.yaml'")
    assert profile.host_file(Path("a/lab.yaml")) == Path("a/lab.host")
