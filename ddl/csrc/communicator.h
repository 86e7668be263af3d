// What the engine keeps for a communicator and for a request. Internal to engine*.cc.
#pragma once

#include <array>
#include <deque>

#include "engine.h"

namespace ddl {

struct Engine::Active {
    RequestPtr request;
    Call call;
    Header header;
    double submitted = 0, moved = 0;  // seconds of the engine's clock
    Watch watch;
    std::unique_ptr<Operation> operation;  // once it has begun
};

struct Engine::Submission {
    CommPtr comm;
    Call call;
    RequestPtr request;
};

struct Engine::Communicator {
    // Constant once made:
    CommKey key;
    int rank = 0;
    Group group;

    // Guarded by progress_:
    Plan plan;
    uint64_t layout = 0;
    std::shared_ptr<Groups> groups;  // null where every dimension is a ring
    uint64_t sequence = 0;           // of the next call
    uint64_t past = 0;               // past_of() the calls before it
    std::deque<Active> queue;        // in order; finished ones stay until those before them are
    Status broken;
    std::map<int, Header> departed;                         // ranks that have finalized, and their last call
    std::array<Header, 64> history;                         // of the last calls, by sequence
    std::deque<std::shared_ptr<const Schedule>> schedules;  // the last ones: training repeats the same few calls

    int size() const { return static_cast<int>(group.members.size()); }
    // This communicator's rank of a rank of the world; -1 where it has none.
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
        content.code = broken.code;
        content.text = broken.message;
        return content;
    }
    Header last_call() const { return sequence == 0 ? Header{} : history[(sequence - 1) % history.size()]; }

    std::shared_ptr<const Schedule> schedule(const Task& task, const Tuning& tuning) {
        constexpr size_t kKept = 16;
        for (const auto& known : schedules) {
            if (known->task == task) return known;
        }
        auto made = std::make_shared<const Schedule>(make_schedule(plan, rank, task, tuning));
        schedules.push_front(made);
        if (schedules.size() > kKept) schedules.pop_back();
        return made;
    }
};

}  // namespace ddl
