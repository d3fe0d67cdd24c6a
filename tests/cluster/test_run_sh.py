"""`containers/run.sh` with real Apptainer, as an ordinary user: the traps of a node, and what a user sees of each.

The image holds a shell, Python and a few tools of the host's own; it is built once. A test that changes a host has
one of its own.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from entrypoint.job import outcome
from entrypoint.job.outcome import Outcome
from tests.host import NO_USER_NAMESPACES, Bind, Host, up

CHECKOUT = Path(__file__).resolve().parents[2]
HOME = Path("/opt/apptrain")
RUN_SH = f"{HOME}/containers/run.sh"
IMAGE = "/images/small.sif"
BOUND = 120.0  # s, for anything that a host runs
BUILD = r"""
set -eu
tree=/scratch/tree
mkdir -p $tree/usr/bin $tree/usr/sbin $tree/usr/lib $tree/usr/lib64 $tree/etc $tree/opt/in-image
for name in tmp var/tmp proc sys dev home root; do mkdir -p $tree/$name; done
for name in bin sbin lib lib64; do ln -s usr/$name $tree/$name; done
cp -a /usr/lib/python3.13 $tree/usr/lib/
rm -rf $tree/usr/lib/python3.13/test $tree/usr/lib/python3.13/__pycache__
for name in dash python3.13 cat env id ls readlink sleep stat touch true; do cp -L /usr/bin/$name $tree/usr/bin/; done
ln -s dash $tree/usr/bin/sh
ln -s python3.13 $tree/usr/bin/python3
ln -s python3 $tree/usr/bin/python
ldd $tree/usr/bin/* $tree/usr/lib/python3.13/lib-dynload/*.so /opt/apptrain/psutil/*.so 2>/dev/null | grep -oE '/[^ ]+ ' | sort -u |
    while read -r library; do
        mkdir -p "$tree${library%/*}"
        cp -L "$library" "$tree$library"
    done
echo root:x:0:0:root:/root:/bin/sh >$tree/etc/passwd
echo root:x:0: >$tree/etc/group
for name in resolv.conf hosts localtime; do : >$tree/etc/$name; done
apptainer -q build --mksquashfs-args '-comp zstd -Xcompression-level 1' /images/small.sif $tree
"""

pytestmark = [
    pytest.mark.ci_may_skip("a CI without root cannot make namespaces and users"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts, namespaces and users of its own"),
]


class Node:
    """A host on which alice runs commands in the image."""

    def __init__(self, host: Host, name: str):
        self.host = host
        self.name = name

    def run(
        self, *command: str, image: str = IMAGE, user: str = "alice", cwd: str = "/scratch", **env: str
    ) -> subprocess.CompletedProcess[str]:
        return self.host.run([RUN_SH, image, *command], user=user, cwd=cwd, env=env, timeout=BOUND)

    def show(self, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
        line = [RUN_SH, "--show", IMAGE, *command]
        return self.host.run(line, user="alice", cwd="/scratch", env=env, timeout=BOUND)

    def as_root(self, script: str) -> str:
        ended = self.host.run(["bash", "-euc", script], timeout=BOUND)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def as_alice(self, script: str) -> str:
        ended = self.host.run(["bash", "-euc", script], user="alice", timeout=BOUND)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def said(self, ended: subprocess.CompletedProcess[str]) -> str:
        """The one line on stderr, without the node's name."""
        found = re.fullmatch(rf"apptrain: {self.name}: (.*)\n", ended.stderr)
        assert found, ended.stderr
        return found[1]

    def refused(self, ended: subprocess.CompletedProcess[str]) -> str:
        assert (ended.returncode, ended.stdout) == (64, "")
        return self.said(ended)

    def left(self) -> str:
        """Temporary directories and processes that a run has left."""
        return self.as_root("ls -d /tmp/apptrain* 2>/dev/null || true; pgrep -a 'squashfuse|starter' || true")


def booted(name: str, images: Path) -> Any:
    binds = [
        *(
            Bind(source=CHECKOUT / name, target=HOME / name)
            for name in ("containers", "host", "entrypoint", "src")
        ),
        Bind(source=Path(psutil.__file__).parent, target=HOME / "psutil"),  # the entrypoint needs it
        Bind(source=images, target=Path("/images"), mode="rw"),
    ]
    return up(name, binds=binds)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the image, which every host shows."""
    folder = tmp_path_factory.mktemp("images")
    folder.chmod(0o777)
    with booted("builder", folder) as host:
        ended = host.run(["bash", "-c", BUILD], user="alice", timeout=600)
        assert ended.returncode == 0, ended.stderr
    return folder


@pytest.fixture(scope="module")
def shared(images: Path) -> Iterator[Node]:
    """A host that tests leave as it is."""
    with booted("node1", images) as host:
        yield Node(host, "node1")


@pytest.fixture
def own(images: Path) -> Iterator[Node]:
    """A host that a test may change."""
    with booted("node2", images) as host:
        yield Node(host, "node2")


def python(script: str, *arguments: str) -> Sequence[str]:
    return ("python", "-c", script, *arguments)


# --- what crosses ----------------------------------------------------------------------------------------------

VALUES = {
    "HF_PLAIN": "1",
    "HF_EMPTY": "",
    "HF_BLANKS": " a  b ",
    "HF_SHELL": "$HOME $(touch /tmp/x) `id` \\$",
    "HF_QUOTES": "'\"'\"",
    "HF_END": "end\\",
    "HF_LINES": "a\nb\n\n",
    "HF_COMMAS": "a,b:c=d,e",
    "HF_OTHERS": "\t\r*~#%{}é€😀",
    "HF_LONG": "x" * 100_000,
}


@pytest.mark.parametrize("user", ["alice", "bob"])  # who has subordinate ids, and who has none
def test_values_and_arguments_arrive_as_they_are(shared: Node, user: str) -> None:
    script = "import json, os, sys; print(json.dumps([dict(os.environ), sys.argv[1:]]))"
    ended = shared.run(*python(script, *VALUES.values()), user=user, **VALUES)
    assert (ended.returncode, ended.stderr) == (0, "")
    env, arguments = json.loads(ended.stdout)
    assert {name: env.get(name) for name in VALUES} == VALUES
    assert arguments == list(VALUES.values())


def test_what_the_scheduler_says_passes_and_its_secrets_do_not(shared: Node) -> None:
    host = {
        "SLURM_JOB_ID": "7",
        "SLURM_JWT": "s",
        "PBS_JOBCOOKIE": "s",
        "PYTHONPATH": "/x",
        "LD_PRELOAD": "",
        "LANG": "xx",
    }
    ended = shared.run("env", **host)
    names = {line.partition("=")[0] for line in ended.stdout.splitlines()}
    assert names & {*host, "PYTHONNOUSERSITE", "USER", "LOGNAME"} == {
        *("SLURM_JOB_ID", "LANG", "PYTHONNOUSERSITE", "USER", "LOGNAME"),
        "PYTHONPATH",  # of this image, which is not ours
    }
    assert "PYTHONPATH=/.apptrain\n" in ended.stdout
    assert "LANG=C\n" in ended.stdout


def test_one_bad_name_or_a_sites_bind_loses_nothing(shared: Node) -> None:
    foreign = {
        "APPTAINERENV_A-B": "1",
        "APPTAINERENV_HF_X": "theirs",
        "APPTAINER_BIND": "/no/where",
        "SINGULARITY_MOUNT": "x",
    }
    ended = shared.run("sh", "-c", 'echo "$HF_X" "$TMPDIR"', HF_X="ours", **foreign)
    assert ended.returncode == 0
    assert re.fullmatch(r"ours /tmp/apptrain\.\w{6}\n", ended.stdout)
    listed = re.fullmatch(
        r"not obeyed: (.*) \(APPTRAIN_BIND and APPTRAIN_PASS are for that\)", shared.said(ended)
    )
    assert listed
    assert sorted(listed[1].split()) == sorted(foreign)


# --- what is shown ---------------------------------------------------------------------------------------------


def test_a_profile_gives_apptainer_options_and_obeys_what_a_module_brings(shared: Node) -> None:
    """As at sites that need --fakeroot, or whose module binds its libraries and a script that starts CMD."""
    shared.as_alice("mkdir -p /scratch/site/host && cd /scratch/site/host && echo lib >lib && cat >adapt.sh <<'END'\n"
        "#!/bin/sh\nexport NCCL_NET='AWS Libfabric' LD_LIBRARY_PATH=/host:$LD_LIBRARY_PATH\nexec \"$@\"\nEND\n"
        "chmod 755 adapt.sh")  # fmt: skip
    script = "id -u; cat /host/lib; echo $NCCL_NET; echo ${LD_LIBRARY_PATH%%:*}; echo x >/host/new || echo read-only"
    line = [
        RUN_SH,
        "--option",
        "--fakeroot",
        "--obey-binds",
        "--wrapper",
        "/host/adapt.sh",
        IMAGE,
        "sh",
        "-c",
        script,
    ]
    env = {"APPTAINER_BIND": "/scratch/site/host:/host:ro"}
    ended = shared.host.run(line, user="alice", cwd="/scratch", env=env, timeout=BOUND)
    assert ended.stdout.splitlines() == ["0", "lib", "AWS Libfabric", "/host", "read-only"], ended.stderr
    assert "not obeyed" not in ended.stderr
    env = {"APPTAINER_BIND": "/scratch/none:/host"}
    ended = shared.host.run([*line[:4], *line[6:]], user="alice", cwd="/scratch", env=env, timeout=BOUND)
    assert shared.refused(ended).startswith("APPTAINER_BIND /scratch/none is not there on this node: ")


def test_a_working_directory_behind_a_symlink_is_there(shared: Node) -> None:
    shared.as_alice(
        "mkdir -p /scratch/real/deep; touch /scratch/real/deep/file; ln -sfn /scratch/real /scratch/link"
    )
    ended = shared.run(
        "sh", "-c", "pwd; ls; touch new; readlink -f .", cwd="/scratch/link/deep", PWD="/scratch/link/deep"
    )
    assert (ended.stdout, ended.stderr) == ("/scratch/link/deep\nfile\n/scratch/link/deep\n", "")
    assert shared.as_alice("ls /scratch/real/deep") == "file\nnew\n"


def test_a_working_directory_with_an_odd_name_is_there(shared: Node) -> None:
    odd = "/scratch/a,b \"c\" 'd' $e\\ :f=\ng*"
    shared.as_alice(f"mkdir -p {shlex.quote(odd)}; touch {shlex.quote(odd)}/file")
    ended = shared.run(*python("import os; print(repr(os.getcwd()), os.listdir())"), cwd=odd)
    assert (ended.stdout, ended.stderr) == (f"{odd!r} ['file']\n", "")


def test_home_may_be_elsewhere_and_behind_a_symlink(shared: Node) -> None:
    shared.as_alice(
        "mkdir -p /scratch/homes/alice; ln -sfn /scratch/homes /scratch/h; touch /scratch/homes/alice/mine"
    )
    ended = shared.run(
        "sh", "-c", "cd; pwd; ls; ls /scratch/homes/alice", HOME="/scratch/h/alice", cwd="/tmp"
    )
    assert (ended.stdout, ended.stderr) == ("/scratch/h/alice\nmine\nmine\n", "")


def test_a_symlink_in_home_leads_where_it_does_outside(shared: Node) -> None:
    shared.as_alice("mkdir -p /scratch/large; touch /scratch/large/file; ln -sfn /scratch/large ~/project")
    ended = shared.run("sh", "-c", "pwd; ls", cwd="/home/alice/project", PWD="/home/alice/project")
    assert (ended.stdout, ended.stderr) == ("/home/alice/project\nfile\n", "")


def test_what_is_asked_for_is_bound_as_asked(shared: Node) -> None:
    shared.as_alice(
        "mkdir -p /scratch/set /scratch/w; touch /scratch/set/one; ln -sfn /scratch/set /scratch/alias"
    )
    asked = "/scratch/alias\n/scratch/set:/data/set:ro"
    script = "ls /scratch/alias /scratch/set /data/set; touch /scratch/set/one; touch /data/set/two 2>/dev/null || echo ro"
    ended = shared.run("sh", "-c", script, cwd="/scratch/w", APPTRAIN_BIND=asked)
    listed = "".join(f"{path}:\none\n\n" for path in ("/data/set", "/scratch/alias", "/scratch/set"))
    assert (ended.stdout, ended.stderr) == (listed[:-1] + "ro\n", "")


LAUNCH = ("python", "-P", "-m", "entrypoint", "launch", "--")
NOT_VISIBLE = {
    "a script behind a symlink": (("python", "link/train.py"), "link/train.py"),
    "a file that is to be written": (("touch", "/scratch/d/new"), "/scratch/d"),
}


@pytest.mark.parametrize(("command", "named"), NOT_VISIBLE.values(), ids=NOT_VISIBLE)
def test_a_path_that_is_not_visible_inside_is_refused_with_the_bind_to_add(
    shared: Node, command: tuple[str, ...], named: str
) -> None:
    shared.as_alice(
        "mkdir -p /scratch/p /scratch/d; touch /scratch/p/train.py /scratch/d/train.py; "
        "ln -sfn /scratch/d /scratch/p/link"
    )
    assert shared.refused(shared.run(*command, cwd="/scratch/p")) == (
        f"CMD names {named}, which this node has but the image does not show: add a line to APPTRAIN_BIND: /scratch/d"
    )
    shown = shared.run(*command, cwd="/scratch/p", APPTRAIN_BIND="/scratch/d")
    assert "does not show" not in shown.stderr


def test_the_bind_to_add_never_hides_the_images_own_directories(shared: Node) -> None:
    shared.as_root("touch /etc/site.conf")
    assert shared.refused(shared.run("cat", "/etc/site.conf")) == (
        "CMD names /etc/site.conf, which this node has but the image does not show: add a line to APPTRAIN_BIND: "
        "/etc/site.conf"
    )
    assert shared.run("cat", "/etc/site.conf", "/etc/passwd", APPTRAIN_BIND="/etc/site.conf").returncode == 0


def test_the_directory_of_a_launched_script_is_shown(shared: Node) -> None:
    shared.as_alice("mkdir -p /scratch/scripts /scratch/w; touch /scratch/scripts/train.py")
    script = "/scratch/scripts/train.py"
    line = [RUN_SH, "--script", script, IMAGE, *LAUNCH, script]
    ended = shared.host.run(line, user="alice", cwd="/scratch/w", timeout=BOUND)
    assert (ended.returncode, "does not show" in ended.stderr) == (64, False)
    assert ended.stderr.startswith("apptrain: no scheduler's job id is in the environment: ")


def test_a_path_that_the_image_has_of_its_own_is_left_alone(shared: Node) -> None:
    ended = shared.run("/usr/bin/ls", "-d", "/etc/passwd", "/usr/bin", "/dev/null", "/proc/self/status")
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_working_directory_of_the_image_is_the_images(shared: Node) -> None:
    assert shared.run("ls", "/opt", cwd="/opt").stdout == "in-image\n"


# --- the image and the node --------------------------------------------------------------------------------------


UNFIT_IMAGES = {
    "behind a closed directory": (
        "cp /images/small.sif /scratch/closed; ln -s closed/small.sif /scratch/unfit",
        "there is no image /scratch/unfit on this node, or its directory may not be searched: correct the path "
        "(all nodes must share it), give another in APPTRAIN_IMAGE, or build one (make image); for a URL give the file "
        "that apptainer pull makes",
    ),
    "not readable": (
        "cp /images/small.sif /scratch/unfit; chmod 600 /scratch/unfit",
        "the image /scratch/unfit may not be read: ask its owner for chmod a+r",
    ),
}


@pytest.mark.parametrize(("script", "why"), UNFIT_IMAGES.values(), ids=UNFIT_IMAGES)
def test_an_image_that_cannot_run_is_refused(shared: Node, script: str, why: str) -> None:
    shared.as_root(f"rm -rf /scratch/unfit; mkdir -p -m 700 /scratch/closed; {script}")
    assert shared.refused(shared.run("true", image="/scratch/unfit")) == why


def test_an_image_that_was_cut_off_is_refused(shared: Node) -> None:
    size = int(shared.as_alice(f"stat -c %s {IMAGE}"))
    bytes_left = size - 1
    shared.as_alice(f"head -c {bytes_left} {IMAGE} >/scratch/cut.sif")
    assert shared.refused(shared.run("true", image="/scratch/cut.sif")) == (
        f"the image /scratch/cut.sif is cut off: it has {bytes_left} of {size} bytes: copy or make it again"
    )


def test_an_unpacked_image_runs(shared: Node) -> None:
    shared.as_alice(f"test -d /scratch/box || apptainer -q build --sandbox /scratch/box {IMAGE}")
    ended = shared.run("ls", "/opt", image="/scratch/box")
    assert (ended.stdout, ended.stderr) == ("in-image\n", "")


def test_a_node_without_user_namespaces_is_refused(shared: Node) -> None:
    ended = shared.host.run(
        [*NO_USER_NAMESPACES, RUN_SH, IMAGE, "true"], user="alice", cwd="/scratch", timeout=BOUND
    )
    assert shared.refused(ended) == (
        "this node allows no user namespaces (/proc/sys/user/max_user_namespaces is 0), and apptainer here is not "
        "setuid: ask the administrator to allow them, or for apptainer-suid"
    )


DRIVER = "mkdir -p /scratch/driver/nvidia; touch /scratch/driver/nvidia/version; mount --bind /scratch/driver /proc/driver"
NO_MOUNT = {
    "no fuse": ("chmod 600 /dev/fuse", "/dev/fuse may not be opened"),
    "no squashfuse": ("rm /usr/bin/squashfuse*", "it has no squashfuse"),
}


@pytest.mark.parametrize(("script", "why"), NO_MOUNT.values(), ids=NO_MOUNT)
def test_a_node_that_cannot_mount_unpacks_and_says_so(own: Node, script: str, why: str) -> None:
    own.as_root(script)
    ended = own.run("ls", "/opt")
    assert (ended.returncode, ended.stdout) == (0, "in-image\n")
    said = own.said(ended)
    assert re.fullmatch(
        rf"this node does not mount the image \({why}\): unpacking it to /tmp/apptrain\.\w{{6}}, about \d+ MB, for this run",
        said,
    )
    assert own.left() == ""


def test_a_node_that_can_neither_mount_nor_unpack_is_refused(own: Node) -> None:
    own.as_root(
        "chmod 600 /dev/fuse; mkdir /scratch/small; mount -t tmpfs -o size=4m,mode=1777 t /scratch/small"
    )
    ended = own.run("true", APPTAINER_TMPDIR="/scratch/small")
    need = int(own.as_alice(f"stat -c %s {IMAGE}")) * 2 // 10**6 + 1
    assert own.refused(ended) == (
        "this node does not mount the image (/dev/fuse may not be opened), and /scratch/small, where it would be "
        f"unpacked, has 4 MB free of the {need} MB needed: give a larger node-local directory in APPTAINER_TMPDIR"
    )


def test_a_mount_that_fails_only_when_tried_is_followed_by_unpacking(own: Node) -> None:
    own.as_root("printf '#!/bin/sh\\necho no luck >&2; exit 1\\n' >/usr/bin/squashfuse_ll")
    ended = own.run("ls", "/opt")
    assert (ended.returncode, ended.stdout) == (0, "in-image\n")
    first, second = ended.stderr.splitlines()
    assert first.startswith("FATAL:   container creation failed: image driver mount failure: ")
    assert re.fullmatch(
        r"apptrain: node2: this node does not mount the image \(.*no luck.*\): unpacking it to .*, for this run "
        r"\(APPTRAIN_UNPACK=1 does so without trying\)",
        second,
    )


def test_a_node_with_a_driver_gets_nv_and_one_without_is_told(own: Node) -> None:
    ended = own.run("true", CUDA_VISIBLE_DEVICES="0,1")
    assert own.said(ended) == (
        "GPUs were granted (CUDA_VISIBLE_DEVICES=0,1), but this node has no NVIDIA driver "
        "(/proc/driver/nvidia/version): CMD will see none"
    )
    assert own.run("true", CUDA_VISIBLE_DEVICES="").stderr == ""
    own.as_root(DRIVER)
    ended = own.show("true", CUDA_VISIBLE_DEVICES="0")
    assert ended.stderr == ""
    assert " --no-mount home\\,cwd\\,tmp --nv --mount " in ended.stdout


LOADED = """
import ctypes, os
print(os.environ["LD_LIBRARY_PATH"])
try:
    ctypes.CDLL("libcuda.so.1")
except OSError as error:
    print(error)
"""


def test_forward_compatibility_comes_before_the_libraries_of_the_driver(own: Node) -> None:
    compat = "/usr/local/cuda-13.2/compat"
    own.as_root(
        f"{DRIVER}; mkdir -p {compat} /etc/alternatives; ln -s {compat[:-7]} /etc/alternatives/cuda; "
        f"ln -s /etc/alternatives/cuda /usr/local/cuda; touch {compat}/libcuda.so.595.1; "
        f"ln -s libcuda.so.595.1 {compat}/libcuda.so.1"
    )
    ended = own.run(*python(LOADED), APPTRAIN_CUDA_COMPAT="/usr/local/cuda/compat")
    # It is this file that the linker takes; only its content will not do.
    assert (ended.stdout, ended.stderr) == (
        f"{compat}:/.singularity.d/libs\n{compat}/libcuda.so.1: file too short\n",
        "",
    )
    assert f"  {compat}, ro  [APPTRAIN_CUDA_COMPAT]\n" in own.show("true", APPTRAIN_CUDA_COMPAT=compat).stdout
    assert own.run(*python(LOADED)).stdout.startswith("/.singularity.d/libs\nlibcuda.so.1: cannot open")


NO_COMPAT = {
    "missing": (
        "true",
        "APPTRAIN_CUDA_COMPAT=/scratch/compat is no directory on this node: correct it, or use a directory that all nodes share",
    ),
    "empty": (
        "mkdir /scratch/compat",
        "APPTRAIN_CUDA_COMPAT=/scratch/compat has no libcuda.so.1 that may be read: give the directory "
        "that the package cuda-compat made, such as /usr/local/cuda-13.2/compat",
    ),
    "with a colon": (
        "mkdir /scratch/a:b; touch /scratch/a:b/libcuda.so.1; ln -s a:b /scratch/compat",
        "APPTRAIN_CUDA_COMPAT=/scratch/compat has a colon or semicolon, which LD_LIBRARY_PATH cannot hold: "
        "rename it",
    ),
}


@pytest.mark.parametrize(("script", "why"), NO_COMPAT.values(), ids=NO_COMPAT)
def test_what_is_no_forward_compatibility_is_refused(own: Node, script: str, why: str) -> None:
    own.as_root(f"{DRIVER}; {script}")
    assert own.refused(own.run("true", APPTRAIN_CUDA_COMPAT="/scratch/compat")) == why


def test_nodes_that_start_from_different_builds_of_an_image_are_refused(shared: Node) -> None:
    shared.as_alice(
        f"apptainer -q build --sandbox /scratch/one {IMAGE}; apptainer -q build /scratch/other.sif /scratch/one; "
        f"cp {IMAGE} /scratch/copy.sif"
    )
    ids = {}
    for image in (IMAGE, "/scratch/copy.sif", "/scratch/other.sif"):
        (ids[image],) = re.findall(r"(?m)^ID: +(\S+)$", shared.as_alice(f"apptainer sif header {image}"))
        ended = shared.run("sh", "-c", "echo $APPTRAIN_IMAGE_ID", image=image, APPTRAIN_IMAGE_ID="another's")
        assert ended.stdout == f"{ids[image]}\n"
    assert ids[IMAGE] == ids["/scratch/copy.sif"] != ids["/scratch/other.sif"]
    ended = shared.run("sh", "-c", 'echo "${APPTRAIN_IMAGE_ID-none}"', image="/scratch/one")
    assert ended.stdout == "none\n"

    assert [one[:2] for one in launched(shared, IMAGE, "/scratch/copy.sif")] == [
        (0, "ran 0\n"),
        (0, "ran 1\n"),
    ]
    line = (
        f"apptrain: the nodes do not agree: image_id is {ids[IMAGE]} on node 0 (127.0.0.1) and "
        f"{ids['/scratch/other.sif']} on node 1 (127.0.0.2): start every node with the same options, profile and image\n"
    )
    for status, out, err in launched(shared, IMAGE, "/scratch/other.sif"):
        assert (status, out, err.splitlines(keepends=True)[-1]) == (64, "", line)


def launched(node: Node, *images: str) -> list[tuple[int, str, str]]:
    """Status, stdout and stderr of each of the nodes of one launch, all on this host."""
    command = ["env", f"PYTHONPATH={HOME}", *LAUNCH[:-1], "--nodes", "127.0.0.1,127.0.0.2", "--device", "cpu"]
    command += ["--mode", "exec", "--no-python", "--run-dir", "/scratch/launched"]
    env = {"APPTRAIN_HOME": str(HOME)}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    nodes = [
        node.host.start(
            [RUN_SH, image, *command, "--node-rank", str(rank), "--", "sh", "-c", "echo ran $NODE_RANK"],
            user="alice",
            cwd="/scratch",
            env=env,
            **pipes,
        )
        for rank, image in enumerate(images)
    ]
    texts = [process.communicate(timeout=BOUND) for process in nodes]
    return [(process.returncode, *text) for process, text in zip(nodes, texts, strict=True)]


def test_a_small_shm_is_told(own: Node) -> None:
    own.as_root("mount -o remount,size=64m /dev/shm")
    ended = own.run("true")
    assert (ended.returncode, own.said(ended)) == (
        0,
        "/dev/shm has 67 MB free, less than 1000: DataLoader's workers and NCCL may fail (use fewer workers or "
        "none, NCCL_SHM_DISABLE=1)",
    )


def test_without_shm_it_is_told(own: Node) -> None:
    own.as_root("chmod 755 /dev/shm")
    ended = own.run("true")
    assert (ended.returncode, own.said(ended)) == (
        0,
        "/dev/shm is not there or may not be written: DataLoader's workers and NCCL may fail (use fewer workers or "
        "none, NCCL_SHM_DISABLE=1)",
    )


# --- the node's disk ---------------------------------------------------------------------------------------------

TMPFS = "mkdir -p {0}; mount -t tmpfs -o mode=1777,{1} t {0}"
UNFIT = {
    "noexec": (TMPFS.format("/scratch/t", "noexec"), "/scratch/t is full, or lets no program run (noexec)"),
    "small": (TMPFS.format("/scratch/t", "size=4m"), "/scratch/t has less than 256 MB free"),
    "closed": ("mkdir -m 755 /scratch/t", "/scratch/t is no directory that may be written"),
}


@pytest.mark.parametrize(("script", "why"), UNFIT.values(), ids=UNFIT)
def test_a_temporary_directory_that_does_not_serve_is_passed_over(own: Node, script: str, why: str) -> None:
    own.as_root(script)
    ended = own.run("sh", "-c", "echo $TMPDIR", TMPDIR="/scratch/t")
    assert own.said(ended) == f"{why}: temporary files go to /tmp"
    assert re.fullmatch(r"/tmp/apptrain\.\w{6}\n", ended.stdout)


def test_without_a_place_for_temporary_files_it_is_refused(own: Node) -> None:
    own.as_root(TMPFS.format("/tmp", "size=4m"))
    assert own.refused(own.run("true", TMPDIR="/no/where")) == (
        "/no/where is no directory that may be written, /tmp has less than 256 MB free: give a directory on the "
        "node's own disk in TMPDIR"
    )


def test_the_run_leaves_nothing(shared: Node) -> None:
    shared.run("sh", "-c", "mkdir -p $TMPDIR/a; touch $TMPDIR/a/b; exit 3")
    assert shared.left() == ""


# --- a venv ------------------------------------------------------------------------------------------------------


def test_a_venv_made_in_the_image_is_used_and_one_of_the_host_refused(shared: Node) -> None:
    make = ("-m", "venv", "--without-pip", "--system-site-packages")
    assert shared.run("python", *make, "/scratch/inside").returncode == 0
    ended = shared.run(*python("import sys; print(sys.prefix)"), cwd="/tmp", APPTRAIN_VENV="/scratch/inside")
    assert (ended.stdout, ended.stderr) == ("/scratch/inside\n", "")
    shared.as_alice("python3 -m venv --without-pip --system-site-packages ~/outside")
    # As a host with an older Python makes it.
    shared.as_alice("sed -i 's/^version = .*/version = 3.9.2/' ~/outside/pyvenv.cfg")
    assert shared.refused(shared.run("python", APPTRAIN_VENV="/home/alice/outside")) == (
        "APPTRAIN_VENV=/home/alice/outside was made with /usr/bin/python3.9, which the image lacks: "
        "remove it, make venv DIR=/home/alice/outside"
    )


# --- how it ends -----------------------------------------------------------------------------------------------------

CATCHING = """
import os, signal, sys, time
seen = []
for signum in (1, 2, 10, 12, 15):
    signal.signal(signum, lambda signum, frame: seen.append(signum))
print("ready", flush=True)
while not seen:
    time.sleep(0.05)
time.sleep(0.5)
os.listdir("/opt/in-image")
print(*seen)
sys.exit(75)
"""


def test_a_signal_to_run_sh_alone_reaches_the_program_once_and_the_image_stays(shared: Node) -> None:
    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
        # The first process of the step is what Slurm signals.
        with shared.host.start(
            [RUN_SH, IMAGE, *python(CATCHING)],
            user="alice",
            cwd="/scratch",
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            pids = shared.as_root("pgrep -of '[r]un.sh /images'").split()
            shared.as_root(f"kill -{signum.value} {pids[0]}")
            out, err = process.communicate(timeout=BOUND)
        assert (process.returncode, out, err) == (75, f"{signum.value}\n", "")
        assert shared.left() == ""


@pytest.mark.parametrize("signum", [signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM])
def test_a_signal_to_every_process_of_a_task_leaves_the_program_its_image(
    shared: Node, signum: signal.Signals
) -> None:
    with shared.host.start(
        [RUN_SH, IMAGE, *python(CATCHING)],
        user="alice",
        cwd="/scratch",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert "squashfuse" in shared.left()
        shared.as_root(f"kill -{signum.value} $(pgrep -u alice)")
        out, err = process.communicate(timeout=BOUND)
    assert (process.returncode, set(out.split()), err) == (75, {str(signum.value)}, "")
    assert shared.left() == ""


# --- one mount for all tasks of a node ---------------------------------------------------------------------------------

SHOWN = """
import json, os, sys, time
print(json.dumps([os.readlink("/proc/self/ns/mnt"), dict(os.environ), os.getcwd(), os.listdir("/proc/self/fd")]), flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
os.listdir("/opt/in-image")
import decimal  # from the image
sys.exit(int(open(sys.argv[1]).read() or 0))
"""


class Tasks:
    """The tasks of a step of Slurm's on one node; each prints what it sees and goes on until it is let go."""

    def __init__(self, node: Node, count: int, folder: str, **env: str):
        self.node = node
        self.folder = folder
        node.as_alice(f"rm -rf {folder}; mkdir {folder}")
        self.count = count
        self.env = env
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, local: int, script: str = SHOWN, **env: str) -> "subprocess.Popen[str]":
        """One task of a job, which has an outcome."""
        step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": f"{self.count}(x2)"}
        process = self.node.host.start(
            [
                RUN_SH,
                "--outcome",
                f"{self.folder}/run/outcome/0.%n.%t",
                IMAGE,
                *python(script, f"{self.folder}/{local}"),
            ],
            user="alice",
            cwd="/scratch",
            env=step | {"SLURM_LOCALID": str(local), "SLURM_NODEID": "0"} | self.env | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.processes.append(process)
        return process

    def seen(self, process: "subprocess.Popen[str]") -> tuple[str, dict[str, str], str, list[str]]:
        assert process.stdout is not None
        namespace, env, cwd, files = json.loads(process.stdout.readline())
        return namespace, env, cwd, files

    def end(self, local: int, status: int = 0) -> None:
        """Lets a task go, which ends with this status."""
        self.node.as_alice(
            f"echo {status} >{self.folder}/.{local}; mv {self.folder}/.{local} {self.folder}/{local}"
        )

    def mounts(self) -> int:
        return self.node.left().count("squashfuse_ll ")

    def __enter__(self) -> "Tasks":
        return self

    def __exit__(self, *_: object) -> None:
        for local in range(self.count):
            self.end(local)
        for process in self.processes:
            process.communicate(timeout=BOUND)


def test_the_tasks_of_a_node_share_one_mount_and_each_has_its_own_environment(shared: Node) -> None:
    with Tasks(shared, 1, "/scratch/alone") as tasks:
        _, alone, cwd, files = tasks.seen(tasks.start(0, **VALUES))
    with Tasks(shared, 3, "/scratch/three") as tasks:
        started = [tasks.start(local, HF_OWN=f"of {local}", **VALUES) for local in (1, 0, 2)]
        seen = [tasks.seen(process) for process in started]
        assert tasks.mounts() == 1
        assert len({namespace for namespace, *_ in seen}) == 1
        passed = {*alone.pop("APPTRAIN_PASSED").split()}
        for local, (_, env, its_cwd, its_files) in zip((1, 0, 2), seen, strict=True):
            assert {*env.pop("APPTRAIN_PASSED").split()} == passed | {"HF_OWN"}
            own = {"HF_OWN": f"of {local}", "SLURM_LOCALID": str(local), "SLURM_STEP_TASKS_PER_NODE": "3(x2)"}
            own["APPTRAIN_OUTCOME"] = f"/scratch/three/run/outcome/0.0.{local}"
            named = {name: value for name, value in env.items() if "apptrain." not in value}
            assert named == {name: value for name, value in alone.items() if "apptrain." not in value} | own
            assert env.keys() == alone.keys() | own.keys()
            assert (its_cwd, sorted(its_files)) == (cwd, sorted(files))
        assert len({env["TMPDIR"] for _, env, *_ in seen}) == 3
        for local in range(3):
            tasks.end(local)
        ended = [process.communicate(timeout=BOUND) for process in started]
        assert [process.returncode for process in started] == [0, 0, 0]
        assert [err for _, err in ended] == ["", "", ""]
    assert shared.left() == ""


def test_the_first_task_waits_for_the_others_and_one_that_failed_only_for_a_while(shared: Node) -> None:
    with ExitStack() as steps:  # three at once, each of a job of its own
        started = {}
        for status in (0, 143, 3):  # 143: the second is still saving
            tasks = steps.enter_context(Tasks(shared, 2, f"/scratch/two.{status}", SLURM_JOB_ID=f"{status}"))
            started[status] = tasks, tasks.start(0), tasks.start(1)
            for process in started[status][1:]:
                tasks.seen(process)
        for status, (tasks, _, _) in started.items():
            tasks.end(0, status)
        ended = time.monotonic()
        _, first, second = started.pop(3)
        assert first.wait(timeout=BOUND) == 3  # while the second still runs
        assert second.poll() is None
        time.sleep(max(0.0, ended + 12 - time.monotonic()))
        for status, (tasks, first, second) in started.items():
            assert first.poll() is None
            tasks.end(1)
            assert (first.wait(timeout=BOUND), second.wait(timeout=BOUND)) == (status, 0)
            assert second.communicate() == ("", "")
    assert shared.left() == ""


@pytest.mark.parametrize("signum", [signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM])
def test_a_signal_to_every_process_of_a_node_leaves_all_its_tasks_their_image(
    shared: Node, signum: signal.Signals
) -> None:
    with Tasks(shared, 2, "/scratch/signals") as tasks:
        started = [tasks.start(local, CATCHING) for local in (0, 1)]
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        assert tasks.mounts() == 1
        shared.as_root(f"kill -{signum.value} $(pgrep -u alice)")
        for process in started:
            out, err = process.communicate(timeout=BOUND)
            assert (process.returncode, set(out.split()), err) == (75, {str(signum.value)}, "")
    assert shared.left() == ""


def test_where_the_first_task_is_killed_the_shared_mount_goes_with_it(shared: Node) -> None:
    with Tasks(shared, 2, "/scratch/killed") as tasks:
        first = tasks.start(0)
        tasks.seen(first)  # it is the oldest then
        second = tasks.start(1)
        tasks.seen(second)
        shared.as_root("kill -KILL $(pgrep -of '[r]un.sh --outcome')")
        first.wait(timeout=BOUND)
        deadline = time.monotonic() + BOUND
        while tasks.mounts() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert tasks.mounts() == 0
        tasks.end(1)
        assert second.wait(timeout=BOUND) != 0  # nothing of the image can be read any more
        tasks.end(0)
    shared.as_root("rm -rf /tmp/apptrain*")


@pytest.mark.parametrize(
    ("script", "env", "mounts", "said"),
    [
        ("install -d -o bob -m 755 /tmp/apptrain-2001.7.0.0.0", {}, 2, ""),
        ("true", {"APPTRAIN_BIND": "/scratch:/mnt"}, 2, ""),
        (
            "printf '#!/bin/sh\\necho not permitted >&2; exit 1' >/tmp/no; chmod 755 /tmp/no; mount --bind /tmp/no /usr/bin/nsenter",
            {},
            2,
            "apptrain: node2: each task of this node mounts the image for itself: nsenter: not permitted\n",
        ),
    ],
    ids=["the place is taken", "another bind", "nsenter fails"],
)
def test_where_it_cannot_be_shared_each_task_mounts_the_image(
    own: Node, script: str, env: dict[str, str], mounts: int, said: str
) -> None:
    own.as_root(script)
    with Tasks(own, 2, "/scratch/apart") as tasks:
        first, second = tasks.start(0), tasks.start(1, **env)
        namespaces = {tasks.seen(process)[0] for process in (first, second)}
        assert len(namespaces) == 2
        assert tasks.mounts() == mounts
        for local in (0, 1):
            tasks.end(local)
        assert [process.communicate(timeout=BOUND)[1] for process in (first, second)] == [said, ""]
        assert [process.returncode for process in (first, second)] == [0, 0]


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSEGV])
def test_a_program_that_dies_of_a_signal_gives_128_and_its_number(
    shared: Node, signum: signal.Signals
) -> None:
    ended = shared.run(*python(f"import os; os.kill(os.getpid(), {signum.value})"))
    assert (ended.returncode, ended.stderr, shared.left()) == (128 + signum, "", "")


def test_apptainers_own_failure_is_told_and_leaves_an_outcome(own: Node, tmp_path: Path) -> None:
    own.as_root("sed -i 's/^user bind control = yes/user bind control = no/' /etc/apptainer/apptainer.conf")
    own.as_alice("mkdir /scratch/work")
    line = [RUN_SH, "--outcome", "/scratch/run/outcome/%a.%n", IMAGE, "true"]
    task = {"SLURM_NODEID": "1", "APPTRAIN_ATTEMPT": "0"}
    ended = own.host.run(line, user="alice", cwd="/scratch/work", env=task, timeout=BOUND)
    error = "apptainer ended with status 255 before CMD began"
    assert ended.returncode == 255
    assert ended.stderr.splitlines()[-1] == f"apptrain: node2: {error}: its own message stands above"
    (tmp_path / "outcome").write_text(own.as_alice("cat /scratch/run/outcome/0.1"))
    found = outcome.read(tmp_path / "outcome")
    assert found is not None
    assert found == Outcome(status=255, node="node2", time=found.time, error=error)
