#include "mpi/mpi_watch.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace ddl {

std::atomic<uint64_t> MpiCall::count_{0};

MpiWatch::MpiWatch(double warn_seconds, double timeout_seconds, std::function<void(double)> warn,
                   std::function<void(double)> end)
    : warn_seconds_(warn_seconds),
      timeout_seconds_(timeout_seconds),
      warn_(std::move(warn)),
      end_(std::move(end)),
      thread_([this] { serve(); }) {}

MpiWatch::~MpiWatch() {
    {
        const std::lock_guard lock(mutex_);
        over_ = true;
    }
    wake_.notify_all();
    thread_.join();
}

void MpiWatch::serve() {
    const double tick = std::min(1.0, warn_seconds_ / 4);
    uint64_t last = 0;
    double stuck = 0;
    bool warned = false;
    for (std::unique_lock lock(mutex_);;) {
        if (wake_.wait_for(lock, std::chrono::duration<double>(tick), [this] { return over_; })) return;
        const uint64_t count = MpiCall::count();
        const bool is_stuck = count % 2 == 1 && count == last;
        last = count;
        stuck = is_stuck ? stuck + tick : 0;
        warned = warned && is_stuck;
        if (stuck >= timeout_seconds_) return end_(stuck);
        if (stuck < warn_seconds_ || std::exchange(warned, true)) continue;
        warn_(stuck);
    }
}

}  // namespace ddl
