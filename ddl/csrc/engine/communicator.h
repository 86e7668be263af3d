// What the engine keeps for a communicator and for a request. Internal to the engine.
#pragma once

#include <algorithm>
#include <array>
#include <optional>

#include "engine/engine.h"
#include "schedule/schedule_cache.h"

namespace ddl {

inline Status no_such(CommId comm) {
    return {DDL_ERROR_STATE, "there is no communicator " + std::to_string(comm) + ": it was freed or never made"};
}
inline Status no_memory() { return {DDL_ERROR_MEMORY, "out of memory"}; }  // to say so needs none
inline Status no_numbers_left() {
    return {DDL_ERROR_UNSUPPORTED,
            "there are " + std::to_string(kMostCommunicators) + " communicators already: free some with ddl_comm_free"};
}
inline Status shut_down() { return {DDL_ERROR_STATE, "the library was finalized: call ddl_init first"}; }

// An id that is free (1), the first from a place on that `from` chooses; nothing if none is. Splits and groups begin
// their search at different places, so that they seldom want the same.
std::optional<CommId> first_free(const std::vector<uint8_t>& ids, uint64_t from);

// Made when it is submitted, or before (Engine::spare_): taking it from the inbox and ending it need no memory.
struct Engine::Active {
    CommPtr comm;        // while it is in the inbox
    RequestPtr request;  // until it is finished: who waits for it may then take its memory back
    Call call;
    Watch watch{};                         // with its communicator's patience, once it is out of the inbox
    std::unique_ptr<Operation> operation;  // once it has begun
    Header header;
    // Seconds of the engine's clock, of when the watch next looked: a look at a clock costs what a small message cannot
    // afford.
    double submitted = 0, moved = 0;  // 0: the watch has not looked yet
    bool has_moved = true;            // since the watch looked

    bool finished() const { return !request; }
};

// How a rank left a communicator, its last call there (magic 0: none), and when this rank first heard of it.
struct Departure {
    Leave how = Leave::no;
    Header last;
    double at = 0;
};

struct Engine::Communicator {
    // Constant once made:
    CommKey key;
    int rank = 0;
    Group group;
    Plan plan;
    uint64_t layout = 0;

    // Guarded by progress_:
    std::shared_ptr<Groups> groups;  // null if every dimension is a ring
    uint64_t sequence = 0;           // of the next call
    uint64_t past = 0;               // past_of() the calls before it
    std::list<Active> queue;  // in order; finished ones stay until those before them are, or until they are settled
    bool listed = false;      // in Engine::running_
    Patience patience;
    Cause broken;  // none: it is whole
    double broken_at = 0;
    double watched = 0;                 // when its members were last looked at for its messages' sake
    std::map<int, Departure> departed;  // ranks that have left it
    std::array<Header, 64> history;     // of the last calls, by sequence
    ScheduleCache schedules;

    int size() const { return static_cast<int>(group.members.size()); }
    // This communicator's rank of a rank of the world; -1 if it has none.
    int rank_of(int world_rank) const {
        for (int r = 0; r < size(); ++r) {
            if (group.members[static_cast<size_t>(r)] == world_rank) return r;
        }
        return -1;
    }
    // Notice about this communicator.
    NoticeContent notice(NoticeKind kind) const {
        NoticeContent content;
        content.kind = kind;
        content.comm = key.id;
        content.birth = key.birth;
        return content;
    }
    // What tells the others that, and why, it is broken.
    NoticeContent abort() const {
        NoticeContent content = notice(NoticeKind::abort);
        content.code = broken->code;
        content.text = broken->message;
        return content;
    }
    Header last_call() const { return sequence == 0 ? Header{} : history[(sequence - 1) % history.size()]; }
    // Requests that are not finished.
    size_t in_flight() const {
        return static_cast<size_t>(
            std::count_if(queue.begin(), queue.end(), [](const Active& active) { return !active.finished(); }));
    }
};

}  // namespace ddl
