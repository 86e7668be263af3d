"""Makes a container image of an environment: solved and installed here, copied in whole.

environment.py lays out what goes in, root.py makes an operating system where none can be fetched, engine.py drives
docker, podman or buildah, canonical.py gives an image the id of its content, names.py its name and labels, bill.py
writes the bill of materials, containerfile.py completes a context for an engine elsewhere, errors.py is what goes
wrong, cli.py the command line, bench.py measures.
"""
