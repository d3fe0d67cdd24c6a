"""What a scheduler would show to others is looked at first."""

import pytest

from entrypoint.batch import secrets
from entrypoint.core.errors import BadInput


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("HF_TOKEN", "x", True),
        ("WANDB_API_KEY", "", True),
        ("MINE", "hf_abcdefghij0123456789", True),
        ("MINE", "x", False),
    ],
)
def test_a_secret_is_known_by_its_name_or_its_shape(name: str, value: str, found: bool) -> None:
    assert secrets.is_secret(name, value) is found
    if not found:
        secrets.check("-v", {name: value}, "qstat")
        return
    with pytest.raises(BadInput) as refused:
        secrets.check("-v", {"A": "1", name: value}, "qstat")
    assert str(refused.value) == f"-v with {name}: qstat would show its value to others: {secrets.REMEDY}"
