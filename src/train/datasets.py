"""Reads the data sets, and turns samples into a model's input. `open_source` is the entry.

Images that fit in memory stay on the device as bytes, and a batch is a few vectorised operations. DataLoader
workers read a folder of images. Augmentation is a pure function of (seed, epoch, sample index).
"""

import gzip
import hashlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from train import rng
from train.cifar10 import read_cifar10
from train.config import Data
from train.sampler import Keys
from train.status import TrainingRefused
from train.stop import ignore_in_loader_worker

DIGITS: Final = Path(__file__).parent / "data" / "digits.csv.gz"
DIGITS_TRAIN: Final = 1437

Batch = tuple[Tensor, Tensor]
"""Images float32 [n, channels, size, size] and labels int64 [n], on the device."""


class Source(Protocol):
    """What the loop and the evaluation see of a data set."""

    @property
    def classes(self) -> int: ...
    @property
    def channels(self) -> int: ...
    @property
    def image_size(self) -> int: ...
    @property
    def train_size(self) -> int: ...
    @property
    def test_size(self) -> int: ...
    @property
    def split(self) -> str:
        """What the evaluation runs on: `test`, or `fold` where a block of training images is set aside."""

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        """What sample numbers and labels stand for in training, as JSON; the same for a copy elsewhere. A run
        is not resumed with another. Made without reading a file."""

    @property
    def all_images(self) -> Mapping[str, Any]:
        """The fingerprint, and the same of the evaluation split: one for all ranks of a job."""

    @property
    def key_device(self) -> str:
        """Where the keys given to `train_batches` should lie."""

    def train_batches(self, keys: Iterator[Keys]) -> Iterator[Batch]:
        """The augmented batches of these keys, in order."""

    def plain_batches(self, batches: Iterable[range], of: Literal["test", "train"]) -> Iterator[Batch]:
        """The unvaried images of these indices of the evaluation split, or of the training images."""


def open_source(data: Data, *, seed: int, device: torch.device) -> Source:
    """Read or make the data set. Raises TrainingRefused naming the path and what is expected there, and other
    errors of the file system as they are: another attempt may help."""
    try:
        return _opened(data, seed, device)
    except PermissionError as error:
        raise TrainingRefused(
            "data-no-permission",
            f"data.path={data.path}: {error.filename}: {error.strerror}: ask its owner for access, or give "
            "another folder",
        ) from None


def _opened(data: Data, seed: int, device: torch.device) -> Source:
    if data.name == "imagefolder":
        return ImageFolder(data, seed=seed, device=device)
    if data.name == "synthetic":
        return _synthetic(data, seed=seed, device=device)
    if data.name == "digits":
        images, labels = read_digits()
        train, test = DIGITS_TRAIN, len(labels) - DIGITS_TRAIN
        look: Preprocessing = DigitsLook(data.image_size or images.shape[-1], seed, data.strength)
    else:
        images, labels = read_cifar10(Path(data.path))
        train, test = 50_000, 10_000
        look = PhotoLook(data.image_size or images.shape[-1], seed, CIFAR_MEAN, CIFAR_STD)
    split = "test"
    if data.folds:
        if data.folds > train:
            raise TrainingRefused(
                "config-folds-many", f"data.folds is {data.folds} for {train} training images: give less"
            )
        begin, end = (train * number // data.folds for number in (data.fold, data.fold + 1))
        order = torch.cat([torch.arange(begin), torch.arange(end, train), torch.arange(begin, end)])
        images, labels = images[order], labels[order]
        train, test, split = train - (end - begin), end - begin, "fold"
    return InMemory(
        images=images.to(device),
        labels=labels.to(device),
        train_size=train,
        test_size=test,
        classes=10,
        split=split,
        look=look,
        augment=data.augment,
    )


class Preprocessing(Protocol):
    """How stored images become a model's input."""

    @property
    def size(self) -> int:
        """Height and width that come out."""

    def plain(self, images: Tensor) -> Tensor:
        """uint8 [n, c, h, w] to float32 [n, c, size, size]."""

    def augmented(self, images: Tensor, epochs: Tensor, indices: Tensor) -> Tensor:
        """The same, varied by seed, epoch and sample index."""


@dataclass(frozen=True, kw_only=True)
class InMemory:
    """Training images, then evaluation images, as bytes on the device."""

    images: Tensor
    """uint8 [train_size + test_size, channels, height, width]; fewer stand for more where they repeat."""
    labels: Tensor
    train_size: int
    test_size: int
    classes: int
    split: str
    look: Preprocessing
    augment: bool

    @property
    def channels(self) -> int:
        return int(self.images.shape[1])

    @property
    def image_size(self) -> int:
        return self.look.size

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        return {"train_size": self.train_size, "classes": self.classes}

    @property
    def all_images(self) -> Mapping[str, Any]:
        return {**self.fingerprint, "test_size": self.test_size}

    @property
    def key_device(self) -> str:
        return str(self.images.device)

    def train_batches(self, keys: Iterator[Keys]) -> Iterator[Batch]:
        for epochs, indices in keys:
            at = indices % len(self.images)
            images = self.images[at]
            yield (
                self.look.augmented(images, epochs, indices) if self.augment else self.look.plain(images),
                self.labels[at],
            )

    def plain_batches(self, batches: Iterable[range], of: Literal["test", "train"]) -> Iterator[Batch]:
        first = self.train_size if of == "test" else 0
        for batch in batches:
            at = torch.arange(first + batch.start, first + batch.stop, device=self.images.device)
            at = at % len(self.images)
            yield self.look.plain(self.images[at]), self.labels[at]


def read_digits(path: Path = DIGITS) -> tuple[Tensor, Tensor]:
    """Images uint8 [1797, 1, 8, 8] with values 0 to 16, and labels int64 [1797], in file order."""
    with gzip.open(path, "rt", encoding="ascii") as file:
        table = np.array([line.split(",") for line in file], dtype=np.uint8)
    images = torch.from_numpy(table[:, :64].reshape(-1, 1, 8, 8).copy())
    return images, torch.from_numpy(table[:, 64].astype(np.int64))


@dataclass(frozen=True)
class DigitsLook:
    """Digits drawn at the model's size by bilinear sampling, shifted, turned, scaled and sheared a little."""

    size: int
    seed: int
    strength: float

    def plain(self, images: Tensor) -> Tensor:
        matrix = torch.eye(2, 3, device=images.device)
        return self._drawn(images, matrix.expand(len(images), 2, 3))

    def augmented(self, images: Tensor, epochs: Tensor, indices: Tensor) -> Tensor:
        draws = torch.arange(6, device=images.device)
        random = rng.uniform(self.seed, rng.AUGMENT, epochs[:, None], indices[:, None], draws)
        wide, high, angle, shear, right, down = (self.strength * (2 * random - 1)).unbind(1)
        # At strength 1 up to 12 degrees, a tenth in width, height and shear, a tenth of the width in place.
        wide, high, angle, shear = 1 + 0.1 * wide, 1 + 0.1 * high, math.radians(12) * angle, 0.1 * shear
        cos, sin = torch.cos(angle), torch.sin(angle)
        rows = [
            torch.stack([wide * cos, shear - wide * sin, 0.2 * right], 1),
            torch.stack([high * sin, high * cos, 0.2 * down], 1),
        ]
        return self._drawn(images, torch.stack(rows, 1))

    def _drawn(self, images: Tensor, matrix: Tensor) -> Tensor:
        shape = [len(images), 1, self.size, self.size]
        grid = functional.affine_grid(matrix, shape, align_corners=False)
        pixels = images.to(torch.float32) / 16
        drawn: Tensor = functional.grid_sample(pixels, grid, align_corners=False)
        return (drawn - 0.3) / 0.37


CIFAR_MEAN: Final = (0.4914, 0.4822, 0.4465)
CIFAR_STD: Final = (0.2470, 0.2435, 0.2616)
IMAGENET_MEAN: Final = (0.485, 0.456, 0.406)
IMAGENET_STD: Final = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class PhotoLook:
    """Colour images, normalised; varied by a shift of an eighth of the width at most and a mirror image."""

    size: int
    seed: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def plain(self, images: Tensor) -> Tensor:
        if images.shape[-1] != self.size:
            images = functional.interpolate(
                images.to(torch.float32), (self.size, self.size), mode="bilinear", align_corners=False
            )
        return normalised(images, self.mean, self.std)

    def augmented(self, images: Tensor, epochs: Tensor, indices: Tensor) -> Tensor:
        height, width = images.shape[-2:]
        draws = torch.arange(3, device=images.device)
        random = rng.uniform(self.seed, rng.AUGMENT, epochs[:, None], indices[:, None], draws)
        margin = height // 8
        shift = (random[:, :2] * (2 * margin + 1)).to(torch.int64)
        rows = torch.arange(height, device=images.device) + shift[:, :1]
        columns = torch.arange(width, device=images.device) + shift[:, 1:]
        columns = torch.where(random[:, 2:] < 0.5, columns.flip(1), columns)
        padded = functional.pad(images, (margin, margin, margin, margin))
        sample = torch.arange(len(images), device=images.device)[:, None, None]
        cropped = padded.permute(0, 2, 3, 1)[sample, rows[:, :, None], columns[:, None, :]]
        return self.plain(cropped.permute(0, 3, 1, 2).contiguous())


def normalised(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Bytes 0 to 255 to float32 of this mean and spread per channel."""
    shift, scale = (_per_channel(values, images.device) for values in (mean, std))
    return (images.to(torch.float32) - shift) / scale


@lru_cache(maxsize=4)
def _per_channel(values: tuple[float, ...], device: torch.device) -> Tensor:
    return 255 * torch.tensor(values, device=device).reshape(1, -1, 1, 1)


def _synthetic(data: Data, *, seed: int, device: torch.device) -> InMemory:
    """Noise made on the device: 64 images that stand for all of them in turn."""
    size = data.image_size or 224
    generator = torch.Generator(device).manual_seed(rng.seed_for(seed, rng.PIXELS))
    images = torch.randint(0, 256, (64, 3, size, size), dtype=torch.uint8, device=device, generator=generator)
    labels = torch.randint(0, data.classes, (64,), device=device, generator=generator)
    return InMemory(
        images=images,
        labels=labels,
        train_size=data.samples,
        test_size=min(data.samples, 1024),
        classes=data.classes,
        split="test",
        look=PhotoLook(size, seed, IMAGENET_MEAN, IMAGENET_STD),
        augment=data.augment,
    )


SUFFIXES: Final = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp"})


class ImageFolder:
    """`train/CLASS/*.jpg` and `val/CLASS/*.jpg`: classes and files in the order of their names."""

    channels = 3
    split = "test"
    key_device = "cpu"

    def __init__(self, data: Data, *, seed: int, device: torch.device) -> None:
        root = Path(data.path)
        self._train, names = list_images(root / "train")
        self._test, test_names = list_images(root / "val")
        if names != test_names:
            odd = sorted(set(names) ^ set(test_names))[0]
            raise TrainingRefused(
                "images-class-differs",
                f"{root}: class {odd} is in one of train/ and val/ only: give both the same",
            )
        self.classes, self._names = len(names), names
        self._root = root
        self.train_size, self.test_size = len(self._train), len(self._test)
        self.image_size = data.image_size or 224
        self._data, self._seed, self._device = data, seed, device

    @cached_property
    def fingerprint(self) -> Mapping[str, Any]:
        return {
            "train_size": self.train_size,
            "classes": self.classes,
            "class_names": self._names,
            "files_sha256": names_sha256(self._train, self._root / "train"),
        }

    @property
    def all_images(self) -> Mapping[str, Any]:
        files = names_sha256(self._test, self._root / "val")
        return {**self.fingerprint, "test_size": self.test_size, "test_files_sha256": files}

    def train_batches(self, keys: Iterator[Keys]) -> Iterator[Batch]:
        lists = ([*zip(*(part.tolist() for part in key), strict=True)] for key in keys)
        seed = self._seed if self._data.augment else None
        return self._batches(PicturesAt(self._train, self.image_size, seed), lists)

    def plain_batches(self, batches: Iterable[range], of: Literal["test", "train"]) -> Iterator[Batch]:
        lists = ([(0, index) for index in batch] for batch in batches)
        files = self._test if of == "test" else self._train
        return self._batches(PicturesAt(files, self.image_size, None), lists)

    def _batches(self, pictures: "PicturesAt", lists: Iterator[list[tuple[int, int]]]) -> Iterator[Batch]:
        loader = torch.utils.data.DataLoader(
            pictures,
            batch_sampler=lists,
            num_workers=self._data.workers,
            worker_init_fn=ignore_in_loader_worker,
            pin_memory=self._device.type == "cuda",
        )
        try:
            for images, labels in loader:
                moved = images.to(self._device, non_blocking=True)
                pixels = normalised(moved, IMAGENET_MEAN, IMAGENET_STD)
                yield pixels, labels.to(self._device, non_blocking=True)
        except DamagedPicture as error:
            raise TrainingRefused(
                "image-damaged",
                f"{error}: copy it again, or take it out and give another run directory",
                rank=None,
            ) from None


def list_images(folder: Path) -> tuple[list[tuple[str, int]], list[str]]:
    """Paths with class numbers, and class names. Raises TrainingRefused where there are none."""
    expected = "expected one folder per class with images in it (data.path)"
    if not folder.is_dir():
        raise TrainingRefused("images-no-folder", f"{folder}: no such folder: {expected}")
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    images = []
    for number, name in enumerate(names):
        files = sorted(file for file in (folder / name).iterdir() if file.suffix.lower() in SUFFIXES)
        if not files:
            raise TrainingRefused(
                "images-none", f"{folder / name}: no images: expected *{', *'.join(sorted(SUFFIXES))}"
            )
        images += [(str(file), number) for file in files]
    if not names:
        raise TrainingRefused("images-no-classes", f"{folder}: no folders: {expected}")
    return images, names


def names_sha256(images: list[tuple[str, int]], folder: Path) -> str:
    """Of the images' paths in the folder, in order."""
    start = len(str(folder)) + 1
    return hashlib.sha256(os.fsencode("\0".join(path[start:] for path, _ in images))).hexdigest()


SHOWN: Final = 5
"""Names of classes in a message."""


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What differs between two fingerprints, or between all images; empty for nothing. What only one of them
    knows does not count."""
    if all(before.get(key, value) == value for key, value in now.items()):
        return ""
    told = []
    for what, key in (("number", "train_size"), ("number for the evaluation", "test_size")):
        was, found = before.get(key), now.get(key)
        if None not in (was, found) and was != found:
            told.append(f"{what}: {was} -> {found}")
    names, others = (set(one.get("class_names", [])) for one in (before, now))
    for what, of in (("gone", sorted(names - others)), ("new", sorted(others - names))):
        if of:
            more = f" and {len(of) - SHOWN} more" if len(of) > SHOWN else ""
            told.append(f"classes that are {what}: {', '.join(of[:SHOWN])}{more}")
    return "; ".join(told) or "files with other names"


class DamagedPicture(Exception):
    """A file is no whole image."""

    def __init__(self, text: str) -> None:
        """`text`: the file, and what is wrong. A DataLoader makes the error of a worker again, from its
        traceback."""
        super().__init__(text.rpartition(f"{type(self).__name__}: ")[2].rstrip())


class PicturesAt(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Reads the image of an (epoch, index) key as uint8 [3, size, size]; without a seed, its centre."""

    def __init__(self, files: list[tuple[str, int]], size: int, seed: int | None) -> None:
        self._files, self._size, self._seed = files, size, seed

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int]:
        from PIL import Image

        epoch, index = key
        name, label = self._files[index]
        try:
            with Image.open(name) as file:
                image = file.convert("RGB")
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            if isinstance(error, OSError) and error.errno:  # of the file system: another attempt may help
                raise OSError(error.errno, error.strerror, name) from None
            raise DamagedPicture(f"{name}: no whole image: {error}") from None
        mirror = False
        if self._seed is None:
            box = centre_box(image.width, image.height)
        else:
            draws = rng.uniform(self._seed, rng.AUGMENT, epoch, index, torch.arange(5)).tolist()
            box = random_box(image.width, image.height, draws[:4])
            mirror = draws[4] < 0.5
        small = image.resize((self._size, self._size), Image.Resampling.BILINEAR, box=box)
        pixels = torch.from_numpy(np.asarray(small).copy()).permute(2, 0, 1)
        return pixels.flip(2) if mirror else pixels, label


Box = tuple[float, float, float, float]
"""Left, top, right, bottom in pixels."""


def centre_box(width: int, height: int) -> Box:
    """The middle square of 7/8 of the shorter side (224 of 256)."""
    side = min(width, height) * 0.875
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def random_box(width: int, height: int, draws: list[float]) -> Box:
    """8 to 100 % of the area with a ratio of 3:4 to 4:3, cut to the image; `draws`: four in [0, 1)."""
    area = width * height * (0.08 + 0.92 * draws[0])
    ratio = (4 / 3) ** (2 * draws[1] - 1)
    wide, high = min(width, math.sqrt(area * ratio)), min(height, math.sqrt(area / ratio))
    left, top = (width - wide) * draws[2], (height - high) * draws[3]
    return left, top, left + wide, top + high
