"""The pinned stacks and their locks."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from containers import debian, stacks, wheels
from containers.stacks import BuildRefused

BASE = stacks.find("").base

ARCHITECTURES = ("amd64", "arm64")


def test_the_stacks_are_the_newest_cuda_13_and_cuda_12_for_older_drivers_and_gpus() -> None:
    found = stacks.read()
    assert {name: (stack.cuda, stack.is_default) for name, stack in found.items()} == {
        "cu132": ("13.2", True),
        "cu128": ("12.8", False),
        "cu126": ("12.6", False),
    }
    assert stacks.find("").name == "cu132"
    assert stacks.find("cu126").image.name == "image-cu126.sif"
    assert stacks.find("cu132").image.name == "image.sif"
    assert "7.0" in stacks.find("cu128").compute_capability
    assert {"5.0", "6.0"} <= set(stacks.find("cu126").compute_capability)


def test_the_names_alone_are_those_of_all_stacks_however_an_entry_is_written(tmp_path: Path) -> None:
    assert stacks.names() == list(stacks.read())
    added = "\n  a.third-1:  # with a remark\n    cuda: '13.3'\n    megabytes: {image: 1}\n    torch: '3.0'\n"
    (tmp_path / "stacks.yaml").write_text(stacks.FILE.read_text() + added)
    assert stacks.names(tmp_path / "stacks.yaml") == [*stacks.read(), "a.third-1"]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('    nccl: "2.30.7"\n', "", "stacks cu132 nccl is missing: give text in quotes"),
        ("  suite:", "  suites:", "base suites is no key: give suite, python, packages"),
        ("default: cu132", "default: cu999", "default is 'cu999': give one of cu132, cu128, cu126"),
        ("default:", "defualt:", "defualt is no key: give default, date, venv_python, base, stacks"),
        ("default: cu132\n", "", "default is missing: give text in quotes"),
        ('driver: "580"', "driver: 580", "stacks cu132 driver is 580: give text in quotes"),
        ("[amd64, arm64]", "amd64", "stacks cu132 architectures is 'amd64': give a list of texts"),
        ("download: 3300", "download: much", "stacks cu132 megabytes download is 'much': give megabytes"),
        ("{download: 3300, work: 9500, image: 3100}", "1", "stacks cu132 megabytes is no mapping: give keys with values"),
        ("date: 2026-11-21", "date: soon", "date is 'soon': give a day, YYYY-MM-DD"),
        ("date: 2026-11-21", "date: 2026-13-41", "line 6: 2026-13-41 cannot be read: month must be in 1..12"),
        ("date: 2026-11-21", "date: [", "line 10: it is not YAML: "),
        ("\nstacks:", "\nstacks:  # ours", "stacks 'cu132' cannot be read as a name: give a line `  NAME:` "),
        ("  cu126:", '  "cu126":', "stacks 'cu126' cannot be read as a name: "),
        ("  cu126:", "  126:", "stacks 126 cannot be read as a name: "),
    ],
)  # fmt: skip
def test_a_slip_in_the_list_of_stacks_is_refused_with_the_key(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    file, text = tmp_path / "stacks.yaml", stacks.FILE.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    with pytest.raises(BuildRefused) as refusal:
        stacks.read(file)
    assert str(refusal.value).startswith(f"{file} does not describe stacks: {said}")


def test_a_list_of_stacks_that_is_no_file_or_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for file, why in (
        (tmp_path / "empty", "it is no mapping: give keys with values"),
        (tmp_path, "it is a directory, not a regular file"),
        (tmp_path / "none", "No such file or directory"),
    ):
        with pytest.raises(BuildRefused) as refusal:
            stacks.read(file)
        assert str(refusal.value) == f"{file} does not describe stacks: {why}"


@pytest.mark.parametrize(
    ("name", "driver", "machine", "chosen"),
    [
        ("", "", "", "cu132"),
        ("", "580", "x86_64", "cu132"),
        ("", "595.71.05", "aarch64", "cu132"),
        ("", "579.99", "", "cu128"),
        ("", "550.54.15", "x86_64", "cu128"),
        ("", "525", "x86_64", "cu128"),
        ("cu126", "550", "x86_64", "cu126"),
        ("cu132", "550", "x86_64", "cu132"),
    ],
)
def test_the_stack_is_the_one_that_is_asked_for_else_the_newest_that_the_driver_runs(
    name: str, driver: str, machine: str, chosen: str
) -> None:
    assert stacks.choose(name, driver, machine).name == chosen


@pytest.mark.parametrize(
    ("driver", "machine", "needed"),
    [("565.57.01", "aarch64", "cu132 needs 580"), ("470.256.02", "x86_64", "cu132 needs 580, cu128 needs 525, cu126 needs 525")],
)  # fmt: skip
def test_where_no_stack_fits_the_driver_or_another_image_is_named(
    driver: str, machine: str, needed: str
) -> None:
    with pytest.raises(BuildRefused) as refusal:
        stacks.choose("", driver, machine)
    assert str(refusal.value) == (
        f"no stack has CUDA builds for {machine} and NVIDIA driver {driver} ({needed}): have the driver updated, "
        f"{stacks.OTHER_ROAD}, one of NVIDIA's own for this driver"
    )


@pytest.mark.parametrize(("architecture", "found"), [("amd64", ["cu128", "cu126"]), ("arm64", [])])
def test_an_image_knows_of_the_other_stacks_that_its_processor_can_have(
    architecture: str, found: list[str]
) -> None:
    assert list(stacks.others(stacks.find(""), architecture)) == found


@pytest.mark.parametrize(
    ("machine", "stack", "taken"),
    [
        ("x86_64", "", "image.sif"),
        ("x86_64", "cu128", "image-cu128.sif"),
        ("aarch64", "", "image-aarch64.sif"),
        ("aarch64", "cu128", "image-cu128-aarch64.sif"),
    ],
)
def test_an_image_has_its_processor_in_its_name_unless_that_is_the_usual_one(
    machine: str, stack: str, taken: str
) -> None:
    """The rule in Python and the one in bash."""
    image = stacks.find(stack).image
    assert stacks.image_on(image, machine) == image.with_name(taken)
    script = f'uname() {{ echo {machine}; }}\nsource "$1/host/job.sh"\nown_image "$2"'
    checkout = str(stacks.CONTAINERS.parent)
    ended = subprocess.run(
        ["bash", "-euc", script, "bash", checkout, image.name],
        env={**os.environ, "APPTRAIN_HOME": checkout},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (ended.stdout, ended.stderr) == (str(image.with_name(taken)), "")


def test_the_image_here_is_the_stacks_own_or_the_file_that_was_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    for name in ("", *stacks.names()):
        assert stacks.image_here(name, "") == stacks.image_on(stacks.find(name).image, "aarch64")
    monkeypatch.chdir(tmp_path)
    assert stacks.image_here("cu118", "mine.sif") == tmp_path / "mine.sif"
    with pytest.raises(BuildRefused):
        stacks.image_here("cu118", "")


def test_an_unknown_stack_is_refused() -> None:
    with pytest.raises(BuildRefused) as refusal:
        stacks.find("cu118")
    assert str(refusal.value) == "STACK=cu118: there is no such stack: give one of cu132, cu128, cu126"


@pytest.mark.parametrize(
    ("stack", "architecture"), [(s, a) for s in stacks.read().values() for a in s.architectures], ids=str
)
def test_an_images_lock_holds_its_stack_and_hashes_everything(stack: stacks.Stack, architecture: str) -> None:
    text = stack.lock(architecture).read_text()
    pins = wheels.pinned(stack.lock(architecture))
    assert (pins["torch"], pins["torchvision"]) == (stack.torch, stack.torchvision)
    assert pins[f"nvidia-nccl-cu{stack.cuda.split('.')[0]}"] == stack.nccl
    blocks = re.split(r"^(?=[^ #\n])", text, flags=re.MULTILINE)[1:]
    assert len(blocks) == len(pins)
    assert all("--hash=sha256:" in block for block in blocks)
    assert "://" not in text


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_debians_lock_holds_the_base_with_a_hash_each_and_names_no_mirror(architecture: str) -> None:
    text = stacks.debian_lock(architecture).read_text()
    entries = debian.read_index(text)
    names = {entry["Package"] for entry in entries}
    assert set(BASE.packages) <= names
    assert {"libc6", "apt", "dpkg", "bash"} <= names
    for entry in entries:
        assert re.fullmatch("[0-9a-f]{64}", entry["SHA256"])
        assert entry["Filename"].startswith("pool/main/")
        assert entry["Architecture"] in (architecture, "all")
    assert "://" not in text
    assert debian.write_index(entries) == text


def test_a_stack_says_what_it_is_made_of_and_where_its_lock_is() -> None:
    stack = stacks.find("")
    facts = stack.facts()
    assert facts["name"] == "cu132"
    assert {name: getattr(stack, name) for name in facts if name != "name"} == {
        k: v for k, v in facts.items() if k != "name"
    }
    assert set(facts) == {
        "name",
        "torch",
        "torchvision",
        "cuda",
        "cudnn",
        "nccl",
        "driver",
        "compute_capability",
    }
    assert stack.pins == [f"torch=={stack.torch}", f"torchvision=={stack.torchvision}"]
    assert stack.lock("arm64") == stacks.CONTAINERS / "locks/cu132-arm64.txt"


@pytest.mark.parametrize(("machine", "name"), [("x86_64", "amd64"), ("aarch64", "arm64"), ("ppc64le", None)])
def test_only_machines_that_have_locks_build(
    monkeypatch: pytest.MonkeyPatch, machine: str, name: str | None
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    if name:
        assert stacks.debian_architecture() == name
        return
    with pytest.raises(
        BuildRefused, match=r"^this machine is ppc64le: the locks are for x86_64 and aarch64: "
    ):
        stacks.debian_architecture()


@pytest.mark.parametrize(
    ("driver", "machine", "fits"),
    [
        ("", "", True),
        ("580", "", True),
        ("580.1", "x86_64", True),
        ("579.99", "", False),
        ("600", "aarch64", True),
        ("600", "ppc64le", False),
        ("", "arm64", True),
    ],
)
def test_a_stack_fits_a_driver_from_its_own_on_and_its_processors(
    driver: str, machine: str, fits: bool
) -> None:
    assert stacks.find("cu132").fits(driver, machine) is fits


@pytest.mark.parametrize(
    ("name", "driver", "machine", "found"),
    [
        ("", "", "", "cu132"),
        ("cu126", "610", "", "cu126"),
        ("cu1", "530", "", "cu132"),
        ("", "530.30.02", "", "cu128"),
        ("", "", "aarch64", "cu132"),
        ("", "400", "", "cu132"),
    ],
)
def test_the_stack_of_a_site_is_its_own_else_the_one_that_fits_else_the_default(
    name: str, driver: str, machine: str, found: str
) -> None:
    assert stacks.of_site(name, driver, machine) == found
