// Schedules: the messages and reductions of one rank in a collective. Pure data: the engine executes a schedule, the
// simulator times it, tests check it.
//
// A schedule is cut into *chunks* that proceed independently of one another; a chunk is a sequence of *rounds*; the
// messages of a round travel together, and the next round begins when all of them are complete. Steps that change data
// in place (reduce, copy, divide) run after all messages of their round, in order. So a round may send a range that it
// also reduces into. A reduce step that is marked `at_once` may run as soon as its message is there. Between two ranks,
// the messages of one chunk are matched in order. Parts of zero elements are not sent, but steps of zero bytes (a
// barrier's) are.
//
// In a dimension that is not reduced by our ring, a round is one *group step*: a collective of MPI or NCCL among the
// ranks that differ in that dimension only. Each rank starts its group steps in the order of group_order(). None starts
// before the first chunk is complete, in which the ranks compare their calls: these collectives do not compare calls,
// and must be started in one order.
//
// Every rank makes its own schedule from the same plan and task, so nothing has to be exchanged.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/types.h"
#include "schedule/plan.h"

namespace ddl {

constexpr int kChunkSlots = 32;  // chunks of one collective that may be in flight at once; tags tell them apart
constexpr size_t kInlineBytes = 16 << 10;  // payloads up to this size travel in one message with the call's header

enum class Collective : uint8_t { allreduce, reduce_scatter, allgather, broadcast, alltoall, barrier };

const char* name_of(Collective collective);

enum class Memory : uint8_t { host, device };

// A call of a collective, without its buffers. `count` is as in ddl.h: the elements of the buffer for allreduce and
// broadcast, of a rank's block for the others.
struct Task {
    Collective collective = Collective::barrier;
    DataType type = DDL_UINT8;
    ReduceOp op = DDL_SUM;  // of allreduce and reduce_scatter
    uint64_t count = 0;
    int root = 0;                  // rank, of broadcast
    Memory memory = Memory::host;  // where the caller's buffers are, on this rank

    bool operator==(const Task& other) const;
    bool operator!=(const Task& other) const { return !(*this == other); }
};

// Bytes of the caller's buffers for `task` among `size` ranks. Throws Error(DDL_ERROR_ARGUMENT) if they overflow, or if
// the task's type, operation or root is not valid.
struct Extent {
    uint64_t input = 0, output = 0;
};
Extent extent_of(const Task& task, int size);

enum class Buffer : uint8_t {
    input,
    output,   // the caller's; may be the input too
    work,     // the engine's, Schedule::work_bytes long, in host memory
    staging,  // the chunk's own, Schedule::staging_bytes long, in host memory that a device copies to and from
};

struct Place {
    Buffer buffer = Buffer::output;
    uint64_t offset = 0;  // bytes
};

enum class StepKind : uint8_t {
    send,            // `from`, to the peer
    receive,         // into `to`, from the peer
    reduce,          // receives from the peer, then to = combine(...) of the message and `from`
    copy,            // local: to = from
    divide,          // local: to /= number of ranks, which makes a sum an average
    reduce_scatter,  // group: to = this rank's part of the reduction of everyone's `from`, cut by Range::part()
    allgather,       // group: to = the parts of all ranks; this rank's part is already in place
    to_host,         // to = from, from device memory to host memory
    to_device,       // and back
};

struct Step {
    StepKind kind = StepKind::copy;
    uint8_t dimension = 0;        // of the plan: the tier that the message crosses, or the group's ranks
    uint8_t stage = 0;            // of a group step: its number in the chunk, the same on every rank
    bool on_device = false;       // of a group step: NCCL runs it in device memory
    bool first = false;           // the first message of this schedule between the two ranks in this direction
    bool incoming_first = false;  // of reduce: the message is the operation's first operand
    bool at_once = false;         // of reduce: it need not wait for the other messages of its round
    int peer = -1;                // rank; -1 for local and group steps
    uint64_t bytes = 0;           // of a group step: of all parts
    Place from, to;

    bool is_message() const { return kind <= StepKind::reduce; }
    bool is_incoming() const { return kind == StepKind::receive || kind == StepKind::reduce; }
    bool is_group() const { return kind == StepKind::reduce_scatter || kind == StepKind::allgather; }
    bool is_transfer() const { return kind == StepKind::to_host || kind == StepKind::to_device; }
};

// A run of consecutive steps or rounds: [begin, end).
struct Span {
    uint32_t begin = 0, end = 0;
    uint32_t size() const { return end - begin; }
};

struct Schedule {
    Task task;
    int size = 1, rank = 0;  // number of ranks, and the rank of this schedule
    std::string algorithm;   // "hierarchy 4x2", "recursive doubling", ...
    std::string reason;      // why this algorithm
    std::vector<Step> steps;
    std::vector<Span> rounds;  // of steps
    std::vector<Span> chunks;  // of rounds
    uint64_t work_bytes = 0, staging_bytes = 0;
    uint64_t chunk_bytes = 0;  // most bytes of the buffer in one chunk, the same on every rank; 0: not cut by size
    std::vector<std::vector<int>> groups;  // by dimension: the ranks of its group steps, in their order; empty: none
    int stages = 0;  // of a chunk's group steps; 0: there are none, and no chunk for comparing calls
};

// The group steps, as indices of `steps`, in the order in which they must start with `window` chunks in flight. The
// order is the same on all ranks of a group. Chunks that wait for their turn never block the others, and step k of a
// chunk overlaps step k + 1 of earlier chunks.
std::vector<uint32_t> group_order(const Schedule& schedule, int window);

// The number of chunks that may be in flight, from 1 to `most`: as many as fit in 256 MiB of staging memory. If there
// are group steps, whose order depends on it, it is the same on every rank.
int window_of(const Schedule& schedule, int most);

// The mode that reduces `dimension` of the plan in an allreduce. Rings replace NCCL for buffers in host memory, which
// NCCL cannot use, and for floating point minima and maxima, in which it drops NaNs (fminf, fmaxf).
char mode_of(const Plan& plan, size_t dimension, const Task& task);

// True if NCCL reduces dimensions of the task.
bool uses_nccl(const Plan& plan, const Task& task);

// How to choose an algorithm. `automatic` decides by size; the others are for tests, benchmarks and `ddlrun plan`.
enum class Algorithm : uint8_t {
    automatic,
    latency,    // fewest rounds: recursive doubling, binomial tree, direct exchange
    bandwidth,  // fewest bytes: the dimensions of the plan, scatter + allgather, ring
};

struct Tuning {
    Algorithm algorithm = Algorithm::automatic;
    uint64_t small_bytes = 16 << 10;         // up to this many bytes in all, or the plan's, `automatic` means `latency`
    uint64_t chunk_bytes = 128 << 10;        // a plan without a chunk count cuts buffers into chunks of this size ...
    int most_chunks = 512;                   // ... but into no more than these, and ...
    uint64_t message_bytes = 16 << 10;       // ... so that messages in the first dimension are no shorter than this, or
                                             // than the plan says, ...
    uint64_t least_message_bytes = 4 << 10;  // ... in the last one than this ...
    uint64_t most_message_bytes = 8 << 20;   // ... nor longer than this in any case: scratch memory has this size
    // In place of chunk_bytes and most_chunks if the plan says how long messages are: on slow links tiers overlap
    // earlier.
    uint64_t planned_chunk_bytes = 64 << 10;
    int planned_most_chunks = 1024;
};

// The schedule of `rank` for `task`. Cost: proportional to its steps. Throws Error as extent_of() does, and if `rank`
// is not in [0, plan.size()). For buffers in device memory the result is already staged().
//
//   allreduce       hierarchy: per chunk a reduce-scatter by ring in each dimension, inner first, then the allgathers
//                   back: BlueConnect (Cho et al., MLSys 2019; arXiv:1708.02188). One dimension makes it the flat ring.
//                   few bytes: recursive doubling, under `automatic` after the plan's halvings, with a fold if the
//                   size is no power of two (Thakur, Rabenseifner, Gropp, IJHPCA 2005). Dimensions of other modes
//                   than r are group steps, at any size
//   reduce_scatter  ring over the plan's order
//   allgather       ring over the plan's order; latency: everyone to everyone
//   broadcast       scatter by a binomial tree, then allgather by ring (van de Geijn); latency: binomial tree
//   alltoall        a chunk for each distance
//   barrier         dissemination (Hensgen, Finkel, Manber 1988)
Schedule make_schedule(const Plan& plan, int rank, const Task& task, const Tuning& tuning = {});

}  // namespace ddl
