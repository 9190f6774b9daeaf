"""K-FAC and Adam after the same seconds, on an autoencoder of digits.

    python tools/demo.py [PLOT]

K-FAC trains with its defaults, then Adam, at a good learning rate, for as many
steps as take the same seconds; both rates decay to 0 over the run. What is
shown are digits that neither has seen, and what the networks make of them after
squeezing them through 30 numbers. The plot needs Matplotlib.
"""

import importlib.util
import pathlib
import sys
from collections.abc import Mapping

import keras
import numpy as np

from targets.data import Data
from targets.run import FINAL, Run
from targets.training import Training, load

ADAM_RATE = 2e-3
# Steps that tell how long one takes.
TRIAL = 60
SHADES = " .:-=+*%@"
SHOWN = 3  # digits in the terminal
PLOTTED = 10


def main() -> None:
    """Trains, and shows what came out."""
    adam, kfac = (
        Run(
            FINAL,
            "autoencoder",
            "small",
            "digits",
            method,
            rate=rate,
            rest=None,
            decay=0.0,
            batch=batch,
            share=share,
            seed=0,
        )
        for method, rate, batch, share in (
            ("adam", ADAM_RATE, 125, 1.0),
            ("kfac", None, 500, 0.25),
        )
    )
    data = load(kfac, None)
    print("An autoencoder of digits, 784-500-250-125-30-125-250-500-784")
    images = {"digits": data.test_x[:PLOTTED, ..., 0]}
    steps = kfac.count_steps()
    seconds, images["K-FAC"] = train("K-FAC", kfac, data, steps)
    trial = Training(adam, data, steps=TRIAL, evaluations=1).run(adam.seed)
    steps = round(seconds * (TRIAL - 1) / trial["curve"]["seconds"][-1])
    _, images["Adam"] = train("Adam", adam, data, steps)
    show(images)
    if len(sys.argv) > 1:
        save_plot(pathlib.Path(sys.argv[1]), images)


def train(
    name: str, run: Run, data: Data, steps: int
) -> tuple[float, np.ndarray]:
    """Trains; returns the seconds, and the first digits as they come out."""
    training = Training(run, data, steps=steps, evaluations=4)
    curve = training.run(run.seed)["curve"]
    for step, seconds, error in zip(
        curve["step"], curve["seconds"], curve["metric"], strict=True
    ):
        print(
            f"{name:5}  {step:5.0f} steps  {seconds:5.1f} seconds  squared "
            f"error of an image {error:6.2f}"
        )
    logits = training.model.predict(data.test_x[:PLOTTED], verbose=0)
    outputs = keras.ops.convert_to_numpy(keras.ops.sigmoid(logits))
    return curve["seconds"][-1], outputs.reshape(-1, 28, 28)


def show(images: Mapping[str, np.ndarray]) -> None:
    """Draws digits in the terminal: as they are, and as they came out."""
    width = images["digits"].shape[-1] + 1
    print("\n" + "".join(f"{name:{width}}" for name in images).rstrip())
    for number in range(SHOWN):
        picture = np.concatenate(
            [part[number] for part in images.values()], axis=1
        )
        shades = (picture * (len(SHADES) - 1)).round().astype(int)
        for row in shades[::2]:  # a character is twice as high as wide
            if text := "".join(SHADES[shade] for shade in row).rstrip():
                print(text)
        print()


def save_plot(path: pathlib.Path, images: Mapping[str, np.ndarray]) -> None:
    """Plots more of them."""
    if importlib.util.find_spec("matplotlib") is None:
        print("No plot: Matplotlib is not installed")
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(PLOTTED, len(images)), layout="constrained")
    panels = figure.subplots(len(images), PLOTTED)
    for line, (name, pictures) in zip(panels, images.items(), strict=True):
        line[0].set_ylabel(name)
        for axes, picture in zip(line, pictures, strict=True):
            axes.imshow(picture, cmap="gray_r", vmin=0, vmax=1)
            axes.set(xticks=[], yticks=[])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    print(f"Plot: {path}")


if __name__ == "__main__":
    main()
