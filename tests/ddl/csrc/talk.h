// Ranks as threads of this process, each with a bootstrap over the in-process network.
#pragma once

#include <functional>
#include <new>
#include <thread>
#include <vector>

#include "base/status.h"
#include "local_transport.h"
#include "transport/bootstrap.h"

inline ddl::BootstrapOptions talk_options(std::vector<std::string> hosts = {"a", "b", "c", "d", "e", "f", "g", "h"}) {
    ddl::BootstrapOptions options;
    options.what = "the test";
    options.patience = {30, 60, 100};
    options.hosts = std::move(hosts);
    options.spins = 0;  // ranks outnumber cores here
    return options;
}

// Runs `body` for each rank on a thread of its own; how it ended on each.
inline std::vector<ddl::Status> talk(ddl::LocalNetwork& network, const std::function<void(ddl::Bootstrap&)>& body,
                                     const ddl::BootstrapOptions& options = talk_options()) {
    std::vector<std::unique_ptr<ddl::Transport>> transports;
    const int size = network.size();
    for (int rank = 0; rank < size; ++rank) transports.push_back(network.transport(rank));
    std::vector<ddl::Status> ends(transports.size());
    std::vector<std::thread> threads;
    for (size_t rank = 0; rank < transports.size(); ++rank) {
        threads.emplace_back([&, rank] {
            ddl::Bootstrap bootstrap(*transports[rank], options);
            try {
                bootstrap.run([&] { body(bootstrap); });
            } catch (const ddl::Error& error) {
                ends[rank] = error.status();
            } catch (const std::bad_alloc&) {
                ends[rank].code = DDL_ERROR_MEMORY;
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    return ends;
}
