"""What the doctor measures: the schedule among nodes, and what of a measurement is a rate."""

import ctypes
import types
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from entrypoint.doctor import probes
from entrypoint.doctor.judge import Collective, FarGpu, GpuSpeed
from entrypoint.doctor.probes import rounds
from entrypoint.node import numa
from entrypoint.node.driver import DriverError
from tests.unit.node.trees import built


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


@pytest.mark.parametrize(
    ("granted", "index", "far"), [("0-55", 0, []), ("0-55", 5, [1]), ("56-57", 3, [0]), ("0,56", 5, [])]
)
def test_a_gpu_is_far_if_no_core_was_granted_on_its_numa_node(
    granted: str, index: int, far: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built("DGX H100, two sockets with a NUMA node each, hyperthreads on", tmp_path)

    def call(function: str, address: Any, size: int, device: ctypes.c_int) -> None:
        assert (function, size) == ("cuDeviceGetPCIBusId", 32)
        address.value = b"00000000:%02X:00.0" % (device.value + 0xC1)

    monkeypatch.setattr(probes, "library", lambda _: call)
    monkeypatch.setattr(numa, "granted", lambda: numa.parse_list(granted))
    topology, place = numa.topology, numa.place
    monkeypatch.setattr(numa, "topology", lambda cores: topology(cores, tmp_path))
    monkeypatch.setattr(numa, "place", lambda address: place(address, tmp_path))
    found = probes.far_gpu("n1", 5, torch.device("cuda", index))
    assert found == [FarGpu(node="n1", local_rank=5, numa_node=one) for one in far]


def test_where_there_is_no_driver_no_gpu_is_far(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(probes, "library", missing)
    assert probes.far_gpu("n1", 0, torch.device("cuda", 0)) == []


OTHERS = [[0.0, 9.0, 9.0], [9.0, 0.0, 0.0]]
"""The best way from each of three nodes and to each, as the second and the third have measured them."""


def ways(monkeypatch: pytest.MonkeyPatch, sent: list[float], in_time: int = 10_000) -> int:
    """How many ways the first of three nodes measures. `sent`: bytes per second of each in turn, the last of which
    stays; `in_time`: rounds after which the time is up."""
    times = [0.0] * in_time
    count = 0

    def send(_device: torch.device, _target: int) -> float:
        nonlocal count
        count += 1
        return sent.pop(0) if len(sent) > 1 else sent[0]

    def everyones(_value: float, _device: torch.device) -> list[torch.Tensor]:
        return [torch.tensor(times.pop() if times else probes.WAYS + 1)]

    def all_reduce(mine: torch.Tensor, _op: object) -> None:
        mine.copy_(torch.maximum(mine, torch.tensor(OTHERS, dtype=mine.dtype)))

    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(probes, "_send", send)
    monkeypatch.setattr(probes, "_receive", lambda _device, _source: None)
    monkeypatch.setattr(probes, "_everyones", everyones)
    found = probes.ways(torch.device("cpu"), {0: "a", 4: "b", 8: "c"})
    assert {(way.source, way.target) for way in found} == {("a", "b"), ("a", "c")}
    return count


def test_ways_that_are_alike_are_measured_so_often_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ways(monkeypatch, [9.0]) == 2 * probes.SWEEPS


def test_a_node_whose_ways_are_slow_for_a_moment_catches_up(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = [1.0] * 2 * (probes.SWEEPS + 2)
    assert ways(monkeypatch, [*slow, 9.0]) == len(slow) + 2


@pytest.mark.parametrize("sweeps", [2, probes.SWEEPS + 5])
def test_the_ways_of_one_that_stays_slow_are_measured_until_the_time_is_up(
    monkeypatch: pytest.MonkeyPatch, sweeps: int
) -> None:
    assert ways(monkeypatch, [1.0], in_time=3 * sweeps - 1) == 2 * sweeps


CPU = torch.device("cpu")


class Watch:
    """A clock that goes on by so much with each piece of work."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.done = 100.0, list[str]()
        fake = types.SimpleNamespace(perf_counter=lambda: self.now, time=lambda: self.now)
        monkeypatch.setattr(probes, "time", fake)

    def work(self, seconds: float, name: str = "work") -> None:
        self.now += seconds
        self.done.append(name)


def test_a_rate_is_the_best_of_some_slices_and_begins_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    times = [9.0, 0.06, 0.06, 0.055, 0.055, *[0.06] * 20]
    assert probes._per_second(lambda: watch.work(times.pop(0)), CPU) == pytest.approx(2 / 0.11)
    assert len(watch.done) == 1 + 2 * probes.SLICES


def test_a_collective_is_timed_from_where_all_are_there_by_the_slowest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch = Watch(monkeypatch)
    monkeypatch.setattr(dist, "barrier", lambda: watch.work(7.0, "barrier"))
    asked: list[float] = []

    def everyones(value: float, _device: torch.device) -> list[torch.Tensor]:
        asked.append(value)
        return [torch.tensor(value), torch.tensor(2 * value)]

    monkeypatch.setattr(probes, "_everyones", everyones)
    assert probes._timed(lambda: watch.work(0.5), CPU, 3) == pytest.approx(1.0)
    assert asked == [pytest.approx(0.5)]
    assert watch.done == ["barrier", "work", "work", "work"]


@pytest.mark.parametrize(("once", "count"), [(1.0, 1), (0.1, 4), (0.001, 50)])
def test_a_collective_is_repeated_as_often_as_it_has_time(
    monkeypatch: pytest.MonkeyPatch, once: float, count: int
) -> None:
    counts: list[int] = []
    called: list[str] = []

    def timed(_work: Any, _device: torch.device, times: int) -> float:
        counts.append(times)
        return once

    monkeypatch.setattr(probes, "_timed", timed)
    monkeypatch.setattr(dist, "all_reduce", lambda _: called.append("all_reduce"))
    monkeypatch.setattr(dist, "all_gather_into_tensor", lambda *_: called.append("all_gather"))
    for name in ("all_reduce", "all_gather"):
        probes._seconds(name, torch.ones(4), torch.ones(2), CPU)
    assert counts == [1, count] * 2
    assert called == ["all_reduce", "all_gather"]  # the first one makes the connections


@pytest.mark.parametrize(
    ("ranks", "seconds", "found"),
    [
        (1, 0.001, []),
        (
            4,
            0.001,
            [
                *(Collective("all_reduce", size, size / 0.001 * 1.5) for size in probes.SIZES["cpu"]),
                *(Collective("all_gather", size, size / 0.001 * 0.75) for size in probes.SIZES["cpu"]),
            ],
        ),
        (  # the next size would take longer than it may
            2,
            0.1,
            [
                Collective("all_reduce", 1 << 16, (1 << 16) / 0.1),
                Collective("all_gather", 1 << 16, (1 << 16) / 0.1 / 2),
            ],
        ),
    ],
)
def test_bus_bandwidth_is_what_nccl_tests_call_so(
    monkeypatch: pytest.MonkeyPatch, ranks: int, seconds: float, found: list[Collective]
) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    monkeypatch.setattr(dist, "get_rank", lambda: ranks - 1)
    monkeypatch.setattr(probes, "_seconds", lambda *_: seconds)
    assert probes.collectives(CPU) == found


def test_a_clock_is_compared_in_the_quickest_of_some_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other node's clock is 30 s ahead, and answers in the middle of a round."""
    watch = Watch(monkeypatch)
    took = [0.4] * probes.PINGS
    took[3] = 0.02
    set_: list[str] = []

    class Store:
        def set(self, key: str, _: str) -> None:
            set_.append(key)

        def get(self, _: str) -> bytes:
            half = took.pop(0) / 2
            watch.now += half
            theirs = repr(watch.now + 30).encode()
            watch.now += half
            return theirs

    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    (clock,) = probes.clocks(Store(), {0: "a", 4: "b"})
    assert clock.node == "b"
    assert [clock.ahead, clock.bound] == pytest.approx([30, 0.01])
    assert set_ == [f"ping/4/{number}" for number in range(probes.PINGS)]
    monkeypatch.setattr(dist, "get_rank", lambda: 5)
    assert probes.clocks(Store(), {0: "a", 4: "b"}) == []


@pytest.mark.parametrize(("busy", "measured"), [(0, 1), (2, 3), (99, 9)])
def test_a_node_that_stands_out_is_measured_again_until_it_is_like_the_others(
    monkeypatch: pytest.MonkeyPatch, busy: int, measured: int
) -> None:
    """Each measurement takes a second; of those that are busy for longer than is waited, the best counts."""
    watch = Watch(monkeypatch)
    rates = [*[50.0] * busy, 100.0]

    def measure() -> float:
        watch.work(1.0)
        return rates.pop(0)

    def everyones(value: float, _device: torch.device) -> list[torch.Tensor]:
        is_rate = value >= 50
        return [torch.tensor(value), *([torch.tensor(100.0)] * 2 if is_rate else [])]

    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(probes, "_everyones", everyones)
    assert probes.settled(measure, ["a", "b", "c"], CPU) == (100.0 if busy < 9 else 50.0)
    assert len(watch.done) == measured


def test_the_first_rank_of_a_node_tells_its_time_after_each_question(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    passed: list[tuple[str, str]] = []

    class Store:
        def get(self, key: str) -> bytes:
            watch.now += 1
            passed.append(("get", key))
            return b""

        def set(self, key: str, value: str) -> None:
            passed.append((value, key))

    monkeypatch.setattr(dist, "get_rank", lambda: 4)
    assert probes.clocks(Store(), {0: "a", 4: "b"}) == []
    assert passed == [
        step
        for at in range(probes.PINGS)
        for step in (("get", f"ping/4/{at}"), (repr(101.0 + at), f"pong/4/{at}"))
    ]


def traffic(monkeypatch: pytest.MonkeyPatch, seconds: float, answers: list[float]) -> list[str]:
    """What is sent and received: the numbers of a tensor of so many bytes. A payload takes so many seconds."""
    watch = Watch(monkeypatch)
    passed: list[str] = []

    def send(tensor: torch.Tensor, rank: int) -> None:
        size = tensor.numel() * 4
        watch.now += seconds if size > 4 else 0
        passed.append(f"{rank} gets {size if size > 4 else tensor.item()}")

    def recv(tensor: torch.Tensor, rank: int) -> None:
        size = tensor.numel() * 4
        if size == 4 and answers:
            tensor.fill_(answers.pop(0))
        passed.append(f"{rank} gave {size if size > 4 else tensor.item()}")

    monkeypatch.setattr(dist, "send", send)
    monkeypatch.setattr(dist, "recv", recv)
    return passed


@pytest.mark.parametrize(("seconds", "sizes"), [(0.0199, (1 << 18, 1 << 23)), (0.0201, (1 << 18,))])
def test_the_large_payload_is_sent_only_if_the_small_one_passes_at_once(
    monkeypatch: pytest.MonkeyPatch, seconds: float, sizes: tuple[int, ...]
) -> None:
    passed = traffic(monkeypatch, seconds, [])
    assert probes._send(CPU, 3) == pytest.approx(sizes[-1] / seconds)
    last = float(len(sizes) == 2)
    assert passed[:2] == ["3 gets 0.0", "3 gave 0.0"]
    assert [step for step in passed[2:] if step.startswith("3 gets")] == [
        one for size in sizes for one in (f"3 gets {size}", f"3 gets {last}")
    ]


@pytest.mark.parametrize(
    ("answers", "sizes"), [([0.0, 1.0, 1.0], (1 << 18, 1 << 23)), ([0.0, 0.0], (1 << 18,))]
)
def test_the_other_side_receives_what_is_sent_and_answers_it(
    monkeypatch: pytest.MonkeyPatch, answers: list[float], sizes: tuple[int, ...]
) -> None:
    told = list(answers[1:])
    passed = traffic(monkeypatch, 0.0, answers)
    probes._receive(CPU, 3)
    before = [0.0, *told]
    assert passed == [
        *("3 gave 0.0", "3 gets 0.0"),
        *(
            step
            for at, size in enumerate(sizes)
            for step in (f"3 gave {size}", f"3 gets {before[at]}", f"3 gave {told[at]}")
        ),
    ]


@pytest.mark.parametrize("count", [0, 3])
def test_memory_errors_are_counted_since_the_driver_was_loaded(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []

    def call(function: str, *words: Any) -> None:
        called.append(function)
        if function == "nvmlDeviceGetHandleByUUID":
            assert words[0] == b"GPU-7"
        if function == "nvmlDeviceGetTotalEccErrors":
            assert words[1:3] == (1, 0)
            words[3]._obj.value = count

    monkeypatch.setattr(probes, "library", lambda _: call)
    assert probes._memory_errors("GPU-7") == count
    assert called == ["nvmlInit_v2", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetTotalEccErrors"]


@pytest.mark.parametrize("error", [OSError("no library"), DriverError(3)])
def test_a_gpu_may_count_no_memory_errors(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> None:
        raise error

    monkeypatch.setattr(probes, "library", missing)
    assert probes._memory_errors("GPU-7") is None


def test_what_is_taken_of_a_gpu_is_what_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (30, 80))
    told = types.SimpleNamespace(name="H100", uuid="7")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: told)
    monkeypatch.setattr(probes, "_memory_errors", {"GPU-7": 2}.get)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    found = probes.gpu(3, "a", torch.device("cuda", 0))
    assert found == GpuSpeed(rank=3, node="a", name="H100", used=50, total=80, ecc=2, visible=4)
