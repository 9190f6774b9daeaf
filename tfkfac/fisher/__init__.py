"""Types of the Fisher matrix, and distributions of labels.

`KFAC(fisher=...)` chooses the type of the Fisher matrix (`types.py`). That of
labels drawn from the model's own predictions needs the distribution that a
loss is the likelihood of: `tfkfac.register_distribution` gives one to a loss
of one's own. A distribution is a subclass of one of these:

- `Independent`: labels that are independent, one for each output,
- `Distribution`: any other.
"""

from tfkfac.fisher.distributions import (
    Bernoulli,
    Categorical,
    Distribution,
    Independent,
    Normal,
    Poisson,
    register_distribution,
)

__all__ = [
    "Bernoulli",
    "Categorical",
    "Distribution",
    "Independent",
    "Normal",
    "Poisson",
    "register_distribution",
]
