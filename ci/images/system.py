"""The packages of Debian that an environment needs below it, under the names of Debian 12. Plain data."""

from __future__ import annotations

HOST = ("openssh-client", "openssh-server", "passwd", "tini")
# The stand-in for conda-forge packs this machine's python and pip's wheels, which look for these in the system.
STAND_IN = (
    *("libbz2-1.0", "libexpat1", "libffi8", "libgomp1", "liblzma5", "libncursesw6", "libnsl2", "libreadline8"),
    *("libsqlite3-0", "libssl3", "libstdc++6", "libuuid1", "zlib1g"),
)
ALL = (*HOST, *STAND_IN)
