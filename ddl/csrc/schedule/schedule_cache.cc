#include "schedule/schedule_cache.h"

#include <algorithm>

namespace ddl {
namespace {

size_t cost(const Schedule& schedule) { return schedule.steps.size() + 16; }  // an empty one takes memory too

}  // namespace

std::shared_ptr<const Schedule> ScheduleCache::get(const Plan& plan, int rank, const Task& task, const Tuning& tuning) {
    const auto found =
        std::find_if(kept_.begin(), kept_.end(), [&](const auto& schedule) { return schedule->task == task; });
    if (found != kept_.end()) {
        kept_.splice(kept_.begin(), kept_, found);
        return *found;
    }
    kept_.push_front(std::make_shared<const Schedule>(make_schedule(plan, rank, task, tuning)));
    steps_ += cost(*kept_.front());
    while (steps_ > most_steps_ && kept_.size() > 1) {
        steps_ -= cost(*kept_.back());
        kept_.pop_back();
    }
    return kept_.front();
}

}  // namespace ddl
