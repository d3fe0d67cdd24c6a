"""What participants say of themselves, and whether it fits together."""

import asyncio
from typing import Any

import pytest

from entrypoint.meet.claims import Identity, disagreement, load, missing, pack, unpack
from entrypoint.meet.wire import WireError, greet
from tests.unit.meet.meeting import KEY, Place, hello, run, who


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
    raw = hello(who(1, device="cu\x1b[2Jda\nroot"))["identity"]
    assert disagreement(who(0), load(Identity, raw)).startswith(
        "the nodes do not agree: device is cpu on node 0 (n0) and cu?[2Jda root on node 1 (n1): "
    )


@pytest.mark.parametrize("nodes", [range(16_384), range(0, 16_384, 2), range(16_383, 16_384)])
@run
async def test_which_of_16384_nodes_take_part_fits_into_a_frame(nodes: range) -> None:
    place = Place()
    got: list[dict[str, Any]] = []

    async def tell(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = await greet(reader, writer, KEY, hub=True)
        wire.send({"type": "welcome"})
        wire.send({"type": "go", "members": pack(nodes)})
        await wire.close()

    server = await asyncio.start_server(tell, place.address, place.port)
    wire, _ = await place.spoke()
    got = [await wire.receive(), await wire.receive()]
    await wire.close()
    server.close()
    assert unpack(got[1]["members"], 16_384) == tuple(nodes)
    assert len(got[1]["members"]) <= 4096


@pytest.mark.parametrize("text", ["", "10", "g", " 1", "0x1", "1_0", "-1", "f" * 5000])
def test_nodes_that_there_are_not_are_refused(text: str) -> None:
    assert unpack("b", 4) == (0, 1, 3)
    assert unpack("0", 4) == ()
    with pytest.raises(WireError, match="it sent nodes that are none"):
        unpack(text, 4)
