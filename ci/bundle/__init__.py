"""The bundle's tools: from conda recipes to a tested channel, environments, a mirror.

`python -m bundle --help` lists the commands; docs/conda.md shows them. py-rattler-build builds the recipes, as it does
for conda-build, and py-rattler solves and installs: neither conda nor conda-build is needed.
"""
