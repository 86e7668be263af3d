// How a thread rests, and how others wake it.
#pragma once

#include <poll.h>
#include <sys/eventfd.h>

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

    // Ends the thread's rest, or else its next one. On any thread; costs little if it does not rest.
    void wake() noexcept {
        if (state_.exchange(State::woken) == State::rests) eventfd_write(event_.fd(), 1);
    }

    // Rests until wake(), or until `fd` (-1: none) can be read, or for `seconds`. True if the rest ended early. What
    // others did before their wake() is seen afterwards.
    bool rest(double seconds, int fd) noexcept {
        pollfd ready[2] = {{event_.fd(), POLLIN, 0}, {fd, POLLIN, 0}};
        State before = State::awake;
        const bool ended = !state_.compare_exchange_strong(before, State::rests) ||
                           poll(ready, 2, static_cast<int>(std::ceil(seconds * 1e3))) > 0;
        state_.exchange(State::awake);
        // A wake() may write after the rest that it saw: it ends the next one.
        eventfd_t count = 0;
        if (ready[0].revents != 0) eventfd_read(event_.fd(), &count);
        return ended;
    }

  private:
    enum class State : uint8_t { awake, rests, woken };

    Socket event_;
    std::atomic<State> state_{State::awake};
};

}  // namespace ddl
