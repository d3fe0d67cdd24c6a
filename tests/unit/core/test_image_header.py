"""What the first bytes of an image tell."""

from pathlib import Path

import pytest

from entrypoint.core import image_header
from entrypoint.core.errors import BadInput
from tests.unit.cli.site import SIF


@pytest.mark.parametrize(
    ("head", "processor"),
    [
        (SIF, "x86_64"),
        (SIF[:45] + b"04\0", "aarch64"),
        (SIF[:45] + b"06\0", "ppc64le"),
        (SIF[:45] + b"99\0", ""),
        (SIF + b"\0" * 99, "x86_64"),
        (b"hsqs", ""),
    ],
)
def test_a_sif_names_its_processor_and_a_squashfs_does_not(
    tmp_path: Path, head: bytes, processor: str
) -> None:
    (tmp_path / "image").write_bytes(head)
    assert image_header.check(tmp_path / "image") == processor


def test_a_folder_is_an_image_if_one_was_unpacked_there(tmp_path: Path) -> None:
    with pytest.raises(BadInput) as refused:
        image_header.check(tmp_path)
    assert str(refused.value) == (
        f"{tmp_path} is a directory, but no unpacked image (it has no .singularity.d): give a SIF file"
    )
    (tmp_path / ".singularity.d").mkdir()
    assert image_header.check(tmp_path) == ""


@pytest.mark.parametrize("head", [b"", SIF[:41], b"\0" + SIF, SIF[1:], b"hsq", b" hsqs"])
def test_what_does_not_begin_as_an_image_is_refused_with_its_size(tmp_path: Path, head: bytes) -> None:
    (tmp_path / "image").write_bytes(head)
    with pytest.raises(BadInput, match=rf" \({len(head)} bytes\) does not begin as one: "):
        image_header.check(tmp_path / "image")


def test_an_image_that_cannot_be_read_is_refused_with_the_reason(tmp_path: Path) -> None:
    for path, why in (
        (tmp_path / "none", "No such file or directory"),
        (Path("/dev/null"), "it is a character device, not a regular file"),
    ):
        with pytest.raises(BadInput) as refused:
            image_header.check(path)
        assert str(refused.value) == f"the image {path} cannot be read: {why}"


def test_the_id_of_a_sif_is_the_uuid_in_its_first_64_bytes() -> None:
    head = SIF + bytes(range(16))
    assert image_header.sif_id(head) == "00010203-0405-0607-0809-0a0b0c0d0e0f"
    assert image_header.sif_id(head + b"x") == "00010203-0405-0607-0809-0a0b0c0d0e0f"
    assert [image_header.sif_id(other) for other in (head[:63], b"\0" * 64, head[1:] + b"x", b"")] == [""] * 4
