#include <thread>

#include "base/backoff.h"
#include "check.h"
#include "engine/waker.h"

using namespace ddl;

namespace {

double seconds_of_rest(Waker& waker, double most, int fd = -1) {
    const double begin = seconds_now();
    waker.rest(most, fd);
    return seconds_now() - begin;
}

}  // namespace

TEST("a rest ends with time, with a wake-up before it or in it, or with what its descriptor gets") {
    Waker waker, other;
    CHECK(!waker.rest(0.01, -1));
    waker.wake();
    CHECK(waker.rest(60, -1));
    CHECK(!waker.rest(0.01, -1));
    std::thread later([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        waker.wake();
    });
    CHECK(waker.rest(60, -1));
    later.join();
    const Socket event([] { return eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK); });
    CHECK(waker.rest(60, event.fd()));
}

TEST("no wake-up is lost, and none ends more than two rests") {
    Waker waker;
    std::atomic<int> asked{0};
    constexpr int kTimes = 20000;
    std::thread others([&] {
        for (int i = 0; i < kTimes; ++i) {
            ++asked;
            waker.wake();
            if (i % 16 == 0) std::this_thread::yield();
        }
    });
    for (int seen = 0; seen < kTimes; seen = asked) CHECK(waker.rest(60, -1) || asked > seen);
    others.join();
    waker.rest(0, -1);
    waker.rest(0, -1);
    CHECK(seconds_of_rest(waker, 0.05) >= 0.05);
}
