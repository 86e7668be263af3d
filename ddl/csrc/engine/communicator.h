// What the engine keeps for a communicator and for a call on it.
#pragma once

#include <algorithm>
#include <array>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/call.h"
#include "engine/notice.h"
#include "engine/operation.h"
#include "engine/request.h"
#include "engine/watch.h"
#include "schedule/plan.h"
#include "schedule/schedule_cache.h"

namespace ddl {

using CommId = uint32_t;
constexpr CommId kWorld = 0;
constexpr int kAnyRank = -1;
constexpr CommId kMostCommunicators = 1024;  // at once; ids of freed ones are used again

inline Status no_such(CommId comm) {
    return {DDL_ERROR_STATE, "there is no communicator " + std::to_string(comm) + ": it was freed or never made"};
}
inline Status no_memory() { return {DDL_ERROR_MEMORY, "out of memory"}; }  // to say so needs none
inline Status shut_down() { return {DDL_ERROR_STATE, "the library was finalized: call ddl_init first"}; }

struct Communicator;
using CommPtr = std::shared_ptr<Communicator>;

// A call that was submitted. Made then or before: taking it from the inbox and ending it need no memory.
struct Active {
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

struct Communicator {
    // Constant once made:
    CommKey key;
    int rank = 0;
    Group group;
    Plan plan;
    uint64_t layout = 0;

    // Guarded by the progress lock:
    std::shared_ptr<Groups> groups;  // null if every dimension is a ring
    uint64_t sequence = 0;           // of the next call
    uint64_t past = 0;               // past_of() the calls before it
    std::list<Active> queue;  // in order; finished ones stay until those before them are, or until they are settled
    bool listed = false;      // among those that the loop polls
    Patience patience;
    Cause broken;  // none: it is whole
    double broken_at = 0;
    double watched = 0;                 // when its members were last looked at for its messages' sake
    std::map<int, Departure> departed;  // ranks that have left it
    std::array<Header, 64> history;     // of the last calls, by sequence
    ScheduleCache schedules;
    // The last that finished, if it is light. Training makes the same calls again and again: the next one takes it
    // over, and may take the fast path.
    std::unique_ptr<Operation> reusable;

    int size() const { return static_cast<int>(group.members.size()); }
    const std::string& name(int its_rank) const { return group.names[static_cast<size_t>(its_rank)]; }
    // This communicator's rank of a rank of the world; -1 if it has none.
    int rank_of(int world_rank) const {
        const auto found = std::find(group.members.begin(), group.members.end(), world_rank);
        return found == group.members.end() ? -1 : static_cast<int>(found - group.members.begin());
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
