"""make lock: the locks."""

import re

import pytest
import yaml

from tests.unit.tools.checkout import CHECKOUT


def pins(lock: str) -> dict[str, set[str]]:
    """Every pinned name with its versions (several where they differ by Python)."""
    found: dict[str, set[str]] = {}
    for name, version in re.findall(r"^([a-z0-9._-]+)==(\S+)", lock_text(lock), re.MULTILINE):
        found.setdefault(name, set()).add(version)
    return found


def lock_text(lock: str) -> str:
    return (CHECKOUT / "requirements" / f"{lock}.txt").read_text()


def asked_for(lock: str) -> set[str]:
    lines = (CHECKOUT / "requirements" / f"{lock}.in").read_text().splitlines()
    return {re.split("[<# ]", line)[0] for line in lines if line and not line.startswith(("#", "-"))}


@pytest.mark.parametrize("lock", ["run", "dev", "image"])
def test_a_lock_was_made_from_its_input(lock: str) -> None:
    reason = re.escape(f"-r requirements/{lock}.in")
    blocks = re.split(r"^(?=[a-z])", lock_text(lock), flags=re.MULTILINE)[1:]
    direct = {
        block.split("==")[0] for block in blocks if re.search(rf"# +(via )?{reason}$", block, re.MULTILINE)
    }
    assert direct == asked_for(lock)


@pytest.mark.parametrize("lock", ["run", "dev", "image"])
def test_a_lock_pins_and_hashes_everything_and_names_no_index(lock: str) -> None:
    blocks = re.split(r"^(?=[^ #\n])", lock_text(lock), flags=re.MULTILINE)[1:]
    assert blocks
    for block in blocks:
        assert re.match(r"[a-z0-9._-]+==\S+ (; .* )?\\\n( +--hash=sha256:[0-9a-f]{64}( \\)?\n)+", block), (
            block
        )
    assert "://" not in lock_text(lock)
    assert "index-url" not in lock_text(lock)


def test_the_two_locks_agree() -> None:
    run, dev = pins("run"), pins("dev")
    assert {name: dev[name] for name in run.keys() & dev} == {name: run[name] for name in run.keys() & dev}


def test_the_run_lock_holds_the_default_stack() -> None:
    stack = yaml.safe_load((CHECKOUT / "containers" / "stacks.yaml").read_text())
    stack = stack["stacks"][stack["default"]]
    run = pins("run")
    assert (run["torch"], run["torchvision"]) == ({stack["torch"]}, {stack["torchvision"]})
    major = stack["cuda"].split(".")[0]
    brought = (f"nvidia-nccl-cu{major}", f"nvidia-cudnn-cu{major}", "cuda-toolkit")
    (nccl,), (cudnn,), (cuda,) = (run[name] for name in brought)
    assert nccl == stack["nccl"]
    assert cudnn.rsplit(".", 1)[0] == stack["cudnn"]
    assert cuda.rsplit(".", 1)[0] == stack["cuda"]
