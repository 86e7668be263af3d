#include "device/cuda.h"

#include <atomic>
#include <map>

#include "base/shared_library.h"
#include "base/status.h"

namespace ddl {
namespace {

// cudaError_t
constexpr int kSuccess = 0, kInvalidValue = 1, kMemoryAllocation = 2, kNoDevice = 100, kInvalidHandle = 400,
              kNotReady = 600;
constexpr int kDeviceMemory = 2, kManagedMemory = 3;  // cudaMemoryType
constexpr int kHostToDevice = 1, kDeviceToHost = 2;   // cudaMemcpyKind
constexpr unsigned kStreamNonBlocking = 1;            // cudaStreamNonBlocking
constexpr unsigned kEventDisableTiming = 2;
constexpr int kCaptureModeRelaxed = 2;  // cudaStreamCaptureModeRelaxed

// cudaPointerAttributes; later versions have more fields after these.
struct PointerAttributes {
    int type = 0;
    int device = 0;
    void* device_pointer = nullptr;
    void* host_pointer = nullptr;
    long reserved[32] = {};
};

CudaApi load() {
    std::vector<std::string> names;
    if (const std::string chosen = chosen_library("DDL_CUDA_LIB"); !chosen.empty()) {
        names = {chosen};
    } else {
        // The runtime that the program has loaded knows its buffers; a second one works too, but costs memory.
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
    library.find("cudaPeekAtLastError", &api.peek_last_error);
    library.find("cudaGetDeviceCount", &api.get_device_count);
    library.find("cudaGetDevice", &api.get_device);
    library.find("cudaSetDevice", &api.set_device);
    library.find("cudaPointerGetAttributes", &api.pointer_attributes);
    library.find("cudaHostAlloc", &api.host_alloc);
    library.find("cudaFreeHost", &api.free_host);
    library.find("cudaMemcpyAsync", &api.memcpy_async);
    library.find("cudaStreamCreateWithFlags", &api.stream_create);
    library.find("cudaStreamSynchronize", &api.stream_synchronize);
    library.find("cudaStreamDestroy", &api.stream_destroy);
    library.find("cudaThreadExchangeStreamCaptureMode", &api.exchange_capture_mode);
    library.find("cudaEventCreateWithFlags", &api.event_create);
    library.find("cudaEventDestroy", &api.event_destroy);
    library.find("cudaEventRecord", &api.event_record);
    library.find("cudaEventQuery", &api.event_query);
    library.find("cudaEventSynchronize", &api.event_synchronize);
    return api;
}

// Functions that only the driver has, declared as in its documentation (CUDA Driver API).
struct CudaDriver {
    int (*pointer_attribute)(void* data, int attribute, unsigned long long pointer);
    int (*primary_context)(int gpu, unsigned* flags, int* active);
};

// Null if the process has not loaded it.
const CudaDriver* cuda_driver() {
    static std::atomic<const CudaDriver*> found{nullptr};
    static std::atomic<unsigned long long> looked{0};  // loaded_count() when the driver was not there
    if (const CudaDriver* driver = found.load(std::memory_order_acquire)) return driver;
    // Each collective asks, and reading the names of all libraries takes longer than a small message.
    const unsigned long long count = loaded_count();
    if (looked == count) return nullptr;
    const std::string name = loaded_library("libcuda.so");
    if (name.empty()) {
        looked = count;
        return nullptr;
    }
    const SharedLibrary library({name}, "CUDA's driver", "it was loaded before");
    CudaDriver driver{};
    library.find("cuPointerGetAttribute", &driver.pointer_attribute);
    library.find("cuDevicePrimaryCtxGetState", &driver.primary_context);
    static const CudaDriver made = driver;
    found.store(&made, std::memory_order_release);
    return &made;
}

// True if something in the process has used the GPU, or if that is unknown.
bool is_begun(int gpu) {
    const CudaDriver* const driver = cuda_driver();
    unsigned flags = 0;
    int active = 0;
    return !driver || driver->primary_context(gpu, &flags, &active) != kSuccess || active != 0;
}

// Whether the driver knows `pointer` as GPU memory, for cases in which the runtime cannot say. Throws Error if the
// driver cannot say either.
bool is_in_gpu(const void* pointer) {
    constexpr int kMemoryTypeAttribute = 2;  // CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    const CudaDriver* const driver = cuda_driver();
    if (!driver) return false;
    unsigned type = 0;
    const int code =
        driver->pointer_attribute(&type, kMemoryTypeAttribute, reinterpret_cast<unsigned long long>(pointer));
    switch (code) {
        case kSuccess: return type == kDeviceMemory;
        case 1:    // CUDA_ERROR_INVALID_VALUE: not CUDA's memory
        case 3:    // CUDA_ERROR_NOT_INITIALIZED: nobody uses CUDA's memory
        case 4:    // CUDA_ERROR_DEINITIALIZED
        case 100:  // CUDA_ERROR_NO_DEVICE
        case 101:  // CUDA_ERROR_INVALID_DEVICE
        case 201:  // CUDA_ERROR_INVALID_CONTEXT: there is none
            return false;
        default:
            throw Error(DDL_ERROR_TRANSPORT, "whether a buffer is in a GPU's memory cannot be found out: CUDA error " +
                                                 std::to_string(code) +
                                                 ", which an earlier call of the program may have caused");
    }
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

void CudaApi::forget(int code) const {
    if (peek_last_error() == code) static_cast<void>(get_last_error());
}

const CudaApi& cuda_api() {
    static const auto* made = new CudaApi(load());  // until the process ends
    return *made;
}

const CudaApi* cuda_api_in_use() {
    static std::atomic<const CudaApi*> found{nullptr};
    static std::atomic<unsigned long long> looked{0};  // loaded_count() when it was not in use
    static const bool is_chosen = !chosen_library("DDL_CUDA_LIB").empty();
    if (const CudaApi* api = found.load(std::memory_order_acquire)) return api;
    const unsigned long long count = loaded_count();
    if (looked == count) return nullptr;
    if (!is_chosen && loaded_library("libcuda.so").empty()) {
        looked = count;
        return nullptr;
    }
    try {
        found.store(&cuda_api(), std::memory_order_release);
    } catch (const Error&) {
        if (is_chosen) throw;
        looked = loaded_count();
    }
    return found.load(std::memory_order_acquire);
}

CurrentGpu::CurrentGpu(const CudaApi& api, int gpu) : api_(api), capture_mode_(kCaptureModeRelaxed) {
    int current = 0;
    api_.check(api_.get_device(&current), "cudaGetDevice");
    if (current != gpu) {
        api_.check(api_.set_device(gpu), "cudaSetDevice");
        before_ = current;
    }
    static_cast<void>(api_.exchange_capture_mode(&capture_mode_));
}

CurrentGpu::~CurrentGpu() {
    static_cast<void>(api_.exchange_capture_mode(&capture_mode_));
    if (before_ >= 0 && is_begun(before_)) static_cast<void>(api_.set_device(before_));
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
        if (code != kInvalidHandle) api_.check(code, "cudaEventRecord");
        api_.forget(code);
        throw Error(DDL_ERROR_ARGUMENT, "the stream of ddl_set_stream is not of GPU " + std::to_string(gpu_) +
                                            "'s, where the buffers are: it belongs to another, or was destroyed");
    }
    return event;
}

void CudaEvents::give(CudaEvent event) {
    const std::lock_guard lock(mutex_);
    free_.push_back(event);
}

bool CudaEvents::passed(CudaEvent event) const {
    const CurrentGpu current(api_, gpu_);
    const int code = api_.event_query(event);
    if (code == kNotReady) {
        api_.forget(code);  // not an error, but some versions keep it as the thread's last error
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
    // Never destroyed, because the runtime may be gone before the devices are.
    static auto* devices = new std::map<int, std::shared_ptr<CudaDevice>>;
    const std::lock_guard lock(mutex);
    auto& device = (*devices)[gpu];
    if (!device) device = std::make_shared<CudaDevice>(cuda_api(), gpu);
    return device;
}

bool CudaDevice::is_absent() {
    static std::atomic<unsigned long long> looked{0};  // loaded_count() when there was none
    const unsigned long long count = loaded_count();
    if (looked == count) return true;
    if (cuda_api_in_use() || cuda_driver()) return false;
    looked = count;
    return true;
}

CudaPlace CudaDevice::place_of(const void* pointer) {
    if (!pointer) return {};
    const CudaApi* api = cuda_api_in_use();
    if (!api) {
        if (!is_in_gpu(pointer)) return {};
        api = &cuda_api();  // throws, and says why it cannot be used
    }
    PointerAttributes attributes;
    const int code = api->pointer_attributes(&attributes, pointer);
    if (code != kSuccess) {
        api->forget(code);
        // Unknown memory before CUDA 11, or any memory without a GPU. A runtime that is too new for the driver gives
        // other errors; the program may use another runtime that works.
        if (code == kInvalidValue || code == kNoDevice || !is_in_gpu(pointer)) return {};
        throw Error(DDL_ERROR_UNSUPPORTED,
                    std::string("a buffer is in a GPU's memory, but the CUDA runtime cannot be used: ") +
                        api->error_string(code) + " (CUDA error " + std::to_string(code) +
                        "): an earlier call of the program has failed, or it uses another runtime, whose file "
                        "DDL_CUDA_LIB has to name");
    }
    const bool managed = attributes.type == kManagedMemory;
    if (!managed && attributes.type != kDeviceMemory) return {};
    return {of(attributes.device), managed};
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
        static_cast<void>(api_.stream_synchronize(stream));  // nothing else would wait for it
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
    try {
        const CurrentGpu current(api_, gpu_);
        static_cast<void>(api_.event_synchronize(found->second));
    } catch (const Error&) {
        // The GPU is lost, so nothing is being copied.
    }
    events_.give(found->second);
    copies_.erase(found);
}

std::byte* CudaDevice::allocate(size_t bytes) {
    const CurrentGpu current(api_, gpu_);
    void* block = nullptr;
    api_.check(api_.host_alloc(&block, bytes, 0), "cudaHostAlloc");
    return static_cast<std::byte*>(block);
}

void CudaDevice::release(std::byte* block) noexcept {
    try {
        const CurrentGpu current(api_, gpu_);
        static_cast<void>(api_.free_host(block));
    } catch (const Error&) {
        // The GPU is lost, and the block with it.
    }
}

}  // namespace ddl
