// The end of an epoch over TCP: who is alive, and the connections among them, for the next one.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/patience.h"
#include "transport/heartbeats.h"
#include "transport/transport_tcp.h"

namespace ddl {

struct Survivors {
    std::vector<int> ranks;          // ascending, with this one; others may have died since
    std::vector<TcpStream> streams;  // to each of them; none to this rank, and to those that have died since
};

struct SurvivorOptions {
    Patience patience;
    std::function<Death(int rank)> death_of;  // as far as heartbeats tell
    std::function<void(const std::string&)> warn;
};

// Collective over the ranks that are alive; blocks. `transport` is closed afterwards, also by an error. No message of
// its reaches the streams. Throws Error: DDL_ERROR_TIMEOUT names who does not call it, DDL_ERROR_PEER_LOST: this rank
// was cut off.
Survivors agree_on_survivors(TcpTransport& transport, const SurvivorOptions& options);

}  // namespace ddl
