// Ranks that are threads of one process meet over TCP, through a store that is a map.
#include <poll.h>
#include <sys/socket.h>

#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>

#include "base/status.h"
#include "check.h"
#include "startup/tcp_rendezvous.h"

using namespace ddl;

namespace {

struct Store {
    std::mutex mutex;
    std::condition_variable changed;
    std::map<std::string, std::string> values;
    int sets = 0, gets = 0;

    Membership member(int rank, int size) {
        Membership made;
        made.rank = rank;
        made.size = size;
        made.set = [this](const std::string& key, const std::string& value) {
            const std::lock_guard lock(mutex);
            ++sets;
            values[key] = value;
            changed.notify_all();
            return true;
        };
        made.get = [this](const std::string& key, std::string* value, double seconds) {
            std::unique_lock lock(mutex);
            ++gets;
            const auto is_there = [&] { return values.count(key) == 1; };
            if (!changed.wait_for(lock, std::chrono::duration<double>(seconds), is_there)) return false;
            *value = values[key];
            return true;
        };
        return made;
    }
};

// What each rank gets from meet().
std::vector<std::vector<Socket>> meet_all(Store& store, int size) {
    std::vector<std::vector<Socket>> all(static_cast<size_t>(size));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
        threads.emplace_back([&, rank] {
            try {
                all[static_cast<size_t>(rank)] = meet(store.member(rank, size), 0, 60);
            } catch (const Error& error) {
                check::failed(__FILE__, __LINE__, error.what());
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    return all;
}

// True if each rank has one connection to each other, and that rank is at its end.
bool are_connected(const std::vector<std::vector<Socket>>& all) {
    for (size_t rank = 0; rank < all.size(); ++rank) {
        for (size_t other = 0; other < all.size(); ++other) {
            if (other == rank) continue;
            if (all[rank].size() != all.size()) return false;
            const auto name = static_cast<unsigned char>(rank);
            if (send(all[rank][other].fd(), &name, 1, MSG_NOSIGNAL) != 1) return false;
        }
    }
    for (size_t rank = 0; rank < all.size(); ++rank) {
        for (size_t other = 0; other < all.size(); ++other) {
            if (other == rank) continue;
            unsigned char name = 255;
            pollfd wait{all[rank][other].fd(), POLLIN, 0};
            poll(&wait, 1, 10000);
            if (recv(wait.fd, &name, 1, 0) != 1 || name != other) return false;
        }
    }
    return true;
}

}  // namespace

TEST("ranks that meet have a connection to each other, and ask the store as often as there are ranks") {
    const int size = check::kSanitized ? 12 : 48;
    Store store;
    CHECK(are_connected(meet_all(store, size)));
    CHECK_EQ(store.sets, 1);
    CHECK_EQ(store.gets, size - 1);
}

TEST("ranks that find the address of a job before theirs in the store ask again") {
    Store store;
    // Nobody listens there, or somebody does who is no rank: a listener that answers nothing.
    uint16_t port = 0;
    const Socket silent = listen_at("127.0.0.1", &port);
    std::vector<std::vector<Socket>> all(2);
    store.values["ddl/rendezvous/0"] = "old ? 127.0.0.1 1 127.0.0.1 " + std::to_string(port) + " ";
    std::thread second([&] { all[1] = meet(store.member(1, 2), 0, 60); });
    for (bool waits = true; waits;) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
        const std::lock_guard lock(store.mutex);
        waits = store.gets == 0;
    }
    all[0] = meet(store.member(0, 2), 0, 60);
    second.join();
    CHECK(are_connected(all));
    CHECK(store.gets > 1);
}
