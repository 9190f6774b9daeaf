"""Put the modules of tools/studies on the module path."""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parent / "studies"))
