"""host/image.sh, through containers/run.sh: the program, and the image."""

import itertools
import os
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from tests.unit.bounds import shorten
from tests.unit.host.node import (
    ARCHITECTURES,
    BOUND,
    HAS_DRIVER,
    NODE,
    NV,
    OF_CHECKOUT,
    RUN_SH,
    Node,
    bound,
    said,
    sif,
)


@pytest.mark.parametrize("ours", [True, False])
def test_an_image_that_is_not_ours_finds_our_packages_in_the_checkout_and_nothing_else_of_it(
    node: Node, ours: bool
) -> None:
    env = {"FAKE_STACK": "/opt/stack.json"} if ours else {}
    assert node.inside(**env).get("PYTHONPATH") == (None if ours else "/.apptrain")
    assert node.binds() == [bound(node.work)]


TELL = '[ "$1" = -PSc ] || echo "$0 $*"'


@pytest.mark.parametrize("name", ["python", "python3"])
def test_an_image_that_is_not_ours_may_have_python_as_python3_alone(node: Node, name: str) -> None:
    node.image_has(**{name: TELL})
    line = ("-P", "-m", "entrypoint", "launch", "--", "a b.py")
    assert node.run("python", *line).stdout == f"{node.of_image}/{name} {' '.join(line)}\n"


def test_python_is_python_where_the_image_has_both(node: Node) -> None:
    node.image_has(python=TELL, python3="exit 1")
    assert node.run("python", "my.py").stdout == f"{node.of_image}/python my.py\n"


@pytest.mark.parametrize("module", ["entrypoint", "entrypoint.cli.embedded"])
@pytest.mark.parametrize("name", ["python", "python3", "nothing"])
def test_an_image_whose_python_is_too_old_or_missing_is_refused(node: Node, name: str, module: str) -> None:
    node.image_has(**{name: 'echo "Unknown option: $1" >&2; exit 2'})
    ended = node.run("python", "-P", "-m", module)
    assert (ended.returncode, ended.stdout) == (64, "")
    assert said(ended) == (
        f"the image {node.image} has no Python 3.11 or newer, as python or python3: give another image"
    )


def test_an_image_of_ours_is_not_asked_how_old_its_python_is(node: Node) -> None:
    node.image_has(python='echo "$*"')
    ended = node.run("python", "-P", "-m", "entrypoint", FAKE_STACK="/opt/stack.json")
    assert (ended.stdout, ended.stderr) == ("-P -m entrypoint\n", "")


def test_a_program_of_the_users_is_not_taken_for_python(node: Node) -> None:
    node.image_has(tell='echo "$*"')
    assert node.run("tell", "-P", "-m", "x").stdout == "-P -m x\n"


def test_the_command_line_is_this(node: Node) -> None:
    assert node.run("python3", "-V").returncode == 0
    argv = node.argv()
    tmp = argv[-3]
    assert re.fullmatch(rf"{node.disk}/apptrain\.\w{{6}}/\.start", tmp)
    assert argv == [
        *("-q", "exec", "--cleanenv", "--no-eval", "--no-mount", "home,cwd,tmp"),
        *NV,
        *(word for mount in [*node.always(), bound(node.work), *OF_CHECKOUT] for word in ("--mount", mount)),
        *("--pwd", str(node.work), str(node.image), "/bin/sh", tmp, "python3", "-V"),
    ]


def test_without_apptainer_it_is_refused(node: Node) -> None:
    node.apptainer.unlink()
    assert node.refused(node.run("true")) == (
        "neither apptainer nor singularity is in PATH: load the site's module, or set APPTRAIN_APPTAINER"
    )


def test_apptainer_may_be_named(node: Node) -> None:
    elsewhere = node.programs / "opt" / "app tainer"
    elsewhere.parent.mkdir()
    node.apptainer.rename(elsewhere)
    (node.programs / "opt" / "libexec").symlink_to(node.programs / "libexec")
    assert node.run("true", APPTRAIN_APPTAINER=str(elsewhere)).returncode == 0
    ended = node.run("true", APPTRAIN_APPTAINER="/no/such")
    assert (
        said(ended)
        == "APPTRAIN_APPTAINER=/no/such is no program here: give apptainer's or singularity's path"
    )


def test_another_program_of_that_name_is_refused(node: Node) -> None:
    ended = node.run("true", APPTRAIN_APPTAINER="/bin/true")
    assert node.refused(ended) == (
        "/bin/true does not say what it is (`buildcfg`): set APPTRAIN_APPTAINER to apptainer or singularity"
    )


def test_what_is_wrong_with_the_image_is_said_while_apptainer_still_says_what_it_is(node: Node) -> None:
    slow = node.programs / "slow"
    slow.write_text(f'#!/bin/sh\nsleep 3\nexec "{node.apptainer}" "$@"\n')
    slow.chmod(0o700)
    node.env["APPTRAIN_APPTAINER"] = str(slow)
    whole = node.image.read_bytes()
    node.image.write_bytes(b"no image")
    assert node.refused(node.run("true")).startswith(f"{node.image} is no SIF file")
    node.image.write_bytes(whole)
    assert node.run("true").returncode == 0


@pytest.mark.parametrize(
    ("size", "age", "is_asked"),
    [(2_000_000, 0, False), (2_000_001, 0, True), (2_000_000, 1, True), (2_000, 0, True)],
    ids=["the same program", "another", "another of as many bytes", "a script may start any"],
)
def test_what_apptainer_has_said_on_another_node_is_taken_from_the_same_program_alone(
    node: Node, size: int, age: int, is_asked: bool
) -> None:
    asked = node.programs / "asked"
    text = node.apptainer.read_text().replace("printf", f": >'{asked}'; printf", 1) + "exit\n"
    node.apptainer.write_text(text.ljust(size, "#"))
    os.utime(node.apptainer, (1e9, 1e9 + age))
    size = min(size, 2_000_000)
    line = f"{size}:1000000000 apptainer 1.4.5 {node.programs / 'libexec'}"
    told = node.programs / "told"
    ended = node.call(["--tell", str(told), "--known", line, node.image, "true"])
    assert (ended.returncode, ended.stderr, asked.exists()) == (0, "", is_asked)
    now = node.apptainer.stat().st_size
    assert told.exists() == (is_asked and now > 1_000_000)
    if told.exists():
        assert told.read_text() == f"{now}:{10**9 + age} {line.partition(' ')[2]}"
    ended = node.call(["--known", line.replace(" 1.4.5 ", " 1.1.9 "), node.image, "true"])
    assert ended.returncode == (0 if is_asked else 64)


def test_what_apptainer_says_need_not_be_left(node: Node) -> None:
    node.apptainer.write_text((node.apptainer.read_text() + "exit\n").ljust(2_000_000, "#"))
    told = node.programs / "told"
    told.symlink_to("/dev/full")
    ended = node.call(["--tell", str(told), node.image, "true"])
    assert (ended.returncode, ended.stderr, told.is_symlink()) == (0, "", False)


@pytest.mark.ci_may_skip("it is about root")
@pytest.mark.skipif(os.geteuid() != 0, reason="others may not make user namespaces everywhere")
@pytest.mark.parametrize("user", [0, 1000])
def test_without_user_namespaces_and_setuid_only_root_runs_an_image(node: Node, user: int) -> None:
    (node.programs / "libexec/apptainer/bin/starter-suid").unlink()
    none_left = 'echo 0 >/proc/sys/user/max_user_namespaces && exec "$@"'
    inside = ["unshare", "--user", f"--map-user={user}", "--keep-caps", "sh", "-c", none_left, "sh"]
    line = [*inside, str(RUN_SH), str(node.image), "echo", "ran"]
    ended = subprocess.run(line, cwd=node.work, env=node.env, capture_output=True, text=True, timeout=BOUND)
    if user == 0:
        assert (ended.returncode, ended.stdout) == (0, "ran\n"), ended.stderr
    else:
        assert "this node allows no user namespaces (/proc/sys/user/max_user_namespaces is 0)" in said(ended)


@pytest.mark.parametrize(
    ("name", "version", "least"),
    [
        ("apptainer", "1.1.9-1.el8", "1.2"),
        ("singularity-ce", "3.9.9", "3.10"),
        ("singularity-pro", "3.9-4", "3.10"),
    ],
)
def test_an_old_version_is_refused(node: Node, name: str, version: str, least: str) -> None:
    assert node.refused(node.run("true", FAKE_NAME=name, FAKE_VERSION=version)) == (
        f"{node.apptainer} is {name} {version}: {least} or newer is needed, for --no-eval: load a newer module, "
        "or give another in APPTRAIN_APPTAINER"
    )


def test_a_program_that_says_it_is_another_is_refused_with_what_it_says(node: Node) -> None:
    assert node.refused(node.run("true", FAKE_NAME="charliecloud")) == (
        f"{node.apptainer} says that it is charliecloud (`buildcfg`): set APPTRAIN_APPTAINER to apptainer or singularity"
    )


@pytest.mark.parametrize("name", ["singularity", "singularity-ce", "singularity-pro"])
def test_every_edition_of_singularity_is_known(node: Node, name: str) -> None:
    node.setuid("singularity")
    ended = node.run("true", FAKE_NAME=name, FAKE_VERSION="4.1.6-pro1.el9")
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_starter_without_its_setuid_bit_is_not_asked_for(node: Node) -> None:
    (node.programs / "libexec/apptainer/bin/starter-suid").chmod(0o755)
    as_another = ["unshare", "--user", "--map-user=1000", "--keep-caps"] if os.geteuid() == 0 else []
    line = [*as_another, str(RUN_SH), str(node.image), "echo", "ran"]
    env = {**node.env, "APPTRAIN_UNPACK": "1"}
    ended = subprocess.run(line, cwd=node.work, env=env, capture_output=True, text=True, timeout=BOUND)
    assert (ended.returncode, ended.stdout) == (0, "ran\n"), ended.stderr
    assert "starter-suid has no setuid bit: apptainer is called with --userns\n" in ended.stderr
    assert "--userns" in node.argv()


def test_options_of_the_profile_are_apptainers_and_take_the_place_of_ours(node: Node) -> None:
    (node.programs / "libexec/apptainer/bin/starter-suid").chmod(0o755)
    as_another = ["unshare", "--user", "--map-user=1000", "--keep-caps"] if os.geteuid() == 0 else []
    options = ["--option", "--fakeroot", "--option", "--userns"]
    line = [*as_another, str(RUN_SH), *options, str(node.image), "echo", "ran"]
    env = {**node.env, "APPTRAIN_UNPACK": "1"}
    ended = subprocess.run(line, cwd=node.work, env=env, capture_output=True, text=True, timeout=BOUND)
    assert (ended.returncode, ended.stdout) == (0, "ran\n"), ended.stderr
    assert "is called with" not in ended.stderr
    argv = node.argv()
    assert [word for word in argv if word in ("--fakeroot", "--userns")] == ["--fakeroot", "--userns"]


def test_wrappers_start_the_command_one_in_the_other(node: Node) -> None:
    outer = node.program("outer", '#!/bin/sh\nexport ADAPTED=yes\nexec "$@"\n')
    inner = node.program("inner", '#!/bin/sh\necho "$ADAPTED: $*"\nexec "$@"\n')
    node.python("echo ran with $ADAPTED")
    ended = node.task("--wrapper", outer, "--wrapper", inner)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "yes: python\nran with yes\n", "")


def test_a_wrapper_that_the_image_lacks_is_named(node: Node) -> None:
    ended = node.task("--wrapper", "/host/adapt.sh")
    assert (ended.returncode, ended.stdout) == (64, "")
    assert said(ended) == (
        "the profile's container wrappers: /host/adapt.sh is no program in the image: load the module that brings it "
        "(container modules, obey_binds), or leave it out"
    )


@pytest.mark.parametrize(("version", "options"), [("4.1.0", ["--tmp-sandbox"]), ("3.11.4-1.el8", [])])
def test_singularity_is_used_with_its_own_names(node: Node, version: str, options: list[str]) -> None:
    node.setuid("singularity")
    node.apptainer.rename(node.bin / "singularity")
    how = {"FAKE_NAME": "singularity-ce", "FAKE_VERSION": version, "APPTRAIN_UNPACK": "1"}
    ended = node.run("sh", "-c", "echo $HF_X", HF_X="a b", **how)
    assert (ended.returncode, ended.stdout) == (0, "a b\n")
    assert node.argv()[6 + len(NV) : 6 + len(NV) + len(options) + 1] == [*options, "--mount"]
    assert not any(name.startswith("APPTAINER") for name in node.calls()[0]["own"])


def test_singularity_without_setuid_unpacks_before_4_1(node: Node) -> None:
    squashfuse = node.programs / "libexec" / "singularity" / "bin" / "squashfuse_ll"
    squashfuse.parent.mkdir(parents=True)
    squashfuse.touch(mode=0o755)
    ended = node.run("true", FAKE_NAME="singularity-ce", FAKE_VERSION="4.0.3")
    if "/dev/fuse may not be opened" not in ended.stderr:
        assert said(ended).startswith(
            "this node does not mount the image (singularity 4.0.3 mounts only where it is setuid): unpacking it to "
        )


def test_a_missing_image_is_refused(node: Node) -> None:
    ended = node.run("true", image=node.path / "none.sif")
    assert node.refused(ended) == (
        f"there is no image {node.path}/none.sif on this node, or its directory may not be searched: correct the "
        "path (all nodes must share it), give another in APPTRAIN_IMAGE, or build one (make image); for a URL give the "
        "file that apptainer pull makes"
    )


def test_an_image_that_is_a_fifo_is_refused_at_once(node: Node) -> None:
    os.mkfifo(node.path / "pipe")
    ended = node.run("true", image=node.path / "pipe")
    assert node.refused(ended) == f"the image {node.path}/pipe is no file: give a SIF file"


@pytest.mark.parametrize(
    "content", [b"", b"short", b"#!/bin/sh\n" * 100, bytes(1000), bytes(32) + b"SIF_MAGIC\0" + bytes(85)]
)
def test_an_image_that_is_no_sif_is_refused(node: Node, content: bytes) -> None:
    file = node.path / "file"
    file.write_bytes(content)
    ended = node.run("true", image=file)
    assert node.refused(ended) == f"{file} is no SIF file: give one, such as make image makes"


OTHERS = [(b"11", ""), *((arch, name) for name, arch in ARCHITECTURES.items() if name != os.uname().machine)]


@pytest.mark.parametrize(("arch", "named"), OTHERS)
def test_an_image_for_another_processor_is_refused(node: Node, arch: bytes, named: str) -> None:
    machine = os.uname().machine
    image = sif(node.path / "other.sif", arch=arch)
    ended = node.run("true", image=image)
    shown = f" ({named})" if named else ""
    assert node.refused(ended) == (
        f"the image {image} is for another kind of processor{shown} than this node's {machine}: "
        "take one for it, or make one on such a node"
    )


def test_an_image_of_no_said_processor_is_left_to_apptainer(node: Node) -> None:
    assert node.run("true", image=sif(node.path / "unknown.sif", arch=b"00")).returncode == 0


def test_an_image_that_was_cut_off_is_refused(node: Node) -> None:
    image = sif(node.path / "cut.sif", missing=1)
    ended = node.run("true", image=image)
    assert (
        node.refused(ended)
        == f"the image {image} is cut off: it has 1127 of 1128 bytes: copy or make it again"
    )


def test_an_unpacked_image_is_taken_and_another_directory_refused(node: Node) -> None:
    folder = node.path / "unpacked"
    folder.mkdir()
    ended = node.run("true", image=folder)
    assert node.refused(ended) == (
        f"{folder} is a directory, but no unpacked image (it has no .singularity.d): give a SIF file"
    )
    (folder / ".singularity.d").mkdir()
    ended = node.run("sh", "-c", 'echo "${APPTRAIN_IMAGE_ID-none}"', image=folder, APPTRAIN_UNPACK="1")
    assert (ended.stdout, ended.stderr) == ("none\n", "")
    assert "--unsquash" not in node.argv()


def test_the_image_is_unpacked_on_request(node: Node) -> None:
    ended = node.run("true", APPTRAIN_UNPACK="1")
    assert ended.returncode == 0
    assert re.fullmatch(
        rf"this node does not mount the image \(APPTRAIN_UNPACK=1\): unpacking it to {node.disk}/apptrain\.\w{{6}}, "
        "about 1 MB, for this run",
        said(ended),
    )
    assert "--unsquash" in node.argv()
    assert node.calls()[0]["own"]["APPTAINER_TMPDIR"].startswith(f"{node.disk}/apptrain.")


def test_what_is_neither_a_wish_to_unpack_nor_not_is_refused(node: Node) -> None:
    assert node.refused(node.run("true", APPTRAIN_UNPACK="yes")) == "APPTRAIN_UNPACK=yes: must be 1 or 0"


def test_the_users_own_place_for_unpacking_is_kept(node: Node) -> None:
    assert node.run("true", APPTRAIN_UNPACK="1", APPTAINER_TMPDIR=str(node.home)).returncode == 0
    assert node.calls()[0]["own"]["APPTAINER_TMPDIR"] == str(node.home)
    ended = node.run("true", APPTRAIN_UNPACK="1", APPTAINER_TMPDIR="/no/where")
    assert (ended.returncode, said(ended)) == (
        64,
        "APPTAINER_TMPDIR /no/where is no directory that may be written: correct it, or use a directory that all "
        "nodes share",
    )


def test_without_room_to_unpack_it_is_refused(node: Node) -> None:
    size = shutil.disk_usage(node.disk).free
    image = sif(node.path / "large.sif", data=0)
    with image.open("r+b") as file:
        file.seek(112)
        file.write(struct.pack("<qq", 128, size - 128))
        file.truncate(size)
    ended = node.run("true", image=image, APPTRAIN_UNPACK="1")
    text = node.refused(ended)
    free = re.search(r"has (\d+) MB free", text)
    assert free
    place = re.search(rf"{node.disk}/apptrain\.\w{{6}}", text)
    assert place
    assert text == (
        f"this node does not mount the image (APPTRAIN_UNPACK=1), and {place[0]}, where it would be unpacked, has "
        f"{free[1]} MB free of the {size * 2 // 10**6 + 1} MB needed: give a larger node-local directory in "
        "APPTAINER_TMPDIR"
    )


def test_a_mount_that_fails_is_followed_by_unpacking(node: Node) -> None:
    ended = node.run("echo", "it ran", FAKE_MOUNT="fails")
    assert (ended.returncode, ended.stdout) == (0, "it ran\n")
    assert re.fullmatch(
        "FATAL:   container creation failed: image driver mount failure: squashfuse_ll exited: fuse: no luck\n"
        rf"apptrain: {NODE}: this node does not mount the image \(fuse: no luck\): unpacking it to \S+, about 1 MB, for this run "
        r"\(APPTRAIN_UNPACK=1 does so without trying\)\n",
        ended.stderr,
    )
    assert ["--unsquash" in call["argv"] for call in node.calls()] == [False, False, True]


IN_10_S = (
    "FATAL:   container creation failed: mount hook function failure: mount /proc/self/fd/3->/rootfs error: "
    "while mounting image /proc/self/fd/3: squashfuse_ll failed to mount /proc/self/fd/3 in 10s"
)
REFUSED_BY_1_2 = (
    "FATAL:   container creation failed: mount hook function failure: mount /proc/self/fd/3->/rootfs error: "
    "while mounting image /proc/self/fd/3: squashfuse_ll exited with status 255: fusermount: mount failed: "
    "Operation not permitted"
)


@pytest.mark.parametrize(
    ("says", "why"),
    [(REFUSED_BY_1_2, "fusermount: mount failed: Operation not permitted"), (IN_10_S, "not done in 10s")],
)
def test_a_mount_that_fails_twice_is_followed_by_unpacking_in_the_words_of_all_versions(
    node: Node, says: str, why: str
) -> None:
    ended = node.run("echo", "it ran", FAKE_MOUNT="fails", FAKE_SAYS=says)
    assert (ended.returncode, ended.stdout) == (0, "it ran\n")
    first, second = ended.stderr.splitlines()
    assert first == says
    assert f": this node does not mount the image ({why}): unpacking it to " in second
    assert ["--unsquash" in call["argv"] for call in node.calls()] == [False, False, True]


def copy_of_host_half(checkout: Path) -> None:
    """What run.sh needs of a checkout."""
    ours = RUN_SH.parents[1]
    shutil.copytree(ours / "host", checkout / "host")
    for name in ("containers/run.sh", "entrypoint/plan/passed.txt", "entrypoint/doctor/room.txt"):
        (checkout / name).parent.mkdir(parents=True)
        shutil.copy(ours / name, checkout / name)


@pytest.fixture
def hasty(node: Node, tmp_path: Path) -> Path:
    """run.sh of a checkout in which a mount may take a second."""
    checkout = tmp_path / "hasty"
    copy_of_host_half(checkout)
    shorten(checkout / "host/image.sh", MOUNT_LIMIT=1)
    node.env["FAKE_SAYS"] = IN_10_S
    return checkout / "containers/run.sh"


def hasty_run(node: Node, run_sh: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [run_sh, node.image, "echo", "it ran"],
        cwd=node.work,
        env={**node.env, **env},
        capture_output=True,
        text=True,
        timeout=BOUND,
    )


def test_a_mount_that_took_too_long_is_tried_once_more(node: Node, hasty: Path) -> None:
    ended = hasty_run(node, hasty, FAKE_MOUNT="1", FAKE_TAKES="2.5")
    assert (ended.returncode, ended.stdout) == (0, "it ran\n")
    assert (
        "the image was not mounted in time: it is tried once more (APPTRAIN_UNPACK=1 unpacks" in ended.stderr
    )
    assert ["--unsquash" in call["argv"] for call in node.calls()] == [False, False, False]


def test_a_mount_that_takes_too_long_again_is_followed_by_unpacking(node: Node, hasty: Path) -> None:
    ended = hasty_run(node, hasty, FAKE_MOUNT="1,3", FAKE_TAKES="2.5")
    assert (ended.returncode, ended.stdout) == (0, "it ran\n")
    assert "does not mount the image (it took apptainer too long, twice): unpacking it to " in ended.stderr
    assert ["--unsquash" in call["argv"] for call in node.calls()] == [False, False, False, True]


def test_a_mount_that_does_not_end_is_not_waited_for(node: Node, hasty: Path) -> None:
    shorten(hasty.parents[1] / "host/image.sh", MOUNT_BOUND=2)
    ended = hasty_run(node, hasty, FAKE_MOUNT="1,2", FAKE_TAKES="1.2,60")
    assert (ended.returncode, ended.stdout) == (0, "it ran\n")
    assert "does not mount the image (it takes more than 2 s): unpacking it to " in ended.stderr


def test_what_cmd_says_of_a_mount_starts_nothing_again(node: Node) -> None:
    ended = node.run("sh", "-c", f"echo '{IN_10_S}' >&2; exit 255")
    assert (ended.returncode, ended.stderr) == (255, f"{IN_10_S}\n")
    assert len(node.calls()) == 1


def test_unpacking_that_fails_is_the_end(node: Node) -> None:
    ended = node.run("true", APPTRAIN_UNPACK="1", FAKE_STATUS="255")
    assert ended.returncode == 255
    assert len(node.calls()) == 1


def test_apptainers_own_failure_keeps_its_status(node: Node) -> None:
    ended = node.run("true", FAKE_STATUS="255")
    assert ended.returncode == 255
    assert ended.stderr == (
        "FATAL:   something of Apptainer's own\n"
        f"apptrain: {NODE}: apptainer ended with status 255 before CMD began: its own message stands above\n"
    )


@pytest.mark.parametrize("arguments", [[], ["image.sif"], ["--show", "image.sif"]])
def test_the_usage_is_said(node: Node, arguments: list[str]) -> None:
    ended = node.call(arguments)
    assert (ended.returncode, said(ended)) == (
        64,
        "usage: containers/run.sh [--show | --help] [OPTION...] IMAGE CMD [ARG...]",
    )


@pytest.mark.skipif(HAS_DRIVER, reason="this machine has an NVIDIA driver")
@pytest.mark.ci_may_skip("a machine with an NVIDIA driver; tests/cluster has the same on a node of its own")
def test_forward_compatibility_without_a_driver_is_said_and_not_used(node: Node) -> None:
    ended = node.run("sh", "-c", 'echo "${LD_LIBRARY_PATH-none}"', APPTRAIN_CUDA_COMPAT="/no/where")
    assert (ended.returncode, ended.stdout) == (0, "none\n")
    assert said(ended) == "APPTRAIN_CUDA_COMPAT=/no/where is not used: no NVIDIA driver here"


def test_gpus_without_a_driver_are_said_unless_the_run_is_on_cpus(node: Node) -> None:
    node.python("true")
    warning = (
        f"apptrain: {NODE}: GPUs were granted (CUDA_VISIBLE_DEVICES=0,1), but this node has no NVIDIA driver "
        "(/proc/driver/nvidia/version): CMD will see none\n"
    )
    for options, text in (((), warning), (("--cpu",), ""), (("--quiet",), "")):
        ended = node.task(*options, CUDA_VISIBLE_DEVICES="0,1")
        assert (ended.returncode, ended.stderr) == (0, text)


@pytest.mark.parametrize("option", ["--bnid", "--run-dir", "--bind"])
def test_an_unknown_option_is_refused_and_one_without_its_value_is_the_usage(node: Node, option: str) -> None:
    said_of = node.refused(node.call([option]))
    if option == "--bind":
        assert said_of == "usage: containers/run.sh [--show | --help] [OPTION...] IMAGE CMD [ARG...]"
    else:
        assert said_of == f"{option} is no option of run.sh: an option of CMD comes behind it"


def test_a_quiet_run_says_only_why_it_cannot_run(node: Node) -> None:
    node.python("true")
    folder = node.path / "not here"
    assert node.task("--quiet", TRITON_CACHE_DIR="/x").stderr == ""
    ended = node.task("--quiet", "--bind", "the data", folder)
    assert said(ended).startswith(f"the data {folder} is not there on this node: ")


@pytest.mark.parametrize(
    ("rooms", "says"),
    [
        ("# MB\n\nTMPDIR 900000000000\n/dev/shm 1\n", "{tmp} has less than 900000000000 MB free"),
        ("/dev/shm 1\n", "{rooms} is not there or cannot be read: use a whole checkout"),
        ("TMPDIR 1\n/dev/shm a[1]\n", "{rooms} is not there or cannot be read: use a whole checkout"),
        (None, "{rooms} is not there or cannot be read: use a whole checkout"),
    ],
)
def test_how_much_room_a_run_needs_stands_in_the_file_that_the_doctor_reads(
    node: Node, tmp_path: Path, rooms: str | None, says: str
) -> None:
    checkout = tmp_path / "check"
    copy_of_host_half(checkout)
    file = checkout / "entrypoint/doctor/room.txt"
    file.unlink()
    if rooms is not None:
        file.write_text(rooms)
    ended = subprocess.run(
        [checkout / "containers/run.sh", node.image, "true"],
        cwd=node.work,
        env=node.env,
        capture_output=True,
        text=True,
        timeout=BOUND,
    )
    assert ended.returncode == 64
    assert said(ended).startswith(says.format(tmp=node.env["TMPDIR"], rooms=file))


def test_all_of_the_host_is_what_the_image_lacks_and_no_automounter(node: Node, tmp_path: Path) -> None:
    copy = tmp_path / "check" / "containers" / "run.sh"
    copy_of_host_half(tmp_path / "check")
    binds = tmp_path / "check" / "host" / "binds.sh"
    binds.write_text(binds.read_text().replace("/proc/self/mountinfo", f"{tmp_path}/mounts"))
    top = [
        str(path)
        for path in Path("/").iterdir()
        if path.is_dir() and path.name in ("work", "srv", "data", "root")
    ]
    (tmp_path / "mounts").write_text("")

    def shown() -> set[str]:
        line: list[str | Path] = [copy, "--all-of-host", node.image, "true"]
        ended = subprocess.run(
            line, cwd=node.work, env=node.env, capture_output=True, text=True, timeout=BOUND
        )
        assert ended.returncode == 0, ended.stderr
        words = [word for option, word in itertools.pairwise(node.argv()) if option == "--mount"]
        return {found[1] for word in words if (found := re.search(r'destination=([^"]*)"', word))}

    everything = shown()
    assert "/home" in everything
    of_image = {"/usr", "/etc", "/bin", "/lib", "/opt", "/var", "/run", "/boot", "/dev", "/proc", "/sys"}
    assert not of_image & everything
    assert {path for path in top if path == "/work"} <= everything
    (tmp_path / "mounts").write_text(
        "36 35 98:0 / /home rw,relatime shared:1 - autofs systemd-1 rw\n37 35 98:0 / /work rw - autofs auto.work rw\n"
    )
    assert not {"/home", "/work"} & shown()


def test_further_variables_pass_as_the_job_script_says(node: Node) -> None:
    node.python("env")
    ended = node.task("--pass", "MY_*", "--pass", "ONE", MY_X="1", ONE="2", TWO="3")
    lines = ended.stdout.splitlines()
    assert ({"MY_X=1", "ONE=2"} <= set(lines), "TWO=3" in lines) == (True, False)


# --- one function at a time -----------------------------------------------------------------------------------

START = """
set -euo pipefail
LC_ALL=C
SHARED='use another' tmp=$2 kind=sif unmounted='' signalled='' mount_tried='' status=255 run_at=100 userns='' options=()
apptainer=/a/apptainer image=/i.sif package=apptainer version=1.4.5 setuid='' libexec=/usr/libexec bytes=10000000
source "$1/host/common.sh"
source "$1/host/image.sh"
refuse() { shift; echo "refused: $*"; exit 0; }
say_for_node() { echo "says: $*"; }
read_clock() { seconds=$now; }
quote() { answer="'$1'"; }
find_free() { free=21; }
"""


def bash(script: str, folder: Path, env: dict[str, str] | None = None) -> str:
    """What these lines print, without a node."""
    return subprocess.run(
        ["bash", "-c", START + script, "bash", RUN_SH.parents[1], folder],
        env={"PATH": os.environ["PATH"], **(env or {})},
        capture_output=True,
        text=True,
        timeout=BOUND,
        check=True,
    ).stdout.rstrip("\n")


@pytest.mark.parametrize(
    ("version", "least", "fits"),
    [
        ("1.2", "1.2", True),
        ("1.1.9", "1.2", False),
        ("1.10.0", "1.2", True),
        ("2.0.0-rc.1", "1.2", True),
        ("3.9.9", "3.10", False),
        ("3.10.0+dirty", "3.10", True),
        ("4.1.0", "4.1", True),
        ("4.0.9", "4.1", False),
        ("", "1.2", False),
        ("unknown", "1.2", False),
    ],
)
def test_versions_are_compared_by_their_numbers(version: str, least: str, fits: bool, tmp_path: Path) -> None:
    assert bash(f"version={version}; is_at_least {least} && echo yes || true", tmp_path) == "yes" * fits


@pytest.mark.parametrize(
    ("machine", "code"),
    [("x86_64", "3032"), ("aarch64", "3034"), ("ppc64le", "3036"), ("riscv64", "3132"), ("s390x", "9999")],
)
def test_a_processor_has_its_code_in_a_sif_file_or_is_not_compared(
    machine: str, code: str, tmp_path: Path
) -> None:
    assert bash(f"uname() {{ echo {machine}; }}; sif_architecture 9999; echo $answer", tmp_path) == code


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ("", ""),
        ("kind=directory APPTRAIN_UNPACK=1", ""),
        ("APPTRAIN_UNPACK=1", "APPTRAIN_UNPACK=1"),
        ("APPTRAIN_UNPACK=1 setuid=yes", "APPTRAIN_UNPACK=1"),
        ("APPTRAIN_UNPACK=0", ""),
        ("APPTRAIN_UNPACK=yes", "refused: APPTRAIN_UNPACK=yes: must be 1 or 0"),
        ("has=''", "it has no squashfuse"),
        ("has='' setuid=yes", ""),
        ("package=singularity version=4.0.3", "singularity 4.0.3 mounts only where it is setuid"),
        ("package=singularity version=4.1.0", ""),
        ("package=singularity version=3.11.0 setuid=yes", ""),
    ],
)
def test_whether_a_node_mounts_the_image_is_seen_before(state: str, told: str, tmp_path: Path) -> None:
    script = f"""
        has=/usr/bin/squashfuse
        type() {{ [[ -n $has && $2 == "${{has##*/}}" ]] && echo "$has"; }}
        mounter=''
        {state or ":"}
        find_mount
        echo "$unmounted"
        [[ -n $unmounted || -n $setuid || $kind == directory || $mounter == "$has" ]]
        """
    if "setuid" not in state and "kind" not in state and not os.access("/dev/fuse", os.R_OK | os.W_OK):
        told = told if told and "singularity" not in told else "/dev/fuse may not be opened"
    assert bash(script, tmp_path) == told


@pytest.mark.parametrize(
    ("state", "option"),
    [
        ("", "--unsquash"),
        ("package=singularity version=4.1.0", "--tmp-sandbox"),
        ("package=singularity version=4.0.3", ""),
    ],
)
def test_each_program_has_its_own_option_to_unpack_if_it_needs_one(
    state: str, option: str, tmp_path: Path
) -> None:
    script = (
        f'prefix=X unpack=before unmounted=why; {state or ":"}; choose_unpacking; echo "<$unpack> $X_TMPDIR"'
    )
    says = f"says: this node does not mount the image (why): unpacking it to {tmp_path}, about 21 MB, for this run"
    assert bash(script, tmp_path) == f"{says}\n<{option}> {tmp_path}"
    tried = bash(f"mount_tried=yes; {script}", tmp_path)
    assert "for this run (APPTRAIN_UNPACK=1 does so without trying)\n" in tried
    less = bash(f"find_free() {{ free=20; }}; {script}", tmp_path)
    assert less.startswith("refused: this node does not mount the image (why), and ")
    assert "has 20 MB free of the 21 MB needed" in less


NO_LUCK = "FATAL: image driver mount failure: squashfuse_ll exited: fuse: no luck"


@pytest.mark.parametrize(
    ("state", "tried", "found"),
    [
        ("", f"echo '{NO_LUCK}'; exit 255", "failed unmounted=fuse: no luck again="),
        ("now=109", "exit 0", "failed unmounted= again=yes"),
        ("now=108", "exit 0", "no"),  # it was not the mount that took its time
        ("", "echo 'FATAL: something else'; exit 255", "no"),
        ("", "exit 124", "failed unmounted=it takes more than 60 s again="),
        ("", "exit 137", "failed unmounted=it takes more than 60 s again="),
        ("mount_tried=yes now=109", "exit 9", "failed unmounted=it took apptainer too long, twice again="),
        ("mount_tried=yes now=108", "exit 9", "no"),
        ("status=0", "exit 124", "no"),
        ("signalled=yes", "exit 124", "no"),
        ("touch=.started", "exit 124", "no"),
        ("kind=directory", "exit 124", "no"),
        ("unmounted=why", "exit 124", "no"),
        ("", "signal", "no"),
    ],
)
def test_a_start_that_failed_is_tried_again_if_it_was_the_mount(
    state: str, tried: str, found: str, tmp_path: Path
) -> None:
    """`signal`: one comes while the mount is tried, and asks the task to end."""
    script = f"""
        now=100 touch=none
        timeout() {{ if [[ "{tried}" == signal ]]; then signalled=yes; return 124; fi; ({"exit 9" if tried == "signal" else tried}); }}
        {state or ":"}
        if [[ $touch == .started ]]; then touch "$tmp/.started"; fi
        if mount_failed; then echo "failed unmounted=$unmounted again=$again"; else echo no; fi
        """
    assert bash(script, tmp_path).splitlines()[-1] == found


@pytest.mark.parametrize(
    ("program", "state", "is_shielded"),
    [
        ("/usr/bin/squashfuse_ll", "", True),
        ("/usr/libexec/squashfuse_ll", "", False),  # of Apptainer's own
        ("/usr/bin/squashfuse", "kind=directory", False),
        ("/usr/bin/squashfuse", "setuid=yes", False),
        ("/usr/bin/squashfuse", "unmounted=why", False),
    ],
)
def test_the_process_that_shows_the_image_outlives_signals_if_we_can_put_ours_before_it(
    program: str, state: str, is_shielded: bool, tmp_path: Path
) -> None:
    name = Path(program).name
    script = f"""
        mounter={program}
        {state or ":"}
        shield_mount
        echo "$shield"
        """
    assert bash(script, tmp_path) == (f"{tmp_path}/.mount" if is_shielded else "")
    file = tmp_path / ".mount" / name
    assert file.is_file() == is_shielded
    if is_shielded:
        assert file.read_text() == f'#!/bin/sh\ntrap "" HUP USR1 USR2 TERM\nexec \'{program}\' "$@"\n'
        assert os.access(file, os.X_OK)
