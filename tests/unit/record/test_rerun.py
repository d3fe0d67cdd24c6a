"""The command that does a run again, and what is said where something cannot be had."""

import json
import uuid
from pathlib import Path
from typing import Any

import pytest

from entrypoint.core.errors import BadInput
from entrypoint.record import rerun
from tests.unit.host.node import IMAGE_ID, sif

ID = "01234567-89ab-cdef-0123-456789abcdef"
LAST: dict[str, Any] = {
    "attempt": 0,
    "nodes": ["a", "b"],
    "nproc_per_node": 2,
    "device": "cpu",
    "mode": "torchrun",
    "threads": "1",
    "checkpoint": None,
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with the image of the run, on a machine without a scheduler."""
    (tmp_path / "home/containers").mkdir(parents=True)
    (tmp_path / "home/containers/image.sif").write_bytes(bytes(48) + uuid.UUID(ID).bytes + bytes(64))
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


class Started:
    words: list[str]

    def start(self, words: list[str]) -> int:
        self.words = words
        return 7


def run(**keys: object) -> Path:
    path = Path("run")
    path.mkdir()
    manifest = {"schema_version": 2, "command": ["-m", "train", "--config", "digits"], "attempts": [LAST]}
    (path / "manifest.json").write_text(json.dumps(manifest | keys))
    return path


def test_the_same_again_is_one_command(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    started = Started()
    assert rerun.main(run(image={"id": ID}), home, "", {}, started.start) == 7
    line = (
        f"apptrain run --nodes 2 --image {home}/containers/image.sif --nproc-per-node 2 --device cpu "
        "--omp-num-threads 1 -- -m train --config digits"
    )
    assert capsys.readouterr() == (f"{line}\n", "")
    assert started.words == line.split()[1:]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"image": {"id": "other"}}, f"image: {{home}}/containers/image.sif is {ID}, the run had other: built anew since"),
        ({"command": ["other.py"], "code": {"repository": {"commit": "c0ffee", "remote": "https://x/y"}}}, "code: {here} is in no git repository, the run had c0ffee of https://x/y: fetch it and check it out"),
        ({"command": ["other.py"], "code": {"repository": {"commit": None, "diff": "code.diff"}}}, "code: the run had changes that no commit has: code.diff"),
        ({"config": {"data.path": "/not/here"}}, "data: /not/here is not here: add data.path=DIR, where it is now"),
        ({"command": ["other.py"], "code": {"repository": {"commit": None, "state": "unknown: git could not be asked where it ran"}}}, "code: whether the run had changes that no commit has is unknown: git could not be asked where it ran"),
        ({"attempts": [LAST | {"checkpoint": {"path": "/not/here"}}]}, "checkpoint: /not/here, from which the run began, is not here"),
        ({"attempts": [LAST | {"venv": "/not/here"}]}, "venv: /not/here is not here"),
        ({"command": ["my.py"], "code": {"program": {"name": "my.py", "sha256": "0"}}}, "code: my.py is not here: go to the folder in which it lies"),
        ({"command": ["other.py"], "code": {"program": {"name": "other.py", "sha256": "0"}}}, "code: other.py is not as it was"),
        ({"environment": {"values": {"MKL_CBWR": "COMPATIBLE", "TZ": "UTC"}, "names": []}}, "environment: the run had MKL_CBWR=COMPATIBLE: set it here, with APPTRAIN_PASS=MKL_CBWR"),
        ({"environment": {"names": ["STEPS"], "passed": ["STEPS"]}}, "environment: the run had STEPS, whose value is not kept: set it here, with APPTRAIN_PASS=STEPS"),
        ({"environment": {"names": ["ACCELERATE_X"], "passed": ["ACCELERATE_X"]}}, "environment: the run had ACCELERATE_X, whose value is not kept: set it here"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_a_line(home: Path, keys: dict[str, object], said: str) -> None:
    Path("other.py").touch()
    found = rerun.plan(run(**keys), home, "", {})
    assert found.lacks == [said.format(home=home, here=home.parent)]


@pytest.mark.parametrize(
    "keys",
    [
        {"config": {"data.path": ""}},
        {"config": {"data.path": 7}},
        {"config": {"data.path": "/"}},
        {"attempts": [LAST | {"checkpoint": {"path": "/"}}]},
        {"attempts": [LAST | {"venv": "/"}]},
        {"attempts": [LAST, LAST | {"checkpoint": {"path": "/not/here"}}]},
        {"environment": {"values": {"MKL_CBWR": "AUTO"}, "names": []}},
        {"attempts": [LAST | {"world_size": 4}, LAST | {"world_size": 4}]},
        {"attempts": [LAST | {"world_size": 8}, LAST | {"world_size": 4}]},
        {"command": ["other.py"], "code": {"program": {"sha256": "0"}}},
        {"image": {"id": ID}, "command": ["-m", "pkg"], "code": {"program": {"name": "pkg", "sha256": "0"}}},
    ],
)
def test_what_is_here_needs_no_line(home: Path, keys: dict[str, object]) -> None:
    Path("other.py").touch()
    assert rerun.plan(run(**keys), home, "", {"MKL_CBWR": "AUTO"}).lacks == []


def test_a_variable_is_here_if_it_reaches_the_ranks(home: Path) -> None:
    values = {"PYTHONHASHSEED": "7"}
    path = run(environment={"values": values, "names": ["STEPS"], "passed": ["STEPS"]})
    env = {"STEPS": "5", **values}
    assert [line.split()[4] for line in rerun.plan(path, home, "", env).lacks] == [
        "PYTHONHASHSEED=7:",
        "STEPS,",
    ]
    assert rerun.plan(path, home, "", env | {"APPTRAIN_PASS": "STEPS PYTHON*"}).lacks == []


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"MKL_CBWR": "AUTO", "ATEN_CPU_CAPABILITY": "default"}, ["ATEN_CPU_CAPABILITY"]),
        ({"STEPS": "5", "EDITOR": "vi", "APPTRAIN_PASS": "STEPS"}, ["STEPS"]),
        ({"OPENBLAS_CORETYPE": "Haswell"}, []),
        ({"HF_TOKEN": "x", "TZ": "UTC", "NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "lo"}, []),
    ],
    ids=["switch", "passed", "had, without its value", "of no weight"],
)
def test_a_variable_that_the_run_did_not_have_is_a_line(
    home: Path, env: dict[str, str], said: list[str]
) -> None:
    path = run(environment={"values": {}, "names": ["PATH", "MKL_CBWR", "OPENBLAS_CORETYPE"]})
    assert rerun.plan(path, home, "", env).lacks == [
        f"environment: {name} is set here, the run did not have it: unset it" for name in said
    ]


def test_a_module_outside_of_an_image_is_looked_for_here(home: Path) -> None:
    keys = {"command": ["-m", "pkg"], "code": {"program": {"name": "pkg", "sha256": "0"}}}
    assert rerun.plan(run(**keys), home, "", {}).lacks == [
        "code: pkg is not here: go to the folder in which it lies"
    ]


@pytest.mark.parametrize(
    ("head", "found"),
    [
        ("c0ffee" * 6 + "c0ff\n", None),
        ("0" * 40 + "\n", f"is at commit {'0' * 40}"),
        ("nothing\n", "tells no commit in its .git"),
    ],
)
def test_the_commit_that_is_checked_out_here_is_compared(home: Path, head: str, found: str | None) -> None:
    Path("other.py").touch()
    Path(".git").mkdir()
    Path(".git/HEAD").write_text(head)
    had = "c0ffee" * 6 + "c0ff"
    keys = {"command": ["other.py"], "code": {"repository": {"commit": had, "remote": None}}}
    line = f"code: {home.parent} {found}, the run had {had}: fetch it and check it out"
    assert rerun.plan(run(**keys), home, "", {}).lacks == ([line] if found else [])


def test_a_line_is_printed_for_each_thing_that_cannot_be_had(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run(attempts=[LAST | {"venv": "/not\x1b/here", "checkpoint": {"path": "/not/here"}}])
    assert rerun.main(path, home, "", {}, None) == 0
    shown = capsys.readouterr()
    assert shown.out.count("\n") == 1
    assert shown.err.splitlines() == [
        "apptrain: not the same: checkpoint: /not/here, from which the run began, is not here",
        "apptrain: not the same: venv: /not?/here is not here",
    ]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"mode": "exec"}, ["--mode", "exec"]),
        ({"no_python": True}, ["--no-python"]),
        ({"mode": "exec", "no_python": True, "venv": "/"}, ["--venv", "/", "--mode", "exec", "--no-python"]),
    ],
)
def test_how_the_ranks_started_is_asked_for_again(
    home: Path, more: dict[str, object], words: list[str]
) -> None:
    found = rerun.plan(run(attempts=[LAST | more]), home, "", {})
    assert found.words == [
        *(
            "apptrain",
            "run",
            "--nodes",
            "2",
            "--nproc-per-node",
            "2",
            "--device",
            "cpu",
            "--omp-num-threads",
            "1",
        ),
        *(*words, "--", "-m", "train", "--config", "digits"),
    ]


def test_a_site_has_an_image_and_gpus_of_its_own(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "qsub").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(home))
    path = run(image={"id": ID}, attempts=[LAST | {"device": "cuda"}])
    assert rerun.plan(path, home, "generic-pbs", {}).words == [
        *("apptrain", "submit", "--cluster", "generic-pbs", "--nodes", "2", "--nproc-per-node", "2"),
        *("--device", "cuda", "--omp-num-threads", "1", "--", "-m", "train", "--config", "digits"),
    ]


@pytest.mark.parametrize(("name", "is_there"), [("mine.sif", True), ("none.sif", False)])
def test_an_image_that_is_named_comes_before_that_of_the_checkout(
    home: Path, tmp_path: Path, name: str, is_there: bool
) -> None:
    content = (home / "containers/image.sif").read_bytes()
    (tmp_path / "mine.sif").write_bytes(content)
    env = {"APPTRAIN_IMAGE": str(tmp_path / name)}
    found = rerun.plan(run(image={"id": ID}), home, "", env)
    image = tmp_path / name if is_there else home / "containers/image.sif"
    assert (found.words[4:6], found.lacks) == (["--image", str(image)], [])


def test_the_reference_program_is_apptrains_own_wherever_one_stands(home: Path) -> None:
    state = {"commit": "c0ffee", "remote": None}
    found = rerun.plan(run(code={"repository": state, "apptrain": {"repository": state}}), home, "", {})
    assert found.lacks == [
        f"apptrain: {home} is in no git repository, the run had c0ffee: fetch it and check it out"
    ]


def test_a_script_that_lies_elsewhere_is_asked_for_its_own_commit(home: Path, tmp_path: Path) -> None:
    script = tmp_path / "project/my.py"
    script.parent.mkdir()
    script.touch()
    keys = {"command": [str(script)], "code": {"repository": {"commit": "c0ffee", "remote": "https://x/y"}}}
    found = rerun.plan(run(**keys), home, "", {})
    assert found.lacks == [
        f"code: {script.parent} is in no git repository, the run had c0ffee of https://x/y: "
        "fetch it and check it out"
    ]


def test_the_image_is_found_by_its_id_whatever_its_name(home: Path) -> None:
    another = home / "containers/image-cu126.sif"
    sif(another)  # of which tests/unit/host has run.sh tell the same id
    found = rerun.plan(run(image={"id": IMAGE_ID}), home, "", {})
    assert (found.words[4:6], found.lacks) == (["--image", str(another)], [])


@pytest.mark.parametrize(
    ("partition", "size", "same"), [("5e1f", 128, True), ("5e1e", 128, False), ("5e1f", 127, False)]
)
def test_an_image_that_was_built_anew_with_the_same_in_it_is_the_same(
    home: Path, partition: str, size: int, same: bool
) -> None:
    said = {"partition_sha256": partition, "bytes": size}
    (home / "containers/image.json").write_text(json.dumps(said))
    found = rerun.plan(run(image={"id": "other", "partition_sha256": "5e1f"}), home, "", {})
    assert (found.lacks == []) == same
    assert found.words[4:6] == ["--image", f"{home}/containers/image.sif"]


@pytest.mark.parametrize("content", [b"#!/bin/sh\n", b""])
def test_what_is_no_image_is_said(home: Path, content: bytes) -> None:
    path = home / "containers/image.sif"
    path.write_bytes(content)
    found = rerun.plan(run(image={"id": ID}), home, "", {})
    assert found.lacks == [f"image: {path} is no SIF, the run had {ID}: built anew since"]


def test_without_the_image_the_line_says_what_makes_one(home: Path) -> None:
    (home / "containers/image.sif").unlink()
    found = rerun.plan(run(image={"id": ID}), home, "", {})
    assert found.lacks == [
        f"image: there is none at {home}/containers/image.sif: the run had {ID}; apptrain image build, or APPTRAIN_IMAGE=FILE"
    ]


def test_the_attempt_counts_with_which_the_numbers_begin(home: Path) -> None:
    attempts = [
        LAST | {"world_size": 8, "nodes": ["a", "b", "c", "d"]},
        LAST | {"world_size": 4, "identity": {"threads": 1}, "threads": "3", "venv": "/"},
        LAST | {"world_size": 2, "identity": {"threads": 1}, "nodes": ["a"], "checkpoint": {"path": "/"}},
    ]
    found = rerun.plan(run(attempts=attempts), home, "", {})
    assert found.words[2:4] == ["--nodes", "2"]
    assert found.words[8:12] == ["--omp-num-threads", "3", "--venv", "/"]
    assert found.lacks == ["world size: the run went on with 2 ranks: this has all the same number"]


def test_on_gpus_each_node_gets_its_own(home: Path) -> None:
    found = rerun.plan(run(attempts=[LAST | {"device": "cuda"}]), home, "", {})
    assert found.words[4:10] == ["--nproc-per-node", "2", "--device", "cuda", "--gpus-per-node", "2"]


def test_secrets_are_asked_for_by_name_and_never_shown(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {
        "command": ["my.py", "--hub=<secret HUB_TOKEN>"],
        "environment": {"values": {}, "names": ["HOME", "HF_TOKEN"]},
    }
    path = run(**keys)
    with pytest.raises(BadInput, match="the command needs HUB_TOKEN: set it here"):
        rerun.main(path, home, "", {}, lambda _: 0)
    shown = capsys.readouterr()
    assert shown.out.endswith("-- my.py '--hub=<secret HUB_TOKEN>'\n")
    assert [line.split()[1] for line in shown.err.splitlines()] == ["HUB_TOKEN", "HF_TOKEN"]
    started = Started()
    rerun.main(path, home, "", {"HUB_TOKEN": "x y", "HF_TOKEN": "z"}, started.start)
    assert started.words[-1] == "--hub=x y"
    assert "x y" not in capsys.readouterr().out
    rerun.main(path, home, "", {"HUB_TOKEN": "only"}, started.start)
    assert started.words[-1] == "--hub=only"


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"attempts": []}, "its manifest has no attempt with a command"),
        ({"command": ["my.py", "<secret>"]}, "a secret that no variable had: <secret>"),
        ({"command": []}, "its manifest has no attempt with a command"),
        ({"command": ["my.py", "a\0b"]}, r"no command line can have the word \"a\?b\" of its manifest"),
        ({"attempts": [LAST | {"nodes": []}]}, "its manifest does not say nodes of the attempt"),
        (
            {"attempts": [LAST | {"nproc_per_node": 0}]},
            "its manifest does not say nproc_per_node of the attempt",
        ),
        ({"attempts": [LAST | {"device": ""}]}, "its manifest does not say device of the attempt"),
        ({"attempts": [LAST | {"device": "tpu"}]}, 'device is "tpu", not cpu or cuda'),
    ],
)
def test_what_cannot_be_started_again_is_refused(home: Path, keys: dict[str, object], why: str) -> None:
    with pytest.raises(BadInput, match=why):
        rerun.plan(run(**keys), home, "", {})


def test_a_cluster_needs_a_scheduler_here(home: Path) -> None:
    with pytest.raises(BadInput, match="--cluster generic: neither sbatch nor qsub is in PATH"):
        rerun.plan(run(), home, "generic", {})
