"""entrypoint/batch/survey/gpus.py: what a GPU's name says."""

import pytest

from containers import stacks
from entrypoint.batch.survey import gpus


@pytest.mark.parametrize(
    ("model", "stack"),
    [
        *((model, "cu128") for model in ("v100", "tesla_v100-sxm2-32gb", "titan_v")),
        *((model, "cu126") for model in ("P100", "gtx1080ti", "k80", "TeslaM40", "titanx", "titan_xp")),
    ],
)
def test_gpus_before_turing_need_an_older_stack(model: str, stack: str) -> None:
    (line,) = gpus.lines(model, "sinfo")
    assert (line.key, line.value, line.questions) == ("container.stack", stack, ())
    assert line.why.startswith(f"sinfo: {model}; ")
    major, minor = ("7", "0") if stack == "cu128" else ("6", "0")
    assert f"{major}.{minor}" in stacks.find(stack).compute_capability


@pytest.mark.parametrize(
    "model", ["a100", "nvidia_h100_80gb_hbm3", "rtx6000", "t4", "l40s", "gh200", "nvidia_b200"]
)
def test_gpus_since_turing_need_nothing(model: str) -> None:
    assert list(gpus.lines(model, "sinfo")) == []
    assert gpus.rank(model) == 0


@pytest.mark.parametrize(
    "model", ["mi250", "amd_mi300x", "1g.5gb", "nvidia_b200_2g.45gb", "mig-1g", "a100_mig"]
)
def test_gpus_of_amd_and_slices_are_asked_about_and_chosen_last(model: str) -> None:
    (line,) = gpus.lines(model, "sinfo")
    assert line.value is None
    assert line.questions[0].startswith(f"{model} looks like ")
    assert gpus.rank(model) == -1


def test_gpus_without_a_name_are_asked_about() -> None:
    (line,) = gpus.lines("", "sinfo")
    assert line.questions == (
        "which GPUs are these? For a V100 say stack: cu128, for an older one (P100) stack: cu126",
    )
