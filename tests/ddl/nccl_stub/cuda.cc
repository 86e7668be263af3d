#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <thread>

#include "stub.h"

namespace stub {
namespace {

enum { kSuccess = 0, kInvalidValue = 1, kMemoryAllocation = 2, kInvalidDevice = 101, kNotReady = 600 };
enum { kToDevice = 1, kToHost = 2 };

struct Region {
    size_t bytes = 0;
    std::byte* behind = nullptr;  // null for pinned host memory
    int gpu = 0;
};

struct Event {
    std::mutex mutex;
    std::condition_variable changed;
    int open = 0;  // records that have not happened
};

// Never destroyed: streams outlive main().
struct Globals {
    std::mutex mutex;
    std::map<const std::byte*, Region> regions;  // by where they begin
    Stream* default_stream = new Stream;
};
Globals& globals() {
    static auto* made = new Globals;
    return *made;
}

thread_local int current_gpu = 0;

int gpus() {
    const char* text = std::getenv("DDL_STUB_GPUS");
    return text ? std::atoi(text) : 8;
}

// The region that holds [pointer, pointer + bytes), or null.
const Region* find(const void* pointer, size_t bytes, size_t* offset) {
    const auto* at = static_cast<const std::byte*>(pointer);
    auto next = globals().regions.upper_bound(at);
    if (next == globals().regions.begin()) return nullptr;
    const auto& [begin, region] = *std::prev(next);
    *offset = static_cast<size_t>(at - begin);
    return *offset + bytes <= region.bytes && *offset < region.bytes ? &region : nullptr;
}

bool is_device(const void* pointer, size_t bytes) {
    const std::lock_guard lock(globals().mutex);
    size_t offset = 0;
    const Region* region = find(pointer, bytes, &offset);
    return region && region->behind;
}

bool is_pinned(const void* pointer, size_t bytes) {
    const std::lock_guard lock(globals().mutex);
    size_t offset = 0;
    const Region* region = find(pointer, bytes, &offset);
    return region && !region->behind;
}

}  // namespace

void fail(const char* what) {
    std::fprintf(stderr, "stub: %s\n", what);
    std::abort();
}

Stream::Stream() {
    std::thread([this] { serve(); }).detach();
}

void Stream::serve() {
    std::mt19937 random(static_cast<unsigned>(reinterpret_cast<uintptr_t>(this)));
    for (;;) {
        std::function<void()> work;
        {
            std::unique_lock lock(mutex_);
            changed_.wait(lock, [&] { return !work_.empty(); });
            work = std::move(work_.front());
            work_.pop_front();
            busy_ = true;
        }
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
        work();
        {
            const std::lock_guard lock(mutex_);
            busy_ = false;
        }
        changed_.notify_all();
    }
}

void Stream::give(std::function<void()> work) {
    {
        const std::lock_guard lock(mutex_);
        work_.push_back(std::move(work));
    }
    changed_.notify_all();
}

void Stream::synchronize() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return work_.empty() && !busy_; });
}

Stream& stream_of(void* stream) { return stream ? *static_cast<Stream*>(stream) : *globals().default_stream; }

std::byte* behind(const void* pointer, size_t bytes) {
    const std::lock_guard lock(globals().mutex);
    size_t offset = 0;
    const Region* region = find(pointer, bytes, &offset);
    if (!region || !region->behind) fail("an address that is not in device memory, or goes beyond its allocation");
    return region->behind + offset;
}

}  // namespace stub

using namespace stub;

extern "C" {

const char* cudaGetErrorString(int code) {
    switch (code) {
        case kSuccess: return "no error";
        case kInvalidValue: return "invalid argument";
        case kMemoryAllocation: return "out of memory";
        case kInvalidDevice: return "invalid device ordinal";
        case kNotReady: return "device not ready";
        default: return "unknown error";
    }
}

int cudaGetLastError() { return kSuccess; }

int cudaGetDeviceCount(int* count) {
    *count = gpus();
    return *count > 0 ? kSuccess : 100;
}

int cudaGetDevice(int* gpu) {
    *gpu = current_gpu;
    return kSuccess;
}

int cudaSetDevice(int gpu) {
    if (gpu < 0 || gpu >= gpus()) return kInvalidDevice;
    current_gpu = gpu;
    return kSuccess;
}

int cudaMalloc(void** pointer, size_t bytes) {
    Region region{bytes, nullptr, current_gpu};
    const size_t mapped = bytes == 0 ? 1 : bytes;
    const int file = memfd_create("device memory", 0);
    if (file < 0 || ftruncate(file, static_cast<off_t>(mapped)) != 0) return kMemoryAllocation;
    void* shown = mmap(nullptr, mapped, PROT_NONE, MAP_SHARED, file, 0);
    void* behind = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (shown == MAP_FAILED || behind == MAP_FAILED) return kMemoryAllocation;
    region.behind = static_cast<std::byte*>(behind);
    const std::lock_guard lock(globals().mutex);
    globals().regions[static_cast<std::byte*>(shown)] = region;
    *pointer = shown;
    return kSuccess;
}

int cudaFree(void* pointer) {
    const std::lock_guard lock(globals().mutex);
    const auto found = globals().regions.find(static_cast<std::byte*>(pointer));
    if (found == globals().regions.end() || !found->second.behind) return kInvalidValue;
    const size_t mapped = found->second.bytes == 0 ? 1 : found->second.bytes;
    munmap(found->second.behind, mapped);
    munmap(pointer, mapped);
    globals().regions.erase(found);
    return kSuccess;
}

int cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
    *pointer = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    if (!*pointer) return kMemoryAllocation;
    std::memset(*pointer, 0xee, bytes);
    const std::lock_guard lock(globals().mutex);
    globals().regions[static_cast<std::byte*>(*pointer)] = {bytes, nullptr, 0};
    return kSuccess;
}

int cudaFreeHost(void* pointer) {
    {
        const std::lock_guard lock(globals().mutex);
        globals().regions.erase(static_cast<std::byte*>(pointer));
    }
    std::free(pointer);
    return kSuccess;
}

int cudaPointerGetAttributes(void* attributes, const void* pointer) {
    struct {
        int type, gpu;
        void *device, *host;
    } found = {0, 0, nullptr, nullptr};
    const std::lock_guard lock(globals().mutex);
    size_t offset = 0;
    if (const Region* region = find(pointer, 1, &offset)) {
        found.type = region->behind ? 2 : 1;
        found.gpu = region->gpu;
    }
    std::memcpy(attributes, &found, sizeof found);
    return kSuccess;
}

int cudaMemcpyAsync(void* to, const void* from, size_t bytes, int kind, void* stream) {
    const void* device = kind == kToDevice ? to : from;
    const void* host = kind == kToDevice ? from : to;
    if ((kind != kToDevice && kind != kToHost) || !is_device(device, bytes) || !is_pinned(host, bytes)) {
        return kInvalidValue;
    }
    stream_of(stream).give([=] {
        if (kind == kToDevice) {
            std::memcpy(behind(to, bytes), from, bytes);
        } else {
            std::memcpy(to, behind(from, bytes), bytes);
        }
    });
    return kSuccess;
}

// For test programs: any host memory, after all that the default stream has been given.
int cudaMemcpy(void* to, const void* from, size_t bytes, int kind) {
    if (bytes == 0) return kSuccess;
    stream_of(nullptr).synchronize();
    if (kind != kToDevice && kind != kToHost) return kInvalidValue;
    if (kind == kToDevice) std::memcpy(behind(to, bytes), from, bytes);
    if (kind == kToHost) std::memcpy(to, behind(from, bytes), bytes);
    return kSuccess;
}

int cudaStreamCreateWithFlags(void** stream, unsigned) {
    *stream = new Stream;  // its thread uses it until the process ends
    return kSuccess;
}

int cudaStreamSynchronize(void* stream) {
    stream_of(stream).synchronize();
    return kSuccess;
}

int cudaEventCreateWithFlags(void** event, unsigned) {
    *event = new std::shared_ptr<Event>(std::make_shared<Event>());
    return kSuccess;
}

int cudaEventDestroy(void* event) {
    delete static_cast<std::shared_ptr<Event>*>(event);
    return kSuccess;
}

int cudaEventRecord(void* event, void* stream) {
    const std::shared_ptr<Event> its = *static_cast<std::shared_ptr<Event>*>(event);
    {
        const std::lock_guard lock(its->mutex);
        ++its->open;
    }
    stream_of(stream).give([its] {
        {
            const std::lock_guard lock(its->mutex);
            --its->open;
        }
        its->changed.notify_all();
    });
    return kSuccess;
}

int cudaEventQuery(void* event) {
    Event& its = **static_cast<std::shared_ptr<Event>*>(event);
    const std::lock_guard lock(its.mutex);
    return its.open == 0 ? kSuccess : kNotReady;
}

int cudaEventSynchronize(void* event) {
    Event& its = **static_cast<std::shared_ptr<Event>*>(event);
    std::unique_lock lock(its.mutex);
    its.changed.wait(lock, [&] { return its.open == 0; });
    return kSuccess;
}

}  // extern "C"
