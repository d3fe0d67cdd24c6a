"""The image, really built: by whom, from what, the same each time, and what works in it. Needs root.

Every build is `make image` of an ordinary user on a test host; `tests/cluster/images.py` keeps what it left.
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from containers import debian, stacks, wheels
from tests.cluster.images import (
    BUILD_LIMIT,
    DOWNLOADS,
    HOME,
    INPUTS,
    OUT,
    RECIPE,
    TEMPORARY,
    VENV,
    WAIT_LIMIT,
    Built,
    builder,
    digest,
    kept,
    make,
)
from tests.host import Bind, Host
from tests.host.places import cache

pytestmark = [
    pytest.mark.ci_may_skip("a CI without root cannot make namespaces and users"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts, namespaces and users"),
    pytest.mark.timeout(WAIT_LIMIT),
]
BOUND = 300.0  # s, for what takes some seconds
IMAGE = Path("/images/image.sif")
RUN_SH = HOME / "containers" / "run.sh"


def locked_debian() -> dict[str, str]:
    entries = debian.packages(stacks.debian_lock("amd64"))
    return {entry["Package"]: entry["Version"] for entry in entries}


def locked_python(stack: str) -> dict[str, str]:
    return {**wheels.pinned(stacks.find(stack).lock("amd64")), "apptrain": "0.1.0"}


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
    said = [line for line in default.transcript.splitlines() if line.startswith("image:")]
    size, partition = default.said["bytes"] / 1e9, default.said["partition_sha256"]
    assert said == [
        "image: stack cu132: torch 2.15.0, CUDA 13.2; base by debootstrap",
        f"image: target {HOME}/containers/image.sif",
        f"image: temporary files in {TEMPORARY} (APPTAINER_TMPDIR)",
        f"image: downloads in {DOWNLOADS} (APPTRAIN_CACHE)",
        f"image: {HOME}/containers/image.sif is ready: {size:.2f} GB in {default.said['seconds']} s, "
        f"identity {partition[:12]}",
    ]
    parts = re.findall(r"^build: [0-9:]{8} (.*)$", default.transcript, re.MULTILINE)
    assert parts == [
        "Debian packages",
        "Python packages",
        "removing what nothing needs",
        "bytecode",
        "packing",
    ]
    removed = re.findall(r"^build: removed (\d+) MB: ", default.transcript, re.MULTILINE)
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
    assert (said["stack"], said["driver"], said["base"]) == ("cu132", stack.driver, "debootstrap")
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


def test_a_second_build_elsewhere_is_identical(default: Built) -> None:
    """`make image-verify`: another path, umask and time."""

    def verify(folder: Path) -> None:
        with builder("verify", folder, binds=[Bind(source=default.folder, target=IMAGE.parent)]) as host:
            log = folder / "transcript.txt"
            make(host, "image-verify", f"IMAGE={IMAGE}", transcript=log)

    again = Built(folder=kept("verify", digest(*INPUTS), verify))
    ours = [line for line in again.transcript.splitlines() if line.startswith("image:")]
    assert ours[-1] == (
        f"image: the second build is identical, partition {default.said['partition_sha256']}"
    ), ours


def test_a_user_without_subordinate_ids_and_network_builds_the_same(default: Built) -> None:
    """bob, on another host, from a copy of the downloads."""

    def build(folder: Path) -> None:
        copy = Bind(source=cache() / "images/.downloads", target=Path("/scratch/downloads"))
        with builder("bobs-host", folder, online=False, binds=[copy]) as host:
            line: list[str | Path] = [
                VENV / "bin/python",
                HOME / "containers/build.py",
                "build",
                "--offline",
                copy.target,
            ]
            with (folder / "transcript.txt").open("w") as log:
                process = host.start(
                    [*line, "--image", OUT / "image.sif"], user="bob", stdout=log, stderr=log
                )
                assert process.wait(BUILD_LIMIT) == 0, (folder / "transcript.txt").read_text()[-3000:]
            (folder / "image.sif").unlink()

    same = Built(folder=kept("bob", digest(*INPUTS), build)).said
    assert same["partition_sha256"] == default.said["partition_sha256"]
    assert (same["build_host"], default.said["build_host"]) == ("bobs-host", "build-default")


def test_the_base_from_a_registry_gives_the_same_packages() -> None:
    """The lock's digest is written by `make lock`'s own code, from a registry that holds a tree of debootstrap's."""

    def build(folder: Path) -> None:
        with builder("docker", folder) as host:
            env = {"REGISTRY": "127.0.0.1:5000/mirror", "APPTAINER_NOHTTPS": "1"}
            fill = host.run(["bash", "-euc", REGISTRY], timeout=BOUND)
            assert fill.returncode == 0, fill.stderr
            write = (
                "import sys; sys.path[:0] = ['.', 'tools']; import lock; from containers import stacks;"
                "text = stacks.FILE.read_text().replace('amd64: null, arm64: null', 'amd64: null');"
                "lock.replace(stacks.FILE, lock.with_digests(text).encode())"
            )
            wrote = host.run([VENV / "bin/python", "-c", write], user="alice", cwd=HOME, env=env)
            assert wrote.returncode == 0, wrote.stderr
            log = folder / "transcript.txt"
            words = ["image", "BASE=docker", f"IMAGE={OUT}/image.sif"]
            status, said = make(host, *words, transcript=log, env=env)
            assert status == 0, said[-1500:]
            recipe = host.run(["apptainer", "inspect", "--deffile", OUT / "image.sif"], user="alice").stdout
            (folder / "recipe").write_text(recipe)
            (folder / "image.sif").unlink()

    made = Built(folder=kept("docker", digest(*RECIPE), build))
    assert "image: stack cu132: torch 2.15.0, CUDA 13.2; base by docker\n" in made.transcript
    assert made.said["base"] == "docker"
    assert made.said["debian_packages"] == locked_debian()
    assert made.said["python_packages"] == locked_python("")
    assert "127.0.0.1" not in (made.folder / "recipe").read_text()


REGISTRY = """
cd /scratch
mkdir registry
cat >registry.yml <<'END'
version: 0.1
storage: {filesystem: {rootdirectory: /scratch/registry}}
http: {addr: 127.0.0.1:5000}
END
setsid docker-registry serve registry.yml >registry.log 2>&1 </dev/null &
mirror=$(sed -n 's/^deb \\(\\[.*\\] \\)\\?\\([^ ]*\\) .*/\\2/p' /etc/apt/sources.list | head -n 1)
debootstrap --variant=minbase trixie tree "$mirror" >debootstrap.log
umoci init --layout oci
umoci new --image oci:slim
umoci unpack --image oci:slim bundle
rmdir bundle/rootfs
mv tree bundle/rootfs
umoci repack --image oci:slim bundle >repack.log
for second in $(seq 60); do
    skopeo copy --dest-tls-verify=false oci:oci:slim docker://127.0.0.1:5000/mirror/debian:trixie-slim && exit
    sleep 1
done
exit 1
"""


def test_the_stack_for_older_drivers_is_built_too(older: Built) -> None:
    stack, said = stacks.find("cu126"), older.said
    assert (said["stack"], said["driver"]) == ("cu126", "525")
    assert (said["versions"]["torch"], said["versions"]["cuda"]) == (stack.torch, "12.6")
    assert said["versions"]["compute_capability"] == stack.compute_capability
    assert {"6.0", "7.0"} < set(stack.compute_capability)
    assert said["python_packages"] == locked_python("cu126")


def test_extra_packages_get_a_lock_and_leave_the_stack_alone(extended: Built) -> None:
    found = extended.said["python_packages"]
    assert {"accelerate", "lightning", "transformers"} <= set(found)
    stack = locked_python("")
    assert {name: found[name] for name in stack} == stack


# --- what is refused --------------------------------------------------------------------------------------------


def refused(host: Host, *words: str, user: str = "alice", **env: str) -> str:
    """The one line of a build that says no, before it has begun."""
    line: list[str | Path] = [VENV / "bin/python", HOME / "containers/build.py", *words]
    ended = host.run(line, user=user, cwd=HOME, env=env, timeout=BOUND)
    assert ended.returncode == 64, ended.stdout + ended.stderr
    assert not host.run(["find", OUT, "-name", "*.sif*"]).stdout
    return ended.stderr.splitlines()[-1]


def test_extra_packages_that_do_not_go_with_the_stack_are_refused(host: Host) -> None:
    host.run(["tee", HOME / "old.txt"], input="einops\ntorch<2.10\n", user="alice")
    assert refused(host, "build", "--extra", "old.txt", "--image", f"{OUT}/x.sif") == (
        f"image: EXTRA={HOME}/old.txt: torch<2.10 does not go with torch==2.15.0 of stack cu132: ask for what "
        "the stack has, or choose another with STACK=NAME"
    )


def test_a_wheel_that_is_not_the_locked_one_is_refused(host: Host) -> None:
    lock = HOME / "containers/locks/cu132-amd64.txt"
    before = host.run(["cat", lock]).stdout
    # The one package, so that not all are fetched again.
    block = re.search(r"^(absl-py==\S+) \\\n(?: +--hash=sha256:\w+(?: \\)?\n)+", before, re.MULTILINE)
    assert block
    host.run(["tee", lock], input=re.sub("sha256:....", "sha256:0000", block[0]), user="alice")
    try:
        said = refused(host, "build", "--image", f"{OUT}/x.sif")
    finally:
        host.run(["tee", lock], input=before, user="alice")
    assert said == (
        f"image: {block[1]}: the index's wheel does not have the hash that cu132-amd64.txt has: the file was "
        "changed there or on the way: use another index (PIP_INDEX_URL), or `make lock` if you trust it"
    )


def test_places_that_will_not_do_are_refused(host: Host) -> None:
    small, noexec = Path("/scratch/small"), Path("/scratch/noexec")
    for place, options in ((small, "size=64m,mode=1777"), (noexec, "noexec,mode=1777")):
        host.run(["mkdir", place])
        assert host.run(["mount", "-t", "tmpfs", "-o", options, "t", place]).returncode == 0
    image = ["--image", f"{OUT}/x.sif"]
    assert refused(host, "build", *image, APPTAINER_TMPDIR=str(noexec)) == (
        f"image: {noexec} is on {noexec}, which is mounted noexec: nothing can be run there while the image is "
        "built: set APPTAINER_TMPDIR=DIR, best a local disk of the node"
    )
    assert refused(host, "build", *image, APPTAINER_TMPDIR=str(small)) == (
        f"image: {small} has 0.1 GB free, 9.5 GB are needed (temporary): "
        "set APPTAINER_TMPDIR=DIR, best a local disk of the node"
    )
    assert refused(host, "build", "--image", f"{small}/x.sif") == (
        f"image: {small} has 0.1 GB free, 3.0 GB are needed (target): set IMAGE=FILE on a larger file system"
    )


def test_a_machine_without_the_tools_is_refused(tmp_path: Path) -> None:
    with builder("bare", tmp_path) as host:
        image = ["build", "--image", f"{OUT}/x.sif"]
        assert refused(host, *image, "--base", "docker") == (
            "image: BASE=docker: stacks.yaml has no digest of debian:trixie-slim for amd64: run `make lock` with "
            "REGISTRY=HOST, or take BASE=debootstrap"
        )
        host.run(["rm", "/usr/bin/fakeroot"])
        assert refused(host, *image, user="bob") == (
            "image: bob has no subordinate ids (/etc/subuid) and fakeroot is not installed: Debian's packages "
            "cannot be set up: ask for one of the two, or build where one is there"
        )
        host.run(["rm", "/usr/sbin/debootstrap"])
        assert refused(host, *image) == (
            "image: no base can be made here: debootstrap is not installed, and stacks.yaml has no digest of "
            "debian:trixie-slim for amd64: install debootstrap, or run `make lock` with REGISTRY=HOST"
        )
        assert refused(host, *image, "--base", "debootstrap") == (
            "image: BASE=debootstrap: debootstrap is not installed here: install it, or BASE=docker"
        )
        host.run(["rm", "/usr/bin/apptainer", "/usr/bin/singularity"])
        assert refused(host, *image) == (
            "image: neither apptainer nor singularity is on PATH: load it (module avail apptainer), "
            "or build on a node that has it"
        )


def test_a_build_that_fails_keeps_the_image_of_before(host: Host) -> None:
    host.run(["bash", "-c", f"echo before >{OUT}/x.sif; chown alice {OUT}/x.sif"])
    recipe = HOME / "containers/apptrain.def"
    before = host.run(["cat", recipe]).stdout
    broken = before.replace('    say "Debian packages"\n', "    exit 3\n", 1)
    assert broken != before
    host.run(["tee", recipe], input=broken, user="alice")
    try:
        status, said = make(host, "image", f"IMAGE={OUT}/x.sif")
    finally:
        host.run(["tee", recipe], input=before, user="alice")
    assert status == 2
    assert "image: the build failed; the reason stands above. The image of before is untouched" in said
    assert host.run(["cat", OUT / "x.sif"]).stdout == "before\n"
    assert host.run(["ls", "-A", OUT, TEMPORARY]).stdout.split() == [f"{OUT}:", "x.sif", f"{TEMPORARY}:"]
    host.run(["rm", OUT / "x.sif"])


# --- what works in it -------------------------------------------------------------------------------------------


def test_inspect_prints_it_and_notices_another_file(host: Host, default: Built) -> None:
    status, said = make(host, "image-inspect", f"IMAGE={IMAGE}")
    assert status == 0, said
    rows = dict(re.findall(r"^(\w+(?: [\w.-]+)?) +(.*)$", said, re.MULTILINE))
    assert rows["partition_sha256"] == default.said["partition_sha256"]
    assert rows["debian_packages"] == str(len(locked_debian()))
    assert rows["label apptrain.stack"] == "cu132"
    assert rows["label org.label-schema.build-date"] == stacks.find("").date


def test_inside_are_the_locked_cuda_wheels(host: Host, default: Built, report: list[str]) -> None:
    count = "from importlib.metadata import distributions as d; import torch; print(len(list(d())), torch.version.cuda)"
    said = inside(host, "python", "-c", count)
    begin, end = default.when
    report.append(
        f"in the image: {said.split()[0]} wheels, torch.version.cuda {said.split()[1]}; built {begin} to {end}"
    )
    assert said.split() == [str(len(locked_python(""))), stacks.find("").cuda]


def test_it_runs_as_the_entrypoint_and_has_a_help(host: Host) -> None:
    ended = host.run(["apptainer", "-q", "run", IMAGE, "check"], user="alice", cwd="/", timeout=BOUND)
    assert ended.returncode == 0, ended.stderr
    assert stacks.find("").torch in ended.stdout
    ended = host.run(["apptainer", "-q", "run-help", IMAGE], user="alice", cwd="/", timeout=BOUND)
    assert "apptainer run IMAGE check" in ended.stdout


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


def test_the_demo_in_it_gives_the_trace_of_a_venv_from_the_same_lock_bit_for_bit(host: Host) -> None:
    runs = {name: OUT / f"run-{name}" for name in ("image", "venv")}
    in_image = {"APPTRAIN_RUN_DIR": str(runs["image"]), "APPTRAIN_BIND": str(OUT)}
    ended = host.run(
        ["make", "demo", "IN=image", f"IMAGE={IMAGE}"], user="alice", cwd=HOME, env=in_image, timeout=600
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    venv = OUT / "outside"
    lock = HOME / "containers/locks/cu132-amd64.txt"
    python = host.run(["python3", "-VV"]).stdout
    assert python == inside(host, "python", "-VV")
    (wheelhouse,) = host.run(["bash", "-c", f"ls -d {DOWNLOADS}/wheels/{wheels.digest(stacks.find('').lock('amd64'))[:16]}"]).stdout.split()  # fmt: skip
    lines: list[list[str | Path]] = [
        ["python3", "-m", "venv", "--without-pip", venv],
        [VENV / "bin/uv", "pip", "install", "--quiet", "--offline", "--no-index", "--find-links", wheelhouse,
         "--python", venv / "bin/python", "--require-hashes", "-r", lock],
    ]  # fmt: skip
    for line in lines:
        done = host.run(line, user="alice", cwd=HOME, timeout=BOUND)
        assert done.returncode == 0, done.stderr
    demo: list[str | Path] = [venv / "bin/python", "-P", "-m", "entrypoint.embedded", "--nodes", "2", "--", "-m", "train", "--config", "digits"]  # fmt: skip
    outside = {
        "APPTRAIN_RUN_DIR": str(runs["venv"]),
        "PYTHONPATH": f"{HOME}:{HOME}/src",
        "APPTRAIN_PASS": "PYTHONPATH",
    }
    ended = host.run(demo, user="alice", cwd=HOME, env=outside, timeout=600)
    assert ended.returncode == 0, ended.stderr[-3000:]
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
