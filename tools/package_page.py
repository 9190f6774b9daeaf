"""README as the page of a package index: a command class of setuptools."""

import re

from setuptools.command.egg_info import egg_info


class PackagePage(egg_info):
    """Write the metadata, with links that work outside of the repository."""

    def run(self) -> None:
        """Change the long description, then write all metadata."""
        metadata = self.distribution.metadata
        metadata.long_description = with_links(
            metadata.long_description, metadata.url
        )
        super().run()


def with_links(text: str, address: str | None) -> str:
    """Make relative links absolute; without an address, keep only their text.

    Pictures without an address are removed. Links in the page itself stay.
    """
    relative = r"\[([^\]]*)\]\((?!https?://|#)([^)]*)\)"
    picture, link = r"", r"\1"
    if address:
        picture = rf"![\1]({address}/raw/HEAD/\2)"
        link = rf"[\1]({address}/blob/HEAD/\2)"
    return re.sub(relative, link, re.sub(rf"!{relative}", picture, text))
