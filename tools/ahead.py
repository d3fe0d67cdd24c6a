"""Prints what an import of torch reads of an image: containers/locks/STACK-ARCHITECTURE.ahead.

Usage, as root: `.venv/bin/python tools/ahead.py [IMAGE] >containers/locks/cu132-amd64.ahead`; IMAGE is
containers/image.sif if it is not given. containers/image/ahead.py asks the kernel which pages are touched. So
that those are all that are there, the image is mounted on a test host, without reading ahead.
"""

import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(CHECKOUT))

from entrypoint.core.errors import BAD_INPUT  # noqa: E402
from tests.host import Bind, Refused, up  # noqa: E402

SHOWN = Path("/scratch/image.sif")
LIMIT = 300.0
"""Seconds; some 7 are needed."""
MOUNT = r"""
tree=/scratch/tree
begin=$(apptainer sif list "$1" | sed -n 's/.*|\([0-9]*\)-[0-9]* *|FS (Squashfs.*/\1/p')
mkdir "$tree"
squashfuse_ll -o "offset=$begin" "$1" "$tree"
echo 0 >"/sys/class/bdi/$(mountpoint -d "$tree")/read_ahead_kb"
mount --bind /proc "$tree/proc"
mount --bind /dev "$tree/dev"
mount --bind /dev/null "$tree/opt/apptrain/ahead"
PATH=$PATH LC_ALL=C.UTF-8 PYTHONNOUSERSITE=1 exec chroot "$tree" python -P -
"""


def main(image: str = "containers/image.sif") -> int:
    script = (CHECKOUT / "containers" / "image" / "ahead.py").read_text()
    try:
        with up("ahead", binds=[Bind(source=Path(image).resolve(strict=True), target=SHOWN)]) as host:
            ended = host.run(["bash", "-euc", MOUNT, "bash", SHOWN], input=script, timeout=LIMIT)
    except (Refused, FileNotFoundError) as error:
        print(f"ahead: {error}", file=sys.stderr)
        return BAD_INPUT
    print(ended.stderr, end="", file=sys.stderr)
    print(ended.stdout, end="")
    return ended.returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
