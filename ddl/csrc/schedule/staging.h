// Schedules for buffers in a device's memory, made from those for buffers in host memory.
#pragma once

#include "schedule/schedule.h"

namespace ddl {

// The schedule with its messages, reductions and MPI's collectives in host memory, and NCCL's on the device. Each chunk
// is cut into stretches of rounds that work on the host; before a stretch what it reads is copied into the chunk's
// staging memory, after it what it wrote is copied back. Stretches of one chunk use the same staging memory, one after
// the other; it holds what the largest touches, and nothing else. An allreduce's input and output share it: as it may
// be called in place, what it reads of one it has not yet written of the other. Pure.
Schedule staged(Schedule schedule);

}  // namespace ddl
