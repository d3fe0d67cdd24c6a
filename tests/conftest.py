"""What holds for all tests. Under CI=true a skip fails the session, unless the test says that CI may skip it.

A test that a CI machine need not be able to run carries `@pytest.mark.ci_may_skip("why")`. Every other skip
there means that CI did not prove what it is meant to prove.
"""

import os
import signal

import pytest
from _pytest.terminal import TerminalReporter

# A shell starts what it leaves in the background with Ctrl-C ignored, nohup ignores SIGHUP, and every program below
# inherits that. A handler is not inherited, and this one lets the tests themselves outlive their terminal.
signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)


def _unexcused(reporter: TerminalReporter) -> list[str]:
    """The skips without the marker, one line each; a whole skipped module has no markers to carry."""
    found = []
    for report in reporter.stats.get("skipped", []):
        if "ci_may_skip" not in getattr(report, "keywords", {}):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
            found.append(f"{report.nodeid}: {reason}")
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


def pytest_terminal_summary(config: pytest.Config) -> None:
    reporter = _reporter(config)
    if reporter and (skips := _unexcused(reporter)):
        reporter.section("skipped, although CI is meant to run it: this fails the session", red=True)
        for line in skips:
            reporter.line(line)
