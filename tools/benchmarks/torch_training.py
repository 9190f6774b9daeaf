"""The same in PyTorch, for its SGD, Adam and kfac-pytorch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.data import CLASSES, make_batch
from benchmarks.task import Task, UnavailableError

RATE = 1e-4


class TorchTraining:
    """A model, its optimizer, perhaps a preconditioner, and a batch."""

    def __init__(self, task: Task) -> None:
        torch.manual_seed(0)
        if task.model not in _BUILDERS:
            raise UnavailableError(f"{task.model} is not written in PyTorch")
        self._intervals = (10, 100)
        self._model = _BUILDERS[task.model]()
        kind = task.optimizer.removeprefix("torch-")
        parameters = self._model.parameters()
        self._optimizer: torch.optim.Optimizer = (
            torch.optim.Adam(parameters, RATE, **task.arguments)
            if kind == "adam"
            else torch.optim.SGD(parameters, RATE, momentum=0.9)
        )
        self._preconditioner = None
        if kind.startswith("kfac-"):
            self._preconditioner = self._kfac(
                kind.removeprefix("kfac-"), task.arguments
            )
        batch = make_batch(task.model, task.batch)
        x, y = (torch.tensor(part) for part in batch)
        self._x = x.movedim(-1, 1).contiguous() if x.ndim == 4 else x
        self._y = y
        self._loss = (
            _pixels_cross_entropy
            if task.model == "M4"
            else functional.cross_entropy
        )

    def _kfac(self, method: str, arguments: dict[str, Any]) -> Any:
        try:
            from kfac.preconditioner import KFACPreconditioner
        except ModuleNotFoundError as error:
            raise UnavailableError("kfac-pytorch is not installed") from error
        return KFACPreconditioner(
            self._model,
            factor_update_steps=lambda step: self._intervals[0],
            inv_update_steps=lambda step: self._intervals[1],
            compute_method=method,
            lr=RATE,
            **arguments,
        )

    def run(self, end_of_step: Callable[[], bool]) -> None:
        """Trains until `end_of_step`, called after each step, says no."""
        self._step()
        while end_of_step():
            self._step()

    def _step(self) -> None:
        self._optimizer.zero_grad()
        loss = self._loss(self._model(self._x), self._y)
        loss.backward()
        if self._preconditioner is not None:
            self._preconditioner.step()
        self._optimizer.step()
        loss.item()

    def set_intervals(self, factor: int, inverse: int) -> None:
        """Sets those of K-FAC."""
        self._intervals = (factor, inverse)

    def facts(self) -> dict[str, Any]:
        """The bytes of the preconditioner's state, as it counts them."""
        if self._preconditioner is None:
            return {}
        return {"state_bytes": self._preconditioner.memory_usage()["total"]}


def _pixels_cross_entropy(
    logits: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    losses = functional.binary_cross_entropy_with_logits(
        logits, y, reduction="sum"
    )
    return losses / len(y)


def _m1() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 512),
        nn.ReLU(),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Linear(512, CLASSES),
    )


def _m2() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(3136, 128),
        nn.ReLU(),
        nn.Linear(128, CLASSES),
    )


class _Block(nn.Module):
    """A residual block."""

    def __init__(self, channels: int, filters: int, strides: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_convolution(channels, filters, 3, strides),
            nn.ReLU(),
            *_convolution(filters, filters, 3),
        )
        self.shortcut = nn.Sequential(
            *(_convolution(channels, filters, 1, strides) * (strides > 1))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


def _convolution(
    channels: int, filters: int, size: int, strides: int = 1
) -> list[nn.Module]:
    return [
        nn.Conv2d(channels, filters, size, strides, size // 2, bias=False),
        nn.BatchNorm2d(filters),
    ]


def _m3() -> nn.Module:
    layers = [*_convolution(3, 16, 3), nn.ReLU()]
    channels = 16
    for stage, filters in enumerate((16, 32, 64)):
        for block in range(3):
            strides = 2 if stage > 0 and block == 0 else 1
            layers.append(_Block(channels, filters, strides))
            channels = filters
    return nn.Sequential(
        *layers,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(channels, CLASSES),
    )


def _m4() -> nn.Module:
    layers: list[nn.Module] = []
    inputs, code = 784, 30
    for units in (1000, 500, 250, code, 250, 500, 1000):
        layers.append(nn.Linear(inputs, units))
        if units != code:
            layers.append(nn.Tanh())
        inputs = units
    return nn.Sequential(*layers, nn.Linear(inputs, 784))


_BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "M1": _m1,
    "M2": _m2,
    "M3": _m3,
    "M4": _m4,
}
