#include "check.h"
#include "schedule/schedule_cache.h"

using namespace ddl;

namespace {

Task task_of(uint64_t count) { return {Collective::allreduce, DDL_FLOAT32, DDL_SUM, count, 0}; }

}  // namespace

TEST("the schedules that were used last are kept") {
    const Plan plan = flat_plan(4);
    const Tuning tuning;
    const size_t each = make_schedule(plan, 0, task_of(1)).steps.size() + 16;
    ScheduleCache cache(3 * each);
    const auto get = [&](uint64_t count) { return cache.get(plan, 0, task_of(count), tuning); };
    const auto one = get(1), two = get(2);
    get(3);
    CHECK(get(1) == one);
    get(4);  // in place of 2, which was used longest ago
    CHECK(get(1) == one);
    CHECK(get(2) != two);
    CHECK_EQ(get(2)->task.count, uint64_t{2});
}

TEST("a schedule that is larger than the cache is kept until the next") {
    const Plan plan = flat_plan(2);
    ScheduleCache cache(1);
    const auto one = cache.get(plan, 0, task_of(1), {});
    CHECK(cache.get(plan, 0, task_of(1), {}) == one);
    cache.get(plan, 0, task_of(2), {});
    CHECK(cache.get(plan, 0, task_of(1), {}) != one);
}
