#!/usr/bin/env bash
# The Python side of DDL, over the libddl that lies in $PREFIX: nothing is compiled here.
set -euxo pipefail

"$PYTHON" -m pip install . --no-deps --no-build-isolation -vv --config-settings=wheel.cmake=false

# Where the package looks for its library, its headers and the programs of `ddlrun bench`: links to libddl's own files,
# so that a process that also links with libddl holds it once.
package=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/ddl
ln -s ../../../libddl.so "$package/libddl.so"
mkdir -p "$package/bench" "$package/include"
for program in bench_ddl bench_mpi; do
    ln -s "../../../../../libexec/ddl/$program" "$package/bench/$program"
done
install -m 644 csrc/bench/allreduce.cc "$package/bench" # for another MPI's compiler wrapper
for header in ddl.h ddl_plan.h; do
    ln -s "../../../../../include/$header" "$package/include/$header"
done
