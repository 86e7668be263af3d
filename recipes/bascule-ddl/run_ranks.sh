#!/usr/bin/env bash
# Four ranks reduce, over the MPI that is there; `ddlrun bench` finds its programs, which are libddl's.
set -euxo pipefail

ddlrun --version
ddlrun -np 4 python allreduce.py
ddlrun bench -np 2 --compare --only default --sizes 4KiB --rounds 1 --seconds 0.05
