// How a thread rests, and how others wake it.
#pragma once

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>

#include "base/status.h"
#include "transport/socket.h"

namespace ddl {

class Waker {
  public:
    Waker() : event_([] { return eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); }) {
        if (!event_) throw Error(DDL_ERROR_TRANSPORT, std::string("eventfd: ") + std::strerror(errno));
    }

    // Ends the rest, if there is one. On any thread; costs little if there is none.
    void wake() noexcept {
        if (!rests_.exchange(false)) return;
        const uint64_t one = 1;
        // Nothing can go wrong: the count is 0 or 1.
        static_cast<void>(!write(event_.fd(), &one, sizeof one));
    }

    // Rests until wake(), or until `also`, a descriptor (-1: none), can be read; at most so long. Not at all if there is
    // work: `has_work` sees what others have done before they called wake(). False if the time is over.
    template <typename HasWork>
    bool rest(double seconds, int also, HasWork has_work) noexcept {
        rests_.exchange(true);  // an exchange here and in wake(): of the two, one sees what came before the other
        pollfd ready[2] = {{event_.fd(), POLLIN, 0}, {also, POLLIN, 0}};
        const bool woken = has_work() || poll(ready, 2, static_cast<int>(std::ceil(seconds * 1e3))) > 0;
        uint64_t count = 0;
        if (!rests_.exchange(false)) static_cast<void>(!read(event_.fd(), &count, sizeof count));
        return woken;
    }

  private:
    Socket event_;
    std::atomic<bool> rests_{false};
};

}  // namespace ddl
