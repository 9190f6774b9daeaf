"""Train on several workers, which the job scripts in this folder start.

python examples/clusters/train.py DIRECTORY EPOCHS

After SIGTERM the job saves a backup in the directory, which all workers must
share. A job that is started again resumes from the backup.
"""

import sys
import zlib

import keras
from sklearn.datasets import load_digits

import tfkfac


def train(directory: str, epochs: int) -> str:
    """Train a classifier of digits; return a line about the result."""
    strategy = tfkfac.MultiWorkerMirroredStrategy()
    worker = strategy.cluster_resolver.task_id or 0
    x, y = load_digits(return_X_y=True)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        layers = [keras.layers.Dense(64, "relu"), keras.layers.Dense(10)]
        model = keras.Sequential([keras.Input((64,)), *layers])
        model.compile(
            optimizer=tfkfac.KFAC(distribution="dp_kfac"),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    history = model.fit(
        x.astype("float32") / 16,
        y,
        batch_size=64,  # total of all workers
        epochs=epochs,
        shuffle=False,
        verbose=0 if worker else 2,
        callbacks=[
            tfkfac.callbacks.ChiefBackup(directory, delete_checkpoint=False)
        ],
    )
    weights = zlib.crc32(b"".join(w.tobytes() for w in model.get_weights()))
    loss = history.history.get("loss", ["no"])[-1]
    workers = strategy.num_replicas_in_sync
    return f"worker {worker} of {workers}: loss {loss}, weights {weights:08x}"


if __name__ == "__main__":
    print(train(sys.argv[1], int(sys.argv[2])), flush=True)
