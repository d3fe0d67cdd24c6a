"""Text of others in our lines, and in command lines for pasting."""

import os
import subprocess

import pytest

from entrypoint.core.plain import counted, file_part, one_line, plain, shell_word


def test_a_line_of_others_has_no_control_character() -> None:
    assert plain("a\x1b[31m\nb\u202e") == "a?[31m b?"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a" * 1001, "a" * 1000),
        (" " * 3999 + "ab", "a"),
        ("a \t\n  b ", "a b"),
        ("\x00" * 1001, "?" * 1000),
    ],
    ids=repr,
)
def test_a_line_of_others_is_bounded_and_has_single_blanks(text: str, line: str) -> None:
    assert plain(text) == line


def test_in_a_mapping_both_sides_are_made_plain_and_other_values_stay() -> None:
    assert plain({"a\x1b": {"b": "c\n"}, "n": 1, 2: None}) == {"a?": {"b": "c"}, "n": 1, 2: None}
    assert plain(["a\n"]) == ["a\n"]


@pytest.mark.parametrize(
    ("name", "part"),
    [("my-job_1.2", "my-job_1.2"), ("a/b c:d", "a_b_c_d"), ("é\n٣", "___"), ("", "")],
)
def test_a_name_becomes_a_part_of_a_file_s_name_letter_for_letter(name: str, part: str) -> None:
    assert file_part(name) == part


def test_a_message_keeps_its_begin_and_its_end_if_it_is_too_long() -> None:
    assert one_line("a" * 2000) == "a" * 2000
    assert one_line("a" * 1400 + "b" * 1 + "c" * 600) == "a" * 1400 + " ... " + "c" * 600


def test_a_message_is_one_printable_line() -> None:
    assert one_line("a\n\tb\x1bc\rd é") == "a  b?c?d é"


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
