"""What control groups say of a want of memory."""

from pathlib import Path

import pytest

from entrypoint.node.memory import Memory


class Groups:
    """A tree of them, and the process's own place in it."""

    def __init__(self, folder: Path, mine: str):
        self.root, self.mine = folder / "cgroup", folder / "mine"
        self.mine.write_text(mine)

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def memory(self) -> Memory:
        return Memory(self.root, self.mine)


V2 = "0::/slurm/job_1/step_0\n"
V1 = "9:name=systemd:/\n4:memory:/slurm/job_1\n1:cpu,cpuacct:/\n0::/\n"
HYBRID = "5:devices,memory:/slurm/job_1\n0::/\n"
EVENTS = "low 0\nhigh 0\nmax 12\noom {0}\noom_kill {0}\noom_group_kill 0\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"


@pytest.mark.parametrize(
    ("mine", "counter", "text", "limit"),
    [
        (V2, "slurm/job_1/step_0/memory.events", EVENTS, "slurm/job_1/memory.max"),
        (V2, "slurm/job_1/step_0/memory.events", EVENTS, "slurm/job_1/step_0/memory.max"),
        (V1, "memory/slurm/job_1/memory.oom_control", CONTROL, "memory/slurm/job_1/memory.limit_in_bytes"),
        (HYBRID, "memory/memory.oom_control", CONTROL, "memory/memory.limit_in_bytes"),
        (V2, "memory.events", EVENTS, "memory.max"),
    ],
    ids=["version 2, limit of the job", "version 2", "version 1", "a part of 1", "a part of 2"],
)
def test_a_kill_since_the_start_is_said_with_the_limit(
    tmp_path: Path, mine: str, counter: str, text: str, limit: str
) -> None:
    groups = Groups(tmp_path, mine)
    groups.write(counter, text.format(3))
    groups.write(limit, "2147483648\n")
    memory = groups.memory()
    assert memory.shortage() == ""
    groups.write(counter, text.format(4))
    assert memory.shortage() == "out of memory (the limit is 2.0 GiB)"


@pytest.mark.parametrize("limit", ["max\n", "9223372036854771712\n"])
def test_without_a_limit_none_is_named(tmp_path: Path, limit: str) -> None:
    groups = Groups(tmp_path, V2)
    groups.write("slurm/job_1/step_0/memory.max", limit)
    groups.write("slurm/job_1/memory.events", EVENTS.format(0))
    memory = groups.memory()
    groups.write("slurm/job_1/memory.events", EVENTS.format(1))
    assert memory.shortage() == "out of memory"


@pytest.mark.parametrize("text", ["", "oom_kill\n", "oom_kill many\n"])
def test_where_the_groups_say_nothing_there_is_no_shortage(tmp_path: Path, text: str) -> None:
    groups = Groups(tmp_path, V2)
    groups.write("slurm/job_1/step_0/memory.events", text)
    assert groups.memory().shortage() == ""
    assert Memory(tmp_path / "none", tmp_path / "none").shortage() == ""
