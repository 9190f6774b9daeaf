"""Registered solvers for stacks of blocks."""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from typing_extensions import override

from tfkfac.blocks import LayerGradient
from tfkfac.factors import Part, Tensors
from tfkfac.solvers.base import Factors, Solver


class BlockByBlock(Solver):
    """Call a solver for each block of a stack, and stack the results.

    A built-in solver accepts stacks. A registered solver sees a single block,
    with a scalar damping.
    """

    def __init__(self, solver: Solver) -> None:
        super().__init__(solver.name, solver.by_roots)
        self._solver = solver
        self.section = solver.section
        self.whole_layers = solver.whole_layers
        self.takes_rows = solver.takes_rows

    @override
    def parts(self, factors: Factors, name: str) -> dict[str, Part]:
        return self._solver.parts(factors, name)

    @override
    def kept(self, factors: Factors) -> dict[str, Part]:
        return self._solver.kept(factors)

    @override
    def decompose(
        self,
        factors: Factors,
        values: Tensors,
        means: Tensors,
        damping: tf.Tensor,
    ) -> Tensors:
        decompose = functools.partial(self._solver.decompose, factors)
        return _map(decompose, values, means, tf.reshape(damping, [-1]))

    @override
    def combine(self, parts: Tensors, damping: tf.Tensor) -> Tensors:
        return _map(self._solver.combine, parts, tf.reshape(damping, [-1]))

    @override
    def apply(
        self, factors: Factors, decomposition: Tensors, gradient: LayerGradient
    ) -> LayerGradient:
        apply = functools.partial(self._solver.apply, factors)
        return _map(apply, decomposition, gradient)

    @override
    def apply_back(
        self, factors: Factors, decomposition: Tensors, matrix: tf.Tensor
    ) -> tf.Tensor:
        apply_back = functools.partial(self._solver.apply_back, factors)
        return _map(apply_back, decomposition, matrix)

    @override
    def change_root(
        self, factors: Factors, old: Tensors, new: Tensors, matrix: tf.Tensor
    ) -> tf.Tensor:
        change_root = functools.partial(self._solver.change_root, factors)
        return _map(change_root, old, new, matrix)


def _map(function: Callable[..., Any], *stacks: Any) -> Any:
    """Call a function with each row of some stacks, and stack the results.

    A stack of size 1 has the same row for all blocks.
    """
    sizes = [tensor.shape[0] for tensor in tf.nest.flatten(stacks)]
    results = []
    for i in range(max(sizes)):
        rows = tf.nest.map_structure(
            lambda x, i=i: x[i if x.shape[0] > 1 else 0], stacks
        )
        results.append(function(*rows))
    return tf.nest.map_structure(lambda *x: tf.stack(x), *results)
