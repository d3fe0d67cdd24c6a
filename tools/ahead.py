"""Prints what an import of torch reads of an image: containers/locks/STACK-ARCHITECTURE.ahead.

Usage, as root: `.venv/bin/python tools/ahead.py [IMAGE] >FILE`, as in CONTRIBUTING.md; without IMAGE it takes
containers/image.sif, which `make image` builds. containers/image/ahead.py asks the kernel which pages are
touched. The image is mounted on a test host without reading ahead, so that no other pages are there.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(CHECKOUT))

from containers.builder import FILE_SYSTEM  # noqa: E402
from entrypoint.core import image_header  # noqa: E402
from entrypoint.core.errors import BAD_INPUT, BadInput  # noqa: E402
from tests.host import Bind, Refused, up  # noqa: E402

SHOWN = Path("/scratch/image.sif")
LIMIT = 300.0
"""Seconds; some 7 are needed."""
MOUNT = r"""
tree=/scratch/tree
mkdir "$tree"
squashfuse_ll -o "offset=$2" "$1" "$tree"
echo 0 >"/sys/class/bdi/$(mountpoint -d "$tree")/read_ahead_kb"
mount --bind /proc "$tree/proc"
mount --bind /dev "$tree/dev"
mount --bind /dev/null "$tree/opt/apptrain/ahead"
PATH=$PATH LC_ALL=C.UTF-8 PYTHONNOUSERSITE=1 exec chroot "$tree" python -P -
"""


def main(argv: Sequence[str]) -> int:
    if len(argv) > 1 or argv[:1] == ["--help"]:
        print(__doc__, end="", file=sys.stderr if argv[1:] else sys.stdout)
        return BAD_INPUT if argv[1:] else 0
    image = Path(argv[0] if argv else "containers/image.sif").resolve()
    script = (CHECKOUT / "containers" / "image" / "ahead.py").read_text()
    try:
        image_header.check(image)
        with up("ahead", binds=[Bind(source=image, target=SHOWN)]) as host:
            listed = host.run(["apptainer", "sif", "list", SHOWN], timeout=LIMIT)
            found = FILE_SYSTEM.search(listed.stdout)
            if not found:
                raise Refused(f"{image}: it is no image that `make image` has built: {listed.stderr.strip()}")
            ended = host.run(["bash", "-euc", MOUNT, "bash", SHOWN, found[1]], input=script, timeout=LIMIT)
    except (Refused, BadInput) as error:
        print(f"apptrain: {error}", file=sys.stderr)
        return BAD_INPUT
    print(ended.stderr, end="", file=sys.stderr)
    print(ended.stdout, end="")
    return ended.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
