"""The bundle's tools: from conda recipes to a tested channel, environments, a mirror.

`python -m bundle --help` lists the commands; docs/conda.md shows them. Renders conda-build's recipes for rattler-build,
which builds them where conda-build is not to be had: a stand-in for conda-build in CI, not a replacement.
"""
