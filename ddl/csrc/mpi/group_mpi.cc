#include "mpi/group_mpi.h"

#include <array>
#include <climits>
#include <cstring>
#include <utility>

#include "base/float_environment.h"
#include "base/range.h"
#include "mpi/mpi_watch.h"

namespace ddl {
namespace {

constexpr size_t kTypes = DDL_UINT8 + 1, kOps = DDL_PRODUCT + 1;

// MPI tells a user-defined operation neither the type of its elements as we know it nor an argument of ours: there is
// one function for each type and operation.
template <size_t type, size_t op>
void combine_for_mpi(void* in, void* inout, int* count, MPI_Datatype*) {
    const DefaultFloats floats;  // this may be the user's thread
    combine(inout, in, inout, static_cast<size_t>(*count), static_cast<DataType>(type), static_cast<ReduceOp>(op));
}

template <size_t type, size_t... ops>
constexpr std::array<MPI_User_function*, kOps> functions_of(std::index_sequence<ops...>) {
    return {combine_for_mpi<type, ops>...};
}
template <size_t... types>
constexpr std::array<std::array<MPI_User_function*, kOps>, kTypes> all_functions(std::index_sequence<types...>) {
    return {functions_of<types>(std::make_index_sequence<kOps>())...};
}

// Our types and operations as MPI's. MPI's own would do for some, but neither for float16 nor for what a minimum of
// NaNs is; elements are bytes to it, which the operation alone understands.
struct Vocabulary {
    Vocabulary() {
        constexpr auto functions = all_functions(std::make_index_sequence<kTypes>());
        for (size_t type = 0; type < kTypes; ++type) {
            const auto bytes = static_cast<int>(size_of(static_cast<DataType>(type)));
            check_mpi(MPI_Type_contiguous(bytes, MPI_BYTE, &types[type]), "MPI_Type_contiguous");
            check_mpi(MPI_Type_commit(&types[type]), "MPI_Type_commit");
            for (size_t op = 0; op < kOps; ++op) {
                constexpr int kCommutes = 1;
                check_mpi(MPI_Op_create(functions[type][op], kCommutes, &ops[type][op]), "MPI_Op_create");
            }
        }
    }

    std::array<MPI_Datatype, kTypes> types;
    std::array<std::array<MPI_Op, kOps>, kTypes> ops;
};

// Made once, and left to MPI's end: a process has one MPI.
const Vocabulary& vocabulary() {
    static const auto* made = new Vocabulary;
    return *made;
}

}  // namespace

struct MpiGroup::Flight {
    MPI_Request request = MPI_REQUEST_NULL;
    GroupCall call;
    // MPI reads these until the collective is complete.
    std::vector<int> counts, offsets;  // elements of each rank's part
    std::shared_ptr<ScratchPool> pool;
    Scratch in, out;
};

MpiGroup::MpiGroup(MPI_Comm comm) : comm_(comm) {
    check_mpi(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    check_mpi(MPI_Comm_rank(comm_, &rank_), "MPI_Comm_rank");
    check_mpi(MPI_Comm_size(comm_, &size_), "MPI_Comm_size");
    vocabulary();
}

MpiGroup::~MpiGroup() = default;

Ticket MpiGroup::start(const GroupCall& call) {
    if (call.count > INT_MAX) {
        throw Error(DDL_ERROR_UNSUPPORTED, "a chunk of " + std::to_string(call.count) +
                                               " elements is more than MPI counts in mode m: take more chunks");
    }
    const auto type_index = static_cast<size_t>(call.type), op_index = static_cast<size_t>(call.op);
    const MPI_Datatype type = vocabulary().types[type_index];
    const size_t element = size_of(call.type);
    auto flight = std::make_unique<Flight>();
    flight->call = call;
    flight->pool = pool_;
    for (int i = 0; i < size_; ++i) {
        const Range part = Range{0, call.count}.part(i, size_);
        flight->counts.push_back(static_cast<int>(part.size()));
        flight->offsets.push_back(static_cast<int>(part.begin));
    }
    const auto own = static_cast<size_t>(flight->counts[static_cast<size_t>(rank_)]) * element;
    const auto offset = static_cast<size_t>(flight->offsets[static_cast<size_t>(rank_)]) * element;
    flight->in = pool_->take(call.gathers ? own : call.count * element);
    flight->out = pool_->take(call.gathers ? call.count * element : own);
    const void* const from = call.gathers ? static_cast<const std::byte*>(call.to) + offset : call.from;
    const size_t bytes = call.gathers ? own : call.count * element;
    if (bytes > 0) std::memcpy(flight->in.data(), from, bytes);
    const MpiCall inside;
    // All memory first: MPI uses the flight's from here on.
    Flight& mine = *flights_.emplace(++last_, std::move(flight)).first->second;
    const int error =
        call.gathers ? MPI_Iallgatherv(mine.in.data(), mine.counts[static_cast<size_t>(rank_)], type, mine.out.data(),
                                       mine.counts.data(), mine.offsets.data(), type, comm_, &mine.request)
                     : MPI_Ireduce_scatter(mine.in.data(), mine.out.data(), mine.counts.data(), type,
                                           vocabulary().ops[type_index][op_index], comm_, &mine.request);
    if (error != MPI_SUCCESS) flights_.erase(last_);
    check_mpi(error, call.gathers ? "MPI_Iallgatherv" : "MPI_Ireduce_scatter");
    return last_;
}

bool MpiGroup::test(Ticket ticket) {
    const auto found = flights_.find(ticket);
    Flight& flight = *found->second;
    const MpiCall inside;
    int finished = 0;
    check_mpi(MPI_Test(&flight.request, &finished, MPI_STATUS_IGNORE),
              flight.call.gathers ? "MPI_Iallgatherv" : "MPI_Ireduce_scatter");
    if (!finished) return false;
    const size_t element = size_of(flight.call.type);
    // The own part of an allgather is in its place.
    for (int i = 0; i < size_; ++i) {
        const bool is_own = i == rank_;
        if (flight.call.gathers == is_own) continue;
        const auto index = static_cast<size_t>(i);
        const size_t bytes = static_cast<size_t>(flight.counts[index]) * element;
        const size_t at = flight.call.gathers ? static_cast<size_t>(flight.offsets[index]) * element : 0;
        if (bytes == 0) continue;
        std::memcpy(static_cast<std::byte*>(flight.call.to) + at, flight.out.data() + at, bytes);
    }
    flights_.erase(found);
    return true;
}

void MpiGroup::abandon(Ticket ticket) noexcept {
    const auto found = flights_.find(ticket);
    static_cast<void>(found->second.release());  // MPI may use its memory for as long as the process lives
    flights_.erase(found);
}

}  // namespace ddl
