"""What the doctor measures: the schedule among nodes, and what of a measurement is a rate."""

from itertools import combinations

import pytest
import torch

from entrypoint.doctor import probes
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


def test_a_product_of_matrices_has_two_operations_for_each_factor_and_a_copy_reads_and_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probes, "_per_second", lambda _work, _device: 3.0)
    monkeypatch.setattr(probes, "EDGE", {"cpu": 10})
    monkeypatch.setattr(probes, "COPY", {"cpu": 4000})
    assert probes.compute(torch.device("cpu"))() == 3 * 2 * 10 * 10 * 10
    assert probes.copy(torch.device("cpu"))() == 3 * 2 * 4000
