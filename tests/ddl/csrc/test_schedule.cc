// Schedules are checked without an engine: an executor runs them on numbers that say who contributed. For buffers in a
// device's memory it has input and output there, and staging memory for each chunk, filled with other numbers.
#include <algorithm>
#include <deque>
#include <map>
#include <numeric>
#include <random>
#include <tuple>
#include <unordered_map>

#include "base/range.h"
#include "base/status.h"
#include "check.h"
#include "schedule/options.h"
#include "schedule/schedule.h"

using namespace ddl;

namespace {

// Executes the schedules of all ranks on int64 elements that wrap around. As every rank contributes random numbers, a
// sum is right only if each was added exactly once. Any order of progress is legal; ranks take turns.
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
            for (uint32_t c = 0; c < r.schedule.chunks.size(); ++c) {
                r.runs.push_back({c, r.schedule.chunks[c].begin, false, {}});
                r.runs.back().staging.resize(r.schedule.staging_bytes / 8, 0xeeee);
            }
            r.group_order = group_order(r.schedule, kWindow);
        }
    }

    // False if ranks wait for one another for ever, or messages are left over.
    bool execute() {
        bool moved = true;
        while (moved) {
            moved = false;
            for (int rank = 0; rank < plan_.size(); ++rank) {
                int in_flight = 0;  // a window of chunks, as the engine has
                for (Run& run : at(rank).runs) {
                    const uint32_t end = at(rank).schedule.chunks[run.chunk].end;
                    if (run.round == end) continue;
                    if (++in_flight > kWindow) break;
                    while (advance(rank, run)) moved = true;
                    if (run.round == end) --in_flight;
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
        for (const auto& [key, meeting] : meetings_) {
            if (!meeting.from.empty()) return false;
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
        std::vector<uint64_t> staging;
        uint32_t early = 0;  // the number of incoming messages of the round that were taken at once
        std::tuple<size_t, int, uint64_t> meeting = {};  // dimension, first rank, number of the call
    };
    // A group step: what its ranks put in, until all have taken what is theirs.
    struct Meeting {
        std::map<int, std::pair<StepKind, std::vector<uint64_t>>> from;
        size_t taken = 0;
    };
    static constexpr int kWindow = 4;
    struct Rank {
        Schedule schedule;
        std::vector<uint64_t> input, output, work;
        std::vector<Run> runs;
        std::vector<uint32_t> group_order;
        size_t next_group = 0;
        std::map<size_t, uint64_t> calls;  // on each dimension's communicator so far
    };

    Rank& at(int rank) { return ranks_[static_cast<size_t>(rank)]; }
    // `on_device`: the step works on the caller's buffers, wherever they are.
    uint64_t* data(Rank& r, Run& run, const Place& place, bool on_device = false) {
        if (place.buffer == Buffer::staging) return run.staging.data() + place.offset / 8;
        if (place.buffer == Buffer::work) return r.work.data() + place.offset / 8;
        CHECK(on_device || task_.memory == Memory::host);
        return (place.buffer == Buffer::input ? r.input : r.output).data() + place.offset / 8;
    }
    // A group step. Its ranks meet in the order in which they come to the communicator, as MPI's and NCCL's do. True
    // where it is complete for this rank.
    bool meet(int rank, Run& run, const Step& step, uint32_t index) {
        Rank& r = at(rank);
        const auto& members = r.schedule.groups[step.dimension];
        const auto size = static_cast<int>(members.size());
        const auto me = static_cast<int>(std::find(members.begin(), members.end(), rank) - members.begin());
        const size_t count = step.bytes / 8;
        const auto part = [&](int i) { return Range{0, count}.part(i, size); };
        uint64_t* const to = data(r, run, step.to, step.on_device);
        if (!run.posted) {
            if (r.group_order[r.next_group] != index) return false;
            ++r.next_group;
            run.posted = true;
            run.meeting = {step.dimension, members[0], r.calls[step.dimension]++};
            const uint64_t* from = to + part(me).begin;
            uint64_t length = part(me).size();
            if (step.kind == StepKind::reduce_scatter) from = data(r, run, step.from, step.on_device), length = count;
            CHECK(meetings_[run.meeting]
                      .from.emplace(rank, std::pair(step.kind, std::vector(from, from + length)))
                      .second);
        }
        Meeting& meeting = meetings_[run.meeting];
        if (meeting.from.size() < members.size()) return false;
        std::vector<uint64_t> reduced(part(me).size());
        for (int i = 0; i < size; ++i) {
            const auto& [kind, numbers] = meeting.from[members[static_cast<size_t>(i)]];
            CHECK_EQ(kind, step.kind);
            const bool gathers = step.kind == StepKind::allgather;
            CHECK_EQ(numbers.size(), gathers ? part(i).size() : count);
            if (gathers) std::copy(numbers.begin(), numbers.end(), to + part(i).begin);
            for (size_t k = 0; !gathers && k < reduced.size(); ++k) reduced[k] += numbers[part(me).begin + k];
        }
        if (step.kind == StepKind::reduce_scatter) std::copy(reduced.begin(), reduced.end(), to);
        if (++meeting.taken == members.size()) meetings_.erase(run.meeting);
        return true;
    }
    std::deque<std::vector<uint64_t>>& wire(int from, int to, uint32_t chunk) {
        const auto size = static_cast<uint64_t>(plan_.size());
        return wire_[(chunk * size + static_cast<uint64_t>(from)) * size + static_cast<uint64_t>(to)];
    }

    void receive(int rank, Run& run, const Step& step) {
        Rank& r = at(rank);
        auto& queue = wire(step.peer, rank, run.chunk);
        const auto message = std::move(queue.front());
        queue.pop_front();
        CHECK_EQ(message.size(), step.bytes / 8);
        for (size_t i = 0; i < message.size(); ++i) {
            const uint64_t mine = step.kind == StepKind::reduce ? data(r, run, step.from)[i] : 0;
            data(r, run, step.to)[i] = mine + message[i];
        }
    }

    bool advance(int rank, Run& run) {
        Rank& r = at(rank);
        if (run.round == r.schedule.chunks[run.chunk].end) return false;
        const Span round = r.schedule.rounds[run.round];
        const auto begin = r.schedule.steps.begin() + round.begin, end = r.schedule.steps.begin() + round.end;
        if (begin->is_group()) {
            if (!meet(rank, run, *begin, round.begin)) return false;
            run.posted = false;
            ++run.round;
            return true;
        }
        if (!run.posted) {
            run.posted = true;
            run.early = 0;
            // Even before what the round sends is read.
            for (auto step = begin; step != end; ++step) {
                if (!step->is_incoming()) continue;
                if (!step->at_once || wire(step->peer, rank, run.chunk).empty()) break;
                receive(rank, run, *step);
                ++run.early;
            }
            for (auto step = begin; step != end; ++step) {
                if (step->kind != StepKind::send) continue;
                const uint64_t* from = step->bytes > 0 ? data(r, run, step->from) : nullptr;
                wire(rank, step->peer, run.chunk).emplace_back(from, from + step->bytes / 8);
            }
        }
        const auto is_left = [&, incoming = uint32_t{0}](const Step& step) mutable {
            return step.is_incoming() && ++incoming > run.early;
        };
        for (auto [step, left] = std::pair(begin, is_left); step != end; ++step) {
            if (left(*step) && wire(step->peer, rank, run.chunk).empty()) return false;
        }
        for (auto [step, left] = std::pair(begin, is_left); step != end; ++step) {
            const size_t count = step->bytes / 8;
            if (step->is_incoming()) {
                if (left(*step)) receive(rank, run, *step);
            } else if (step->kind == StepKind::copy || step->is_transfer()) {
                const bool transfer = step->is_transfer();
                std::copy_n(data(r, run, step->from, transfer), count, data(r, run, step->to, transfer));
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
    std::map<std::tuple<size_t, int, uint64_t>, Meeting> meetings_;
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

TEST("more bytes than memory can have are refused with the caller's count") {
    const auto said = [](Collective collective, uint64_t count) {
        return check::message_of<Error>([&] { extent_of({collective, DDL_FLOAT16, DDL_SUM, count, 0}, 2); });
    };
    const uint64_t half = uint64_t{1} << 61;
    const std::string count = "count: " + std::to_string(half) + " elements of 2 bytes";
    CHECK_EQ(said(Collective::allreduce, half), "");
    CHECK_EQ(said(Collective::allgather, half), count + " for each of 2 ranks are more than memory can be addressed");
    CHECK_CONTAINS(said(Collective::allreduce, 4 * half), "elements of 2 bytes are more than memory");
}

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

TEST("recursive doubling is right after any number of halvings, for 1 to 17 ranks in any order and either memory") {
    std::mt19937_64 random(check::seed());
    for (int size = 1; size <= 17; ++size) {
        std::vector<int> order(static_cast<size_t>(size));
        std::iota(order.begin(), order.end(), 0);
        std::shuffle(order.begin(), order.end(), random);
        Plan plan = make_plan(size, {size}, "r", order);
        plan.small_bytes = 1 << 20;
        for (; plan.halved_above.size() <= 5; plan.halved_above.push_back(0)) {
            for (const uint64_t count : {0, 1, 2, 7, 101}) {
                Task task = task_of(Collective::allreduce, count);
                check_plan(plan, task, Algorithm::automatic);
                task.memory = Memory::device;
                check_plan(plan, task, Algorithm::automatic);
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

TEST("dimensions of MPI's and NCCL's collectives, in host and device memory, are right beside rings") {
    std::mt19937_64 random(check::seed());
    const std::vector<std::pair<std::string, std::vector<int>>> plans = {
        {"m", {1}},         {"m", {3}},         {"mr", {2, 3}},
        {"rm", {3, 2}},     {"mm", {4, 2}},     {"mrm", {2, 2, 3}},
        {"rmr", {2, 3, 2}}, {"mmm", {2, 2, 2}}, {"mmmm", {2, 2, 2, 2}},
        {"nr", {4, 2}},     {"rn", {2, 3}},     {"bnrm", {2, 2, 2, 2}},
        {"nmb", {3, 2, 2}}, {"n", {5}},         {"r", {6}}};
    for (const auto& [modes, shape] : plans) {
        const int size = std::accumulate(shape.begin(), shape.end(), 1, std::multiplies<>());
        std::vector<int> order(static_cast<size_t>(size));
        std::iota(order.begin(), order.end(), 0);
        std::shuffle(order.begin(), order.end(), random);
        Plan plan = make_plan(size, shape, modes, order);
        for (const int chunks : {1, 11}) {
            plan.chunks = chunks;
            for (const Memory memory : {Memory::host, Memory::device}) {
                for (int c = 0; c <= static_cast<int>(Collective::barrier); ++c) {
                    for (const uint64_t count : {0, 1, 13, 500}) {
                        Task task = task_of(static_cast<Collective>(c), count, size - 1);
                        task.memory = memory;
                        check_plan(plan, task, Algorithm::automatic);
                        check_plan(plan, task, Algorithm::latency);
                    }
                }
            }
        }
    }
}

TEST("hundreds of ranks in mixed modes reduce each contribution exactly once") {
    const std::vector<std::pair<std::string, std::vector<int>>> plans = {
        {"mrm", {4, 4, 16}}, {"rmr", {8, 6, 8}}, {"nrm", {8, 4, 8}}};
    for (const auto& [modes, shape] : plans) {
        const int size = std::accumulate(shape.begin(), shape.end(), 1, std::multiplies<>());
        Plan plan = make_plan(size, shape, modes);
        plan.chunks = 6;
        for (const Memory memory : {Memory::host, Memory::device}) {
            for (const uint64_t count : {static_cast<uint64_t>(size) - 7, static_cast<uint64_t>(size) * 6 + 5}) {
                Task task = task_of(Collective::allreduce, count);
                task.memory = memory;
                check_plan(plan, task, Algorithm::automatic);
            }
        }
    }
}

TEST("the order of group steps is the same for all ranks of a group, and pipelines the chunks") {
    Plan plan = make_plan(8, {2, 2, 2}, "mrm");
    plan.chunks = 9;
    const Schedule schedule = make_schedule(plan, 0, task_of(Collective::allreduce, 1000));
    const auto order = group_order(schedule, 16);
    CHECK_EQ(order.size(), size_t{9 * 4});
    const auto chunk_of = [&](uint32_t index) {
        for (uint32_t c = 0; c < schedule.chunks.size(); ++c) {
            if (index < schedule.rounds[schedule.chunks[c].end - 1].end) return static_cast<int>(c);
        }
        return -1;
    };
    // Six chunks begin before the first goes on: five lie between its stages 0 and 2, of 6 stages in a window of 16. A
    // window of one chunk takes them one by one.
    for (int i = 0; i < 6; ++i) CHECK_EQ(chunk_of(order[static_cast<size_t>(i)]), i + 1);
    CHECK_EQ(chunk_of(order[6]), 1);
    CHECK_EQ(static_cast<int>(schedule.steps[order[6]].stage), 2);
    const auto serial = group_order(schedule, 1);
    CHECK(std::is_sorted(serial.begin(), serial.end()));
}

TEST("staging holds what a chunk touches, and copies it once each way") {
    for (const char* modes : {"r", "m", "nr", "nm"}) {
        const std::vector<int> shape = modes[1] ? std::vector<int>{4, 2} : std::vector<int>{8};
        Plan plan = make_plan(8, shape, modes);
        plan.chunks = 4;
        Task task = task_of(Collective::allreduce, 8 * 4 * 100);
        task.memory = Memory::device;
        const Schedule schedule = make_schedule(plan, 3, task);
        // By NCCL inside, a fourth of it remains for the host.
        const uint64_t bytes = task.count * 8 / (modes[0] == 'n' ? 4 : 1);
        uint64_t out = 0, back = 0;
        for (const Step& step : schedule.steps) {
            if (step.kind == StepKind::to_host) out += step.bytes;
            if (step.kind == StepKind::to_device) back += step.bytes;
        }
        CHECK_EQ(out, bytes);
        CHECK_EQ(back, bytes);
        CHECK(schedule.staging_bytes <= bytes / 4 + 1024);  // the input and the output share it
        CHECK(schedule.staging_bytes >= bytes / 4);
    }
    Task average = task_of(Collective::allreduce, 800);
    average.op = DDL_AVERAGE;
    average.memory = Memory::device;
    uint64_t divided = 0;
    for (const Step& step : make_schedule(make_plan(8, {8}, "n"), 0, average).steps) {
        if (step.kind == StepKind::to_host) divided += step.bytes;
    }
    CHECK_EQ(divided, uint64_t{800});  // a rank's part of an average is divided on the host
}

TEST("minima and maxima of floating point numbers, of which NCCL drops NaNs, are left to rings") {
    for (const char* modes : {"n", "b"}) {
        const Plan plan = make_plan(4, {4}, modes);
        for (const DataType type : {DDL_FLOAT16, DDL_BFLOAT16, DDL_FLOAT32, DDL_FLOAT64, DDL_INT32, DDL_UINT8}) {
            for (const ReduceOp op : {DDL_SUM, DDL_AVERAGE, DDL_MIN, DDL_MAX, DDL_PRODUCT}) {
                const Task task{Collective::allreduce, type, op, 100'000, 0, Memory::device};
                const bool by_nccl = op == DDL_SUM || op == DDL_AVERAGE || op == DDL_PRODUCT || !is_float(type);
                CHECK_EQ(uses_nccl(plan, task), by_nccl);
                CHECK_EQ(make_schedule(plan, 1, task).stages > 0, by_nccl);
            }
        }
    }
}

TEST("so few chunks are in flight that staging memory stays within bounds, and as many on every rank") {
    Task task{Collective::allreduce, DDL_FLOAT32, DDL_SUM, 0, 0, Memory::device};
    for (const char* modes : {"m", "mr", "nr", "r"}) {
        const Plan plan = make_plan(4, modes[1] ? std::vector<int>{2, 2} : std::vector<int>{4}, modes);
        for (const uint64_t count : {1ull << 10, 3ull << 20, (1ull << 28) + 3, 1ull << 31}) {
            task.count = count;
            task.memory = Memory::device;
            const Schedule schedule = make_schedule(plan, 0, task);
            const int window = window_of(schedule, 16);
            CHECK(window >= 1 && window <= 16);
            CHECK(window == 1 || static_cast<uint64_t>(window) * schedule.staging_bytes <= uint64_t{257} << 20);
            CHECK(count > (1ull << 27) || window == 16);
            for (int rank = 1; rank < 4 && schedule.stages > 0; ++rank) {
                CHECK_EQ(window_of(make_schedule(plan, rank, task), 16), window);
                if (modes[0] == 'n') continue;
                task.memory = rank % 2 == 0 ? Memory::device : Memory::host;
                CHECK_EQ(window_of(make_schedule(plan, rank, task), 16), window);
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
