#!/usr/bin/env bash
# Compiles allreduce.c as a user's program would be, and runs it in four ranks that meet over TCP.
set -euo pipefail

"$CXX" -x c -std=c11 -Wall -Werror -c allreduce.c -I"$PREFIX/include" # the interface is C's
"$CXX" allreduce.o -o allreduce -L"$PREFIX/lib" -lddl -Wl,-rpath,"$PREFIX/lib"
export WORLD_SIZE=4 MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + RANDOM % 10000)) DDL_TIMEOUT=60
for rank in 1 2 3; do RANK=$rank ./allreduce & done
out=$(RANK=0 ./allreduce)
wait
echo "$out"
[[ $out == *"4 ranks agree"* ]]
