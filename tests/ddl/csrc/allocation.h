// Replaces operator new of the whole program by one that can be told to fail.
#pragma once

#include <cstdint>

// Lets `after` more allocations succeed, and the `count` next ones fail.
void fail_allocations(int64_t after, int64_t count);
// All succeed from now on. True if one has failed since fail_allocations().
bool stop_failing();
