"""Options of K-FAC in a flat dict, as the tables of tests have them."""

from typing import Any

import tfkfac

_OF_DISTRIBUTION = (
    "gradient_worker_fraction",
    "assignment",
    "symmetric",
    "factor_dtype",
    "inverse_dtype",
)


def kfac(*args: Any, **options: Any) -> tfkfac.KFAC:
    """K-FAC, by default natural-gradient steps, with nested options."""
    return tfkfac.KFAC(*args, **nested({"step": "natural", **options}))


def nested(options: dict[str, Any]) -> dict[str, Any]:
    """The options, those of the distribution in an object."""
    options = dict(options)
    names = [name for name in _OF_DISTRIBUTION if name in options]
    wire = {name: options.pop(name) for name in names}
    if wire:
        mode = options.get("distribution", "comm_opt")
        options["distribution"] = tfkfac.Distribution(mode, **wire)
    return options
