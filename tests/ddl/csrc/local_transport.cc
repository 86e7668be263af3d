#include "local_transport.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <limits>
#include <map>
#include <mutex>
#include <tuple>
#include <unordered_map>

namespace ddl {
namespace {

using Clock = std::chrono::steady_clock;

// A send or a receive. Guarded by the mutex of the mailbox it is posted in, which is the receiver's.
struct Message {
    Progress state = Progress::pending;
    size_t bytes = 0;              // of a send: its length; of a receive: its capacity, then what it received
    const void* source = nullptr;  // of a send: the caller's memory or `copy`
    void* target = nullptr;        // of a receive
    std::vector<std::byte> copy;
    Clock::time_point arrives;
};
using MessagePtr = std::shared_ptr<Message>;

struct Queues {
    std::deque<MessagePtr> sends, receives;
};

struct Mailbox {
    std::mutex mutex;
    std::map<std::pair<int, Tag>, Queues> queues;  // by sender and tag
    std::deque<std::pair<Clock::time_point, Notice>> notices;

    // Gives arrived sends to the receives that wait for them. The caller holds the mutex.
    static void match(Queues& queues) {
        const auto now = Clock::now();
        while (!queues.sends.empty() && !queues.receives.empty() && queues.sends.front()->arrives <= now) {
            const MessagePtr send = queues.sends.front(), receive = queues.receives.front();
            queues.sends.pop_front();
            queues.receives.pop_front();
            const bool fits = send->bytes <= receive->bytes;
            if (fits && send->bytes > 0) std::memcpy(receive->target, send->source, send->bytes);
            receive->bytes = send->bytes;
            receive->state = fits ? Progress::done : Progress::failed;
            send->state = Progress::done;
        }
    }
};

}  // namespace

struct LocalNetwork::Shared {
    struct Rank {
        Mailbox mailbox;
        std::atomic<bool> dead{false}, silent{false};
        std::atomic<int64_t> sends_left{std::numeric_limits<int64_t>::max()};
        std::atomic<double> delay{0};
    };

    Shared(int n, size_t eager)
        : size(n), eager_bytes(eager), ranks(static_cast<size_t>(n)), cuts(ranks.size() * ranks.size()) {}

    Rank& at(int rank) { return ranks[static_cast<size_t>(rank)]; }
    std::atomic<bool>& cut(int a, int b) {
        return cuts[static_cast<size_t>(a) * ranks.size() + static_cast<size_t>(b)];
    }
    bool passes(int from, int to) {
        return !at(from).silent && !at(to).silent && !at(from).dead && !at(to).dead && !cut(from, to);
    }
    Clock::time_point arrival(int from) {
        const std::chrono::duration<double> delay(at(from).delay.load());
        return Clock::now() + std::chrono::duration_cast<Clock::duration>(delay);
    }

    const int size;
    const size_t eager_bytes;
    std::vector<Rank> ranks;
    std::vector<std::atomic<bool>> cuts;
};

class LocalTransport final : public Transport {
  public:
    LocalTransport(std::shared_ptr<LocalNetwork::Shared> shared, int rank) : shared_(std::move(shared)), rank_(rank) {}

    int rank() const override { return rank_; }
    int size() const override { return shared_->size; }

    Ticket isend(int peer, Tag tag, const void* data, size_t bytes) override {
        if (shared_->at(rank_).sends_left-- <= 0) shared_->at(rank_).dead = true;
        auto message = std::make_shared<Message>();
        message->bytes = bytes;
        message->source = data;
        message->arrives = shared_->arrival(rank_);
        if (bytes <= shared_->eager_bytes) {
            const auto* begin = static_cast<const std::byte*>(data);
            if (bytes > 0) message->copy.assign(begin, begin + bytes);
            message->source = message->copy.data();
        }
        const Ticket ticket = keep(peer, rank_, tag, message);
        // A message that does not pass is posted nowhere: a short one looks sent, a long one stays pending.
        if (shared_->passes(rank_, peer)) post(ticket, [&](Queues& queues) { queues.sends.push_back(message); });
        return ticket;
    }

    Ticket irecv(int peer, Tag tag, void* data, size_t capacity) override {
        auto message = std::make_shared<Message>();
        message->bytes = capacity;
        message->target = data;
        const Ticket ticket = keep(rank_, peer, tag, message);
        post(ticket, [&](Queues& queues) { queues.receives.push_back(message); });
        return ticket;
    }

    Progress test(Ticket ticket, size_t* received) override {
        const auto found = flights_.find(ticket);
        const Flight& flight = found->second;
        Mailbox& box = shared_->at(flight.mailbox).mailbox;
        Progress state;
        {
            const std::lock_guard lock(box.mutex);
            const auto queues = box.queues.find({flight.sender, flight.tag});
            if (queues != box.queues.end() && flight.message->state == Progress::pending)
                Mailbox::match(queues->second);
            state = flight.message->state;
            *received = flight.message->bytes;
        }
        if (state == Progress::pending && flight.sender == rank_ && flight.message->bytes <= shared_->eager_bytes) {
            state = Progress::done;  // its content was copied
        }
        if (state != Progress::pending) flights_.erase(found);
        return state;
    }

    bool cancel(Ticket ticket) override {
        const auto found = flights_.find(ticket);
        const Flight flight = std::move(found->second);
        flights_.erase(found);
        Mailbox& box = shared_->at(flight.mailbox).mailbox;
        const std::lock_guard lock(box.mutex);
        const auto queues = box.queues.find({flight.sender, flight.tag});
        if (queues == box.queues.end()) return true;  // it was posted nowhere
        auto& queue = flight.sender == rank_ ? queues->second.sends : queues->second.receives;
        queue.erase(std::remove(queue.begin(), queue.end(), flight.message), queue.end());
        return true;
    }

    void notify(int peer, const void* data, size_t bytes) override {
        if (!shared_->passes(rank_, peer)) return;
        const auto* begin = static_cast<const std::byte*>(data);
        Mailbox& box = shared_->at(peer).mailbox;
        const std::lock_guard lock(box.mutex);
        box.notices.emplace_back(shared_->arrival(rank_), Notice{rank_, {begin, begin + bytes}});
    }

    bool next_notice(Notice* notice) override {
        Mailbox& box = shared_->at(rank_).mailbox;
        const std::lock_guard lock(box.mutex);
        if (box.notices.empty() || box.notices.front().first > Clock::now()) return false;
        *notice = std::move(box.notices.front().second);
        box.notices.pop_front();
        return true;
    }

    bool is_dead(int rank) const override { return shared_->at(rank).dead; }

  private:
    struct Flight {
        int mailbox, sender;
        Tag tag;
        MessagePtr message;
    };

    Ticket keep(int mailbox, int sender, Tag tag, MessagePtr message) {
        flights_.emplace(++last_ticket_, Flight{mailbox, sender, tag, std::move(message)});
        return last_ticket_;
    }

    // Puts the message of a ticket into its queues; if there is no memory for that, the ticket is gone.
    template <typename Put>
    void post(Ticket ticket, Put put) {
        const auto found = flights_.find(ticket);
        const Flight& flight = found->second;
        Mailbox& box = shared_->at(flight.mailbox).mailbox;
        const std::lock_guard lock(box.mutex);
        try {
            Queues& queues = box.queues[{flight.sender, flight.tag}];
            put(queues);
            Mailbox::match(queues);
        } catch (const std::bad_alloc&) {
            flights_.erase(found);
            throw;
        }
    }

    std::shared_ptr<LocalNetwork::Shared> shared_;
    const int rank_;
    Ticket last_ticket_ = 0;
    std::unordered_map<Ticket, Flight> flights_;
};

LocalNetwork::LocalNetwork(int size, size_t eager_bytes) : shared_(std::make_shared<Shared>(size, eager_bytes)) {}
LocalNetwork::~LocalNetwork() = default;

int LocalNetwork::size() const { return shared_->size; }

std::unique_ptr<Transport> LocalNetwork::transport(int rank) { return std::make_unique<LocalTransport>(shared_, rank); }

void LocalNetwork::kill(int rank) { shared_->at(rank).dead = true; }
void LocalNetwork::kill_after(int rank, int messages) { shared_->at(rank).sends_left = messages; }
void LocalNetwork::silence(int rank) { shared_->at(rank).silent = true; }
void LocalNetwork::cut(int a, int b) { shared_->cut(a, b) = shared_->cut(b, a) = true; }
void LocalNetwork::delay(int rank, double seconds) { shared_->at(rank).delay = seconds; }

size_t LocalNetwork::pending() const {
    size_t count = 0;
    for (auto& rank : shared_->ranks) {
        const std::lock_guard lock(rank.mailbox.mutex);
        for (const auto& [key, queues] : rank.mailbox.queues) count += queues.sends.size() + queues.receives.size();
    }
    return count;
}

}  // namespace ddl
