// A job as its launcher's variables describe it: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
#pragma once

#include "startup/tcp_rendezvous.h"

namespace ddl {

// True if all four are set.
bool is_in_environment();
// Who takes part. The store is rank 0's own, at that address and port. Throws Error(DDL_ERROR_ARGUMENT) if a variable
// cannot be read.
Membership membership_of_environment();

}  // namespace ddl
