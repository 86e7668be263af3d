// A job as its launcher's variables describe it: RANK and WORLD_SIZE; MASTER_ADDR and MASTER_PORT, or DDL_RENDEZVOUS,
// HOST:PORT, which leaves that port to the program; and DDL_SECRET, which its processes prove that they know.
#pragma once

#include "startup/tcp_rendezvous.h"

namespace ddl {

// True if a rank, a size and a place to meet are set.
bool is_in_environment();
// The store is rank 0's own, at that address and port. A process that `joins` needs no rank and size. Throws
// Error(DDL_ERROR_ARGUMENT) if a variable is missing or cannot be read.
Start start_of_environment(bool joins);

}  // namespace ddl
