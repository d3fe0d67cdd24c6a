"""The examples of README and docs/ that need a cluster, typed into one shell of its login host for each page."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.account import BOUND, HOME, PARTS, REPOSITORY, USER, Account, account, clear
from tests.pages import ALICE, FILES, PAGES, Shell, examples, tell
from tests.pbs_double.cluster import BINDS, PROGRAMS
from tests.pbs_double.cluster import up as pbs_up
from tests.vcluster.shares import shares

pytestmark = [
    pytest.mark.ci_may_skip("a CI without root cannot make namespaces and users"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts, namespaces and users of its own"),
]
PLACE = Path(ALICE)


def pages(scene: str) -> list[Path]:
    return [page for page in PAGES if any(one.what == scene for one in examples(page))]


@pytest.fixture(scope="module")
def reader(request: pytest.FixtureRequest) -> Iterator[Account]:
    """Someone whose checkout and folder are one, as on the pages."""
    with account(request, binds=BINDS) as user:
        user.folder(PLACE)
        for part in (*PARTS, "apptrain", "tests"):
            link = user.on_disk(PLACE / part)
            link.symlink_to(Path("..") / REPOSITORY.name / part)
        for name, text in FILES.items():
            user.write(PLACE / name, text)
            user.write(HOME / "work" / name, text)
        yield user


def differs(user: Account, page: Path, scene: str, path: str) -> list[str]:
    """What the page's examples print otherwise."""
    pipe = subprocess.PIPE
    env = {**user.env, "PATH": f"{PLACE}:{path}", "USER": USER}
    process = user.cluster.login.start(["bash"], user=USER, cwd=PLACE, env=env, stdin=pipe, stdout=pipe)
    shell = Shell(process, until_ended=lambda: None)

    def until_ended() -> None:
        for number in shell.known.values():
            user.cluster.until(lambda: ended(number), f"job {number} to end", BOUND)  # noqa: B023

    def ended(number: str) -> bool:
        if scene == "slurm":
            return user.cluster.job(int(number)).ended
        said = user.cluster.controller.run([PROGRAMS / "qstat", "-x", "-f", number]).stdout
        return "job_state = F" in said

    shell.until_ended = until_ended
    names = {str(REPOSITORY): ALICE, str(REPOSITORY).replace(" ", "\\ "): ALICE}
    told = tell(page, shell, scene, names)
    process.communicate(timeout=BOUND)
    return told


@pytest.mark.timeout(2400, func_only=True)
@pytest.mark.parametrize("page", pages("slurm"), ids=lambda page: page.name)
def test_the_examples_on_slurm_print_what_the_page_shows(reader: Account, page: Path) -> None:
    compares = page.name == "doctor.md"
    with shares(reader.cluster, *([node] for node in reader.cluster.nodes if compares)):
        told = differs(reader, page, "slurm", "/usr/local/bin:/usr/bin:/bin")
    clear(reader)
    assert not told, "\n\n".join(told)


@pytest.mark.timeout(2400, func_only=True)
@pytest.mark.parametrize("page", pages("pbs"), ids=lambda page: page.name)
def test_the_examples_under_pbs_print_what_the_page_shows(reader: Account, page: Path) -> None:
    with pbs_up(reader.cluster):
        told = differs(reader, page, "pbs", f"/usr/local/bin:/usr/bin:/bin:{PROGRAMS}")
    assert not told, "\n\n".join(told)
