// A call of a collective with its buffers, and whether they are what ddl.h asks for.
#pragma once

#include <memory>

#include "base/status.h"
#include "device/device.h"
#include "engine/header.h"
#include "schedule/schedule.h"

namespace ddl {

// What ddl.h says about the buffers. `broadcast` takes its buffer as `output`.
struct Call {
    Task task;
    const void* input = nullptr;
    void* output = nullptr;
    Purpose purpose = Purpose::user;
    // Of a task in a device's memory:
    std::shared_ptr<Device> device = nullptr;
    std::shared_ptr<Fence> after = nullptr;  // nothing is read or written before it has passed
};

// DDL_ERROR_ARGUMENT if a buffer is NULL with elements in it, is not aligned to them, or overlaps the other in a way
// that ddl.h does not allow. Throws Error as extent_of() does.
Status check_buffers(const Call& call, int rank, int size);

}  // namespace ddl
