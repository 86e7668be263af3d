#!/usr/bin/env bash
# Compiles allreduce.c as a user's program would be, and runs it in four ranks.
set -euo pipefail

# A test's machine may have fewer cores than ranks, be root's (a container), and have no ssh.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe PRTE_MCA_plm_ssh_agent=false

"$CXX" -x c -std=c11 -Wall -Werror -c allreduce.c -I"$PREFIX/include" # the interface is C's
"$CXX" allreduce.o -o allreduce -L"$PREFIX/lib" -lddl -Wl,-rpath,"$PREFIX/lib"
out=$(mpirun -np 4 ./allreduce)
echo "$out"
[[ $out == *"4 ranks agree"* ]]
