#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/half.h"
#include "stub.h"

using namespace stub;

namespace {

enum { kSuccess = 0, kUnhandledCuda = 1, kSystem = 2, kInvalidArgument = 4, kInvalidUsage = 5, kInProgress = 7 };

struct Id {
    char bytes[128];
};

struct Config {
    size_t size;
    unsigned magic, version;
    int blocking;
};

struct Comm {
    MPI_Comm mpi = MPI_COMM_NULL;
    int size = 0, rank = 0;
    std::string name;
    std::atomic<bool> aborted{false};
    std::atomic<int> state{kInProgress};
    int launches = 0;
};

std::atomic<int> live{0};  // communicators that were made and not freed

std::string folder() {
    const char* text = std::getenv("DDL_STUB_DIR");
    if (!text) fail("DDL_STUB_DIR is not set");
    return text;
}

int world_rank() {
    int rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    return rank;
}

// From the calling thread alone, so that lines stand in the order of the calls.
void note(const Comm& comm, const char* call, size_t count, int type, int argument) {
    static std::ofstream* file = new std::ofstream(folder() + "/calls." + std::to_string(world_rank()));
    *file << comm.name << ' ' << call << ' ' << count << ' ' << type << ' ' << argument << std::endl;
}

size_t width(int type) {
    constexpr size_t widths[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
    return type >= 0 && type < 10 ? widths[type] : 0;
}

// Waits, unless the communicator is aborted: then the request is left alone.
void finish(const Comm& comm, MPI_Request* request) {
    for (int finished = 0; !comm.aborted;) {
        if (MPI_Test(request, &finished, MPI_STATUS_IGNORE) != MPI_SUCCESS) fail("MPI_Test");
        if (finished) return;
        std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
}

template <typename T>
void reduce_as(std::byte* into, const std::byte* from, size_t count, int op, T (*load)(const std::byte*),
               void (*store)(std::byte*, T), size_t bytes) {
    for (size_t i = 0; i < count; ++i) {
        const T a = load(into + i * bytes), b = load(from + i * bytes);
        store(into + i * bytes, op == 0   ? static_cast<T>(a + b)
                                : op == 1 ? static_cast<T>(a * b)
                                : op == 2 ? (a > b ? a : b)
                                          : (a < b ? a : b));
    }
}

template <typename T>
T load_plain(const std::byte* at) {
    T value;
    std::memcpy(&value, at, sizeof value);
    return value;
}
template <typename T>
void store_plain(std::byte* at, T value) {
    std::memcpy(at, &value, sizeof value);
}

void reduce(std::byte* into, const std::byte* from, size_t count, int type, int op) {
    switch (type) {
        // As unsigned if sums may wrap around; tests take no product or order of negative numbers that differs.
        case 0: return reduce_as<int8_t>(into, from, count, op, load_plain<int8_t>, store_plain<int8_t>, 1);
        case 1: return reduce_as<uint8_t>(into, from, count, op, load_plain<uint8_t>, store_plain<uint8_t>, 1);
        case 2: return reduce_as<int32_t>(into, from, count, op, load_plain<int32_t>, store_plain<int32_t>, 4);
        case 4: return reduce_as<int64_t>(into, from, count, op, load_plain<int64_t>, store_plain<int64_t>, 8);
        case 6:
            return reduce_as<float>(
                into, from, count, op, [](const std::byte* at) { return ddl::half_to_float(load_plain<uint16_t>(at)); },
                [](std::byte* at, float value) { store_plain(at, ddl::float_to_half(value)); }, 2);
        case 7: return reduce_as<float>(into, from, count, op, load_plain<float>, store_plain<float>, 4);
        case 8: return reduce_as<double>(into, from, count, op, load_plain<double>, store_plain<double>, 8);
        case 9:
            return reduce_as<float>(
                into, from, count, op,
                [](const std::byte* at) { return ddl::bfloat_to_float(load_plain<uint16_t>(at)); },
                [](std::byte* at, float value) { store_plain(at, ddl::float_to_bfloat(value)); }, 2);
        default: fail("a data type that libddl does not have");
    }
}

// Waits for all ranks of the communicator, however long they take.
int join(Comm* comm, int tag) {
    const auto file = [&](int r) { return folder() + "/" + comm->name + "." + std::to_string(r); };
    {
        std::ofstream(file(comm->rank) + ".part") << world_rank() << std::endl;
        std::rename((file(comm->rank) + ".part").c_str(), file(comm->rank).c_str());
    }
    std::vector<int> members;
    while (static_cast<int>(members.size()) < comm->size) {
        if (comm->aborted) return kSystem;
        std::ifstream stream(file(static_cast<int>(members.size())));
        int member = -1;
        if (stream >> member) {
            members.push_back(member);
        } else {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
    }
    MPI_Group world, group;
    MPI_Comm_group(MPI_COMM_WORLD, &world);
    MPI_Group_incl(world, comm->size, members.data(), &group);
    if (MPI_Comm_create_group(MPI_COMM_WORLD, group, tag, &comm->mpi) != MPI_SUCCESS) return kSystem;
    return kSuccess;
}

// True if the variable, "RANK:N", names this rank and `number`.
bool is_chosen(const char* variable, int number) {
    const char* text = std::getenv(variable);
    const char* at = text ? std::strchr(text, ':') : nullptr;
    return at && std::atoi(text) == world_rank() && std::atoi(at + 1) == number;
}

// The work of a GPU in a collective, unless the environment makes it fail.
std::function<void()> or_fail(Comm* comm, std::function<void()> work) {
    static std::atomic<int> count{0};
    const int number = ++count;
    if (is_chosen("DDL_STUB_NCCL_GIVES_UP", number)) return [comm] { comm->state = kSystem; };
    if (!is_chosen("DDL_STUB_NCCL_HANGS", number)) return work;
    return [comm] {
        while (!comm->aborted) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    };
}

// The first collectives of a communicator connect its ranks, which waits for all of them, on a thread of NCCL's. Later
// ones may do so again: algorithms that are taken for other sizes have connections of their own.
int start(Comm* comm, std::vector<std::pair<void*, std::function<void()>>> work) {
    for (auto& [stream, body] : work) body = or_fail(comm, std::move(body));
    constexpr int kFirst = 3, kEvery = 7;
    const int launch = comm->launches++;
    if (launch >= kFirst && launch % kEvery != 0) {
        for (auto& [stream, body] : work) stream_of(stream).give(std::move(body));
        return kSuccess;
    }
    int idle = kSuccess;
    if (!comm->state.compare_exchange_strong(idle, kInProgress)) return idle;
    std::thread([comm, work = std::move(work)]() mutable {
        constexpr int kConnectTag = 1;  // ncclSend takes 0
        for (int peer = 0; peer < comm->size; ++peer) {
            MPI_Request sent, received;
            MPI_Isend(nullptr, 0, MPI_BYTE, peer, kConnectTag, comm->mpi, &sent);
            MPI_Irecv(nullptr, 0, MPI_BYTE, peer, kConnectTag, comm->mpi, &received);
            finish(*comm, &received);
            finish(*comm, &sent);
        }
        if (comm->aborted) return;
        for (auto& [stream, body] : work) stream_of(stream).give(std::move(body));
        int connecting = kInProgress;
        comm->state.compare_exchange_strong(connecting, kSuccess);
    }).detach();
    return kInProgress;
}

// Runs a group of calls together; outside of ncclGroupStart a group is one call.
thread_local int depth = 0;
thread_local std::vector<std::pair<void*, std::function<void()>>> grouped;  // collectives, in order
thread_local Comm* grouped_on = nullptr;
thread_local std::vector<std::function<std::vector<MPI_Request>()>> posted;  // sends and receives: all at once
thread_local Comm* posted_on = nullptr;
thread_local void* posted_to = nullptr;

int launch(Comm* comm, void* stream, std::function<void()> work) {
    if (depth == 0) return start(comm, {{stream, std::move(work)}});
    grouped_on = comm;
    grouped.emplace_back(stream, std::move(work));
    return kSuccess;
}

bool is_right(const Comm* comm, int type, int root) {
    if (comm && comm->state == kInProgress) fail("a communicator is used while an earlier call is in progress");
    return comm && !comm->aborted && width(type) > 0 && root >= 0 && root < comm->size;
}

}  // namespace

extern "C" {

const char* ncclGetErrorString(int code) {
    switch (code) {
        case kSuccess: return "no error";
        case kUnhandledCuda: return "unhandled cuda error";
        case kSystem: return "unhandled system error";
        case kInvalidArgument: return "invalid argument";
        case kInvalidUsage: return "invalid usage";
        default: return "unknown result code";
    }
}

const char* ncclGetLastError(void*) { return "this is the stub"; }

int ncclGetVersion(int* version) {
    *version = 22100;
    return kSuccess;
}

int ncclGetUniqueId(Id* id) {
    std::random_device random;
    for (char& byte : id->bytes) byte = static_cast<char>(random());
    return kSuccess;
}

int ncclCommInitRankConfig(Comm** made, int size, Id id, int rank, Config* config) {
    if (config->magic != 0xcafebeef || config->size < sizeof(Config) || config->blocking != 0) return kInvalidArgument;
    const auto is_me = [](const char* variable) {
        const char* text = std::getenv(variable);
        return text && std::atoi(text) == world_rank();
    };
    auto* const comm = new Comm;  // never freed: threads may look at it
    ++live;
    for (int i = 0; i < 8; ++i) {
        char hex[3];
        std::snprintf(hex, sizeof hex, "%02x", static_cast<unsigned char>(id.bytes[i]));
        comm->name += hex;
    }
    comm->size = size;
    comm->rank = rank;
    *made = comm;
    if (is_me("DDL_STUB_NCCL_STUCK")) return kInProgress;
    const bool fails = is_me("DDL_STUB_NCCL_FAILS");
    const int tag = static_cast<unsigned char>(id.bytes[0]) << 6 | (static_cast<unsigned char>(id.bytes[1]) & 63);
    std::thread([=] {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        comm->state = fails ? static_cast<int>(kUnhandledCuda) : join(comm, tag);
    }).detach();
    return kInProgress;
}

int ncclCommAbort(Comm* comm) {
    if (comm->aborted.exchange(true)) fail("a communicator is freed twice");
    synchronize_device();
    --live;
    return kSuccess;
}

// For test programs.
int stub_communicators() { return live; }

int ncclCommGetAsyncError(Comm* comm, int* error) {
    if (comm->aborted) fail("a communicator is used that was freed");
    *error = comm->state;
    return kSuccess;
}

int ncclGroupStart() {
    ++depth;
    return kSuccess;
}

int ncclGroupEnd() {
    if (--depth > 0) return kSuccess;
    if (!grouped.empty()) return start(grouped_on, std::exchange(grouped, {}));
    if (posted.empty()) return kSuccess;
    const auto exchange = [comm = posted_on, calls = std::exchange(posted, {})] {
        std::vector<MPI_Request> requests;
        for (const auto& call : calls) {
            for (const MPI_Request request : call()) requests.push_back(request);
        }
        for (MPI_Request& request : requests) finish(*comm, &request);
    };
    return start(posted_on, {{posted_to, exchange}});
}

int ncclReduceScatter(const void* from, void* to, size_t count, int type, int op, Comm* comm, void* stream) {
    if (!is_right(comm, type, 0) || op < 0 || op > 3) return kInvalidArgument;
    note(*comm, "ReduceScatter", count, type, op);
    return launch(comm, stream, [=] {
        const size_t bytes = count * width(type), all = bytes * static_cast<size_t>(comm->size);
        // A copy of what goes in: it may be the memory of what comes out.
        std::vector<std::byte> mine(behind(from, all), behind(from, all) + all), theirs(all);
        MPI_Request request;
        MPI_Ialltoall(mine.data(), static_cast<int>(bytes), MPI_BYTE, theirs.data(), static_cast<int>(bytes), MPI_BYTE,
                      comm->mpi, &request);
        finish(*comm, &request);
        if (comm->aborted) return;
        for (int i = 1; i < comm->size; ++i) {
            reduce(theirs.data(), theirs.data() + static_cast<size_t>(i) * bytes, count, type, op);
        }
        std::memcpy(behind(to, bytes), theirs.data(), bytes);
    });
}

int ncclAllGather(const void* from, void* to, size_t count, int type, Comm* comm, void* stream) {
    if (!is_right(comm, type, 0)) return kInvalidArgument;
    note(*comm, "AllGather", count, type, 0);
    return launch(comm, stream, [=] {
        const size_t bytes = count * width(type), all = bytes * static_cast<size_t>(comm->size);
        const std::vector<std::byte> mine(behind(from, bytes), behind(from, bytes) + bytes);
        MPI_Request request;
        MPI_Iallgather(mine.data(), static_cast<int>(bytes), MPI_BYTE, behind(to, all), static_cast<int>(bytes),
                       MPI_BYTE, comm->mpi, &request);
        finish(*comm, &request);
    });
}

int ncclReduce(const void* from, void* to, size_t count, int type, int op, int root, Comm* comm, void* stream) {
    if (!is_right(comm, type, root) || op < 0 || op > 3) return kInvalidArgument;
    note(*comm, "Reduce", count, type, root);
    return launch(comm, stream, [=] {
        const size_t bytes = count * width(type);
        const std::vector<std::byte> mine(behind(from, bytes), behind(from, bytes) + bytes);
        std::vector<std::byte> theirs(comm->rank == root ? bytes * static_cast<size_t>(comm->size) : 0);
        MPI_Request request;
        MPI_Igather(mine.data(), static_cast<int>(bytes), MPI_BYTE, theirs.data(), static_cast<int>(bytes), MPI_BYTE,
                    root, comm->mpi, &request);
        finish(*comm, &request);
        if (comm->aborted || comm->rank != root) return;
        for (int i = 1; i < comm->size; ++i) {
            reduce(theirs.data(), theirs.data() + static_cast<size_t>(i) * bytes, count, type, op);
        }
        std::memcpy(behind(to, bytes), theirs.data(), bytes);
    });
}

int ncclBroadcast(const void* from, void* to, size_t count, int type, int root, Comm* comm, void* stream) {
    if (!is_right(comm, type, root)) return kInvalidArgument;
    note(*comm, "Broadcast", count, type, root);
    return launch(comm, stream, [=] {
        const size_t bytes = count * width(type);
        if (from != to) fail("ncclBroadcast: libddl calls it in place");
        MPI_Request request;
        MPI_Ibcast(behind(to, bytes), static_cast<int>(bytes), MPI_BYTE, root, comm->mpi, &request);
        finish(*comm, &request);
    });
}

int ncclSend(const void* from, size_t count, int type, int peer, Comm* comm, void* stream) {
    if (!is_right(comm, type, peer)) return kInvalidArgument;
    if (depth == 0) fail("ncclSend outside of a group");
    note(*comm, "Send", count, type, peer);
    posted_on = comm;
    posted_to = stream;
    posted.emplace_back([=] {
        MPI_Request request;
        const size_t bytes = count * width(type);
        MPI_Isend(behind(from, bytes), static_cast<int>(bytes), MPI_BYTE, peer, 0, comm->mpi, &request);
        return std::vector<MPI_Request>{request};
    });
    return kSuccess;
}

int ncclRecv(void* to, size_t count, int type, int peer, Comm* comm, void* stream) {
    if (!is_right(comm, type, peer)) return kInvalidArgument;
    if (depth == 0) fail("ncclRecv outside of a group");
    note(*comm, "Recv", count, type, peer);
    posted_on = comm;
    posted_to = stream;
    posted.emplace_back([=] {
        MPI_Request request;
        const size_t bytes = count * width(type);
        MPI_Irecv(behind(to, bytes), static_cast<int>(bytes), MPI_BYTE, peer, 0, comm->mpi, &request);
        return std::vector<MPI_Request>{request};
    });
    return kSuccess;
}

}  // extern "C"
