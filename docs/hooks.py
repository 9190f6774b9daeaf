"""MkDocs' hook: every public name of the package has an entry on a page."""

import ast
import pathlib
import zlib
from typing import Any

PACKAGE = pathlib.Path(__file__).parents[1] / "tfkfac"


def on_post_build(config: Any, **_: Any) -> None:
    """Stops a build that lacks names.

    Raises:
        ValueError: If it does.
    """
    site = pathlib.Path(config["site_dir"])
    if missing := public_names() - entries(site / "objects.inv"):
        raise ValueError(f"On no page: {', '.join(sorted(missing))}")


def public_names() -> set[str]:
    """Names of `tfkfac.__all__`, and those of the rooms that are in it."""
    names = set()
    for name in _all_of(PACKAGE):
        names.add(f"tfkfac.{name}")
        if (PACKAGE / name).is_dir():
            parts = _all_of(PACKAGE / name)
            names |= {f"tfkfac.{name}.{part}" for part in parts}
    return names


def entries(inventory: pathlib.Path) -> set[str]:
    """Names of an inventory of Sphinx' format, which mkdocstrings writes."""
    *_, packed = inventory.read_bytes().split(b"\n", 4)
    lines = zlib.decompress(packed).decode().splitlines()
    return {line.split(" ", 1)[0] for line in lines}


def _all_of(package: pathlib.Path) -> list[str]:
    """The `__all__` of a package."""
    tree = ast.parse((package / "__init__.py").read_text())
    return next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == "__all__"
    )
