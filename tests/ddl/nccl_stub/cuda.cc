#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "stub.h"

namespace stub {
namespace {

enum {
    kSuccess = 0,
    kInvalidValue = 1,
    kMemoryAllocation = 2,
    kNoDevice = 100,
    kInvalidDevice = 101,
    kInvalidHandle = 400,
    kNotReady = 600
};
enum { kToDevice = 1, kToHost = 2 };
enum Kind { kUnknown = 0, kPinned = 1, kDevice = 2, kManaged = 3 };  // cudaMemoryType

struct Region {
    size_t bytes = 0;
    std::byte* behind = nullptr;  // where the CPU reaches it
    int gpu = 0;
    Kind kind = kUnknown;
};

struct Event {
    int gpu = 0;
    std::mutex mutex;
    std::condition_variable changed;
    int open = 0;  // records that have not happened
};

// Never destroyed: streams outlive main().
struct Globals {
    std::mutex mutex;
    std::map<const std::byte*, Region> regions;  // by where they begin
    std::vector<Stream*> streams;                // but the default one
    Stream* default_stream = new Stream(-1);     // every GPU's
    std::atomic<unsigned long long> contexts{0}, pinned{0};
};
Globals& globals() {
    static auto* made = new Globals;
    return *made;
}

thread_local int current_gpu = 0;

void make_context(int gpu) { globals().contexts |= 1ULL << gpu; }
void need_context() { make_context(current_gpu); }

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

Kind kind_of(const void* pointer, size_t bytes) {
    const std::lock_guard lock(globals().mutex);
    size_t offset = 0;
    const Region* region = find(pointer, bytes, &offset);
    return region ? region->kind : kUnknown;
}

int add_host_memory(void** pointer, size_t bytes, Kind kind) {
    need_context();
    auto* const made = static_cast<std::byte*>(std::aligned_alloc(4096, (bytes + 4096) / 4096 * 4096));
    if (!made) return kMemoryAllocation;
    std::memset(made, 0xee, bytes);
    const std::lock_guard lock(globals().mutex);
    globals().regions[made] = {bytes, made, current_gpu, kind};
    *pointer = made;
    return kSuccess;
}

}  // namespace

void fail(const char* what) {
    std::fprintf(stderr, "stub: %s\n", what);
    std::abort();
}

Stream::Stream(int gpu) : gpu_(gpu) {
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
        if (destroyed_) fail("a stream is used that was destroyed");
        work_.push_back(std::move(work));
    }
    changed_.notify_all();
}

void Stream::synchronize() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return work_.empty() && !busy_; });
}

void Stream::destroy() {
    const std::lock_guard lock(mutex_);
    destroyed_ = true;
}

void synchronize_device() {
    std::vector<Stream*> streams;
    {
        const std::lock_guard lock(globals().mutex);
        streams = globals().streams;
    }
    for (Stream* stream : streams) stream->synchronize();
}

Stream& stream_of(void* stream) { return stream ? *static_cast<Stream*>(stream) : *globals().default_stream; }

std::byte* behind(const void* pointer, size_t bytes) {
    const std::lock_guard lock(globals().mutex);
    size_t offset = 0;
    const Region* region = find(pointer, bytes, &offset);
    if (!region || region->kind == kPinned)
        fail("an address that is not in device memory, or goes beyond its allocation");
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
        case kNoDevice: return "no CUDA-capable device is detected";
        case 35: return "CUDA driver version is insufficient for CUDA runtime version";
        case 700: return "an illegal memory access was encountered";
        case kInvalidHandle: return "invalid resource handle";
        case kInvalidDevice: return "invalid device ordinal";
        case kNotReady: return "device not ready";
        default: return "unknown error";
    }
}

int cudaGetLastError() { return kSuccess; }
int cudaPeekAtLastError() { return kSuccess; }

int cudaThreadExchangeStreamCaptureMode(int* mode) {
    thread_local int mine = 0;
    std::swap(mine, *mode);
    return kSuccess;
}

// For test programs: a bit for each GPU that something of this process has a context on, and calls of cudaHostAlloc.
unsigned long long stub_contexts() { return globals().contexts; }
unsigned long long stub_pinned() { return globals().pinned; }

int cuDevicePrimaryCtxGetState(int gpu, unsigned* flags, int* active) {
    *flags = 0;
    *active = static_cast<int>(globals().contexts >> gpu & 1);
    return kSuccess;
}

int cuPointerGetAttribute(void* data, int attribute, unsigned long long pointer) {
    constexpr int kMemoryType = 2;
    if (attribute != kMemoryType) return kInvalidValue;
    const Kind kind = kind_of(reinterpret_cast<const void*>(pointer), 1);
    if (kind == kUnknown) return kInvalidValue;
    *static_cast<unsigned*>(data) = kind == kPinned ? 1 : 2;
    return kSuccess;
}

int cudaGetDeviceCount(int* count) {
    *count = gpus();
    return *count > 0 ? kSuccess : kNoDevice;
}

int cudaGetDevice(int* gpu) {
    *gpu = current_gpu;
    return kSuccess;
}

int cudaSetDevice(int gpu) {
    if (gpu < 0 || gpu >= gpus()) return kInvalidDevice;
    current_gpu = gpu;
    need_context();  // since CUDA 12
    return kSuccess;
}

int cudaMalloc(void** pointer, size_t bytes) {
    need_context();
    Region region{bytes, nullptr, current_gpu, kDevice};
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
    if (found == globals().regions.end() || found->second.kind == kPinned) return kInvalidValue;
    if (found->second.kind == kManaged) {
        std::free(pointer);
        globals().regions.erase(found);
        return kSuccess;
    }
    const size_t mapped = found->second.bytes == 0 ? 1 : found->second.bytes;
    munmap(found->second.behind, mapped);
    munmap(pointer, mapped);
    globals().regions.erase(found);
    return kSuccess;
}

int cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
    ++globals().pinned;
    return add_host_memory(pointer, bytes, kPinned);
}

int cudaMallocManaged(void** pointer, size_t bytes, unsigned) { return add_host_memory(pointer, bytes, kManaged); }

int cudaFreeHost(void* pointer) {
    need_context();
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
    if (const char* error = std::getenv("DDL_STUB_POINTER_ERROR")) return std::atoi(error);
    if (gpus() == 0) return kNoDevice;
    const std::lock_guard lock(globals().mutex);
    size_t offset = 0;
    if (const Region* region = find(pointer, 1, &offset)) {
        found.type = region->kind;
        found.gpu = region->gpu;
    }
    std::memcpy(attributes, &found, sizeof found);
    return kSuccess;
}

int cudaMemcpyAsync(void* to, const void* from, size_t bytes, int kind, void* stream) {
    need_context();
    const Kind device = kind_of(kind == kToDevice ? to : from, bytes);
    const Kind host = kind_of(kind == kToDevice ? from : to, bytes);
    if ((kind != kToDevice && kind != kToHost) || host != kPinned || (device != kDevice && device != kManaged)) {
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
    need_context();
    auto* const made = new Stream(current_gpu);  // its thread uses it until the process ends
    *stream = made;
    const std::lock_guard lock(globals().mutex);
    globals().streams.push_back(made);
    return kSuccess;
}

int cudaStreamDestroy(void* stream) {
    stream_of(stream).destroy();
    return kSuccess;
}

int cudaStreamSynchronize(void* stream) {
    stream_of(stream).synchronize();
    return kSuccess;
}

int cudaEventCreateWithFlags(void** event, unsigned) {
    need_context();
    auto made = std::make_shared<Event>();
    made->gpu = current_gpu;
    *event = new std::shared_ptr<Event>(std::move(made));
    return kSuccess;
}

int cudaEventDestroy(void* event) {
    delete static_cast<std::shared_ptr<Event>*>(event);
    return kSuccess;
}

int cudaEventRecord(void* event, void* stream) {
    const std::shared_ptr<Event> its = *static_cast<std::shared_ptr<Event>*>(event);
    if (const int gpu = stream_of(stream).gpu(); gpu >= 0 && gpu != its->gpu) return kInvalidHandle;
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
    need_context();
    Event& its = **static_cast<std::shared_ptr<Event>*>(event);
    const std::lock_guard lock(its.mutex);
    return its.open == 0 ? kSuccess : kNotReady;
}

int cudaEventSynchronize(void* event) {
    need_context();
    Event& its = **static_cast<std::shared_ptr<Event>*>(event);
    std::unique_lock lock(its.mutex);
    its.changed.wait(lock, [&] { return its.open == 0; });
    return kSuccess;
}

}  // extern "C"
