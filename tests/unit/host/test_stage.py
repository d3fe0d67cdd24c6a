"""A node's own copy of the image: `host/stage.sh` makes room for it and looks at it, `containers/run.sh` uses it."""

import fcntl
import hashlib
import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.unit.bounds import shorten
from tests.unit.host.node import IMAGE_ID, RUN_SH, Node, said, sif
from tests.unit.slurm.cluster import until

STAGE = Path(__file__).resolve().parents[3] / "host/stage.sh"
BYTES = "1128"
KEY = f"apptrain-image-{os.getuid()}.slurm-7"
ROOM = ("", "100", "yes")
"""No digest; what must be free; asked for by name."""


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    path = tmp_path / "node disk"
    path.mkdir()
    return path


def stage(
    what: str, folder: Path, *words: str, script: Path = STAGE, path: str = "", shellopts: str = ""
) -> str:
    """What it answers for node 3, which Slurm calls a, without that number."""
    env = {"PATH": f"{path}:{os.environ['PATH']}" if path else os.environ["PATH"], "SLURMD_NODENAME": "a"}
    ended = subprocess.run(
        ["bash", script, what, "3", folder, *words],
        env={**env, "SHELLOPTS": shellopts},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    number, _, answer = ended.stdout.strip().partition(" ")
    assert number == "3" or what in ("remove", "clear")
    return answer


def look(folder: Path, *, sha256: str = "", needs: str = "100", by_name: str = "yes") -> str:
    return stage("look", folder, BYTES, IMAGE_ID, sha256, needs, by_name)


def check(folder: Path, sha256: str = "") -> str:
    return stage("check", folder, BYTES, IMAGE_ID, sha256)


# --- before the copy ----------------------------------------------------------------------------------------------


def test_a_node_with_room_has_a_directory_of_its_own_afterwards(disk: Path) -> None:
    assert look(disk / KEY) == "room"
    assert (disk / KEY).stat().st_mode & 0o777 == 0o700
    assert sorted(path.name for path in (disk / KEY).iterdir()) == ["lock", "node"]


@pytest.mark.parametrize("digest", [True, False])
def test_a_copy_of_an_earlier_attempt_is_not_made_again(disk: Path, digest: bool) -> None:
    look(disk / KEY)
    image = sif(disk / KEY / "image.sif")
    sha256 = hashlib.sha256(image.read_bytes()).hexdigest() if digest else ""
    assert check(disk / KEY, sha256) == "have"
    assert look(disk / KEY, sha256=sha256) == "have"


def test_a_second_attempt_of_a_user_whose_shell_overwrites_nothing_finds_room_too(disk: Path) -> None:
    for _ in range(2):
        assert stage("look", disk / KEY, BYTES, IMAGE_ID, *ROOM, shellopts="noclobber:noglob") == "room"


@pytest.mark.parametrize("checked", [False, True])
def test_a_copy_that_nobody_has_compared_is_made_again(disk: Path, checked: bool) -> None:
    """Its job was killed before, or did not compare digests then."""
    look(disk / KEY)
    sif(disk / KEY / "image.sif")
    if checked:
        assert check(disk / KEY) == "have"
    assert look(disk / KEY, sha256="0" * 64 if checked else "") == "room"
    assert sorted(path.name for path in (disk / KEY).iterdir()) == ["lock", "node"]


def test_a_directory_above_may_hand_its_groups_bit_down(disk: Path) -> None:
    disk.chmod(0o2755)
    assert look(disk / KEY) == "room"


def test_what_lies_there_from_before_the_node_went_down_is_made_anew(disk: Path) -> None:
    look(disk / KEY)
    sif(disk / KEY / "image.sif")
    assert check(disk / KEY) == "have"
    (disk / KEY / "node").write_text(f"{os.uname().nodename} 11111111-2222-3333-4444-555555555555\n")
    assert look(disk / KEY) == "room"
    assert sorted(path.name for path in (disk / KEY).iterdir()) == ["lock", "node"]


@pytest.mark.parametrize(("age", "answer"), [(0, "unfit"), (90, "room")])
def test_a_directory_of_which_no_node_has_said_whose_it_is_is_made_anew_later(
    disk: Path, age: int, answer: str
) -> None:
    (disk / KEY).mkdir(mode=0o700)
    made = time.time() - age
    os.utime(disk / KEY, (made, made))
    said = f"unfit {disk / KEY} is there, and no node says that it is its own"
    assert look(disk / KEY) == {"room": "room", "unfit": said}[answer]


def test_a_stale_image_of_the_same_name_is_removed(disk: Path) -> None:
    look(disk / KEY)
    other = sif(disk / KEY / "image.sif")
    with other.open("r+b") as file:
        file.seek(48)
        file.write(bytes(16))
    assert look(disk / KEY) == "room"
    assert not other.exists()


def test_without_room_nothing_is_left(disk: Path) -> None:
    answer = look(disk / KEY, needs=str(10**15))
    assert answer.startswith(f"unfit {disk} has ")
    assert answer.endswith(" MB free of the 1000000000 MB needed")
    assert list(disk.iterdir()) == []


def test_a_directory_that_is_not_there_is_named(disk: Path) -> None:
    assert look(disk / "no" / KEY) == f"unfit {disk}/no is no directory"


def test_a_directory_that_is_read_only_is_named() -> None:
    read_only = Path("/sys")  # for root too
    assert look(read_only / KEY).startswith(f"unfit cannot create directory '{read_only / KEY}': ")


def test_a_disk_that_is_full_is_no_place_and_nothing_is_left(disk: Path) -> None:
    script = "trap '' XFSZ; ulimit -f 0; exec bash \"$@\""
    ended = subprocess.run(
        ["bash", "-c", script, "bash", STAGE, "look", "3", disk / KEY, BYTES, IMAGE_ID, *ROOM],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ended.stdout == f"3 unfit {disk} takes no file: it is full\n"
    assert list(disk.iterdir()) == []


def test_a_directory_that_nodes_share_is_no_place(disk: Path) -> None:
    look(disk / KEY)
    (disk / KEY / "node").write_text("gpu-b07 1234\n")
    assert look(disk / KEY) == f"unfit {disk} is shared with gpu-b07: give a directory of each node's own"
    assert (disk / KEY).exists()


def test_what_somebody_else_could_have_made_is_not_used(disk: Path) -> None:
    (disk / KEY).mkdir(mode=0o755)
    assert look(disk / KEY) == f"unfit {disk / KEY} is there, and not this job's"
    (disk / KEY).rmdir()
    (disk / KEY).symlink_to(disk)
    assert look(disk / KEY) == f"unfit {disk / KEY} is there, and not this job's"


def says_kind(folder: Path, kind: str) -> str:
    """Where a stat is that calls each file system so."""
    folder.mkdir()
    (folder / "stat").write_text(
        f'#!/bin/sh\ncase $* in "-f -c %T"*) echo {kind} ;; *) exec /usr/bin/stat "$@" ;; esac\n'
    )
    (folder / "stat").chmod(0o755)
    return str(folder)


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        *((kind, "on a file system that nodes share") for kind in ("lustre", "nfs", "gpfs", "smb2", "fhgfs")),
        ("tmpfs", "in memory"),
    ],
)
def test_a_file_system_that_is_no_disk_is_no_place_by_itself(
    disk: Path, tmp_path: Path, kind: str, where: str
) -> None:
    programs = says_kind(tmp_path / "bin", kind)
    huge = str(1 << 50)
    assert where in stage("look", disk / KEY, huge, IMAGE_ID, "", "100", "", path=programs)
    asked = stage("look", disk / KEY, huge, IMAGE_ID, *ROOM, path=programs)
    assert (asked == "room") == (kind == "tmpfs")


def test_an_image_that_takes_little_of_the_memory_may_lie_there(disk: Path, tmp_path: Path) -> None:
    programs = says_kind(tmp_path / "bin", "tmpfs")
    assert stage("look", disk / KEY, BYTES, IMAGE_ID, "", "100", "", path=programs) == "room"


def shortened(tmp_path: Path) -> Path:
    """stage.sh, for which everything that nobody holds is old."""
    for name in ("stage.sh", "staged.sh", "common.sh"):
        (tmp_path / name).write_bytes((STAGE.parent / name).read_bytes())
    shorten(tmp_path / "stage.sh", STALE=-1)
    return tmp_path / "stage.sh"


def test_what_a_killed_job_has_left_is_removed_by_the_next_one(disk: Path, tmp_path: Path) -> None:
    left, used, of_others = (
        disk / KEY.replace("-7", "-6"),
        disk / KEY.replace("-7", "-5"),
        disk / "apptrain-image-9.slurm-1",
    )
    for folder in (left, used):
        assert look(folder) == "room"
    of_others.mkdir(mode=0o700)
    with (used / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        assert stage("look", disk / KEY, BYTES, IMAGE_ID, *ROOM, script=shortened(tmp_path)) == "room"
    assert sorted(path.name for path in disk.iterdir()) == sorted([KEY, used.name, of_others.name])


@pytest.mark.parametrize(("age", "stays"), [(2600, True), (2800, False)])
def test_a_copy_that_nobody_holds_is_kept_for_45_minutes(disk: Path, age: int, stays: bool) -> None:
    """Its job may be between two attempts, or other nodes may still get theirs."""
    other = disk / KEY.replace("-7", "-6")
    look(other)
    used = time.time() - age
    os.utime(other / "lock", (used, used))
    assert look(disk / KEY) == "room"
    assert other.exists() == stays


def test_a_copy_of_another_node_is_left_alone_however_old(disk: Path) -> None:
    other = disk / KEY.replace("-7", "-6")
    assert look(other) == "room"
    (other / "node").write_text("elsewhere 1\n")
    os.utime(other / "lock", (0, 0))
    assert look(disk / KEY) == "room"
    assert other.exists()


def test_two_jobs_that_stage_at_once_leave_each_other_alone(disk: Path) -> None:
    other = disk / KEY.replace("-7", "-8")
    look(disk / KEY)
    assert look(other) == "room"
    sif(disk / KEY / "image.sif")
    stage("remove", other)
    assert check(disk / KEY) == "have"


# --- the copy, where ssh brings it -------------------------------------------------------------------------------


def received(folder: Path, data: bytes, size: int = 5) -> int:
    line: list[str | Path] = ["bash", STAGE, "receive", "-", folder, str(size)]
    return subprocess.run(line, input=data, capture_output=True, timeout=60, check=False).returncode


def test_a_copy_has_its_name_once_it_is_whole(disk: Path) -> None:
    assert look(disk / KEY) == "room"
    assert received(disk / KEY, b"image") == 0
    assert (disk / KEY / "image.sif").read_bytes() == b"image"
    assert not (disk / KEY / "image.sif.part").exists()


def test_a_copy_that_cannot_be_written_is_a_failure(disk: Path) -> None:
    assert received(disk / "gone", b"image") != 0


def test_a_copy_that_is_cut_on_its_way_does_not_get_the_name(disk: Path) -> None:
    assert look(disk / KEY) == "room"
    assert received(disk / KEY, b"imag") != 0
    assert not (disk / KEY / "image.sif").exists()


def test_nothing_is_written_where_somebody_else_could_have_put_a_link(disk: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("secret")
    (disk / KEY).mkdir(mode=0o777)
    (disk / KEY).chmod(0o777)
    (disk / KEY / "image.sif.part").symlink_to(tmp_path / "keys")
    assert received(disk / KEY, b"image") != 0
    assert (tmp_path / "keys").read_text() == "secret"


SSH = """#!/bin/bash
while [[ $1 != -- ]]; do shift; done
echo "$2" >>"{here}/ssh"
exec /bin/bash -c "${{3//disk\\//disk.$2/}}"
"""
"""Each host's disk is beside that of this node."""


def sent(disk: Path, shared: Path) -> int:
    """The status of a node that sends the image to b and c."""
    (disk.parent / "bin").mkdir()
    program = disk.parent / "bin/ssh"
    program.write_text(SSH.format(here=disk.parent))
    program.chmod(0o755)
    for host in ("b", "c"):
        other = Path(f"{disk}.{host}")
        other.mkdir()
        look(other / KEY)
    return subprocess.run(
        ["bash", STAGE, "send", "-", disk / KEY, BYTES, IMAGE_ID, shared, "b", "c"],
        env={"PATH": f"{disk.parent / 'bin'}:{os.environ['PATH']}"},
        capture_output=True,
        timeout=60,
        check=False,
    ).returncode


@pytest.mark.parametrize("has_it", [False, True])
def test_a_node_sends_its_copy_to_others_and_takes_the_shared_image_only_if_it_has_none(
    disk: Path, tmp_path: Path, has_it: bool
) -> None:
    look(disk / KEY)
    image = sif(tmp_path / "image.sif")
    if has_it:
        (disk / KEY / "image.sif").write_bytes(image.read_bytes())
    assert sent(disk, tmp_path / "gone.sif" if has_it else image) == 0
    for place in (disk, Path(f"{disk}.b"), Path(f"{disk}.c")):
        assert (place / KEY / "image.sif").read_bytes() == image.read_bytes()


def test_a_node_sends_nothing_that_somebody_else_could_have_put_there(disk: Path, tmp_path: Path) -> None:
    (disk / KEY).mkdir(mode=0o755)
    sif(disk / KEY / "image.sif")
    assert sent(disk, sif(tmp_path / "image.sif")) != 0
    assert not (tmp_path / "ssh").exists()


def test_what_sends_ends_when_the_copies_are_removed(disk: Path, tmp_path: Path) -> None:
    """The ssh that has started it may be gone long before."""
    look(disk / KEY)
    sif(disk / KEY / "image.sif")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/ssh").write_text(f"#!/bin/sh\ntouch '{tmp_path}/sends'\nexec sleep 60\n")
    (tmp_path / "bin/ssh").chmod(0o755)
    words: list[str | Path] = ["timeout", "50", "bash", STAGE, "send", "-", disk / KEY, BYTES, IMAGE_ID]
    with subprocess.Popen(
        [*words, tmp_path / "gone.sif", "b"],
        env={"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"},
        stdin=subprocess.DEVNULL,
    ) as process:
        until((tmp_path / "sends").exists, "the copy")
        stage("remove", disk / KEY)
        assert process.wait(20) != 0
    assert list(disk.iterdir()) == []


def test_a_node_that_cannot_read_the_shared_image_sends_nothing(disk: Path, tmp_path: Path) -> None:
    look(disk / KEY)
    assert sent(disk, tmp_path / "gone.sif") != 0
    assert not (tmp_path / "ssh").exists()


# --- behind it ----------------------------------------------------------------------------------------------------


def test_a_whole_copy_counts(disk: Path) -> None:
    look(disk / KEY)
    sif(disk / KEY / "image.sif")
    assert check(disk / KEY) == "have"


def test_a_copy_of_a_second_broadcast_gets_the_name_by_which_it_is_known(disk: Path) -> None:
    look(disk / KEY)
    sif(disk / KEY / "image.sif.1", missing=1)
    sif(disk / KEY / "image.sif.2")
    assert check(disk / KEY) == "have"
    assert sorted(path.name for path in (disk / KEY).iterdir()) == ["checked", "image.sif", "lock", "node"]


def test_of_two_whole_copies_one_stays(disk: Path) -> None:
    look(disk / KEY)
    for number in (1, 2):
        sif(disk / KEY / f"image.sif.{number}")
    assert check(disk / KEY) == "have"
    assert sorted(path.name for path in (disk / KEY).iterdir()) == ["checked", "image.sif", "lock", "node"]


def test_a_copy_of_an_image_that_was_rebuilt_meanwhile_is_named(disk: Path) -> None:
    look(disk / KEY)
    image = bytearray(sif(disk / KEY / "image.sif").read_bytes())
    image[48] ^= 1
    (disk / KEY / "image.sif").write_bytes(image)
    assert check(disk / KEY) == "unfit its copy is of another image than the job began with"


def test_a_copy_that_was_looked_at_counts_as_used(disk: Path) -> None:
    look(disk / KEY)
    sif(disk / KEY / "image.sif")
    os.utime(disk / KEY / "lock", (0, 0))
    assert check(disk / KEY) == "have"
    assert abs((disk / KEY / "lock").stat().st_mtime - time.time()) < 60


def test_a_copy_that_is_cut_is_removed(disk: Path) -> None:
    look(disk / KEY)
    sif(disk / KEY / "image.sif", missing=1)
    assert check(disk / KEY) == "unfit its copy is not whole (1127 of 1128 bytes)"
    assert list(disk.iterdir()) == []


def test_a_copy_with_other_contents_is_removed_if_digests_are_compared(disk: Path) -> None:
    look(disk / KEY)
    sif(disk / KEY / "image.sif")
    assert check(disk / KEY, "0" * 64).startswith("unfit the SHA-256 of its copy is ")
    assert list(disk.iterdir()) == []


@pytest.mark.parametrize(("failed", "left"), [("b\nc", []), ("b\na", ["image.sif.1"])])
def test_what_a_broadcast_that_is_repeated_has_left_is_removed_where_it_had_not_failed(
    disk: Path, failed: str, left: list[str]
) -> None:
    """There it is said how much came."""
    look(disk / KEY)
    (disk / KEY / "image.sif.1").touch()
    stage("clear", disk / KEY, failed)
    assert sorted(path.name for path in (disk / KEY).iterdir()) == [*left, "lock", "node"]


def test_what_a_look_that_was_ended_has_made_is_removed(disk: Path) -> None:
    (disk / KEY).mkdir(mode=0o700)
    stage("remove", disk / KEY)
    assert list(disk.iterdir()) == []


@pytest.mark.parametrize("what", ["check", "clear"])
def test_nothing_is_removed_where_somebody_else_could_have_put_a_link(
    disk: Path, tmp_path: Path, what: str
) -> None:
    """Also on a node that was found unfit for it: all are asked."""
    mine = tmp_path / "containers"
    mine.mkdir()
    for name in ("image.sif", "image.sif.json"):
        (mine / name).write_text("mine")
    (disk / KEY).symlink_to(mine)
    assert look(disk / KEY).startswith("unfit ")
    if what == "check":
        assert check(disk / KEY) == "unfit it got no copy"
    else:
        stage("clear", disk / KEY)
    assert sorted(path.name for path in mine.iterdir()) == ["image.sif", "image.sif.json"]


def test_a_node_that_got_none_says_so(disk: Path) -> None:
    look(disk / KEY)
    assert check(disk / KEY) == "unfit it got no copy"


# --- containers/run.sh --------------------------------------------------------------------------------------------


@pytest.fixture
def copy(disk: Path) -> Path:
    look(disk / KEY)
    image = sif(disk / KEY / "image.sif")
    assert check(disk / KEY) == "have"
    return image


def options(copy: Path) -> list[str]:
    return ["--staged", str(copy.parent), BYTES, IMAGE_ID]


def image_used(node: Node) -> str:
    argv = node.argv()
    return str(argv[argv.index("/bin/sh") - 1])


def test_a_task_runs_from_its_nodes_copy_and_removes_it_at_the_end(node: Node, copy: Path) -> None:
    node.python(f"flock -n -x '{copy.parent}/lock' true; echo $?")
    ended = node.task(*options(copy))
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "1\n", "")
    assert image_used(node) == str(copy)
    assert not copy.parent.exists()


@pytest.mark.parametrize(("status", "stays"), [(0, False), (1, False), (75, False), (69, True)])
def test_it_stays_if_another_attempt_may_follow(node: Node, copy: Path, status: int, stays: bool) -> None:
    node.python(f"exit {status}")
    assert node.task(*options(copy)).returncode == status
    assert copy.exists() == stays


def test_the_last_task_of_a_node_removes_it(node: Node, copy: Path) -> None:
    node.python("exit 0")
    with (copy.parent / "lock").open() as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        node.task(*options(copy))
        assert (image_used(node), copy.exists()) == (str(copy), True)
    node.task(*options(copy), SLURM_LOCALID="1")
    assert not copy.parent.exists()


@pytest.mark.parametrize("what", ["checked", "node"])
def test_a_copy_that_nobody_looked_at_or_of_another_node_is_not_used(
    node: Node, copy: Path, what: str
) -> None:
    node.python("exit 0")
    if what == "checked":
        (copy.parent / what).unlink()
    else:
        (copy.parent / what).write_text("gpu-b07 1234\n")
    ended = node.task(*options(copy))
    assert (ended.returncode, ended.stderr, image_used(node)) == (0, "", str(node.image))
    assert copy.exists() == (what == "node")


def test_without_a_copy_the_shared_image_is_read(node: Node, disk: Path) -> None:
    node.python("exit 0")
    ended = node.task("--staged", str(disk / KEY), BYTES, IMAGE_ID)
    assert (ended.returncode, ended.stderr, image_used(node)) == (0, "", str(node.image))


def test_a_copy_that_is_not_whole_is_removed_and_the_shared_image_is_read(node: Node, copy: Path) -> None:
    node.python("exit 0")
    sif(copy, missing=5)
    ended = node.task(*options(copy))
    assert said(ended) == (
        f"its copy of the image in {copy.parent} is not whole: the image is read from {node.image}"
    )
    assert (ended.returncode, image_used(node), copy.parent.exists()) == (0, str(node.image), False)


def test_a_task_that_is_cancelled_removes_it(node: Node, copy: Path, tmp_path: Path) -> None:
    node.python(f"touch '{tmp_path}/began'; exec sleep 60")
    with subprocess.Popen(
        [RUN_SH, *options(copy), str(node.image), "python"],
        cwd=node.work,
        env=node.environment({}),
        stdin=subprocess.DEVNULL,
    ) as process:
        until((tmp_path / "began").exists, "the task")
        process.terminate()
        assert process.wait(60) == 143
    assert not copy.parent.exists()


def test_showing_what_would_run_leaves_it(node: Node, copy: Path) -> None:
    ended = node.call(["--show", *options(copy), node.image, "python"])
    assert f"image    {copy} (sif {IMAGE_ID})" in ended.stdout
    assert copy.exists()


def test_a_directory_of_another_name_is_never_removed(node: Node, disk: Path) -> None:
    folder = disk / "mine"
    folder.mkdir(mode=0o700)
    node.python("exit 0")
    node.task("--staged", str(folder), BYTES, IMAGE_ID)
    assert folder.exists()
