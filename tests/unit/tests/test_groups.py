"""Tests of one xdist_group run in one worker: what `make test` builds on."""

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]


def test_the_tests_of_a_group_run_in_one_worker(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import os
        from pathlib import Path

        import pytest

        @pytest.mark.xdist_group("together")
        @pytest.mark.parametrize("number", range(6))
        def test_grouped(number):
            Path(f"worker.{number}").write_text(os.environ["PYTEST_XDIST_WORKER"])
        """
    )
    ended = pytester.runpytest_subprocess("-n", "3", "--dist", "loadgroup", "-p", "no:cacheprovider")
    ended.assert_outcomes(passed=6)
    workers = [file.read_text() for file in Path(pytester.path).glob("worker.*")]
    assert len(workers) == 6
    assert len(set(workers)) == 1
