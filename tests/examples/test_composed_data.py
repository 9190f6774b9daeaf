"""Canvases, regions and text: what they promise, counted anew."""

import numpy as np
import pytest
import tensorflow as tf

from common import canvases, images, regions


@pytest.fixture(scope="module")
def composed():
    return canvases.compose(images.load_digits().train, 20, seed=5)


def test_canvases_show_what_they_say(composed):
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


def test_targets_of_proposals(composed):
    """Moving a proposal by its target gives the box."""
    split = regions.propose(composed, seed=1)
    old = split.x["proposals"].astype(float)
    moves = split.y["boxes"]
    for axis in range(2):
        side = old[..., axis + 2] - old[..., axis]
        centre = old[..., axis] + side / 2 + moves[..., axis] * side
        half = side * np.exp(moves[..., axis + 2]) / 2
        found = np.stack([centre - half, centre + half], -1)
        wanted = composed.boxes[..., [axis, axis + 2]]
        np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert np.abs(moves).max() > 0.1  # there is something to learn
    share = split.y["masks"].mean((2, 3, 4))
    assert ((share > 0.05) & (share < 0.8)).all()


@pytest.fixture
def boxes():
    edges = np.random.default_rng(0).random((2, 3, 2, 2), np.float32)
    return np.sort(edges, 2).reshape(2, 3, 4)  # top, left, bottom, right


def test_crop_has_second_derivatives(boxes):
    """`v^T H v = 2 |crop(v)|^2` for the Hessian of the squares' sum."""
    random = np.random.default_rng(2)
    features, v = tf.constant(random.random((2, 2, 9, 12, 3), np.float32))
    with tf.GradientTape() as outer:
        outer.watch(features)
        with tf.GradientTape() as inner:
            inner.watch(features)
            squares = tf.reduce_sum(regions.crop(features, boxes, 7) ** 2)
        slope = tf.reduce_sum(v * inner.gradient(squares, features))
    curvature = tf.reduce_sum(v * outer.gradient(slope, features))
    wanted = 2 * tf.reduce_sum(regions.crop(v, boxes, 7) ** 2)
    np.testing.assert_allclose(curvature, wanted, rtol=1e-4)
