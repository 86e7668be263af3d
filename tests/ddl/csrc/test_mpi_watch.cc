// A watch over calls of MPI that do not return. The calls are made up: what counts is when they begin and end.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "base/backoff.h"
#include "check.h"
#include "mpi/mpi_watch.h"

using namespace ddl;

namespace {

// Until it is true, or 20 s have passed.
bool becomes(const std::atomic<bool>& flag) {
    for (int i = 0; i < 4000 && !flag; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    return flag;
}

}  // namespace

TEST("a call that does not return is warned of, and then ends the wait") {
    std::atomic<bool> warned{false}, ended{false};
    const MpiCall call;
    const double begin = seconds_now();
    double warned_at = 0;
    const MpiWatch watch(
        0.2, 0.6,
        [&](double) {
            warned_at = seconds_now();
            warned = true;
        },
        [&](double) { ended = true; });
    CHECK(becomes(ended));
    CHECK(warned);
    CHECK(warned_at - begin >= 0.2);
    CHECK(seconds_now() - begin >= 0.6);
}

TEST("calls that return are not taken for one that does not, however many there are") {
    std::atomic<bool> wrong{false};
    const MpiWatch watch(0.1, 0.2, [&](double) { wrong = true; }, [&](double) { wrong = true; });
    double longest = 0;
    for (const double end = seconds_now() + 0.5; seconds_now() < end;) {
        const double begin = seconds_now();
        {
            const MpiCall call;
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        longest = std::max(longest, seconds_now() - begin);
    }
    CHECK(!wrong || longest > 0.1);  // a busy machine may make one of them long
    wrong = false;
    std::this_thread::sleep_for(std::chrono::milliseconds(300));  // and none at all is no call either
    CHECK(!wrong);
}
