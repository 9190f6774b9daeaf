"""Data of the studies: idx files and canvases."""

import gzip
import pathlib
import struct

import numpy as np

from common import canvases, data


def write_idx(path: pathlib.Path, array: np.ndarray) -> None:
    header = struct.pack(">BBBB", 0, 0, 0x08, array.ndim)
    header += struct.pack(f">{array.ndim}I", *array.shape)
    content = header + array.astype(np.uint8).tobytes()
    packed = gzip.compress(content) if path.suffix == ".gz" else content
    path.write_bytes(packed)


def test_idx_files(tmp_path: pathlib.Path) -> None:
    """Plain and compressed files; labels and pixels as written."""
    pixels = np.random.default_rng(0).integers(0, 256, (30, 6, 5))
    for prefix, size, suffix in [("train", 30, ".gz"), ("t10k", 12, "")]:
        names = [f"{prefix}-{name}-ubyte{suffix}" for name in
                 ("images-idx3", "labels-idx1")]  # fmt: skip
        write_idx(tmp_path / names[0], pixels[:size])
        write_idx(tmp_path / names[1], np.arange(size) % 3)
    images = data.idx_images(tmp_path)
    np.testing.assert_array_equal(images.train.x[..., 0], pixels)
    np.testing.assert_array_equal(images.train.y, np.arange(30) % 3)
    np.testing.assert_array_equal(images.test.x[..., 0], pixels[:12])


def test_canvases() -> None:
    """Two digits on each canvas; the classes are those of the bright pixels."""
    split = canvases.compose(data.digits().train, 20, seed=5)
    bright = split.x[..., 0] > canvases.INK
    np.testing.assert_array_equal(bright, split.y > 0)
    assert all(len(np.unique(labels)) in (2, 3) for labels in split.y)
