// The end of an epoch over TCP: who is alive and who is taken in, and the connections among those that were there.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/patience.h"
#include "transport/heartbeats.h"
#include "transport/transport_tcp.h"

namespace ddl {

struct Survivors {
    std::vector<int> ranks;  // ascending, with this one; others may have died since
    TcpLinks links;
    uint64_t newcomers = 0;  // of the last offer: a bit for each that is taken in
    int ballot = -1;         // as Agreement has it
};

struct SurvivorOptions {
    Patience patience;
    std::function<Death(int rank)> death_of;  // as far as heartbeats tell
    std::function<void(const std::string&)> warn;
    // As Agreement::Links has them.
    std::function<std::string()> offer = [] { return std::string(); };
    std::function<bool(const std::string& offer, uint64_t* ready)> prepare = [](auto&&...) { return true; };
};

// Collective over the ranks that are alive; blocks. `transport` is closed afterwards, also by an error. No message of
// its reaches the next epoch. Throws Error: DDL_ERROR_TIMEOUT names who does not call it, DDL_ERROR_PEER_LOST: this
// rank was cut off.
Survivors agree_on_survivors(TcpTransport& transport, const SurvivorOptions& options);

}  // namespace ddl
