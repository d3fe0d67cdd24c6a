"""The text of a value's source, which the plan's JSON promises."""

import pytest

from entrypoint.plan import origin
from entrypoint.plan.origin import Origin, ValueSource


@pytest.mark.parametrize(
    ("source", "text", "is_user"),
    [
        (origin.FLAG, "flag", True),
        (origin.from_variable("APPTRAIN_DEVICE"), "env:APPTRAIN_DEVICE", True),
        (origin.from_profile("lab.yaml"), "profile:lab.yaml", False),
        (origin.derived_from("SLURM_NODEID"), "derived:SLURM_NODEID", False),
        (origin.DEFAULT, "default", False),
    ],
)
def test_a_source_has_its_text_and_is_the_user_s_or_not(
    source: ValueSource, text: str, is_user: bool
) -> None:
    assert (str(source), source.origin.is_user) == (text, is_user)


def test_each_origin_has_a_word_of_its_own() -> None:
    assert [each.value for each in Origin] == ["flag", "env", "profile", "derived", "default"]
