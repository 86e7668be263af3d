"""Makes a container image of an environment: solved and installed here, copied in whole.

environment.py lays out what goes in, root.py makes an operating system where none can be fetched, engine.py drives
docker or podman, containerfile.py gives the Containerfile other forms, names.py an image its name and labels, bill.py
writes the bill of materials, cli.py is the command line.
"""
