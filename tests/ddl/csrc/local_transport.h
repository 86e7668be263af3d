// A transport among threads of one process: each thread is a rank. For tests of schedules, faults and sanitizers, which
// do without MPI. Messages up to an eager limit are copied when they are sent, longer ones when they are received.
//
// Faults are injected from any thread, at any time, and cannot be undone, delays excepted.
#pragma once

#include <memory>

#include "transport/transport.h"

namespace ddl {

class LocalNetwork {
  public:
    // `eager_bytes`: messages up to this size complete at their sender at once, longer ones when they are received.
    explicit LocalNetwork(int size, size_t eager_bytes = 4096);
    ~LocalNetwork();
    LocalNetwork(const LocalNetwork&) = delete;
    LocalNetwork& operator=(const LocalNetwork&) = delete;

    int size() const;
    // The transport of `rank`; one for each rank. It may outlive the network object.
    std::unique_ptr<Transport> transport(int rank);

    // From now on (or once it has sent `messages` more messages) nothing leaves or reaches `rank`, and all ranks,
    // itself included, are told that it is dead.
    void kill(int rank);
    void kill_after(int rank, int messages);
    // From now on nothing leaves or reaches `rank`, and nobody is told: a host that went silent.
    void silence(int rank);
    // From now on nothing passes between `a` and `b`, notices included.
    void cut(int a, int b);
    // Messages that `rank` sends from now on arrive `seconds` later.
    void delay(int rank, double seconds);

    // Messages and posted receives that nobody has matched or cancelled: 0 after a clean end.
    size_t pending() const;

  private:
    struct Shared;
    friend class LocalTransport;
    std::shared_ptr<Shared> shared_;
};

}  // namespace ddl
