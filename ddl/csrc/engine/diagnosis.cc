// The engine's side of diagnosis: deaths, stalls, and what ranks tell one another about them.
#include <algorithm>
#include <utility>

#include "base/backoff.h"
#include "engine/communicator.h"

namespace ddl {

void Engine::watch(Communicator& comm, double now) {
    if (comm.broken) return;
    for (Active& active : comm.queue) {
        if (!std::exchange(active.has_moved, false)) continue;
        if (active.submitted == 0) active.submitted = now;
        active.moved = now;
        active.watch.progress();
    }
    for (int rank = 0; rank < comm.size(); ++rank) {
        const int member = comm.group.members[static_cast<size_t>(rank)];
        if (comm.queue.empty() || !transport_->is_dead(member)) continue;
        const std::string during = " during " + describe(comm.queue.front().header);
        const std::string text = member == transport_->rank()
                                     ? name_of_rank(member) + " was cut off from the job" + during
                                     : name_of_rank(member) + " died" + during + ": see its own output for the cause";
        return break_comm(comm, cause_of(DDL_ERROR_PEER_LOST, text.c_str()), true);
    }
    // The oldest stalled request is what the others wait behind.
    for (Active& active : comm.queue) {
        if (active.finished() || !active.operation) continue;
        if (hear_departed(comm, active)) return;
        const double stalled = now - active.moved;
        const auto verdict = active.watch.judge(stalled);
        const Operation& operation = *active.operation;
        const auto report = [&] {
            return active.watch.report(comm.group, comm.rank, operation.awaited(), operation.own_wait());
        };
        const std::string what = comm.group.names[static_cast<size_t>(comm.rank)] + " has waited " +
                                 std::to_string(static_cast<int>(stalled)) + " s in " + describe(active.header);
        if (verdict == Watch::Verdict::ask) ask(comm, active);
        if (verdict == Watch::Verdict::warn) warnings_.push_back(what + ": " + report());
        if (active.watch.hopeless()) {
            return break_comm(comm, cause_of(DDL_ERROR_SHUTDOWN, (what + ": " + report()).c_str()), true);
        }
        // A rank whose own GPU is busy is late to others; to itself it is not.
        if (verdict == Watch::Verdict::give_up && !operation.is_held_back()) {
            const std::string text = what + ": " + report() + ". " + kPatienceOfCalls;
            return break_comm(comm, cause_of(DDL_ERROR_TIMEOUT, text.c_str()), true);
        }
        return;
    }
}

// Ranks that have left make no more calls: what they said last is their answer. True if that broke the communicator.
bool Engine::hear_departed(Communicator& comm, Active& active) {
    for (const auto& [rank, departure] : comm.departed) {
        const Header& last = departure.last;
        const bool arrived = last.magic != 0 && last.sequence >= active.header.sequence;
        if (arrived && last.sequence == active.header.sequence && !same_call(active.header, last)) {
            const std::string text = describe_mismatch(comm.group.names[static_cast<size_t>(comm.rank)], active.header,
                                                       comm.group.names[static_cast<size_t>(rank)], last);
            break_comm(comm, cause_of(DDL_ERROR_MISMATCH, text.c_str()), true);
            return true;
        }
        active.watch.answer(rank, arrived, last, departure.how);
    }
    return false;
}

void Engine::ask(const Communicator& comm, Active& active) {
    NoticeContent query = comm.notice(NoticeKind::query);
    query.sequence = active.header.sequence;
    for (const int rank : active.watch.to_ask(comm.size(), comm.rank, active.operation->awaited())) {
        send_notice(*transport_, comm.group.members[static_cast<size_t>(rank)], query);
    }
}

void Engine::take_notices() {
    for (Notice notice; transport_->next_notice(&notice);) take(notice);
}

void Engine::take(const Notice& notice) {
    NoticeContent content;
    if (!read_notice(notice, &content) || content.comm >= kMostCommunicators) return;
    switch (content.kind) {
        case NoticeKind::query: answer(notice.from, content); break;
        case NoticeKind::answer: hear(notice.from, content); break;
        case NoticeKind::goodbye:
        case NoticeKind::freed:
        case NoticeKind::abort:
            if (const CommPtr comm = find(CommKey{content.comm, content.birth})) {
                heed(*comm, notice.from, content);
            } else {
                registry_.keep(notice.from, content);  // this rank may still be making it
            }
            break;
    }
}

void Engine::heed(Communicator& comm, int from, const NoticeContent& notice) {
    const int rank = comm.rank_of(from);
    if (rank < 0) return;
    if (notice.kind == NoticeKind::goodbye || notice.kind == NoticeKind::freed) {
        const bool finalized = notice.kind == NoticeKind::goodbye;
        // A rank that has left says so again whenever it is asked: only the first time starts the grace.
        comm.departed.emplace(rank, Departure{finalized ? Leave::finalized : Leave::freed, notice.call, seconds_now()});
    }
    if (notice.kind == NoticeKind::abort) {
        break_comm(comm, cause_of(static_cast<Code>(notice.code), notice.text.c_str()), false);
    }
}

void Engine::answer(int from, const NoticeContent& query) {
    NoticeContent reply = query;
    reply.kind = NoticeKind::answer;
    const CommKey key{query.comm, query.birth};
    if (const CommPtr comm = find(key)) {
        // It was told when this happened, but may not have heard it: a link was cut for a while.
        if (comm->broken) return send_notice(*transport_, from, comm->abort());
        reply.arrived = comm->sequence > query.sequence;
        const bool known = reply.arrived && comm->sequence - query.sequence <= comm->history.size();
        reply.call = known ? comm->history[query.sequence % comm->history.size()] : Header{};
        if (!reply.arrived) reply.call = comm->last_call();
        for (const Active& active : comm->queue) {
            const bool is_it = active.header.sequence == query.sequence && active.operation != nullptr;
            if (is_it && !active.finished()) reply.text = active.operation->own_wait();
        }
    } else if (const Freed* freed = registry_.freed(key)) {
        // It was told when this happened, as above.
        reply.kind = freed->broken.ok() ? NoticeKind::freed : NoticeKind::abort;
        reply.call = freed->last;
        reply.code = freed->broken.code;
        reply.text = freed->broken.message;
    }
    send_notice(*transport_, from, reply);
}

void Engine::hear(int from, const NoticeContent& answer) {
    const CommPtr comm = find(CommKey{answer.comm, answer.birth});
    const int rank = comm ? comm->rank_of(from) : -1;
    if (rank < 0 || comm->broken) return;
    for (Active& active : comm->queue) {
        if (active.header.sequence != answer.sequence || active.finished()) continue;
        if (answer.arrived != 0 && answer.call.magic != 0 && !same_call(active.header, answer.call)) {
            // No data passes between these two, so no header did either.
            const std::string text =
                describe_mismatch(comm->group.names[static_cast<size_t>(comm->rank)], active.header,
                                  comm->group.names[static_cast<size_t>(rank)], answer.call);
            return break_comm(*comm, cause_of(DDL_ERROR_MISMATCH, text.c_str()), true);
        }
        active.watch.answer(rank, answer.arrived != 0, answer.call, Leave::no, answer.text);
        return;
    }
}

std::string Engine::in_flight() const {
    std::vector<CommPtr> comms;
    const std::lock_guard lock(progress_);
    {
        const std::lock_guard table(table_);
        for (const auto& [id, comm] : comms_) comms.push_back(comm);
    }
    std::string text;
    for (const CommPtr& comm : comms) {
        for (const Active& active : comm->queue) {
            if (active.finished()) continue;
            const double seconds = active.submitted == 0 ? 0 : seconds_now() - active.submitted;
            text += comm->group.names[static_cast<size_t>(comm->rank)] + ": " + describe(active.header) + ", " +
                    std::to_string(static_cast<int>(seconds)) + " s";
            if (!active.operation) {
                text += ", not begun\n";
                continue;
            }
            const std::string own_wait = active.operation->own_wait();
            text += ", awaiting" + (own_wait.empty() ? "" : " " + own_wait);
            for (const int rank : active.operation->awaited())
                text += " " + comm->group.names[static_cast<size_t>(rank)];
            text += "\n";
        }
    }
    return text + messages_in_flight();
}

}  // namespace ddl
