#include "engine/call.h"

#include <string>

namespace ddl {
namespace {

// Where the input must lie to be used in place; nullptr if the collective cannot work so.
const std::byte* place_in(const Call& call, int rank, uint64_t input_bytes) {
    const auto* output = static_cast<const std::byte*>(call.output);
    if (call.task.collective == Collective::allreduce) return output;
    if (call.task.collective == Collective::allgather) return output + static_cast<uint64_t>(rank) * input_bytes;
    return nullptr;
}

}  // namespace

Status check_buffers(const Call& call, int rank, int size) {
    const Task& task = call.task;
    const Extent extent = extent_of(task, size);
    const auto refuse = [&](const std::string& why) {
        return Status{DDL_ERROR_ARGUMENT, std::string(name_of(task.collective)) + ": " + why};
    };
    const bool reads = task.collective != Collective::broadcast && extent.input > 0;
    const bool writes = extent.output > 0;
    if ((reads && !call.input) || (writes && !call.output)) {
        return refuse("a buffer is NULL, but count is " + std::to_string(task.count));
    }
    const auto input = reinterpret_cast<uintptr_t>(call.input), output = reinterpret_cast<uintptr_t>(call.output);
    const size_t element = size_of(task.type);
    const auto is_aligned = [&](uintptr_t address) { return (address & (element - 1)) == 0; };
    if ((reads && !is_aligned(input)) || (writes && !is_aligned(output))) {
        return refuse(std::string("a buffer is not aligned to its elements: the address of a ") + name_of(task.type) +
                      " must be a multiple of " + std::to_string(element));
    }
    const bool overlap = reads && writes && input < output + extent.output && output < input + extent.input;
    const std::byte* const in_place = overlap ? place_in(call, rank, extent.input) : nullptr;
    if (overlap && call.input != in_place) {
        return refuse(in_place == nullptr ? "input and output overlap: it cannot work in place, give it two buffers"
                                          : "input and output overlap, but not as in place: see ddl.h, or give it two");
    }
    return {};
}

}  // namespace ddl
