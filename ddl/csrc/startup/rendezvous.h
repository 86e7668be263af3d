// The rendezvous at the start of ddl_init: every rank learns who is there and whether all ask for the same.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/cores.h"
#include "base/patience.h"
#include "transport/connector.h"
#include "transport/transport.h"

namespace ddl {

// What a rank says about itself. On the wire as it stands.
struct Greeting {
    uint64_t token = 0;  // random; rank 0's names this job to the heartbeats
    int32_t version = 0;
    int32_t round = 0;    // ddl_init calls of this process before this one
    int64_t origin = -1;  // the epoch in which the links were measured that it plans with; -1: none
    int32_t process = 0;
    char host[256] = "";
    char place[320] = "";  // equal on ranks that share a host, and the loopback interface
    char options[512] = "";
    char contact[kMostContact + 1] = "";  // where its heartbeats listen
    CoreSet cores;
};

// The greeting of every rank. Collective; blocks. The caller uses `transport` for nothing else meanwhile, and after an
// error not again. Names in a warning, then in an Error (DDL_ERROR_TIMEOUT), who has not called ddl_init;
// DDL_ERROR_PEER_LOST if a rank died, and DDL_ERROR_MISMATCH if versions, options or rounds differ, naming both ranks.
std::vector<Greeting> call_roll(Transport& transport, const Greeting& mine, const Patience& patience,
                                const std::function<void(const std::string&)>& warn);

}  // namespace ddl
