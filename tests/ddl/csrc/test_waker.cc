#include <thread>

#include "base/backoff.h"
#include "check.h"
#include "engine/waker.h"

using namespace ddl;

TEST("a rest ends with time, with a wake-up before it or in it, or with what its descriptor gets") {
    Waker waker;
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

TEST("no wake-up is lost") {
    Waker waker;
    std::atomic<int> asked{0}, seen{0};
    constexpr int kTimes = 20000;
    std::thread others([&] {
        while (asked < kTimes) {
            while (seen < asked) std::this_thread::yield();
            ++asked;
            waker.wake();
        }
    });
    for (; seen < kTimes; ++seen) {
        while (asked <= seen) CHECK(waker.rest(60, -1));
    }
    others.join();
    for (int i = 0; i < 2; ++i) waker.rest(0, -1);  // what the last one left
    const double begin = seconds_now();
    CHECK(!waker.rest(0.05, -1));
    CHECK(seconds_now() - begin >= 0.05);
}
