"""Planning: forecasts, bounds and schedules of an allreduce on a network that is only described.

`interface` is ddl_plan.h in Python; `network` describes networks, in files too; `report` and `picture` show the
results; `forestcoll` computes the optimum of small graphs; `scaling` simulates data-parallel training on 4 to 256 GPUs,
and `published` on published systems. Nothing here touches a network, MPI or a GPU.
"""
