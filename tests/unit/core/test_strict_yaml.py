"""What is taken as YAML, and how all other is refused: with the line that is wrong, and soon."""

import os
from pathlib import Path

import pytest

from entrypoint.core import strict_yaml
from entrypoint.core.files import Unfit

CHECKOUT = Path(__file__).resolve().parents[3]
SHIPPED = sorted(
    [*CHECKOUT.glob("clusters/*.yaml"), *CHECKOUT.glob("src/train/configs/*.yaml"), CHECKOUT / "containers/stacks.yaml"]
)  # fmt: skip


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.name)
def test_what_comes_with_the_program_loads(file: Path) -> None:
    assert strict_yaml.load(file)


def test_ten_times_the_largest_that_is_shipped_loads(tmp_path: Path) -> None:
    largest = max(SHIPPED, key=lambda file: file.stat().st_size).read_text()
    indented = "".join(f"  {line}\n" for line in largest.splitlines())
    (tmp_path / "ten.yaml").write_text("".join(f"k{number}:\n{indented}" for number in range(10)))
    assert len(strict_yaml.load(tmp_path / "ten.yaml")) == 10


def test_values_are_those_of_yaml(tmp_path: Path) -> None:
    (tmp_path / "f").write_text(
        '{a: 1, b: -2.5, c: yes, d: "010", e: 08, f: [x, ~], g: "1:30", h: 0x1f, i: 0}'
    )
    assert strict_yaml.load(tmp_path / "f") == {
        "a": 1, "b": -2.5, "c": True, "d": "010", "e": "08", "f": ["x", None], "g": "1:30", "h": 31, "i": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "most"),
    [
        ("[" + "0, " * 9_998 + "0]", 9_999),
        ("[" * 16 + "]" * 16, 1),
        ("[" + "[], " * 40 + "{}]", 41),
        (f"['{'a' * 99}', {'1' * 40}]", 2),
        ("[a]".ljust(strict_yaml.MOST_BYTES), 1),
    ],
    ids=lambda value: str(value)[:16],
)
def test_up_to_its_bounds_a_file_loads(tmp_path: Path, text: str, most: int) -> None:
    (tmp_path / "f").write_text(text)
    assert len(strict_yaml.load(tmp_path / "f")) == most


def test_an_empty_file_is_none(tmp_path: Path) -> None:
    for text in ("", "# a comment\n", "~"):
        (tmp_path / "f").write_text(text)
        assert strict_yaml.load(tmp_path / "f") is None


BOMB = "title: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"key{i}: &{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 9)}]\n" for i in range(10)
)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (BOMB, "line 1: anchors (&NAME) and aliases (*NAME) are not taken: write the value out"),
        ("a: 1\nb: &a [*a]", "line 2: anchors (&NAME)"),
        ("a:\n  <<: {x: 1}", "line 2: the merge key << is not taken: write the keys out"),
        ("[" * 20_000, "line 1: nested more than 16 deep"),
        ("- " * 100_000, "line 1: nested more than 16 deep"),
        ("".join(f"{'  ' * i}a:\n" for i in range(300)), "line 17: nested more than 16 deep"),
        ("".join(f"k{i}: 1\n" for i in range(20_000)), "line 5000: more than 10000 keys and values"),
        ("[" + "0, " * 9_999 + "0]", "line 1: more than 10000 keys and values"),
        ("[" * 17 + "]" * 17, "line 1: nested more than 16 deep"),
        ("a:\n  " + "1" * 41, f"line 2: {'1' * 41} is a number of 41 characters"),
        ("a: " + "1" * 61, f"line 1: {'1' * 60}... is a number of 61 characters"),
        ("a: " + "1" * 60, f"line 1: {'1' * 60} is a number of 60 characters"),
        ("a: +1:30.5", "line 1: +1:30.5 without quotes is a number in base 60"),
        ("a: -010", "line 1: -010 without quotes is a number in base 8"),
        ("a: [1, 2\nb: 3", "line 2: it is not YAML: while parsing a flow sequence expected ',' or ']'"),
        (
            "a: 1\nb: 'x",
            "line 2: it is not YAML: while scanning a quoted scalar found unexpected end of stream",
        ),
        ("? a\n? a", "line 2: the key a stands twice"),
        ("a: {b: 1, 'b': 2}", "line 1: the key b stands twice"),
        ("title: 0x" + "f" * 200_000, "line 1: 0xfff"),
        ("title: " + ":".join(["59"] * 80_000), "line 1: 59:59"),
        ("time: 10:00:00", 'line 1: 10:00:00 without quotes is a number in base 60: write "10:00:00"'),
        ("a: 010", 'line 1: 010 without quotes is a number in base 8: write "010"'),
        ("a: 2001-13-45", "line 1: 2001-13-45 cannot be read: month must be in 1..12"),
        ("a: !!int x", "line 1: the tag tag:yaml.org,2002:int is not taken"),
        ("a: x\n[a]: x", "line 2: a key is a list or a mapping: give a word"),
        ("a: 1\nb: 2\na: 3", "line 3: the key a stands twice, and only the last would count: make it one"),
        ('"\\e[31mkey": 1', "line 1: the key ?[31mkey is not one line of printable characters"),
        ('a: "\\U99999999"', "line 1: it is not YAML: "),
        ('a: "\\ud800"', "line 1: ? holds what is no text"),
        ("a: \x1b", "line 1: it is not YAML: a control character stands there"),
        ("a: 1\nb: \x1b", "line 2: it is not YAML: a control character stands there"),
        ("a: 1\n--- b", "line 2: it is not YAML: expected a single document"),
    ],
    ids=lambda value: value[:16],
)
def test_what_is_not_taken_is_refused_with_its_line(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(Unfit) as refused:
        strict_yaml.load(path)
    said = str(refused.value)
    assert said.startswith(why)
    assert said.isprintable()
    assert len(said) < 400


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("2.20", "2.2"), ("0x00ff", "255"), ("0b11", "3"), ("1_000", "1000"), ("+5", "5"), ("1.0e+3", "1000.0"),
        (".inf", "inf"), (".nan", "nan"), ("1.", "1.0"), ("-0", "0"),
    ],
)  # fmt: skip
def test_a_number_that_becomes_a_text_is_written_as_it_is_printed(
    tmp_path: Path, text: str, printed: str
) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(f"a: {{b: {text}}}\nenv:\n  A: 1\n  B: {text}\n")
    assert strict_yaml.load(path)
    assert strict_yaml.load(path, texts="b")
    with pytest.raises(Unfit) as refused:
        strict_yaml.load(path, texts="env")
    assert str(refused.value) == f'line 4: {text} without quotes is the number {printed}: write "{text}"'


def test_what_is_printed_as_it_is_written_is_taken_as_a_text_too(tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text("env: {A: 1, B: 1.5, C: -3, D: '2.20', E: 1e3, F: 2.20.1, G: [2.20], H: {I: 0x1f}}\n")
    assert strict_yaml.load(path, texts="env")["env"] == {
        "A": 1, "B": 1.5, "C": -3, "D": "2.20", "E": "1e3", "F": "2.20.1", "G": [2.2], "H": {"I": 31},
    }  # fmt: skip
    for other in ("", "env:", "[env]", "env: x"):
        path.write_text(other)
        strict_yaml.load(path, texts="env")


def test_no_other_kind_of_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"a: 1\nb: \xe9")
    (tmp_path / "large").write_bytes(b"#" * (strict_yaml.MOST_BYTES + 1))
    os.mkfifo(tmp_path / "fifo")
    refused = {
        tmp_path / "latin": "line 2: it is not UTF-8",
        tmp_path / "large": "it has more than 262144 bytes",
        tmp_path / "fifo": "it is a FIFO, not a regular file",
        Path("/dev/zero"): "it is a character device, not a regular file",
    }
    for path, why in refused.items():
        with pytest.raises(Unfit) as error:
            strict_yaml.load(path)
        assert str(error.value) == why
