// Notices from outside of MPI that a call of it does not return: whoever sits in that call can say nothing, and ends no
// wait. MPI's non-blocking calls have been seen to block: Open MPI reads the first bytes of an unauthenticated
// connection, and waits for more of them.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

namespace ddl {

// While there is one, this process is inside a call of MPI that does not block. Those of several threads follow one
// another, because the engine's lock is held around them.
class MpiCall {
  public:
    MpiCall() { count_.fetch_add(1, std::memory_order_relaxed); }
    ~MpiCall() { count_.fetch_add(1, std::memory_order_relaxed); }
    MpiCall(const MpiCall&) = delete;
    MpiCall& operator=(const MpiCall&) = delete;

    // Odd inside a call, and another number in each.
    static uint64_t count() { return count_.load(std::memory_order_relaxed); }

  private:
    static std::atomic<uint64_t> count_;
};

// Warns of a call that has not returned for `warn_seconds`, and after `timeout_seconds` calls `end`. It counts its own
// seconds: a process that is stopped with all its threads is not taken for one that is stuck.
class MpiWatch {
  public:
    MpiWatch(double warn_seconds, double timeout_seconds, std::function<void(double seconds)> warn,
             std::function<void(double seconds)> end);
    ~MpiWatch();
    MpiWatch(const MpiWatch&) = delete;
    MpiWatch& operator=(const MpiWatch&) = delete;

  private:
    void serve();

    const double warn_seconds_, timeout_seconds_;
    const std::function<void(double)> warn_, end_;
    std::mutex mutex_;
    std::condition_variable wake_;
    bool over_ = false;
    std::thread thread_;
};

}  // namespace ddl
