#include "engine/diagnosis.h"

#include <utility>

#include "base/backoff.h"

namespace ddl {

void Diagnosis::watch(Communicator& comm, double now) {
    if (comm.broken) return;
    for (Active& active : comm.queue) {
        if (!std::exchange(active.has_moved, false)) continue;
        if (active.submitted == 0) active.submitted = now;
        active.moved = now;
        active.watch.progress();
    }
    for (int rank = 0; rank < comm.size(); ++rank) {
        const int member = comm.group.members[static_cast<size_t>(rank)];
        if (comm.queue.empty() || !core_.transport->is_dead(member)) continue;
        const std::string during = " during " + describe(comm.queue.front().header);
        const std::string text = rank == comm.rank
                                     ? comm.name(rank) + " was cut off from the job" + during
                                     : comm.name(rank) + " died" + during + ": see its own output for the cause";
        return core_.break_comm(comm, core_.cause(DDL_ERROR_PEER_LOST, text));
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
        const std::string what = comm.name(comm.rank) + " has waited " + std::to_string(static_cast<int>(stalled)) +
                                 " s in " + describe(active.header);
        if (verdict == Watch::Verdict::ask) ask(comm, active, stalled);
        if (verdict == Watch::Verdict::warn) core_.warnings.push_back(what + ": " + report());
        if (active.watch.hopeless()) {
            return core_.break_comm(comm, core_.cause(DDL_ERROR_SHUTDOWN, what + ": " + report()));
        }
        // A rank whose own GPU is busy is late to others; to itself it is not.
        if (verdict == Watch::Verdict::give_up && !operation.is_held_back()) {
            const std::string text = what + ": " + report() + ". " + kPatienceOfCalls;
            return core_.break_comm(comm, core_.cause(DDL_ERROR_TIMEOUT, text));
        }
        return;
    }
}

// Ranks that have left make no more calls: what they said last is their answer. True if that broke the communicator.
bool Diagnosis::hear_departed(Communicator& comm, Active& active) {
    // Their own goodbyes may be lost on their way over others. What they have sent would be here.
    for (const int rank : active.operation->awaited()) {
        const bool has_left = core_.transport->has_left(comm.group.members[static_cast<size_t>(rank)]);
        if (has_left) comm.departed.emplace(rank, Departure{Leave::finalized, {}, seconds_now()});
    }
    for (const auto& [rank, departure] : comm.departed) {
        const Header& last = departure.last;
        const bool arrived = last.magic != 0 && last.sequence >= active.header.sequence;
        if (arrived && last.sequence == active.header.sequence && !same_call(active.header, last)) {
            break_mismatch(comm, active, rank, last);
            return true;
        }
        active.watch.answer(rank, arrived, last, departure.how);
    }
    return false;
}

void Diagnosis::break_mismatch(Communicator& comm, const Active& active, int rank, const Header& theirs) {
    const std::string text = describe_mismatch(comm.name(comm.rank), active.header, comm.name(rank), theirs);
    core_.break_comm(comm, core_.cause(DDL_ERROR_MISMATCH, text));
}

void Diagnosis::ask(const Communicator& comm, Active& active, double stalled) {
    NoticeContent query = comm.notice(NoticeKind::query);
    query.sequence = active.header.sequence;
    for (const int rank : active.watch.to_ask(comm.size(), comm.rank, stalled, active.operation->awaited())) {
        send_notice(*core_.transport, {comm.group.members[static_cast<size_t>(rank)]}, query);
    }
}

void Diagnosis::take_notices() {
    for (Notice notice; core_.transport->next_notice(&notice);) take(notice);
}

void Diagnosis::take(const Notice& notice) {
    NoticeContent content;
    if (!read_notice(notice, &content) || content.comm >= kMostCommunicators) return;
    switch (content.kind) {
        case NoticeKind::query: answer(notice.from, content); break;
        case NoticeKind::answer: hear(notice.from, content); break;
        case NoticeKind::goodbye:
        case NoticeKind::freed:
        case NoticeKind::abort:
            if (const CommPtr comm = core_.table.find(CommKey{content.comm, content.birth})) {
                heed(*comm, notice.from, content);
            } else {
                registry_.keep(notice.from, content);  // this rank may still be making it
            }
            break;
    }
}

void Diagnosis::heed(Communicator& comm, int from, const NoticeContent& notice) {
    const int rank = comm.rank_of(from);
    if (rank < 0) return;
    if (notice.kind == NoticeKind::goodbye || notice.kind == NoticeKind::freed) {
        const bool finalized = notice.kind == NoticeKind::goodbye;
        // A rank that has left says so again whenever it is asked: only the first time starts the grace. What the
        // transport has said before did not tell its last call.
        Departure& its = comm.departed.try_emplace(rank, Departure{Leave::no, {}, seconds_now()}).first->second;
        if (its.last.magic != 0) return;
        its.how = finalized ? Leave::finalized : Leave::freed;
        its.last = notice.call;
    }
    if (notice.kind == NoticeKind::abort) {
        core_.break_comm(comm, core_.cause(static_cast<Code>(notice.code), notice.text), false);
    }
}

void Diagnosis::answer(int from, const NoticeContent& query) {
    NoticeContent reply = query;
    reply.kind = NoticeKind::answer;
    const CommKey key{query.comm, query.birth};
    if (const CommPtr comm = core_.table.find(key)) {
        // It was told when this happened, but may not have heard it: a link was cut for a while.
        if (comm->broken) return send_notice(*core_.transport, {from}, comm->abort());
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
    send_notice(*core_.transport, {from}, reply);
}

void Diagnosis::hear(int from, const NoticeContent& answer) {
    const CommPtr comm = core_.table.find(CommKey{answer.comm, answer.birth});
    const int rank = comm ? comm->rank_of(from) : -1;
    if (rank < 0 || comm->broken) return;
    for (Active& active : comm->queue) {
        if (active.header.sequence != answer.sequence || active.finished()) continue;
        if (answer.arrived != 0 && answer.call.magic != 0 && !same_call(active.header, answer.call)) {
            // No data passes between these two, so no header did either.
            return break_mismatch(*comm, active, rank, answer.call);
        }
        active.watch.answer(rank, answer.arrived != 0, answer.call, Leave::no, answer.text);
        return;
    }
}

void Diagnosis::adopt(Communicator& comm) {
    for (const auto& [from, notice] : registry_.take(comm.key)) heed(comm, from, notice);
}

std::string Diagnosis::in_flight() const {
    std::string text;
    for (const auto& [id, comm] : core_.table.all()) {
        for (const Active& active : comm->queue) {
            if (active.finished()) continue;
            const double seconds = active.submitted == 0 ? 0 : seconds_now() - active.submitted;
            text += comm->name(comm->rank) + ": " + describe(active.header) + ", " +
                    std::to_string(static_cast<int>(seconds)) + " s";
            if (!active.operation) {
                text += ", not begun\n";
                continue;
            }
            const std::string own_wait = active.operation->own_wait();
            text += ", awaiting" + (own_wait.empty() ? "" : " " + own_wait);
            for (const int rank : active.operation->awaited()) text += " " + comm->name(rank);
            text += "\n";
        }
    }
    return text;
}

}  // namespace ddl
