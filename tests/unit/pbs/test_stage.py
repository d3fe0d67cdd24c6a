"""Under PBS, and by hand, the image is copied by a tree of nodes where ssh goes between them, else by PBS's own starters
from the shared file system. What stands for ssh, and for what differs between hosts, gives each a disk of its own.
"""

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from entrypoint.cli import profiles
from entrypoint.node import processes
from tests.unit.host.node import IMAGE_ID, sif
from tests.unit.pbs.site import BOUND, Site, What, ours, quoted

UNAME = """#!/bin/sh
if [ "$1" = -n ] && [ -n "$STANDS_FOR" ]; then echo "$STANDS_FOR"; else exec /bin/uname "$@"; fi
"""
SSH = """#!/bin/bash
while [[ $1 != -- ]]; do shift; done
echo "${{STANDS_FOR:-a}} $2" >>"{here}/ssh"
if [[ $2 == {lost} ]]; then exit 255; fi
if [[ $2 == {slow} && $3 == *receive* ]]; then echo $$ >"{here}/slow.new"; mv "{here}/slow.new" "{here}/slow"; exec sleep 60; fi
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


def ran_for_site(staged: Staged) -> "subprocess.CompletedProcess[str]":
    """With a directory that the site has chosen: a host that cannot have a copy reads the shared image."""
    profile = staged.site.folder / "site.yaml"
    profile.write_text(f"scheduler: pbs\nstage: {{to: {staged.disk}}}\n")
    assert profiles.main([str(profile)]) == 0
    ended = staged.run("--profile", str(profile))
    assert ended.returncode == 0, ended.stderr
    return ended


@pytest.mark.parametrize("unfit", ["disk", "disk.b"])
def test_the_others_get_the_image_also_from_behind_a_host_that_cannot_have_it(
    staged: Staged, unfit: str
) -> None:
    (staged.site.folder / unfit).rmdir()
    host = {"disk": "a", "disk.b": "b"}[unfit]
    line = f"apptrain: the image is read where it is, by {host} ({staged.disk} is no directory)"
    said = ran_for_site(staged).stderr.replace("disk.b is", "disk is")
    assert said.splitlines() == [line]
    assert staged.copies == sorted({"disk", "disk.b", "disk.c"} - {unfit})


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


# --- where ssh does not go between them --------------------------------------------------------------------------

OWN = r"""folder=$3
uname() { echo "pbsn$((PBS_NODENUM + 1))"; }
echo "$PBS_NODENUM $what ${PBS_TASKNUM:-0}" >>"${folder%/disk/*}/asked"
if [[ -e ${folder%/disk/*}/mute.$PBS_NODENUM ]]; then exit 1; fi
if [[ $what == send && -e ${folder%/disk/*}/slow.$PBS_NODENUM ]]; then exec sleep 60; fi
folder=${folder/\/disk\//\/disk.$PBS_NODENUM\/}
"""
"""What host/stage.sh takes for its host's, by the number that PBS gives each host."""
DISKS = ("disk.0", "disk.1", "disk.2")
STARTERS = ("pbsdsh", "pbs_tmrsh")


class Refused:
    """Jobs on three hosts, of which none lets ssh in."""

    def __init__(self, site: Site, login: Callable[[str], None]) -> None:
        self.site = site
        self.disk = site.folder / "disk"
        for name in DISKS:
            (site.folder / name).mkdir()
        self.image = sif(site.checkout / "containers/image.sif")
        script = site.checkout / "host/stage.sh"
        text = script.read_text()
        assert text.count("\nfolder=$3\n") == 1
        script.write_text(text.replace("folder=$3\n", OWN))
        program = site.folder / "bin/ssh"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\necho "$*" >>{quoted(site.folder / "ssh")}\nexit 255\n')
        program.chmod(0o755)
        self.login = login
        login(f"PATH={quoted(program.parent)}:$PATH")

    def submit(self, what: What | None = None, **variables: str) -> str:
        how: dict[str, Any] = {"what": what, **variables}
        return self.site.submit("-l", "select=3:ncpus=1", **how)

    def stage(self, starter: str = "pbsdsh", what: What | None = None) -> str:
        return self.submit(what, APPTRAIN_START=starter, APPTRAIN_STAGE=str(self.disk))

    def end(self, id: str) -> tuple[str, list[str]]:
        """(exit status, our lines) of a job; its tasks' answers are gone, and of a starter's own nothing is shown."""
        status, lines = self.site.end(id)
        assert not [path for path in self.site.run_dir(id).glob("tasks/*") if path.is_dir()]
        assert not [line for line in lines if line.startswith("pbsdsh: ")]
        return status, ours(lines)

    @property
    def copies(self) -> list[str]:
        found = list(self.site.folder.glob("disk.*/apptrain-image-*/image.sif"))
        assert all(path.read_bytes() == self.image.read_bytes() for path in found)
        return sorted(path.parts[-3] for path in found)

    @property
    def left(self) -> list[Path]:
        return list(self.site.folder.glob("disk.*/*"))

    @property
    def asked(self) -> list[str]:
        """What each host was asked to do, and whether by a task of PBS."""
        found = [line.split() for line in (self.site.folder / "asked").read_text().splitlines()]
        assert all((host == "0") == (task == "1") for host, _, task in found)
        return sorted(f"{host} {what}" for host, what, _ in found)


@pytest.fixture
def refused(site: Site, login: Callable[[str], None]) -> Refused:
    return Refused(site, login)


@pytest.mark.parametrize("starter", STARTERS)
def test_where_ssh_is_refused_each_host_copies_the_image_for_itself(refused: Refused, starter: str) -> None:
    status, lines = refused.end(refused.stage(starter))
    assert status == "0"
    assert (
        "image: copied from the shared file system, to 3 nodes at once, as ssh does not reach pbsn2" in lines
    )
    assert any(line.startswith(f"image: copied to {refused.disk} on 3 of 3 nodes in ") for line in lines)
    assert refused.copies == list(DISKS)
    assert refused.asked == sorted(f"{host} {what}" for host in "012" for what in ("look", "send", "check"))
    for host in range(3):
        options = refused.site.seen(host)["options"]
        assert options[options.index("--staged") + 2 :][:2] == ["1128", IMAGE_ID]
    assert (refused.site.folder / "ssh").read_text().count("\n") == 1, "it is asked once"


@pytest.mark.parametrize("starter", STARTERS)
def test_a_host_whose_disk_is_unfit_is_named_and_no_copy_is_left(refused: Refused, starter: str) -> None:
    (refused.site.folder / "disk.2").rmdir()
    status, lines = refused.end(refused.stage(starter))
    why = f"pbsn3 ({refused.site.folder}/disk.2 is no directory)"
    assert (status, lines[-1]) == (
        "64",
        f"--stage {refused.disk}: {why}: give another directory, or leave --stage out",
    )
    assert refused.left == []


@pytest.mark.parametrize("starter", STARTERS)
def test_a_host_that_says_nothing_has_no_copy(refused: Refused, starter: str) -> None:
    (refused.site.folder / "mute.1").touch()
    status, lines = refused.end(refused.stage(starter))
    why = "pbsn2 (it did not answer): give another directory, or leave --stage out"
    assert (status, lines[-1]) == ("64", f"--stage {refused.disk}: {why}")


def test_a_starter_that_is_not_in_path_is_named(refused: Refused) -> None:
    refused.login(f"PATH={quoted(refused.site.folder / 'bin')}:/usr/bin:/bin")
    status, lines = refused.end(
        refused.submit(APPTRAIN_STAGE=str(refused.disk), APPTRAIN_HOME=str(refused.site.checkout))
    )
    why = "ssh does not reach pbsn2, and there is no pbsdsh in PATH"
    error = f"--stage {refused.disk}: {why}: give another directory, or leave --stage out"
    assert (status, lines[-1]) == ("64", error)


@pytest.mark.parametrize("starter", STARTERS)
def test_copies_are_removed_at_the_end_also_where_no_task_does_so(refused: Refused, starter: str) -> None:
    status, _ = refused.end(refused.stage(starter, what={str(host): {"status": 69} for host in range(3)}))
    assert status == "69"
    assert [line for line in refused.asked if line.endswith("remove")] == ["0 remove", "1 remove", "2 remove"]
    assert refused.left == []


@pytest.mark.parametrize("starter", STARTERS)
def test_a_job_that_is_deleted_while_it_copies_leaves_no_copy(refused: Refused, starter: str) -> None:
    (refused.site.folder / "slow.1").touch()
    id = refused.stage(starter)
    asked = refused.site.folder / "asked"
    refused.site.until(
        lambda: asked.exists() and "1 send" in asked.read_text() and "disk.2" in refused.copies
    )
    assert refused.site.pbs.run("qdel", id).returncode == 0
    refused.site.end(id)
    assert refused.left == []
    assert not list(refused.site.run_dir(id).glob("tasks/*"))


def test_a_site_that_names_a_directory_gets_the_copies_too(refused: Refused) -> None:
    status, lines = refused.end(refused.submit(APPTRAIN_PROFILE=profile(refused, f"to: {refused.disk}")))
    assert (status, refused.copies) == ("0", list(DISKS)), lines


def test_by_itself_an_image_is_read_where_it_is_if_ssh_is_refused(refused: Refused) -> None:
    os.truncate(refused.image, 20_000_000)  # 54 s to read from 1 MB/s, 20 s to copy
    status, lines = refused.end(
        refused.submit(APPTRAIN_PROFILE=profile(refused, "shared_mb_s: 1, read_percent: 90"))
    )
    told = [line for line in lines if "image is" in line]
    assert (status, told) == (
        "0",
        ["the image is read where it is, not copied to the nodes: ssh does not reach pbsn2"],
    )
    assert not (refused.site.folder / "asked").exists()
    assert "--staged" not in refused.site.seen(1)["options"]


def profile(refused: Refused, stage: str) -> str:
    file = refused.site.folder / "site.yaml"
    file.write_text(f"scheduler: pbs\nstage: {{{stage}}}\n")
    assert profiles.main([str(file)]) == 0
    return str(file)
