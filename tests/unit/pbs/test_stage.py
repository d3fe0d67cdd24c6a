"""Under PBS, and by hand, the image is copied by a tree of nodes where ssh goes between them. What stands for ssh gives
each host a disk of its own.
"""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from entrypoint.node import processes
from tests.unit.host.node import IMAGE_ID, sif
from tests.unit.pbs.site import BOUND, Site

UNAME = """#!/bin/sh
if [ "$1" = -n ] && [ -n "$STANDS_FOR" ]; then echo "$STANDS_FOR"; else exec /bin/uname "$@"; fi
"""
SSH = """#!/bin/bash
while [[ $1 != -- ]]; do shift; done
echo "${{STANDS_FOR:-a}} $2" >>"{here}/ssh"
if [[ $2 == {lost} ]]; then exit 255; fi
if [[ $2 == {slow} && $3 != *remove* ]]; then echo $$ >"{here}/slow.new"; mv "{here}/slow.new" "{here}/slow"; exec sleep 60; fi
export STANDS_FOR=$2
exec /bin/bash -c "$(sed -E "s#/disk(\\.[a-z]+)?/#/disk.$2/#g" <<<"$3")"
"""


class Staged:
    def __init__(self, site: Site) -> None:
        self.site = site
        self.image = sif(site.checkout / "containers/image.sif")
        self.disk = site.folder / "disk"
        for name in ("disk", "disk.b", "disk.c"):
            (site.folder / name).mkdir()
        self.lost("none")

    def lost(self, host: str, *, slow: str = "none") -> None:
        ssh = SSH.format(here=self.site.folder, lost=host, slow=slow)
        for name, text in (("ssh", ssh), ("uname", UNAME)):
            program = self.site.folder / "bin" / name
            program.parent.mkdir(exist_ok=True)
            program.write_text(text)
            program.chmod(0o755)

    def start(self, *options: str) -> "subprocess.Popen[str]":
        """The job script by hand, on the hosts a, b and c."""
        self.site.will(None)
        words = ["--start", "ssh", "--nodes", "a,b,c", "--device", "cpu", *options, "--", "my.py"]
        env = {**os.environ, "PATH": f"{self.site.folder / 'bin'}:{os.environ['PATH']}"}
        env["APPTRAIN_HOME"] = str(self.site.checkout)
        return subprocess.Popen(
            ["bash", self.site.script, *words],
            cwd=self.site.submit_dir,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *options: str) -> "subprocess.CompletedProcess[str]":
        with self.start(*options) as process:
            out, err = process.communicate(timeout=BOUND)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    @property
    def copies(self) -> list[str]:
        return sorted(
            str(path.relative_to(self.site.folder).parts[0])
            for path in self.site.folder.glob("disk*/*/image.sif")
        )

    @property
    def left(self) -> list[Path]:
        return list(self.site.folder.glob("disk*/*"))


@pytest.fixture
def staged(site: Site) -> Staged:
    return Staged(site)


def test_who_has_the_image_sends_it_to_the_others(staged: Staged) -> None:
    ended = staged.run("--stage", str(staged.disk))
    assert ended.returncode == 0, ended.stderr
    assert staged.copies == ["disk", "disk.b", "disk.c"]
    assert f"apptrain: image: copied to {staged.disk} on 3 of 3 nodes in " in ended.stdout
    options = staged.site.seen(1)["options"]
    assert options[options.index("--staged") + 2 :][:2] == ["1128", IMAGE_ID]


def test_a_host_that_ssh_does_not_reach_ends_the_job_and_no_copy_is_left(staged: Staged) -> None:
    staged.lost("c")
    ended = staged.run("--stage", str(staged.disk))
    line = f"apptrain: --stage {staged.disk}: c (it did not answer): give another directory, or leave --stage out"
    assert (ended.returncode, ended.stderr.splitlines()) == (64, [line])
    assert staged.left == []


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_what_copies_ends_with_the_job_script(staged: Staged, signum: int) -> None:
    staged.lost("none", slow="c")
    slow = staged.site.folder / "slow"
    with staged.start("--stage", str(staged.disk)) as process:
        staged.site.until(slow.exists)
        process.send_signal(signum)
        process.communicate(timeout=BOUND)
    assert (process.returncode, staged.left) == (128 + signum, [])
    staged.site.until(lambda: not processes.is_running(int(slow.read_text())), 10)


def test_without_an_order_to_stage_nothing_is_copied(staged: Staged) -> None:
    ended = staged.run()
    assert (ended.returncode, staged.left) == (0, []), ended.stderr
