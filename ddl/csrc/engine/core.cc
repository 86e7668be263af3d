#include "engine/core.h"

#include <algorithm>
#include <new>
#include <utility>

#include "base/backoff.h"

namespace ddl {
namespace {

std::vector<std::string> names_of(int size, const std::vector<std::string>& hosts) {
    std::vector<std::string> names;
    for (size_t rank = 0; rank < static_cast<size_t>(size); ++rank) {
        names.push_back("rank " + std::to_string(rank) + (rank < hosts.size() ? " (host " + hosts[rank] + ")" : ""));
    }
    return names;
}

}  // namespace

Core::Core(std::unique_ptr<Transport> its_transport, EngineOptions its_options)
    : transport(std::move(its_transport)),
      options(std::move(its_options)),
      names(names_of(transport->size(), options.hosts)),
      out_of_memory(std::make_shared<const Status>(
          Status{DDL_ERROR_MEMORY, own_name() + ": out of memory for the library's own buffers"})),
      mailbox(*transport, pool, options.settle_seconds),
      tally(transport->size()) {}

void Core::tell(const std::vector<int>& members, const NoticeContent& notice) const noexcept {
    try {
        send_notice(*transport, members, notice);
    } catch (const std::bad_alloc&) {
    }
}

void Core::finish(RequestPtr& owner, Cause error) noexcept {
    count(-1);
    const RequestPtr request = std::move(owner);
    request->finish(std::move(error));
}

void Core::break_comm(Communicator& comm, Cause cause, bool tell_others) noexcept {
    if (comm.broken) return;
    comm.broken = std::move(cause);
    comm.broken_at = seconds_now();
    tally.give_up(comm.broken_at);
    try {
        if (tell_others) tell(comm.group.members, comm.abort());
    } catch (const std::bad_alloc&) {
        // They hear of it when they ask.
    }
    for (Active& active : comm.queue) {
        if (active.operation) active.operation->cancel();
    }
    mailbox.withdraw(comm.key, comm.broken);
    settle(comm);
}

bool Core::settle(Communicator& comm) noexcept {
    const bool late = seconds_now() - comm.broken_at >= options.settle_seconds;
    bool moved = false;
    for (auto active = comm.queue.begin(); active != comm.queue.end();) {
        const auto& operation = active->operation;
        if (operation) operation->settle();
        if (!active->finished() && (late || !operation || !operation->is_written())) {
            finish(active->request, comm.broken);
            moved = true;
        }
        const bool over = active->finished() && (!operation || operation->settled());
        active = over ? comm.queue.erase(active) : std::next(active);
    }
    return moved;
}

void Core::leave(Communicator& comm) noexcept {
    const auto finalized_with = [&](const auto& what) {
        const auto text = [&] { return own_name() + " was finalized with " + what() + " in flight"; };
        break_comm(comm, cause(DDL_ERROR_SHUTDOWN, text));
    };
    const auto pending =
        std::find_if(comm.queue.begin(), comm.queue.end(), [](const Active& active) { return !active.finished(); });
    if (pending != comm.queue.end()) finalized_with([&] { return describe(pending->header); });
    const Letter* letter = mailbox.first_of(comm.key);
    if (letter) finalized_with([&] { return describe(letter->mail, names); });
    NoticeContent goodbye = comm.notice(NoticeKind::goodbye);
    goodbye.call = comm.last_call();
    tell(comm.group.members, goodbye);
}

void Core::abandon(Communicator& comm) noexcept {
    for (Active& active : comm.queue) {
        if (!active.finished()) finish(active.request, comm.broken);
        if (active.operation && !active.operation->settled()) static_cast<void>(active.operation.release());
    }
    comm.queue.clear();
}

}  // namespace ddl
