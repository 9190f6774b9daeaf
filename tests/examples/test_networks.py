from common.networks import CLASSIFIERS, resnet


def test_sizes_of_the_known_models():
    assert CLASSIFIERS["mlp"]((28, 28, 1), 10).count_params() == 669_706
    assert CLASSIFIERS["cnn"]((28, 28, 1), 10).count_params() == 421_642
    for depth in (20, 32):
        convolutions = [
            layer
            for layer in resnet((32, 32, 3), 10, depth).layers
            if "conv2d" in layer.name and layer.kernel_size == (3, 3)
        ]
        assert len(convolutions) == depth - 1
