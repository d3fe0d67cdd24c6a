"""What participants say of themselves, and whether it fits together."""

from entrypoint.meet.identity import disagreement, missing
from entrypoint.meet.messages import Extent, Hello, load
from tests.unit.meet.meeting import hello, who


def test_many_missing_nodes_are_counted() -> None:
    nodes = [f"n{node}" for node in range(100)]
    text = missing([(node, None) for node in range(10, 30)], 100, nodes, shown=3)
    assert text == "20 of 100 nodes have not come: 10 (n10), 11 (n11), 12 (n12) and 17 more"


def test_missing_tasks_are_named_with_their_local_rank() -> None:
    assert missing([(1, 0), (1, 1)], 4, ["a", "b"]) == "2 of 4 tasks have not come: 1.0 (b), 1.1 (b)"


def test_more_than_five_differences_are_counted() -> None:
    versions = {f"package{number}": "1" for number in range(9)}
    text = disagreement(who(0), who(1, versions=versions))
    assert text.count(" is unknown on node 0 (n0) and 1 on node 1 (n1)") == 5
    assert "; and 5 more: start" in text


def test_what_a_peer_claims_cannot_write_to_the_terminal() -> None:
    said = load(hello(who(1, device="cu\x1b[2Jda\nroot")), Extent(nodes=2, ranks=8))
    assert isinstance(said, Hello)
    assert disagreement(who(0), said.identity).startswith(
        "the nodes do not agree: device is cpu on node 0 (n0) and cu?[2Jda root on node 1 (n1): "
    )
