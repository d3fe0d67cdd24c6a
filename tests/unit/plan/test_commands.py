"""entrypoint/plan/commands.py: what belongs to which command."""

import sys

import pytest

from entrypoint.plan import commands


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["/home/alice/bin/apptrain", "run", "--", "x.py"], ["run", "--", "x.py"]),
        (["apptrain", "plan"], ["plan"]),
        (["apptrain", "doctor", "--json"], []),
        (["apptrain"], []),
        (["/usr/lib/python3/entrypoint/cli.py", "plan"], []),
    ],
)
def test_only_what_is_typed_behind_apptrain_is_quoted_back(
    argv: list[str], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    assert commands.typed() == words
