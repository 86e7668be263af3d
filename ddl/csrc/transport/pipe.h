// A pipe for messages from one rank to another, in memory that both have, without locks: one writes, one reads.
//
// Messages lie in a ring of lines of 64 bytes (a processor's cache line), each from a line's start on: an envelope,
// then its payload, which goes on at the ring's begin when it meets the end. The envelope's first word says that it is
// complete: to look for a message is to look at the line in which it begins, and no counter travels between the
// processors' caches beside it. So that old bytes are not taken for an envelope, the writer clears the first word of
// the line behind a message before the message can be seen; that line is therefore always kept free.
//
// What the reader has taken is one counter, in a line of its own, at which the writer looks only if the room that it
// knows of is too little.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "transport/transport.h"

namespace ddl {

constexpr size_t kPipeLine = 64;

// A pipe's memory, all zeros at first; aligned to kPipeLine.
class PipeMemory {
  public:
    PipeMemory() = default;
    // `bytes`: a multiple of kPipeLine, at least kLeastBytes.
    PipeMemory(std::byte* memory, size_t bytes);

  protected:
    // On the wire as it stands.
    struct Envelope {
        std::atomic<uint32_t> kind;
        Tag tag;
        uint64_t bytes;
    };
    static_assert(sizeof(Envelope) == 16);
    // A lock would be each process's own.
    static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free);
    enum Kind : uint32_t { none = 0, rides, follows };
    static constexpr size_t kControlBytes = 2 * kPipeLine;  // two, as processors fetch lines in pairs

    std::atomic<uint64_t>& taken() const { return *reinterpret_cast<std::atomic<uint64_t>*>(memory_); }
    Envelope& envelope() const { return *reinterpret_cast<Envelope*>(ring_ + at_ * kPipeLine); }
    static size_t lines_for(size_t riding) { return (sizeof(Envelope) + riding + kPipeLine - 1) / kPipeLine; }
    size_t beyond(size_t lines) const { return at_ + lines < lines_ ? at_ + lines : at_ + lines - lines_; }
    // Bytes of a payload that lie before the ring's end.
    size_t straight() const { return (lines_ - at_) * kPipeLine - sizeof(Envelope); }

    std::byte* memory_ = nullptr;
    std::byte* ring_ = nullptr;
    size_t lines_ = 0;
    size_t at_ = 0;        // the line of the next envelope
    uint64_t passed_ = 0;  // lines, since the begin of time

  public:
    static constexpr size_t kLeastBytes = kControlBytes + 2 * kPipeLine;
    // The longest payload that a pipe of `bytes` can carry.
    static constexpr size_t longest_payload(size_t bytes) {
        return bytes - kControlBytes - kPipeLine - sizeof(Envelope);
    }
};

class PipeWriter : public PipeMemory {
  public:
    using PipeMemory::PipeMemory;
    // In two pieces; the second may be empty.
    struct Payload {
        const void* head = nullptr;
        size_t head_bytes = 0;
        const void* rest = nullptr;
        size_t rest_bytes = 0;
    };
    // Writes a message and its payload; false if there is no room for it now.
    bool write(Tag tag, const Payload& payload);
    // The envelope alone of a message of `bytes`, whose payload goes another way.
    bool announce(Tag tag, size_t bytes);

  private:
    bool has_room(size_t lines);
    // `offset`: in the payload of the next message.
    void copy_in(size_t offset, const void* from, size_t bytes);
    void publish(Kind kind, Tag tag, size_t bytes, size_t lines);

    uint64_t known_taken_ = 0;
};

class PipeReader : public PipeMemory {
  public:
    using PipeMemory::PipeMemory;
    struct Message {
        Tag tag = 0;
        size_t bytes = 0;
        bool rides = false;  // its payload is in the pipe
    };
    // The next message; false if there is none yet.
    bool peek(Message* message) const;
    // The payload of that message, which rides; null if the ring's end cuts it.
    const std::byte* payload_in_one_piece() const {
        return envelope().bytes <= straight() ? ring_ + at_ * kPipeLine + sizeof(Envelope) : nullptr;
    }
    // Calls take(offset, data, bytes) with the payload of that message, which rides: with one piece of it, or with two,
    // the first a multiple of 16 bytes long.
    template <typename Take>
    void read(Take take) const {
        const size_t bytes = envelope().bytes;
        const size_t first = std::min(bytes, straight());
        if (first > 0) take(size_t{0}, ring_ + at_ * kPipeLine + sizeof(Envelope), first);
        if (first < bytes) take(first, ring_, bytes - first);
    }
    // Frees its room.
    void drop();
};

}  // namespace ddl
