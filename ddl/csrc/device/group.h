// Collectives of others (MPI's, NCCL's) among the ranks of a plan that differ in one dimension only: what the engine's
// group steps stand on.
//
// They are matched by the order in which ranks start them, and neither compare calls nor end when a rank dies. So the
// engine starts them in one order on all ranks, after it has compared the calls, and leaves a communicator alone once a
// collective on it was abandoned.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "base/types.h"
#include "transport/transport.h"

namespace ddl {

struct GroupCall {
    bool gathers = false;        // allgather; else reduce-scatter
    const void* from = nullptr;  // of reduce-scatter: `count` elements
    void* to = nullptr;  // of reduce-scatter: this rank's part; of allgather: `count` elements, own part in place
    uint64_t count = 0;  // elements of all parts, which are cut by Range::part()
    DataType type = DDL_UINT8;
    ReduceOp op = DDL_SUM;  // of reduce-scatter; DDL_AVERAGE adds
};

// A communicator of the ranks of one dimension's ring, in the order of their coordinates. The engine calls it under its
// progress lock. No function blocks for another rank; but if the queue of a GPU is full, start() waits for a place.
class GroupComm {
  public:
    virtual ~GroupComm() = default;
    // True if start() may be called: false while a collective that was started before is still being prepared, on
    // this communicator or on another that has to keep the order.
    virtual bool ready() { return true; }
    // Begins a collective. Its buffers must stay valid until test() was true or abandon() returned. Throws Error.
    virtual Ticket start(const GroupCall& call) = 0;
    // True when it is complete, which ends the ticket. Throws Error(DDL_ERROR_TRANSPORT) if it failed.
    virtual bool test(Ticket ticket) = 0;
    // Ends the ticket: its buffers are read and written no more, unless a GPU does not stop within seconds. No other
    // collective may be started afterwards.
    virtual void abandon(Ticket ticket) noexcept = 0;
};

// The groups of a communicator, and whose turn it is to start collectives on them: operations take turns in the order
// in which they began, which is the same on all ranks.
class Groups {
  public:
    explicit Groups(std::vector<std::unique_ptr<GroupComm>> of_dimension) : of_dimension_(std::move(of_dimension)) {}

    // Null if the dimension has none.
    GroupComm* of(size_t dimension) const {
        return dimension < of_dimension_.size() ? of_dimension_[dimension].get() : nullptr;
    }

    void enter(const void* operation) { turns_.push_back(operation); }
    bool has_turn(const void* operation) const { return !turns_.empty() && turns_.front() == operation; }
    // Its last collective was started, or it was given up.
    void leave(const void* operation) {
        turns_.erase(std::remove(turns_.begin(), turns_.end(), operation), turns_.end());
    }

  private:
    std::vector<std::unique_ptr<GroupComm>> of_dimension_;
    std::deque<const void*> turns_;
};

}  // namespace ddl
