#!/usr/bin/env bash
# Compiles allreduce.c as a user's program would be, and runs it in four ranks that meet over TCP.
set -euo pipefail

grep -x "Libs: -L\${libdir} -lddl" "$PREFIX/lib/pkgconfig/ddl.pc"
cmake -S . -B build -G Ninja -DCMAKE_PREFIX_PATH="$PREFIX" -DCMAKE_C_FLAGS="-Wall -Werror"
cmake --build build
export WORLD_SIZE=4 MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + RANDOM % 10000)) DDL_TIMEOUT=60
for rank in 1 2 3; do RANK=$rank build/allreduce & done
out=$(RANK=0 build/allreduce)
wait
echo "$out"
[[ $out == *"4 ranks agree"* ]]
