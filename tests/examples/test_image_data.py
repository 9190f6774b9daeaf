import gzip
import struct

import numpy as np
import pytest

from common import images, tfds_sets


def write_idx(path, array, magic=0x08):
    header = struct.pack(">BBBB", 0, 0, magic, array.ndim)
    header += struct.pack(f">{array.ndim}I", *array.shape)
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wb") as file:
        file.write(header + array.astype(np.uint8).tobytes())


@pytest.fixture
def idx_dir(tmp_path):
    rng = np.random.default_rng(0)
    directory = tmp_path / "idx"
    directory.mkdir()
    for prefix, size, suffix in [("train", 30, ".gz"), ("t10k", 12, "")]:
        pixels = rng.integers(0, 256, (size, 6, 5))
        stem = f"{directory}/{prefix}"
        path = type(directory)
        write_idx(path(f"{stem}-images-idx3-ubyte{suffix}"), pixels)
        write_idx(
            path(f"{stem}-labels-idx1-ubyte{suffix}"), np.arange(size) % 3
        )
    return directory


def test_idx_files(idx_dir, tmp_path):
    for _ in range(2):  # the second time from TFDS' cache
        data = images.load("mnist", idx_dir, tmp_path / "cache")
        with gzip.open(idx_dir / "train-images-idx3-ubyte.gz") as file:
            pixels = np.frombuffer(file.read()[16:], np.uint8)
        np.testing.assert_array_equal(data.train.x, pixels.reshape(30, 6, 5, 1))
        np.testing.assert_array_equal(data.train.y, np.arange(30) % 3)
        np.testing.assert_array_equal(data.test.y, np.arange(12) % 3)
        assert data.num_classes == 3


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("t10k-labels-idx1-ubyte", None, "holds no t10k-labels-idx1-ubyte"),
        ("t10k-labels-idx1-ubyte", b"\0\0\x0d\1" * 9, "not an idx file"),
        ("t10k-labels-idx1-ubyte", b"\0\0\x08\1\0\0\0\x05", "cut short"),
        ("train-labels-idx1-ubyte.gz", b"\0\0\x08\1", "cannot be read"),
        (
            "t10k-labels-idx1-ubyte",
            b"\0\0\x08\1\0\0\0\x02\1\1",
            "has 12 images but",
        ),
    ],
)
def test_bad_idx_file(idx_dir, tmp_path, file, content, message):
    (idx_dir / file).unlink()
    if content is not None:
        (idx_dir / file).write_bytes(content)
    with pytest.raises(images.DatasetError, match=message) as error:
        images.load("mnist", idx_dir, tmp_path / "cache")
    assert "Data sets to choose from" in str(error.value)


def test_data_sets_that_cannot_be_had(idx_dir, tmp_path, monkeypatch):
    def fails(name, *directories):
        with pytest.raises(images.DatasetError) as error:
            images.load(name, *directories)
        return str(error.value)

    assert "moved_digits is embedded" in fails("moved_digits", tmp_path)
    assert "Did you mean cifar10" in fails("cifra10")
    assert "not a directory" in fails("mnist", tmp_path / "missing")
    assert "holds no cifar10" in fails("cifar10", idx_dir)
    assert "not a set of images" in fails("imdb_reviews", None, tmp_path)
    monkeypatch.setattr(tfds_sets, "can_reach", lambda host: False)
    assert "cannot be reached" in fails("cifar10", None, tmp_path)
