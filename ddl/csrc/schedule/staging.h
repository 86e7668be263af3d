// Staging: turns a schedule for host buffers into one for buffers in device memory.
#pragma once

#include "schedule/schedule.h"

namespace ddl {

// In the result, messages, reductions and MPI's collectives work in host memory, and NCCL's collectives on the device.
// Each chunk is cut into stretches of rounds that work on the host. Before a stretch, the data that it reads is copied
// into the chunk's staging memory; after it, the data that it wrote is copied back. The stretches of a chunk use the
// same staging memory, one after the other, which is as large as the largest needs. An allreduce's input and output
// share it: because the call may be in place, the schedule never reads a range of the input after writing it in the
// output. Pure.
Schedule staged(Schedule schedule);

}  // namespace ddl
