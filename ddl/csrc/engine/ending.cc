// How things end: a communicator that an error breaks, and the engine.
#include <algorithm>
#include <new>
#include <utility>

#include "base/backoff.h"
#include "engine/communicator.h"

namespace ddl {

void Engine::fail(CommId id, const Status& cause) {
    const CommPtr comm = find(id);
    if (!comm) return;
    const std::lock_guard lock(progress_);
    break_comm(*comm, cause_of(cause.code, cause.message.c_str()), true);
}

void Engine::break_comm(Communicator& comm, Cause cause, bool tell_others) noexcept {
    if (comm.broken) return;
    comm.broken = std::move(cause);
    comm.broken_at = seconds_now();
    try {
        if (tell_others) tell(comm.group.members, comm.abort());
    } catch (const std::bad_alloc&) {
        // They hear of it when they ask.
    }
    for (Active& active : comm.queue) {
        if (active.operation) active.operation->cancel();
    }
    mailbox_.withdraw(comm.key, comm.broken);
    settle(comm);
}

// Ends the requests of a broken communicator as soon as their buffers are the callers' again, and keeps each operation
// until the transport has done with its memory. True if something ended.
bool Engine::settle(Communicator& comm) noexcept {
    const bool late = seconds_now() - comm.broken_at >= options_.settle_seconds;
    bool moved = false;
    for (auto active = comm.queue.begin(); active != comm.queue.end();) {
        const auto& operation = active->operation;
        if (operation) operation->settle();
        if (!active->finished() && (late || !operation || !operation->is_written())) {
            finish(*active, comm.broken);
            moved = true;
        }
        const bool over = active->finished() && (!operation || operation->settled());
        active = over ? comm.queue.erase(active) : std::next(active);
    }
    return moved;
}

void Engine::tell(const std::vector<int>& members, const NoticeContent& notice) noexcept {
    try {
        for (const int member : members) {
            if (member != transport_->rank()) send_notice(*transport_, member, notice);
        }
    } catch (const std::bad_alloc&) {
        // Notices may be lost: those who miss one ask.
    }
}

void Engine::shutdown(const Status& cause) {
    if (shut_.exchange(true)) return;
    {
        const std::lock_guard lock(sleep_);
        stopping_ = true;
    }
    wake_.notify_all();
    if (thread_.joinable()) thread_.join();
    const std::lock_guard lock(progress_);
    take_submissions();
    std::map<CommId, CommPtr> comms;
    {
        const std::lock_guard table(table_);
        comms.swap(comms_);
    }
    for (const auto& [id, comm] : comms) {
        if (!cause.ok()) {
            break_comm(*comm, cause_of(cause.code, cause.message.c_str()), true);
            continue;
        }
        const auto pending = std::find_if(comm->queue.begin(), comm->queue.end(),
                                          [](const Active& active) { return !active.finished(); });
        if (pending != comm->queue.end()) break_comm(*comm, finalized_with(*pending), true);
        const Letter* letter = mailbox_.first_of(comm->key);
        if (letter) break_comm(*comm, finalized_with(*letter), true);
        NoticeContent goodbye = comm->notice(NoticeKind::goodbye);
        goodbye.call = comm->last_call();
        tell(comm->group.members, goodbye);
    }
    for (Backoff backoff(0, 1e-3); active_ > 0; backoff.pause()) {
        transport_->poll();
        for (const CommPtr& comm : running_) settle(*comm);
        poll_messages();
    }
    mailbox_.close();
    abandon();
}

Cause Engine::finalized_with(const Active& pending) const noexcept {
    try {
        return std::make_shared<const Status>(Status{
            DDL_ERROR_SHUTDOWN,
            name_of_rank(transport_->rank()) + " was finalized with " + describe(pending.header) + " in flight"});
    } catch (const std::bad_alloc&) {
        return out_of_memory_;
    }
}

// Ends the requests that are left, and leaves to the transport the memory that it still uses: for ever.
void Engine::abandon() noexcept {
    for (const CommPtr& comm : running_) {
        for (Active& active : comm->queue) {
            if (!active.finished()) finish(active, comm->broken);
            if (active.operation && !active.operation->settled()) static_cast<void>(active.operation.release());
        }
        comm->queue.clear();
    }
    running_.clear();
}

}  // namespace ddl
