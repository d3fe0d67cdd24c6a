"""What passes between the halves of a job: both know the same names."""

import re
from pathlib import Path

import pytest

from entrypoint.core.errors import BadInput
from entrypoint.job import handover

JOB_SH = Path(__file__).resolve().parents[3] / "host/job.sh"


def test_the_host_half_knows_the_names_that_the_image_may_answer_with() -> None:
    """Any other it would refuse as another version's."""
    (body,) = re.findall(r"^read_answer\(\) \{\n(.*?)^\}", JOB_SH.read_text(), re.DOTALL | re.MULTILINE)
    (cases,) = re.findall(r"case \$entry in\n(.*)\n *\*\)", body, re.DOTALL)
    assert sorted(re.findall(r"\b([a-z_]+)=(?:\*|APPTRAIN_\*)", cases)) == sorted(handover.ANSWERED)


def test_a_name_that_the_host_half_lacks_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"host/job\.sh knows no stat"):
        handover.answer(tmp_path / "verdict", [("status", "0"), ("stat", "0")])
    assert list(tmp_path.iterdir()) == []


def test_a_value_may_be_any_bytes_without_nul(tmp_path: Path) -> None:
    handover.answer(tmp_path / "answer", [("host", "a\n=b"), ("host", "\udcff")])
    assert (tmp_path / "answer").read_bytes() == b"host=a\n=b\0host=\xff\0"
    assert (tmp_path / "answer").stat().st_mode & 0o777 == 0o600
    assert handover.read(tmp_path / "answer", ["host"]).all("host") == ["a\n=b", "\udcff"]


def test_what_the_job_script_asks_may_come_after_the_image_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = []

    def pause(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            handover.write_list(tmp_path / "ask", ["told=job"])

    monkeypatch.setattr("entrypoint.job.handover.time.sleep", pause)
    assert handover.asked(tmp_path).one("told") == "job"
    assert waits == [handover.PAUSE] * 3


def test_a_job_script_that_asks_nothing_is_not_awaited_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "LATEST", 0.01)
    with pytest.raises(BadInput, match=r"ask cannot be read \(No such file or directory\)"):
        handover.asked(tmp_path)
