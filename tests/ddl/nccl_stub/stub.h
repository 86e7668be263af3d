// A stub of the CUDA runtime and of NCCL on host memory, for machines without a GPU: what libddl asks of them, in one
// library that DDL_CUDA_LIB and DDL_NCCL_LIB name. Written from their documentation, and strict:
//
// - "device memory" cannot be touched by the CPU (it is mapped without any right; the stub has a mapping of its own),
// so
//   that whoever takes a device pointer for a host one is killed at once;
// - what is given to a stream happens later, on a thread of the stream, so that what does not wait reads wrong numbers;
// - asynchronous copies want pinned host memory.
//
// NCCL's collectives run over MPI. $DDL_STUB_DIR is a folder where ranks meet, and where each writes down its calls in
// calls.RANK: "COMMUNICATOR NAME COUNT TYPE ARGUMENT". DDL_STUB_GPUS: GPUs that each process sees (8).
// DDL_STUB_NCCL_FAILS: the rank whose ncclCommInitRank fails, as it does without a GPU.
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
    Stream();  // and its thread, which lives for as long as the process
    void give(std::function<void()> work);
    void synchronize();

  private:
    void serve();

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::function<void()>> work_;
    bool busy_ = false;
};

// The stream behind a cudaStream_t.
Stream& stream_of(void* stream);

// Where the stub itself can read and write device memory. Ends the process where [pointer, pointer + bytes) is none.
std::byte* behind(const void* pointer, size_t bytes);

[[noreturn]] void fail(const char* what);

}  // namespace stub
