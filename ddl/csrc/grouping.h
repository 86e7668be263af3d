// Makes the groups that a plan's modes ask for.
#pragma once

#include <memory>

#include "cuda.h"
#include "engine.h"
#include "group.h"
#include "job.h"
#include "plan.h"

namespace ddl {

// What a session gives to its engine; both null where every dimension is a ring.
struct Grouping {
    std::shared_ptr<Groups> groups;
    std::shared_ptr<CudaDevice> device;  // the one that NCCL uses; null without modes b and n
};

// `plan` is the world's, and `engine` runs it. Collective; blocks. `local_rank` chooses the GPU where the program has
// not: see ddl.h. `timeout_seconds`: as Patience's. Throws Error, the same on every rank where NCCL cannot be used:
// DDL_ERROR_UNSUPPORTED or DDL_ERROR_TRANSPORT, which name the ranks that cannot.
Grouping make_grouping(Job& job, Engine& engine, const Plan& plan, int local_rank, double timeout_seconds);

}  // namespace ddl
