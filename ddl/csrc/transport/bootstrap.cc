#include "transport/bootstrap.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <utility>

#include "base/rank_list.h"
#include "base/status.h"

namespace ddl {
namespace {

constexpr double kLookSeconds = 1e-3;   // between looks for deaths and for errors of others
constexpr double kWaitSeconds = 20e-3;  // the longest wait for messages
constexpr double kReachSeconds = 2;     // in which those that this rank waits for connect to it, if they are there

// A notice by which a rank tells that it gives up. The engine's have another first word.
constexpr uint32_t kMagic = 0x50414c53;
struct Failure {
    uint32_t magic = kMagic;
    int32_t code = 0;
    char text[kNoticeBytes - 8] = "";
};
static_assert(sizeof(Failure) == kNoticeBytes);

// Memory that a transport may still use, until the process ends.
void keep_for_ever(Block memory) {
    static std::mutex mutex;
    static auto* const kept = new std::vector<Block>;
    const std::lock_guard lock(mutex);
    kept->push_back(std::move(memory));
}

}  // namespace

Bootstrap::Bootstrap(Transport& transport, BootstrapOptions options)
    : transport_(transport), options_(std::move(options)) {}

Bootstrap::~Bootstrap() {
    for (Open& one : open_) {
        if (!transport_.cancel(one.ticket) && one.memory) keep_for_ever(std::move(one.memory));
    }
}

std::string Bootstrap::name(int rank) const {
    const std::string number = "rank " + std::to_string(rank);
    return options_.hosts.empty() ? number : number + " (host " + host(rank) + ")";
}

std::string Bootstrap::host(int rank) const {
    return options_.hosts.empty() ? "" : options_.hosts[static_cast<size_t>(rank)];
}

void Bootstrap::run(const std::function<void()>& body) {
    try {
        body();
    } catch (const Error& error) {
        give_up(error.code(), error.what());
        throw;
    } catch (const std::bad_alloc&) {
        char text[128];
        std::snprintf(text, sizeof text, "%s: rank %d is out of memory", options_.what.c_str(), rank());
        give_up(DDL_ERROR_MEMORY, text);
        throw;
    }
}

// Ends the others' waits.
void Bootstrap::give_up(int code, const char* text) noexcept {
    Failure failure;
    failure.code = code;
    std::strncpy(failure.text, text, sizeof failure.text - 1);
    try {
        std::vector<int> all(static_cast<size_t>(size()));
        std::iota(all.begin(), all.end(), 0);
        transport_.tell(all, &failure, sizeof failure);
    } catch (const std::bad_alloc&) {
        // Their waits end in time.
    }
}

void Bootstrap::look_around() {
    for (Notice notice; transport_.next_notice(&notice);) {
        Failure failure;
        if (notice.content.size() == sizeof failure) std::memcpy(&failure, notice.content.data(), sizeof failure);
        if (notice.content.size() != sizeof failure || failure.magic != kMagic) {
            foreign_.push_back(std::move(notice));
            continue;
        }
        failure.text[sizeof failure.text - 1] = '\0';
        throw Error(static_cast<Code>(failure.code), failure.text);
    }
    for (int peer = 0; peer < size(); ++peer) {
        if (!transport_.is_dead(peer)) continue;
        throw Error(DDL_ERROR_PEER_LOST, options_.what + ": " + name(peer) + " died");
    }
}

void Bootstrap::await(const std::function<std::vector<int>()>& whom, const std::function<bool()>& done,
                      double grace_seconds) {
    const double begin = seconds_now();
    bool warned = false;
    Backoff backoff(options_.spins, options_.nap_seconds);
    const auto pause = [&] {
        if (!backoff.gives_way() && !transport_.wait(kWaitSeconds)) backoff.nap();
    };
    for (;; pause()) {
        transport_.poll();
        if (done()) return;
        if (std::exchange(moved_, false)) backoff.reset();
        const double now = seconds_now();
        if (now < next_look_) continue;
        next_look_ = now + kLookSeconds;
        look_around();
        const double waited = now - begin;
        const std::vector<int> ranks = whom();
        if (waited > kReachSeconds) transport_.reach(ranks);
        for (const int peer : ranks) {
            if (transport_.has_left(peer))
                throw Error(DDL_ERROR_PEER_LOST, options_.what + ": " + name(peer) + " left");
        }
        const std::string text = options_.what + ": " + name(rank()) + " has waited " +
                                 std::to_string(std::lround(waited)) + " s for " +
                                 (ranks.size() == 1 ? name(ranks[0]) : name_list(ranks));
        if (!warned && waited > options_.patience.warn_seconds + grace_seconds) {
            warned = true;
            if (options_.warn) options_.warn(text);
        }
        if (waited <= options_.patience.timeout_seconds + grace_seconds) continue;
        throw Error(DDL_ERROR_TIMEOUT, text + ": not started, stopped, or its link is down. " + kPatienceOfInit);
    }
}

Ticket Bootstrap::send(int peer, Tag tag, const void* data, size_t bytes) {
    open_.push_back({transport_.isend(peer, tag, data, bytes), nullptr, nullptr});
    return open_.back().ticket;
}

Ticket Bootstrap::receive(int peer, Tag tag, void* data, size_t capacity) {
    open_.push_back({transport_.irecv(peer, tag, data, capacity), nullptr, nullptr});
    return open_.back().ticket;
}

std::vector<Bootstrap::Open>::iterator Bootstrap::find(Ticket ticket) {
    return std::find_if(open_.begin(), open_.end(), [&](const Open& one) { return one.ticket == ticket; });
}

bool Bootstrap::finished(Ticket ticket, size_t* received) {
    size_t length = 0;
    const Progress progress = transport_.test(ticket, &length);
    if (progress == Progress::pending) return false;
    const auto found = find(ticket);
    if (progress == Progress::done && found->target && length > 0)
        std::memcpy(found->target, found->memory.get(), length);
    open_.erase(found);
    if (progress == Progress::failed) {
        throw Error(DDL_ERROR_TRANSPORT, options_.what + ": a message of " + name(rank()) + " failed");
    }
    if (received) *received = length;
    moved_ = true;
    return true;
}

bool Bootstrap::cancel(Ticket ticket) {
    const auto found = find(ticket);
    if (found == open_.end()) return true;  // it failed
    open_.erase(found);
    return transport_.cancel(ticket);
}

void Bootstrap::keep(Block memory) { keep_for_ever(std::move(memory)); }

void Bootstrap::say(int peer, Tag tag, const void* data, size_t bytes) {
    // A copy: if an error ends the wait, MPI cannot take back what it has begun to send.
    Block memory(new std::byte[bytes]);
    if (bytes > 0) std::memcpy(memory.get(), data, bytes);
    const Ticket ticket = send(peer, tag, memory.get(), bytes);
    open_.back().memory = std::move(memory);
    await(peer, [&] { return finished(ticket); });
}

Ticket Bootstrap::expect(int peer, Tag tag, void* data, size_t capacity) {
    Block memory(new std::byte[capacity]);
    const Ticket ticket = receive(peer, tag, memory.get(), capacity);
    open_.back().memory = std::move(memory);
    open_.back().target = data;
    return ticket;
}

size_t Bootstrap::hear(int peer, Tag tag, void* data, size_t capacity, double grace_seconds) {
    const Ticket ticket = expect(peer, tag, data, capacity);
    size_t received = 0;
    await(peer, [&] { return finished(ticket, &received); }, grace_seconds);
    return received;
}

// Dissemination: Hensgen, Finkel, Manber 1988.
void Bootstrap::barrier(const std::vector<int>& members, Tag tag) {
    const auto count = members.size();
    const auto at = static_cast<size_t>(std::find(members.begin(), members.end(), rank()) - members.begin());
    for (size_t distance = 1; distance < count; distance *= 2) {
        const int to = members[(at + distance) % count], from = members[(at + count - distance) % count];
        const Ticket out = send(to, tag, nullptr, 0), in = receive(from, tag, nullptr, 0);
        await(from, [&] { return finished(in); });
        await(to, [&] { return finished(out); });
    }
}

// A binomial tree; first the length, as nobody else knows it.
void Bootstrap::broadcast(std::vector<std::byte>& data, Tag tag, double grace_seconds) {
    int below = 1;
    while (below < size() && (rank() & below) == 0) below *= 2;
    uint64_t bytes = data.size();
    if (rank() != 0) {
        const int parent = rank() - below;
        hear(parent, tag, &bytes, sizeof bytes, grace_seconds);
        data.resize(bytes);
        hear(parent, tag + 1, data.data(), bytes);
    }
    for (below /= 2; below > 0; below /= 2) {
        const int child = rank() + below;
        if (child >= size()) continue;
        say(child, tag, &bytes, sizeof bytes);
        say(child, tag + 1, data.data(), bytes);
    }
}

}  // namespace ddl
