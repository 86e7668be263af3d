// A call that was started: whether it is finished, and its result.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "base/status.h"

namespace ddl {

// Why something failed: shared, so that many can be told without memory.
using Cause = std::shared_ptr<const Status>;

class Request {
  public:
    // True when the result is known and the buffers are the caller's again.
    bool finished() const { return finished_.load(std::memory_order_acquire); }
    // The result; only when finished.
    const Status& status() const {
        static const Status kSuccess;
        return error_ ? *error_ : kSuccess;
    }
    // The engine's: `error` is null on success. The last that it does with the request.
    void finish(Cause error) noexcept {
        error_ = std::move(error);
        finished_.store(true, std::memory_order_release);
    }
    uint64_t sequence = 0;  // of the call, once it was accepted

  private:
    std::atomic<bool> finished_{false};
    Cause error_;
};
using RequestPtr = std::shared_ptr<Request>;

}  // namespace ddl
