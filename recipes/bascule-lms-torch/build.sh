#!/usr/bin/env bash
# The page pool and the saved-tensor hooks, into the package lms: the two new files in $PREFIX are this package.
set -euxo pipefail
export PYTHONDONTWRITEBYTECODE=1 # a compiled module of another package would be a new file, too

rm -f lms/native/*.so # which a builder that copies all takes along from a tree with a .venv
# conda's flags say where its PyTorch has headers and libraries.
CXX="$CXX ${CXXFLAGS:-} -isystem $PREFIX/include/torch/csrc/api/include ${LDFLAGS:-}" "$PYTHON" -m lms.build torch
package=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/lms
install -D -t "$package/native" lms/native/page_pool-*.so lms/native/native_hooks-*.so
