// A job as its launcher's variables describe it: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
#pragma once

#include "startup/tcp_rendezvous.h"

namespace ddl {

// True if all four are set.
bool is_in_environment();
// The store is rank 0's own, at that address and port. A process that `joins` needs only these two variables. Throws
// Error(DDL_ERROR_ARGUMENT) if a variable is missing or cannot be read.
Start start_of_environment(bool joins);

}  // namespace ddl
