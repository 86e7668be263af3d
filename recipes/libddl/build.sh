#!/usr/bin/env bash
# libddl, which needs no MPI: the library with its links and headers, and what `ddlrun bench` times.
set -euxo pipefail

# As conda-forge's compilers say it. A builder shortens the path in place; to lengthen a short one takes patchelf.
export LDFLAGS="${LDFLAGS:-} -Wl,-rpath,$PREFIX/lib"

# shellcheck disable=SC2086 # conda's compilers give several arguments
cmake -S . -B build -G Ninja \
    -DCMAKE_BUILD_TYPE=Release -DCMAKE_INSTALL_PREFIX="$PREFIX" -DCMAKE_INSTALL_LIBDIR=lib ${CMAKE_ARGS:-} \
    -DDDL_MPI=OFF -DDDL_TESTS=OFF
cmake --build build --parallel "${CPU_COUNT:-2}"
cmake --install build
