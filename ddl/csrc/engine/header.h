// The header of a call: what ranks compare before one writes another's data into its user's buffer. It rides on the
// first message between two ranks in a collective, packed, so it costs no round and few bytes.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "schedule/schedule.h"

namespace ddl {

// A communicator of one time. Ids are used again; `birth` tells apart those that had the same one, so that nothing that
// is still under way for a freed one is taken for its successor's. The world's is 0.
struct CommKey {
    uint32_t id = 0;
    uint64_t birth = 0;

    bool operator==(const CommKey& other) const { return id == other.id && birth == other.birth; }
    bool operator<(const CommKey& other) const { return std::pair(id, birth) < std::pair(other.id, other.birth); }
};

// The birth of the communicators that call number `sequence` of `parent` makes.
uint64_t birth_of_child(const CommKey& parent, uint64_t sequence);

// Whose call it is: the library makes some itself, which messages must not show as the program's.
enum class Purpose : uint8_t { user, split, init };

// As it stands in notices: the ranks of a job have one architecture (ddlrun checks it).
struct Header {
    uint32_t magic = 0;
    uint32_t comm = 0;      // number of the communicator
    uint64_t sequence = 0;  // calls on it before this one
    uint64_t count = 0;     // elements
    uint64_t layout = 0;    // layout_of() the schedule: ranks with other settings cut alike, or it is a mismatch
    int32_t root = 0;
    uint8_t collective = 0;
    uint8_t type = 0;
    uint8_t op = 0;
    uint8_t purpose = 0;  // Purpose
    uint64_t birth = 0;   // of the communicator
    uint64_t past = 0;    // past_of() all calls on it before this one
    uint8_t by_nccl = 0;  // 1: dimensions are reduced by NCCL, which they are for buffers in a GPU's memory
    uint8_t reserved[7] = {};
};
static_assert(sizeof(Header) == 64);

constexpr uint32_t kHeaderMagic = 0x4c444431;

Header make_header(const Task& task, const CommKey& comm, uint64_t sequence, uint64_t layout, uint64_t past = 0,
                   Purpose purpose = Purpose::user, bool by_nccl = false);

// A number that stands for a communicator's calls up to `header`'s, so that a call which no data was compared in (a
// root's broadcast, an empty one) is compared in the next.
uint64_t past_of(const Header& header);

// A number that is the same on ranks which made their schedules from the same plan and tuning.
uint64_t layout_of(const Plan& plan, const Tuning& tuning);

// True if the two ranks may exchange data.
bool same_call(const Header& a, const Header& b);

// A header ahead of a payload: a digest that decides, and what a mismatch is described with. Ranks that made the same
// call send the same bytes. Small, as on a slow link a small message's time is that of its bytes; a multiple of the
// largest type's size, so that the payload stays aligned.
struct PackedHeader {
    uint64_t count = 0;
    uint32_t digest = 0;  // of all that a call is compared by
    int32_t root = 0;
    uint16_t sequence = 0;                    // the low bits of it
    uint8_t birth = 0, past = 0, layout = 0;  // a byte of each's digest: which of them differ
    uint8_t collective = 0;                   // with purpose and by_nccl in its upper bits
    uint8_t type = 0, op = 0;
};
static_assert(sizeof(PackedHeader) == 24);

PackedHeader pack(const Header& header);

// The header that `packed` stands for, to a rank that sent `mine` in the same place. same_call(mine, result) is true
// only if the two are packed alike.
Header unpack(const PackedHeader& packed, const Header& mine);

// "1 element", "1000 elements".
std::string elements(uint64_t count);

// "allreduce #5 of communicator 0 (float32, sum, 1000 elements)". Never longer than kNoticeBytes allows.
std::string describe(const Header& header);

// "rank 3 called allreduce #5 ..., but rank 0 called ...: ..."; the names say which rank and host.
std::string describe_mismatch(const std::string& one, const Header& its, const std::string& other,
                              const Header& theirs);

}  // namespace ddl
