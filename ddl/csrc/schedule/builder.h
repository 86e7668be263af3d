// Builds the schedule of one rank, chunk by chunk and round by round. Algorithms think in positions and elements; the
// builder turns them into ranks and bytes, and leaves out parts of zero elements.
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
    // How many chunks a buffer of `elements` is cut into, where `parts` parts of each chunk travel in a message each.
    // The schedule says how large one then is.
    int chunks(uint64_t elements);

    void algorithm(std::string name, std::string reason);
    // Asks for room of `elements` in Buffer::work.
    void work(uint64_t elements);

    // Closes the current round (chunk) and begins another; empty ones are dropped.
    void round();
    void chunk();

    // `to` and `from` are positions; `range` is in elements of `buffer`.
    void send(int to, Buffer buffer, Range range);
    void receive(int from, Buffer buffer, Range range);
    // to_buffer[to] = combine of what arrives from position `from` and mine_buffer[mine].
    void reduce(int from, Buffer mine_buffer, Range mine, Buffer to_buffer, Range to, bool incoming_first);
    void copy(Buffer from_buffer, Range from, Buffer to_buffer, Range to);
    // Divides output[range], where the operation is an average.
    void finish_average(Range range);
    // Group steps among the ranks that differ from this one in `dimension` only, each a round of its own: from_buffer's
    // `range` is reduced, each rank's part of it goes to the output; or the output's `range` is gathered from its
    // parts.
    void reduce_scatter(size_t dimension, Buffer from_buffer, Range range);
    void allgather(size_t dimension, Range range);
    // True where the dimension is reduced by group steps.
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
void build_doubling(Builder& builder);
void build_ring_reduce_scatter(Builder& builder);
void build_ring_allgather(Builder& builder);
void build_direct_allgather(Builder& builder);
void build_tree_broadcast(Builder& builder);
void build_scatter_broadcast(Builder& builder);
void build_alltoall(Builder& builder);
void build_barrier(Builder& builder);

// Rounds of messages without content after which each rank has heard, directly or through others, from all.
void disseminate(Builder& builder);

}  // namespace ddl
