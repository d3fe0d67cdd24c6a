"""An account on a test cluster, as a user of this project has one: a checkout, the image, a folder to work
in, jobs. `account` is the entry.

The checkout's path has a space, jobs are submitted from somewhere else, and the image is read-only software
of the site.

APPTRAIN_TEST_IMAGE=FILE takes an image that exists instead of building one, for trying changes quickly; the
checkout's two packages are then shown in place of the image's own. A job with --export=NONE still runs those.
"""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import yaml

from tests.cluster.images import CHECKOUT, SITE_PACKAGES, Built
from tests.host import Bind
from tests.loud import explain
from tests.pages import SLOW
from tests.vcluster import Cluster, Job, up

USER = "alice"
UID = 2001
HOME = Path("/home/alice")
REPOSITORY = HOME / "app train"
SCRIPT = REPOSITORY / "slurm/multinode.sbatch"
WORK = HOME / "my work"
"""Where jobs are submitted."""
PARTS = ("slurm", "pbs", "host", "containers", "clusters", "entrypoint", "src", "tools", "examples")
SOFTWARE = Path("/sw/images")
PACKAGES = "/usr/local/lib/python3.13/dist-packages"
PYYAML = Bind(source=Path(yaml.__file__).parent, target=Path("/usr/lib/python3/dist-packages/yaml"))
"""As most login nodes have it."""
BOUND = 400.0
"""Seconds for a job that takes a few, or 20 where all its ranks import torch on two busy cores."""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """A job that has ended, or runs."""

    job: Job
    text: str
    """What it has printed."""
    folder: Path
    """Where on this machine its run directory is to be."""

    def __str__(self) -> str:
        """What a test that fails shows: Slurm's own reason says what no line of the job does."""
        return f"{self.text}\n{self.job}"

    @property
    def ended(self) -> tuple[str, int]:
        return self.job.state, self.job.status

    @property
    def lines(self) -> list[str]:
        """Without those on nodes that wait for each other, as a busy machine has them do."""
        return [line for line in self.text.splitlines() if not SLOW.search(line)]

    def said(self, who: str) -> list[str]:
        """The lines of `apptrain`, `srun`, or of ranks that begin likewise."""
        return [line.removeprefix(f"{who}: ") for line in self.lines if line.startswith(f"{who}: ")]

    @property
    def launched(self) -> list[str]:
        """What apptrain says after the three lines with which the job script begins."""
        return self.said("apptrain")[3:]

    @property
    def printed(self) -> list[str]:
        """What the ranks printed, sorted: without the lines of the launcher and of Slurm."""
        ours = ("apptrain: ", "srun: ", "slurmstepd")
        return sorted(line for line in self.lines if not line.startswith(ours))


@dataclass(frozen=True, kw_only=True)
class Account:
    cluster: Cluster
    env: Mapping[str, str] = field(default_factory=dict)
    """What its login sets."""

    def on_disk(self, path: Path | str) -> Path:
        """A path of the homes or /scratch as this machine has it."""
        return self.cluster.folder / str(path).lstrip("/")

    def folder(self, path: Path | str) -> Path:
        """Makes a folder of the user's, with those on its way; relative to HOME."""
        for part in [*reversed((HOME / path).relative_to(HOME).parents), Path(path)]:
            on_disk = self.on_disk(HOME / part)
            if not on_disk.exists():
                on_disk.mkdir()
                os.chown(on_disk, UID, UID)
        return HOME / path

    def write(self, path: Path | str, text: str) -> Path:
        """Writes a file of the user's, with the folders on its way; relative to HOME."""
        file = self.folder(Path(path).parent) / Path(path).name
        self.on_disk(file).write_text(text)
        os.chown(self.on_disk(file), UID, UID)
        return file

    def environment(self) -> dict[str, str]:
        """The variables of an active venv of the user's that has torch and nothing of ours; the cluster shows
        `images.packages()`."""
        venv = HOME / "my env"
        if not self.on_disk(venv).exists():
            self.run("python3", "-m", "venv", "--without-pip", venv).check_returncode()
            (site,) = self.on_disk(venv).glob("lib/python3.*/site-packages")
            (site / "packages.pth").write_text(f"{SITE_PACKAGES}\n")
        return {"VIRTUAL_ENV": str(venv), "PATH": f"{venv}/bin:/usr/local/bin:/usr/bin:/bin"}

    def run(self, *argv: Path | str, cwd: Path = WORK, **how: Any) -> CompletedProcess[str]:
        """Runs a command on the login host."""
        env = {**self.env, **how.pop("env", {})}
        how.setdefault("timeout", BOUND)
        return self.cluster.login.run(argv, user=USER, cwd=cwd, env=env, **how)

    def submit(self, *argv: Path | str, cwd: Path = WORK, env: Mapping[str, str] | None = None) -> int:
        """`sbatch ARGV` on the login host; the job's number."""
        ended = self.run("sbatch", "--parsable", *argv, cwd=cwd, env=env or {})
        assert ended.returncode == 0, ended.stderr
        number = int(ended.stdout)
        explain(f"job {number}", lambda: self.see(number).text)
        return number

    def see(self, number: int) -> Ran:
        """A job as it is now."""
        job = self.cluster.job(number)
        output = self.on_disk(job.output)
        text = output.read_text() if output.exists() else ""
        first = text.partition("\n")[0]
        return Ran(job=job, text=text, folder=self.on_disk(first.removeprefix("apptrain: run directory ")))

    def end(self, number: int, bound: float = BOUND) -> Ran:
        """A job once it has ended."""
        self.cluster.wait(number, bound)
        return self.see(number)

    def ran(self, *argv: Path | str, **how: Any) -> Ran:
        """Submits a job and waits for its end."""
        return self.end(self.submit(*argv, **how))

    def until_printed(self, number: int, words: str, bound: float = BOUND, times: int = 1) -> None:
        """Waits until the output holds these words so often; other lines may stand between them."""

        def there() -> bool:
            ran = self.see(number)
            enough = ran.text.count(words) >= times
            assert enough or not ran.job.ended, ran.text
            return enough

        self.cluster.until(there, f"{words!r} from job {number}", bound)


@contextmanager
def account(request: pytest.FixtureRequest, fixture: str = "default", **how: Any) -> Iterator[Account]:
    """An account on a cluster of its own, `up(**how)`, with the image of that fixture."""
    given = given_image() if fixture == "default" else None
    with open_account(given or _built(request, fixture), patched=given is not None, **how) as found:
        yield found


def given_image() -> Path | None:
    """The file of APPTRAIN_TEST_IMAGE."""
    given = os.environ.get("APPTRAIN_TEST_IMAGE")
    return Path(given) if given else None


@contextmanager
def open_account(image: Path, *, patched: bool, **how: Any) -> Iterator[Account]:
    """An account with this image. `patched`: the checkout's packages are shown in place of the image's own."""
    shown = Bind(source=image, target=SOFTWARE / "image.sif")
    with up(binds=[shown, *how.pop("binds", ())], **how) as cluster:
        home = cluster.folder / "home/alice"
        repository = home / REPOSITORY.name
        for name in PARTS:
            skipped = shutil.ignore_patterns("image*.sif", "image*.json", "__pycache__")
            shutil.copytree(CHECKOUT / name, repository / name, ignore=skipped)
        shutil.copy(CHECKOUT / "apptrain", repository)
        (repository / "containers/image.sif").symlink_to(SOFTWARE / "image.sif")
        (home / WORK.name).mkdir()
        for path in (home / WORK.name, repository, *repository.rglob("*")):
            os.chown(path, UID, UID, follow_symlinks=False)
        parts = (("entrypoint", "entrypoint"), ("src/train", "train"))
        binds = [f"{REPOSITORY / source}:{PACKAGES}/{name}:ro" for source, name in parts]
        yield Account(cluster=cluster, env={"APPTRAIN_BIND": "\n".join(binds)} if patched else {})


def clear(account: Account) -> None:
    """Ends what runs, and waits until the nodes are idle."""
    account.cluster.controller.run(["scancel", "--state=pending"])
    account.cluster.controller.run(["scancel", "--state=running", "--signal=KILL"])
    account.cluster.wait_idle()


def _built(request: pytest.FixtureRequest, fixture: str) -> Path:
    found: Built = request.getfixturevalue(fixture)
    return found.image
