"""Makes a container image of an environment: solved and installed here, copied in whole.

environment.py lays out what goes in, root.py makes an operating system where none can be fetched, engine.py drives
docker, podman or buildah, bill.py writes the bill of materials, cli.py is the command line.
"""
