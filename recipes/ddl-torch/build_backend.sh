#!/usr/bin/env bash
# The backend in C++, into the package ddl: the one file that is new in $PREFIX is this package.
set -euxo pipefail
export PYTHONDONTWRITEBYTECODE=1 # a compiled module of another package would be a new file, too

cd src
rm -f ddl/native/*.so # which a builder that copies all takes along from a tree with a .venv
# conda's flags say where its PyTorch has headers and libraries.
CXX="$CXX ${CXXFLAGS:-} -isystem $PREFIX/include/torch/csrc/api/include ${LDFLAGS:-}" "$PYTHON" -m ddl.build torch
package=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/ddl
install -D -t "$package/native" ddl/native/backend-*.so
