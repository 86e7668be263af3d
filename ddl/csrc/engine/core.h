// What the parts of an engine stand on: transport, mailbox, table of communicators and lock; and how calls end,
// finished or with their communicator, which an error breaks.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <type_traits>
#include <vector>

#include "base/patience.h"
#include "engine/mailbox.h"
#include "engine/table.h"
#include "engine/tally.h"

namespace ddl {

struct EngineOptions {
    Patience patience;
    Tuning tuning;
    // Chunks of a communicator in flight, beside one of each later call; at least 8 let the tiers overlap.
    int window = 16;
    int concurrent = 4;           // collectives of a communicator in flight; later ones wait
    int spin_polls = 50;          // polls without progress before a waiter yields its core; 0 if ranks outnumber cores
    double nap_seconds = 200e-6;  // longest sleep between polls with work in flight
    // After an error, how long a request is held back for messages that are half in its buffers and cannot be taken
    // back, if their senders are not dead. What comes later may still write there.
    double settle_seconds = 2;
    // Plans a communicator of some of the world's ranks, on any thread; default: plan_of_part().
    std::function<Plan(const Plan& world, const std::vector<int>& members)> plan_part;
    std::vector<std::string> hosts;                // host of each rank of the world, for messages; may be empty
    std::function<void(const std::string&)> warn;  // gets warnings, one line each, on any thread; default: stderr
    std::vector<Notice> early;  // notices that others' engines have sent before there was this one, in their order
};

class Core {
  public:
    Core(std::unique_ptr<Transport> transport, EngineOptions options);

    const std::string& name(int rank) const { return names[static_cast<size_t>(rank)]; }
    const std::string& own_name() const { return name(transport->rank()); }
    // An error's cause. `text`: a string, or a function that makes one.
    template <typename Text>
    Cause cause(Code code, const Text& text) const noexcept {
        try {
            if constexpr (std::is_invocable_v<Text>) {
                return std::make_shared<const Status>(Status{code, text()});
            } else {
                return std::make_shared<const Status>(Status{code, text});
            }
        } catch (const std::bad_alloc&) {
            return out_of_memory;
        }
    }

    // Requests that were begun, and that are not finished. Needs no lock; what follows needs the progress lock.
    size_t pending() const { return pending_; }
    void begin(size_t number) noexcept { count(static_cast<ptrdiff_t>(number)); }
    void finish(RequestPtr& request, Cause error) noexcept;
    // Breaks a communicator: what is in flight on it ends with `cause`, and so does all that is called later.
    void break_comm(Communicator& comm, Cause cause, bool tell_others = true) noexcept;
    // Ends the requests of a broken communicator as soon as their buffers are the callers' again, and keeps each
    // operation until the transport has done with its memory. True if something ended.
    bool settle(Communicator& comm) noexcept;
    // Leaves it for good: breaks it if something is in flight, and says goodbye.
    void leave(Communicator& comm) noexcept;
    // Ends the requests that are left, and leaves to the transport the memory that it still uses: for ever.
    void abandon(Communicator& comm) noexcept;
    // Sends a notice to these ranks of the world. It may be lost: those who miss one ask.
    void tell(const std::vector<int>& members, const NoticeContent& notice) const noexcept;

    const std::unique_ptr<Transport> transport;
    const EngineOptions options;
    const std::vector<std::string> names;  // "rank 3 (host b)", of each rank of the world
    const Cause out_of_memory;             // made while there is some
    std::atomic<bool> shut{false};         // Engine::shutdown() was called
    // Guards the transport, what communicators do, and all that says so. Engine says in which order locks are taken.
    mutable std::mutex progress;
    ScratchPool pool;
    Mailbox mailbox;
    Table table;
    Tally tally;
    std::vector<std::string> warnings;  // said when the lock is released

  private:
    // Not an addition of the processor's, which would take as long as a lock: all who write hold one.
    void count(ptrdiff_t number) noexcept {
        const size_t now = pending_.load(std::memory_order_relaxed) + static_cast<size_t>(number);
        pending_.store(now, std::memory_order_release);
    }
    std::atomic<size_t> pending_{0};
};

}  // namespace ddl
