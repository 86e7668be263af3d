#include "schedule.h"

#include "builder.h"
#include "status.h"

namespace ddl {
namespace {

constexpr int kMostDirect = 64;  // ranks up to which everyone may send to everyone at once

uint64_t product(uint64_t a, uint64_t b) {
    uint64_t result = 0;
    // PTRDIFF_MAX: no buffer can be larger, and offsets stay far from overflow.
    if (__builtin_mul_overflow(a, b, &result) || result > static_cast<uint64_t>(PTRDIFF_MAX)) {
        throw Error(DDL_ERROR_ARGUMENT, "count: " + std::to_string(a) + " x " + std::to_string(b) +
                                            " bytes are more than memory can be addressed");
    }
    return result;
}

bool is_small(const Task& task, const Plan& plan, const Tuning& tuning) {
    if (tuning.algorithm != Algorithm::automatic) return tuning.algorithm == Algorithm::latency;
    const Extent extent = extent_of(task, plan.size());
    return std::max(extent.input, extent.output) <= tuning.small_bytes;
}

}  // namespace

const char* name_of(Collective collective) {
    switch (collective) {
        case Collective::allreduce: return "allreduce";
        case Collective::reduce_scatter: return "reduce_scatter";
        case Collective::allgather: return "allgather";
        case Collective::broadcast: return "broadcast";
        case Collective::alltoall: return "alltoall";
        case Collective::barrier: return "barrier";
    }
    return "unknown collective";
}

bool Task::operator==(const Task& other) const {
    return collective == other.collective && type == other.type && op == other.op && count == other.count &&
           root == other.root;
}

Extent extent_of(const Task& task, int size) {
    if (!is_valid(task.op)) {
        throw Error(DDL_ERROR_ARGUMENT,
                    "operation " + std::to_string(static_cast<int>(task.op)) + " is none of ddl_op");
    }
    if (task.collective == Collective::broadcast && (task.root < 0 || task.root >= size)) {
        throw Error(DDL_ERROR_ARGUMENT, "root " + std::to_string(task.root) +
                                            " is no rank of the communicator: it has " + std::to_string(size));
    }
    const uint64_t block = product(task.count, size_of(task.type));
    const uint64_t blocks = product(block, static_cast<uint64_t>(size));
    switch (task.collective) {
        case Collective::allreduce:
        case Collective::broadcast: return {block, block};
        case Collective::reduce_scatter: return {blocks, block};
        case Collective::allgather: return {block, blocks};
        case Collective::alltoall: return {blocks, blocks};
        case Collective::barrier: return {};
    }
    throw Error(DDL_ERROR_ARGUMENT, "unknown collective");
}

Schedule make_schedule(const Plan& plan, int rank, const Task& task, const Tuning& tuning) {
    if (rank < 0 || rank >= plan.size()) {
        throw Error(DDL_ERROR_ARGUMENT,
                    "rank " + std::to_string(rank) + " is not in a plan of " + std::to_string(plan.size()));
    }
    extent_of(task, plan.size());  // checks the task
    Builder builder(plan, rank, task, tuning);
    const bool small = is_small(task, plan, tuning);
    if (plan.size() == 1) {
        const Range all{0, task.count};
        builder.algorithm("copy", "one rank");
        if (task.collective != Collective::broadcast && task.collective != Collective::barrier) {
            builder.copy(Buffer::input, all, Buffer::output, all);
        }
        return builder.finish();
    }
    switch (task.collective) {
        case Collective::allreduce: small ? build_doubling(builder) : build_hierarchy(builder); break;
        case Collective::reduce_scatter: build_ring_reduce_scatter(builder); break;
        case Collective::allgather:
            if (small && plan.size() <= kMostDirect) {
                build_direct_allgather(builder);
            } else {
                build_ring_allgather(builder);
            }
            break;
        case Collective::broadcast: small ? build_tree_broadcast(builder) : build_scatter_broadcast(builder); break;
        case Collective::alltoall: build_alltoall(builder); break;
        case Collective::barrier: build_barrier(builder); break;
    }
    return builder.finish();
}

}  // namespace ddl
