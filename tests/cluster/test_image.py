"""The image, really built: what it is made of, and what works in it. Needs root.

Every build is `make image` of an ordinary user on a test host; `tests/cluster/images.py` keeps what it left. How an
image is built is in test_image_build.py.
"""

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from containers import debian, stacks, wheels
from entrypoint import __version__
from tests.cluster.images import (
    BUILD_LIMIT,
    DOWNLOADS,
    HOME,
    IMAGE,
    OUT,
    TEMPORARY,
    VENV,
    WAIT_LIMIT,
    Built,
    builder,
    make,
)
from tests.host import Bind, Host

pytestmark = [
    pytest.mark.ci_may_skip("a CI without root cannot make namespaces and users"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts, namespaces and users"),
    pytest.mark.timeout(WAIT_LIMIT),
]
BOUND = 300.0  # s, for what takes some seconds
RUN_SH = HOME / "containers" / "run.sh"


def locked_debian() -> dict[str, str]:
    entries = debian.packages(stacks.debian_lock("amd64"))
    return {entry["Package"]: entry["Version"] for entry in entries}


def locked_python(stack: str) -> dict[str, str]:
    return {**wheels.pinned(stacks.find(stack).lock("amd64")), "apptrain": __version__}


@pytest.fixture(scope="module")
def host(default: Built, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """A host with the image and what lies beside it."""
    out = tmp_path_factory.mktemp("out")
    out.chmod(0o777)
    with builder("image", out, binds=[Bind(source=default.folder, target=IMAGE.parent)]) as host:
        yield host


def inside(host: Host, *command: str, **env: str) -> str:
    """What a command of alice in the image prints."""
    ended = host.run([RUN_SH, IMAGE, *command], user="alice", cwd=HOME, env=env, timeout=BOUND)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


# --- what a build leaves ----------------------------------------------------------------------------------------


def test_an_ordinary_user_builds_it_and_is_told_what_goes_where(default: Built) -> None:
    lines = re.findall(r"^apptrain: (?!build: |selftest: ).*$", default.transcript, re.MULTILINE)
    size, partition = default.said["bytes"] / 1e9, default.said["partition_sha256"]
    begin = "apptrain: stack cu132: torch 2.15.0, CUDA 13.2"
    # Before it stands how the build's venv was made, if this build was the first.
    assert lines[lines.index(begin) :] == [
        begin,
        f"apptrain: target {HOME}/containers/image.sif",
        f"apptrain: temporary files in {TEMPORARY} (APPTAINER_TMPDIR)",
        f"apptrain: downloads in {DOWNLOADS} (APPTRAIN_CACHE)",
        f"apptrain: {HOME}/containers/image.sif is ready: {size:.2f} GB in {default.said['seconds']} s, "
        f"identity {partition[:12]}",
    ]
    parts = re.findall(r"^apptrain: build: [0-9:]{8} (.*)$", default.transcript, re.MULTILINE)
    assert parts == [
        "Debian packages",
        "Python packages",
        "removing what nothing needs",
        "bytecode",
        "packing",
    ]
    removed = re.findall(r"^apptrain: build: removed (\d+) MB: ", default.transcript, re.MULTILINE)
    assert sum(map(int, removed)) > 500
    left = {path.name for path in default.folder.iterdir()}
    assert left == {"image.sif", "image.json", "image.cdx.json", "transcript.txt", "complete"}


def test_the_json_beside_it_says_what_it_is_made_of(default: Built) -> None:
    stack, said = stacks.find(""), default.said
    assert {name: said["versions"][name] for name in ("torch", "torchvision", "cuda", "cudnn", "nccl")} == {
        "torch": stack.torch,
        "torchvision": stack.torchvision,
        "cuda": stack.cuda,
        "cudnn": stack.cudnn,
        "nccl": stack.nccl,
    }
    assert said["versions"]["compute_capability"] == said["compute_capability"] == stack.compute_capability
    assert (said["stack"], said["driver"]) == ("cu132", stack.driver)
    assert said["debian_packages"] == locked_debian()
    assert said["python_packages"] == locked_python("")
    assert said["bytes"] == default.image.stat().st_size
    assert said["build_host"] == "build-default"


def test_the_bill_of_materials_names_every_package(default: Built) -> None:
    bom = json.loads((default.folder / "image.cdx.json").read_text())
    assert (bom["bomFormat"], bom["specVersion"]) == ("CycloneDX", "1.6")
    found = {component["purl"].partition("@")[0] for component in bom["components"]}
    deb = {f"pkg:deb/debian/{name}".replace("+", "%2B") for name in locked_debian()}
    assert found == deb | {f"pkg:pypi/{name}" for name in locked_python("")}
    assert bom["metadata"]["component"]["hashes"][0]["content"] == default.said["sif_sha256"]


def test_nothing_of_the_machine_that_built_it_is_in_it(host: Host) -> None:
    """No address of a mirror or an index, no path of the builder, no name of its host."""
    names = {str(part) for part in (HOME, OUT, DOWNLOADS)} | {
        "build-default",
        "apptrain-build-",
        "build-temp-",
    }
    conf = Path("/etc/pip.conf")
    text = host.run(["cat", conf]).stdout + debian.mirror()
    names |= set(re.findall(r"https?://([^/\s]+)", text))
    pattern = "\n".join(sorted(names))
    where = ["/.singularity.d", "/etc", "/opt", "/root", "/var", "/usr/local/lib/python3.13/dist-packages"]
    line = ["grep", "-rIlFe", pattern, "--exclude-dir=torch", "--exclude-dir=nvidia", *where]
    bare = ["apptainer", "-q", "exec", "--no-mount", "home,cwd,tmp,bind-paths,hostfs", str(IMAGE)]
    ended = host.run([*bare, *line], user="alice", cwd="/", timeout=BOUND)
    mounted = {
        "/etc/resolv.conf",
        "/etc/hosts",
        "/etc/passwd",
        "/etc/group",
        "/etc/localtime",
        "/etc/hostname",
    }
    assert set(ended.stdout.split()) - mounted == set()


@pytest.mark.by_hand("a second full image, 12 minutes on two cores: after `make lock`")
def test_the_stack_for_older_drivers_is_built_too(older: Built) -> None:
    stack, said = stacks.find("cu128"), older.said
    assert (said["stack"], said["driver"]) == ("cu128", "525")
    assert (said["versions"]["torch"], said["versions"]["cuda"]) == (stack.torch, "12.8")
    assert said["versions"]["compute_capability"] == stack.compute_capability
    assert {"7.0", "9.0"} < set(stack.compute_capability)
    assert said["python_packages"] == locked_python("cu128")


# --- what works in it -------------------------------------------------------------------------------------------


def test_inspect_prints_it_and_notices_another_file(host: Host, default: Built) -> None:
    status, said = make(host, "image-inspect", f"IMAGE={IMAGE}")
    assert status == 0, said
    rows = dict(re.findall(r"^(\w+(?: [\w.-]+)?) +(.*)$", said, re.MULTILINE))
    assert rows["partition_sha256"] == default.said["partition_sha256"]
    assert rows["debian_packages"] == str(len(locked_debian()))
    assert rows["label apptrain.stack"] == "cu132"
    assert rows["label org.label-schema.build-date"] == stacks.find("").date


def test_inside_are_the_locked_cuda_wheels(host: Host, default: Built, tell: Callable[[str], None]) -> None:
    count = "from importlib.metadata import distributions as d; import torch; print(len(list(d())), torch.version.cuda)"
    said = inside(host, "python", "-c", count)
    begin, end = default.when
    tell(
        f"in the image: {said.split()[0]} wheels, torch.version.cuda {said.split()[1]}; built {begin} to {end}"
    )
    assert said.split() == [str(len(locked_python(""))), stacks.find("").cuda]


def test_it_runs_as_the_entrypoint_and_has_a_help(host: Host) -> None:
    ended = host.run(["apptainer", "-q", "run", IMAGE, "check"], user="alice", cwd="/", timeout=BOUND)
    assert ended.returncode == 0, ended.stderr
    assert stacks.find("").torch in ended.stdout
    ended = host.run(["apptainer", "-q", "run-help", IMAGE], user="alice", cwd="/", timeout=BOUND)
    assert "apptainer run IMAGE check" in ended.stdout


def test_torch_is_imported_from_one_file_of_bytecode(host: Host) -> None:
    """All but what Python has read before it comes to that; with sources and places of its own."""
    code = """
import inspect, sys, torch, torchvision, torch.distributed.run
cached = {name: module.__spec__ for name, module in sys.modules.items() if getattr(module.__spec__, "cached", None)}
print(*(name for name, spec in cached.items() if type(spec.loader).__module__ != "apptrain_imports"))
print(len(cached), torch.nn.__file__, torch.nn.__cached__, inspect.getsource(torch.nn.functional.relu).split("(")[0])
"""
    before, said = inside(host, "python", "-c", code).splitlines()
    assert {name.partition(".")[0] for name in before.split()} == {"encodings", "apptrain_imports"}
    number, rest = said.split(maxsplit=1)
    nn = "/usr/local/lib/python3.13/dist-packages/torch/nn/"
    assert int(number) > 1000
    assert rest == f"{nn}__init__.py {nn}__pycache__/__init__.cpython-313.pyc def relu"


def test_what_is_read_ahead_is_of_this_images_libraries_and_modules(host: Host) -> None:
    """Else it is time for tools/ahead.py again, as CONTRIBUTING.md says."""
    code = """if True:
        import os
        lines = open('/opt/apptrain/ahead').read().splitlines()
        libraries = [line.split(' ', 2) for line in lines if not line.startswith('/')]
        modules = [line for line in lines if line.startswith('/') and '/entrypoint/' not in line]
        print(len(libraries), sum(os.stat(path).st_size == int(size) for size, _, path in libraries))
        print(len(modules), sum(map(os.path.exists, modules)))
    """
    libraries, modules = (line.split() for line in inside(host, "python", "-c", code).splitlines())
    assert (int(libraries[0]) > 50, int(modules[0]) > 1000) == (True, True)
    assert libraries[0] == libraries[1]
    assert modules[0] == modules[1]


def test_a_shell_in_it(host: Host) -> None:
    ended = host.run(
        ["make", "-s", "shell", f"IMAGE={IMAGE}"],
        user="alice",
        cwd=HOME,
        input="type -P python\n",
        timeout=BOUND,
    )
    assert (ended.returncode, ended.stdout) == (0, "/usr/bin/python\n"), ended.stderr


def test_a_venv_on_top_of_it_adds_packages_and_keeps_the_stacks(host: Host) -> None:
    venv = Path("/scratch/out/my venv")
    made = host.run(["make", "venv", f"DIR={venv}", f"IMAGE={IMAGE}"], user="alice", cwd=HOME, timeout=BOUND)
    assert made.returncode == 0, made.stderr
    links = OUT / "links"
    host.run(["bash", "-euc", WHEELS, "bash", links], user="alice", timeout=BOUND)
    add = [
        "pip",
        "install",
        "--disable-pip-version-check",
        "--no-index",
        "--find-links",
        str(links),
    ]
    shown = {"APPTRAIN_VENV": str(venv), "APPTRAIN_BIND": str(OUT)}
    inside(host, *add, "probe", **shown)
    said = inside(host, "python", "-c", "import probe, torch; print(torch.__version__)", **shown)
    assert said.startswith("2.15.0")
    other = host.run([RUN_SH, IMAGE, *add, "torch==2.7.1"], user="alice", cwd=HOME, env=shown, timeout=BOUND)
    assert other.returncode == 1
    assert "torch==2.7.1" in other.stderr
    assert "The user requested (constraint) torch==2.15.0" in other.stdout


WHEELS = """
for package in probe-1.0 torch-2.7.1; do
    mkdir -p "$1/new/$package.dist-info"
    cd "$1/new"
    echo >"${package%-*}.py"
    printf 'Metadata-Version: 2.1\\nName: %s\\nVersion: %s\\n' "${package%-*}" "${package#*-}" >"$package.dist-info/METADATA"
    printf 'Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n' >"$package.dist-info/WHEEL"
    : >"$package.dist-info/RECORD"
    python3 -m zipfile -c "../$package-py3-none-any.whl" ./*
    cd - >/dev/null
    rm -r "$1/new"
done
"""


SHORT = ("steps=6", "optimizer.warmup_steps=2", "batch_size=16")
"""A demo of seconds, with its own network at its own size: two installations that differ do so from the first step on."""


@pytest.fixture
def outside(host: Host) -> Iterator[Path]:
    """Where a venv of 5 GB is to be. It does not stay."""
    yield OUT / "outside"
    host.run(["rm", "-rf", OUT / "outside"], timeout=BUILD_LIMIT)


def test_the_demo_in_it_gives_the_trace_of_a_venv_from_the_same_lock_bit_for_bit(
    host: Host, outside: Path
) -> None:
    runs = {name: OUT / f"run-{name}" for name in ("image", "venv")}
    in_image = {"APPTRAIN_RUN_DIR": str(runs["image"]), "APPTRAIN_BIND": str(OUT)}
    ended = host.run(
        ["make", "demo", "CONFIG=digits-short", "IN=image", f"IMAGE={IMAGE}", f"ARGS={' '.join(SHORT)}"],
        user="alice",
        cwd=HOME,
        env=in_image,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    venv = outside / "venv"
    lock = HOME / "containers/locks/cu132-amd64.txt"
    python = host.run(["python3", "-VV"]).stdout
    assert python == inside(host, "python", "-VV")
    (wheelhouse,) = host.run(["bash", "-c", f"ls -d {DOWNLOADS}/wheels/{wheels.digest(stacks.find('').lock('amd64'))[:16]}"]).stdout.split()  # fmt: skip
    lines: list[list[str | Path]] = [
        ["python3", "-m", "venv", "--without-pip", venv],
        [VENV / "bin/uv", "pip", "install", "--quiet", "--offline", "--no-index", "--find-links", wheelhouse,
         "--python", venv / "bin/python", "--require-hashes", "-r", lock],
    ]  # fmt: skip
    # On the venv's own file system, where what is unpacked is linked, not copied.
    linked = {"UV_CACHE_DIR": str(outside / "uv"), "UV_LINK_MODE": "hardlink"}
    for line in lines:
        done = host.run(line, user="alice", cwd=HOME, env=linked, timeout=BUILD_LIMIT)
        assert done.returncode == 0, done.stderr
    demo: list[str | Path] = [venv / "bin/python", "-P", "-m", "entrypoint.cli.embedded", "--nodes", "2", "--", "-m", "train", "--config", "digits-short", *SHORT]  # fmt: skip
    in_venv = {
        "APPTRAIN_RUN_DIR": str(runs["venv"]),
        "PYTHONPATH": f"{HOME}:{HOME}/src",
        "APPTRAIN_PASS": "PYTHONPATH",
    }
    ended = host.run(demo, user="alice", cwd=HOME, env=in_venv, timeout=600)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert len(trace(host, runs["image"])[0]) == 6
    assert trace(host, runs["image"]) == trace(host, runs["venv"])


def trace(host: Host, run: Path) -> tuple[list[tuple[int, str]], str]:
    """Steps and losses as printed, and the digest of the weights."""
    lines = [
        json.loads(line, parse_float=str)
        for line in host.run(["cat", run / "metrics.jsonl"]).stdout.splitlines()
    ]
    losses = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    result: dict[str, Any] = json.loads(host.run(["cat", run / "result.json"]).stdout)
    assert len(losses) == result["steps"] > 0
    return losses, result["weights_sha256"]
