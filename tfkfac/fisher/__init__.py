"""Types of the Fisher matrix, and predictive distributions of labels.

`KFAC(fisher=...)` selects the type of the Fisher matrix (`types.py`). The
types "monte_carlo" and "type2" need the predictive distribution whose negative
log-likelihood is the loss. `tfkfac.register_distribution` assigns one to a
custom loss. Subclass one of these classes to write a distribution:

- `Independent`: independent labels, one for each output,
- `Distribution`: any other distribution.
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
