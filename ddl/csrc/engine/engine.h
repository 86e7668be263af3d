// The engine: executes any number of collectives in flight, over any number of communicators, for one rank.
//
// All work is done under one lock by whoever makes progress: the engine's own thread, or a caller that waits (which
// saves small messages two switches between threads). Collectives of one communicator begin in the order of their
// submission; several may be in flight, and ranks must submit them in the same order.
//
// Errors are Statuses. A collective's error breaks its communicator on this rank, and the other members are told: every
// request on it, present and future, ends with that error on all of them.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/status.h"
#include "engine/call.h"
#include "engine/mailbox.h"
#include "engine/notice.h"
#include "engine/operation.h"
#include "engine/registry.h"
#include "engine/watch.h"
#include "schedule/plan.h"
#include "schedule/schedule.h"
#include "transport/transport.h"

namespace ddl {

using CommId = uint32_t;
constexpr CommId kWorld = 0;
constexpr int kAnyRank = -1;
constexpr CommId kMostCommunicators = 1024;  // at once; ids of freed ones are used again

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

// Why something failed: shared, so that many can be told without memory.
using Cause = std::shared_ptr<const Status>;

class Request {
  public:
    // True when the result is known and the buffers are the caller's again.
    bool finished() const { return finished_.load(std::memory_order_acquire); }
    // The result; only when finished.
    const Status& status() const {
        static const Status kSuccess;
        return error_ ? *error_ : kSuccess;
    }

  private:
    friend class Engine;
    std::atomic<bool> finished_{false};
    Cause error_;            // none: success
    uint64_t sequence_ = 0;  // of the call, once it was accepted
};
using RequestPtr = std::shared_ptr<Request>;

class Engine {
  public:
    // `plan` is the world's, over all ranks of the transport. Starts the progress thread. Throws Error if the plan's
    // size is not the transport's.
    Engine(std::unique_ptr<Transport> transport, Plan plan, EngineOptions options = {});
    ~Engine();  // as shutdown()
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    // Starts a collective; returns at once. On success `request` holds it; otherwise nothing was started:
    // DDL_ERROR_ARGUMENT (see ddl.h), DDL_ERROR_STATE (no such communicator, or after shutdown()), DDL_ERROR_MEMORY.
    Status submit(CommId comm, const Call& call, RequestPtr* request);
    // Starts to send a message to `peer` of the communicator, or to receive one from it, or from kAnyRank; returns at
    // once, as submit() does. `mail` without its communicator and peers.
    Status post(CommId comm, int peer, Mail mail, RequestPtr* request);
    // Whether a message is here that a receive from `peer`, or from kAnyRank, with `tag` would take; `source` gets its
    // sender. Does not block. Errors if none is here, which break nothing: DDL_ERROR_PEER_LOST, a rank of the
    // communicator died; DDL_ERROR_SHUTDOWN, all who could send it have left the communicator.
    Status probe(CommId comm, int peer, int64_t tag, bool* found, int* source);
    // Makes progress, without blocking, unless another thread does. True if the request is finished. Throws nothing.
    bool test(const RequestPtr& request);
    // Blocks until the request is finished; returns its result. Throws nothing.
    const Status& wait(const RequestPtr& request);
    // submit() and wait(). Throws std::bad_alloc if there is no memory for the words of an error.
    Status run(CommId comm, const Call& call);

    // A communicator of the ranks of `parent` with this rank's `color`, ordered by (key, rank). A negative color joins
    // none: `comm` becomes `parent`. Collective over `parent`; blocks. Its plan is EngineOptions::plan_part's. To be
    // out of memory breaks `parent`, as the others wait in it.
    Status split(CommId parent, int color, int key, CommId* comm);
    // A communicator of `members` of the world, in this order, which they alone call; blocks. `tag`: creations by the
    // same ranks that are under way at once have different ones. Errors break the world's communicator, but
    // DDL_ERROR_ARGUMENT and DDL_ERROR_UNSUPPORTED (there are too many).
    Status create_group(const std::vector<int>& members, uint64_t tag, CommId* comm);
    // Tells the other members, whose later calls on it are DDL_ERROR_SHUTDOWN. DDL_ERROR_STATE if it has requests in
    // flight; DDL_ERROR_ARGUMENT for the world.
    Status free(CommId comm);
    // How long calls on it that are submitted from now on wait for a rank.
    Status set_timeout(CommId comm, double seconds);
    // Gives a communicator the groups that its plan's modes other than r need; until then collectives that need them
    // are DDL_ERROR_INTERNAL. Communicators other than the world have rings only.
    Status set_groups(CommId comm, std::shared_ptr<Groups> groups);
    // Breaks a communicator as an error of a collective would: here and on the other members.
    void fail(CommId comm, const Status& cause);
    // What broke it; success if nothing did.
    Status state(CommId comm) const;
    // For how many more communicators this rank has numbers.
    size_t free_communicators() const;
    // Its plan; an empty one if there is no such communicator.
    Plan plan(CommId comm) const;
    // -1 if there is no such communicator.
    int rank(CommId comm) const;
    int size(CommId comm) const;

    // A line for each request in flight: what it is, for how long, whom it waits for. Not for signal handlers.
    std::string in_flight() const;

    // Ends requests in flight with DDL_ERROR_SHUTDOWN, here and on the other members of their communicators, says
    // goodbye, and joins the thread. Does not wait for other ranks. Later calls return DDL_ERROR_STATE; doing it twice
    // does nothing. With a `cause` it breaks every communicator, as fail() does, and says no goodbye.
    void shutdown(const Status& cause = {});

  private:
    struct Active;
    struct Communicator;
    class Helper;
    class Reservation;
    using CommPtr = std::shared_ptr<Communicator>;

    CommPtr find(CommId comm) const;
    CommPtr find(const CommKey& key) const;
    CommPtr create(const CommKey& key, std::vector<int> members, Plan plan);
    Status start(CommId comm, const Call& call, const RequestPtr& request);
    bool run_alone(CommId comm, const Call& call, const RequestPtr& request);
    Status split_over(const CommPtr& parent, int color, int key, CommId* comm);
    Status make_part(const CommPtr& parent, const std::vector<int>& members,
                     const std::function<Status(Reservation*, uint64_t* birth)>& reserve, CommId* comm);
    Status create_part(const CommKey& key, const std::vector<int>& members);
    void renounce(const Communicator& parent, const CommKey& key, const std::vector<int>& members) noexcept;
    Status exchange(bool incoming, const std::vector<int>& peers, int64_t tag, std::byte* first, size_t stride,
                    size_t bytes);
    Status reserve_id(const CommKey& parent, uint64_t birth, Reservation* reservation);
    Status reserve_group_id(int rank, const std::vector<int>& members, uint64_t tag, Reservation* reservation,
                            uint64_t* birth);
    void serve();  // the progress thread
    bool is_busy() const { return inbox_full_ || active_ > 0; }
    bool progress(std::unique_lock<std::mutex> held) noexcept;

    // With progress_ held:
    void unlock_and_warn(std::unique_lock<std::mutex> held) noexcept;
    bool poll() noexcept;
    void drop_idle() noexcept;
    void take_submissions() noexcept;
    void accept(const CommPtr& comm, std::list<Active>& taken) noexcept;
    void add_active(ptrdiff_t number) noexcept;
    void retire(Communicator& comm) noexcept;
    bool poll(Communicator& comm) noexcept;
    void begin(Communicator& comm, Active& active);
    void finish(Active& active, Cause error) noexcept;
    void watch(Communicator& comm, double now);
    bool hear_departed(Communicator& comm, Active& active);
    void ask(const Communicator& comm, Active& active);
    void tell(const std::vector<int>& members, const NoticeContent& notice) noexcept;
    void break_comm(Communicator& comm, Cause cause, bool tell_others) noexcept;
    bool settle(Communicator& comm) noexcept;
    void abandon() noexcept;
    Cause cause_of(Code code, const char* text) const noexcept;
    Cause finalized_with(const Active& pending) const noexcept;
    bool poll_messages();
    void watch_messages(double now);
    static double left_at(const Communicator& comm, const std::vector<int>& ranks);
    static double left_at(const Communicator& comm, const Letter& letter);
    static void address(const Communicator& comm, int peer, Mail* mail);
    Status loss_of(const Communicator& comm, const Mail& mail) const;
    std::string hindrance_of(const Communicator& comm, const Letter& letter) const;
    void finish(Letter& letter, Cause error) noexcept;
    Cause failure_of(const Letter& letter) const noexcept;
    Cause finalized_with(const Letter& letter) const noexcept;
    std::string name_of(const Letter& letter) const;
    std::string messages_in_flight() const;
    void take_notices();
    void take(const Notice& notice);
    void heed(Communicator& comm, int from, const NoticeContent& notice);
    void answer(int from, const NoticeContent& query);
    void hear(int from, const NoticeContent& answer);
    void wake();
    std::string name_of_rank(int world_rank) const;

    ScratchPool pool_;
    const std::unique_ptr<Transport> transport_;
    const EngineOptions options_;
    const Cause out_of_memory_;  // made while there is some

    mutable std::mutex table_;         // guards the next five; taken after progress_ if both are
    std::map<CommId, CommPtr> comms_;  // changed with progress_ held as well: either lock is enough to read it
    std::list<Active> inbox_;
    std::atomic<bool> inbox_full_{false};  // something is in it: spares each poll the lock
    std::vector<uint8_t> free_ids_;        // 1: free
    uint64_t groups_ = 0;                  // that create_group() was led for by this rank

    mutable std::mutex progress_;  // guards what communicators do, the transport and the next eight
    Mailbox mailbox_;
    Registry registry_;
    double next_watch_ = 0;
    std::vector<CommPtr> running_;       // those that had a queue lately; create() keeps room for all
    std::list<Active> spare_;            // at most one, for the next call
    unsigned idle_polls_ = 0;            // that moved nothing
    std::vector<std::string> warnings_;  // said when the lock is released
    bool said_ = false;                  // that memory is short: once is enough

    std::mutex sleep_;
    std::condition_variable wake_;
    std::atomic<int> helpers_{0};
    std::atomic<size_t> active_{0};  // requests out of the inbox that are not finished; written under progress_
    std::atomic<bool> stopping_{false};
    std::atomic<bool> shut_{false};
    std::thread thread_;
};

}  // namespace ddl
