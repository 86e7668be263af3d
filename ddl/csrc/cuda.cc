#include "cuda.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <map>

#include "shared_library.h"
#include "status.h"

namespace ddl {
namespace {

constexpr int kSuccess = 0, kMemoryAllocation = 2, kNotReady = 600;
constexpr int kDeviceMemory = 2;                     // cudaMemoryTypeDevice
constexpr int kHostToDevice = 1, kDeviceToHost = 2;  // cudaMemcpyKind
constexpr unsigned kStreamNonBlocking = 1;           // cudaStreamNonBlocking
constexpr unsigned kEventDisableTiming = 2;

// cudaPointerAttributes; later versions have fields behind these.
struct PointerAttributes {
    int type = 0;
    int device = 0;
    void* device_pointer = nullptr;
    void* host_pointer = nullptr;
    long reserved[32] = {};
};

CudaApi load() {
    std::vector<std::string> names;
    if (const char* chosen = std::getenv("DDL_CUDA_LIB"); chosen && *chosen) {
        names = {chosen};
    } else {
        // The one that the program uses knows its buffers; a second one works too, but costs memory.
        if (const std::string loaded = loaded_library("libcudart.so"); !loaded.empty()) names.push_back(loaded);
        for (const char* name : {"libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0", "libcudart.so"}) {
            names.emplace_back(name);
        }
    }
    const SharedLibrary library(names, "the CUDA runtime, for buffers in a GPU's memory,",
                                "put it on LD_LIBRARY_PATH or name its file in DDL_CUDA_LIB");
    CudaApi api{};
    library.find("cudaGetErrorString", &api.error_string);
    library.find("cudaGetLastError", &api.get_last_error);
    library.find("cudaGetDeviceCount", &api.get_device_count);
    library.find("cudaGetDevice", &api.get_device);
    library.find("cudaSetDevice", &api.set_device);
    library.find("cudaPointerGetAttributes", &api.pointer_attributes);
    library.find("cudaHostAlloc", &api.host_alloc);
    library.find("cudaFreeHost", &api.free_host);
    library.find("cudaMemcpyAsync", &api.memcpy_async);
    library.find("cudaStreamCreateWithFlags", &api.stream_create);
    library.find("cudaStreamSynchronize", &api.stream_synchronize);
    library.find("cudaEventCreateWithFlags", &api.event_create);
    library.find("cudaEventDestroy", &api.event_destroy);
    library.find("cudaEventRecord", &api.event_record);
    library.find("cudaEventQuery", &api.event_query);
    library.find("cudaEventSynchronize", &api.event_synchronize);
    return api;
}

class CudaFence final : public Fence {
  public:
    CudaFence(CudaDevice& device, CudaStream stream) : device_(device), event_(device.events().record(stream)) {}
    ~CudaFence() override { device_.events().give(event_); }
    bool passed() override { return device_.events().passed(event_); }

  private:
    CudaDevice& device_;
    const CudaEvent event_;
};

}  // namespace

void CudaApi::check(int code, const char* call) const {
    if (code == kSuccess) return;
    if (code == kMemoryAllocation) {
        throw Error(DDL_ERROR_MEMORY, std::string(call) + " failed: " + error_string(code));
    }
    throw Error(DDL_ERROR_TRANSPORT,
                std::string(call) + " failed: " + error_string(code) + " (CUDA error " + std::to_string(code) + ")");
}

const CudaApi& cuda_api() {
    static const auto* made = new CudaApi(load());  // until the process ends
    return *made;
}

const CudaApi* cuda_api_in_use() {
    static std::atomic<const CudaApi*> found{nullptr};
    static std::atomic<unsigned long long> looked{0};  // loaded_count() when it was not in use
    static const bool is_chosen = std::getenv("DDL_CUDA_LIB") != nullptr;
    if (const CudaApi* api = found.load(std::memory_order_acquire)) return api;
    const unsigned long long count = loaded_count();
    if (looked == count) return nullptr;
    if (!is_chosen && loaded_library("libcuda.so").empty()) {
        looked = count;
        return nullptr;
    }
    try {
        found.store(&cuda_api(), std::memory_order_release);
    } catch (const Error& error) {
        if (is_chosen) throw;
        looked = loaded_count();
        std::fprintf(stderr, "ddl: warning: buffers in a GPU's memory would not be recognised: %s\n", error.what());
    }
    return found.load(std::memory_order_acquire);
}

CurrentGpu::CurrentGpu(const CudaApi& api, int gpu) : api_(api) {
    int current = 0;
    api_.check(api_.get_device(&current), "cudaGetDevice");
    if (current == gpu) return;
    api_.check(api_.set_device(gpu), "cudaSetDevice");
    before_ = current;
}

CurrentGpu::~CurrentGpu() {
    if (before_ >= 0) static_cast<void>(api_.set_device(before_));
}

CudaEvent CudaEvents::record(CudaStream stream) {
    const CurrentGpu current(api_, gpu_);
    CudaEvent event = nullptr;
    {
        const std::lock_guard lock(mutex_);
        if (!free_.empty()) {
            event = free_.back();
            free_.pop_back();
        }
    }
    if (!event) api_.check(api_.event_create(&event, kEventDisableTiming), "cudaEventCreateWithFlags");
    if (const int code = api_.event_record(event, stream); code != kSuccess) {
        give(event);
        api_.check(code, "cudaEventRecord");
    }
    return event;
}

void CudaEvents::give(CudaEvent event) {
    const std::lock_guard lock(mutex_);
    free_.push_back(event);
}

bool CudaEvents::passed(CudaEvent event) const {
    const int code = api_.event_query(event);
    if (code == kNotReady) {
        static_cast<void>(api_.get_last_error());  // no error, but kept as the thread's last by some versions
        return false;
    }
    api_.check(code, "cudaEventQuery");
    return true;
}

CudaStream make_stream(const CudaApi& api, int gpu) {
    const CurrentGpu current(api, gpu);
    CudaStream stream = nullptr;
    api.check(api.stream_create(&stream, kStreamNonBlocking), "cudaStreamCreateWithFlags");
    return stream;
}

std::shared_ptr<CudaDevice> CudaDevice::of(int gpu) {
    static std::mutex mutex;
    // Never destroyed: the runtime may be gone before they are.
    static auto* devices = new std::map<int, std::shared_ptr<CudaDevice>>;
    const std::lock_guard lock(mutex);
    auto& device = (*devices)[gpu];
    if (!device) device = std::make_shared<CudaDevice>(cuda_api(), gpu);
    return device;
}

std::shared_ptr<CudaDevice> CudaDevice::holding(const void* pointer) {
    const CudaApi* api = pointer ? cuda_api_in_use() : nullptr;
    if (!api) return nullptr;
    PointerAttributes attributes;
    if (api->pointer_attributes(&attributes, pointer) != kSuccess) {
        // Before CUDA 11 memory that it does not know is an error. It would be another function's otherwise.
        static_cast<void>(api->get_last_error());
        return nullptr;
    }
    return attributes.type == kDeviceMemory ? of(attributes.device) : nullptr;
}

CudaDevice::CudaDevice(const CudaApi& api, int gpu)
    : api_(api), gpu_(gpu), events_(api, gpu), outward_(make_stream(api, gpu)), inward_(make_stream(api, gpu)) {}

std::shared_ptr<Fence> CudaDevice::fence(CudaStream stream) { return std::make_shared<CudaFence>(*this, stream); }

Ticket CudaDevice::copy(void* to, const void* from, size_t bytes, bool to_device) {
    const CurrentGpu current(api_, gpu_);
    const CudaStream stream = to_device ? inward_ : outward_;
    api_.check(api_.memcpy_async(to, from, bytes, to_device ? kHostToDevice : kDeviceToHost, stream),
               "cudaMemcpyAsync");
    try {
        copies_[++last_] = events_.record(stream);
    } catch (...) {
        static_cast<void>(api_.stream_synchronize(stream));  // nobody else would wait for it
        copies_.erase(last_);
        throw;
    }
    return last_;
}

bool CudaDevice::test(Ticket ticket) {
    const auto found = copies_.find(ticket);
    if (!events_.passed(found->second)) return false;
    events_.give(found->second);
    copies_.erase(found);
    return true;
}

void CudaDevice::finish(Ticket ticket) noexcept {
    const auto found = copies_.find(ticket);
    static_cast<void>(api_.event_synchronize(found->second));
    events_.give(found->second);
    copies_.erase(found);
}

std::byte* CudaDevice::allocate(size_t bytes) {
    const CurrentGpu current(api_, gpu_);
    void* block = nullptr;
    api_.check(api_.host_alloc(&block, bytes, 0), "cudaHostAlloc");
    return static_cast<std::byte*>(block);
}

void CudaDevice::release(std::byte* block) noexcept { static_cast<void>(api_.free_host(block)); }

}  // namespace ddl
