"""What a line of a log says of itself, in the forms of torchrun, Slurm, MPI, NCCL and the loggers."""

import calendar

import pytest

from entrypoint.explain import lines


@pytest.mark.parametrize(
    ("line", "body"),
    [
        (b"[rank3]: RuntimeError: x", b"RuntimeError: x"),
        (b"[default0]:[rank0]:  x", b"x"),
        (b"[Rank 12] x", b"x"),
        (b"[1,3]<stderr>: x", b"x"),
        (b"[2026-01-02 03:04:05.678] x", b"x"),
        (b"2026-01-02 03:04:05,678 INFO x", b"INFO x"),
        (b"2026/01/02T03:04:05+01:00 x", b"x"),
        (b"2026-01-02T03:04:05.5Z x", b"x"),
        (b"[E102 03:04:05.678 ProcessGroupNCCL.cpp:1] x", b"x"),
        (b"W0102 03:04:05.678 123 torch/x.py:4] x", b"x"),
        (b"3: x", b"x"),
        (b"3:x", b"3:x"),
        (b"(pid=12) x", b"x"),
        (b"(RayTrain pid=12, ip=10.0.0.1) x", b"x"),
        (b"(rank 3) x", b"x"),
        (b"gpu07: Traceback (most recent call last):", b"Traceback (most recent call last):"),
        (b"gpu07: [rank3]: x", b"x"),
        (b"gpu07: torch.cuda.OutOfMemoryError: x", b"torch.cuda.OutOfMemoryError: x"),
        (b"gpu07: hello", b"gpu07: hello"),
        (b"  [rank0]: x", b"x"),
        (b"[rank0]: " * 5 + b"x", b"[rank0]: x"),
        (b"x [rank0]: y", b"x [rank0]: y"),
        (b"", b""),
    ],
)
def test_the_message_stands_behind_up_to_four_labels(line: bytes, body: bytes) -> None:
    assert lines.body(line) == body


@pytest.mark.parametrize(
    ("line", "rank"),
    [
        (b"[rank3]: x", 3),
        (b"[default5]:x", None),
        (b"[default1]:[rank5]: x", 5),
        (b"x on rank 7", 7),
        (b"Rank: 4 failed", 4),
        (b"rank=0", 0),
        (b"[1,6]<stderr>: x", 6),
        (b"  rank      : 2 (local_rank: 1)", 2),
        (b"12: x", 12),
        (b"worker-1: [rank6]: x", 6),
        (b"x 12: y", None),
        (b"franks 3", None),
        (b"rank 1234567", None),
        (b" " * 394 + b"rank 3", 3),
        (b" " * 395 + b"rank 3", None),
    ],
)
def test_a_line_names_its_rank(line: bytes, rank: int | None) -> None:
    assert lines.rank(line) == rank


@pytest.mark.parametrize(
    ("line", "node"),
    [
        (b"srun: error: gpu-a02: task 3: Killed", "gpu-a02"),
        (b"slurmstepd: error: *** STEP 7.0 ON gpu1 CANCELLED AT 2026", "gpu1"),
        (b"gpu1:123:456 [0] NCCL WARN x", "gpu1"),
        (b"x: Node failure on gpu1.", "gpu1"),
        (b"it failed on node gpu1", "gpu1"),
        (b"  host      : gpu1.example.org", "gpu1.example.org"),
        (b"Jan 02 03:04:05 gpu1 kernel: NVRM: Xid", "gpu1"),
        (b"[gpu1 kernel] NVRM: Xid", "gpu1"),
        (b"ssh: connect to host gpu1 port 22: No route to host", "gpu1"),
        (b"apptrain: gpu1: no driver", "gpu1"),
        (b"apptrain: attempt 2: login: lost: no word", "login"),
        (b"apptrain: login: no driver", ""),
        (b"apptrain: rank 3 on a: x", "a"),
        (b"node 2 (gpu1) left", "gpu1"),
        (b"gpu1: x", "gpu1"),
        (b"python3: can't open file", ""),
        (b"python3: it failed on node gpu1", "gpu1"),
        (b"srun: error: n[1]: task 3: x", ""),
        (b"srun: error: n12: tasks 3-4: x", "n12"),
        (b"worker-1: [rank6]: x", "worker-1"),
        (b"apptrain: image: copied to /tmp on 3 of 3 nodes", ""),
        (b"x node=gpu1 y", "gpu1"),
        (b"x subnode=gpu1 y", ""),
        (b"Node gpu1 is down", "gpu1"),
        (b"JOB 7 ON gpu1 CANCELLED AT 2026 DUE TO NODE FAILURE", ""),
        (b"x", ""),
        (b" " * 590 + b"node=gpu1", "gpu1"),
        (b" " * 600 + b"node=gpu1", ""),
    ],
)
def test_a_line_names_a_node(line: bytes, node: str) -> None:
    assert lines.node(line) == node


@pytest.mark.parametrize(
    ("line", "device"),
    [
        (b"GPU 3 has fallen off the bus", "3"),
        (b"on cuda:12", "12"),
        (b"gpu1:1:2 [5] misc/x.cc:1 NCCL WARN", "5"),
        (b"CUDA device 0 is busy", "0"),
        (b"cuda device 1", "1"),
        (b"GPUs 3", ""),
        (b"GPU 123", ""),
        (b" " * 595 + b"GPU 3", "3"),
        (b" " * 600 + b"GPU 3", ""),
    ],
)
def test_a_line_names_a_gpu(line: bytes, device: str) -> None:
    assert lines.device(line) == device


MARCH = calendar.timegm((2000, 3, 1, 12, 30, 5))


@pytest.mark.parametrize(
    ("line", "seconds"),
    [
        (b"2026-03-01 12:30:05 x", MARCH),
        (b"x 2026/03/01T12:30:05 y", MARCH),
        (b"2026-03-01 12:30:05,25 x", MARCH + 0.25),
        (b"2026-03-01 12:30:05.75 x", MARCH + 0.75),
        (b"03/01/2026 12:30:05;x", MARCH),
        (b"[E301 12:30:05.5 x] y", MARCH + 0.5),
        (b"W0301 12:30:05 x", MARCH),
        (b"Mar  1 12:30:05 x", MARCH),
        (b"Dec 31 23:59:59 x", calendar.timegm((2000, 12, 31, 23, 59, 59))),
        (b"Jan 1 00:00:00 x", calendar.timegm((2000, 1, 1, 0, 0, 0))),
        (b"2026-02-29 00:00:00", calendar.timegm((2000, 2, 29, 0, 0, 0))),
        (b"2026-12-31 00:00:00", calendar.timegm((2000, 12, 31, 0, 0, 0))),
        (b"2026-13-01 12:30:05 x", None),
        (b"2026-00-01 12:30:05 x", None),
        (b"2026-03-32 12:30:05 x", None),
        (b"2026-03-00 12:30:05 x", None),
        (b"2026-03-01 24:30:05 x", None),
        (b"2026-03-01 12:60:05 x", None),
        (b"12:30:05 x", None),
        (b"x", None),
        (b" " * 281 + b"2026-03-01 12:30:05", MARCH),
        (b" " * 282 + b"2026-03-01 12:30:05", None),
    ],
)
def test_times_of_all_loggers_can_be_compared(line: bytes, seconds: float | None) -> None:
    assert lines.time(line) == seconds


@pytest.mark.parametrize(
    ("name", "rank", "node"),
    [
        ("logs/0/gpu-a02.rank3.err", 3, "gpu-a02"),
        ("logs/0/gpu-a02.rank0.out", 0, "gpu-a02"),
        ("rank_7/out.log", 7, ""),
        ("x-rank-12.log", 12, ""),
        ("attempt_0/3/stderr.log", 3, ""),
        ("attempt_0/0/stdout.log", 0, ""),
        ("job.out", None, ""),
        ("frank3.log", None, ""),
        ("rank3x.log", None, ""),
    ],
)
def test_the_name_of_a_file_tells_its_rank_and_node(name: str, rank: int | None, node: str) -> None:
    assert lines.of_file(name) == (rank, node)
