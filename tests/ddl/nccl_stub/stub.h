// A stub of the CUDA runtime, of the part of its driver that libddl asks, and of NCCL, on host memory, for machines
// without a GPU: one library that DDL_CUDA_LIB and DDL_NCCL_LIB name, by a name that begins with libcuda.so, by which
// libddl knows the driver. Written from their documentation, and strict:
//
// - "device memory" cannot be touched by the CPU (it is mapped without any right, and the stub has another mapping), so
//   that code that takes a device pointer for a host pointer is killed at once;
// - what is given to a stream happens later, on a thread of the stream, so that what does not wait reads wrong numbers;
// - asynchronous copies want pinned host memory, and an event the stream of its own GPU;
// - what needs a context makes one on the GPU that is current (stub_contexts());
// - NCCL's communicators are non-blocking: to join one waits for ever for its ranks, the first collectives (and some
//   later ones) wait for them once more, and any other call meanwhile kills the process;
// - ncclCommAbort waits for all that the GPU has been given.
//
// NCCL's collectives run over files, and their minima and maxima drop NaNs, as NCCL's do. $DDL_STUB_DIR is a folder in
// which ranks meet and leave one another messages, and in which each writes down its calls in calls.RANK: "COMMUNICATOR
// NAME COUNT TYPE ARGUMENT". Environment:
// DDL_STUB_GPUS            GPUs that each process sees (8)
// DDL_STUB_POINTER_ERROR   what cudaPointerGetAttributes returns
// DDL_STUB_NCCL_FAILS      the rank that fails to join, as it does without a GPU
// DDL_STUB_NCCL_STUCK      the rank that never joins
// DDL_STUB_NCCL_HANGS      RANK:N: the GPU of the rank stops in its Nth collective, until that is aborted
// DDL_STUB_NCCL_GIVES_UP   RANK:N: NCCL leaves the rank's Nth collective undone, and says so when it is asked
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>

namespace stub {

// Work in order, each piece some time after it was given.
class Stream {
  public:
    explicit Stream(int gpu);  // and its thread, which lives for as long as the process
    void give(std::function<void()> work);
    void synchronize();
    void destroy();  // nothing may be given to it any more
    int gpu() const { return gpu_; }

  private:
    void serve();

    const int gpu_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::function<void()>> work_;
    bool busy_ = false, destroyed_ = false;
};

// The stream behind a cudaStream_t.
Stream& stream_of(void* stream);

// Waits until all streams are idle, as a call does that waits for its device.
void synchronize_device();

// The address at which the stub itself can access device memory. Ends the process if [pointer, pointer + bytes) is not
// device memory.
std::byte* behind(const void* pointer, size_t bytes);

[[noreturn]] void fail(const char* what);

}  // namespace stub
