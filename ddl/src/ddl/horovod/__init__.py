"""Horovod's names over libddl: a script that was written for Horovod runs with its import lines changed.

`import ddl.horovod.torch as hvd` takes the place of `import horovod.torch as hvd`. In scripts that start their ranks
themselves, `import ddl.horovod as horovod` takes that of `import horovod`.
"""

from ddl.horovod.function_job import run

__all__ = ["run"]
