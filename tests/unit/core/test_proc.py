"""What the kernel says of a process."""

import os
import shutil
import subprocess
from pathlib import Path

from entrypoint.core.proc import stat_fields


def test_fields_count_from_the_state_whatever_the_name_of_the_process_is(tmp_path: Path) -> None:
    program = tmp_path / "a) S 1 (b"
    shutil.copy("/bin/sleep", program)
    with subprocess.Popen([program, "60"]) as process:
        fields = stat_fields(process.pid)
        process.kill()
    assert fields[1] == str(os.getpid())
    assert len(fields) > 40


def test_without_a_number_it_is_this_process() -> None:
    assert stat_fields()[:2] == ["R", str(os.getppid())]


def test_a_process_that_is_gone_has_one_empty_field() -> None:
    assert stat_fields(0) == [""]
