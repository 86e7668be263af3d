// The CUDA runtime, loaded at run time. Only buffers in GPU memory need it. Its functions are declared here as in its
// documentation (CUDA Runtime API, versions 11 to 13); its headers are not needed.
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
    int (*get_last_error)();  // and resets it
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

    // Throws Error(DDL_ERROR_TRANSPORT), which names the call, if `code` is not success.
    void check(int code, const char* call) const;
    // Resets the calling thread's last error if it is `code`: any other is the program's own.
    void forget(int code) const;
};

// The runtime of this process: $DDL_CUDA_LIB, else the one that is loaded, else libcudart.so of the system. Never
// unloaded. Throws Error(DDL_ERROR_UNSUPPORTED) if it cannot be loaded.
const CudaApi& cuda_api();

// The same, but null if there is no runtime, or if $DDL_CUDA_LIB is not set and CUDA's driver is not loaded: then no
// buffer can be in GPU memory, and CUDA is not initialised.
const CudaApi* cuda_api_in_use();

// Makes a GPU current for the calling thread, for the life of the object, even if other threads capture streams.
// Restores the GPU that was current before, unless the process has never used that one: making it current would
// initialise it (hundreds of MiB of its memory, for each process of a host).
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

// A pool of events of one GPU. Thread-safe.
class CudaEvents {
  public:
    CudaEvents(const CudaApi& api, int gpu) : api_(api), gpu_(gpu) {}
    // Returns an event that is recorded in `stream`. Throws Error: DDL_ERROR_ARGUMENT if the stream is not of this GPU.
    CudaEvent record(CudaStream stream);
    // Takes an event back.
    void give(CudaEvent event);
    // True if the GPU has reached the event. Throws Error.
    bool passed(CudaEvent event) const;

  private:
    const CudaApi& api_;
    const int gpu_;
    std::mutex mutex_;
    std::vector<CudaEvent> free_;
};

class CudaDevice;

// The place of a buffer. `gpu` is null for host memory; for managed memory it is the GPU for which it was allocated.
struct CudaPlace {
    std::shared_ptr<CudaDevice> gpu;
    bool managed = false;

    // The GPU in whose memory it is; null for memory that the host reads and writes.
    std::shared_ptr<CudaDevice> device() const { return managed ? nullptr : gpu; }
};

// A GPU of this process, with streams of our own. Lives until the process ends.
class CudaDevice final : public Device {
  public:
    // The GPU with this CUDA number. Throws Error.
    static std::shared_ptr<CudaDevice> of(int gpu);
    // True if CUDA is not in the process, so no buffer can be in GPU memory. Cheap enough for each call. Throws Error
    // as place_of() does.
    static bool is_absent();
    // Throws Error: DDL_ERROR_UNSUPPORTED for a GPU's memory if the CUDA runtime does not work.
    static CudaPlace place_of(const void* pointer);

    CudaDevice(const CudaApi& api, int gpu);

    const CudaApi& api() const { return api_; }
    int gpu() const { return gpu_; }
    CudaEvents& events() { return events_; }

    // A fence behind the work that `stream` holds now. From any thread. Throws Error.
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
    CudaStream outward_ = nullptr,
               inward_ = nullptr;  // to the host, and from it, as the two directions are independent
    std::unordered_map<Ticket, CudaEvent> copies_;
    Ticket last_ = 0;
};

// Makes a stream that does not wait for any other, not even for the default stream. Throws Error.
CudaStream make_stream(const CudaApi& api, int gpu);

}  // namespace ddl
