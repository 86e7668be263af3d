#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
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

// What a message is for: its place in the order of those that one rank sends another is counted for each.
enum Channel : char { connecting = 'c', data = 'd' };

struct Comm {
    int size = 0, rank = 0;
    std::map<std::pair<char, int>, int> sent, received;  // by channel and peer
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
    for (const char* name : {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK"}) {
        if (const char* text = std::getenv(name)) return std::atoi(text);
    }
    fail("nothing says which rank this is");
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

// Messages are files: whoever looks for one finds it whole, or not at all.
void leave(const std::string& path, const void* content, size_t bytes) {
    const std::string part = path + ".part";
    {
        std::ofstream file(part, std::ios::binary);
        file.write(static_cast<const char*>(content), static_cast<std::streamsize>(bytes));
        if (!file.flush()) fail("cannot write to DDL_STUB_DIR");
    }
    std::rename(part.c_str(), path.c_str());
}

std::string path_of(const Comm& comm, Channel channel, int from, int to, int number) {
    return folder() + "/" + comm.name + "." + static_cast<char>(channel) + std::to_string(from) + "to" +
           std::to_string(to) + "." + std::to_string(number);
}

void send(Comm& comm, Channel channel, int peer, const void* content, size_t bytes) {
    leave(path_of(comm, channel, comm.rank, peer, comm.sent[{channel, peer}]++), content, bytes);
}

// Waits, unless the communicator is aborted.
void receive(Comm& comm, Channel channel, int peer, void* content, size_t bytes) {
    const std::string path = path_of(comm, channel, peer, comm.rank, comm.received[{channel, peer}]++);
    while (!comm.aborted) {
        if (std::ifstream file(path, std::ios::binary | std::ios::ate); file) {
            if (file.tellg() != static_cast<std::streamoff>(bytes)) fail("ranks differ in the length of a message");
            file.seekg(0).read(static_cast<char*>(content), static_cast<std::streamsize>(bytes));
            std::remove(path.c_str());
            return;
        }
        std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
}

// To every other rank, what `of(rank)` points to.
template <typename Of>
void send_to_others(Comm& comm, size_t bytes, Of of) {
    for (int peer = 0; peer < comm.size; ++peer) {
        if (peer != comm.rank) send(comm, data, peer, of(peer), bytes);
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

// Reduces what each rank has sent this one, with `own` for its own part, in the order of the ranks.
void reduce_all(Comm& comm, const std::byte* own, std::byte* result, size_t count, int type, int op) {
    const size_t bytes = count * width(type);
    std::vector<std::byte> sum(bytes), theirs(bytes);
    for (int peer = 0; peer < comm.size; ++peer) {
        std::vector<std::byte>& target = peer == 0 ? sum : theirs;
        if (peer == comm.rank) {
            std::memcpy(target.data(), own, bytes);
        } else {
            receive(comm, data, peer, target.data(), bytes);
        }
        if (comm.aborted) return;
        if (peer > 0) reduce(sum.data(), theirs.data(), count, type, op);
    }
    std::memcpy(result, sum.data(), bytes);
}

// Waits for all ranks of the communicator, however long they take.
int join(Comm* comm) {
    const auto file = [&](int rank) { return folder() + "/" + comm->name + "." + std::to_string(rank); };
    leave(file(comm->rank), nullptr, 0);
    for (int rank = 0; rank < comm->size;) {
        if (comm->aborted) return kSystem;
        if (std::ifstream(file(rank))) {
            ++rank;
        } else {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
    }
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
        for (int peer = 0; peer < comm->size; ++peer) send(*comm, connecting, peer, nullptr, 0);
        for (int peer = 0; peer < comm->size; ++peer) receive(*comm, connecting, peer, nullptr, 0);
        if (comm->aborted) return;
        for (auto& [stream, body] : work) stream_of(stream).give(std::move(body));
        int busy = kInProgress;
        comm->state.compare_exchange_strong(busy, kSuccess);
    }).detach();
    return kInProgress;
}

// Runs a group of calls together; outside of ncclGroupStart a group is one call.
thread_local int depth = 0;
thread_local std::vector<std::pair<void*, std::function<void()>>> grouped;  // collectives, in order
thread_local Comm* grouped_on = nullptr;
thread_local std::vector<std::function<void()>> sends, receives;  // all at once
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
    std::thread([=] {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        comm->state = fails ? static_cast<int>(kUnhandledCuda) : join(comm);
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
    if (sends.empty() && receives.empty()) return kSuccess;
    const auto exchange = [out = std::exchange(sends, {}), in = std::exchange(receives, {})] {
        for (const auto& call : out) call();
        for (const auto& call : in) call();
    };
    return start(posted_on, {{posted_to, exchange}});
}

int ncclReduceScatter(const void* from, void* to, size_t count, int type, int op, Comm* comm, void* stream) {
    if (!is_right(comm, type, 0) || op < 0 || op > 3) return kInvalidArgument;
    note(*comm, "ReduceScatter", count, type, op);
    return launch(comm, stream, [=] {
        const size_t bytes = count * width(type), all = bytes * static_cast<size_t>(comm->size);
        // A copy of what goes in: it may be the memory of what comes out.
        const std::vector<std::byte> mine(behind(from, all), behind(from, all) + all);
        const auto part = [&](int rank) { return mine.data() + static_cast<size_t>(rank) * bytes; };
        send_to_others(*comm, bytes, part);
        reduce_all(*comm, part(comm->rank), behind(to, bytes), count, type, op);
    });
}

int ncclAllGather(const void* from, void* to, size_t count, int type, Comm* comm, void* stream) {
    if (!is_right(comm, type, 0)) return kInvalidArgument;
    note(*comm, "AllGather", count, type, 0);
    return launch(comm, stream, [=] {
        const size_t bytes = count * width(type), all = bytes * static_cast<size_t>(comm->size);
        const std::vector<std::byte> mine(behind(from, bytes), behind(from, bytes) + bytes);
        send_to_others(*comm, bytes, [&](int) { return mine.data(); });
        for (int peer = 0; peer < comm->size; ++peer) {
            std::byte* const theirs = behind(to, all) + static_cast<size_t>(peer) * bytes;
            if (peer == comm->rank) {
                std::memcpy(theirs, mine.data(), bytes);
            } else {
                receive(*comm, data, peer, theirs, bytes);
            }
        }
    });
}

int ncclReduce(const void* from, void* to, size_t count, int type, int op, int root, Comm* comm, void* stream) {
    if (!is_right(comm, type, root) || op < 0 || op > 3) return kInvalidArgument;
    note(*comm, "Reduce", count, type, root);
    return launch(comm, stream, [=] {
        const size_t bytes = count * width(type);
        const std::vector<std::byte> mine(behind(from, bytes), behind(from, bytes) + bytes);
        if (comm->rank != root) return send(*comm, data, root, mine.data(), bytes);
        reduce_all(*comm, mine.data(), behind(to, bytes), count, type, op);
    });
}

int ncclBroadcast(const void* from, void* to, size_t count, int type, int root, Comm* comm, void* stream) {
    if (!is_right(comm, type, root)) return kInvalidArgument;
    note(*comm, "Broadcast", count, type, root);
    return launch(comm, stream, [=] {
        const size_t bytes = count * width(type);
        if (from != to) fail("ncclBroadcast: libddl calls it in place");
        if (comm->rank != root) return receive(*comm, data, root, behind(to, bytes), bytes);
        send_to_others(*comm, bytes, [&](int) { return behind(to, bytes); });
    });
}

int ncclSend(const void* from, size_t count, int type, int peer, Comm* comm, void* stream) {
    if (!is_right(comm, type, peer)) return kInvalidArgument;
    if (depth == 0) fail("ncclSend outside of a group");
    note(*comm, "Send", count, type, peer);
    posted_on = comm;
    posted_to = stream;
    const size_t bytes = count * width(type);
    sends.emplace_back([=] { send(*comm, data, peer, behind(from, bytes), bytes); });
    return kSuccess;
}

int ncclRecv(void* to, size_t count, int type, int peer, Comm* comm, void* stream) {
    if (!is_right(comm, type, peer)) return kInvalidArgument;
    if (depth == 0) fail("ncclRecv outside of a group");
    note(*comm, "Recv", count, type, peer);
    posted_on = comm;
    posted_to = stream;
    const size_t bytes = count * width(type);
    receives.emplace_back([=] { receive(*comm, data, peer, behind(to, bytes), bytes); });
    return kSuccess;
}

}  // extern "C"
