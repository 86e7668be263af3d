// Backoff: spin briefly, then let other threads run, then sleep for longer and longer.
#pragma once

#include <poll.h>
#include <sys/prctl.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <thread>

namespace ddl {

// Seconds of a monotonic clock.
inline double seconds_now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

class Backoff {
  public:
    // The first `spins` pauses do nothing. The next ones yield, which costs little if no other thread wants the core,
    // and otherwise may let the awaited rank run. Then each pause sleeps longer, up to `nap_seconds`, less than a
    // second.
    Backoff(int spins, double nap_seconds, int yields = 200)
        : yielding_(spins * kYieldsASpin + yields), spins_(spins), longest_(nap_seconds) {}

    void reset() {
        count_ = 0;
        nap_ = kFirstNap;
    }

    // A nap also ends as soon as `fd` can be read (-1: none). True if that ended it.
    bool pause(int fd = -1) { return !gives_way() && nap(fd); }
    // Spins or yields. False when the time for that is over, and nothing was done.
    bool gives_way() {
        if (++count_ <= spins_) return true;
        if (count_ > yielding_) return false;
        std::this_thread::yield();
        return true;
    }
    bool nap(int fd = -1) {
        // By default the kernel wakes a thread up to 50 us late, to wake several at once.
        const int slack = prctl(PR_GET_TIMERSLACK, 0UL, 0UL, 0UL, 0UL);
        prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL);
        const timespec length{0, static_cast<long>(nap_ * 1e9)};
        pollfd one{fd, POLLIN, 0};
        const bool readable = ppoll(&one, 1, &length, nullptr) > 0;
        if (slack >= 0) prctl(PR_SET_TIMERSLACK, static_cast<unsigned long>(slack), 0UL, 0UL, 0UL);
        if (!readable) nap_ = std::min(nap_ * kGrowth, longest_);
        return readable;
    }

  private:
    static constexpr int kYieldsASpin = 20;
    static constexpr double kFirstNap = 10e-6;
    static constexpr double kGrowth = 1.25;  // a nap is at most a quarter of those before it together, and kFirstNap

    const int yielding_, spins_;  // pauses until naps begin, and until yields do
    const double longest_;
    int count_ = 0;
    double nap_ = kFirstNap;
};

}  // namespace ddl
