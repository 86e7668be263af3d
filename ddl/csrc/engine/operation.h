// One collective in flight on one rank: executes a schedule over a transport, each chunk a state machine of its own.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/scratch.h"
#include "base/status.h"
#include "device/device.h"
#include "device/group.h"
#include "engine/header.h"
#include "engine/tally.h"
#include "schedule/schedule.h"
#include "transport/transport.h"

namespace ddl {

// Tags of an operation. The first messages between two ranks have a tag of their own: ranks that called different
// things, and so put them in different chunks, still find each other's headers.
constexpr int kOperationTags = 2 * kChunkSlots;

// What an operation needs of its communicator. Outlives it.
struct Group {
    std::vector<int> members;        // world rank of each rank
    std::vector<std::string> names;  // "rank 3 (host b)", of each rank
};

// What schedules with group steps, or for buffers in a device's memory, are executed with.
struct Means {
    std::shared_ptr<Groups> groups;
    std::shared_ptr<Device> device;
    std::shared_ptr<Fence> after;  // what the buffers wait for; may be null
};

// Not thread-safe. Throws Error if MPI's or NCCL's collectives or the device fail, and std::bad_alloc; after an
// error or an exception, call cancel(). What then cannot be taken back still uses its memory: an operation is to be
// destroyed only if it is settled().
class Operation {
  public:
    // `input` and `output` are what ddl.h says for the task. `first_tag` is the first of kOperationTags tags that are
    // this operation's alone while it is in flight. `window`: chunks in flight, at most kChunkSlots.
    Operation(std::shared_ptr<const Schedule> schedule, const void* input, void* output, const Header& header,
              const Group& group, int rank, Tag first_tag, int window, Transport& transport, ScratchPool& pool,
              Means means = {});
    Operation(const Operation&) = delete;
    Operation& operator=(const Operation&) = delete;
    ~Operation() { cancel(); }

    // Whether a finished one can be kept for repeat(): it holds no memory, and no turn among groups.
    bool is_light() const { return schedule_->stages == 0 && schedule_->work_bytes == 0 && !means_.device; }
    const Schedule& schedule() const { return *schedule_; }
    // Takes on another call with the same schedule. Only if it has finished() and is_light().
    void repeat(const void* input, void* output, const Header& header, Tag first_tag) noexcept;

    // The fast path, for small calls inside a host. run_fast() executes the operation for as long as each message comes
    // within `looks` looks, and reads it in place, without memory or a ticket. poll() does the rest. Call it only after
    // repeat(), and if it is_fast(): light, with one chunk, in whose rounds there is at most one message each way,
    // which has a header, and which the transport shows.
    bool is_fast() const { return fast_; }
    void run_fast(int looks);

    // Begins an operation that was held back, if the device has done its part. True if it began.
    bool begin_after_device();
    // Does what can be done without waiting; nothing while it is held back. True if a message completed or a chunk went
    // on. No chunk is begun while `room` or more are in flight, unless none is.
    bool poll(int room = kChunkSlots);
    // Chunks that are in flight.
    int chunks_in_flight() const { return static_cast<int>(runs_.size()); }
    bool finished() const {
        return next_chunk_ == schedule_->chunks.size() && runs_.empty() && status_.ok() && !is_held_back();
    }
    const Status& status() const { return status_; }
    // Its times, which it notes if they have a begin.
    Timing& timing() { return timing_; }
    // Takes back what is in flight, as far as it can be; the last call but those below. Doing it twice does nothing.
    void cancel() noexcept;
    // Looks after what could not be taken back.
    void settle() noexcept;
    // True if a rank that lives may still write into the caller's buffer.
    bool is_written() const;
    // True if nothing is in flight.
    bool settled() const;

    // Ranks of the communicator that a message, or a part in a group step, is awaited from, ascending.
    std::vector<int> awaited() const;
    // True while the device has not done what its caller gave it before the call.
    bool is_held_back() const { return means_.after != nullptr; }
    // What of this rank's own it waits for, in words; "" if that is nothing, or others are awaited as well.
    std::string own_wait() const;

  private:
    // A message, a group step or a transfer of the current round of a chunk.
    struct Flight {
        enum State : uint8_t { gated, awaits_header, moving, done };  // gated: not begun
        const Step* step = nullptr;  // null: a header that is sent ahead of a long payload
        State state = moving;
        Ticket ticket = 0;
        Scratch scratch;                  // holds header and payload, or a payload to be reduced
        const std::byte* data = nullptr;  // where the payload to be reduced begins; null: the transport reduces it
    };
    struct Run {
        uint32_t chunk = 0, round = 0;
        Device::Staging staging;
        std::vector<Flight> flights;
    };

    const std::byte* read(const Run& run, const Place& place) const;
    std::byte* write(const Run& run, const Place& place) const;
    Tag tag(const Run& run) const { return first_tag_ + run.chunk % kChunkSlots; }
    Tag header_tag() const { return first_tag_ + kChunkSlots; }
    int world(int rank) const { return group_.members[static_cast<size_t>(rank)]; }
    bool fail(Code code, std::string message);

    Run& begin_chunk();
    bool start_chunks(size_t most);
    bool take_now(const Run& run, const Step& step, int looks);
    void post_round(Run& run);
    void post_send(Run& run, const Step& step);
    void post_receive(Run& run, Flight& flight);
    void post_payload(Run& run, Flight& flight);
    bool advance(Run& run);                  // true if something happened
    bool advance(Run& run, Flight& flight);  // the same
    bool advance_message(Run& run, Flight& flight);
    bool advance_group(Run& run, Flight& flight);
    bool advance_transfer(Run& run, Flight& flight);
    bool take_header(Run& run, Flight& flight, size_t received);
    void reduce(const Run& run, const Step& step, const std::byte* message) const;
    void finish_round(const Run& run);

    const std::shared_ptr<const Schedule> schedule_;
    const std::byte* input_;
    std::byte* output_;
    Header header_;
    PackedHeader packed_;  // header_
    const Group& group_;
    const int rank_;
    Tag first_tag_;
    const size_t window_;
    Transport& transport_;
    ScratchPool& pool_;
    Means means_;  // without what has passed
    const bool fast_;
    Scratch work_;
    std::vector<bool> agreed_;  // by rank: its header was seen and is ours
    uint32_t next_chunk_ = 0;
    std::vector<Run> runs_;                     // chunks in flight, ascending
    std::vector<std::vector<Flight>> flights_;  // empty ones of earlier chunks
    std::vector<uint32_t> group_order_;         // as group_order() says
    size_t next_group_ = 0;
    bool rolled_ = false;  // the roll is complete: every rank has called the same
    bool cancelled_ = false;
    Timing timing_;
    Status status_;
};

}  // namespace ddl
