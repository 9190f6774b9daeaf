import numpy as np
import pytest

from networks import NETWORKS


@pytest.mark.parametrize("shape", [(8, 8, 1), (28, 28, 1), (32, 32, 3)])
@pytest.mark.parametrize("name", NETWORKS)
def test_logits(name, shape):
    model = NETWORKS[name](shape, 7)
    assert model(np.zeros((2, *shape), np.float32)).shape == (2, 7)


def test_sizes_of_the_known_models():
    assert NETWORKS["mlp"]((28, 28, 1), 10).count_params() == 669_706
    assert NETWORKS["cnn"]((28, 28, 1), 10).count_params() == 421_642
    convolutions = [
        layer
        for layer in NETWORKS["resnet20"]((32, 32, 3), 10).layers
        if "conv2d" in layer.name and layer.kernel_size == (3, 3)
    ]
    assert len(convolutions) == 19
