"""Write the hash locks requirements/*.txt from requirements/*.in and containers/stacks.yaml.

The secret: how uv is called so that one lock serves every Python and names no index. Usage:
`python tools/lock.py [--upgrade | --upgrade-package NAME ...]`; without arguments the pins that still fit
stay. UV, if set, is the uv to use; indexes, proxies and certificates come from uv's own settings.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

CHECKOUT = Path(__file__).resolve().parent.parent
STACKS = Path("containers/stacks.yaml")
LOCKS = ("run", "dev")
COMPILE = (
    "pip",
    "compile",
    "--quiet",
    "--universal",
    "--generate-hashes",
    "--no-emit-index-url",
    "--no-emit-find-links",
    "--custom-compile-command=make lock",
)


def stack_pins(stacks: Path) -> list[str]:
    """The default stack's packages, as requirement lines."""
    stack = yaml.safe_load(stacks.read_text())["default"]
    return [f"{name}=={stack[name]}" for name in ("torch", "torchvision")]


def main(arguments: list[str]) -> int:
    uv = os.environ.get("UV") or str(Path(sys.executable).with_name("uv"))
    python = yaml.safe_load((CHECKOUT / STACKS).read_text())["default"]["python"]
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        shutil.copytree(CHECKOUT / "requirements", work / "requirements")
        # Under the name of their source, which uv writes beside each pin as its reason.
        (work / STACKS.parent).mkdir()
        (work / STACKS).write_text("\n".join(stack_pins(CHECKOUT / STACKS)) + "\n")
        for lock in LOCKS:
            source, target = f"requirements/{lock}.in", f"requirements/{lock}.txt"
            command = [uv, *COMPILE, f"--python-version={python}", *arguments]
            command += ["--constraint", str(STACKS)] if lock == "run" else []
            done = subprocess.run([*command, source, "-o", target], cwd=work, check=False)
            if done.returncode:
                print(f"lock: {source} cannot be resolved: nothing was changed", file=sys.stderr)
                return done.returncode
        for lock in LOCKS:
            file = Path("requirements", f"{lock}.txt")
            fresh = CHECKOUT / "requirements" / f"{lock}.txt.new"
            shutil.copyfile(work / file, fresh)
            fresh.replace(CHECKOUT / file)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
