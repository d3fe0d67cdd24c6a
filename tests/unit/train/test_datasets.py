import errno
import hashlib
import io
import json
import math
import multiprocessing
import os
import pickle
import shutil
import signal
import zlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from train import datasets, rng
from train.cifar10 import ArrayUnpickler, read_cifar10
from train.config import Data
from train.datasets import (
    CIFAR_MEAN,
    CIFAR_STD,
    DigitsLook,
    PhotoLook,
    centre_box,
    open_source,
    random_box,
    read_digits,
)
from train.sampler import stream
from train.status import TrainingRefused

CPU = torch.device("cpu")


def opened(**data: object) -> datasets.Source:
    return open_source(Data(**data), seed=1, device=CPU)  # type: ignore[arg-type]


def test_the_digits_are_the_1797_images_in_file_order() -> None:
    content = datasets.DIGITS.read_bytes()
    expected = "09f66e6debdee2cd2b5ae59e0d6abbb73fc2b0e0185d2e1957e9ebb51e23aa22"
    assert hashlib.sha256(content).hexdigest() == expected
    assert expected in (datasets.DIGITS.parent / "README.md").read_text()
    images, labels = read_digits()
    assert images.shape == (1797, 1, 8, 8)
    assert (int(images.min()), int(images.max())) == (0, 16)
    assert labels[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert images[0, 0, 0].tolist() == [0, 0, 5, 13, 9, 1, 0, 0]


def labels_of(source: datasets.Source) -> list[int]:
    return [
        int(label)
        for _, labels in source.plain_batches([range(source.test_size)], "test")
        for label in labels
    ]


def test_the_test_images_are_the_last_360() -> None:
    source = opened(name="digits")
    assert (source.train_size, source.test_size, source.split) == (1437, 360, "test")
    assert labels_of(source) == read_digits()[1][1437:].tolist()


def test_each_training_image_is_set_aside_in_one_fold_and_no_test_image_is_there() -> None:
    images, labels = read_digits()
    begins = [0, 287, 574, 862, 1149, 1437]
    for fold, (begin, end) in enumerate(pairwise(begins)):
        source = opened(name="digits", folds=5, fold=fold)
        assert isinstance(source, datasets.InMemory)
        assert (source.train_size, source.test_size, source.split) == (
            1437 - end + begin,
            end - begin,
            "fold",
        )
        rest = torch.cat([images[:begin], images[end:1437]])
        assert torch.equal(source.images, torch.cat([rest, images[begin:end]]))
        assert labels_of(source) == labels[begin:end].tolist()


@pytest.mark.parametrize(("samples", "test_size"), [(10, 10), (1024, 1024), (5000, 1024)])
def test_synthetic_images_are_as_many_as_asked_for_and_a_thousand_to_evaluate_on(
    samples: int, test_size: int
) -> None:
    source = opened(name="synthetic", samples=samples, classes=3, image_size=8)
    assert (source.train_size, source.test_size, source.classes, source.image_size) == (
        samples,
        test_size,
        3,
        8,
    )


def test_more_folds_than_images_are_refused() -> None:
    assert opened(name="digits", folds=1437).test_size == 1
    with pytest.raises(TrainingRefused) as refusal:
        opened(name="digits", folds=1438)
    assert str(refusal.value) == "data.folds is 1438 for 1437 training images: give less"


def batch(source: datasets.Source, position: int, count: int) -> tuple[Tensor, Tensor]:
    return next(source.train_batches(iter([stream(1, source.train_size, position, count)])))


@pytest.mark.parametrize("name", ["digits", "synthetic"])
def test_a_samples_augmentation_does_not_depend_on_its_batch(name: str) -> None:
    source = opened(name=name, image_size=16, samples=200, classes=5)
    images, labels = batch(source, 190, 12)
    assert images.shape == (12, source.channels, 16, 16)
    for number in range(12):
        image, label = batch(source, 190 + number, 1)
        assert torch.equal(image[0], images[number])
        assert label[0] == labels[number]


def test_augmentation_differs_between_epochs_and_seeds_and_can_be_turned_off() -> None:
    images, _ = read_digits()
    three = images[:3]
    index = torch.arange(3)
    look = DigitsLook(32, 1, 1.0)
    first = look.augmented(three, torch.zeros(3, dtype=torch.int64), index)
    assert torch.equal(first, look.augmented(three, torch.zeros(3, dtype=torch.int64), index))
    assert not torch.equal(first, look.augmented(three, torch.ones(3, dtype=torch.int64), index))
    assert not torch.equal(
        first, DigitsLook(32, 2, 1.0).augmented(three, torch.zeros(3, dtype=torch.int64), index)
    )
    assert torch.equal(
        DigitsLook(32, 1, 0.0).augmented(three, torch.zeros(3, dtype=torch.int64), index), look.plain(three)
    )
    source = opened(name="digits", image_size=32, augment=False)
    epochs, indices = stream(1, 1437, 0, 3)
    plain, _ = next(source.train_batches(iter([(epochs, indices)])))
    assert torch.equal(plain, look.plain(images[indices]))


def test_a_digit_is_varied_as_much_to_either_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws in their middle leave it as it is, and those at both ends turn, shift and shear it as far."""
    asked: list[torch.Tensor] = []
    monkeypatch.setattr(torch.nn.functional, "affine_grid", lambda matrix, *_, **__: asked.append(matrix))
    monkeypatch.setattr(torch.nn.functional, "grid_sample", lambda pixels, *_, **__: pixels)
    images, index = read_digits()[0][:1], torch.zeros(1, dtype=torch.int64)
    for draw in (0.0, 0.5, 1.0):
        monkeypatch.setattr(rng, "uniform", lambda *_, draw=draw: torch.full((1, 6), draw))
        DigitsLook(8, 1, 1.0).augmented(images, index, index)
    least, middle, most = (matrix[0] for matrix in asked)
    assert torch.equal(middle, torch.eye(2, 3))
    cos, sin = math.cos(math.radians(12)), math.sin(math.radians(12))
    for found, wide, side in ((least, 0.9, -1.0), (most, 1.1, 1.0)):
        expected = [
            [wide * cos, side * (0.1 - wide * sin), side * 0.2],
            [side * wide * sin, wide * cos, side * 0.2],
        ]
        assert torch.allclose(found, torch.tensor(expected))


def test_a_digit_that_is_not_enlarged_keeps_its_pixels() -> None:
    images, _ = read_digits()
    plain = DigitsLook(8, 1, 1.0).plain(images[:5])
    assert torch.allclose(plain * 0.37 + 0.3, images[:5] / 16, atol=1e-5)


def test_photos_are_shifted_by_an_eighth_at_most_and_mirrored_half_of_the_time() -> None:
    height = 16
    ramp = torch.arange(1, height + 1, dtype=torch.uint8)
    images = ramp.expand(400, 3, height, height).contiguous()
    look = PhotoLook(height, 1, (0.0, 0.0, 0.0), (1 / 255,) * 3)
    varied = look.augmented(images, torch.zeros(400, dtype=torch.int64), torch.arange(400)).round().long()
    possible = {}
    padded = torch.nn.functional.pad(ramp.long(), (2, 2))
    for shift in range(5):
        part = padded[shift : shift + height]
        possible[tuple(part.tolist())] = (shift, False)
        possible[tuple(part.flip(0).tolist())] = (shift, True)
    seen = [possible[tuple(image[0, height // 2].tolist())] for image in varied]
    assert {shift for shift, _ in seen} == set(range(5))
    assert 150 < sum(mirrored for _, mirrored in seen) < 250


def cifar_table(start: int) -> np.ndarray:
    table = (np.arange(10_000 * 3073, dtype=np.int64) * 7 + start).astype(np.uint8).reshape(10_000, 3073)
    table[:, 0] = (np.arange(10_000) + start) % 10
    return table


CIFAR_NAMES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]


@pytest.fixture(scope="module")
def cifar_binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cifar") / "cifar-10-batches-bin"
    folder.mkdir()
    for number, name in enumerate(CIFAR_NAMES):
        cifar_table(number).tofile(folder / f"{name}.bin")
    return folder


def python2_pickle(table: np.ndarray) -> bytes:
    """The opcodes of the published files: Python 2's protocol 2, with byte strings and an ndarray."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    def array(values: np.ndarray) -> bytes:
        data = values.tobytes()
        dtype = (
            b"cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R" + b"(K\x03" + text(b"|")
            + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        )  # fmt: skip
        shape = b"M" + values.shape[0].to_bytes(2, "little") + b"M" + values.shape[1].to_bytes(2, "little")
        return (
            b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R"
            + b"(K\x01" + shape + b"\x86" + dtype + b"\x89T" + len(data).to_bytes(4, "little") + data + b"tb"
        )  # fmt: skip

    labels = b"](" + b"".join(b"K" + bytes([label]) for label in table[:, 0]) + b"e"
    return b"\x80\x02}(" + text(b"data") + array(table[:, 1:]) + text(b"labels") + labels + b"u."


def test_both_versions_of_cifar10_read_the_same(cifar_binary: Path, tmp_path: Path) -> None:
    images, labels = read_cifar10(cifar_binary.parent)
    assert images.shape == (60_000, 3, 32, 32)
    assert labels[50_000:50_003].tolist() == [5, 6, 7]
    assert images[10_001].flatten().tolist() == cifar_table(1)[1, 1:].tolist()
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for number, name in enumerate(CIFAR_NAMES):
        (folder / name).write_bytes(python2_pickle(cifar_table(number)))
    images_py, labels_py = read_cifar10(folder)
    assert torch.equal(images, images_py)
    assert torch.equal(labels, labels_py)


def test_a_cifar10_file_that_wants_to_run_something_is_refused(tmp_path: Path) -> None:
    class Planted:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "ran"),)

    for name in CIFAR_NAMES:
        (tmp_path / name).write_bytes(pickle.dumps({"labels": Planted()}, protocol=2))
    with pytest.raises(TrainingRefused) as refusal:
        read_cifar10(tmp_path)
    assert str(refusal.value) == (
        f"{tmp_path}/data_batch_1: not a CIFAR-10 batch: refused to load posix.mkdir: "
        "download and unpack it again"
    )
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "name", ["os.system", "builtins.eval", "numpy.load", "numpy.core.multiarray.fromfile"]
)
def test_only_arrays_can_be_unpickled(name: str) -> None:
    module, _, function = name.rpartition(".")
    content = f"c{module}\n{function}\n(S'x'\ntR.".encode()
    with pytest.raises(pickle.UnpicklingError, match=f"refused to load {name}"):
        ArrayUnpickler(io.BytesIO(content)).load()


def test_cifar10_that_is_missing_or_short_is_refused_with_its_path(
    tmp_path: Path,
) -> None:
    with pytest.raises(TrainingRefused) as refusal:
        opened(name="cifar10", path=str(tmp_path))
    assert str(refusal.value) == (
        f"data.path={tmp_path}: no CIFAR-10 there: expected cifar-10-batches-bin/data_batch_1.bin to _5.bin "
        "and test_batch.bin (binary version), or cifar-10-batches-py/ (Python version)"
    )
    cifar_table(0)[:9].tofile(tmp_path / "data_batch_1.bin")
    with pytest.raises(TrainingRefused) as refusal:
        opened(name="cifar10", path=str(tmp_path))
    assert str(refusal.value) == (
        f"{tmp_path}/data_batch_1.bin: 9 images: expected 10000: download and unpack it again"
    )


@pytest.mark.parametrize(
    ("name", "where", "function", "file"),
    [
        ("imagefolder", Path, "is_dir", "train"),
        ("imagefolder", Path, "iterdir", "train"),
        ("cifar10", Path, "is_file", "cifar-10-batches-bin/data_batch_1.bin"),
        ("cifar10", np, "fromfile", "data_batch_1.bin"),
    ],
)
def test_data_that_this_user_may_not_read_are_refused_with_the_path(
    pictures: Path, monkeypatch: pytest.MonkeyPatch, name: str, where: Any, function: str, file: str
) -> None:
    def deny(path: Path, **_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    (pictures / "data_batch_1.bin").touch()
    monkeypatch.setattr(where, function, deny)
    with pytest.raises(TrainingRefused) as refusal:
        opened(name=name, path=str(pictures))
    monkeypatch.undo()
    assert (refusal.value.id, str(refusal.value)) == (
        "data-no-permission",
        f"data.path={pictures}: {pictures}/{file}: Permission denied: ask its owner for access, or give "
        "another folder",
    )


def test_cifar10_is_normalised_and_enlarged(cifar_binary: Path) -> None:
    source = opened(name="cifar10", path=str(cifar_binary), image_size=40, folds=100, fold=3)
    assert (source.train_size, source.test_size, source.split) == (49_500, 500, "fold")
    images, _ = batch(source, 0, 4)
    assert images.shape == (4, 3, 40, 40)
    raw, _ = read_cifar10(cifar_binary)
    plain = PhotoLook(32, 1, CIFAR_MEAN, CIFAR_STD).plain(raw[:1])
    expected = (raw[0, 2, 5, 6] / 255 - 0.4465) / 0.2616
    assert torch.allclose(plain[0, 2, 5, 6], expected)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    for split, count in (("train", 4), ("val", 2)):
        for number, name in enumerate(["ant", "bee"]):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for image in range(count):
                colour = (40 * image, 100 * number, 7)
                Image.new("RGB" if image else "L", (30, 20), colour if image else 9).save(
                    folder / f"{image}.png"
                )
            (folder / "notes.txt").touch()
    return tmp_path


@pytest.mark.parametrize("workers", [0, 2])
def test_a_folder_of_images_gives_the_keyed_samples_in_order(pictures: Path, workers: int) -> None:
    source = opened(name="imagefolder", path=str(pictures), image_size=8, workers=workers)
    assert (source.classes, source.train_size, source.test_size) == (2, 8, 4)
    keys = [stream(1, 8, 2 * step, 2) for step in range(6)]
    batches = list(source.train_batches(iter(keys)))
    assert [labels.tolist() for _, labels in batches] == [(indices // 4).tolist() for _, indices in keys]
    again = opened(name="imagefolder", path=str(pictures), image_size=8, workers=0)
    for (images, _), key in zip(batches, keys, strict=True):
        assert images.shape == (2, 3, 8, 8)
        assert torch.equal(images, next(again.train_batches(iter([key])))[0])
    tests = list(source.plain_batches([range(3), range(3, 4)], "test"))
    assert [labels.tolist() for _, labels in tests] == [[0, 0, 1], [1]]


@pytest.fixture
def ending_workers() -> Iterator[None]:
    """A DataLoader does not tell its workers to end after an error of one, and ours ignore SIGTERM: a rank's end
    is theirs. torch's handler of SIGCHLD would raise an error for a worker that was killed, if it runs before the
    worker has been waited for."""
    yield
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        for worker in multiprocessing.active_children():
            worker.kill()
            worker.join()
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.usefixtures("ending_workers")
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("damage", ["cut", "no image", "broken chunk", "huge"])
def test_a_damaged_image_is_refused_with_its_name(pictures: Path, workers: int, damage: str) -> None:
    odd = pictures / "train" / "bee" / "2.png"
    whole = odd.read_bytes()
    head = b"IHDR" + (1 << 16).to_bytes(4) * 2 + whole[24:29]
    damages = {
        "cut": whole[:60],
        "no image": b"x",
        "broken chunk": whole[:8] + bytes(4) + whole[12:],
        "huge": whole[:12] + head + zlib.crc32(head).to_bytes(4) + whole[33:],
    }
    odd.write_bytes(damages[damage])
    source = opened(name="imagefolder", path=str(pictures), image_size=8, workers=workers)
    with pytest.raises(TrainingRefused) as refusal:
        list(source.plain_batches([range(8)], "train"))
    assert (refusal.value.id, refusal.value.rank) == ("image-damaged", None)
    assert str(refusal.value).startswith(f"{odd}: no whole image: ")
    assert str(refusal.value).endswith(": copy it again, or take it out and give another run directory")
    assert "Traceback" not in str(refusal.value)


@pytest.mark.usefixtures("ending_workers")
@pytest.mark.parametrize("workers", [0, 1])
def test_an_image_that_the_file_system_does_not_give_is_an_error_with_its_name(
    pictures: Path, workers: int
) -> None:
    source = opened(name="imagefolder", path=str(pictures), image_size=8, workers=workers)
    (pictures / "train" / "bee" / "2.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"train/bee/2.png"):
        list(source.plain_batches([range(8)], "train"))


def test_a_folder_has_the_fingerprint_of_its_copies_and_no_other(pictures: Path, tmp_path: Path) -> None:
    def fingerprint(folder: Path) -> object:
        # As it comes back from a checkpoint.
        return json.loads(json.dumps(opened(name="imagefolder", path=str(folder)).fingerprint))

    train = pictures / "train"
    (train / "ant" / os.fsdecode(b"\xff.png")).touch()  # never read, and no UTF-8
    before = fingerprint(pictures)
    copy = shutil.copytree(pictures, tmp_path / "copy")
    (copy / "val" / "ant" / "more.png").touch()
    (copy / "train" / "ant" / "notes.txt").unlink()
    assert fingerprint(copy) == before
    (copy / "train" / "ant" / "3.png").rename(copy / "train" / "ant" / "4.png")
    assert fingerprint(copy) != before
    (train / "ant" / "3.png").rename(train / "bee" / "4.png")
    assert fingerprint(pictures) not in (before, fingerprint(copy))


def test_ranks_must_have_the_same_images_to_evaluate_on_too(pictures: Path, tmp_path: Path) -> None:
    def found(folder: Path) -> Any:
        return json.loads(json.dumps(opened(name="imagefolder", path=str(folder)).all_images))

    copy = shutil.copytree(pictures, tmp_path / "copy")
    assert datasets.difference(found(pictures), found(copy)) == ""
    (copy / "val" / "ant" / "1.png").rename(copy / "val" / "ant" / "5.png")
    assert datasets.difference(found(pictures), found(copy)) == "files with other names"
    (copy / "val" / "ant" / "6.png").touch()
    assert datasets.difference(found(pictures), found(copy)) == "number for the evaluation: 4 -> 5"
    (copy / "train" / "ant" / "3.png").unlink()
    assert datasets.difference(found(pictures), found(copy)) == (
        "number: 8 -> 7; number for the evaluation: 4 -> 5"
    )
    digits = opened(name="digits", folds=10).all_images
    assert digits == {"train_size": 1294, "classes": 10, "test_size": 143}


@pytest.mark.parametrize(("device", "pinned"), [("cpu", False), ("cuda", True)])
def test_pictures_for_a_gpu_alone_are_loaded_into_memory_that_it_reads_itself(
    pictures: Path, device: str, pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, object]] = []

    def loader(*_: object, **options: object) -> list[object]:
        asked.append(options)
        return []

    monkeypatch.setattr(torch.utils.data, "DataLoader", loader)
    data = Data(name="imagefolder", path=str(pictures), image_size=8, workers=0)
    source = open_source(data, seed=1, device=torch.device(device))
    assert list(source.plain_batches([range(2)], "test")) == []
    assert [options["pin_memory"] for options in asked] == [pinned]


def test_a_folder_without_classes_or_images_is_refused_with_its_path(pictures: Path) -> None:
    (pictures / "val" / "bee" / "0.png").unlink()
    (pictures / "val" / "bee" / "1.png").unlink()
    with pytest.raises(TrainingRefused) as refusal:
        opened(name="imagefolder", path=str(pictures))
    assert (
        str(refusal.value) == f"{pictures}/val/bee: no images: expected *.bmp, *.jpeg, *.jpg, *.png, *.webp"
    )
    with pytest.raises(TrainingRefused) as refusal:
        opened(name="imagefolder", path=str(pictures / "nowhere"))
    assert str(refusal.value) == (
        f"{pictures}/nowhere/train: no such folder: "
        "expected one folder per class with images in it (data.path)"
    )
    (pictures / "none" / "train").mkdir(parents=True)
    with pytest.raises(TrainingRefused) as refusal:
        opened(name="imagefolder", path=str(pictures / "none"))
    assert str(refusal.value) == (
        f"{pictures}/none/train: no folders: expected one folder per class with images in it (data.path)"
    )
    (pictures / "train" / "cat").mkdir()
    Image.new("RGB", (4, 4)).save(pictures / "train" / "cat" / "0.png")
    Image.new("RGB", (4, 4)).save(pictures / "val" / "bee" / "0.png")
    with pytest.raises(TrainingRefused) as refusal:
        opened(name="imagefolder", path=str(pictures))
    assert (
        str(refusal.value) == f"{pictures}: class cat is in one of train/ and val/ only: give both the same"
    )


def test_boxes_lie_within_the_image() -> None:
    assert centre_box(320, 256) == (48.0, 16.0, 272.0, 240.0)
    assert random_box(300, 200, [1.0, 0.5, 0.0, 0.0]) == pytest.approx((0, 0, 60_000**0.5, 200))
    for draws in ([0.0, 0.0, 0.99, 0.99], [0.99, 0.99, 0.99, 0.5], [0.5, 0.1, 0.0, 0.99]):
        left, top, right, bottom = random_box(300, 200, draws)
        assert 0 <= left < right <= 300
        assert 0 <= top < bottom <= 200
