#!/usr/bin/env bash
# libddl, which needs no MPI: the library with its links, and the headers.
set -euxo pipefail

# As conda-forge's compilers say it. A builder shortens the path in place; to lengthen a short one takes patchelf.
export LDFLAGS="${LDFLAGS:-} -Wl,-rpath,$PREFIX/lib"

cmake -S . -B build -G Ninja \
    -DCMAKE_BUILD_TYPE=Release \
    -DCMAKE_INSTALL_PREFIX="$PREFIX" \
    -DCMAKE_INSTALL_LIBDIR=lib \
    -DDDL_MPI=OFF \
    -DDDL_TESTS=OFF
cmake --build build --parallel "${CPU_COUNT:-2}"
cmake --install build

# What `ddlrun bench` times. It lies where no user's PATH finds it; the package ddl links to it.
install -D -t "$PREFIX/libexec/ddl" build/bench_ddl
