"""The residual of the example vanishes at its solution."""

from typing import Any

import numpy as np

import gauss_newton


def test_solution(monkeypatch: Any) -> None:
    """`u_t + u u_x = nu u_xx`, by central differences."""
    monkeypatch.setattr(gauss_newton, "NU", nu := 0.05)
    x = np.random.default_rng(0).uniform([0.1, -0.9], [1, 0.9], (50, 2))
    h = 1e-3

    def u(t: float, s: float) -> Any:
        return gauss_newton.solution(x + np.array([t, s]) * h)

    bend = (u(0, 1) - 2 * u(0, 0) + u(0, -1)) / h**2
    slope = (u(0, 1) - u(0, -1)) / 2 / h
    change = (u(1, 0) - u(-1, 0)) / 2 / h
    np.testing.assert_allclose(change + u(0, 0) * slope, nu * bend, atol=1e-3)
