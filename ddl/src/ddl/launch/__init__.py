"""The launcher `ddlrun`: it finds the machine, plans the job, and lets MPI run it.

Planning is pure and knows no process, file or clock: `options`, `hosts`, `dimensions`, `layout`, `rankfile`, `network`,
`environment`, `job`, `command`, `checks`. `mpi`, `machine`, `routes` and `probe` turn what a system shows into plain
data. While a job runs, `reports` keeps what the ranks have said and `watch` what its hosts have; `guard` is the program
at their end, `reception` where it comes in. `run`, `reach`, `process`, `folders` and `console` have the effects.
"""
