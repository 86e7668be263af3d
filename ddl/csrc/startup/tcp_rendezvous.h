// How the ranks of a job that no MPI started find one another: rank 0 leaves its addresses and a token in a store, the
// others connect to it, and it tells each at which addresses all listen. Both ends of a connection prove that they know
// the token.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "ddl.h"
#include "transport/socket.h"

namespace ddl {

// Who takes part.
struct Membership {
    int rank = 0, size = 1;
    std::function<bool(const std::string& key, const std::string& value)> set;
    // False: not set within so many seconds. Throws Error.
    std::function<bool(const std::string& key, std::string* value, double seconds)> get;
};

// A caller's. The structure and its context must live as long as the result. Throws Error(DDL_ERROR_ARGUMENT).
Membership membership_of(const ddl_membership& given);

// A connection to each other rank; none to this one. Collective; blocks. `round` counts these calls of a process.
// Throws Error: DDL_ERROR_TIMEOUT after so many seconds, which names the ranks that did not come.
std::vector<Socket> meet(const Membership& members, int round, double timeout_seconds);

}  // namespace ddl
