"""The floating-point operations of a training step, and what share of the GPUs' peak a run reaches."""

import pytest

from train import flops

pytestmark = pytest.mark.xdist_group("train")


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("resnet50", 4.089),
        ("resnet18", 1.814),
    ],  # multiply-adds of a forward pass in 1e9: torchvision's GFLOPS
)
def test_a_step_costs_six_operations_for_each_forward_multiply_add(name: str, published: float) -> None:
    found = flops.per_image(name, classes=1000, channels=3, image_size=224)
    assert found is not None
    assert found / 1e9 == pytest.approx(6 * published, rel=0.03)


def test_a_model_that_cannot_be_counted_has_no_figure() -> None:
    assert flops.per_image("inception_v3", classes=10, channels=3, image_size=8) is None


def test_the_share_of_the_peak_is_that_of_all_ranks() -> None:
    found = flops.figures(24.3e9, 8000.0, precision="bf16", device="NVIDIA A100-SXM4-80GB", ranks=8)
    assert found == {
        "gflop_per_image": 24.3,
        "tflop_per_s": pytest.approx(194.4),
        "peak_share": pytest.approx(194.4 / (8 * 312)),
    }


@pytest.mark.parametrize(
    ("precision", "device"), [("fp32", "NVIDIA A100-SXM4-80GB"), ("bf16", "AVX2"), ("bf16", "NVIDIA X1")]
)
def test_without_a_known_peak_there_is_no_share(precision: str, device: str) -> None:
    found = flops.figures(1e9, 1000.0, precision=precision, device=device, ranks=1)
    assert (found["tflop_per_s"], found["peak_share"]) == (1.0, None)


def test_without_a_rate_or_a_count_there_is_none() -> None:
    for flop, rate in ((None, 10.0), (1e9, None)):
        found = flops.figures(flop, rate, precision="bf16", device="NVIDIA A100", ranks=1)
        assert (found["tflop_per_s"], found["peak_share"]) == (None, None)
