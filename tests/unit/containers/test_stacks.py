"""The pinned stacks and their locks."""

import re
from pathlib import Path

import pytest

from containers import debian, stacks, wheels
from containers.stacks import BuildRefused

BASE = stacks.find("").base

ARCHITECTURES = ("amd64", "arm64")


def test_the_stacks_are_the_newest_cuda_13_and_a_cuda_12_for_older_gpus() -> None:
    found = stacks.read()
    assert {name: (stack.cuda, stack.is_default) for name, stack in found.items()} == {
        "cu132": ("13.2", True),
        "cu126": ("12.6", False),
    }
    assert stacks.find("").name == "cu132"
    assert stacks.find("cu126").image.name == "image-cu126.sif"
    assert stacks.find("cu132").image.name == "image.sif"
    assert "7.0" in stacks.find("cu126").compute_capability


def test_the_names_alone_are_those_of_all_stacks_however_an_entry_is_written(tmp_path: Path) -> None:
    assert stacks.names() == list(stacks.read())
    added = "\n  a.third-1:  # with a remark\n    cuda: '13.3'\n    megabytes: {image: 1}\n    torch: '3.0'\n"
    (tmp_path / "stacks.yaml").write_text(stacks.FILE.read_text() + added)
    assert stacks.names(tmp_path / "stacks.yaml") == [*stacks.read(), "a.third-1"]


def test_an_unknown_stack_is_refused() -> None:
    with pytest.raises(BuildRefused) as refusal:
        stacks.find("cu118")
    assert str(refusal.value) == "STACK=cu118: there is no such stack: give one of cu132, cu126"


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
