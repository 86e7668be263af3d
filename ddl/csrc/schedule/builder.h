// Builds the schedule of one rank, chunk by chunk and round by round. Algorithms use positions and elements; the
// builder turns them into ranks and bytes, and skips parts of zero elements.
#pragma once

#include "base/range.h"
#include "schedule/schedule.h"

namespace ddl {

class Builder {
  public:
    Builder(const Plan& plan, int rank, const Task& task, const Tuning& tuning);

    int size() const { return plan_.size(); }
    int position() const { return position_; }
    const Plan& plan() const { return plan_; }
    const Task& task() const { return schedule_.task; }
    const Tuning& tuning() const { return tuning_; }
    // The rank at `position`, which may lie outside [0, size): positions are a ring.
    int rank_at(int position) const;
    // The number of chunks for a buffer of `elements`. Also stores the size of a chunk in the schedule.
    int chunks(uint64_t elements);

    void algorithm(std::string name, std::string reason);
    // Reserves `elements` elements in Buffer::work.
    void work(uint64_t elements);

    // Closes the current round (chunk) and begins another; empty ones are dropped.
    void round();
    void chunk();

    // `to` and `from` are positions; `range` is in elements of `buffer`.
    void send(int to, Buffer buffer, Range range);
    void receive(int from, Buffer buffer, Range range);
    // to_buffer[to] = mine_buffer[mine] combined with the message from position `from`.
    void reduce(int from, Buffer mine_buffer, Range mine, Buffer to_buffer, Range to, bool incoming_first);
    void copy(Buffer from_buffer, Range from, Buffer to_buffer, Range to);
    // Divides output[range], if the operation is an average.
    void finish_average(Range range);
    // Group steps among the ranks that differ only in `dimension`, each in a round of its own. The first reduces
    // `range` of from_buffer and leaves each rank's part in the output; the second gathers `range` of the output from
    // the parts.
    void reduce_scatter(size_t dimension, Buffer from_buffer, Range range);
    void allgather(size_t dimension, Range range);
    // True if group steps reduce the dimension.
    bool is_grouped(size_t dimension) const;
    // A message without content.
    void signal(int to);
    void await(int from);

    Schedule finish();

  private:
    int chunks_by_size(uint64_t elements) const;
    Place place(Buffer buffer, Range range) const { return {buffer, range.begin * element_}; }
    Step group_step(StepKind kind, size_t dimension, Range range);
    Step message(StepKind kind, int peer_position, Range range) const;
    bool is_alone(uint32_t index, uint32_t end) const;
    void close_round();
    void close_chunk();

    const Plan& plan_;
    const Tuning& tuning_;
    const int position_;
    const uint64_t element_;  // bytes
    Schedule schedule_;
    uint32_t round_begin_ = 0, chunk_begin_ = 0;
};

// The algorithms; see make_schedule().
void build_hierarchy(Builder& builder);
void build_doubling(Builder& builder, int halvings);
void build_ring_reduce_scatter(Builder& builder);
void build_ring_allgather(Builder& builder);
void build_direct_allgather(Builder& builder);
void build_tree_broadcast(Builder& builder);
void build_scatter_broadcast(Builder& builder);
void build_alltoall(Builder& builder);
void build_barrier(Builder& builder);

// Rounds of empty messages; after them each rank has heard from all others, directly or through others.
void disseminate(Builder& builder);

}  // namespace ddl
