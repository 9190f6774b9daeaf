"""Types of command-line arguments; this module does not import TensorFlow."""

import argparse
import json
from typing import Any, NamedTuple


class Variant(NamedTuple):
    """An optimizer of the command line, with arguments of its constructor.

    Attributes:
        text: The text that was parsed.
        name: Name of the optimizer.
        arguments: Arguments of its constructor.
    """

    text: str
    name: str
    arguments: dict[str, Any]


def parse_variant(text: str) -> Variant:
    """Parse NAME[:KEY=VALUE...]."""
    name, *pairs = text.split(":")
    return Variant(text, name, dict(map(key_value, pairs)))


def key_value(pair: str) -> tuple[str, Any]:
    """Parse KEY=VALUE; the value is JSON or, if it is not valid JSON, text."""
    key, equals, text = pair.partition("=")
    if not key.isidentifier() or not equals:
        raise argparse.ArgumentTypeError(f"{pair!r} is not KEY=VALUE")
    try:
        return key, json.loads(text)
    except ValueError:
        return key, text


def make_parser_of(
    docstring: str | None, epilog: str | None = None
) -> argparse.ArgumentParser:
    """Return a parser whose --help prints a docstring with its line breaks."""
    return argparse.ArgumentParser(
        description=docstring,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def positive(text: str) -> int:
    """Parse an integer above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"must be a whole number above 0; received {text!r}"
        )
    return int(text)
