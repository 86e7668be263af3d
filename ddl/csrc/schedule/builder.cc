#include "schedule/builder.h"

#include <algorithm>

namespace ddl {

Builder::Builder(const Plan& plan, int rank, const Task& task, const Tuning& tuning)
    : plan_(plan), tuning_(tuning), position_(plan.positions[static_cast<size_t>(rank)]), element_(size_of(task.type)) {
    schedule_.task = task;
    schedule_.size = plan.size();
    schedule_.rank = rank;
}

int Builder::rank_at(int position) const {
    const int wrapped = (position % size() + size()) % size();
    return plan_.ranks[static_cast<size_t>(wrapped)];
}

int Builder::chunks(uint64_t elements) {
    const int count = plan_.chunks > 0 ? plan_.chunks : chunks_by_size(elements);
    const auto parts = static_cast<uint64_t>(count);
    schedule_.chunk_bytes = (elements + parts - 1) / parts * element_;
    return count;
}

int Builder::chunks_by_size(uint64_t elements) const {
    const uint64_t bytes = elements * element_, parts = static_cast<uint64_t>(plan_.dimensions[0]);
    const auto ranks = static_cast<uint64_t>(size());
    const bool planned = plan_.message_bytes > 0;
    const uint64_t message = planned ? plan_.message_bytes : tuning_.message_bytes;
    const uint64_t shortest = planned ? tuning_.planned_chunk_bytes : tuning_.chunk_bytes;
    const uint64_t chunk = std::max<uint64_t>({1, shortest, parts * message, ranks * tuning_.least_message_bytes});
    // Rounded up if the plan says how long messages are: longer ones would not go through shared memory.
    const uint64_t by_size = (bytes + (planned ? chunk - 1 : 0)) / chunk;
    const uint64_t least = bytes / parts / std::max<uint64_t>(1, tuning_.most_message_bytes);
    auto most = static_cast<uint64_t>(std::max(1, planned ? tuning_.planned_most_chunks : tuning_.most_chunks));
    for (size_t i = 0; i < plan_.dimensions.size(); ++i) {
        // Starting a collective of MPI or NCCL costs more than sending a message.
        constexpr uint64_t kMostGrouped = 32;
        if (is_grouped(i)) most = std::min(most, kMostGrouped);
    }
    // MPI counts the elements of a group step in an int.
    constexpr uint64_t kMostGroupBytes = 1 << 30;
    return static_cast<int>(std::max({std::clamp<uint64_t>(by_size, 1, most), least, bytes / kMostGroupBytes}));
}

void Builder::algorithm(std::string name, std::string reason) {
    schedule_.algorithm = std::move(name);
    schedule_.reason = std::move(reason);
}

void Builder::work(uint64_t elements) { schedule_.work_bytes = elements * element_; }

// Whether the reduce step number `index` may run before the other messages of its round, which ends before `end`, are
// complete: no other step uses what it writes, or writes what it reads. Local steps behind it run after it anyway.
bool Builder::is_alone(uint32_t index, uint32_t end) const {
    if (task().collective != Collective::allreduce) return false;
    const Step& step = schedule_.steps[index];
    // The input may be the output: of an allreduce, the same bytes at the same offsets.
    const auto memory_of = [](const Place& place) {
        return place.buffer == Buffer::input ? Buffer::output : place.buffer;
    };
    const auto meet = [&](const Place& mine, const Place& its, uint64_t bytes) {
        return memory_of(mine) == memory_of(its) && its.offset < mine.offset + step.bytes &&
               mine.offset < its.offset + bytes;
    };
    for (uint32_t i = round_begin_; i < end; ++i) {
        const Step& other = schedule_.steps[i];
        const bool is_local = other.kind == StepKind::copy || other.kind == StepKind::divide;
        if (i == index || (is_local && i > index)) continue;
        const bool reads = other.kind != StepKind::receive && meet(step.to, other.from, other.bytes);
        const bool writes = other.kind != StepKind::send &&
                            (meet(step.to, other.to, other.bytes) || meet(step.from, other.to, other.bytes));
        if (reads || writes) return false;
    }
    return true;
}

void Builder::close_round() {
    const auto end = static_cast<uint32_t>(schedule_.steps.size());
    for (uint32_t i = round_begin_; i < end; ++i) {
        Step& step = schedule_.steps[i];
        step.at_once = step.kind == StepKind::reduce && is_alone(i, end);
    }
    if (end > round_begin_) schedule_.rounds.push_back({round_begin_, end});
    round_begin_ = end;
}

void Builder::close_chunk() {
    close_round();
    const auto end = static_cast<uint32_t>(schedule_.rounds.size());
    if (end > chunk_begin_) schedule_.chunks.push_back({chunk_begin_, end});
    chunk_begin_ = end;
}

void Builder::round() { close_round(); }
void Builder::chunk() { close_chunk(); }

Step Builder::message(StepKind kind, int peer_position, Range range) const {
    Step step;
    step.kind = kind;
    step.peer = rank_at(peer_position);
    step.bytes = range.size() * element_;
    // The outermost dimension in which the two positions differ has the slowest link between them.
    const int peer = plan_.positions[static_cast<size_t>(step.peer)];
    int stride = 1;
    for (size_t i = 0; i < plan_.dimensions.size(); ++i) {
        if (peer / stride % plan_.dimensions[i] != position_ / stride % plan_.dimensions[i]) {
            step.dimension = static_cast<uint8_t>(i);
        }
        stride *= plan_.dimensions[i];
    }
    return step;
}

void Builder::send(int to, Buffer buffer, Range range) {
    if (range.size() == 0) return;
    Step step = message(StepKind::send, to, range);
    step.from = place(buffer, range);
    schedule_.steps.push_back(step);
}

void Builder::receive(int from, Buffer buffer, Range range) {
    if (range.size() == 0) return;
    Step step = message(StepKind::receive, from, range);
    step.to = place(buffer, range);
    schedule_.steps.push_back(step);
}

void Builder::reduce(int from, Buffer mine_buffer, Range mine, Buffer to_buffer, Range to, bool incoming_first) {
    if (mine.size() == 0) return;
    Step step = message(StepKind::reduce, from, mine);
    step.from = place(mine_buffer, mine);
    step.to = place(to_buffer, to);
    step.incoming_first = incoming_first;
    schedule_.steps.push_back(step);
}

void Builder::copy(Buffer from_buffer, Range from, Buffer to_buffer, Range to) {
    if (from.size() == 0) return;
    Step step;
    step.kind = StepKind::copy;
    step.bytes = from.size() * element_;
    step.from = place(from_buffer, from);
    step.to = place(to_buffer, to);
    schedule_.steps.push_back(step);
}

void Builder::finish_average(Range range) {
    if (task().op != DDL_AVERAGE || range.size() == 0) return;
    Step step;
    step.kind = StepKind::divide;
    step.bytes = range.size() * element_;
    step.to = place(Buffer::output, range);
    schedule_.steps.push_back(step);
}

bool Builder::is_grouped(size_t dimension) const {
    return plan_.dimensions[dimension] > 1 && mode_of(plan_, dimension, task()) != 'r';
}

Step Builder::group_step(StepKind kind, size_t dimension, Range range) {
    const int size = plan_.dimensions[dimension], stride = plan_.stride(dimension);
    const int at = plan_.coordinate(position_, dimension);
    const auto dimensions = static_cast<int>(plan_.dimensions.size());
    schedule_.groups.resize(plan_.dimensions.size());
    auto& members = schedule_.groups[dimension];
    for (int i = static_cast<int>(members.size()); i < size; ++i)
        members.push_back(rank_at(position_ + (i - at) * stride));
    schedule_.stages = 2 * dimensions;
    const auto d = static_cast<int>(dimension);
    Step step;
    step.kind = kind;
    step.dimension = static_cast<uint8_t>(dimension);
    step.stage = static_cast<uint8_t>(kind == StepKind::reduce_scatter ? d : 2 * dimensions - 1 - d);
    step.on_device = plan_.modes[dimension] != 'm';
    step.bytes = range.size() * element_;
    return step;
}

void Builder::reduce_scatter(size_t dimension, Buffer from_buffer, Range range) {
    if (range.size() == 0) return;  // on every rank of the group
    close_round();
    Step step = group_step(StepKind::reduce_scatter, dimension, range);
    const int at = plan_.coordinate(position_, dimension);
    step.from = place(from_buffer, range);
    step.to = place(Buffer::output, range.part(at, plan_.dimensions[dimension]));
    schedule_.steps.push_back(step);
    close_round();
}

void Builder::allgather(size_t dimension, Range range) {
    if (range.size() == 0) return;
    close_round();
    Step step = group_step(StepKind::allgather, dimension, range);
    step.to = place(Buffer::output, range);
    step.from = step.to;
    schedule_.steps.push_back(step);
    close_round();
}

void Builder::signal(int to) { schedule_.steps.push_back(message(StepKind::send, to, {})); }
void Builder::await(int from) { schedule_.steps.push_back(message(StepKind::receive, from, {})); }

Schedule Builder::finish() {
    close_chunk();
    // Both ends of a pair list its messages in the same order (chunk by chunk), so both mark the same one.
    std::vector<bool> sent(static_cast<size_t>(size())), received(static_cast<size_t>(size()));
    for (Step& step : schedule_.steps) {
        if (!step.is_message()) continue;
        auto&& seen = (step.is_incoming() ? received : sent)[static_cast<size_t>(step.peer)];
        step.first = !seen;
        seen = true;
    }
    return std::move(schedule_);
}

}  // namespace ddl
