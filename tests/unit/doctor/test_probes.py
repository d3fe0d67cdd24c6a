"""The schedule of what is measured among nodes."""

from itertools import combinations

import pytest

from entrypoint.doctor.probes import rounds


@pytest.mark.parametrize("count", range(9))
def test_every_pair_meets_once_and_no_player_is_in_two_pairs_of_a_round(count: int) -> None:
    players = [4 * number for number in range(count)]
    schedule = list(rounds(players))
    pairs = [tuple(sorted(pair)) for one in schedule for pair in one]
    assert sorted(pairs) == sorted(combinations(players, 2))
    for one in schedule:
        busy = [player for pair in one for player in pair]
        assert len(busy) == len(set(busy)) == count // 2 * 2
