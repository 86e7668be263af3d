// Ranks as threads of this process that share memory, as those of a host do, over the in-process network.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "local_transport.h"
#include "transport/host_memory.h"
#include "transport/transport_shared.h"

using Transports = std::vector<std::unique_ptr<ddl::Transport>>;

using Wrap = std::function<std::unique_ptr<ddl::Transport>(std::unique_ptr<ddl::Transport>)>;

// The transport of each rank of the network; `host_of`: the number of each rank's host. `pipe_bytes`: 0 for what the
// number of ranks gives. `wrap`: what is put between the network's and the one that shares memory.
inline Transports shared_transports(ddl::LocalNetwork& network, const std::vector<int>& host_of, size_t pipe_bytes = 0,
                                    const Wrap& wrap = {}) {
    std::map<int, ddl::HostMemory> hosts;
    for (size_t rank = 0; rank < host_of.size(); ++rank) hosts[host_of[rank]].ranks.push_back(static_cast<int>(rank));
    for (auto& [number, host] : hosts) {
        if (host.ranks.size() < 2) continue;
        host.pipe_bytes = pipe_bytes > 0 ? pipe_bytes : ddl::pipe_bytes_for(host.ranks.size());
        host.memory = ddl::SharedMemory::create(host.bytes());
    }
    Transports made;
    for (size_t rank = 0; rank < host_of.size(); ++rank) {
        const ddl::HostMemory& host = hosts[host_of[rank]];
        auto transport = network.transport(static_cast<int>(rank));
        if (wrap) transport = wrap(std::move(transport));
        if (host.memory) transport = std::make_unique<ddl::SharedTransport>(std::move(transport), host);
        made.push_back(std::move(transport));
    }
    return made;
}

inline Transports shared_transports(ddl::LocalNetwork& network, size_t pipe_bytes = 0) {
    return shared_transports(network, std::vector<int>(static_cast<size_t>(network.size()), 0), pipe_bytes);
}
