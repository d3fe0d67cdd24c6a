from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from train import rng
from train.sampler import evaluation_batches, permutation, rank_batches, stream
from train.schedule import learning_rate, total_steps

sizes = st.integers(1, 60)
seeds = st.integers(0, 2**63 - 1)


@given(seed=seeds, epoch=st.integers(0, 1000), size=sizes)
def test_an_epoch_holds_every_sample_once(seed: int, epoch: int, size: int) -> None:
    assert sorted(permutation(seed, epoch, size).tolist()) == list(range(size))


@given(seed=seeds, size=sizes, batch=st.integers(1, 40), epochs=st.integers(1, 4))
def test_batches_see_every_sample_once_an_epoch_whatever_their_size(
    seed: int, size: int, batch: int, epochs: int
) -> None:
    steps = -(-size * epochs // batch)
    seen: Counter[tuple[int, int]] = Counter()
    for step in range(steps):
        epoch, index = stream(seed, size, step * batch, batch)
        assert len(epoch) == len(index) == batch
        seen.update(zip(epoch.tolist(), index.tolist(), strict=True))
    whole = {(epoch, index) for epoch in range(epochs) for index in range(size)}
    assert whole <= seen.keys()
    assert set(seen.values()) == {1}


@settings(max_examples=50)
@given(
    seed=seeds,
    size=sizes,
    ranks=st.integers(1, 5),
    accumulation=st.integers(1, 3),
    micro=st.integers(1, 4),
    begin=st.integers(0, 7),
)
def test_the_ranks_shares_are_the_global_batch_cut_in_order(
    seed: int, size: int, ranks: int, accumulation: int, micro: int, begin: int
) -> None:
    batch = ranks * accumulation * micro
    parts = [
        [
            list(zip(epochs.tolist(), indices.tolist(), strict=True))
            for epochs, indices in rank_batches(
                seed=seed,
                size=size,
                position=begin * batch,
                batch_size=batch,
                accumulation=accumulation,
                rank=rank,
                world_size=ranks,
                steps=2,
            )
        ]
        for rank in range(ranks)
    ]
    for step in range(2):
        joined = [
            key
            for rank in range(ranks)
            for part in parts[rank][step * accumulation : (step + 1) * accumulation]
            for key in part
        ]
        epochs, indices = stream(seed, size, (begin + step) * batch, batch)
        assert joined == list(zip(epochs.tolist(), indices.tolist(), strict=True))


@given(size=sizes, batch=st.integers(1, 20), ranks=st.integers(1, 6))
def test_evaluation_batches_are_those_of_one_process_dealt_out(size: int, batch: int, ranks: int) -> None:
    alone = list(evaluation_batches(size=size, batch_size=batch, rank=0, world_size=1))
    dealt = [
        part
        for rank in range(ranks)
        for part in evaluation_batches(size=size, batch_size=batch, rank=rank, world_size=ranks)
    ]
    assert sorted(dealt, key=lambda part: part.start) == alone
    assert [index for part in alone for index in part] == list(range(size))


def test_orders_differ_between_epochs_and_seeds() -> None:
    orders = {tuple(permutation(seed, epoch, 50).tolist()) for seed in (1, 2) for epoch in (0, 1)}
    assert len(orders) == 4


def test_what_random_numbers_are_drawn_for_keeps_its_number_so_that_a_run_can_be_repeated_later() -> None:
    purposes = (rng.ORDER, rng.AUGMENT, rng.STEP, rng.WEIGHTS, rng.PIXELS)
    assert purposes == (1, 2, 3, 4, 5)
    assert len({rng.seed_for(7, purpose) for purpose in purposes}) == 5


def test_the_hash_does_not_change() -> None:
    """Saved runs go on only while these values stand."""
    assert int(rng.hash32(1, 2, 3)) == 3564870899
    assert int(rng.hash32(-1)) == int(rng.hash32(2**64 - 1))
    assert rng.seed_for(1, rng.STEP, 40, 1) == 6816575654988694789
    assert permutation(1, 0, 10).tolist() == [2, 9, 4, 8, 3, 7, 6, 1, 0, 5]


@given(seed=seeds, keys=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20))
def test_a_vector_of_keys_gives_what_each_key_gives(seed: int, keys: list[int]) -> None:
    together = rng.hash32(seed, torch.tensor(keys), 7).tolist()
    assert together == [rng.hash32(seed, torch.tensor(key), 7).item() for key in keys]
    assert all(0 <= value < 2**32 for value in together)


def test_uniform_draws_are_spread_evenly_and_neighbours_are_not_alike() -> None:
    draws = rng.uniform(1, torch.arange(20_000))
    assert 0 <= float(draws.min()) <= float(draws.max()) < 1
    share = torch.histc(draws, 10, 0, 1) / len(draws)
    assert (share - 0.1).abs().max() < 0.01
    assert torch.corrcoef(torch.stack([draws[:-1], draws[1:]]))[0, 1].abs() < 0.03
    other = rng.uniform(2, torch.arange(20_000))
    assert torch.corrcoef(torch.stack([draws, other]))[0, 1].abs() < 0.03


def test_the_learning_rate_rises_in_proportion_and_falls_along_half_a_cosine() -> None:
    rates = [learning_rate(step, peak=0.8, warmup_steps=4, total_steps=8) for step in range(1, 9)]
    expected = [0.2, 0.4, 0.6, 0.8, 0.8, 0.4 * (1 + 0.5**0.5), 0.4, 0.4 * (1 - 0.5**0.5)]
    assert torch.allclose(torch.tensor(rates), torch.tensor(expected))


def test_without_warm_up_the_first_step_has_the_peak() -> None:
    assert learning_rate(1, peak=0.3, warmup_steps=0, total_steps=5) == 0.3
    assert learning_rate(4, peak=0.8, warmup_steps=4, total_steps=4) == 0.8
    assert learning_rate(4, peak=0.8, warmup_steps=8, total_steps=4) == 0.4


def test_epochs_are_rounded_up_to_whole_steps_and_steps_go_first() -> None:
    assert total_steps(steps=0, epochs=3, train_size=100, batch_size=64) == 5
    assert total_steps(steps=7, epochs=3, train_size=100, batch_size=64) == 7
