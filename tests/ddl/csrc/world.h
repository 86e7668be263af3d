// Ranks as threads of this process, each with an engine over the in-process network.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "check.h"
#include "engine/engine.h"
#include "hosts.h"
#include "local_transport.h"

// A test for waiters that do not spin, as where ranks outnumber cores, and for some that do: only they stay in the
// engine for a moment when a blocking call begins (Engine::run_alone). TEST_WITH_SPINS("a sentence") { ... spins ... }
#define TEST_WITH_SPINS(name)                                                                  \
    static void CHECK_NAME_(test_, __LINE__)(int spins);                                       \
    static const check::Registration CHECK_NAME_(registration_, __LINE__)(__FILE__, name, [] { \
        for (const int spins : {0, 50}) CHECK_NAME_(test_, __LINE__)(spins);                   \
    });                                                                                        \
    static void CHECK_NAME_(test_, __LINE__)(int spins)

// Options for tests: short times, and no spinning, as ranks outnumber cores here.
inline ddl::EngineOptions test_options(int spins = 0) {
    ddl::EngineOptions options;
    options.spin_polls = spins;
    options.warn = [](const std::string&) {};
    options.patience = {30, 60, 100};  // faults set their own; a sanitizer's slowness is none
    return options;
}

class World {
  public:
    World(int size, ddl::Plan plan, const ddl::EngineOptions& options = test_options()) : network(size) {
        for (int rank = 0; rank < size; ++rank) {
            engines.push_back(std::make_unique<ddl::Engine>(network.transport(rank), plan, options));
        }
    }
    // Ranks that share memory with those of their host.
    World(const std::vector<int>& host_of, ddl::Plan plan, const ddl::EngineOptions& options = test_options(),
          size_t pipe_bytes = 0)
        : network(static_cast<int>(host_of.size())) {
        for (auto& transport : shared_transports(network, host_of, pipe_bytes)) {
            engines.push_back(std::make_unique<ddl::Engine>(std::move(transport), plan, options));
        }
    }

    // Calls body(rank, engine) on a thread for each rank, and joins them.
    void run(const std::function<void(int, ddl::Engine&)>& body) {
        std::vector<std::thread> threads;
        for (size_t rank = 0; rank < engines.size(); ++rank) {
            threads.emplace_back([&, rank] { body(static_cast<int>(rank), *engines[rank]); });
        }
        for (std::thread& thread : threads) thread.join();
    }

    ddl::LocalNetwork network;
    std::vector<std::unique_ptr<ddl::Engine>> engines;
};
