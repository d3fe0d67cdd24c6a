"""The first cause, and not its echoes: by the chain of the catalogue, by time, by rank."""

import io
import itertools
import random
from dataclasses import replace

import pytest

from entrypoint.batch.prepare import GOES_ON, UNTOLD
from entrypoint.explain import catalogue, judge, lines, logs
from entrypoint.explain import scan as scanning
from entrypoint.explain.catalogue import Entry
from entrypoint.explain.judge import Judgement
from entrypoint.explain.scan import Evidence, Index, ProcessEnd, Restart, Scan

INDEX = Index(catalogue.load())


def of(**logs: str) -> Judgement:
    scan = Scan(INDEX)
    for name, text in logs.items():
        scan.read(io.BytesIO(text.encode()), name, 1 << 30)
    return judge.of(scan, catalogue.own_error())


BOX = """torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Root Cause (first observed failure):
[0]:
  time      : 2026-03-11_10:22:31
  host      : gpu01
  rank      : 5 (local_rank: 1)
  exitcode  : 1  (pid: 48213)
"""
OOM = "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
RESET = "[rank0]: RuntimeError: [/x/pair.cc:534] Connection closed by peer [10.2.0.12]:39127\n"
WATCHDOG = "[rank1]:[E302 10:10:21.1 ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective operation timeout: x\n"
KEY_ERROR = "[rank2]: Traceback (most recent call last):\n[rank2]:   File \"a.py\", line 3, in f\n[rank2]: KeyError: 'x'\n"
OWN = "Traceback (most recent call last):\n  File \"a.py\", line 3, in <module>\n    g()\nKeyError: 'x'\n"


def test_an_echo_before_the_cause_is_not_taken_for_it() -> None:
    found = of(job=RESET + OOM + BOX)
    assert [one.entry.id for one in found.causes] == ["cuda-out-of-memory"]
    assert (found.causes[0].rank, found.causes[0].first.number) == (3, 2)
    assert {one.entry.id for one in found.others} == {"connection-lost", "child-failed"}


def test_a_symptom_gives_way_to_a_cause_wherever_that_stands() -> None:
    assert of(a=WATCHDOG, b=OOM).causes[0].entry.id == "cuda-out-of-memory"


def test_a_symptom_alone_is_the_answer() -> None:
    found = of(a=WATCHDOG)
    assert [one.entry.id for one in found.causes] == ["nccl-watchdog"]
    assert found.causes[0].rank == 1
    assert found.causes[0].leave_out == ""


def test_of_two_causes_the_earlier_one_counts_also_across_files() -> None:
    late = "2026-03-02 10:00:09 OSError: [Errno 28] No space left on device: '/x'\n"
    early = "2026-03-02 10:00:01 ModuleNotFoundError: No module named 'einops'\n"
    assert of(a=late, b=early).causes[0].entry.id == "module-not-found"
    assert of(a=early, b=late).causes[0].entry.id == "module-not-found"


def test_the_first_of_january_comes_after_the_last_of_december() -> None:
    old, new = "2025-12-31 23:59:50", "2026-01-01 00:00:05"
    found = of(
        a=f"{old} ERROR OSError: Disk quota exceeded\n{new} ERROR torch.OutOfMemoryError: CUDA out of memory\n"
    )
    assert [one.entry.id for one in found.causes] == ["quota", "cuda-out-of-memory"]


def test_at_the_end_of_a_year_the_rank_that_failed_first_is_that_of_december() -> None:
    boxes = "".join(
        BOX.replace("2026-03-11_10:22:31", time).replace("rank      : 5", f"rank      : {rank}")
        for rank, time in ((5, "2025-12-31_23:59:57"), (7, "2026-01-01_00:00:01"))
    )
    found = of(a="torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n" + boxes)
    assert (found.causes[0].entry.id, found.causes[0].rank) == ("cuda-out-of-memory", 5)


def test_the_time_limit_of_a_hang_follows_from_it() -> None:
    limit = "slurmstepd: error: *** JOB 1 ON n1 CANCELLED AT 2026-03-02T12:00:00 DUE TO TIME LIMIT ***\n"
    assert of(a=limit).causes[0].entry.id == "slurm-time-limit"
    assert of(a=WATCHDOG + limit).causes[0].entry.id == "nccl-watchdog"


def test_an_exception_that_nobody_knows_is_the_scripts_own_and_comes_before_what_follows_it() -> None:
    found = of(a=KEY_ERROR + WATCHDOG + BOX)
    assert [one.entry.id for one in found.causes] == ["script-error"]
    assert (found.causes[0].rank, found.causes[0].first.text) == (2, "KeyError: 'x'")


def test_an_exception_without_a_traceback_is_no_end() -> None:
    assert of(a="INFO retry after KeyError: 'x'\nKeyError: 'x'\n").causes == ()


def test_a_summary_alone_is_not_known_and_its_rank_and_node_are_named() -> None:
    found = of(a=BOX)
    assert found.causes == ()
    assert found.unknown is not None
    assert (found.unknown.rank, found.unknown.node) == (5, "gpu01")


def test_an_exit_status_in_torchruns_summary_has_the_rank_beside_it() -> None:
    (cause,) = of(a=BOX.replace("exitcode  : 1 ", "exitcode  : -9")).causes
    assert (cause.entry.id, cause.rank) == ("rank-killed", 5)


def test_a_warning_is_the_cause_only_if_something_failed() -> None:
    warning = "n1:7:9 [0] nccl_net_ofi_init:144 NCCL WARN NET/OFI aws-ofi-nccl initialization failed\n"
    assert of(a=warning + "step 1\ndone\n").causes == ()
    failed = "[rank0]: ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\n"
    assert of(a=warning + failed).causes[0].entry.id == "nccl-ofi"


def test_a_job_that_was_cancelled_is_told_so_only_if_no_task_had_failed() -> None:
    cancelled = "slurmstepd: error: *** STEP 4.0 ON n1 CANCELLED AT 2026-03-02T12:00:00 ***\n"
    assert of(a=cancelled).causes[0].entry.id == "slurm-cancelled"
    assert of(a="srun: error: n2: task 1: Exited with exit code 1\n" + cancelled).causes == ()


def test_a_good_log_has_nothing() -> None:
    assert of(a="step 1 loss 0.3\ndone\n") == Judgement((), (), None)


def test_the_node_is_left_out_only_if_the_cause_is_the_nodes() -> None:
    xid = (
        "Mar  2 10:00:21 gpu-a03 kernel: NVRM: Xid (PCI:0000:4e:00): 79, pid=1, GPU has fallen off the bus.\n"
    )
    assert of(a=xid).causes[0].leave_out == "gpu-a03"
    assert of(a=OOM + "srun: error: gpu-a03: task 3: Exited with exit code 1\n").causes[0].leave_out == ""
    bind = "FATAL:   mount source /data doesn't exist\n"
    others = (
        "srun: error: gpu-a04: task 0: Terminated\nsrun: error: gpu-a05: task 1: Exited with exit code 255\n"
    )
    assert of(a=bind + others).causes[0].leave_out == "gpu-a05"
    everywhere = others.replace("Terminated", "Exited with exit code 255")
    assert of(a=bind + everywhere).causes[0].leave_out == ""


DEFECT = OWN.replace("KeyError: 'x'", "RuntimeError: CUDA error: uncorrectable ECC error encountered")
LATER_BOX = BOX.replace("10:22:31", "10:22:45").replace("gpu01", "gpu02").replace(": 5", ": 9")
ABORTED = "srun: error: gpu-a02: task 5: Aborted (core dumped)\n"


@pytest.mark.parametrize(
    ("ends", "rank", "node"),
    [
        (BOX + LATER_BOX, 5, "gpu01"),
        (LATER_BOX + BOX, 5, "gpu01"),
        (BOX.replace(": 1 ", ": -6") + LATER_BOX, 9, "gpu02"),
        (ABORTED + "srun: error: gpu-a01: task 0: Exited with exit code 1\n", 0, "gpu-a01"),
        (ABORTED + "srun: error: gpu-a01: tasks 0,3: Aborted\n", 5, "gpu-a02"),
    ],
)
def test_an_exception_without_a_rank_is_of_the_process_that_ended_first_and_not_of_an_echo(
    ends: str, rank: int, node: str
) -> None:
    (cause, *_) = of(a=DEFECT + ends).causes
    assert (cause.entry.id, cause.rank, cause.node, cause.leave_out) == ("gpu-ecc", rank, node, node)


def test_a_node_that_the_cause_names_comes_before_one_where_another_process_ended() -> None:
    killed = "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been OOM Killed.\n"
    (cause, *_) = of(a=ABORTED + killed + "srun: error: gpu-a01: task 0: Out Of Memory\n").causes
    assert (cause.entry.id, cause.rank, cause.node) == ("host-out-of-memory", 0, "gpu-a01")


def test_srun_tells_the_node_of_a_rank() -> None:
    text = "[rank7]: RuntimeError: CUDA error: uncorrectable ECC error encountered\n"
    found = of(a=text + "srun: error: gpu-b1: task 7: Aborted\nsrun: error: gpu-b0: task 0: Terminated\n")
    assert (found.causes[0].node, found.causes[0].leave_out) == ("gpu-b1", "gpu-b1")


@pytest.mark.parametrize(
    ("line", "ranks"),
    [
        ("srun: error: n2: task 7: Exited with exit code 1", [7]),
        ("srun: error: n2: tasks 7-9: Terminated", []),
        ("mpirun noticed that process rank 3 with PID 9 on node n1 exited on signal 11.", [3]),
        ("  Process name: [[41190,1],4]", [4]),
        ("  Process name: [prterun-x1000c0s2b0n0-7120@1,5]", [5]),
    ],
)
def test_what_started_a_process_tells_which_rank_ended_by_itself(line: str, ranks: list[int]) -> None:
    scan = Scan(INDEX)
    scan.read(io.BytesIO(f"step 1\n{line}\n".encode()), "a", 1 << 20)
    assert [(end.rank, end.number) for end in scan.ends] == [(rank, 2) for rank in ranks]


def test_ranks_and_nodes_come_from_the_names_of_files_too() -> None:
    scan = Scan(INDEX)
    text = "torch.OutOfMemoryError: CUDA out of memory.\n"
    scan.read(io.BytesIO(text.encode()), "logs/0/gpu-a02.rank9.err", 1 << 20)
    found = judge.of(scan, catalogue.own_error())
    assert (found.causes[0].rank, found.causes[0].node) == (9, "gpu-a02")


CAUSE = next(one for one in catalogue.load() if one.id == "cuda-out-of-memory")


def evidence(number: int, rank: int | None, node: str, *, file: str = "a", device: str = "") -> Evidence:
    return Evidence(CAUSE, "x", file, number, (0, number), None, rank, node, device)


def process_end(rank: int | None, node: str, *, is_one: bool = True) -> ProcessEnd:
    return ProcessEnd(rank, node, "a", 9, is_one)


@pytest.mark.parametrize(
    ("seen", "ends", "places", "rank", "node"),
    [
        ([evidence(1, 3, "n1")], [process_end(5, "n2")], {3: "n4"}, 3, "n1"),
        ([evidence(1, None, ""), evidence(2, 4, ""), evidence(3, 5, "")], [process_end(6, "")], {}, 4, ""),
        ([evidence(1, None, ""), evidence(2, 4, "", file="b")], [process_end(6, "")], {}, 6, ""),
        ([evidence(1, None, "n1"), evidence(2, 4, "n2")], [process_end(6, "n1")], {}, 6, "n1"),
        ([evidence(1, None, "n1"), evidence(2, 4, "n1")], [process_end(6, "n1")], {}, 4, "n1"),
        ([evidence(1, None, "n1")], [process_end(6, "n2")], {}, None, "n1"),
        ([evidence(1, None, "")], [process_end(6, "n2", is_one=False)], {}, None, "n2"),
        ([evidence(1, None, "")], [process_end(6, "n2", is_one=False), process_end(7, "n3")], {}, 7, "n3"),
        ([evidence(1, 3, "")], [process_end(3, "n2"), process_end(4, "n3")], {3: "n4"}, 3, "n4"),
        ([evidence(1, 3, "")], [process_end(4, "n3"), process_end(3, "n2")], {4: "n4"}, 3, "n2"),
        ([evidence(1, 3, "")], [process_end(4, "n3")], {}, 3, "n3"),
        ([evidence(1, 3, "")], [process_end(4, "n3"), process_end(5, "n4")], {}, 3, ""),
        ([evidence(1, 3, ""), evidence(2, 3, "n7")], [process_end(4, "n3")], {}, 3, "n7"),
    ],
)
def test_rank_and_node_of_a_cause_are_found_by_what_other_lines_tell(
    seen: list[Evidence], ends: list[ProcessEnd], places: dict[int, str], rank: int | None, node: str
) -> None:
    found = judge.judge(seen, catalogue.own_error(), counts={}, ends=ends, places=places)
    (cause,) = found.causes
    assert (cause.rank, cause.node, cause.count) == (rank, node, len(seen))


@pytest.mark.parametrize(
    ("counts", "devices", "count", "device"),
    [
        ({}, ["", "5", "6"], 3, "5"),
        ({"cuda-out-of-memory": 9}, ["", "", ""], 9, ""),
        ({"other": 9}, ["1"], 1, "1"),
    ],
)
def test_a_cause_counts_its_lines_and_names_the_first_gpu(
    counts: dict[str, int], devices: list[str], count: int, device: str
) -> None:
    seen = [evidence(at, 3, "n1", device=one) for at, one in enumerate(devices, 1)]
    (cause,) = judge.judge(seen, catalogue.own_error(), counts=counts, ends=[process_end(3, "n1")]).causes
    assert (cause.count, cause.device) == (count, device)


@pytest.mark.parametrize(
    ("whose", "ends", "nodes", "leave_out"),
    [
        ("yes", [process_end(3, "n1"), process_end(7, "n2")], {"n1", "n2"}, "n1"),
        ("", [process_end(3, "n1")], {"n1", "n2"}, ""),
        ("alone", [process_end(3, "n1")], {"n1", "n2"}, "n1"),
        ("alone", [process_end(3, "n1"), process_end(7, "n2")], {"n1", "n2"}, ""),
        ("alone", [process_end(3, "n1")], {"n1"}, "n1"),
        ("alone", [process_end(0, "n1")], {"n1"}, ""),
        ("alone", [process_end(3, "n1"), process_end(0, "n1")], {"n1"}, ""),
        ("alone", [process_end(None, "n1")], {"n1"}, ""),
    ],
)
def test_a_node_is_to_be_left_out_if_the_fault_is_its_own(
    whose: str, ends: list[ProcessEnd], nodes: set[str], leave_out: str
) -> None:
    """A rank above 0 is of a job with others, of which no node is named."""
    seen = [replace(evidence(1, 3, "n1"), entry=replace(CAUSE, node=whose))]
    (cause,) = judge.judge(seen, catalogue.own_error(), counts={}, ends=ends, nodes=nodes).causes
    assert cause.leave_out == leave_out


PROGRESS = "".join(f"step {at} loss 0.{at}\n" for at in range(60))


@pytest.mark.parametrize(
    "text",
    [
        "[W 10:00:01 socket.cpp:697] [c10d] The client socket has failed to connect to [n1]:29500, will retry\n"
        + PROGRESS,
        "WARNING: NCCL WARN NET/OFI Unable to find libfabric, falling back to sockets\n" + PROGRESS,
        'Traceback (most recent call last):\n  File "a.py", line 1, in f\nOSError: [Errno 28] No space left on device\n'
        + PROGRESS,
    ],
    ids=["tried again", "fell back", "caught"],
)
def test_what_a_program_went_on_after_is_seen_and_no_cause(text: str) -> None:
    found = of(a=text)
    assert (found.causes, found.unknown) == ((), None)
    assert of(a=text, b=OOM).causes[0].entry.id == "cuda-out-of-memory"


FULL = "OSError: [Errno 28] No space left on device\n"
STEPS = PROGRESS.splitlines(keepends=True)


def test_an_error_near_the_end_is_a_cause() -> None:
    assert of(a=PROGRESS + FULL + "".join(STEPS[:2])).causes[0].entry.id == "disk-full"


@pytest.mark.parametrize(
    ("line", "most"),
    [(FULL, judge.MANY_BEHIND), ("WARNING: skipped /a/checkpoints/step-1\n", judge.FEW_BEHIND)],
)
def test_a_line_counts_up_to_so_many_other_lines_behind_it(line: str, most: int) -> None:
    before = of(a=line + "copying\n" * (most - 1))
    assert len(before.causes) == 1
    assert of(a=line + "copying\n" * most).causes == ()
    assert of(a=line + "copying\n" * most).unknown is None


def recorded(*blocks: tuple[int, int, str], frames: int = 1) -> str:
    """torchrun's report of ranks with @record, each with the second in which it failed; the last is the root
    cause. As torch 2.11 writes it."""
    rows = ["torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ", "=" * 60]
    rows += ["train.py FAILED", "-" * 60, "Failures:"]
    for place, (rank, second, text) in enumerate(blocks, 1 - len(blocks)):
        if not place:
            rows += ["-" * 60, "Root Cause (first observed failure):"]
        rows += [f"[{-place}]:", f"  time      : 2026-11-29_16:14:{second}", f"  host      : gpu{rank}"]
        rows += [f"  rank      : {rank} (local_rank: {rank})", f"  exitcode  : 1 (pid: 2188{rank}) "]
        rows += [
            "  error_file: lg/attempt_0/0/error.json",
            "  traceback : Traceback (most recent call last):",
        ]
        frame = [
            '    File "/x/errors/__init__.py", line 384, in wrapper',
            "      result = f(*args, **kwargs)",
        ]
        rows += [*frame * frames, *(f"  {row}" for row in text.split("\n")), "  "]
    return "\n".join([*rows, "=" * 60, ""])


@pytest.mark.parametrize("label", ["", "0: "])
@pytest.mark.parametrize(
    ("report", "cause", "rank", "text"),
    [
        (recorded((1, 44, "ValueError: bad lr")), "script-error", 1, "ValueError: bad lr"),
        (recorded((1, 44, "ValueError: bad lr"), frames=20), "script-error", 1, "ValueError: bad lr"),
        (recorded((1, 44, "x.Missing: k")), "script-error", 1, "x.Missing: k"),
        (
            recorded(
                (1, 53, "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB"),
                (0, 53, "FileNotFoundError: [Errno 2] No such file or directory: '/data/x.bin'"),
            ),
            *("file-missing", 0, "FileNotFoundError: [Errno 2] No such file or directory: '/data/x.bin'"),
        ),
        (
            recorded(
                (3, 53, "KeyError: 'y'"),
                (1, 53, "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB"),
                (0, 53, "ValueError: bad lr"),
            ),
            *("script-error", 0, "ValueError: bad lr"),
        ),
    ],
    ids=["unknown", "long", "odd", "both known", "one known"],
)
def test_a_traceback_in_torchruns_report_is_of_the_rank_above_it_and_the_root_cause_is_the_first(
    report: str, cause: str, rank: int, text: str, label: str
) -> None:
    found = of(job="".join(f"{label}{row}\n" for row in report.splitlines())).causes[0]
    assert (found.entry.id, found.rank, found.node, found.first.text) == (cause, rank, f"gpu{rank}", text)


def test_if_a_rank_ended_all_lines_count_though_a_second_program_ran_behind_it() -> None:
    found = of(a=OOM + BOX + "copying\n" * judge.MANY_BEHIND)
    assert [one.entry.id for one in found.causes] == ["cuda-out-of-memory"]


def test_how_far_a_line_is_from_the_end_is_by_lines_though_times_are_in_another_order() -> None:
    late = "2026-03-02 10:00:09 OSError: [Errno 28] No space left on device\n"
    early = "2026-03-02 10:00:01 exited with code 1\n"
    found = of(a=late + "copying\n" * judge.MANY_BEHIND + early)
    assert [one.entry.id for one in found.causes] == ["disk-full"]


def test_what_a_finalizer_raised_ended_nothing() -> None:
    ignored = f"Exception ignored in: <function Pool.__del__ at 0x7>\n{OWN}"
    assert of(a=ignored).causes == ()
    assert of(a=ignored + OOM).causes[0].entry.id == "cuda-out-of-memory"


def test_two_ranks_that_end_one_step_after_an_error_do_not_go_on() -> None:
    one_more = "rank 0 step 41 loss 1\nrank 1 step 41 loss 1\nrank 2 step 42 loss 1\n"
    assert of(a=PROGRESS + FULL + one_more + BOX).causes[0].entry.id == "disk-full"


@pytest.mark.parametrize("many", [3, 60])
def test_an_error_after_which_steps_follow_is_no_cause_though_a_rank_ended_later(many: int) -> None:
    found = of(a=FULL + "".join(STEPS[:many]) + BOX)
    assert found.causes == ()
    assert [one.entry.id for one in found.others] == ["child-failed"]


RUN_WITH = "run with NCCL_DEBUG=INFO for details"


@pytest.mark.parametrize("many", [3, 30, 60])
@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (OWN, "script-error"),
        (OWN.replace("KeyError: 'x'\n", OOM.removeprefix("[rank3]: ")), "cuda-out-of-memory"),
        (
            "slurmstepd: error: *** JOB 1 ON n1 CANCELLED AT 2026-03-02T12:00:00 DUE TO TIME LIMIT ***\n",
            "slurm-time-limit",
        ),
        ("=>> PBS: job killed: walltime 3632 exceeded limit 3600\n", "pbs-walltime"),
    ],
)
def test_steps_that_were_still_buffered_follow_the_last_word_of_a_process(
    text: str, cause: str, many: int
) -> None:
    assert of(a=text + "".join(STEPS[:many]) + BOX).causes[0].entry.id == cause


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (
            f"RuntimeError: NCCL error in: x.cpp:1, unhandled cuda error ({RUN_WITH}), NCCL version 2.19.3",
            "nccl-unhandled-cuda",
        ),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/data/INFO/skipped.txt'", "file-missing"),
        ("ModuleNotFoundError: No module named 'ignored'", "module-not-found"),
    ],
)
def test_words_of_a_warning_in_an_exception_that_ended_a_rank_make_it_no_warning(
    line: str, cause: str
) -> None:
    ended = OWN.replace("KeyError: 'x'", line)
    assert of(a=ended + "copying\n" * (judge.FEW_BEHIND + 1)).causes[0].entry.id == cause


def test_advice_to_set_a_level_of_logging_is_no_level() -> None:
    line = f"terminate called: NCCL error in: x.cpp:1, unhandled cuda error ({RUN_WITH})\n"
    assert of(a=line + "copying\n" * (judge.FEW_BEHIND + 1)).causes[0].entry.id == "nccl-unhandled-cuda"


@pytest.mark.parametrize(
    ("label", "node"), [("gpu-a01: ", "gpu-a01"), ("gpu-a01: [rank3]: ", "gpu-a01"), ("n1: ", "n1")]
)
def test_an_exception_behind_the_name_of_its_node_is_one(label: str, node: str) -> None:
    (cause,) = of(a="".join(label + line for line in OWN.splitlines(keepends=True))).causes
    assert (cause.entry.id, cause.node) == ("script-error", node)


def test_the_name_of_a_program_is_no_label() -> None:
    for line in ("python3: can't open file 'a.py'", "cuda12: Version mismatch", "step1: Error of the fit"):
        assert lines.body(line.encode()) == line.encode()


def test_an_exception_that_was_logged_is_no_last_word() -> None:
    logged = '2026-03-02 10:00:00 - ERROR - not saved\nTraceback (most recent call last):\n  File "a.py", line 3, in f\n'
    assert of(a=logged + FULL + "".join(STEPS[:9]) + BOX).causes == ()


@pytest.mark.parametrize(
    "weak",
    [
        "WARNING: port 6006 is occupied, using 6007\n",
        "n1:1:2 [0] NCCL WARN NET/OFI Unable to find libfabric\n",
        "/opt/x.py:3: UserWarning: No module named 'apex'\n",
        "mkdir: cannot create directory '/data': Permission denied\n",
        "/var/spool/slurmd/job1/slurm_script: line 4: module: command not found\n",
    ],
)
def test_a_weak_line_gives_way_to_an_exception_that_nobody_knows(weak: str) -> None:
    assert of(a=weak + OWN).causes[0].entry.id == "script-error"
    assert of(a=weak + "exited with code 1\n").causes[0].entry.id != "script-error"


@pytest.mark.parametrize(
    "first", ["cp: cannot stat '/x': No such file or directory\n", "INFO no module: No module named 'apex'\n"]
)
def test_a_weak_line_gives_way_to_a_later_cause(first: str) -> None:
    assert of(a=first + OOM).causes[0].entry.id == "cuda-out-of-memory"


def test_a_warning_is_not_taken_for_the_cause_of_an_error_that_nobody_knows() -> None:
    found = of(a="UserWarning: No module named 'apex'\nERROR: the reactor of node 7 is too hot\n")
    assert found.causes == ()
    assert found.unknown is not None
    assert found.unknown.text == "ERROR: the reactor of node 7 is too hot"


@pytest.mark.parametrize(
    "line",
    [
        "ModuleNotFoundError: No module named 'apex' - using torch layer norm instead\n",
        "libx.so.3: cannot open shared object file: No such file or directory (ignored)\n",
        "a cache in /tmp was made, as /home/me/.cache is not writable; Permission denied\n",
        "ls: cannot access '/tmp/old': No such file or directory\ncomputing\n",
        "rm: cannot remove '/tmp/old': Permission denied\nls: cannot access '/x': x\nready\n",
    ],
)
def test_what_a_program_goes_on_without_is_no_cause_though_something_failed(line: str) -> None:
    assert of(a=line + "srun: error: n1: task 0: Exited with exit code 1\n").causes == ()
    assert of(a=line + OOM).causes[0].entry.id == "cuda-out-of-memory"


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("ls: cannot access '/data': No such file or directory\n", "file-missing"),
        ("error: the cache is not writable; Permission denied\n", "permission-denied"),
        ("a1: open /home/me/x: Permission denied\n", "permission-denied"),
        ("    Permission denied\n", "permission-denied"),
        (
            "cp: error writing '/x': No space left on device\nTraceback (most recent call last):\n",
            "disk-full",
        ),
        ("ls: cannot access '/x': No such file or directory\nmkdir: cannot create '/x': y\n", "file-missing"),
        (
            "thing: HTTPSConnectionPool(host='x', port=443): x. thrown while requesting HEAD x\n",
            "hub-offline",
        ),
    ],
)
def test_a_line_that_reports_an_error_is_the_cause_if_something_failed(line: str, cause: str) -> None:
    assert of(a=line + "srun: error: n1: task 0: Exited with exit code 1\n").causes[0].entry.id == cause


@pytest.mark.parametrize(
    "end",
    [
        "slurmstepd: error: *** JOB 1 ON n1 CANCELLED AT 2026-03-02T12:00:00 DUE TO TIME LIMIT ***\n",
        "=>> PBS: job killed: walltime 3632 exceeded limit 3600\n",
        "OSError: [Errno 98] Address already in use\n",
    ],
)
def test_what_follows_an_exception_that_nobody_knows_is_not_the_cause(end: str) -> None:
    assert of(a=OWN + end).causes[0].entry.id == "script-error"
    assert of(a=end).causes[0].entry.id != "script-error"
    assert of(a=end + OWN).causes[0].entry.id != "script-error"


@pytest.mark.parametrize(
    ("line", "is_mild"),
    [
        ("NET/IB: transport retry counter exceeded", False),
        ("NET/IB: transport retry counter exceeded, retrying", True),
        ("WARNING: no loop devices available", True),
        ("2026-03-02 10:00:00 INFO no loop devices available", True),
        ("FATAL: no loop devices available", False),
        ("n1:1:1 [0] init.cc:825 NCCL WARN Duplicate GPU detected : rank 1 and rank 0", False),
    ],
)
def test_a_line_that_tells_of_no_failure_by_itself_is_mild(line: str, is_mild: bool) -> None:
    scan = Scan(INDEX)
    scan.read(io.BytesIO(line.encode()), "x.log", 1 << 20)
    assert [one.is_mild for one in scan.found] == [is_mild]


@pytest.mark.parametrize(
    "row",
    [
        "step {}",
        "Trial {} finished",
        "Epoch {}: 10%",
        "iter: {}",
        "{{'loss': 1, 'epoch': 0.{}}}",
        " 7%|# | {}/90 [00:01<",
    ],
)
def test_steps_of_training_are_known_in_many_forms(row: str) -> None:
    steps = "".join(f"{row.format(at)}\n" for at in range(3))
    assert of(a=FULL + steps + BOX).causes == ()
    assert len(of(a=FULL + row.format(7) * 3 + "\n" + BOX).causes) == 1


@pytest.mark.parametrize(
    "text",
    [
        "WARNING Retrying after connection broken by 'NewConnectionError: [Errno 101] Network is unreachable'\n",
        "[W101 10:00:00.1 socket.cpp:759] [c10d] The client socket has failed to connect to [n1]:29500 (errno: 113 - No route to host).\n",
        "OSError: [Errno 98] Address already in use - trying 29501\n",
        "[rank0]:[W101 10:00:00.1 TCPStore.cpp:125] [c10d] recvValue failed: Connection reset by peer\n",
        "SLURM_MAIL_TYPE=FAIL,TIME_LIMIT,NODE_FAIL\n",
        "WARNING: no module: No module named 'apex'\nWARNING: Connection reset by peer\n",
        'Exception ignored in: <f>\nTraceback (most recent call last):\n  File "a.py", line 3, in f\n' + FULL,
    ],
)
def test_a_warning_alone_is_no_cause(text: str) -> None:
    assert of(a=f"{text}ready\n").causes == ()


def test_a_known_warning_may_be_the_cause_of_an_error_that_nobody_knows() -> None:
    waits = "srun: Job 7 step creation temporarily disabled, retrying (Requested nodes are busy)\n"
    assert of(a=f"{waits}ERROR: no step\n").causes[0].entry.id == "slurm-step-waits"


@pytest.mark.parametrize("text", ["ERROR: broken", "strange.BrokenError: broken"])
def test_the_earliest_error_is_no_warning_if_there_is_another(text: str) -> None:
    found = of(a=f"2026-03-02 - ERROR - retrying the thing\n{text}\n")
    assert found.causes == ()
    assert found.unknown is not None
    assert found.unknown.text == text


@pytest.mark.parametrize(
    ("ends", "leave_out"),
    [
        ("srun: error: n3: tasks 4-7: Exited with exit code 255\n", "n3"),
        (
            "srun: error: n3: task 2: Exited with exit code 255\nsrun: error: n3: task 0: Exited with exit code 255\n",
            "",
        ),
        ("srun: error: n3: task 0: Exited with exit code 255\n", ""),
        ("apptrain: job 7\nsrun: error: n3: task 1: Exited with exit code 255\n", ""),
    ],
)
def test_a_node_whose_tasks_all_failed_is_left_out_only_if_there_were_others(
    ends: str, leave_out: str
) -> None:
    text = "FATAL:   mount source /data doesn't exist\n"
    (cause, *_) = of(a=text + ends).causes
    assert (cause.node, cause.leave_out) == ("n3", leave_out)


def test_a_last_line_without_its_end_is_read_with_those_before_it() -> None:
    found = of(a=OWN.rstrip("\n"))
    assert [(one.entry.id, one.first.number) for one in found.causes] == [("script-error", 4)]


def test_a_long_traceback_is_one_though_its_beginning_is_far_off() -> None:
    frames = "".join(f'  File "a.py", line {at}, in f\n    g()\n    ^^^\n' for at in range(40))
    found = of(a=f"Traceback (most recent call last):\n{frames}KeyError: 'x'\n")
    assert [one.entry.id for one in found.causes] == ["script-error"]


def test_a_frame_of_a_traceback_is_no_error() -> None:
    assert of(a='  File "/home/me/.triton/cache/EADDRINUSE.py", line 3, in f\n') == Judgement((), (), None)


def test_an_exit_that_a_script_asked_for_tells_no_cause() -> None:
    found = of(a=OWN.replace("KeyError: 'x'", "SystemExit: 1"))
    assert found.causes == ()


@pytest.mark.parametrize(
    "line",
    [
        '  File "train.py", line 3, in f\n    raise RuntimeError("CUDA out of memory")\n',
        '[rank1]:   File "train.py", line 3, in f\n[rank1]:     raise RuntimeError("CUDA out of memory")\n',
        "+ echo CUDA out of memory\n",
    ],
)
def test_source_code_and_commands_that_a_log_quotes_are_no_causes(line: str) -> None:
    assert of(a=line).causes == ()


GROUP = """  + Exception Group Traceback (most recent call last):
  |   File "load.py", line 9, in <module>
  |     asyncio.run(main())
  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "load.py", line 4, in shard
    |     raise OSError("shard 2 is damaged")
    |     ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
    | {}
    +------------------------------------
"""


@pytest.mark.parametrize("label", ["", "[rank3]: "])
@pytest.mark.parametrize(
    ("error", "cause"),
    [
        ("KeyError: 'shard-2'", "script-error"),
        ("load.Damaged: shard-2", "script-error"),
        ("OSError: [Errno 28] No space left on device", "disk-full"),
    ],
)
def test_what_is_in_an_exception_group_is_the_error(label: str, error: str, cause: str) -> None:
    found = of(a="".join(f"{label}{row}\n" for row in GROUP.format(error).splitlines())).causes
    assert [(one.entry.id, one.first.text) for one in found] == [(cause, error)]


CAUGHT = 'Traceback (most recent call last):\n  File "cache.py", line 3, in lock\nOSError: [Errno 116] Stale file handle\n'
STAGE = 'Traceback (most recent call last):\n  File "a.py", line 3, in <module>\nsched.StageFault: stage 4\n'


def test_an_exception_whose_name_does_not_say_so_is_one_if_it_ends_a_traceback() -> None:
    found = of(a=STAGE + WATCHDOG)
    assert [(one.entry.id, one.first.number) for one in found.causes] == [("script-error", 3)]


def test_what_a_program_caught_gives_way_to_the_exception_that_ended_it() -> None:
    assert [one.first.text for one in of(a=CAUGHT + STAGE).causes] == ["sched.StageFault: stage 4"]
    assert of(a=CAUGHT).causes[0].entry.id == "stale-handle"


def test_what_was_caught_while_another_exception_came_gives_way_to_that() -> None:
    during = "\nDuring handling of the above exception, another exception occurred:\n\n"
    direct = "\nThe above exception was the direct cause of the following exception:\n\n"
    assert of(a=CAUGHT + during + STAGE).causes[0].entry.id == "script-error"
    assert of(a=CAUGHT + direct + STAGE).causes[0].entry.id == "stale-handle"


def raised(text: str, frame: str = "<module>") -> str:
    return f'Traceback (most recent call last):\n  File "a.py", line 3, in <module>\n  File "a.py", line 9, in {frame}\n{text}\n'


DURING = "\nDuring handling of the above exception, another exception occurred:\n\n"
NO_PACKAGE, NO_MEMORY = "ModuleNotFoundError: No module named 'flash_attn'", "MemoryError: CUDA out of memory"
PRINTED = f'Traceback (most recent call last):\n  File "a.py", line 3, in main\n{NO_MEMORY}\n'


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (raised(NO_PACKAGE) + DURING + raised(NO_MEMORY), NO_MEMORY),
        (raised("KeyError: 'x'") + DURING + raised("ValueError: 3 columns"), "ValueError: 3 columns"),
        (
            raised("KeyError: 'x'") + DURING + raised("a.B: c") + DURING + raised("IndexError: 4"),
            "IndexError: 4",
        ),
        (CAUGHT + raised(NO_MEMORY), NO_MEMORY),
        # What saves or cleans up after a failure fails too.
        (raised(NO_MEMORY) + DURING + raised("OSError: Disk quota exceeded", "save_checkpoint"), NO_MEMORY),
        (raised("KeyError: 'x'") + DURING + raised("ValueError: y", "__exit__"), "KeyError: 'x'"),
        (raised(NO_PACKAGE) + DURING + raised("NameError: name 'model' is not defined"), NO_PACKAGE),
        (
            raised(NO_MEMORY)
            + DURING
            + raised("OSError: x", "save")
            + raised("OSError: Disk quota exceeded"),
            NO_MEMORY,
        ),
        *(
            (raised(NO_MEMORY) + DURING + raised("OSError: Disk quota exceeded", frame), NO_MEMORY)
            for frame in ("close", "finish", "flush", "shutdown")
        ),
        (raised(NO_PACKAGE) + DURING + raised(NO_MEMORY, "closed_loop"), NO_MEMORY),
        # The others waited for the rank that had told its exception.
        (
            PRINTED
            + "slurmstepd: error: *** JOB 1 ON n1 CANCELLED AT 2026-05-05T10:00:00 DUE TO TIME LIMIT ***\n",
            NO_MEMORY,
        ),
        (
            PRINTED
            + raised(
                "torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients. 1/2 clients joined."
            ),
            NO_MEMORY,
        ),
        # Of another rank.
        (raised(NO_PACKAGE) + DURING + raised(NO_PACKAGE) + f"[rank3]: {NO_MEMORY}\n", NO_PACKAGE),
    ],
)
def test_of_a_chain_of_exceptions_the_one_that_ended_the_program_is_the_cause(text: str, cause: str) -> None:
    assert of(a=text).causes[0].first.text == cause


def test_two_steps_of_later_are_enough_to_go_on() -> None:
    rows = ["2026-05-05 10:00:00 WARNING cache\n", CAUGHT]
    rows += [f"2026-05-05 10:{at}0:10 INFO step {at}\n" for at in (1, 2)]
    assert of(a="".join(rows)).causes == ()
    assert of(a="".join(rows[:-1])).causes != ()


def test_a_command_of_the_job_script_that_failed_before_a_step_is_no_cause() -> None:
    assert of(a="cp: cannot stat 'x': No such file or directory\nepoch 1/3 loss 2\n").causes == ()


@pytest.mark.parametrize(
    "line",
    [
        'If you see "CUDA error: no kernel image is available for execution on the device", build again.',
        'sample 3: "Why does torchrun say RuntimeError: Address already in use?"',
        "To avoid CUDA out of memory, take a smaller batch",
        "  --master-port PORT      change it after Address already in use",
        "epilogue: disk quota exceeded: no",
        "if CUDA out of memory, halve the batch",
        "# Address already in use? change PORT",
        "    oom_policy: kill      # CUDA out of memory -> kill",
        "settings {'fail_on': ['Connection refused', 'CUDA out of memory']}",
        "- `RuntimeError: CUDA out of memory`: take a smaller batch",
        "*** Disk quota exceeded? See the manual. ***",
        "*** Tell us when 'CUDA out of memory' appears ***",
        "oom_kill events: 0",
    ],
)
def test_a_line_that_only_speaks_of_a_failure_is_none(line: str) -> None:
    assert of(a=f"{line}\n").causes == ()


def test_a_message_in_a_log_of_json_is_one() -> None:
    assert of(a='{"level": "error", "msg": "CUDA out of memory. Tried to allocate 1 GiB"}\n').causes


@pytest.mark.parametrize("at", range(-200, 50, 7))
def test_a_traceback_across_two_blocks_is_seen_whole(at: int) -> None:
    lead = "x" * 61 + "\n"
    text = lead * ((1 << 20) // len(lead))
    text = text[: (1 << 20) + at - 1] + "\n"
    found = of(a=text + KEY_ERROR + "bye\n" * 9)
    assert [one.entry.id for one in found.causes] == ["script-error"]
    assert found.causes[0].first.number == text.count("\n") + 3


def test_a_program_outlives_an_exception_of_its_thread() -> None:
    thread = CAUGHT.replace("in lock", "in _bootstrap_inner")
    steps = "".join(f"step {at} loss 1\n" for at in range(3))
    assert of(a=thread + steps).causes == ()
    odd = thread.replace("OSError: [Errno 116] Stale file handle", "pynvml.NVMLError_DriverNotLoaded: x")
    assert of(a=odd + steps).causes == ()
    assert of(a=thread + steps + STAGE).causes[0].entry.id == "script-error"


@pytest.mark.parametrize(
    ("text", "id"),
    [
        ("-bash: line 3: module: command not found\n", "module-command"),
        ("-bash: apptainer: command not found\nTraining complete\n", "apptainer-missing"),
        *((" " * blanks + "gpu-a02 " + "x" * 105 + " " + OOM, "cuda-out-of-memory") for blanks in (5, 6, 7)),
        (
            '{"level": "error", "error_message": "CUDA out of memory. Tried to allocate 2 GiB"}\n',
            "cuda-out-of-memory",
        ),
        ('time=1 status="CUDA out of memory. Tried to allocate 2 GiB" rank=3\n', "cuda-out-of-memory"),
        ("errors: ['CUDA out of memory. Tried to allocate 2 GiB']\n", "cuda-out-of-memory"),
        ("RuntimeError('CUDA out of memory. Tried to allocate 2 GiB')\n", "cuda-out-of-memory"),
        ('worker 3 died with "CUDA out of memory. Tried to allocate 2 GiB"\n', "cuda-out-of-memory"),
        ("ERROR checking if the checkpoint is complete: No space left on device\n", "disk-full"),
        ("sacct: Disk quota exceeded: 0, files\n", "quota"),
        (FULL + "All done\n", "disk-full"),
        (CAUGHT.replace("in lock", "in main") + "".join(STEPS[:4]) + BOX, "stale-handle"),
    ],
)
def test_what_speaks_of_a_failure_that_was_is_not_doubted(text: str, id: str) -> None:
    causes = of(a=text).causes
    assert causes
    assert causes[0].entry.id == id


@pytest.mark.parametrize(("steps", "cause"), [(1, "disk-full"), (2, "script-error")])
def test_a_program_that_made_steps_just_before_it_failed_went_on_after_what_it_said_long_before(
    steps: int, cause: str
) -> None:
    found = of(a=FULL + "copying\n" * 40 + "".join(STEPS[1 : 1 + steps]) + OWN)
    assert found.causes[0].entry.id == cause


@pytest.mark.parametrize(("step", "cause"), [(0, "disk-full"), (1, "script-error")])
def test_step_0_is_no_sign_that_a_program_went_on(step: int, cause: str) -> None:
    assert of(a=f"{FULL}step {step} loss 1\n{OWN}").causes[0].entry.id == cause


@pytest.mark.parametrize(
    ("logs", "cause"),
    [
        ({"a": f"2026-03-02 10:00:00 {WATCHDOG[9:]}", "b": f"2026-03-02 10:00:05 x\n{OWN}"}, "script-error"),
        ({"a": f"2026-03-02 10:00:00 {WATCHDOG[9:]}", "b": f"2026-03-02 10:00:06 x\n{OWN}"}, "nccl-watchdog"),
        ({"a": OWN + WATCHDOG}, "script-error"),
        ({"a": WATCHDOG + OWN}, "nccl-watchdog"),
        ({"a": WATCHDOG, "b": OWN}, "script-error"),
    ],
    ids=["at once", "later", "before", "behind", "elsewhere"],
)
def test_a_symptom_follows_from_an_exception_that_came_before_or_at_about_the_same_time(
    logs: dict[str, str], cause: str
) -> None:
    assert of(**{name: text.replace("[E302 10:10:21.1 Proc", "[Proc") for name, text in logs.items()}).causes[
        0
    ].entry.id == (cause)


@pytest.mark.parametrize(("between", "rank"), [(11, 5), (12, None)])
def test_a_warning_of_nccl_is_of_the_rank_whose_error_follows_soon(between: int, rank: int | None) -> None:
    warning = "n1:7:9 [0] nccl_net_ofi_init:144 NCCL WARN NET/OFI aws-ofi-nccl initialization failed\n"
    failed = "[rank5]: ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\n"
    (cause, *_) = of(a=warning + "x\n" * between + failed).causes
    assert (cause.entry.id, cause.rank) == ("nccl-ofi", rank)


def test_all_lines_of_a_cause_are_counted_though_few_are_kept() -> None:
    scan = Scan(INDEX)
    scan.read(io.BytesIO(OOM.encode() * 20), "a", 1 << 20)
    assert len(scan.found) == 12
    assert judge.of(scan, catalogue.own_error()).causes[0].count == 20


SKIPPED = "WARNING: table skipped: [Errno 2] No such file or directory: '/data/extra.json'\n"
GONE = OWN.replace("KeyError: 'x'", "FileNotFoundError: [Errno 2] No such file or directory: '/data/a.tar'")


KILLED = "slurm_script: line 4: 33 Killed    python a.py\n"


def test_the_last_word_of_a_failure_is_found_though_many_lines_of_its_kind_are_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for behind in ("", SKIPPED * 20):
        (cause, *_) = of(a=SKIPPED * 20 + PROGRESS + GONE + behind).causes
        assert (cause.entry.id, cause.first.number) == ("file-missing", 20 + len(STEPS) + 4)
    for name, value in {"SMALL": 1 << 9, "TAIL": 1 << 9, "COUNTED": 5, "TRIED": 5, "MOST_TRIED": 5}.items():
        monkeypatch.setattr(scanning, name, value)
    for before in ("".join([KILLED, *STEPS[:3]]), f"WARNING: trying again: {KILLED}"):
        (cause, *_) = of(a=before * 100 + PROGRESS + KILLED).causes
        number = 100 * before.count("\n") + len(STEPS) + 1
        assert (cause.entry.id, cause.first.number) == ("rank-killed", number)
    assert of(a=f"WARNING: trying again: {OWN}" * 100 + PROGRESS + OWN).causes[0].entry.id == "script-error"


def test_after_many_errors_that_nobody_knows_the_last_one_is_still_found() -> None:
    again = OWN.replace("KeyError: 'x'", "RuntimeError: mine") + AGAIN + "step 1 loss 1\n"
    assert of(a=again * 20 + OWN).causes[0].first.text == "KeyError: 'x'"
    errors = "".join(f"ERROR: no label in {name}\n" for name in map(chr, range(97, 117)))
    assert of(a=errors + OWN + BOX).causes[0].rank == 5


def test_of_many_files_with_a_harmless_line_the_one_that_failed_is_named() -> None:
    logs = {f"rank{at}.err": SKIPPED + PROGRESS for at in range(500)}
    (cause, *_) = of(**logs | {"rank450.err": SKIPPED + PROGRESS + GONE}).causes
    assert (cause.entry.id, cause.first.file, cause.rank) == ("file-missing", "rank450.err", 450)


def test_of_so_many_files_that_few_lines_of_each_are_kept_the_one_that_failed_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scanning, "MOST_OF_ONE", 20)
    missing = "ERROR: no table: [Errno 2] No such file or directory: '/data/extra.json'\n" * 5 + "more\n" * 50
    texts = {f"rank{at}.err": missing for at in range(30)}
    (cause, *_) = of(**texts | {"rank25.err": missing + GONE}).causes
    assert (cause.entry.id, cause.first.file, cause.rank) == ("file-missing", "rank25.err", 25)


def test_of_lines_that_differ_in_their_digits_alone_few_are_read_and_all_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = []
    entry = Index.entry

    def counted(index: Index, line: bytes, body: bytes, frame: bytes = b"") -> Entry | None:
        read.append(line)
        return entry(index, line, body, frame)

    monkeypatch.setattr(Index, "entry", counted)
    noise = "".join(f"ERROR client: try {at}: no answer\n" for at in range(4000))
    (cause, *_) = of(a=noise + OOM * 4000 + noise).causes
    assert (cause.entry.id, cause.rank, cause.first.number, cause.count) == (
        "cuda-out-of-memory",
        3,
        4001,
        4000,
    )
    assert len(read) < 500


def test_lines_that_differ_in_a_digit_that_says_what_failed_are_read() -> None:
    reset = "OSError: [Errno 104] /data/a\n" * 50
    assert of(a=reset + reset.replace("104", "28", 25)).causes[0].entry.id == "disk-full"
    assert of(a=reset + "OSError: [Errno 28] /data/a\n" + reset).causes[0].entry.id == "disk-full"


@pytest.mark.parametrize("report", [BOX, "srun: error: gpu-a0: task 0: Exited with exit code 1\n"])
def test_the_report_of_each_of_many_nodes_is_read(report: str) -> None:
    scan = Scan(INDEX)
    scan.read(io.BytesIO(report.encode() * 60), "a", 1 << 30)
    assert len(scan.ends) == 60


def test_what_is_near_several_lines_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = []
    time = lines.time

    def counted(line: bytes) -> float | None:
        looked_at.append(line)
        return time(line)

    monkeypatch.setattr(lines, "time", counted)
    names = ["".join(three) for three in itertools.product("abcdefghij", repeat=3)]
    of(a="".join(f"ERROR: no label in {name}\n" for name in names))
    assert len(looked_at) < 3 * len(names)


def test_many_files_take_no_time_that_grows_with_their_square() -> None:
    """It would take minutes, and this test its bound."""
    scan = Scan(INDEX)
    scan.read(io.BytesIO((OOM + WATCHDOG + RESET).encode()), "a", 1 << 30)
    files = [f"rank{at}.log" for at in range(logs.MOST_FILES)]
    found = [
        replace(one, file=file, order=(at, one.number)) for at, file in enumerate(files) for one in scan.found
    ]
    restarts = {file: [Restart(1, 0)] for file in files}
    ends = [ProcessEnd(at, "", file, 2) for at, file in enumerate(files)]
    told = judge.judge(found, catalogue.own_error(), counts={}, ends=ends, restarts=restarts)
    assert [one.entry.id for one in told.causes] == ["cuda-out-of-memory"]


PREEMPTED = "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-03-02T12:00:00 DUE TO PREEMPTION ***\n"
BANNER = "Job 7 begins at Mon Mar  2 {} on n1\n"
AGAIN = "I0302 10:00:00.0 9 api.py:881] [default] Worker group FAILED. 1/1 attempts left; will restart worker group\n"
TIMEOUT = "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError\n"


@pytest.mark.parametrize(
    "between",
    [
        "step 41 loss 1\nstep 42 loss 1\n",
        "SLURM_RESTART_COUNT=1\n",
        "=== attempt 2 of 3 ===\n",
        "job.sh: try 2\n",
    ],
)
def test_of_a_job_that_ran_again_the_last_run_is_told(between: str) -> None:
    assert of(a=PREEMPTED + between).causes[0].entry.id == "slurm-preempted"
    found = of(a=PREEMPTED + between + KEY_ERROR)
    assert [one.entry.id for one in found.causes] == ["script-error"]
    limit = PREEMPTED.replace("PREEMPTION", "TIME LIMIT").replace("12:00", "13:00")
    assert of(a=PREEMPTED + between + limit).causes[0].entry.id == "slurm-time-limit"


def test_what_a_stack_of_functions_names_has_not_failed() -> None:
    warning = "[W1127 00:16:02.6 TCPStore.cpp:138] [c10d] recvValueWithTimeout failed: Failed to recv, got 0 bytes\n"
    frame = "frame #12: gloo::rendezvous::Context::connectFullMesh(std::shared_ptr<gloo::Store>) + 0x5c\n"
    killed = "apptrain: rank 1 on a failed first, status 137: killed by SIGKILL (a.rank1.err)\n"
    assert of(a=warning + frame + killed).causes[0].entry.id == "rank-killed"


def test_how_the_attempt_before_ended_is_the_cause_only_while_nothing_else_is() -> None:
    lost = "apptrain: attempt 0: b: lost: nothing was heard from it for 60 s (the job script was lost before it could say so)\n"
    untold = f"apptrain: attempt 0 {UNTOLD}: probably its first node was lost, or its job script was killed\n"
    again = f"apptrain: {GOES_ON}\n"
    (found,) = of(a=lost + again + "step 1 loss 1\n").causes
    assert (found.entry.id, found.node, found.leave_out) == ("node-lost", "b", "b")
    assert [one.entry.id for one in of(a=untold + again).causes] == ["job-script-lost"]
    for line in (lost, untold):
        assert [one.entry.id for one in of(a=line + again + KEY_ERROR).causes] == ["script-error"]
        assert of(a=line + again + "".join(STEPS)).causes == ()
        assert of(a=line + again + "loss 1\n" * 9 + "apptrain: done: /runs/a\n").causes == ()


def test_of_nodes_that_lost_each_other_none_is_to_be_left_out_whoever_says_so() -> None:
    hub = "apptrain: b: lost: nothing was heard from it for 60 s: it is gone, or a is cut off\n"
    spoke = "apptrain: a: lost: nothing was heard from it for 60 s\n"
    for text in (hub + spoke, spoke + hub):
        found = of(a=text).causes[0]
        assert (found.entry.id, found.leave_out) == ("cut-off", "")
    given_up = "srun: error: Node failure on b\n"
    assert of(a=hub + given_up).causes[0].leave_out == "b"


def test_where_the_programs_folder_is_named_on_each_line_a_restart_is_still_seen() -> None:
    rows = "".join(f"W /opt/apptrain/lib{at}.py\n" for at in range(30_000))
    assert of(a=OOM + rows + AGAIN + KEY_ERROR + BOX).causes[0].entry.id == "script-error"


def test_a_run_that_begins_at_its_last_step_again_is_told_from_steps_in_a_buffer() -> None:
    steps = "".join(f"step {at} loss 1\n" for at in range(30, 41))
    later = "step 41 loss 1\nstep 42 loss 1\n"
    assert of(a=steps + PREEMPTED + later + KEY_ERROR).causes[0].entry.id == "slurm-preempted"
    timed = "".join(f"2026-03-02 12:0{minute}:0{minute} {{}}" for minute in (1, 2)).format(*STEPS[41:43])
    assert of(a=steps + PREEMPTED + timed + KEY_ERROR).causes[0].entry.id == "script-error"
    soon = timed.replace("12:02:02", "12:01:00").replace("12:01:01", "12:01:00")
    assert of(a=steps + PREEMPTED + soon + KEY_ERROR).causes[0].entry.id == "slurm-preempted"
    limit = PREEMPTED.replace("PREEMPTION", "TIME LIMIT").replace("12:00", "13:00")
    assert of(a=steps + PREEMPTED + later + limit).causes[0].entry.id == "slurm-time-limit"
    resumed = "restored the checkpoint of step 40\n"
    assert of(a=steps + PREEMPTED + resumed + later + KEY_ERROR).causes[0].entry.id == "script-error"


def test_a_job_script_may_go_on_without_what_apptainer_refused() -> None:
    refused = 'FATAL:   "nvidia-smi": executable file not found in $PATH\n'
    steps = "".join(f"step {at} loss 1\n" for at in range(40))
    assert of(a=refused + steps + KEY_ERROR).causes[0].entry.id == "script-error"
    ended = "srun: error: n1: task 0: Exited with exit code 255\n"
    assert of(a=refused + ended + steps + KEY_ERROR).causes[0].entry.id == "program-not-in-image"


def test_an_exception_may_have_nothing_on_its_own_line_but_its_name() -> None:
    raised = (
        'Traceback (most recent call last):\n  File "a.py", line 3, in <module>\nValueError:{}\n  no split\n'
    )
    for end in ("", " "):
        assert of(a=raised.format(end)).causes[0].first.text == "ValueError: no split"


def test_a_first_line_that_comes_again_later_begins_another_run() -> None:
    first, second = BANNER.format("10:00:00"), BANNER.format("10:31:00")
    assert of(a=first + OWN + second + FULL + BOX).causes[0].entry.id == "disk-full"
    assert of(a=first + OWN + first + "copying\n" * 6 + FULL + BOX).causes[0].entry.id == "script-error"
    for clock, cause in (("10:00:59", "script-error"), ("10:01:00", "disk-full")):
        again = BANNER.format(clock) + "copying\n" * 6
        assert of(a=first + OWN + BOX + again + FULL + BOX).causes[0].entry.id == cause
    for row in ("{} step 7 loss 1\n", "{} WARNING: slow\n", "[rank0]: {} begin\n"):
        text = row.format("10:00:00") + OWN + BOX + row.format("10:31:00") + "copying\n" * 6
        assert of(a=text + FULL + BOX).causes[0].entry.id == "script-error"
    many = "".join(BANNER.format(f"11:{at}:00") for at in range(10, 40))
    assert of(a=first + OWN + many + FULL + BOX).causes[0].entry.id == "script-error"


@pytest.mark.parametrize("megabytes", [1, 1.5, 2])
def test_a_line_in_text_that_never_repeats_is_found(megabytes: float) -> None:
    source = random.Random(1)
    rows = (source.randbytes(32).hex(" ") for _ in range(int(megabytes * 1e6 / 96)))
    text = "".join(f"{row}\n" for row in rows).translate(str.maketrans("0123456789", "ghijklmnop"))
    found = of(a=text + FULL + text + BOX)
    assert [one.entry.id for one in found.causes] == ["disk-full"]
    assert found.causes[0].first.number == text.count("\n") + 1
    first, second = BANNER.format("10:00:00"), BANNER.format("10:31:00")
    found = of(a=first + OWN + BOX + text + second + FULL + BOX)
    assert [one.entry.id for one in found.causes] == ["disk-full"]


def test_of_a_group_that_torchrun_restarted_the_last_run_is_told() -> None:
    found = of(a=OOM + AGAIN + KEY_ERROR + BOX)
    assert [one.entry.id for one in found.causes] == ["script-error"]
    assert of(a=OOM + AGAIN + RESET).causes[0].entry.id == "cuda-out-of-memory"
    assert of(a=OOM + AGAIN + "".join(STEPS[:9])).causes == ()


def test_nodes_that_do_not_meet_again_follow_from_the_run_before() -> None:
    found = of(a=OOM + AGAIN + TIMEOUT + BOX)
    assert found.causes[0].entry.id == "cuda-out-of-memory"


@pytest.mark.parametrize(("lines_between", "cause"), [(5, "disk-full"), (6, "script-error")])
def test_an_error_that_ended_nothing_behind_an_exception_that_did_is_not_the_cause(
    lines_between: int, cause: str
) -> None:
    assert of(a=OWN + "copying\n" * lines_between + FULL).causes[0].entry.id == cause
    ended = OWN.replace("KeyError: 'x'\n", FULL)
    assert of(a=OWN + "copying\n" * lines_between + ended).causes[0].entry.id == "disk-full"


def test_what_a_job_script_tries_with_one_line_of_python_does_not_end_the_job() -> None:
    tried = 'Traceback (most recent call last):\n  File "<string>", line 1, in <module>\n' + NO_APEX
    assert of(a=tried).causes[0].entry.id == "module-not-found"
    assert of(a=tried + "".join(STEPS[:3])).causes == ()
    assert of(a=tried + "".join(STEPS[:2]) + OWN).causes[0].entry.id == "script-error"
    spawned = tried.replace(NO_APEX, '  File "spawn.py", line 122, in spawn_main\n' + NO_APEX)
    assert of(a=spawned + "".join(STEPS[:3])).causes[0].entry.id == "module-not-found"


NO_APEX = "ModuleNotFoundError: No module named 'apex'\n"
MISSING = "ImportError: libnvinfer.so.8: cannot open shared object file: No such file or directory\n"


def test_an_error_in_a_run_that_ended_well_is_no_cause() -> None:
    assert of(a=MISSING).causes[0].entry.id == "library-missing"
    for end in ("Job finished with exit status 0\n", "exit code: 0\n", "epoch 2 loss 1\ndone\n"):
        assert of(a=MISSING + end).causes == ()
    for end in ("exit status 1\n", "exited in 0.5 s\n", "done\n"):
        assert of(a=MISSING + end).causes


@pytest.mark.parametrize("text", [OWN, "slurm_script: line 4: 33 Killed    python a.py\n", PREEMPTED])
def test_the_status_of_a_job_script_does_not_hide_that_its_program_died(text: str) -> None:
    assert of(a=text + "exit status 0\n").causes


def test_of_two_ranks_that_ended_differently_in_two_files_without_times_none_is_the_first() -> None:
    ended = 'Traceback (most recent call last):\n  File "a.py", line 3, in <module>\n'
    full, missing = ended + FULL, ended + "ModuleNotFoundError: No module named 'einops'\n"
    found = of(a=full, b=missing)
    assert found.causes == ()
    assert found.unknown is not None
    assert {one.entry.id for one in found.others} == {"disk-full", "module-not-found"}
    assert of(a=full + missing).causes[0].entry.id == "disk-full"
    assert of(a=full, b=full).causes[0].entry.id == "disk-full"


def test_the_gpu_that_a_line_names_is_the_causes() -> None:
    line = OOM.rstrip("\n") + " GPU 1 has a total capacity of 79.1 GiB.\n"
    assert (of(a=line).causes[0].device, of(a=OOM).causes[0].device) == ("1", "")


def test_what_a_program_went_on_after_is_told_as_seen() -> None:
    assert [one.entry.id for one in of(a=CAUGHT + PROGRESS).others] == ["stale-handle"]


def test_what_is_found_is_numbered_by_file_and_line() -> None:
    scan = Scan(INDEX)
    assert scan.read(io.BytesIO(f"step 1\n{OOM}".encode()), "a", 1 << 20)
    assert scan.read(io.BytesIO(b""), "b", 1 << 20)
    assert scan.read(io.BytesIO(f"{OOM}step 1\n{OOM}last".encode()), "c", 1 << 20)
    assert [(one.file, one.number, one.order[0]) for one in scan.found] == [
        ("a", 2, 1),
        ("c", 1, 3),
        ("c", 3, 3),
    ]
    assert (scan.lines, scan.size) == (6, 7 + len(OOM) + len(OOM) + 7 + len(OOM) + 4)
    assert scan.counts["cuda-out-of-memory"] == 3


@pytest.mark.parametrize(("more", "is_whole"), [(1, True), (0, False), (-1, False)])
def test_no_more_than_so_many_bytes_are_read(more: int, is_whole: bool) -> None:
    text = f"step 1\n{OOM}".encode()
    scan = Scan(INDEX)
    assert scan.read(io.BytesIO(text), "a", len(text) + more) == is_whole
    assert scan.size == len(text) + min(more, 0)


UNLABELLED = """Traceback (most recent call last):
  File "train.py", line 3, in <module>
    main()
FileNotFoundError: [Errno 2] No such file or directory: '/data/train.csv'
"""


@pytest.mark.parametrize(
    "following",
    [
        '[rank1]: Traceback (most recent call last):\n[rank1]:   File "t.py", line 9, in f\n'
        "[rank1]: torch.distributed.DistBackendError: [1] is setting up NCCL communicator: Connection reset by peer\n",
        "[rank1]:[W302 10:10:21.1 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl: Connection reset by peer\n",
        WATCHDOG,
    ],
)
def test_a_rank_that_tells_of_the_end_of_another_is_not_the_one_that_failed(following: str) -> None:
    (cause, *_) = of(job=UNLABELLED + following).causes
    assert ("/data/train.csv" in cause.first.text, cause.rank) == (True, None)


@pytest.mark.parametrize(
    ("log", "node"),
    [
        (
            "Traceback (most recent call last):\n"
            '  File "/opt/venv/bin/torchrun", line 8, in <module>\n    sys.exit(main())\n'
            "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError\n"
            "srun: error: n3: task 2: Exited with exit code 1\n",
            "n3",
        ),
        (
            "srun: error: n042: task 1: Out Of Memory\n"
            "E0302 10:10:21.000 13 api.py:874] failed (exitcode: -9) local_rank: 2 (pid: 122) of binary: /usr/bin/python\n"
            "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been OOM Killed.\n",
            "n042",
        ),
    ],
)
def test_with_torchrun_a_task_of_srun_is_a_node_and_no_rank(log: str, node: str) -> None:
    (cause, *_) = of(job=log).causes
    assert (cause.rank, cause.first.node) == (None, node)
