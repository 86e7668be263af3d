#!/usr/bin/env bash
# libddl for the MPI of $PREFIX: the library with its links, and the headers.
set -euxo pipefail

# The wrapper of the MPI names a compiler of its own, which need not be the one of this build.
export OMPI_CXX=$CXX MPICH_CXX=$CXX

cmake -S . -B build -G Ninja \
    -DCMAKE_BUILD_TYPE=Release \
    -DCMAKE_INSTALL_PREFIX="$PREFIX" \
    -DCMAKE_INSTALL_LIBDIR=lib \
    -DDDL_MPI=ON \
    -DDDL_TESTS=OFF \
    -DMPI_CXX_COMPILER="$PREFIX/bin/mpicxx"
cmake --build build --parallel "${CPU_COUNT:-2}"
cmake --install build

# What `ddlrun bench` times. They lie where no user's PATH finds them; the package ddl links to them.
install -D -t "$PREFIX/libexec/ddl" build/bench_ddl build/bench_mpi
