// Ranks as threads of this process, each with a conversation over the in-process network.
#pragma once

#include <functional>
#include <new>
#include <thread>
#include <vector>

#include "conversation.h"
#include "status.h"
#include "transport_local.h"

inline ddl::ConversationOptions talk_options(std::vector<std::string> hosts = {"a", "b", "c", "d", "e", "f", "g",
                                                                               "h"}) {
    ddl::ConversationOptions options;
    options.what = "the test";
    options.patience = {30, 60, 100};
    options.hosts = std::move(hosts);
    options.spins = 0;  // ranks outnumber cores here
    return options;
}

// Runs `body` for each rank on a thread of its own; how it ended on each.
inline std::vector<ddl::Status> talk(ddl::LocalNetwork& network, const std::function<void(ddl::Conversation&)>& body,
                                     const ddl::ConversationOptions& options = talk_options()) {
    std::vector<std::unique_ptr<ddl::Transport>> transports;
    const int size = network.size();
    for (int rank = 0; rank < size; ++rank) transports.push_back(network.transport(rank));
    std::vector<ddl::Status> ends(transports.size());
    std::vector<std::thread> threads;
    for (size_t rank = 0; rank < transports.size(); ++rank) {
        threads.emplace_back([&, rank] {
            ddl::Conversation conversation(*transports[rank], options);
            try {
                conversation.run([&] { body(conversation); });
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
