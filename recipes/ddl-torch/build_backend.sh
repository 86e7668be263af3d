#!/usr/bin/env bash
# The backend in C++, into the package ddl that lies in $PREFIX: the one file that is new is this package.
set -euxo pipefail
export PYTHONDONTWRITEBYTECODE=1 # a compiled module of another package would be a new file, too

# conda's flags say where its PyTorch has headers and libraries.
CXX="$CXX ${CXXFLAGS:-} -isystem $PREFIX/include/torch/csrc/api/include ${LDFLAGS:-}" "$PYTHON" -m ddl.build torch
