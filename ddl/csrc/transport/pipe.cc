#include "transport/pipe.h"

#include <algorithm>
#include <cstring>

namespace ddl {

PipeMemory::PipeMemory(std::byte* memory, size_t bytes)
    : memory_(memory), ring_(memory + kControlBytes), lines_((bytes - kControlBytes) / kPipeLine) {}

bool PipeWriter::has_room(size_t lines) {
    const uint64_t needed = passed_ + lines + 1;
    if (needed - known_taken_ <= lines_) return true;
    // The reader has read the lines before it gave them back: only now are they written again.
    known_taken_ = taken().load(std::memory_order_acquire);
    return needed - known_taken_ <= lines_;
}

void PipeWriter::publish(Kind kind, Tag tag, size_t bytes, size_t lines) {
    Envelope& mine = envelope();
    mine.tag = tag;
    mine.bytes = bytes;
    at_ = beyond(lines);
    passed_ += lines;
    envelope().kind.store(none, std::memory_order_relaxed);
    mine.kind.store(kind, std::memory_order_release);  // with all that is written above
}

void PipeWriter::copy_in(size_t offset, const void* from, size_t bytes) {
    if (bytes == 0) return;
    const size_t until_end = straight();
    const size_t first = offset < until_end ? std::min(bytes, until_end - offset) : 0;
    if (first > 0) std::memcpy(ring_ + at_ * kPipeLine + sizeof(Envelope) + offset, from, first);
    if (first == bytes) return;
    std::memcpy(ring_ + (offset + first - until_end), static_cast<const std::byte*>(from) + first, bytes - first);
}

bool PipeWriter::write(Tag tag, const Payload& payload) {
    const size_t bytes = payload.head_bytes + payload.rest_bytes, lines = lines_for(bytes);
    if (!has_room(lines)) return false;
    copy_in(0, payload.head, payload.head_bytes);
    copy_in(payload.head_bytes, payload.rest, payload.rest_bytes);
    publish(rides, tag, bytes, lines);
    return true;
}

bool PipeWriter::announce(Tag tag, size_t bytes) {
    if (!has_room(1)) return false;
    publish(follows, tag, bytes, 1);
    return true;
}

bool PipeReader::peek(Message* message) const {
    const Envelope& its = envelope();
    const uint32_t kind = its.kind.load(std::memory_order_acquire);
    if (kind == none) return false;
    *message = {its.tag, its.bytes, kind == rides};
    return true;
}

void PipeReader::drop() {
    const Envelope& its = envelope();
    const bool rode = its.kind.load(std::memory_order_relaxed) == rides;
    const size_t lines = rode ? lines_for(its.bytes) : 1;
    at_ = beyond(lines);
    passed_ += lines;
    taken().store(passed_, std::memory_order_release);
}

}  // namespace ddl
