"""Horovod's names over libddl: a script that was written for Horovod runs with one import line changed.

`import ddl.horovod.torch as hvd` takes the place of `import horovod.torch as hvd`.
"""
