"""What an allreduce would do on a network that is described and need not exist: forecasts, bounds, schedules.

`interface` is ddl_plan.h in Python; `network` describes networks, in files too; `report` and `picture` show what came
out; `forestcoll` is the optimum of small graphs; `scaling` is data-parallel training on 1 to many GPUs, `published` on
published systems. Nothing here touches a network, MPI or a GPU.
"""
