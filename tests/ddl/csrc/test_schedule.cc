// Schedules are checked without an engine: an executor runs them on numbers that say who contributed.
#include <deque>
#include <numeric>
#include <random>
#include <unordered_map>

#include "check.h"
#include "options.h"
#include "schedule.h"
#include "status.h"

using namespace ddl;

namespace {

// Executes the schedules of all ranks on int64 elements that wrap around. As every rank contributes random numbers, a
// sum is right only where each was added exactly once. Any order of progress is legal; ranks take turns.
class World {
  public:
    World(const Plan& plan, const Task& task, const Tuning& tuning) : plan_(plan), task_(task) {
        const Extent extent = extent_of(task, plan.size());
        std::mt19937_64 random(check::seed());
        for (int rank = 0; rank < plan.size(); ++rank) {
            ranks_.emplace_back();
            Rank& r = ranks_.back();
            r.schedule = make_schedule(plan, rank, task, tuning);
            r.input.resize(extent.input / 8);
            for (uint64_t& element : r.input) element = random();
            r.output.resize(extent.output / 8);
            if (task.collective == Collective::broadcast && rank == task.root) r.output = r.input;
            r.work.resize(r.schedule.work_bytes / 8);
            for (uint32_t c = 0; c < r.schedule.chunks.size(); ++c) r.runs.push_back({c, r.schedule.chunks[c].begin});
        }
    }

    // False where ranks wait for one another for ever, or messages are left over.
    bool execute() {
        bool moved = true;
        while (moved) {
            moved = false;
            for (int rank = 0; rank < plan_.size(); ++rank) {
                for (Run& run : at(rank).runs) {
                    while (advance(rank, run)) moved = true;
                }
            }
        }
        for (const Rank& r : ranks_) {
            for (const Run& run : r.runs) {
                if (run.round != r.schedule.chunks[run.chunk].end) return false;
            }
        }
        for (const auto& [key, queue] : wire_) {
            if (!queue.empty()) return false;
        }
        return true;
    }

    bool is_right() const {
        const auto size = static_cast<size_t>(plan_.size());
        const auto count = static_cast<size_t>(task_.count);
        std::vector<uint64_t> sum(task_.collective == Collective::allreduce ? count : count * size);
        for (const Rank& r : ranks_) {
            for (size_t i = 0; i < std::min(sum.size(), r.input.size()); ++i) sum[i] += r.input[i];
        }
        for (size_t rank = 0; rank < size; ++rank) {
            const auto& out = ranks_[rank].output;
            for (size_t i = 0; i < out.size(); ++i) {
                uint64_t expected = 0;
                switch (task_.collective) {
                    case Collective::allreduce: expected = sum[i]; break;
                    case Collective::reduce_scatter: expected = sum[rank * count + i]; break;
                    case Collective::allgather: expected = ranks_[i / count].input[i % count]; break;
                    case Collective::broadcast: expected = ranks_[static_cast<size_t>(task_.root)].input[i]; break;
                    case Collective::alltoall: expected = ranks_[i / count].input[rank * count + i % count]; break;
                    case Collective::barrier: break;
                }
                if (out[i] != expected) return false;
            }
        }
        return true;
    }

    const Schedule& schedule(int rank) const { return ranks_[static_cast<size_t>(rank)].schedule; }

  private:
    struct Run {
        uint32_t chunk, round;
        bool posted = false;
    };
    struct Rank {
        Schedule schedule;
        std::vector<uint64_t> input, output, work;
        std::vector<Run> runs;
    };

    Rank& at(int rank) { return ranks_[static_cast<size_t>(rank)]; }
    uint64_t* data(Rank& r, const Place& place) {
        auto& buffer = place.buffer == Buffer::input ? r.input : place.buffer == Buffer::output ? r.output : r.work;
        return buffer.data() + place.offset / 8;
    }
    std::deque<std::vector<uint64_t>>& wire(int from, int to, uint32_t chunk) {
        const auto size = static_cast<uint64_t>(plan_.size());
        return wire_[(chunk * size + static_cast<uint64_t>(from)) * size + static_cast<uint64_t>(to)];
    }

    bool advance(int rank, Run& run) {
        Rank& r = at(rank);
        if (run.round == r.schedule.chunks[run.chunk].end) return false;
        const Span round = r.schedule.rounds[run.round];
        const auto begin = r.schedule.steps.begin() + round.begin, end = r.schedule.steps.begin() + round.end;
        if (!run.posted) {
            run.posted = true;
            for (auto step = begin; step != end; ++step) {
                if (step->kind != StepKind::send) continue;
                const uint64_t* from = data(r, step->from);
                wire(rank, step->peer, run.chunk).emplace_back(from, from + step->bytes / 8);
            }
        }
        for (auto step = begin; step != end; ++step) {
            if (step->is_incoming() && wire(step->peer, rank, run.chunk).empty()) return false;
        }
        for (auto step = begin; step != end; ++step) {
            const size_t count = step->bytes / 8;
            if (step->is_incoming()) {
                auto& queue = wire(step->peer, rank, run.chunk);
                const auto message = std::move(queue.front());
                queue.pop_front();
                CHECK_EQ(message.size(), count);
                for (size_t i = 0; i < count; ++i) {
                    const uint64_t mine = step->kind == StepKind::reduce ? data(r, step->from)[i] : 0;
                    data(r, step->to)[i] = mine + message[i];
                }
            } else if (step->kind == StepKind::copy) {
                std::copy_n(data(r, step->from), count, data(r, step->to));
            }
        }
        run.posted = false;
        ++run.round;
        return true;
    }

    const Plan& plan_;
    const Task task_;
    std::vector<Rank> ranks_;
    std::unordered_map<uint64_t, std::deque<std::vector<uint64_t>>> wire_;
};

Task task_of(Collective collective, uint64_t count, int root = 0) {
    return {collective, DDL_INT64, DDL_SUM, count, root};
}

void check_plan(const Plan& plan, const Task& task, Algorithm algorithm) {
    Tuning tuning;
    tuning.algorithm = algorithm;
    World world(plan, task, tuning);
    CHECK(world.execute());
    if (!world.is_right()) {
        check::failed(__FILE__, __LINE__,
                      std::string(name_of(task.collective)) + " of " + std::to_string(task.count) + " over " +
                          format_mode(plan) + " is wrong (" + world.schedule(0).algorithm + ")");
    }
}

// Bytes that `rank` sends in each dimension.
std::vector<uint64_t> bytes_sent(const Schedule& schedule, size_t dimensions) {
    std::vector<uint64_t> bytes(dimensions);
    for (const Step& step : schedule.steps) {
        if (step.kind == StepKind::send) bytes[step.dimension] += step.bytes;
    }
    return bytes;
}

}  // namespace

TEST("each collective is right for 1 to 9 ranks, every root, both algorithms, and counts 0, 1, odd and many") {
    for (int size = 1; size <= 9; ++size) {
        Plan plan = flat_plan(size);
        for (const int chunks : {1, 3}) {
            plan.chunks = chunks;
            for (int c = 0; c <= static_cast<int>(Collective::barrier); ++c) {
                const auto collective = static_cast<Collective>(c);
                for (const uint64_t count : {0, 1, 2, 7, 64, 101}) {
                    for (int root = 0; root < (collective == Collective::broadcast ? size : 1); ++root) {
                        check_plan(plan, task_of(collective, count, root), Algorithm::latency);
                        check_plan(plan, task_of(collective, count, root), Algorithm::bandwidth);
                    }
                }
            }
        }
    }
}

TEST("each collective is right in several dimensions with ranks in any order") {
    std::mt19937_64 random(check::seed());
    const std::vector<std::vector<int>> shapes = {{2, 4}, {4, 2}, {2, 2, 2}, {3, 5}, {1, 6}, {2, 1, 3}, {2, 3, 2, 2}};
    for (const auto& shape : shapes) {
        const int size = std::accumulate(shape.begin(), shape.end(), 1, std::multiplies<>());
        std::vector<int> order(static_cast<size_t>(size));
        std::iota(order.begin(), order.end(), 0);
        std::shuffle(order.begin(), order.end(), random);
        Plan plan = make_plan(size, shape, "r", order);
        for (const int chunks : {1, 5}) {
            plan.chunks = chunks;
            for (int c = 0; c <= static_cast<int>(Collective::barrier); ++c) {
                for (const uint64_t count : {0, 1, 13, 500}) {
                    const auto task = task_of(static_cast<Collective>(c), count, size - 1);
                    check_plan(plan, task, Algorithm::bandwidth);
                    check_plan(plan, task, Algorithm::latency);
                }
            }
        }
    }
}

TEST("thousands of ranks reduce each contribution exactly once") {
    std::vector<std::vector<int>> shapes = {{4, 4, 16}, {8, 9, 7}};
    if (!check::kSanitized) shapes.push_back({8, 8, 16}), shapes.push_back({8, 16, 32});
    for (const auto& shape : shapes) {
        const int size = std::accumulate(shape.begin(), shape.end(), 1, std::multiplies<>());
        Plan plan = make_plan(size, shape, "r");
        plan.chunks = 1;
        // One element for each rank: parts of one element at the end, the finest cut there is.
        const auto task = task_of(Collective::allreduce, static_cast<uint64_t>(size));
        check_plan(plan, task, Algorithm::bandwidth);
        check_plan(plan, task_of(Collective::allreduce, 3), Algorithm::latency);
    }
}

TEST("each tier carries the bytes of the formula, for up to 4,096 ranks") {
    for (const auto& shape : std::vector<std::vector<int>>{{8}, {2, 4}, {4, 2, 2}, {8, 16, 8}, {8, 16, 32}}) {
        const int size = std::accumulate(shape.begin(), shape.end(), 1, std::multiplies<>());
        Plan plan = make_plan(size, shape, "r");
        plan.chunks = 2;
        const uint64_t count = static_cast<uint64_t>(size) * 6, bytes = count * 8;  // divides evenly
        for (int rank = 0; rank < size; rank += std::max(1, size / 64)) {
            const Schedule schedule =
                make_schedule(plan, rank, task_of(Collective::allreduce, count), {Algorithm::bandwidth, 0, 1, 1});
            const auto sent = bytes_sent(schedule, shape.size());
            uint64_t inner = 1;
            for (size_t i = 0; i < shape.size(); ++i) {
                const auto d = static_cast<uint64_t>(shape[i]);
                CHECK_EQ(sent[i], 2 * (d - 1) * (bytes / inner) / d);
                inner *= d;
            }
        }
    }
}

TEST("both ends of each pair agree on which message is the first") {
    const Plan plan = make_plan(12, {3, 2, 2}, "r");
    for (int c = 0; c <= static_cast<int>(Collective::barrier); ++c) {
        for (const Algorithm algorithm : {Algorithm::latency, Algorithm::bandwidth}) {
            Tuning tuning;
            tuning.algorithm = algorithm;
            tuning.chunk_bytes = 64;
            tuning.message_bytes = 0;
            // (chunk, number among the pair's messages of that chunk) of the first message, from both ends.
            std::unordered_map<int, std::pair<uint32_t, int>> ends[2];
            for (int rank = 0; rank < plan.size(); ++rank) {
                const Schedule s = make_schedule(plan, rank, task_of(static_cast<Collective>(c), 100), tuning);
                for (uint32_t chunk = 0; chunk < s.chunks.size(); ++chunk) {
                    std::unordered_map<int, int> seen[2];
                    const uint32_t begin = s.rounds[s.chunks[chunk].begin].begin;
                    const uint32_t end = s.rounds[s.chunks[chunk].end - 1].end;
                    for (uint32_t i = begin; i < end; ++i) {
                        const Step& step = s.steps[i];
                        if (!step.is_message()) continue;
                        const int side = step.is_incoming();
                        const int pair = side ? step.peer * 100 + rank : rank * 100 + step.peer;
                        const int number = seen[side][pair]++;
                        if (step.first) CHECK(ends[side].emplace(pair, std::pair(chunk, number)).second);
                    }
                }
            }
            CHECK(ends[0] == ends[1]);
        }
    }
}

TEST("small buffers take the fewest rounds, and the reason says so") {
    const Schedule small = make_schedule(make_plan(8, {4, 2}, "r"), 3, task_of(Collective::allreduce, 16));
    CHECK_EQ(small.algorithm, std::string("recursive doubling"));
    CHECK_EQ(small.rounds.size(), size_t{3});
    CHECK_CONTAINS(small.reason, "few bytes");
    const Schedule large = make_schedule(make_plan(8, {4, 2}, "r"), 3, task_of(Collective::allreduce, 1 << 20));
    CHECK_EQ(large.algorithm, std::string("hierarchy 4x2"));
    CHECK(large.chunks.size() >= 8);
}

TEST("tasks that no memory holds, unknown operations and roots are refused") {
    const Plan plan = flat_plan(4);
    const auto refusal = [&](Task task) { return check::message_of<Error>([&] { make_schedule(plan, 0, task); }); };
    CHECK_CONTAINS(refusal(task_of(Collective::allgather, uint64_t{1} << 60)), "more than memory");
    CHECK_CONTAINS(refusal(task_of(Collective::broadcast, 1, 4)), "root 4");
    Task task = task_of(Collective::allreduce, 1);
    task.op = static_cast<ReduceOp>(9);
    CHECK_CONTAINS(refusal(task), "operation 9");
    task.op = DDL_SUM;
    task.type = static_cast<DataType>(-1);
    CHECK_CONTAINS(refusal(task), "data type -1");
}

TEST("messages are neither so short that latency rules, nor so long that scratch grows with the buffer") {
    for (const int size : {2, 64, 512}) {
        for (const uint64_t mib : {1, 64, 4096}) {
            const Task task{Collective::allreduce, DDL_FLOAT32, DDL_SUM, mib << 18, 0};
            const Schedule schedule = make_schedule(flat_plan(size), 0, task);
            for (const Step& step : schedule.steps) {
                if (!step.is_message()) continue;
                CHECK(step.bytes <= (8 << 20) + 4096);
                CHECK(step.bytes >= (16 << 10) - 4096 || schedule.chunks.size() == 1);
            }
        }
    }
}
