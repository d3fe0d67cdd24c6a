"""entrypoint/batch/survey/limits.py: times and sizes."""

import pytest

from entrypoint.batch.survey import limits


@pytest.mark.parametrize(
    ("text", "seconds", "asked"),
    [
        ("infinite", None, "01:00:00"),
        ("n/a", None, "01:00:00"),
        ("", None, "01:00:00"),
        ("30:00", 1800, "00:30:00"),
        ("45", 45, "00:00:45"),
        ("2:00:00", 7200, "01:00:00"),
        ("336:00:00", 1209600, "01:00:00"),
        ("1-00:00:00", 86400, "01:00:00"),
        ("00:59:59", 3599, "00:59:59"),
        ("0:00", 0, "01:00:00"),
    ],
)
def test_a_first_job_asks_for_an_hour_or_for_the_limit(text: str, seconds: int | None, asked: str) -> None:
    assert limits.seconds(text) == seconds
    assert limits.asked(text) == asked


@pytest.mark.parametrize(
    ("text", "gib"),
    [
        ("527831088kb", 503),
        ("63437mb", 61),
        ("1gb", 1),
        ("1tb", 1024),
        ("1073741823", 0),
        ("1073741824b", 1),
        ("unlimited", None),
        ("", None),
    ],
)
def test_sizes_of_pbs_are_rounded_down(text: str, gib: int | None) -> None:
    assert limits.gib(text) == gib
