"""Who trains and who works out the curvature (MR-DHO2)."""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Roles:
    """The replicas of a job by what they do.

    Attributes:
        workers: Ranks of those that train.
        accelerators: Ranks of those that compute curvature beside them. If
            there are none, the workers do it between their steps.
    """

    workers: tuple[int, ...]
    accelerators: tuple[int, ...] = ()

    def trains(self, rank: int) -> bool:
        """Whether a replica is a worker."""
        return rank in self.workers

    def peers(self, rank: int) -> tuple[int, ...]:
        """Ranks of the replicas with the role of one, itself among them."""
        return self.workers if self.trains(rank) else self.accelerators


def assign_roles(replicas: int, accelerator_fraction: float) -> Roles:
    """Makes the last replicas accelerators.

    Args:
        replicas: Number of replicas.
        accelerator_fraction: Share of them, rounded to whole replicas.

    Raises:
        ValueError: If no worker or, with a fraction above 0, no accelerator
            is left.
    """
    if accelerator_fraction == 0:
        return Roles(tuple(range(replicas)))
    count = math.floor(accelerator_fraction * replicas + 0.5)
    if not 0 < count < replicas:
        missing = "accelerator" if count == 0 else "worker"
        raise ValueError(
            "Argument `accelerator_fraction` must leave at least one worker "
            f"and one accelerator of {replicas} replicas, or be 0: there "
            f"would be no {missing}. "
            f"Received: accelerator_fraction={accelerator_fraction}"
        )
    everyone = tuple(range(replicas))
    return Roles(everyone[: replicas - count], everyone[replicas - count :])
