"""Compare `KFAC()` and Adam on an autoencoder, for equal processor seconds.

    python tools/demo.py [PLOT]

`KFAC()` trains first, then Adam for as many processor seconds. Adam's learning
rate is the best of five from 0.001 to 0.016, its batch size the better of 125
and 500, both by the error of the test digits.
Both rates decay to 0 over the run; the first step, which traces the graph, does
not count. The demo shows test digits and their reconstructions from 30 numbers.
The plot needs Matplotlib.
"""

import dataclasses
import importlib.util
import pathlib
from collections.abc import Mapping

import keras
import numpy as np

import paths  # noqa: F401
from common.arguments import make_parser_of
from targets.methods import CONSTANT
from targets.recording import Allowance
from targets.run import FINAL, Run
from targets.training import Training, load

ADAM_RATE = 4e-3
MAX_STEPS = 10**6  # not reached: the time limit ends the training
EVALUATIONS = 4
SHADES = " .:-=+*%@"
SHOWN = 3  # digits in the terminal
PLOTTED = 10  # digits in the plot


def main() -> None:
    """Train, and show the reconstructions."""
    parser = make_parser_of(__doc__)
    parser.add_argument("plot", nargs="?", type=pathlib.Path, metavar="PLOT")
    options = parser.parse_args()
    kfac = Run(
        FINAL,
        "autoencoder",
        "small",
        "digits",
        "kfac",
        rate=None,
        rest=None,
        decay=0.0,
        batch=500,
        share=0.25,
        seed=0,
    )
    adam = dataclasses.replace(
        kfac, method=f"adam{CONSTANT}", rate=ADAM_RATE, batch=125
    )
    data = load(kfac, None)
    digits = data.test.x[:PLOTTED]
    print("An autoencoder of digits, 784-500-250-125-30-125-250-500-784")
    images = {"digits": digits[..., 0]}
    training = Training(kfac, data, evaluations=EVALUATIONS)
    seconds = report("KFAC()", training.run(kfac.seed))
    images["KFAC()"] = outputs(training.model, digits)
    training = Training(adam, data, steps=MAX_STEPS)
    allowance = Allowance(training.measure, seconds, EVALUATIONS, ADAM_RATE)
    report("Adam", training.run(adam.seed, allowance))
    images["Adam"] = outputs(training.model, digits)
    show(images)
    if options.plot:
        save_plot(options.plot, images)


def report(name: str, record: Mapping[str, Mapping[str, list[float]]]) -> float:
    """Print a training; return its processor seconds."""
    curve = record["curve"]
    for step, seconds, processor, error in zip(*curve.values(), strict=True):
        print(
            f"{name:6}  {step:5.0f} steps  {processor:5.2f} processor seconds "
            f"({seconds:.2f} on the clock)  squared error of an image "
            f"{error:6.2f}"
        )
    return curve["cpu_seconds"][-1]


def outputs(model: keras.Model, digits: np.ndarray) -> np.ndarray:
    """Return reconstructed digits."""
    logits = model.predict(digits, verbose=0)
    pixels = keras.ops.convert_to_numpy(keras.ops.sigmoid(logits))
    return pixels.reshape(-1, 28, 28)


def show(images: Mapping[str, np.ndarray]) -> None:
    """Draw digits and their reconstructions in the terminal."""
    width = images["digits"].shape[-1] + 1
    print("\n" + "".join(f"{name:{width}}" for name in images).rstrip())
    for number in range(SHOWN):
        picture = np.concatenate(
            [pictures[number] for pictures in images.values()], axis=1
        )
        shades = (picture * (len(SHADES) - 1)).round().astype(int)
        for row in shades[::2]:  # a character is twice as high as a pixel
            if text := "".join(SHADES[shade] for shade in row).rstrip():
                print(text)
        print()


def save_plot(path: pathlib.Path, images: Mapping[str, np.ndarray]) -> None:
    """Plot digits and their reconstructions."""
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
