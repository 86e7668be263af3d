"""The launcher `ddlrun`: it looks at the machine, plans the job, and lets MPI run it.

Planning is pure, without processes, files or a clock: `options`, `hosts`, `dimensions`, `layout`, `rankfile`,
`network`, `environment`, `decide`, `command`, `checks`. `mpi`, `machine`, `routes` and `probe` turn what a system shows
into plain data. While a job runs, `reports` holds what the ranks reported, and `watch` what the hosts reported. `guard`
is the program on each host that connects to `watch`, and `reception` takes these connections. `run`, `look`,
`reach`, `process`, `folders`, `leftovers` and `console` have the effects.
"""
