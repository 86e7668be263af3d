// A cache of the schedules that a communicator used last: training repeats the same calls, and making a schedule costs
// as much as executing a small one.
#pragma once

#include <list>
#include <memory>

#include "schedule/schedule.h"

namespace ddl {

class ScheduleCache {
  public:
    // `most_steps`: the most steps of all kept schedules together (a step takes some 80 bytes). The last used schedule
    // is always kept.
    explicit ScheduleCache(size_t most_steps = 1 << 20) : most_steps_(most_steps) {}

    // As make_schedule(); all calls must have the same plan, rank and tuning.
    std::shared_ptr<const Schedule> get(const Plan& plan, int rank, const Task& task, const Tuning& tuning);

  private:
    const size_t most_steps_;
    size_t steps_ = 0;
    std::list<std::shared_ptr<const Schedule>> kept_;  // the last used one first
};

}  // namespace ddl
