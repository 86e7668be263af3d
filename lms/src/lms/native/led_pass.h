// A pass that C++ leads: what the plan says of it, and what came so far. See saved_tensor_hooks.cc.

#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <unordered_map>
#include <vector>

namespace lms {

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;
using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

// An access is coded as 4 times its record plus one of these: lms.core.guide.
enum Kind : std::int64_t { kWrite, kHold, kRead };

inline double now() {  // time.perf_counter()
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Saved;  // the Python object that autograd keeps instead of a saved tensor

struct Key {
    const void* storage;
    std::uint32_t version;

    bool operator==(const Key&) const = default;
};

struct KeyHash {
    std::size_t operator()(const Key& key) const {
        return std::hash<const void*>()(key.storage) ^ (std::size_t{key.version} << 48);
    }
};

struct Record {
    Key key;
    WeakStorage storage;          // a weak reference, so that no other storage gets this one's address
    WeakTensor handed;            // the tensor that its last use was given; none if the record moves
    std::vector<Saved*> saved{};  // oldest first; none if the record moves
    std::ptrdiff_t freed = -1;    // the access before which its last saved tensor ended
    bool waiting = false;         // it was not used since it was saved
    bool judged = false;          // `owned` is known
    bool owned = false;           // the script had the storage when the record was freed
};

struct Led {
    // The plan. For each access its code, and the most bytes that may be held after it. For each record its bytes,
    // whether another owner keeps it anyway, and whether it moves.
    std::vector<std::int64_t> codes, cap, sizes;
    std::vector<bool> pinned, moves;

    // What Python said last.
    std::int64_t held_moving = 0;  // bytes held by records that move, and by copies in flight
    std::size_t wake = 0;          // from this access on each one is Python's

    // The facts so far.
    std::vector<Record> records;
    std::vector<int> tasks;                // for each access the number of its backward; -1 if it is no read
    std::vector<double> marks;             // entry and exit of each hook, if the pass is timed
    std::vector<std::int64_t> held_after;  // bytes held after each access, if the pass is timed
    std::int64_t held = 0;                 // bytes of records that do not move
    std::int64_t held_peak = 0;            // bytes of all
    std::uint64_t last_use = 0;            // the sequence number at the last read
    bool pending = false;                  // the last access is noted, and Python has its part yet to do
    bool timed = false;

    // Derived from that.
    std::unordered_map<Key, std::size_t, KeyHash> live;  // records by storage and version
    std::size_t waiting = 0;                             // live records that were not used since they were saved
    std::size_t live_moving = 0;                         // live records that move
    int backwards = 0, backward = -1;

    bool over() const { return live.empty() && !tasks.empty(); }

    // Whether this is the plan's next access, and Python attends it or need not: `more` bytes fit, and nothing is due.
    bool expects(std::size_t record, Kind kind, std::int64_t more, bool attended) const {
        const std::size_t at = tasks.size();
        if (at >= codes.size() || codes[at] != static_cast<std::int64_t>(4 * record + kind)) return false;
        return attended || (at < wake && !moves[record] && held + held_moving + more <= cap[at]);
    }

    void set_waiting(Record& record, bool is) {
        waiting += is;
        waiting -= record.waiting;
        record.waiting = is;
    }

    void accessed(int task, double began, bool attended) {
        tasks.push_back(task);
        pending = attended;
        if (!timed) return;
        held_after.push_back(held + held_moving);
        marks.push_back(began);
        marks.push_back(now());
    }
};

}  // namespace lms
