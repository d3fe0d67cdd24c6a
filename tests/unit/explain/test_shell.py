"""A shell script is cut into commands and words as bash cuts it (its manual, chapters 3.1 to 3.6)."""

import pytest

from entrypoint.explain import shell


def cut(text: str) -> list[tuple[int, list[str]]]:
    return [(one.line, one.texts) for one in shell.commands(text)]


def test_a_shell_script_is_cut_into_commands() -> None:
    text = "a 'b c' \"d $(e; f) g\" \\\n  h; i | j && k # l\nexport X=1 Y='2 3'\nif m; then n; fi\ncat <<-E\n\to\n\tE\np\n"
    cut = [(one.line, one.texts, [word.raw for word in one.assigned]) for one in shell.commands(text)]
    assert cut == [
        (1, ["a", "b c", "d $(e; f) g", "h"], []),
        (2, ["i"], []),
        (2, ["j"], []),
        (2, ["k"], []),
        (3, [], ["X=1", "Y='2 3'"]),
        (4, ["m"], []),
        (4, ["n"], []),
        (5, ["cat"], []),
        (8, ["p"], []),
    ]


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ("a'b'\"c\"d", "abcd"),
        ('"it\'s"', "it's"),
        ("'say \"a\"'x", 'say "a"x'),
        ("'a'\"'\"'b'", "a'b"),
        (r"a\ b", "a b"),
        (r"\'a\"", "'a\""),
        (r'"a\"b" c', 'a"b c'),
        (r"'a\b'\c", r"a\bc"),
        (r'"\d\$\`\"\\\q"', r'\d$`"\\q'),
        ('"a\\\nb"', "ab"),
        ("'a\\\nb'", "a\\\nb"),
        ("ab\\\ncd", "abcd"),
        (r"a\\b", r"a\b"),
        ("a\\", "a\\"),
        ("'$A'$B", "$A$B"),
        ("''", ""),
    ],
)
def test_a_word_loses_its_quotes_and_escapes(raw: str, text: str) -> None:
    assert shell.Word(raw, 1).text == text


@pytest.mark.parametrize(
    ("raw", "quoted"),
    [
        ("'$A'", "$A"),
        ("a'b'c'd'e", "bd"),
        ("'say \"a\"'", 'say "a"'),
        ("\"'$A'\"", ""),
        ("\"it's $A\"'b'", "b"),
        ("$A", ""),
    ],
)
def test_single_quotes_count_outside_of_double_ones(raw: str, quoted: str) -> None:
    assert shell.Word(raw, 1).single_quoted == quoted


@pytest.mark.parametrize(
    ("text", "commands"),
    [
        ("a; b & c && d || e | f |& g", [["a"], ["b"], ["c"], ["d"], ["e"], ["f"], ["g"]]),
        ("a>x 2>&1 b", [["a>x", "2>&1", "b"]]),
        ("a &>x <&3 b", [["a", "&>x", "<&3", "b"]]),
        ("a &", [["a"]]),
        ("a&b", [["a"], ["b"]]),
        ("(a; b ) && ( c )", [["a"], ["b"], ["c"]]),
        ("a\t b\r\nc", [["a", "b"], ["c"]]),
        ("a#b # c; d", [["a#b"]]),
        ("#a\n  # b\nc #", [["c"]]),
        ("'a; b' \"c | d\" e\\;f", [["a; b", "c | d", "e;f"]]),
        ("a `b; c` d", [["a", "`b; c`", "d"]]),
        ("a $(b; (c; d) e) f", [["a", "$(b; (c; d) e)", "f"]]),
        ("a $(b ')' c) d", [["a", "$(b ) c)", "d"]]),
        ("a $(b \\) c) d", [["a", "$(b ) c)", "d"]]),
        ("a ${b:-c; d} e", [["a", "${b:-c; d}", "e"]]),
        ("a <(b; c) >(d | e) f", [["a", "<(b; c)", ">(d | e)", "f"]]),
        ('a "$(b "c; d" e)" f', [["a", "$(b c; d e)", "f"]]),
        ('a "${b}; \\" c" d', [["a", '${b}; " c', "d"]]),
        ('a "$b; ($c)" d', [["a", "$b; ($c)", "d"]]),
        ("a '' b 'c; d'", [["a", "", "b", "c; d"]]),
        ("a `` b `c; d`", [["a", "``", "b", "`c; d`"]]),
        ("a $(b '') c '; d'", [["a", "$(b )", "c", "; d"]]),
        ("a \\;; b", [["a", ";"], ["b"]]),
        ('a "b\\\\"; c', [["a", "b\\"], ["c"]]),
        ("a $(b \\)) c; d", [["a", "$(b ))", "c"], ["d"]]),
        ("a 'b; c", [["a", "b; c"]]),
        ('a "b; c', [["a", "b; c"]]),
        ("a `b; c", [["a", "`b; c"]]),
        ("a $(b; c", [["a", "$(b; c"]]),
        ("a \\", [["a", "\\"]]),
        ("(a; b) && (c)", [["a"], ["b"], ["c"]]),
        ("f() { a; }\ng() {\n  b\n}", [["a"], ["b"]]),
        ("ab\\\ncd e\\\n f", [["abcd", "e", "f"]]),
        ('read -r a b <<< "$list"\nc', [["read", "-r", "a", "b", "<<<", "$list"], ["c"]]),
        ("a <<<'x; y' b\nc", [["a", "<<<x; y", "b"], ["c"]]),
    ],
)
def test_a_command_ends_at_what_is_neither_quoted_nor_a_redirection(
    text: str, commands: list[list[str]]
) -> None:
    assert [one.texts for one in shell.commands(text)] == commands


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("\n\na\n\nb", [(3, ["a"]), (5, ["b"])]),
        ("a 'b\nc' d\ne", [(1, ["a", "b\nc", "d"]), (3, ["e"])]),
        ("a \\\n b\nc", [(1, ["a", "b"]), (3, ["c"])]),
        ("a $(b\nc\n) d; e", [(1, ["a", "$(b\nc\n)", "d"]), (3, ["e"])]),
        ("# a\nb # c\nd", [(2, ["b"]), (3, ["d"])]),
        ("cat <<E | a\n$b\n E\nE\nc", [(1, ["cat"]), (1, ["a"]), (5, ["c"])]),
        ("cat <<'E f' >a\nb\nE f\nc", [(1, ["cat", ">a"]), (4, ["c"])]),
        ('cat << "E"\nb\nE\nc', [(1, ["cat"]), (4, ["c"])]),
        ("cat <<\\E\nb\nE\nc", [(1, ["cat"]), (4, ["c"])]),
        ("cat <<E.x-1\nb\nE.x\nE.x-1\nc", [(1, ["cat"]), (5, ["c"])]),
        ("cat <<E\n\tE\nE\nc", [(1, ["cat"]), (4, ["c"])]),
        ("cat <<-E\nb\n\t\tE\nc", [(1, ["cat"]), (4, ["c"])]),
        ("cat<<A 3<<B\na\nB\nA\nb\nB\nc", [(1, ["cat", "3"]), (7, ["c"])]),
        ("cat<<E>a\nb\nE\nc", [(1, ["cat", ">a"]), (4, ["c"])]),
        ("cat <<E\nE\na\nb\n", [(1, ["cat"]), (3, ["a"]), (4, ["b"])]),
        ("cat <<E\nb\n", [(1, ["cat"])]),
        ("cat <<E\nb\nE", [(1, ["cat"])]),
    ],
)
def test_a_command_has_the_line_of_its_first_word_and_a_here_document_is_none(
    text: str, lines: list[tuple[int, list[str]]]
) -> None:
    assert cut(text) == lines


def test_lines_are_counted_from_where_the_text_begins() -> None:
    first, second = shell.commands("a 'b\nc'\nd \\\ne", 10)
    assert [word.line for word in first.words] == [10, 10]
    assert [word.line for word in second.words] == [12, 13]


@pytest.mark.parametrize(
    ("text", "words", "assigned"),
    [
        ("A=1 b", ["b"], ["A=1"]),
        ("A=1", [], ["A=1"]),
        ("A+=:1 b A=2", ["b", "A=2"], ["A+=:1"]),
        ("1A=1 b", ["1A=1", "b"], []),
        ("A=$(b c) d", ["d"], ["A=$(b c)"]),
        ("A=(b c) d", ["d"], ["A=(b c)"]),
        ("export A=1 B=2", [], ["A=1", "B=2"]),
        ("export A", ["A"], []),
        ("export", ["export"], []),
        ("declare -x A=1", [], ["A=1"]),
        ("local A=1", [], ["A=1"]),
        ("readonly A=1", [], ["A=1"]),
        ("A=1 env -i B=2 c D=3", ["c", "D=3"], ["A=1", "B=2"]),
        ("if ! time a", ["a"], []),
        ("while A=1 b", ["b"], ["A=1"]),
        ("elif command a", ["a"], []),
        ("else exec nohup builtin a", ["a"], []),
        ("do { a", ["a"], []),
        ("until a then", ["a", "then"], []),
    ],
)
def test_assignments_and_keywords_in_front_of_a_command_are_no_part_of_it(
    text: str, words: list[str], assigned: list[str]
) -> None:
    (one,) = shell.commands(text)
    assert (one.texts, [word.raw for word in one.assigned]) == (words, assigned)


@pytest.mark.parametrize("text", ["", "\n", "fi", "done; esac", "{ }", "()", "then\nelse", ";;"])
def test_what_has_only_keywords_has_no_command(text: str) -> None:
    assert shell.commands(text) == []


def test_a_script_is_read_up_to_a_mebibyte_and_20000_commands() -> None:
    assert cut(f"{'#' * (2**20 - 2)}\nab") == [(2, ["a"])]
    assert len(shell.commands("a\n" * 20_001)) == 20_000


def test_a_command_knows_the_subshells_around_it_up_to_a_depth() -> None:
    found = shell.commands("a; (b; (c) | d); { e; }; f")
    assert [len(one.subshells) for one in found] == [0, 1, 2, 1, 0, 0]
    _, b, c, d, *_ = found
    assert (b.subshells, c.subshells[:1]) == (d.subshells, d.subshells)
    (deep,) = shell.commands("(" * 50 + "a" + ")" * 50)
    assert len(deep.subshells) == 8


@pytest.mark.parametrize(
    ("text", "reader", "here", "line", "is_filled"),
    [
        ('bash <<E\necho $X it\'s "a" \\"b\nE\nc', "bash", 'echo $X it\'s "a" \\"b', 2, True),
        ("bash <<'E' | tee log\necho $X it's \"a\"\nE\nc", "bash", 'echo $X it\'s "a"', 2, False),
        ("bash <<-\\E\n\t\ta\n\tb\n\tE\nc", "bash", "a\nb", 2, False),
        ("a <<A; bash <<B\na\nA\nb\nc\nB", "bash", "b\nc", 4, True),
        ("X=1 <<A; a\nb\nA\n", "a", None, 0, False),
    ],
)
def test_what_a_command_reads_from_a_here_document_is_kept_with_it(
    text: str, reader: str, here: str | None, line: int, is_filled: bool
) -> None:
    found = next(one.here for one in shell.commands(text) if one.texts[:1] == [reader])
    assert (found and found.text, found.line if found else 0) == (here, line)
    assert found is None or (not found.single_quoted) == is_filled


def test_a_note_in_backticks_is_no_word() -> None:
    found = shell.commands("a --b=2 `# two nodes` \\\n  `#` c `date # x`\n")
    assert [one.texts for one in found] == [["a", "--b=2", "c", "`date # x`"]]
