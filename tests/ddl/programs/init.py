"""Joins with the environment's DDL_OPTIONS; prints what it got."""

import os
import sys

import ddl

if len(sys.argv) > 1 and os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK")) == "1":
    os.environ["DDL_OPTIONS"] = sys.argv[1]  # of rank 1 alone
try:
    ddl.init()
except ddl.DDLError as error:
    print(f"{type(error).__name__}: {error}", flush=True)
    sys.exit(1)
print(f"{ddl.rank()}/{ddl.size()} {ddl.local_rank()}/{ddl.local_size()} {ddl.num_hosts()}", flush=True)
