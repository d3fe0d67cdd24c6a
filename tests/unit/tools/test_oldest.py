"""What a login node's Python runs: which files those are."""

import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[3]


def listed() -> set[str]:
    shown = subprocess.check_output(
        [sys.executable, CHECKOUT / "tools/oldest.py", "--list"], text=True, timeout=60
    )
    return set(shown.split())


def test_all_that_plan_and_submit_import_is_looked_at() -> None:
    """As a Python that has imported them says."""
    code = (
        "import sys; sys.path.insert(0, '.')\n"
        "import entrypoint.cli.submit, entrypoint.cli.profiles, entrypoint.cli.apptrain, entrypoint.plan.rules, entrypoint.plan.profile\n"
        "from entrypoint.schedulers import choice\n"
        "for name in choice.NAMES: choice.find({}, name, None)\n"
        "print('\\n'.join(m.__file__ for m in sys.modules.values() if getattr(m, '__file__', None)))"
    )
    shown = subprocess.check_output([sys.executable, "-P", "-c", code], cwd=CHECKOUT, text=True, timeout=60)
    ours = {
        path.removeprefix(f"{CHECKOUT}/")
        for path in shown.split()
        if path.startswith(f"{CHECKOUT}/") and "/site-packages/" not in path
    }
    assert ours
    assert ours - listed() == set()


def test_what_runs_in_the_image_alone_is_not() -> None:
    assert (
        not {"entrypoint/run/launch.py", "entrypoint/cli/embedded.py", "entrypoint/batch/prepare.py"}
        & listed()
    )
