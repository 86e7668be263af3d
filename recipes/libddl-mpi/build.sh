#!/usr/bin/env bash
# libddl's plugin for the MPI of $PREFIX, and the program that `ddlrun bench` times that MPI with.
set -euxo pipefail

# The wrapper of the MPI names a compiler of its own, which need not be the one of this build.
export OMPI_CXX=$CXX MPICH_CXX=$CXX

cmake -S . -B build -G Ninja \
    -DCMAKE_BUILD_TYPE=Release \
    -DDDL_MPI=ON \
    -DDDL_TESTS=OFF \
    -DMPI_CXX_COMPILER="$PREFIX/bin/mpicxx"
cmake --build build --target ddl_mpi bench_mpi --parallel "${CPU_COUNT:-2}"
install -D -t "$PREFIX/lib" build/libddl_mpi.so
install -D -t "$PREFIX/libexec/ddl" build/bench_mpi
