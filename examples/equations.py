"""Differential equations as named conditions, with their solutions.

Points are `(batch, coordinates)`, time first. Networks are MLPs of tanh units,
in the last problems of sines.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

Array = np.ndarray[Any, Any]
PI = np.pi


@dataclasses.dataclass
class Problem:
    """Arguments of `GaussNewton.minimize`, and an error to measure.

    Attributes:
        network: The network u.
        residuals: Functions of points, by condition.
        points: Points of the conditions, or functions of the step.
        error: Relative L2 error; for coefficients the maximal relative error.
        weights: Weights of conditions.
        unknowns: Unknown coefficients.
        every: Steps between calls of the functions in `points`.
    """

    network: Any
    residuals: Mapping[str, Callable[[Any], Any]]
    points: Mapping[str, Any]
    error: Callable[[], float]
    weights: Mapping[str, float] = dataclasses.field(default_factory=dict)
    unknowns: Sequence[keras.Variable] = ()
    every: int = 10

    @property
    def variables(self) -> list[keras.Variable]:
        return [*self.network.trainable_variables, *self.unknowns]


def mlp(
    features: int,
    *widths: int,
    penalty: float = 0.0,
    activation: Any = "tanh",
) -> Any:
    """Return a network of one output, with an L2 penalty."""
    l2 = keras.regularizers.L2(penalty) if penalty else None
    hidden = [
        keras.layers.Dense(width, activation, kernel_regularizer=l2)
        for width in widths
    ]
    last = keras.layers.Dense(1, kernel_regularizer=l2)
    return keras.Sequential([keras.Input((features,)), *hidden, last])


def relative_error(network: Any, x: Array, exact: Array) -> Callable[[], float]:
    """Return a function for the relative L2 error at the points `x`."""
    outputs, points = tf.function(network), tf.constant(x)
    scale = float(np.linalg.norm(exact))
    return lambda: float(np.linalg.norm(outputs(points) - exact)) / scale


def derivatives(
    network: Any, points: Any, second: Sequence[int] = ()
) -> tuple[Any, list[Any], list[Any]]:
    """Return u, its first derivatives, and some second derivatives."""
    x = tf.unstack(points, axis=1)
    with tf.GradientTape(persistent=True) as outer:
        outer.watch([x[i] for i in second])
        with tf.GradientTape() as inner:
            inner.watch(x)
            u = network(tf.stack(x, 1))[:, 0]
        slopes = inner.gradient(u, x)
    return u, slopes, [outer.gradient(slopes[i], x[i]) for i in second]


def by_residual(
    residual: Callable[[Any], Any],
    draw: Callable[[np.random.Generator, int], Array],
    count: int,
    candidates: int = 5,
) -> Callable[[int], Array]:
    """Sample points by their residual r, from `candidates * count` points.

    The probability of a candidate is proportional to |r| / mean(|r|) + 1.
    """
    measure = tf.function(residual)

    def points(step: int) -> Array:
        rng = np.random.default_rng(step)
        x = draw(rng, candidates * count)
        size = np.abs(measure(tf.constant(x)))
        chance = size / size.mean() + 1
        chosen = rng.choice(len(x), count, False, chance / chance.sum())
        return x[chosen]

    return points


def box(*sides: tuple[float, float]) -> Callable[..., Array]:
    """Return a function that samples uniformly."""
    low, high = np.transpose(sides)
    return lambda rng, count: rng.uniform(low, high, (count, len(sides)))


def faces(rng: Any, count: int, low: Array, high: Array) -> Array:
    """Sample points on the faces of a box."""
    x = rng.uniform(low, high, (count, len(low)))
    side = rng.integers(len(low), size=count)
    x[np.arange(count), side] = np.where(
        rng.integers(2, size=count), low[side], high[side]
    )
    return x


# -------------------------------------------------------------------- elliptic
def elliptic(
    network: Any,
    solution: Callable[[Any], Any],
    right_side: Callable[[Any], Any],
    factor: float,
    sizes: tuple[int, int],
    weight: float,
    low: float = 0.0,
) -> Problem:
    """`Laplacian(u) + factor u = right_side` on a box, u known on its faces."""
    rng, dimension = np.random.default_rng(0), network.input_shape[1]
    ends = np.full(dimension, low), np.ones(dimension)

    def equation(x: Any) -> Any:
        u, _, bends = derivatives(network, x, range(dimension))
        return tf.add_n(bends) + factor * u - right_side(x)

    new = np.random.default_rng(1).uniform(*ends, (9000, dimension))
    return Problem(
        network,
        {
            "equation": equation,
            "faces": lambda x: network(x)[:, 0] - solution(x),
        },
        {
            "equation": rng.uniform(*ends, (sizes[0], dimension)),
            "faces": faces(rng, sizes[1], *ends),
        },
        relative_error(network, new, np.array(solution(new))[:, None]),
        {"faces": weight},
    )


def poisson(dimension: int, network: Any = None) -> Problem:
    def solution(x: Any) -> Any:
        if dimension == 2:
            return tf.reduce_prod(tf.sin(PI * x), 1)
        return tf.reduce_sum(tf.cos(PI * x), 1)

    flat = dimension == 2
    return elliptic(
        network or mlp(dimension, 64),
        solution,
        lambda x: -(1 + flat) * PI**2 * solution(x),
        0.0,
        (900, 120) if flat else (3000, 500),
        10.0 if flat else 1.0,
    )


def helmholtz() -> Problem:
    def solution(x: Any) -> Any:
        return tf.sin(PI * x[:, 0]) * tf.sin(4 * PI * x[:, 1])

    return elliptic(
        mlp(2, 20, 20, 20),
        solution,
        lambda x: (1 - 17 * PI**2) * solution(x),
        1.0,
        (2000, 400),
        100.0,
        -1.0,
    )


# -------------------------------------------------------------- time-dependent
def burgers(network: Any = None, nu: float = 0.01) -> Problem:
    network = network or mlp(2, 20, 20, 20)

    def equation(x: Any) -> Any:
        u, (u_t, u_x), (u_xx,) = derivatives(network, x, [1])
        return u_t + u * u_x - nu * u_xx

    x = np.linspace(-1, 1, 200)
    t = np.linspace(0, 1, 100)
    start = np.stack([0 * x, x], 1)
    walls = np.stack([np.tile(t, 2), np.repeat([-1.0, 1.0], 100)], 1)
    new = box((0.05, 1), (-1, 1))(np.random.default_rng(1), 4000)
    return Problem(
        network,
        {
            "equation": equation,
            "start": lambda x: network(x)[:, 0] + tf.sin(PI * x[:, 1]),
            "walls": network,
        },
        {
            "equation": by_residual(equation, box((0, 1), (-1, 1)), 2500),
            "start": start,
            "walls": walls,
        },
        relative_error(network, new, shock(new, nu)[:, None]),
        {"start": 10.0, "walls": 10.0},
        every=5,
    )


def shock(points: Array, nu: float) -> Array:
    """Solve Burgers' equation from -sin(pi x) by the Cole-Hopf transform."""
    z, weights = np.polynomial.hermite.hermgauss(100)
    t, x = points[:, :1], points[:, 1:]
    y = x - np.sqrt(4 * nu * t) * z
    share = weights * np.exp(-(np.cos(PI * y) + 1) / (2 * PI * nu))
    values: Array = -(share * np.sin(PI * y)).sum(1) / share.sum(1)
    return values


def inverse_burgers() -> Problem:
    """Find two coefficients from 300 exact values."""
    network, true = mlp(2, 20, 20, 20), np.array([1.0, 0.02])
    unknowns = [keras.Variable(v, dtype="float64") for v in (0.5, 0.1)]

    def equation(x: Any) -> Any:
        u, (u_t, u_x), (u_xx,) = derivatives(network, x, [1])
        factor, nu = (v.value for v in unknowns)
        return u_t + factor * u * u_x - nu * u_xx

    rng, draw = np.random.default_rng(0), box((0.05, 1), (-1, 1))
    measured = draw(rng, 300)
    values = np.c_[measured, shock(measured, true[1])]

    def error() -> float:
        return float(np.max(np.abs(np.array(unknowns) / true - 1)))

    return Problem(
        network,
        {
            "equation": equation,
            "measured": lambda x: network(x[:, :2])[:, 0] - x[:, 2],
        },
        {"equation": draw(rng, 2000), "measured": values},
        error,
        {"measured": 100.0},
        unknowns,
    )


def allen_cahn() -> Problem:
    network = mlp(2, 20, 20, 20)

    def equation(x: Any) -> Any:
        u, (u_t, _), (u_xx,) = derivatives(network, x, [1])
        return u_t - 1e-4 * u_xx - 5 * (u - u**3)

    def walls(t: Any) -> Any:
        left, right = (
            derivatives(network, tf.concat([t, 0 * t + side], 1))
            for side in (-1.0, 1.0)
        )
        return tf.stack([left[0] - right[0], left[1][1] - right[1][1]], 1)

    def start(x: Any) -> Any:
        return network(tf.concat([0 * x, x], 1)) - x**2 * tf.cos(PI * x)

    new, values = phases()
    return Problem(
        network,
        {"equation": equation, "start": start, "walls": walls},
        {
            "equation": by_residual(equation, box((0, 1), (-1, 1)), 2500),
            "start": np.linspace(-1, 1, 300)[:, None],
            "walls": np.linspace(0, 1, 100)[:, None],
        },
        relative_error(network, new, values),
        {"start": 100.0},
        every=5,
    )


def phases() -> tuple[Array, Array]:
    """Solve the Allen-Cahn equation by a Fourier series in x."""
    from scipy.integrate import solve_ivp

    x = np.linspace(-1, 1, 512, endpoint=False)
    bend = -1e-4 * (PI * np.fft.rfftfreq(512, 1 / 512)) ** 2
    t = np.linspace(0, 1, 21)

    def change(_: float, u: Array) -> Array:
        spread = np.fft.irfft(bend * np.fft.rfft(u))
        return np.asarray(spread + 5 * (u - u**3))

    start = x**2 * np.cos(PI * x)
    u = solve_ivp(change, (0, 1), start, "RK45", t, rtol=1e-9, atol=1e-9).y
    grid = np.stack(np.meshgrid(t, x, indexing="ij"), -1)
    return grid.reshape(-1, 2), u.T.reshape(-1, 1)


def wave(network: Any = None) -> Problem:
    network = network or mlp(2, 20, 20, 20, 20)

    def solution(t: Any, x: Any) -> Any:
        slow = np.sin(PI * x) * np.cos(2 * PI * t)
        return slow + np.sin(4 * PI * x) * np.cos(8 * PI * t) / 2

    def equation(x: Any) -> Any:
        _, _, (u_tt, u_xx) = derivatives(network, x, [0, 1])
        return u_tt - 4 * u_xx

    def start(x: Any) -> Any:  # with its value at time 0
        u, (u_t, _), _ = derivatives(network, x[:, :2])
        return tf.stack([u - x[:, 2], 0.1 * u_t], 1)

    rng = np.random.default_rng(0)
    x, t = np.linspace(0, 1, 200), np.linspace(0, 1, 100)
    walls = np.stack([np.tile(t, 2), np.repeat([0.0, 1.0], 100)], 1)
    new = np.random.default_rng(1).uniform(size=(5000, 2))
    return Problem(
        network,
        {"equation": equation, "start": start, "walls": network},
        {
            "equation": rng.uniform(size=(2500, 2)),
            "start": np.stack([0 * x, x, solution(0 * x, x)], 1),
            "walls": walls,
        },
        relative_error(network, new, solution(*new.T)[:, None]),
        {"equation": 1e-4},
    )


def sine() -> Problem:
    """Fit sin(2 pi x) by 673 weights."""
    network, x = mlp(1, 24, 24), np.linspace(-1, 1, 1000)[:, None]
    y = np.sin(2 * PI * x)
    return Problem(
        network,
        {"values": lambda p: network(p[:, :1])[:, 0] - p[:, 1]},
        {"values": np.concatenate([x, y], 1)},
        relative_error(network, x, y),
    )


def sines(*widths: int) -> Any:
    """Return a network of sines, which can represent some solutions exactly."""
    return mlp(2, *widths, activation=tf.sin)


def periodic(*widths: int) -> Any:
    """Return a network of sines of period 2 in x."""
    network = mlp(3, *widths, activation=tf.sin)
    inputs = keras.Input((2,))
    time, angle = inputs[:, :1], PI * inputs[:, 1:]
    angle = [keras.ops.sin(angle), keras.ops.cos(angle)]
    return keras.Model(
        inputs, network(keras.ops.concatenate([time, *angle], 1))
    )


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "Poisson 2-D": lambda: poisson(2),
    "Poisson 5-D": lambda: poisson(5),
    "Burgers": burgers,
    "Allen-Cahn": allen_cahn,
    "wave": wave,
    "Helmholtz": helmholtz,
    "inverse Burgers": inverse_burgers,
    "regression": sine,
    # Networks with prior knowledge of the solution.
    "Poisson 2-D, sines": lambda: poisson(2, sines(64)),
    "wave, sines": lambda: wave(sines(20, 20, 20, 20)),
    "Burgers, periodic sines": lambda: burgers(periodic(20, 20, 20)),
}
