"""Where a script is, from what Python printed of it."""

import pytest

from entrypoint.ranks.frames import Frame, dumped, in_words, last_traceback, main_thread, own, shown, waits_in

VENV = "/opt/venv/lib/python3.11/site-packages"
TORCH = f"{VENV}/torch"
DUMP = f"""Fatal Python error: Aborted

Thread 0x00007f1 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait

Current thread 0x00007f0 (most recent call first):
  File "{TORCH}/distributed/distributed_c10d.py", line 2938 in all_reduce
  File "/home/alice/train.py", line 90 in advance

Extension modules: numpy._core._multiarray_umath (total: 1)
"""
RAISED = f"""Traceback (most recent call last):
  File "/home/alice/data.py", line 3, in read
    return files[name]
KeyError: 'a'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/home/alice/my project/train.py", line 31, in <module>
    loss.backward()
  File "{TORCH}/_tensor.py", line 630, in backward
    torch.autograd.backward(
  File "{TORCH}/autograd/__init__.py", line 364, in backward
    _engine_run_backward(
  File "{TORCH}/autograd/graph.py", line 865, in _engine_run_backward
    return Variable._execution_engine.run_backward(
RuntimeError: [pair.cc:547] Connection closed by peer
"""


def test_the_main_thread_is_the_one_that_is_listed_last() -> None:
    assert [(line, function) for _, line, function in main_thread(DUMP)] == [
        ("2938", "all_reduce"),
        ("90", "advance"),
    ]
    assert main_thread("") == []


def test_a_dump_goes_on_with_one_thread() -> None:
    assert [line for _, line, _ in dumped(DUMP.splitlines()[3:])] == ["324"]


def test_of_several_tracebacks_the_last_one_counts() -> None:
    assert [line for _, line, _ in last_traceback(RAISED.splitlines())] == ["865", "364", "630", "31"]
    assert last_traceback(["nothing"]) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (RAISED, "in backward (train.py:31)"),
        (RAISED.partition("\n\nDuring")[0], "at data.py:3"),
        ("", ""),
    ],
)
def test_where_a_script_failed_is_said_by_its_own_line(text: str, said: str) -> None:
    assert in_words(last_traceback(text.splitlines())) == said


IN_DDP: list[Frame] = [
    (f"{TORCH}/nn/modules/conv.py", "1", "forward"),
    (f"{VENV}/torchvision/models/resnet.py", "2", "forward"),
    (f"{TORCH}/nn/parallel/distributed.py", "3", "forward"),
    ("/home/alice/train.py", "4", "advance"),
]
"""A model of a library in DDP: busy."""


def test_the_line_is_the_scripts_own_and_not_a_librarys() -> None:
    line = own(IN_DDP)
    assert line is not None
    assert shown(line) == "train.py:4 advance"
    assert own(IN_DDP[:3]) == IN_DDP[1]
    assert own(IN_DDP[:1]) == IN_DDP[0]
    assert own([("<frozen runpy>", "8", "_run"), IN_DDP[3]]) == IN_DDP[3]
    assert own([]) is None


def test_a_script_in_a_folder_called_torch_is_a_script_and_torch_may_lie_anywhere() -> None:
    mine = ("/home/alice/torch/train.py", "4", "advance")
    assert own([IN_DDP[0], mine]) == mine
    assert own([("/src/torch/distributed/rendezvous.py", "1", "handler"), IN_DDP[3]]) == IN_DDP[3]


def test_a_library_between_the_script_and_torch_does_not_make_it_wait() -> None:
    assert waits_in(IN_DDP) == ""
    assert waits_in(IN_DDP[2:]) == "forward"
    assert waits_in([]) == ""


def test_torchs_own_wrapper_is_no_name_for_a_collective() -> None:
    wrapped = [
        (f"{TORCH}/distributed/distributed_c10d.py", "1", "barrier"),
        (f"{TORCH}/distributed/c10d_logger.py", "2", "wrapper"),
        ("/home/alice/train.py", "7", "<module>"),
    ]
    assert in_words(wrapped) == "in barrier (train.py:7)"
