"""Put the modules of tools/studies and examples/ on the module path."""

import pathlib
import sys

TOOLS = pathlib.Path(__file__).parent
sys.path += [str(TOOLS / "studies"), str(TOOLS.parent / "examples")]
