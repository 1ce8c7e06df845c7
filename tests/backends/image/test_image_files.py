"""torchpipe_py.backends.image.files: which files of a folder are images, and of what."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

from torchpipe_py.backends.image.files import IMAGE_SUFFIXES, JPEG_SUFFIXES, find_images, label_of


def test_images_of_all_depths_in_the_order_of_their_paths(tmp_path: Path) -> None:
    names = ["b.JPEG", "a.jpg", "deep/c.tiff", "deep/deeper/d.png", "notes.txt", "folder.jpg/e.bmp"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    expected = ["a.jpg", "b.JPEG", "deep/c.tiff", "deep/deeper/d.png", "folder.jpg/e.bmp"]
    assert find_images(str(tmp_path)) == [tmp_path / name for name in expected]
    assert find_images(tmp_path, JPEG_SUFFIXES) == [tmp_path / name for name in expected[:2]]


def test_what_is_no_file_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").touch()
    (tmp_path / "broken link.jpg").symlink_to("nowhere")  # whoever reads it is told
    os.mkfifo(tmp_path / "pipe.jpg")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(os.path.relpath(tmp_path / "socket.jpg"))  # an absolute path may be too long for one
        assert find_images(tmp_path) == [tmp_path / "a.jpg", tmp_path / "broken link.jpg"]


def test_a_link_to_what_may_not_be_seen_is_left_to_who_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the user were not root, who may see everything."""

    def denied(path: object, **options: object) -> os.stat_result:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    link = tmp_path / "link.jpg"
    link.symlink_to("seen by root alone.jpg")
    stat = os.stat
    monkeypatch.setattr(os, "stat", lambda path, **options: (denied if Path(path) == link else stat)(path, **options))
    assert find_images(tmp_path) == [link]


def test_labels_are_those_of_folders_and_names() -> None:
    names = ["circle_03.jpg", "red_square_02.png", "star.jpg", "ring/cross_1.jpg", "ring/deeper/7.jpg"]
    labels = [label_of(Path("images", name), Path("images")) for name in names]
    assert labels == ["circle", "red_square", "star", "ring", "ring"]


def test_folders_without_images(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"{tmp_path}: no image in it .looked for {' '.join(IMAGE_SUFFIXES)}"):
        find_images(tmp_path)
    with pytest.raises(NotADirectoryError, match=f"{tmp_path}/none: no such directory"):
        find_images(tmp_path / "none")
