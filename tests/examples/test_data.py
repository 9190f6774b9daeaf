"""Data of the examples: idx files, canvases and proposals."""

import argparse
import gzip
import pathlib
import struct
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

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
    options = argparse.Namespace(dataset="mnist", data_dir=tmp_path)
    images = data.load(options)
    np.testing.assert_array_equal(images.train.x[..., 0], pixels)
    np.testing.assert_array_equal(images.train.y, np.arange(30) % 3)
    np.testing.assert_array_equal(images.test.x[..., 0], pixels[:12])
    assert images.num_classes == 3 and images.image_shape == (6, 5, 1)
    (batch, _) = next(iter(images.test_batches(5)))
    np.testing.assert_allclose(batch[..., 0], pixels[:5] / 255, rtol=1e-6)


def test_a_data_set_that_does_not_exist(tmp_path: pathlib.Path) -> None:
    options = argparse.Namespace(dataset="cifra10", data_dir=tmp_path)
    with pytest.raises(SystemExit, match="cifra10"):
        data.load(options)


def test_moved_digits_are_digits() -> None:
    """Each frame has 400 pixels of an enlarged digit, zeros around it."""
    images = data.moved_digits(40, 20)
    assert images.train.x.shape == (40, 28, 28, 1)
    for frame in images.train.x[..., 0]:
        rows, columns = np.nonzero(frame)
        assert np.ptp(rows) < 20 and np.ptp(columns) < 20


@pytest.fixture(scope="module")
def composed() -> canvases.Canvases:
    return canvases.compose(data.digits().train, 20, seed=5)


def test_labels_and_boxes_of_canvases(composed: canvases.Canvases) -> None:
    """Ink of each class lies in that digit's box, and nowhere else."""
    edges = np.round(composed.boxes * canvases.SIDE).astype(int)
    for canvas in range(20):
        seen = np.zeros((48, 48), bool)
        for (top, left, bottom, right), digit in zip(
            edges[canvas], composed.classes[canvas], strict=True
        ):
            inside = composed.labels[canvas, top:bottom, left:right]
            assert set(np.unique(inside)) == {0, digit + 1}
            assert not seen[top:bottom, left:right].any()  # apart
            seen[top:bottom, left:right] = True
        assert not composed.labels[canvas][~seen].any()
        bright = composed.images[canvas, ..., 0] > canvases.INK
        np.testing.assert_array_equal(bright, composed.labels[canvas] > 0)


def test_targets_of_proposals(composed: canvases.Canvases) -> None:
    """Moving a proposal by its target gives the box."""
    split = canvases.propose(composed, seed=1)
    old = split.x["proposals"].astype(float)
    moves = split.y["boxes"]
    for axis in range(2):
        side = old[..., axis + 2] - old[..., axis]
        centre = old[..., axis] + side / 2 + moves[..., axis] * side
        half = side * np.exp(moves[..., axis + 2]) / 2
        box = np.stack([centre - half, centre + half], -1)
        wanted = composed.boxes[..., [axis, axis + 2]]
        np.testing.assert_allclose(box, wanted, atol=1e-5)
    assert np.abs(moves).max() > 0.1
    share = split.y["masks"].mean((2, 3, 4))
    assert ((share > 0.05) & (share < 0.8)).all()


def test_crop_has_second_derivatives() -> None:
    """`v^T H v = 2 |crop(v)|^2` for the Hessian of the squares' sum."""
    edges = np.random.default_rng(0).random((2, 3, 2, 2), np.float32)
    boxes: Any = np.sort(edges, 2).reshape(2, 3, 4)
    random = np.random.default_rng(2)
    features, v = tf.constant(random.random((2, 2, 9, 12, 3), np.float32))
    with tf.GradientTape() as outer:
        outer.watch(features)
        with tf.GradientTape() as inner:
            inner.watch(features)
            squares = tf.reduce_sum(canvases.crop(features, boxes, 7) ** 2)
        slope = tf.reduce_sum(v * inner.gradient(squares, features))
    curvature = tf.reduce_sum(v * outer.gradient(slope, features))
    wanted = 2 * tf.reduce_sum(canvases.crop(v, boxes, 7) ** 2)
    np.testing.assert_allclose(curvature, wanted, rtol=1e-4)
