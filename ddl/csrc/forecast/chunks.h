// The chunks of an allreduce, as the simulator needs them. Pure; internal to simulate.cc.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "base/range.h"
#include "base/types.h"
#include "schedule/builder.h"

namespace ddl {

// The chunks of a task, built on demand. A chunk of a hierarchy equals the schedule of as many elements in one chunk.
// Chunks have only two sizes, so few schedules are built for any number of chunks.
class Chunks {
  public:
    Chunks(const Plan& plan, const Task& task, const Tuning& tuning) : plan_(plan), task_(task), tuning_(tuning) {
        plan_.chunks = 1;
        first_ = make_schedule(plan_, 0, task, tuning);
        is_hierarchy_ = task.collective == Collective::allreduce && plan.size() > 1 && task.count > 0 &&
                        first_.algorithm.rfind("recursive", 0) != 0;
        const auto wanted = static_cast<uint64_t>(Builder(plan, 0, task, tuning).chunks(task.count));
        if (is_hierarchy_) {
            count_ = static_cast<uint32_t>(std::min(wanted, task.count));
        } else {
            plan_.chunks = plan.chunks;
            first_ = make_schedule(plan_, 0, task, tuning);
            count_ = static_cast<uint32_t>(first_.chunks.size());
        }
    }

    uint32_t count() const { return count_; }
    const std::string& algorithm() const { return first_.algorithm; }
    const std::string& reason() const { return first_.reason; }
    // About how many messages a rank sends and receives in all.
    double messages() const {
        return static_cast<double>(first_.steps.size()) * (is_hierarchy_ ? static_cast<double>(count_) : 1);
    }
    // Whether the ranks differ only in their places: if parts are empty, some ranks have less to do.
    bool is_uniform() const { return is_hierarchy_ && task_.count >= count_ * static_cast<uint64_t>(plan_.size()); }
    // Bytes of a message in a dimension of a hierarchy, whose parts may differ by an element.
    struct Bytes {
        double largest = 0, mean = 0;
    };
    Bytes bytes(uint32_t chunk, size_t dimension) const {
        uint64_t largest = kind(chunk);
        double mean = static_cast<double>(largest);
        for (size_t d = 0; d <= dimension; ++d) {
            largest = Range{0, largest}.part(0, plan_.dimensions[d]).size();
            mean /= plan_.dimensions[d];
        }
        const uint64_t element = size_of(task_.type);
        return {static_cast<double>(largest * element), mean * static_cast<double>(element)};
    }
    // Chunks of one kind are alike.
    uint64_t kind(uint32_t chunk) const {
        return is_hierarchy_ ? Range{0, task_.count}.part(static_cast<int>(chunk), static_cast<int>(count_)).size()
                             : chunk;
    }
    // The rounds of a chunk in the schedule of `rank`.
    std::pair<Schedule, Span> schedule(int rank, uint32_t chunk) const {
        Task task = task_;
        if (is_hierarchy_) task.count = kind(chunk);
        Tuning tuning = tuning_;
        if (is_hierarchy_) tuning.algorithm = Algorithm::bandwidth;
        Schedule made = make_schedule(plan_, rank, task, tuning);
        const Span rounds = made.chunks[is_hierarchy_ ? 0 : chunk];
        return {std::move(made), rounds};
    }

  private:
    Plan plan_;
    const Task task_;
    const Tuning& tuning_;
    Schedule first_;
    bool is_hierarchy_ = false;
    uint32_t count_ = 0;
};

}  // namespace ddl
