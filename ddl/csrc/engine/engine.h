// The engine: executes any number of collectives in flight, over any number of communicators, for one rank.
//
// All work is done under one lock by whoever makes progress: the engine's own thread, or a caller that waits (which
// saves small messages two switches between threads). Collectives of one communicator begin in the order of their
// submission; several may be in flight, and ranks must submit them in the same order.
//
// Errors are Statuses. A collective's error breaks its communicator on this rank, and the other members are told: every
// request on it, present and future, ends with that error on all of them.
//
// Its parts, each of which calls only those before it: the core, the diagnosis, the messages between two ranks, the
// loop, and what makes and frees communicators, which is here. Locks are taken in this order: Core::progress; then one
// of the table's and the loop's inbox's, each by itself.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/loop.h"

namespace ddl {

class Engine {
  public:
    // `plan` is the world's, over all ranks of the transport. Starts the progress thread. Throws Error if the plan's
    // size is not the transport's.
    Engine(std::unique_ptr<Transport> transport, Plan plan, EngineOptions options = {});
    ~Engine() { shutdown(); }
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    // Starts a collective; returns at once. On success `request` holds it; otherwise nothing was started:
    // DDL_ERROR_ARGUMENT (see ddl.h), DDL_ERROR_STATE (no such communicator, or after shutdown()), DDL_ERROR_MEMORY.
    Status submit(CommId comm, const Call& call, RequestPtr* request) { return loop_.submit(comm, call, request); }
    // Starts to send a message to `peer` of the communicator, or to receive one from it, or from kAnyRank; returns at
    // once, as submit() does. `mail` without its communicator and peers.
    Status post(CommId comm, int peer, Mail mail, RequestPtr* request) {
        return loop_.post(comm, peer, std::move(mail), request);
    }
    // Makes progress, without blocking, unless another thread does. True if the request is finished. Throws nothing.
    bool test(const RequestPtr& request) { return loop_.test(request); }
    // Blocks until the request is finished; returns its result. Throws nothing.
    const Status& wait(const RequestPtr& request) { return loop_.wait(request); }
    // submit() and wait(). Throws std::bad_alloc if there is no memory for the words of an error.
    Status run(CommId comm, const Call& call) { return loop_.run(comm, call); }

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
    // -1 if there is no such communicator.
    int rank(CommId comm) const;
    int size(CommId comm) const;

    // What the collectives have come to so far.
    Tally tally() const;

    // A line for each request in flight: what it is, for how long, whom it waits for. Not for signal handlers.
    std::string in_flight() const;

    // Ends requests in flight with DDL_ERROR_SHUTDOWN, here and on the other members of their communicators, says
    // goodbye, and joins the thread. Does not wait for other ranks. Later calls return DDL_ERROR_STATE; doing it twice
    // does nothing. With a `cause` it breaks every communicator, as fail() does, and says no goodbye.
    void shutdown(const Status& cause = {});

  private:
    using Reservation = Table::Reservation;
    // Makes this rank's part of a communicator; the others may be making theirs. Throws Error and std::bad_alloc.
    void create(const CommKey& key, std::vector<int> members, Plan plan);
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

    Core core_;
    Diagnosis diagnosis_{core_};
    Messages messages_{core_};
    Loop loop_{core_, messages_, diagnosis_};
    std::atomic<uint64_t> groups_{0};  // that create_group() was led for by this rank
};

// A number that is free (1), the first from a place on that `from` chooses; nothing if none is. Splits and groups begin
// their search at different places, so that they seldom want the same.
std::optional<CommId> first_free(const std::vector<uint8_t>& ids, uint64_t from);
Status no_numbers_left();

}  // namespace ddl
