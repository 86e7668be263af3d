#!/usr/bin/env bash
# libddl's plugin for the MPI of $PREFIX, and the program that `ddlrun bench` times that MPI with.
set -euxo pipefail

wrapper=$PREFIX/bin/mpicxx
if [[ ${CONDA_BUILD_CROSS_COMPILATION:-0} == 1 ]]; then # the wrapper that runs here, for the MPI of $PREFIX
    wrapper=$BUILD_PREFIX/bin/mpicxx
    export OPAL_PREFIX=$PREFIX
fi
# The wrapper of the MPI names a compiler of its own, which need not be the one of this build.
export OMPI_CXX=$CXX MPICH_CXX=$CXX

# shellcheck disable=SC2086 # conda's compilers give several arguments
cmake -S . -B build -G Ninja \
    -DCMAKE_BUILD_TYPE=Release -DCMAKE_INSTALL_PREFIX="$PREFIX" -DCMAKE_INSTALL_LIBDIR=lib ${CMAKE_ARGS:-} \
    -DDDL_MPI=ON -DDDL_TESTS=OFF -DMPI_CXX_COMPILER="$wrapper"
cmake --build build --target ddl_mpi bench_mpi --parallel "${CPU_COUNT:-2}"
cmake --install build --component mpi
