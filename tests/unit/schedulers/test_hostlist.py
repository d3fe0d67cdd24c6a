"""Node lists: what they expand to, in which order, and where their mistakes are.

Two libraries serve as oracles: python-hostlist keeps the list's order, ClusterShell sorts.
"""

import hostlist as python_hostlist
import pytest
from ClusterShell.NodeSet import NodeSet
from hypothesis import given
from hypothesis import strategies as st

from entrypoint.core.errors import BadInput
from entrypoint.schedulers import hostlist


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("gpu-a01", ["gpu-a01"]),
        ("b,a,c", ["b", "a", "c"]),
        ("gpu-a[01-02,07]", ["gpu-a01", "gpu-a02", "gpu-a07"]),
        (
            "gpu-a[01-02,07],b[1-3]n[0-1]",
            ["gpu-a01", "gpu-a02", "gpu-a07", "b1n0", "b1n1", "b2n0", "b2n1", "b3n0", "b3n1"],
        ),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[099-100]", ["n099", "n100"]),
        ("n[3-3]", ["n3"]),
        ("n[999999999999999999]", ["n999999999999999999"]),
        ("n[1]a[2]_b", ["n1a2_b"]),
        ("n[10,9,10]", ["n10", "n9", "n10"]),
        ("rack[1-2]-ib.cluster.org", ["rack1-ib.cluster.org", "rack2-ib.cluster.org"]),
        ("[1-2]n", ["1n", "2n"]),
        ("127.0.0.[1-2]", ["127.0.0.1", "127.0.0.2"]),
        ("fd00::[1-2],::1", ["fd00::1", "fd00::2", "::1"]),
    ],
)
def test_a_list_expands_in_its_own_order(text: str, names: list[str]) -> None:
    assert hostlist.expand(text, "LIST") == tuple(names)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "empty name at character 1"),
        ("a,", "empty name at character 3"),
        ("a,,b", "empty name at character 3"),
        ("a[1-2", "'[' without ']' at character 2"),
        ("a1-2]", "']' without '[' at character 5"),
        ("a[1[2]]", "'[' inside a bracket at character 4"),
        ("a[]", "missing number at character 3"),
        ("a[1,]", "missing number at character 5"),
        ("a[-2]", "missing number at character 3"),
        ("a[1-]", "missing number at character 5"),
        ("a[2-1]", "range 2-1 that runs backwards at character 3"),
        ("a[1-2-3]", "'2-3' in place of a number at character 5"),
        ("a[x-y]", "'x' in place of a number at character 3"),
        ("a[1\u0662]", "'1\u0662' in place of a number at character 3"),
        ("a[1-10/2]", "'10/2' in place of a number at character 5"),
        ("a b", "' ', which no host name has, at character 2"),
        ("a,b\nc", "'\\n', which no host name has, at character 4"),
        ("a;b", "';', which no host name has, at character 2"),
        ("kn\u00f6t", "'\u00f6', which no host name has, at character 3"),
        ("a[0-100000]", "range 0-100000 of more than 100000 names at character 3"),
        ("b,a[1-400]n[1-400]", "more than 100000 names at character 3"),
        ("a[1-60000],b[1-60000]", "more than 100000 names at character 12"),
        ("a[1-" + "9" * 19 + "]", "number of 19 digits at character 5"),
        ("a[" + "9" * 19 + "]", "number of 19 digits at character 3"),
        ("ab[1,x]c", "'x' in place of a number at character 6"),
        ("[1]]", "']' without '[' at character 4"),
        ("a[1-2],b[[", "'[' inside a bracket at character 10"),
        ("a[1-" + "9" * 30 + "]", "number of 30 digits at character 5"),
    ],
)
def test_a_mistake_is_named_with_its_place(text: str, wrong: str) -> None:
    with pytest.raises(BadInput) as refusal:
        hostlist.expand(text, "LIST")
    assert (
        str(refusal.value)
        == f"LIST={text!r} is not a node list: {wrong}: give names such as gpu-a[01-02,07],b1"
    )


def test_a_long_list_is_shortened_in_the_message() -> None:
    with pytest.raises(BadInput) as refusal:
        hostlist.expand("n[1-2]," * 1000, "LIST")
    shown = "'" + ("n[1-2]," * 12)[:79] + "..." + ("n[1-2]," * 5)[-29:] + "'"
    assert str(refusal.value) == (
        f"LIST={shown} is not a node list: empty name at character 7001: "
        "give names such as gpu-a[01-02,07],b1"
    )


@pytest.mark.parametrize(("letters", "is_whole"), [(117, True), (118, False)])
def test_a_list_of_up_to_120_characters_is_shown_whole(letters: int, is_whole: bool) -> None:
    text = "a" * letters + ";"
    with pytest.raises(BadInput) as refusal:
        hostlist.expand(text, "LIST")
    assert str(refusal.value).startswith(f"LIST={text!r} is not") is is_whole


def test_the_largest_cluster_expands() -> None:
    names = hostlist.expand("r[0-15]c[00-31]n[00-31]", "LIST")
    assert len(names) == 16_384
    assert (names[0], names[33], names[-1]) == ("r0c00n00", "r0c01n01", "r15c31n31")


def test_a_hundred_thousand_names_are_the_most() -> None:
    assert len(hostlist.expand("n[1-100000]", "LIST")) == 100_000
    assert len(hostlist.expand("a,n[0-99998]", "LIST")) == 100_000
    with pytest.raises(BadInput, match="more than 100000 names at character 3"):
        hostlist.expand("a,n[0-99999]", "LIST")


@st.composite
def brackets(draw: st.DrawFn) -> str:
    """`[01-02,7]`: ranges and single numbers, of one width each where they are padded."""
    items = []
    for _ in range(draw(st.integers(1, 3))):
        first = draw(st.integers(0, 150))
        last = first + draw(st.integers(0, 12))
        width = draw(st.sampled_from([0, len(str(last)), len(str(last)) + 2]))
        low, high = str(first).zfill(width), str(last).zfill(width)
        items.append(low if first == last else f"{low}-{high}")
    return f"[{','.join(items)}]"


def lists(between: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Node lists with up to two brackets a name, `between` behind each."""
    places = st.lists(st.tuples(brackets(), between), max_size=2)
    element = st.builds(
        lambda prefix, places: prefix + "".join(map("".join, places)),
        st.text("abc", min_size=1, max_size=3),
        places,
    )
    return st.lists(element, min_size=1, max_size=4).map(",".join)


@given(lists(st.text("xyz-.", max_size=3)))
def test_names_and_their_order_are_python_hostlists(text: str) -> None:
    expected = python_hostlist.expand_hostlist(text, allow_duplicates=True, sort=False)
    assert hostlist.expand(text, "LIST") == tuple(expected)


@given(lists(st.text("xyz", min_size=1, max_size=3)))
def test_the_set_of_names_is_clustershells(text: str) -> None:
    assert set(hostlist.expand(text, "LIST")) == set(NodeSet(text))


@st.composite
def names_and_list(draw: st.DrawFn) -> tuple[list[str], str]:
    """Names, and a list that stands for them: numbers of one width in a row become a range."""
    names: list[str] = []
    written = []
    for prefix in draw(st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=4)):
        width = draw(st.integers(1, 4))
        items = []
        for _ in range(draw(st.integers(1, 3))):
            first = draw(st.integers(0, 10**width - 1))
            last = draw(st.integers(first, min(first + 20, 10**width - 1)))
            names += [f"{prefix}{number:0{width}}" for number in range(first, last + 1)]
            items.append(f"{first:0{width}}-{last:0{width}}" if last > first else f"{first:0{width}}")
        alone = len(items) == 1 and "-" not in items[0]
        written.append(prefix + (items[0] if alone else f"[{','.join(items)}]"))
    return names, ",".join(written)


@given(names_and_list())
def test_what_was_compressed_expands_to_what_it_was(case: tuple[list[str], str]) -> None:
    names, text = case
    assert hostlist.expand(text, "LIST") == tuple(names)


@given(st.text("ab01[]-,. \n9", max_size=30))
def test_any_text_is_a_list_or_one_line_of_refusal(text: str) -> None:
    said = ""
    names: tuple[str, ...] = ()
    try:
        names = hostlist.expand(text, "LIST")
    except BadInput as refusal:
        said = str(refusal)
    assert bool(names) != bool(said)
    assert said.isprintable()
    assert all(name and not set(name) & set("[], \n") for name in names)


def test_distinct_names_pass_and_a_repeated_one_is_named() -> None:
    assert hostlist.distinct(("a", "b"), "LIST") == ("a", "b")
    with pytest.raises(BadInput, match=r"^LIST names b twice: give every node once$"):
        hostlist.distinct(("a", "b", "c", "b"), "LIST")
