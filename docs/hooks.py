"""MkDocs hooks: link examples; check that each public name is on a page."""

import ast
import pathlib
import zlib
from typing import Any

from mkdocs.structure.files import File

PACKAGE = pathlib.Path(__file__).parents[1] / "tfkfac"
EXAMPLES = PACKAGE.parent / "examples"
# Links of the first page to the examples, and their place in the site.
SOURCE, TARGET = "](../../examples/", "](examples/"


def on_files(files: Any, config: Any, **_: Any) -> None:
    """Add the scripts of the examples and the notebook to the site."""
    for path in (*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.ipynb")):
        name = f"examples/{path.name}"
        files.append(File.generated(config, name, abs_src_path=str(path)))


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Let links to the examples lead to their copies in the site."""
    return markdown.replace(SOURCE, TARGET)


def on_post_build(config: Any, **_: Any) -> None:
    """Fail the build if a public name is missing.

    Raises:
        ValueError: If a public name is on no page.
    """
    site = pathlib.Path(config["site_dir"])
    if missing := public_names() - entries(site / "objects.inv"):
        raise ValueError(f"On no page: {', '.join(sorted(missing))}")


def public_names() -> set[str]:
    """Return `tfkfac.__all__`, and the `__all__` of its subpackages in it."""
    names = set()
    for name in _all_of(PACKAGE):
        names.add(f"tfkfac.{name}")
        if (PACKAGE / name).is_dir():
            members = _all_of(PACKAGE / name)
            names |= {f"tfkfac.{name}.{member}" for member in members}
    return names


def entries(inventory: pathlib.Path) -> set[str]:
    """Return the names in an inventory that mkdocstrings has written."""
    *_, compressed = inventory.read_bytes().split(b"\n", 4)
    lines = zlib.decompress(compressed).decode().splitlines()
    return {line.split(" ", 1)[0] for line in lines}


def _all_of(package: pathlib.Path) -> list[str]:
    """Return the `__all__` of a package."""
    tree = ast.parse((package / "__init__.py").read_text())
    return next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == "__all__"
    )
