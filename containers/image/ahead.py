"""Lists what a start reads of the image, in that order: the launcher's modules, and what torch touches. It
runs in an image; begin at `main`.

It asks the kernel, and prints a line `SIZE BLOCKS PATH` for each library: SIZE in bytes, BLOCKS as in
`0-3,7`, of 32 KiB each; then a line `PATH` for each module's source. What the kernel reads around a page that
is touched looks touched too: tools/ahead.py runs this where it reads nothing around.

The lines differ a little from machine to machine. So they are kept with the locks, and a build copies them:
the image is the same wherever it is built.

Tried and not kept: the libraries' headers (a third of the blocks); a process that reads ahead (not needed).
"""

import ctypes
import importlib
import os
import struct
import sys
from pathlib import Path

BLOCK = 32 * 1024
"""Less than squashfs unpacks at once, but what is not asked for is not copied, and takes no memory."""
STARTS = "entrypoint.cli.main", "entrypoint.batch.prepare", "entrypoint.run.launch", "torch"
"""What a start imports; apptrain.def names the same."""
PAGE = os.sysconf("SC_PAGE_SIZE")
PRESENT = 1 << 63  # in /proc/PID/pagemap


class Library(ctypes.Structure):
    """The beginning of dl_phdr_info."""

    _fields_ = [("address", ctypes.c_size_t), ("name", ctypes.c_char_p)]


def loaded() -> list[str]:
    """The libraries of this process in the order of loading."""
    found: list[str] = []

    def note(library: "ctypes._Pointer[Library]", _size: int, _data: None) -> int:
        found.append(os.path.realpath(os.fsdecode(library.contents.name)))
        return 0

    callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Library), ctypes.c_size_t, ctypes.c_void_p)
    ctypes.CDLL(None).dl_iterate_phdr(callback(note), None)
    return found


def touched() -> dict[str, set[int]]:
    """The blocks of each file of which this process has pages."""
    found: dict[str, set[int]] = {}
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
        for line in Path("/proc/self/maps").read_text().splitlines():
            addresses, _, offset, _, _, *path = line.split(maxsplit=5)
            if not path or not path[0].startswith("/"):
                continue
            begin, end = (int(address, 16) // PAGE for address in addresses.split("-"))
            pagemap.seek(begin * 8)
            pages = struct.iter_unpack("Q", pagemap.read((end - begin) * 8))
            there = (number * PAGE for number, (page,) in enumerate(pages) if page & PRESENT)
            found.setdefault(path[0], set()).update((int(offset, 16) + at) // BLOCK for at in there)
    return found


def spelled(numbers: set[int]) -> str:
    """`0-3,7`."""
    begins = sorted(number for number in numbers if number - 1 not in numbers)
    ends = sorted(number for number in numbers if number + 1 not in numbers)
    runs = zip(begins, ends, strict=True)
    return ",".join(f"{begin}-{end}" if begin < end else f"{begin}" for begin, end in runs)


def sources() -> list[str]:
    """Of this process's modules, in the order in which their imports ended."""
    specs = (getattr(module, "__spec__", None) for module in sys.modules.values())
    origins = (str(getattr(spec, "origin", None)) for spec in specs)
    return [origin for origin in origins if origin.startswith("/") and origin.endswith(".py")]


def main() -> None:
    for name in STARTS:
        importlib.import_module(name)

    blocks = touched()
    for path in loaded():
        if blocks.get(path):
            print(Path(path).stat().st_size, spelled(blocks[path]), path)
    print(*sources(), sep="\n")


if __name__ == "__main__":
    main()
