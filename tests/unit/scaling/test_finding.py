"""The one sentence about a scaling measurement: cases whose answer is known, as they were made up."""

from dataclasses import replace

import pytest

from entrypoint.scaling.finding import Parts, ScalingFinding, Size, gain, judge

QUIET = (0.99, 1.0, 1.01)
"""Repeats around a rate."""
LOUD = (0.6, 1.0, 1.5)


def size(
    nodes: int, efficiency: float, parts: Parts | None = None, repeats: tuple[float, ...] = QUIET
) -> Size:
    """So many ranks on as many nodes; one of them has the rate 100."""
    return Size(nodes, nodes, tuple(100 * nodes * efficiency * one for one in repeats), parts)


def parts(communication: float = 0.0, data: float = 0.0, imbalance: float = 0.0, slowest: str = "") -> Parts:
    return Parts(communication, data, imbalance, slowest)


ALONE = parts(data=0.02)


def found(*sizes: Size, strong: bool = True, cores: int = 0) -> ScalingFinding:
    return judge([replace(size, cores=cores) for size in sizes], is_strong=strong)


def test_a_given_share_of_communication_is_what_holds_it_back() -> None:
    """On three nodes a rank's step takes twice as long, and half of it is exchange."""
    said = found(size(1, 1.0, ALONE), size(2, 0.9, parts(0.1, 0.02)), size(3, 0.5, parts(0.5, 0.01)))
    assert said == ScalingFinding(
        "stops",
        "communication",
        "It stops paying beyond 2 nodes: 3 nodes are 0.83 times as fast as 2, where 1.50 would be ideal. "
        "What holds it back is communication: 50 % of a step on 3 nodes, 0 % on 1.",
    )


def test_a_given_share_of_data_time_is() -> None:
    said = found(size(1, 1.0, ALONE), size(2, 0.6, parts(0.02, 0.41)))
    assert said == ScalingFinding(
        "stops",
        "data",
        "It stops paying beyond 1 node: 2 nodes are 1.20 times as fast as 1, where 2.00 would be ideal. "
        "What holds it back is the wait for data: 41 % of a step on 2 nodes, 2 % on 1.",
    )


def test_one_slow_rank_is() -> None:
    said = found(size(1, 1.0, ALONE), size(4, 0.55, parts(0.03, 0.01, 0.42, "rank 2 on c\nd")))
    assert (said.kind, said.cause) == ("stops", "imbalance")
    assert said.sentence.endswith(
        "What holds it back is imbalance, the wait for slower ranks: 42 % of a step on 4 nodes, 0 % on 1; "
        "rank 2 on c d is the slowest."
    )


def test_too_little_work_a_rank_is() -> None:
    said = found(size(1, 1.0, ALONE), size(8, 0.4, parts(0.1, 0.02)))
    assert (said.kind, said.cause) == ("stops", "compute")
    assert said.sentence.endswith(
        "What holds it back is too little work a rank: in its small share the same work takes a rank "
        "2.24 times as long."
    )


def test_ranks_with_the_same_work_that_are_slower_together_share_something() -> None:
    sizes = (size(1, 1.0, ALONE), size(8, 0.4, parts(0.1, 0.02)))
    assert "in the ranks' own work" in found(*sizes, strong=False).sentence
    assert "this machine: 8 ranks share its 2 cores, and" in found(*sizes, strong=False, cores=2).sentence
    assert "this machine: 8 ranks share its 2 cores, and" in found(*sizes, cores=2).sentence


def test_two_causes_of_one_size_are_both_named() -> None:
    said = found(size(1, 1.0, parts()), size(2, 0.5, parts(0.2, 0.2, 0.0)))
    assert said.cause == "several"
    assert said.sentence.endswith(
        "No part alone holds it back; of what is lost: communication 40 %, waiting for data 40 %, "
        "the ranks' own work 20 %."
    )


def test_what_no_number_shows_is_said_to_be_so() -> None:
    said = found(size(1, 1.0), size(2, 0.55))
    assert (said.kind, said.cause) == ("stops", "unknown")
    assert said.sentence.endswith(
        "The numbers do not show what holds it back: no parts of the steps are known."
    )
    assert "3 ranks share the 2 cores of this machine" in found(size(1, 1.0), size(3, 0.6), cores=2).sentence


def test_ideal_within_noise_is_called_so() -> None:
    said = found(size(1, 1.0, ALONE), size(2, 0.99, ALONE), size(4, 0.985, ALONE))
    assert said == ScalingFinding(
        "ideal",
        "",
        "It scales ideally within noise up to 4 nodes: an efficiency of 98 %, by the repeats from 97 % to 100 %.",
    )


def test_more_than_ideal_is_ideal_too() -> None:
    assert found(size(1, 1.0), size(2, 1.2)).kind == "ideal"


def test_without_repeats_the_noise_is_not_known() -> None:
    said = found(size(1, 1.0, repeats=(1.0,)), size(2, 0.97, repeats=(1.0,)))
    assert said.kind == "ideal"
    assert said.sentence.endswith("as far as one run of each size tells; repeats would show the noise.")


def test_noise_larger_than_the_effect_is_called_noise() -> None:
    said = found(size(1, 1.0, ALONE, LOUD), size(2, 0.8, parts(0.2), LOUD))
    assert said == ScalingFinding(
        "noise",
        "unknown",
        "Noise: repeats of one size differ by up to 90 %, more than what the nodes change: the numbers do not "
        "show what more nodes give. Longer runs or more repeats may.",
    )


def test_an_effect_larger_than_much_noise_is_told() -> None:
    assert found(size(1, 1.0, repeats=(0.9, 1.1)), size(8, 0.15, repeats=(0.9, 1.1))).kind == "stops"


def test_a_program_that_pays_up_to_the_end_says_what_is_lost() -> None:
    said = found(size(1, 1.0, ALONE), size(2, 0.95, parts(0.05)), size(4, 0.8, parts(0.2, 0.02)))
    assert said == ScalingFinding(
        "pays",
        "communication",
        "It pays up to 4 nodes, the most that were tried: 3.20 times as fast as on 1 node, an efficiency of "
        "80 %. Most of the loss is communication: 20 % of a step on 4 nodes, 0 % on 1.",
    )


def test_a_size_after_which_a_larger_one_pays_is_no_limit() -> None:
    said = found(size(1, 1.0), size(2, 0.7), size(3, 0.7))
    assert (said.kind, said.sentence.startswith("It pays up to 3 nodes")) == ("pays", True)
    assert found(size(1, 1.0), size(2, 0.6), size(3, 0.6)).sentence.startswith(
        "It stops paying beyond 1 node"
    )


def test_a_limit_that_the_repeats_do_not_show_sharply_is_said_to_be_so() -> None:
    sizes = (size(1, 1.0), size(2, 0.74, repeats=(0.9, 1.0, 1.1)))
    assert "Repeats differ by up to 20 %, so that limit is not sharp." in found(*sizes).sentence
    assert "not sharp" not in found(size(1, 1.0), size(2, 0.5)).sentence


def test_one_size_shows_nothing() -> None:
    assert found(size(2, 1.0)).kind == "one-size"


def test_a_gain_counts_ranks_and_has_the_range_of_the_repeats() -> None:
    base, more = Size(1, 4, (100.0, 110.0)), replace(size(2, 1.0), ranks=8, rates=(150.0, 170.0, 180.0))
    seen = gain(more, base)
    assert [seen.speedup, seen.efficiency] == pytest.approx([170 / 105, 170 / 210])
    assert [seen.least, seen.most] == pytest.approx([150 / 220, 180 / 200])


def of_rates(*rates: tuple[float, ...]) -> ScalingFinding:
    """Of so many repeats on 1 node, 2 nodes, ..., with a rank each."""
    return judge([Size(at, at, one) for at, one in enumerate(rates, 1)], is_strong=True)


@pytest.mark.parametrize(
    ("base", "more", "kind"),
    [
        ((100,), (190,), "ideal"),
        ((100,), (189,), "pays"),
        ((100,), (150,), "pays"),
        ((100,), (149,), "stops"),
        ((100,), (10,), "stops"),
        ((100, 100), (300, 500), "ideal"),
        ((60, 150), (400, 400), "ideal"),
        ((100, 100), (200, 400), "noise"),
        ((100, 100), (184, 200), "ideal"),
        ((100, 100), (190, 198), "pays"),
        ((100, 100), (160, 200), "ideal"),
        ((100, 100), (140, 200), "noise"),
        ((100, 100), (140, 260), "noise"),
        ((100, 100), (20, 180), "noise"),
        ((100, 100), (60, 140), "stops"),
        ((100, 100), (10, 110), "stops"),
        ((100,), (100, 300), "noise"),
    ],
)
def test_a_difference_counts_if_it_is_larger_than_what_the_repeats_leave(
    base: tuple[float, ...], more: tuple[float, ...], kind: str
) -> None:
    assert of_rates(base, more).kind == kind


@pytest.mark.parametrize(("fastest", "is_near"), [(150, True), (149, False)])
def test_a_limit_is_sharp_if_the_fastest_repeat_does_not_pay_either(fastest: float, is_near: bool) -> None:
    assert ("that limit is not sharp" in of_rates((100, 100), (130, fastest)).sentence) == is_near


def test_nothing_holds_back_a_size_that_loses_nothing() -> None:
    said = found(size(1, 1.0, ALONE), size(2, 0.8, parts(0.2)), size(4, 1.0, ALONE))
    assert (said.kind, said.cause) == ("pays", "")
    assert said.sentence.endswith("times as fast as on 1 node, an efficiency of 100 %.")


@pytest.mark.parametrize(("one", "other"), [(None, ALONE), (ALONE, None)])
def test_the_cause_is_known_only_if_both_sizes_tell_their_parts(
    one: Parts | None, other: Parts | None
) -> None:
    sizes = [Size(1, 1, (100,), one), Size(2, 2, (120,), other)]
    said = judge(sizes, is_strong=True)
    assert (said.cause, said.sentence.endswith("no parts of the steps are known.")) == ("unknown", True)


@pytest.mark.parametrize(
    ("lost", "cause", "words"),
    [
        (parts(0.25, 0.25), "communication", "communication: 25 % of a step on 2 nodes, 0 % on 1."),
        (parts(0.25, 0.0, 0.25), "communication", "communication: 25 % of a step on 2 nodes, 0 % on 1."),
        (parts(0.25, 0.2, 0.1), "several", "communication 45 %, waiting for data 36 %, imbalance 18 %."),
        (parts(0.3, 0.3, 0.02), "several", "communication 48 %, waiting for data 48 %."),
        (parts(0.1, 0.1, 0.5), "imbalance", "50 % of a step on 2 nodes, 0 % on 1; no rank stands out."),
    ],
)
def test_half_of_the_loss_is_a_cause_and_a_twentieth_is_not_told(lost: Parts, cause: str, words: str) -> None:
    said = found(size(1, 1.0, parts()), size(2, 0.5, lost))
    assert (said.cause, said.sentence[-len(words) :]) == (cause, words)
