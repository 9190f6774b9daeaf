"""MkDocs hooks: pages of the examples; each public name is on a page."""

import ast
import json
import pathlib
import re
import zlib
from typing import Any

from mkdocs.structure.files import File

PACKAGE = pathlib.Path(__file__).parents[1] / "tfkfac"
EXAMPLES = PACKAGE.parent / "examples"


def on_files(files: Any, config: Any, **_: Any) -> None:
    """Add a page for each example, and the notebook itself, to the site."""
    for path in sorted(EXAMPLES.glob("*.*")):
        text = path.read_text()
        name = f"examples/{path.name}"
        if path.suffix == ".ipynb":
            files.append(File.generated(config, name, abs_src_path=str(path)))
            text = "".join(map(_cell, json.loads(text)["cells"]))
        elif path.suffix == ".py":
            text = f"# {path.name}\n\n{_fenced(text, 'python')}"
        name = name.removesuffix(".md") + ".md"
        files.append(File.generated(config, name, content=text))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links to examples, and those of their README, lead to pages."""
    if page.file.src_uri == "examples/README.md":
        markdown = markdown.replace("](../docs/pages/", "](../")
        return re.sub(r"\]\((\w+\.(?:py|ipynb))\)", r"](\1.md)", markdown)
    link = r"\]\(((?:\.\./)*)\.\./\.\./(examples/\w+\.\w+)\)"
    return re.sub(link, r"](\1\2.md)", markdown)


def _cell(cell: dict[str, Any]) -> str:
    """Convert a cell of a notebook, with its outputs, to Markdown."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return f"{source}\n\n"
    parts = [_fenced(source, "python")]
    for output in cell["outputs"]:
        if data := output.get("data", {}).get("image/png"):
            parts.append(f"![Output](data:image/png;base64,{data.strip()})\n\n")
        else:
            parts.append(_fenced("".join(output["text"]), "text"))
    return "".join(parts)


def _fenced(text: str, language: str) -> str:
    return f"~~~{language}\n{text.rstrip()}\n~~~\n\n"


def on_post_build(config: Any, **_: Any) -> None:
    """Fail the build if a public name is missing.

    Raises:
        ValueError: If a public name is on no page.
    """
    site = pathlib.Path(config["site_dir"])
    if missing := public_names() - entries(site / "objects.inv"):
        raise ValueError(f"On no page: {', '.join(sorted(missing))}")


def public_names() -> set[str]:
    """Return `tfkfac.__all__`, and the `__all__` of the modules in it."""
    names = set()
    for name in _all_of(PACKAGE / "__init__.py"):
        names.add(f"tfkfac.{name}")
        for file in (PACKAGE / name / "__init__.py", PACKAGE / f"{name}.py"):
            members = _all_of(file) if file.is_file() else []
            names |= {f"tfkfac.{name}.{member}" for member in members}
    return names


def entries(inventory: pathlib.Path) -> set[str]:
    """Return the names in an inventory that mkdocstrings has written."""
    *_, compressed = inventory.read_bytes().split(b"\n", 4)
    lines = zlib.decompress(compressed).decode().splitlines()
    return {line.split(" ", 1)[0] for line in lines}


def _all_of(file: pathlib.Path) -> list[str]:
    """Return the `__all__` of a file."""
    tree = ast.parse(file.read_text())
    return next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == "__all__"
    )
