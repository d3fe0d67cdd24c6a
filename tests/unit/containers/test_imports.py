"""Imports from the image's one file of bytecode, beside Python's own of the same modules."""

import ast
import dataclasses
import marshal
import os
import re
import subprocess
import sys
import zipfile
from compileall import compile_dir
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from py_compile import PycInvalidationMode

import pytest

from containers.image import ahead, imports

MODULES = {
    "alone.py": "'''What alone says.'''\nvalue = 'image'\ndef fail():\n    raise ValueError('here')  # a comment\n",
    "pack/__init__.py": "from . import below\nvalue = 'image'\n",
    "pack/below.py": "value = 'image'\nclass Kind:\n    def method(self):\n        return 1\n",
    "pack/__main__.py": "import sys\nprint(__spec__.name, __package__, __file__, sys.argv)\n",
    "pack/data.txt": "some data\n",
    "pack/deep/__init__.py": "",
    "pack/deep/end.py": "from ..below import Kind\n",
    "spread/image_part.py": "value = 'image'\n",
    "both.py": "value = 'source'\n",
    f"both{EXTENSION_SUFFIXES[0]}": "",
    "torch.py": "value = 'image'\n",
    "fails.py": "raise OSError('no library')\n",
    "lacks.py": "import missing\n",
    "dataclasses.py": Path(dataclasses.__file__).read_text(),
    "records.py": """\
from dataclasses import dataclass

@dataclass(frozen=True, order=True)
class Point:
    x: int
    y: int = 2

    def __post_init__(self):
        if self.x < 0:
            raise ValueError("x is negative")
""",
}
TIME = 1_700_000_000
START = "import site; site.addsitedir({folder!r}); import sys; sys.path[:0] = {before}\n"
LOADER = "import importlib.util as u; print(type(u.find_spec({name!r}).loader).__module__)"
"""Prints whose loader it is: OURS or Python's."""
OURS, PYTHONS = "apptrain_imports\n", "_frozen_importlib_external\n"


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A folder of modules as the image has them: compiled, gathered, all of one time."""
    folder = tmp_path / "an image"
    for name, text in MODULES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "apptrain_imports.py").write_bytes(Path(imports.__file__).read_bytes())
    compile_dir(folder, quiet=1, invalidation_mode=PycInvalidationMode.UNCHECKED_HASH)
    file, listed = tmp_path / "bytecode", tmp_path / "listed"
    listed.write_text(
        f"4 0 /lib/no-module.so\n{folder}/torch.py\n{folder}/pack/__init__.py\n{folder}/gone.py\n"
    )
    line: list[str | Path] = [sys.executable, imports.__file__, file, listed, "records", folder]
    subprocess.run(line, check=True, env={**os.environ, "PYTHONPATH": str(folder)})
    (folder / "apptrain_imports.pth").write_text(
        f"import apptrain_imports; apptrain_imports.install({str(file)!r})"
    )
    for path in (file, folder, *folder.rglob("*")):
        os.utime(path, (TIME, TIME))
    return folder


def table_of(file: Path) -> tuple[int, dict[str, imports.Names], int]:
    """Where the code begins, the table, and how many bytes of code are those of the list."""
    written = file.read_bytes()
    begin = 2 * imports.WORD + int.from_bytes(written[imports.WORD : 2 * imports.WORD])
    packed, listed, _ = marshal.loads(written[2 * imports.WORD : begin])
    folders = {folder: marshal.loads(names) for folder, names in packed.items()}
    return begin, folders, listed


def texts_of(file: Path) -> tuple[set[bytes], int]:
    """The hashes of what dataclasses wrote at the build, and where its code ends."""
    written = file.read_bytes()
    table = 2 * imports.WORD + int.from_bytes(written[imports.WORD : 2 * imports.WORD])
    _, _, (begin, size) = marshal.loads(written[2 * imports.WORD : table])
    return {*marshal.loads(written[table + begin : table + begin + size])}, begin + size


def python(image: Path, code: str, *options: str, before: tuple[Path, ...] = ()) -> str:
    """What this code prints, with these folders first in sys.path, then Python's, then the image's."""
    start = START.format(folder=str(image), before=[str(path) for path in before])
    line = [sys.executable, "-B", "-S", *options, "-c", start + code]
    ended = subprocess.run(line, capture_output=True, text=True, check=False, cwd=image.parent)
    return ended.stdout + ended.stderr


def plain(image: Path, code: str, *options: str, before: tuple[Path, ...] = ()) -> str:
    """The same without the file."""
    (image / "apptrain_imports.pth").rename(image / "aside")
    os.utime(image, (TIME, TIME))
    said = python(image, code, *options, before=before)
    (image / "aside").rename(image / "apptrain_imports.pth")
    os.utime(image, (TIME, TIME))
    return said


@pytest.mark.parametrize("name", ["alone", "pack", "pack.below", "pack.deep", "pack.deep.end"])
def test_modules_and_packages_come_from_the_file(image: Path, name: str) -> None:
    assert python(image, LOADER.format(name=name)) == OURS
    for path in {*image.rglob("*.py*")} - {*image.rglob("apptrain_imports.*")}:
        path.write_text("print('read')")
    assert python(image, f"import {name}") == ""


@pytest.mark.parametrize(
    "code",
    [
        "import pack.deep.end as m; print(m.__spec__.name, m.__file__, m.__cached__, m.__package__, m.__doc__)",
        "import pack as m; print(m.__spec__.origin, m.__path__, m.__file__, m.__spec__.submodule_search_locations)",
        "import alone as m; print(m.__doc__, m.__loader__.get_source('alone'), m.__loader__.is_package('alone'))",
        "import pack as m; print(m.__loader__.get_data(m.__file__), m.__loader__.path, m.__loader__.get_filename())",
        "import alone; alone.fail()",
        "import fails",
        "import lacks",
        "import inspect, alone; print(inspect.getmodule(alone.fail.__code__))",
        "import inspect, fails",
        "import pack.below, inspect; print(inspect.getsource(pack.below.Kind.method), inspect.getfile(pack.below))",
        "import alone, linecache; print(alone.fail.__code__.co_filename, linecache.getline(alone.__file__, 4))",
        "import pack, importlib.resources as r; print(r.files(pack).joinpath('data.txt').read_text())",
        "import pack, pkgutil; print([m.name for m in pkgutil.walk_packages(pack.__path__, 'pack.')])",
        "import pack, pkgutil; print(pkgutil.get_data('pack', 'data.txt'))",
        "import pack.below, pickle; print(pickle.loads(pickle.dumps(pack.below.Kind)))",
        "import alone, importlib; alone.value = 1; print(importlib.reload(alone).value)",
        "import runpy; runpy.run_module('pack', run_name='__main__', alter_sys=True)",
        "import both",
        "import missing",
        "import pack.missing",
        "from pack import missing",
        "import alone.missing",
        "import spread, spread.image_part as m; print(spread.__path__, m.__file__, m.__spec__.parent)",
        "import importlib.util as u; print(u.find_spec('both').loader.path, u.find_spec('pack.data'))",
        "import cProfile; import alone; cProfile.run('alone.value', '/dev/null'); print(alone.value)",
    ],
)
def test_everything_else_is_as_python_has_it(image: Path, code: str) -> None:
    assert python(image, code) == plain(image, code)


@pytest.mark.parametrize("options", [("-I",), ("-E",), ("-P",), ("-s",), ("-X", "frozen_modules=off")])
def test_it_works_under_options_of_python(image: Path, options: tuple[str, ...]) -> None:
    assert python(image, LOADER.format(name="pack.below"), *options) == OURS


@pytest.mark.parametrize("options", [("-O",), ("-OO",), ("--check-hash-based-pycs", "always")])
def test_it_stays_out_where_python_would_not_take_the_bytecode(image: Path, options: tuple[str, ...]) -> None:
    assert python(image, LOADER.format(name="pack.below"), *options) == PYTHONS


def test_a_module_in_an_earlier_entry_wins(image: Path, tmp_path: Path) -> None:
    mine, archive = tmp_path / "mine", tmp_path / "mine.zip"
    (mine / "pack").mkdir(parents=True)
    (mine / "alone.py").write_text("value = 'mine'")
    (mine / "pack/__init__.py").write_text("value = 'mine'")
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("torch.py", "value = 'zip'")
    code = "import alone, pack, torch; print(alone.value, pack.value, torch.value)"
    assert python(image, code, before=(mine, archive)) == "mine mine zip\n"
    assert python(image, code) == "image image image\n"


def test_a_later_entry_does_not_win(image: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/alone.py").write_text("value = 'later'")
    code = f"sys.path.append({str(tmp_path / 'mine')!r}); import alone; print(alone.value)"
    assert python(image, code) == "image\n"


def test_a_namespace_package_has_parts_in_the_image_and_elsewhere(image: Path, tmp_path: Path) -> None:
    (tmp_path / "mine/spread").mkdir(parents=True)
    (tmp_path / "mine/spread/my_part.py").write_text("value = 'mine'")
    code = (
        "import spread.image_part as i, spread.my_part as m; print(i.value, m.value, list(i.__spec__.parent))"
    )
    before = (tmp_path / "mine",)
    assert python(image, code, before=before).startswith("image mine")
    assert python(image, code, before=before) == plain(image, code, before=before)


def test_another_pythons_file_is_not_used(image: Path, tmp_path: Path) -> None:
    file = tmp_path / "bytecode"
    other = bytes([MAGIC_NUMBER[0] ^ 1])
    file.write_bytes(other + file.read_bytes()[1:])
    os.utime(file, (TIME, TIME))
    assert python(image, LOADER.format(name="alone")) == PYTHONS


@pytest.mark.parametrize("left", [None, b"", MAGIC_NUMBER + bytes(4), MAGIC_NUMBER + bytes(11) + b"\1"])
def test_a_file_that_is_missing_or_cut_off_is_not_used(
    image: Path, tmp_path: Path, left: bytes | None
) -> None:
    file = tmp_path / "bytecode"
    file.unlink()
    if left is not None:
        file.write_bytes(left)
    assert python(image, LOADER.format(name="alone")) == PYTHONS


def test_a_folder_with_other_files_than_in_the_image_is_read_itself(image: Path) -> None:
    (image / "pack/below.py").unlink()
    (image / "pack/below.py").write_text("value = 'replaced'")
    (image / "pack/__pycache__" / f"below.{sys.implementation.cache_tag}.pyc").unlink()
    assert python(image, "import pack.below as m; print(m.value)") == "replaced\n"
    assert python(image, LOADER.format(name="pack.deep.end")) == OURS
    assert python(image, LOADER.format(name="pack")) == OURS


def test_a_folder_that_has_gone_has_no_modules(image: Path) -> None:
    code = "import pack, shutil; shutil.rmtree(pack.__path__[0])\nimport pack.deep"
    assert python(image, code).splitlines()[-1] == "ModuleNotFoundError: No module named 'pack.deep'"


def test_only_what_lies_compiled_is_gathered(image: Path, tmp_path: Path) -> None:
    (image / "pack/__pycache__" / f"below.{sys.implementation.cache_tag}.pyc").unlink()
    listed = str(tmp_path / "listed")
    imports.gather(str(tmp_path / "again"), listed, {}, [str(image)])
    found, whole = (tmp_path / name for name in ("again", "bytecode"))
    assert 0 < found.stat().st_size < whole.stat().st_size
    imports.gather(str(tmp_path / "third"), listed, {}, [str(image)])
    assert (tmp_path / "third").read_bytes() == found.read_bytes()


def test_the_modules_that_are_listed_come_first_in_their_order(image: Path, tmp_path: Path) -> None:
    _, folders, end_of_listed = table_of(tmp_path / "bytecode")
    places = {f"{folder}/{name}": place for folder, names in folders.items() for name, place in names.items()}
    begin, torch, _ = places.pop(f"{image}/torch")
    assert begin == texts_of(tmp_path / "bytecode")[1]
    assert places.pop(f"{image}/pack") == (begin + torch, end_of_listed - begin - torch, True)
    assert min(begin for begin, _, _ in places.values()) == end_of_listed


# --- what dataclasses writes ------------------------------------------------------------------------------------

POINT = "from records import Point; "


@pytest.mark.parametrize(
    "code",
    [
        POINT
        + "print(Point(1), Point(1) == Point(1, 2), Point(1) < Point(2), hash(Point(1)) == hash((1, 2)))",
        POINT + "Point(1).x = 2",
        POINT + "Point(-1)",
        POINT + "Point()",
        POINT
        + "import inspect; print(inspect.signature(Point), Point.__init__.__code__.co_filename, Point.__doc__)",
        POINT
        + "import pickle, copy; print(pickle.loads(pickle.dumps(Point(3))), copy.replace(Point(3), y=4))",
        "from dataclasses import make_dataclass as make; print(make('Other', ['a', ('b', int, 3)])(a=1))",
        "import dataclasses, importlib; importlib.reload(dataclasses); import records; print(records.Point(1))",
    ],
)
def test_a_dataclass_is_as_python_makes_it(image: Path, code: str) -> None:
    if sys.version_info < (3, 13):
        code = code.replace("copy.replace", "copy.copy").replace(", y=4", "")
    before = (image,)
    assert python(image, code, before=before) == plain(image, code, before=before)


def test_what_dataclasses_writes_is_compiled_at_the_build(image: Path, tmp_path: Path) -> None:
    """All texts of a class are in the file; a text is known by all of its letters, and any other is compiled."""
    file = tmp_path / "bytecode"
    show = (
        "import dataclasses as d; ours = d.exec; d.exec = lambda *words: print([words[0]]) or ours(*words)\n"
    )
    asked = {
        ast.literal_eval(line)[0]
        for line in python(image, show + "import records", before=(image,)).splitlines()
    }
    assert asked
    assert texts_of(file)[0] == {imports.hash_of(text) for text in asked}
    other = marshal.dumps(compile("value = 'of the build'", "", "exec"), 2)
    imports.gather(str(file), str(tmp_path / "listed"), dict.fromkeys(asked, other), [str(image)])
    for path in (file, image):
        os.utime(path, (TIME, TIME))
    text = asked.pop()
    for given, value in {text: "of the build", f"{text}\n\nvalue = 'of now'": "of now"}.items():
        run = f"import dataclasses as d; names = {{}}; d.exec({given!r}, {{}}, names); print(names['value'])"
        assert python(image, run, before=(image,)) == f"{value}\n"


# --- reading ahead ----------------------------------------------------------------------------------------------


def test_what_is_listed_is_read_ahead_in_its_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, float, float]] = []

    def advise(fd: int, begin: int, size: int, _advice: int) -> None:
        name = Path(f"/proc/self/fd/{fd}").readlink().name
        asked.append((name, begin / imports.BLOCK, size / imports.BLOCK))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    for name in ("first lib.so", "second.so", "changed.so"):
        (tmp_path / name).write_bytes(b"1234")
    listed = [
        f"4 3,5-6,10-18 {tmp_path}/first lib.so",
        f"5 0 {tmp_path}/changed.so",
        f"4 0 {tmp_path}/second.so",
    ]
    listed += [f"{tmp_path}/a module.py"]
    (tmp_path / "ahead").write_text("".join(f"{line}\n" for line in listed))
    imports.read_ahead(str(tmp_path / "ahead"))
    first = [("first lib.so", *run) for run in ((3, 1), (5, 2), (10, 4), (14, 4), (18, 1))]
    assert asked == [*first, ("second.so", 0, 1)]


def test_without_a_list_or_a_library_nothing_is_read_ahead(tmp_path: Path) -> None:
    imports.read_ahead(str(tmp_path / "none"))
    (tmp_path / "ahead").write_text(f"4 0 {tmp_path}/none.so\n")
    imports.read_ahead(str(tmp_path / "ahead"))


def test_it_is_read_ahead_when_torch_is_imported_from_the_image(image: Path) -> None:
    code = "import apptrain_imports as a; a.read_ahead = lambda: print('ahead'); import alone, torch"
    assert python(image, code) == "ahead\n"
    asked = "import apptrain_imports as a, importlib.util as u; a.read_ahead = lambda: print('ahead'); u.find_spec('torch')"
    assert python(image, asked) == ""


@pytest.mark.parametrize(("before", "after"), [("enable", True), ("disable", False)])
@pytest.mark.parametrize("text", ["", "raise OSError('no library')"])
def test_nothing_searches_for_garbage_while_torch_is_imported(
    image: Path, tmp_path: Path, before: str, text: str, *, after: bool
) -> None:
    (image / "torch.py").write_text(f"import gc; print(gc.isenabled())\n{text}")
    compile_dir(image, quiet=1, invalidation_mode=PycInvalidationMode.UNCHECKED_HASH)
    imports.gather(str(tmp_path / "bytecode"), str(tmp_path / "listed"), {}, [str(image)])
    for path in (tmp_path / "bytecode", image):
        os.utime(path, (TIME, TIME))
    code = f"import gc; gc.{before}()\ntry: import torch\nexcept OSError: pass\nprint(gc.isenabled())"
    assert python(image, code) == f"False\n{after}\n"
    assert python(image, "import torch") == plain(image, "import torch").replace("True", "False")


def test_who_asks_inspect_for_a_module_has_no_other_file_looked_at(image: Path) -> None:
    code = """
import alone, inspect, os, pack.below
os.path.realpath = None  # which inspect calls for each file that it looks at
print(inspect.getmodule(pack.below.Kind.method.__code__))
"""
    assert python(image, code) == f"<module 'pack.below' from '{image}/pack/below.py'>\n"
    assert python(image, code.replace("alone, inspect", "inspect, alone")) == python(image, code)
    assert "not callable" in plain(image, code)


def test_the_code_that_torch_needs_is_read_ahead_too(image: Path, tmp_path: Path) -> None:
    code = "import os; os.posix_fadvise = lambda fd, *what: print(os.readlink(f'/proc/self/fd/{fd}'), what)\n"
    found = python(image, code + "import alone, torch")
    table, _, end_of_listed = table_of(tmp_path / "bytecode")
    assert found == f"{tmp_path}/bytecode {(0, table + end_of_listed, os.POSIX_FADV_WILLNEED)}\n"


def test_the_list_is_of_the_blocks_that_a_process_has_touched() -> None:
    assert ahead.spelled({0, 1, 2, 3, 7, 9, 10}) == "0-3,7,9-10"
    found, blocks = ahead.loaded(), ahead.touched()
    (libc,) = {path for path in found if Path(path).name.startswith("libc.so")}
    assert 0 in blocks[libc]
    assert max(blocks[libc]) <= Path(libc).stat().st_size // ahead.BLOCK
    assert ahead.BLOCK == imports.BLOCK
    assert ahead.__file__ in ahead.sources()


def test_a_build_compiles_what_dataclasses_write_for_the_same_modules() -> None:
    recipe = Path(ahead.__file__).parents[1] / "apptrain.def"
    assert f" {','.join(ahead.STARTS)} " in recipe.read_text()


def test_the_lists_have_the_modules_of_ours_that_a_start_imports_and_no_others() -> None:
    """A build copies the lists (tools/ahead.py prints one): a module that they lack is read late, through FUSE."""
    code = f"import sys, {', '.join(name for name in ahead.STARTS if name != 'torch')}; print(*sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = {name for name in ended.stdout.split() if name.partition(".")[0] == "entrypoint"}
    lists = sorted((Path(ahead.__file__).parents[1] / "locks").glob("*.ahead"))
    assert lists
    for one in lists:
        paths = re.findall(r"/dist-packages/(entrypoint/\S+)\.py$", one.read_text(), re.M)
        assert {path.removesuffix("/__init__").replace("/", ".") for path in paths} == imported, one.name
