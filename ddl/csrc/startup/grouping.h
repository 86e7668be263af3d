// Makes the groups that a plan's modes ask for.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "device/cuda.h"
#include "device/group.h"
#include "engine/engine.h"
#include "schedule/plan.h"
#include "startup/job.h"

namespace ddl {

// By dimension; null if it is a ring.
using GroupComms = std::vector<std::unique_ptr<GroupComm>>;

// The groups of mode m. Collective; blocks. It calls MPI, which nobody else may do meanwhile: there is no engine yet.
// Throws Error, also if the job has no MPI.
GroupComms make_mpi_groups(Job& job, const Plan& plan);

struct NcclGroupsOptions {
    int local_rank = 0;  // chooses the GPU if the program has not: see ddl.h
    Patience patience;
    std::function<void(const std::string&)> warn;
};

// Adds those of modes b and n, and returns the GPU that they use; null if there are none. `plan` is the world's, and
// `engine` runs it. Collective; blocks. Throws Error, on every rank, which names the ranks that cannot.
std::shared_ptr<CudaDevice> make_nccl_groups(Job& job, Engine& engine, const Plan& plan,
                                             const NcclGroupsOptions& options, GroupComms* comms);

// Frees the NCCL communicators of the session before. Not sooner than every rank has left it: what a rank has sent may
// be on its way to another whose collective is not complete.
void free_former_nccl();

}  // namespace ddl
