"""The command `bascule`: what is in an environment, under which licences, and its bill of materials.

It reads what conda and pip record of an environment, needs nothing but Python's own library, and changes nothing.
"""

from importlib import metadata

try:
    __version__ = metadata.version("bascule-tools")
except metadata.PackageNotFoundError:  # bare sources
    __version__ = "0+unknown"
