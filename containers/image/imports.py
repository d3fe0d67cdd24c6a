"""Makes imports in the image fast: the bytecode of all its modules is in one file. `gather` writes the file;
`install` puts our finders in place, called by a `.pth` file in every Python of the image.

With it is the bytecode of what `dataclasses` writes for each class, as text, and would have Python compile at
each start: 300 times for torch.

Through FUSE each module costs several round trips, and this file is opened once. The finders stand at the
modules' usual place in sys.path: what stands before them there still wins. Specs, sources, resources and
tracebacks are as ever.

The file is not used if Python would not take the modules' own bytecode as it is (-O, another version), nor
for a folder in which something was added or replaced since then: by pip in an overlay, by a bind.
"""

import _imp
import gc
import marshal
import os
import sys
from _frozen_importlib_external import (  # importlib itself would have to be read at every start
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    MAGIC_NUMBER,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    SourceFileLoader,
    SourcelessFileLoader,
    cache_from_source,
    spec_from_file_location,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import CodeType, ModuleType
    from typing import Any

FILE = "/opt/apptrain/bytecode"
"""MAGIC_NUMBER and the size of the table, WORD bytes each; the table: folders, where the names are packed
until one is asked for, how many bytes of code a start needs, and where the texts of `dataclasses` are; the
code of these texts, then of one module after the other, first those of AHEAD, in their order."""
WORD = 8
PYC_HEAD = 16
AHEAD = "/opt/apptrain/ahead"
"""What ahead.py printed."""
BLOCK = 32 * 1024
"""The unit of AHEAD."""
REQUEST = 128 * 1024
"""The most that the kernel reads ahead at once through FUSE."""
ORDINARY = (
    (ExtensionFileLoader, EXTENSION_SUFFIXES),
    (SourceFileLoader, SOURCE_SUFFIXES),
    (SourcelessFileLoader, BYTECODE_SUFFIXES),
)
Place = tuple[int, int]
"""Where the code begins, and its size."""
Names = dict[str, tuple[int, int, bool]]
"""Modules of one folder: where the code begins, its size, and whether it is a package's."""


class Bytecode:
    """The file, mapped once something of it is needed; forks share it."""

    def __init__(self, file: str, begin: int, listed: int, texts: Place):
        self.time = os.stat(file).st_mtime
        self._file, self._begin, self._listed, self._texts = file, begin, listed, texts
        self._view: memoryview | None = None
        self._of_text: dict[bytes, Place] | None = None

    def code(self, begin: int, size: int) -> "CodeType":
        found: CodeType = self._read(begin, size)
        return found

    def execute(self, text: str, variables: "dict[str, object]", names: "dict[str, object]") -> None:
        """exec, which compiles no text that the file has."""
        if self._of_text is None:
            self._of_text = self._read(*self._texts)
        place = self._of_text.get(hash_of(text))
        exec(self.code(*place) if place else text, variables, names)

    def _read(self, begin: int, size: int) -> "Any":
        if self._view is None:
            import mmap

            with open(self._file, "rb") as file:
                self._view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))[self._begin :]
        return marshal.loads(self._view[begin : begin + size])

    def read_ahead(self) -> None:
        """Has the kernel read the code that an import of torch needs; waits for nothing."""
        with open(self._file, "rb", buffering=0) as file:
            _will_need(file.fileno(), 0, self._begin + self._listed)


class Loader(SourceFileLoader):
    """Python's own, but for where the code comes from, and that inspect knows whose file it is: the import of
    torch asks inspect for sources, and that would look at every module's file, 1,200 times through FUSE."""

    def __init__(self, name: str, path: str, bytecode: Bytecode, begin: int, size: int):
        super().__init__(name, path)
        self._where = bytecode, begin, size

    def get_code(self, _name: str) -> "CodeType":
        bytecode, begin, size = self._where
        return bytecode.code(begin, size)

    def exec_module(self, module: "ModuleType") -> None:
        files = getattr(sys.modules.get("inspect"), "modulesbyfile", None)
        if files is not None:
            files[self.path] = self.name
        super().exec_module(module)


class TorchLoader(Loader):
    """Of torch itself, whose import is the longest of all. What that makes stays, so the search for garbage
    would find nothing, and take a tenth of the time."""

    def exec_module(self, module: "ModuleType") -> None:
        read_ahead()
        self._where[0].read_ahead()
        collects = gc.isenabled()
        gc.disable()
        try:
            super().exec_module(module)
        finally:
            if collects:
                gc.enable()


class DataclassesLoader(Loader):
    """Of dataclasses, which gets an `exec` of ours."""

    def exec_module(self, module: "ModuleType") -> None:
        super().exec_module(module)
        vars(module)["exec"] = self._where[0].execute


KINDS = {"torch": TorchLoader, "dataclasses": DataclassesLoader}

for _kind in (Loader, *KINDS.values()):  # tracebacks leave importlib's own frames out
    _method = _kind.exec_module
    _method.__code__ = _method.__code__.replace(co_filename=cache_from_source.__code__.co_filename)


class Finder(FileFinder):
    """Python's own, but for the names that the file has."""

    def __init__(self, folder: str, names: Names, bytecode: Bytecode):
        super().__init__(folder, *ORDINARY)
        self._names, self._bytecode = names, bytecode

    def find_spec(self, fullname: str, target: "ModuleType | None" = None) -> "ModuleSpec | None":
        name = fullname.rpartition(".")[2]
        if name not in self._names or not self._unchanged():
            return super().find_spec(fullname, target)
        begin, size, package = self._names[name]
        base = f"{self.path}/{name}"
        path = f"{base}/__init__.py" if package else f"{base}.py"
        loader = KINDS.get(fullname, Loader)(fullname, path, self._bytecode, begin, size)
        below = [base] if package else None
        return spec_from_file_location(fullname, path, loader=loader, submodule_search_locations=below)

    def _unchanged(self) -> bool:
        """All that was written while the image was built has the same time."""
        try:
            return os.stat(self.path).st_mtime == self._bytecode.time
        except OSError:
            return False


def install(file: str = FILE) -> None:
    """Has the modules of which this file has the bytecode found in it."""
    if sys.flags.optimize or _imp.check_hash_based_pycs == "always":
        return
    try:
        with open(file, "rb") as stream:
            if stream.read(WORD) != MAGIC_NUMBER.ljust(WORD):
                return
            size = int.from_bytes(stream.read(WORD))
            folders: dict[str, bytes]
            folders, listed, texts = marshal.loads(stream.read(size))
        bytecode = Bytecode(file, 2 * WORD + size, listed, texts)
    except (OSError, EOFError):
        return

    def finder(folder: str) -> Finder:
        if folder not in folders:
            raise ImportError
        return Finder(folder, marshal.loads(folders[folder]), bytecode)

    sys.path_hooks.insert(0, finder)
    for folder in folders.keys() & sys.path_importer_cache.keys():
        del sys.path_importer_cache[folder]


def read_ahead(file: str = AHEAD) -> None:
    """Has the kernel read what the import of torch will touch of its libraries; waits for no page, but
    for the kernel to take the requests.

    Each page would be asked for when it is needed, 6,500 times."""
    try:
        with open(file) as stream:
            for line in stream:
                if line.startswith("/"):
                    break  # what follows is for `gather`
                size, blocks, path = line.rstrip("\n").split(" ", 2)
                _library_will_be_needed(path, int(size), blocks)
    except OSError:
        pass  # then they are read as they are needed


def _library_will_be_needed(path: str, size: int, blocks: str) -> None:
    with open(path, "rb", buffering=0) as library:
        if os.fstat(library.fileno()).st_size != size:
            return
        for run in blocks.split(","):
            begin, _, end = run.partition("-")
            _will_need(library.fileno(), int(begin) * BLOCK, (int(end or begin) + 1) * BLOCK)


def _will_need(fd: int, begin: int, end: int) -> None:
    for at in range(begin, end, REQUEST):
        os.posix_fadvise(fd, at, min(REQUEST, end - at), os.POSIX_FADV_WILLNEED)


def hash_of(text: str) -> bytes:
    """By which the file knows a text, as Python knows a module's source (PEP 552)."""
    return _imp.source_hash(0, text.encode())


def texts_of(modules: list[str]) -> dict[str, bytes]:
    """What dataclasses has Python compile while these modules are imported, and the code. In a version of
    marshal's format that does not depend on who else refers to a name."""
    import dataclasses
    import importlib

    found: dict[str, bytes] = {}

    def note(text: str, variables: "dict[str, object]", names: "dict[str, object]") -> None:
        code = compile(text, "<string>", "exec", dont_inherit=True)
        found[text] = marshal.dumps(code, 2)
        exec(code, variables, names)

    vars(dataclasses)["exec"] = note
    try:
        for module in modules:
            importlib.import_module(module)
    finally:
        del vars(dataclasses)["exec"]
    return dict(sorted(found.items()))


def gather(file: str, ahead: str, texts: dict[str, bytes], tops: list[str]) -> None:
    """Writes the file, with what lies compiled in these folders and below. `ahead`: where AHEAD lies now."""
    with open(ahead) as stream:
        listed = [line.rstrip("\n") for line in stream if line.startswith("/")]
    order = {path: place for place, path in enumerate(listed)}
    modules: list[tuple[int, str, bytes]] = []
    for top in tops:
        for folder, below, files in os.walk(top):
            below.sort()
            for name in sorted(file for file in files if file.endswith(".py")):
                path = f"{folder}/{name}"
                if code := _compiled(folder, name.removesuffix(".py")):
                    modules.append((order.get(path, len(order)), path, code))
    modules.sort(key=lambda module: module[0])  # those that are not listed stay in their order
    of_text: dict[bytes, Place] = {}
    end = 0
    for text, code in texts.items():
        of_text[hash_of(text)] = end, len(code)
        end += len(code)
    index = marshal.dumps(of_text, 2)
    where_texts = end, len(index)
    end += len(index)
    folders: dict[str, Names] = {}
    end_of_listed = end
    for place, path, code in modules:
        where, name = os.path.split(path.removesuffix(".py"))
        package = name == "__init__"
        where, name = os.path.split(where) if package else (where, name)
        folders.setdefault(where, {})[name] = end, len(code), package
        end += len(code)
        if place < len(order):
            end_of_listed = end
    packed = {folder: marshal.dumps(names) for folder, names in folders.items()}
    table = marshal.dumps((packed, end_of_listed, where_texts))
    with open(file, "wb") as out:
        out.write(MAGIC_NUMBER.ljust(WORD) + len(table).to_bytes(WORD) + table)
        out.writelines([*texts.values(), index, *(code for _, _, code in modules)])


def _compiled(folder: str, module: str) -> bytes:
    """The code of a module; empty if Python would take something else, or did not compile it."""
    if any(os.path.exists(f"{folder}/{module}{suffix}") for suffix in EXTENSION_SUFFIXES):
        return b""
    try:
        with open(cache_from_source(f"{folder}/{module}.py"), "rb") as stream:
            return stream.read()[PYC_HEAD:]
    except FileNotFoundError:
        return b""


if __name__ == "__main__":
    gather(sys.argv[1], sys.argv[2], texts_of(sys.argv[3].split(",")), sys.argv[4:])
