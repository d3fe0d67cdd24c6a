"""`check`: versions, devices, and whether the stack fits the driver."""

import json
import platform
from pathlib import Path
from typing import Any

import pytest

from entrypoint.node import check, gpu
from entrypoint.node.gpu import DriverReport
from tests.unit.node.machines import FACTS, H100, HAS_NONE, ITS_OWN, NOT_FOUND, TAKE_CU126, V100, healthy


def checked(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    found: DriverReport,
    *,
    as_json: bool,
    sees: bool = True,
) -> tuple[int, str]:
    """`check` on a machine with this driver, on which torch tells but one thing; `sees`: its GPUs, if any."""

    async def look(env: object) -> DriverReport:  # noqa: ARG001
        return found

    monkeypatch.setattr(gpu, "ask_driver", look)
    one = {"index": 0, "name": "H100", "memory_bytes": 2**36, "compute_capability": "9.0"}
    seen = [one] * bool(found.gpus and sees)
    torch = {"torch": "2.15.0", "cuda": "13.2", "cuda_available": bool(seen), "devices": seen}
    monkeypatch.setattr(check, "gather", lambda: torch)
    monkeypatch.setattr(platform, "node", lambda: "gpu-a01")
    monkeypatch.setattr(platform, "python_version", lambda: "3.13.5")
    return check.check(as_json=as_json), capsys.readouterr().out


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stack.json").write_text(json.dumps(FACTS))
    monkeypatch.setenv("APPTRAIN_STACK", str(tmp_path / "stack.json"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("image")
def test_check_tells_that_the_stack_fits_the_driver(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out = checked(monkeypatch, capsys, healthy(H100), as_json=False)
    assert (status, out) == (
        0,
        "python          3.13.5\n"
        "host            gpu-a01\n"
        "driver          580.65.06\n"
        "driver_cuda     13.0\n"
        "stack           cu132\n"
        "stack_fits      True\n"
        "gpu_problem     none\n"
        "torch           2.15.0\n"
        "cuda            13.2\n"
        "cuda_available  True\n"
        "GPU 0: H100, 64.0 GiB, compute capability 9.0\n"
        "verdict         fits: stack cu132 has its driver and 1 GPU\n",
    )


@pytest.mark.usefixtures("image")
def test_check_tells_what_to_do_where_the_stack_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out = checked(monkeypatch, capsys, healthy(V100, V100), as_json=True)
    facts = json.loads(out)
    assert facts.pop("verdict") == f"does not fit: {facts['gpu_problem']}"
    assert facts.pop("fits") is False
    assert len(facts.pop("devices")) == 1
    assert (status, facts) == (
        1,
        {
            "python": "3.13.5",
            "host": "gpu-a01",
            "driver": "580.65.06",
            "driver_cuda": "13.0",
            "stack": "cu132",
            "stack_fits": False,
            "gpu_problem": f"{HAS_NONE} GPUs 0, 1 (Tesla V100-SXM2-32GB, compute capability 7.0) of gpu-a01, {ITS_OWN}: "
            f"{TAKE_CU126}, or request other GPUs",
            "torch": "2.15.0",
            "cuda": "13.2",
            "cuda_available": True,
        },
    )


@pytest.mark.usefixtures("image")
def test_check_does_not_ask_torch_where_the_driver_hangs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out = checked(monkeypatch, capsys, DriverReport(silent=True), as_json=True)
    facts = json.loads(out)
    assert status == 1
    assert "torch" not in facts
    assert facts["error"] == "the NVIDIA driver does not answer: torch is not asked, it would wait for it"
    assert facts["stack_fits"] is False
    assert facts["verdict"] == f"does not fit: {facts['error']}"


@pytest.mark.usefixtures("image")
def test_check_ends_with_1_where_torch_sees_no_gpu_of_a_driver(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out = checked(monkeypatch, capsys, healthy(H100), as_json=False, sees=False)
    assert (status, out.splitlines()[-1]) == (
        1,
        "verdict         does not fit: there is a driver, but torch 2.15.0 sees no GPU: request one",
    )


@pytest.mark.usefixtures("image")
def test_check_on_a_node_without_a_driver_leaves_open_whether_the_stack_fits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out = checked(monkeypatch, capsys, DriverReport(error=(None, NOT_FOUND)), as_json=True)
    facts = json.loads(out)
    assert status == 0
    assert (facts["driver"], facts["stack"], facts["stack_fits"], facts["gpu_problem"]) == (
        None,
        "cu132",
        None,
        None,
    )
    assert facts["verdict"] == (
        "cannot be told: no NVIDIA driver here, as on most login nodes: run it in a job on a node with GPUs; on CPUs it works"
    )


@pytest.mark.parametrize(
    ("changed", "fits", "why"),
    [
        ({"cuda": None}, None, "torch 2.15.0 is built for CPUs; on CPUs it works"),
        (
            {"stack": None, "stack_fits": None},
            True,
            "torch 2.15.0 (no image's stack here) has its driver and 2 GPUs",
        ),
        (
            {"devices": [], "cuda_available": False},
            False,
            "there is a driver, but torch 2.15.0 sees no GPU: request one",
        ),
        ({"error": "torch cannot be imported: x"}, False, "torch cannot be imported: x"),
        (
            {"driver": None, "devices": [], "gpu_problem": "nvidia-smi failed"},
            None,
            "nvidia-smi failed: run it in a job on a node with GPUs; on CPUs it works",
        ),
    ],
)
def test_check_judges_and_says_why(changed: dict[str, Any], fits: bool | None, why: str) -> None:
    facts: dict[str, Any] = {
        "torch": "2.15.0",
        "cuda": "13.2",
        "driver": "580",
        "stack": "cu132",
        "stack_fits": True,
    }
    facts |= {"gpu_problem": None, "cuda_available": True, "devices": [{}, {}]}
    assert check.judged(facts | changed) == (fits, why)
