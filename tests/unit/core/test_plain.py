"""Text of others in our lines, and in command lines for pasting."""

import os
import subprocess

import pytest

from entrypoint.core.plain import counted, plain, shell_word


def test_a_line_of_others_has_no_control_character() -> None:
    assert plain("a\x1b[31m\nb\u202e") == "a?[31m b?"


def test_one_is_counted_without_an_s() -> None:
    assert [counted(number, "node") for number in range(3)] == ["0 nodes", "1 node", "2 nodes"]


@pytest.mark.parametrize(
    "word", ["a", "", "it's", "$(x)", "\x1b[8mx\x07", "a\nb", "\x7f'\\\\", "\u202eé", os.fsdecode(b"\xff1")]
)
def test_bash_reads_the_very_word_from_a_printable_one(word: str) -> None:
    shown = shell_word(word)
    assert shown.isprintable()
    said = subprocess.check_output(["bash", "-c", f"printf %s {shown}"], timeout=30)
    assert said == os.fsencode(word)


@pytest.mark.parametrize("word", ["\0", "\ud800"])
def test_what_no_command_line_can_have_is_refused(word: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  both kinds
        shell_word(word)
