"""The job of `train.py` by Ray, which sets `TF_CONFIG` for each worker.

python examples/clusters/ray_train.py DIRECTORY EPOCHS
"""

import sys

from ray.train import ScalingConfig
from ray.train.tensorflow import TensorflowTrainer
from train import train


def run(arguments: dict[str, str]) -> None:
    """Train as one worker, in a thread that Ray starts."""
    print(train(arguments["directory"], int(arguments["epochs"])), flush=True)


if __name__ == "__main__":
    TensorflowTrainer(
        run,
        train_loop_config={"directory": sys.argv[1], "epochs": sys.argv[2]},
        scaling_config=ScalingConfig(num_workers=2),
    ).fit()
