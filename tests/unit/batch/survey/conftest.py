"""A login node."""

import os
import time
from pathlib import Path

import pytest

from tests.unit.batch.survey.login import Login


@pytest.fixture
def login(tmp_path: Path) -> Login:
    return Login(tmp_path)


@pytest.fixture(autouse=True)
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of this machine, and the day."""
    uname = os.uname_result(("Linux", "login.example.org", "6", "#1", "x86_64"))
    monkeypatch.setattr(os, "uname", lambda: uname)
    monkeypatch.setattr(time, "strftime", lambda _: "2026-11-23")
