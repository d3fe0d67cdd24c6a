"""What holds for all tests: how many run at once, in which order, and which may be skipped.

The unit tests run in several workers (`-n auto --dist loadgroup`), each in any of them, unless it carries
`@pytest.mark.xdist_group(NAME)`: those of a group run in one worker, one after another, because they share something
that is expensive to make, or look at the whole machine (group `machine`). xdist begins with the largest groups.

Under CI=true a skip fails the session, unless the test says that CI may skip it. A test that a CI machine need not be
able to run carries `@pytest.mark.ci_may_skip("why")`. Every other skip there means that CI did not prove what it is
meant to prove.

APPTRAIN_TEST_ORDER=SEED runs them in another order: what passes in one only hides something.

`make test` is two sessions, and the second prints for 20 minutes: what failed in either is kept in the file that
APPTRAIN_TEST_FAILED names, for make to print at the end of all.
"""

import gc
import os
import random
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import hypothesis
import pytest
from _pytest.terminal import TerminalReporter

from tests import loud

hypothesis.settings.register_profile("ours", deadline=None)  # no test fails on a time
hypothesis.settings.load_profile("ours")

gc.disable()  # until all tests are collected: the search finds nothing, and each worker imports torch meanwhile

FAILED = os.environ.pop("APPTRAIN_TEST_FAILED", "")  # not for the sessions that tests start

# A shell starts what it leaves in the background with Ctrl-C ignored, nohup ignores SIGHUP, and every program below
# inherits that. A handler is not inherited, and this one lets the tests themselves outlive their terminal.
signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Tests wait more than they compute: two workers for each core that this process may use, and one for each lane
    of the embedded tests, which keeps a worker for as long as all others take."""
    lanes = 0 if all("unit" in argument for argument in config.args) else 3
    return 2 * len(os.sched_getaffinity(0)) + lanes


def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Compiles the tests, which all workers would do at once: it is most of what collecting them takes."""
    collect = [sys.executable, "-P", "-m", "pytest", "--collect-only", "-qq", *config.args]
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    # The workers say what is wrong, if anything is.
    subprocess.run(collect, env=env, capture_output=True, check=False, timeout=300)


@pytest.hookimpl(tryfirst=True)  # before xdist, which writes each test's group into its name
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if seed := os.environ.get("APPTRAIN_TEST_ORDER"):
        # File by file: what a file's tests share is made once.
        items.sort(
            key=lambda item: [random.Random(seed + part).random() for part in (str(item.path), item.nodeid)]
        )


def pytest_collection_finish() -> None:
    gc.freeze()  # nor need it look at what was imported and collected later
    gc.enable()


def pytest_runtest_logstart() -> None:
    loud.forget()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        report.sections += loud.explanations()
    return report


def _unexcused(reporter: TerminalReporter) -> list[str]:
    """The skips without the marker, one line each; a whole skipped module has no markers to carry."""
    found = []
    for report in reporter.stats.get("skipped", []):
        if "ci_may_skip" not in getattr(report, "keywords", {}):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
            found.append(f"{report.nodeid}: {reason}")
    return found


def _failed(reporter: TerminalReporter) -> list[str]:
    """What failed, two lines each: the test, and how the reason for it begins."""
    found = []
    for report in reporter.stats.get("failed", []) + reporter.stats.get("error", []):
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = str(crash.message if crash else report.longrepr).strip()
        found += [f"FAILED {report.nodeid}", f"    {' '.join(reason.split())[:300]}"]
    return found


def _reporter(config: pytest.Config) -> TerminalReporter | None:
    if os.environ.get("CI") != "true" or config.option.collectonly:
        return None
    plugin = config.pluginmanager.get_plugin("terminalreporter")
    return plugin if isinstance(plugin, TerminalReporter) else None


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = _reporter(session.config)
    if reporter and _unexcused(reporter) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: TerminalReporter, config: pytest.Config) -> None:
    failed = _failed(terminalreporter)
    reporter = _reporter(config)
    if reporter and (skips := _unexcused(reporter)):
        reporter.section("skipped, although CI is meant to run it: this fails the session", red=True)
        for line in skips:
            reporter.line(line)
            failed.append(f"SKIPPED {line}")
    if failed and FAILED:
        with Path(FAILED).open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in failed)
