// The CUDA runtime, found at run time: buffers in a GPU's memory need it, and nothing else does. Its functions are
// declared here as its documentation gives them (CUDA Runtime API, versions 11 to 13); no header of it is needed.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "device/device.h"

namespace ddl {

using CudaStream = void*;  // cudaStream_t; null is the legacy default stream
using CudaEvent = void*;   // cudaEvent_t

struct CudaApi {
    const char* (*error_string)(int);
    int (*get_last_error)();  // and forgets it
    int (*peek_last_error)();
    int (*get_device_count)(int*);
    int (*get_device)(int*);
    int (*set_device)(int);
    int (*pointer_attributes)(void* attributes, const void* pointer);
    int (*host_alloc)(void**, size_t, unsigned flags);
    int (*free_host)(void*);
    int (*memcpy_async)(void* to, const void* from, size_t, int kind, CudaStream);
    int (*stream_create)(CudaStream*, unsigned flags);
    int (*stream_synchronize)(CudaStream);
    int (*stream_destroy)(CudaStream);
    int (*exchange_capture_mode)(int*);  // of the calling thread
    int (*event_create)(CudaEvent*, unsigned flags);
    int (*event_destroy)(CudaEvent);
    int (*event_record)(CudaEvent, CudaStream);
    int (*event_query)(CudaEvent);
    int (*event_synchronize)(CudaEvent);

    // Throws Error(DDL_ERROR_TRANSPORT) that names the call, where `code` is none of success.
    void check(int code, const char* call) const;
    // Forgets the calling thread's last error where it is this one: another is the program's own.
    void forget(int code) const;
};

// The runtime of this process: $DDL_CUDA_LIB, else the one that is loaded, else libcudart.so of the system. Never
// unloaded. Throws Error(DDL_ERROR_UNSUPPORTED) where it cannot be loaded.
const CudaApi& cuda_api();

// The same; null where $DDL_CUDA_LIB is not set and CUDA's driver is not loaded, as no buffer can then be a GPU's and
// nothing of CUDA's is begun, and where the runtime is not found.
const CudaApi* cuda_api_in_use();

// Makes a GPU the calling thread's for a while, whatever streams are being captured by others. The one that the thread
// had before is its own again, unless nobody has used that: to make it current would begin it (hundreds of MiB of its
// memory, of each process of a host).
class CurrentGpu {
  public:
    CurrentGpu(const CudaApi& api, int gpu);
    ~CurrentGpu();
    CurrentGpu(const CurrentGpu&) = delete;
    CurrentGpu& operator=(const CurrentGpu&) = delete;

  private:
    const CudaApi& api_;
    int before_ = -1;
    int capture_mode_;
};

// Events of one GPU that are used again. Thread-safe.
class CudaEvents {
  public:
    CudaEvents(const CudaApi& api, int gpu) : api_(api), gpu_(gpu) {}
    // An event that is recorded in `stream`. Throws Error: DDL_ERROR_ARGUMENT where the stream is none of this GPU's.
    CudaEvent record(CudaStream stream);
    // Takes it back.
    void give(CudaEvent event);
    // True where the GPU has come to it. Throws Error.
    bool passed(CudaEvent event) const;

  private:
    const CudaApi& api_;
    const int gpu_;
    std::mutex mutex_;
    std::vector<CudaEvent> free_;
};

class CudaDevice;

// Where a buffer is. In host memory `gpu` is null, and in managed memory the GPU that it was allocated for.
struct CudaPlace {
    std::shared_ptr<CudaDevice> gpu;
    bool managed = false;

    // The GPU that it is in the memory of; null for what the host reads and writes.
    std::shared_ptr<CudaDevice> device() const { return managed ? nullptr : gpu; }
};

// A GPU of this process, used through streams of our own. Lives until the process ends.
class CudaDevice final : public Device {
  public:
    // The GPU with this number, as CUDA counts. Throws Error.
    static std::shared_ptr<CudaDevice> of(int gpu);
    // True where nothing of CUDA's is in the process, and so no buffer in a GPU's memory: cheap, for each call. Throws
    // Error as place_of() does.
    static bool is_absent();
    // Throws Error: DDL_ERROR_UNSUPPORTED for a GPU's memory where the CUDA runtime does not work.
    static CudaPlace place_of(const void* pointer);

    CudaDevice(const CudaApi& api, int gpu);

    const CudaApi& api() const { return api_; }
    int gpu() const { return gpu_; }
    CudaEvents& events() { return events_; }

    // The moment at which the GPU has done what was given to `stream` so far. From any thread. Throws Error.
    std::shared_ptr<Fence> fence(CudaStream stream);

    Ticket copy(void* to, const void* from, size_t bytes, bool to_device) override;
    bool test(Ticket ticket) override;
    void finish(Ticket ticket) noexcept override;

  protected:
    std::byte* allocate(size_t bytes) override;
    void release(std::byte* block) noexcept override;

  private:
    const CudaApi& api_;
    const int gpu_;
    CudaEvents events_;
    CudaStream outward_ = nullptr, inward_ = nullptr;  // to the host, and from it: the two directions are independent
    std::unordered_map<Ticket, CudaEvent> copies_;
    Ticket last_ = 0;
};

// A stream that waits for no other, not even the default one. Throws Error.
CudaStream make_stream(const CudaApi& api, int gpu);

}  // namespace ddl
