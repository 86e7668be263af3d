"""The command `bascule`: all of Bascule's commands under one name, and what is in an environment.

It reads what conda and pip record of an environment, needs nothing but Python's own library, and changes nothing.
"""

from importlib import metadata

try:
    __version__ = metadata.version("bascule-tools")
except metadata.PackageNotFoundError:  # bare sources
    __version__ = "0+unknown"
