// How the ranks of a job that no MPI started find one another: rank 0 leaves its addresses and a token in a store, the
// others connect to it, and it tells each at which addresses all listen. Both ends of a connection prove that they know
// the token. Other pairs connect when the first message passes between them.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "ddl.h"
#include "transport/transport_tcp.h"

namespace ddl {

// How a process that MPI did not start comes to its job: as one of its first ranks, or later.
struct Start {
    int rank = 0, size = 1;  // not if it joins later
    bool joins = false;
    std::string secret;  // with which the job's processes were started; may be empty
    // The store.
    std::function<bool(const std::string& key, const std::string& value)> set;
    // False: not set within so many seconds. Throws Error.
    std::function<bool(const std::string& key, std::string* value, double seconds)> get;

    // What the job's processes prove to one another that they know. Whoever reads the store knows its token, but not
    // the secret.
    std::string key(const std::string& token) const;
};

// DDL_SECRET, or nothing.
std::string secret_of_environment();

// A caller's. The structure and its context must live as long as the result. Throws Error(DDL_ERROR_ARGUMENT).
Start start_of(const ddl_membership& given, bool joins);

// A secret that nobody guesses.
std::string new_token();

// The connections of rank 0 to all others, and what makes those among the others. Collective; blocks. `round` counts
// these calls of a process. Throws Error: DDL_ERROR_TIMEOUT after so many seconds, which names the ranks that did not
// come.
TcpLinks meet(const Start& start, int round, double timeout_seconds,
              const std::function<void(const std::string&)>& warn);

}  // namespace ddl
