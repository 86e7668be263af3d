"""The launcher `ddlrun`: it finds the machine, plans the job, and lets MPI run it.

Planning is pure and knows no process, file or clock: `dimensions`, `layout`, `rankfile`, `network`, `environment`,
`command`, `reports`. `machine` and `hosts` turn what a system shows into plain data; `run`, `reach`, `process`
and `folders` have the effects.
"""
