#!/usr/bin/env bash
# Compiles a program against libddl, and runs it in four ranks that MPI starts.
set -euo pipefail

# A test's machine may have fewer cores than ranks, be root's (a container), and have no ssh.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe PRTE_MCA_plm_ssh_agent=false

cat >sum.c <<'EOF'
#include <ddl.h>
#include <stdio.h>

int main(void) {
    int rank = -1;
    double mine = 0, sum = 0;
    int wrong = ddl_init("-mode m") || ddl_rank(DDL_WORLD, &rank);
    mine = rank + 1;
    wrong = wrong || ddl_allreduce(&mine, &sum, 1, DDL_FLOAT64, DDL_SUM, DDL_WORLD);
    if (wrong) fprintf(stderr, "%s\n", ddl_last_error());
    if (rank == 0) printf("sum %g\n", sum);
    return wrong || ddl_finalize();
}
EOF
"$CXX" -x c -c sum.c -I"$PREFIX/include"
"$CXX" sum.o -o sum -L"$PREFIX/lib" -lddl -Wl,-rpath,"$PREFIX/lib"
out=$(mpirun -np 4 ./sum)
echo "$out"
[[ $out == *"sum 10"* ]]
