#include "schedule/schedule.h"

#include <algorithm>
#include <tuple>

#include "base/status.h"
#include "schedule/builder.h"
#include "schedule/staging.h"

namespace ddl {
namespace {

constexpr int kMostDirect = 64;  // ranks up to which all send to all at once

// The bytes of `blocks` blocks of the task's elements.
uint64_t bytes_of(const Task& task, int blocks) {
    uint64_t result = 0;
    // PTRDIFF_MAX: no buffer can be larger, and offsets stay far from overflow.
    if (__builtin_mul_overflow(task.count, size_of(task.type), &result) ||
        __builtin_mul_overflow(result, static_cast<uint64_t>(blocks), &result) ||
        result > static_cast<uint64_t>(PTRDIFF_MAX)) {
        throw Error(DDL_ERROR_ARGUMENT, "count: " + std::to_string(task.count) + " elements of " +
                                            std::to_string(size_of(task.type)) + " bytes" +
                                            (blocks > 1 ? " for each of " + std::to_string(blocks) + " ranks" : "") +
                                            " are more than memory can be addressed");
    }
    return result;
}

// A mode that the user chose is kept even for small buffers.
bool has_groups(const Plan& plan, const Task& task) {
    for (size_t i = 0; i < plan.dimensions.size(); ++i) {
        if (plan.dimensions[i] > 1 && mode_of(plan, i, task) != 'r') return true;
    }
    return false;
}

bool is_small(const Task& task, const Plan& plan, const Tuning& tuning) {
    if (tuning.algorithm != Algorithm::automatic) return tuning.algorithm == Algorithm::latency;
    if (task.collective == Collective::allreduce && has_groups(plan, task)) return false;
    const Extent extent = extent_of(task, plan.size());
    const bool is_measured = task.collective == Collective::allreduce && plan.small_bytes > 0;
    return std::max(extent.input, extent.output) <= (is_measured ? plan.small_bytes : tuning.small_bytes);
}

// The halvings that the plan has before the doublings of a small allreduce.
int halvings_of(const Plan& plan, const Task& task, const Tuning& tuning) {
    if (tuning.algorithm != Algorithm::automatic || plan.small_bytes == 0) return 0;
    const uint64_t bytes = task.count * size_of(task.type);
    const auto is_halved = [&](uint64_t limit) { return bytes > limit; };
    return static_cast<int>(std::count_if(plan.halved_above.begin(), plan.halved_above.end(), is_halved));
}

void build(Builder& builder, bool small) {
    switch (builder.task().collective) {
        case Collective::allreduce:
            small ? build_doubling(builder, halvings_of(builder.plan(), builder.task(), builder.tuning()))
                  : build_hierarchy(builder);
            break;
        case Collective::reduce_scatter: build_ring_reduce_scatter(builder); break;
        case Collective::allgather:
            if (small && builder.size() <= kMostDirect) {
                build_direct_allgather(builder);
            } else {
                build_ring_allgather(builder);
            }
            break;
        case Collective::broadcast: small ? build_tree_broadcast(builder) : build_scatter_broadcast(builder); break;
        case Collective::alltoall: build_alltoall(builder); break;
        case Collective::barrier: build_barrier(builder); break;
    }
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
           root == other.root && memory == other.memory;
}

char mode_of(const Plan& plan, size_t dimension, const Task& task) {
    const char mode = plan.modes[dimension];
    if (mode != 'n' && mode != 'b') return mode;
    const bool orders = task.op == DDL_MIN || task.op == DDL_MAX;
    return task.memory == Memory::host || (orders && is_float(task.type)) ? 'r' : mode;
}

bool uses_nccl(const Plan& plan, const Task& task) {
    if (task.collective != Collective::allreduce) return false;
    for (size_t i = 0; i < plan.dimensions.size(); ++i) {
        const char mode = mode_of(plan, i, task);
        if (plan.dimensions[i] > 1 && (mode == 'n' || mode == 'b')) return true;
    }
    return false;
}

// A chunk c is at its stage s in turn c + s * lag. The last stage of chunk c - window comes before the first of chunk
// c, as (stages - 1) * lag < window. So once this call has the whole window, the next step always belongs to a chunk in
// flight. With less room it may stand still until earlier calls, which never wait for it, have finished. Stages count
// all dimensions, even one in which a rank has no part, so the numbers are the same on all ranks.
std::vector<uint32_t> group_order(const Schedule& schedule, int window) {
    const uint32_t lag = schedule.stages < 2 ? 0 : static_cast<uint32_t>((window - 1) / (schedule.stages - 1));
    std::vector<std::tuple<uint32_t, uint32_t, uint32_t, uint32_t>> turns;  // turn, chunk, stage, index
    for (uint32_t chunk = 0; chunk < schedule.chunks.size(); ++chunk) {
        const Span rounds = schedule.chunks[chunk];
        for (uint32_t i = schedule.rounds[rounds.begin].begin; i < schedule.rounds[rounds.end - 1].end; ++i) {
            const Step& step = schedule.steps[i];
            if (step.is_group()) turns.emplace_back(chunk + step.stage * lag, chunk, step.stage, i);
        }
    }
    std::sort(turns.begin(), turns.end());
    std::vector<uint32_t> order;
    order.reserve(turns.size());
    for (const auto& turn : turns) order.push_back(std::get<3>(turn));
    return order;
}

int window_of(const Schedule& schedule, int most) {
    constexpr uint64_t kMostBytes = uint64_t{256} << 20;
    // Ranks may differ in whether their buffers are staged. A chunk needs at most its own size in staging memory.
    const uint64_t bytes = schedule.stages > 0 ? schedule.chunk_bytes : schedule.staging_bytes;
    if (bytes == 0) return most;
    return static_cast<int>(std::clamp<uint64_t>(kMostBytes / bytes, 1, static_cast<uint64_t>(most)));
}

Extent extent_of(const Task& task, int size) {
    if (!is_valid(task.op)) {
        throw Error(DDL_ERROR_ARGUMENT, "operation " + std::to_string(static_cast<int>(task.op)) + " is not a ddl_op");
    }
    if (task.collective == Collective::broadcast && (task.root < 0 || task.root >= size)) {
        throw Error(DDL_ERROR_ARGUMENT, "root " + std::to_string(task.root) +
                                            " is no rank of the communicator: it has " + std::to_string(size));
    }
    const uint64_t block = bytes_of(task, 1);
    const auto blocks = [&] { return bytes_of(task, size); };
    switch (task.collective) {
        case Collective::allreduce:
        case Collective::broadcast: return {block, block};
        case Collective::reduce_scatter: return {blocks(), block};
        case Collective::allgather: return {block, blocks()};
        case Collective::alltoall: return {blocks(), blocks()};
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
    } else {
        build(builder, small);
    }
    Schedule schedule = builder.finish();
    return task.memory == Memory::device ? staged(std::move(schedule)) : schedule;
}

}  // namespace ddl
