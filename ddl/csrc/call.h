// A call of a collective with its buffers, and whether they are what ddl.h asks for.
#pragma once

#include "schedule.h"
#include "status.h"

namespace ddl {

// What ddl.h says about the buffers. `broadcast` takes its buffer as `output`.
struct Call {
    Task task;
    const void* input = nullptr;
    void* output = nullptr;
    bool of_split = false;  // for messages: the engine makes it itself, as a part of split()
};

// DDL_ERROR_ARGUMENT where a buffer is NULL with elements in it, is not aligned to them, or overlaps the other in a way
// that ddl.h does not allow. Throws Error as extent_of() does.
Status check_buffers(const Call& call, int rank, int size);

}  // namespace ddl
