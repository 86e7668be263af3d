#include "engine/header.h"

#include <cstring>

namespace ddl {
namespace {

// In PackedHeader::collective.
constexpr uint8_t kByNccl = 0x20;
constexpr int kPurposeShift = 6;

// FNV-1a, by whole numbers.
struct Hash {
    uint64_t value = 0xcbf29ce484222325u;
    void add(uint64_t number) { value = (value ^ number) * 0x100000001b3u; }
    // Every bit of `value` has a part in each: multiplication alone carries none downwards.
    uint32_t word() const {
        uint64_t mixed = (value ^ value >> 32) * 0x9e3779b97f4a7c15u;
        return static_cast<uint32_t>(mixed >> 32);
    }
};

uint8_t byte_of(uint64_t number) {
    Hash hash;
    hash.add(number);
    return static_cast<uint8_t>(hash.word());
}

}  // namespace

uint64_t birth_of_child(const CommKey& parent, uint64_t sequence) {
    Hash hash;
    hash.add(parent.birth);
    hash.add(parent.id);
    hash.add(sequence);
    return hash.value;
}

uint64_t past_of(const Header& header) {
    Hash hash;
    hash.add(header.past);
    hash.add(header.collective | uint64_t{header.type} << 8 | uint64_t{header.op} << 16 |
             uint64_t{header.purpose} << 24 | static_cast<uint64_t>(static_cast<uint32_t>(header.root)) << 32);
    hash.add(header.count);
    return hash.value;
}

Header make_header(const Task& task, const CommKey& comm, uint64_t sequence, uint64_t layout, uint64_t past,
                   Purpose purpose, bool by_nccl) {
    Header header;
    header.magic = kHeaderMagic;
    header.comm = comm.id;
    header.birth = comm.birth;
    header.past = past;
    header.purpose = static_cast<uint8_t>(purpose);
    header.by_nccl = by_nccl ? 1 : 0;
    header.sequence = sequence;
    header.count = task.count;
    header.layout = layout;
    header.root = task.collective == Collective::broadcast ? task.root : 0;
    header.collective = static_cast<uint8_t>(task.collective);
    header.type = static_cast<uint8_t>(task.type);
    const bool reduces = task.collective == Collective::allreduce || task.collective == Collective::reduce_scatter;
    header.op = reduces ? static_cast<uint8_t>(task.op) : 0;
    return header;
}

uint64_t layout_of(const Plan& plan, const Tuning& tuning) {
    Hash hash;
    for (const int dimension : plan.dimensions) hash.add(static_cast<uint64_t>(dimension));
    for (const char mode : plan.modes) hash.add(static_cast<uint64_t>(mode));
    for (const int rank : plan.ranks) hash.add(static_cast<uint64_t>(rank));
    hash.add(static_cast<uint64_t>(plan.chunks));
    hash.add(plan.message_bytes);
    hash.add(plan.small_bytes);
    for (const uint64_t bytes : plan.halved_above) hash.add(bytes);
    hash.add(static_cast<uint64_t>(tuning.algorithm));
    hash.add(tuning.small_bytes);
    hash.add(tuning.chunk_bytes);
    hash.add(tuning.planned_chunk_bytes);
    hash.add(static_cast<uint64_t>(tuning.planned_most_chunks));
    hash.add(tuning.message_bytes);
    hash.add(tuning.least_message_bytes);
    hash.add(tuning.most_message_bytes);
    hash.add(static_cast<uint64_t>(tuning.most_chunks));
    return hash.value;
}

bool same_call(const Header& a, const Header& b) {
    return a.magic == b.magic && a.comm == b.comm && a.birth == b.birth && a.sequence == b.sequence &&
           a.past == b.past && a.purpose == b.purpose && a.collective == b.collective && a.type == b.type &&
           a.op == b.op && a.count == b.count && a.root == b.root && a.layout == b.layout && a.by_nccl == b.by_nccl;
}

PackedHeader pack(const Header& header) {
    Hash hash;
    for (const uint64_t number :
         {uint64_t{header.magic}, uint64_t{header.comm}, header.sequence, header.count, header.layout,
          uint64_t{static_cast<uint32_t>(header.root)}, header.birth, header.past,
          uint64_t{header.collective} | uint64_t{header.type} << 8 | uint64_t{header.op} << 16 |
              uint64_t{header.purpose} << 24 | uint64_t{header.by_nccl} << 32}) {
        hash.add(number);
    }
    PackedHeader packed;
    packed.count = header.count;
    packed.digest = hash.word();
    packed.root = header.root;
    packed.sequence = static_cast<uint16_t>(header.sequence);
    packed.birth = byte_of(header.birth);
    packed.past = byte_of(header.past);
    packed.layout = byte_of(header.layout);
    packed.collective =
        static_cast<uint8_t>(header.collective | (header.by_nccl ? kByNccl : 0) | header.purpose << kPurposeShift);
    packed.type = header.type;
    packed.op = header.op;
    return packed;
}

Header unpack(const PackedHeader& packed, const Header& mine) {
    const PackedHeader ours = pack(mine);
    Header header = mine;
    if (std::memcmp(&packed, &ours, sizeof ours) == 0) return header;
    header.count = packed.count;
    header.root = packed.root;
    // Messages are told apart by their calls' sequences: theirs is near to ours.
    header.sequence += static_cast<uint64_t>(static_cast<int16_t>(packed.sequence - ours.sequence));
    header.collective = packed.collective & (kByNccl - 1);
    header.purpose = packed.collective >> kPurposeShift;
    header.by_nccl = packed.collective & kByNccl ? 1 : 0;
    header.type = packed.type;
    header.op = packed.op;
    if (packed.birth != ours.birth) header.birth = ~mine.birth;
    if (packed.past != ours.past) header.past = ~mine.past;
    // Also if only the digests differ: what two ranks have for layouts is the least that is said otherwise.
    if (packed.layout != ours.layout || same_call(header, mine)) header.layout = ~mine.layout;
    return header;
}

std::string elements(uint64_t count) { return std::to_string(count) + (count == 1 ? " element" : " elements"); }

std::string describe(const Header& header) {
    if (header.magic != kHeaderMagic) return "a message that is none of this library's";
    const auto collective = static_cast<Collective>(header.collective);
    const auto purpose = static_cast<Purpose>(header.purpose);
    const char* const name = purpose == Purpose::split  ? "split"
                             : purpose == Purpose::init ? "ddl_init's own call"
                                                        : name_of(collective);
    std::string text =
        std::string(name) + " #" + std::to_string(header.sequence) + " of communicator " + std::to_string(header.comm);
    if (collective == Collective::barrier || purpose != Purpose::user) return text;
    text += std::string(" (") + name_of(static_cast<DataType>(header.type));
    if (collective == Collective::allreduce || collective == Collective::reduce_scatter) {
        text += std::string(", ") + name_of(static_cast<ReduceOp>(header.op));
    }
    if (collective == Collective::broadcast) text += ", root " + std::to_string(header.root);
    return text + ", " + elements(header.count) + ")";
}

std::string describe_mismatch(const std::string& one, const Header& its, const std::string& other,
                              const Header& theirs) {
    const std::string what = describe(its), whats = describe(theirs);
    if (its.magic == theirs.magic && its.comm == theirs.comm && its.birth != theirs.birth) {
        return one + " called " + what + ", but a message from " + other +
               " is of an earlier communicator of this number, where ranks had called different things before it was "
               "freed: every rank must make the same calls in the same order";
    }
    if (what == whats && its.past != theirs.past) {
        return one + " and " + other + " both called " + what +
               ", but their calls on this communicator before it differ, where no data passed between them (another "
               "root of a broadcast, or a count of 0): every rank must make the same calls in the same order";
    }
    if (what == whats && its.by_nccl != theirs.by_nccl) {
        const std::string& with = its.by_nccl != 0 ? one : other;
        return one + " and " + other + " both called " + what + ", but " + with +
               " with a buffer in a GPU's memory, and the other in host memory: mode b or n wants it in the same kind "
               "on every rank";
    }
    if (what == whats) {
        return one + " and " + other + " both called " + what +
               ", but with different plans: give every rank the same DDL_OPTIONS and the same version of ddl";
    }
    return one + " called " + what + ", but " + other + " called " + whats +
           ": every rank must make the same calls in the same order";
}

}  // namespace ddl
