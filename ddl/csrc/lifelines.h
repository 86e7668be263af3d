// Lifelines: how ranks learn that another one is dead. MPI does not say: its implementations abort, or wait for ever.
//
// Each rank holds a TCP connection to the ranks at distances 1, 2, 4, 8, ... before and behind it. Nothing passes over
// an idle one. The kernel closes it when the process ends, however it ends; and when a host or a cable is gone, the
// kernel's own probes go unanswered (see keep_alive()). Who sees a death tells its neighbours, they tell theirs: all
// know within as many hops as the size has bits, also while several ranks are dead. Who leaves in order says goodbye.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "socket.h"

namespace ddl {

enum class Death : uint8_t {
    none,
    ended,   // its process ended without a goodbye
    silent,  // its host or the link to it is gone
};

// Where a rank listens.
struct Contact {
    std::vector<std::string> addresses;  // numeric; any may be a dead end
    uint16_t port = 0;
};

// Ranks that `rank` of `size` has a lifeline to, ascending.
std::vector<int> lifeline_peers(int rank, int size);

class Lifelines {
  public:
    // Listens. Throws Error where no port can be had.
    Lifelines();
    ~Lifelines();
    Lifelines(const Lifelines&) = delete;
    Lifelines& operator=(const Lifelines&) = delete;

    uint16_t port() const { return port_; }

    // Connects to the peers of this rank, and watches them from then on; once. `contacts` are those of all ranks;
    // `token` is the same on all, and no other job's. `on_death` is called on the watching thread, once for each rank
    // that died. Returns, after at most `seconds`, the peers to which no address led: their deaths are learnt from
    // others, where there are others.
    std::vector<int> connect(int rank, const std::vector<Contact>& contacts, uint64_t token, double seconds,
                             std::function<void(int rank, Death cause)> on_death);

    Death death_of(int rank) const { return static_cast<Death>(deaths_[static_cast<size_t>(rank)].load()); }
    bool any_dead() const { return any_dead_; }

    // Tells the peers that this process ends in good order.
    void say_goodbye();
    // Around a fork, on the thread that forks: no line is made or dropped meanwhile. In the child close_in_child()
    // takes the place of after_fork(): the child's copies would keep the connections open beyond the parent's death.
    void before_fork() { mutex_.lock(); }
    void after_fork() { mutex_.unlock(); }
    void close_in_child();

  private:
    struct Link;
    struct Frame;

    void serve();
    bool take_guests();        // false: there are no descriptors for more
    bool advance(Link& link);  // false: it is to be dropped
    bool shake_hands(Link& link);
    bool take_frames(Link& link);
    void establish(Link& link);
    void mark(int rank, Death cause);
    void send_all(const Frame& frame);
    bool is_linked(int peer) const;

    uint16_t port_ = 0;  // before the listener, which sets it
    Socket listener_;
    int wake_[2] = {-1, -1};  // a pipe: ends the thread
    int rank_ = -1, size_ = 0;
    uint64_t token_ = 0;
    double deadline_ = 0;
    std::vector<int> peers_;
    std::function<void(int, Death)> on_death_;

    std::mutex mutex_;  // guards the links
    std::condition_variable linked_;
    std::vector<std::unique_ptr<Link>> links_;
    std::unique_ptr<std::atomic<uint8_t>[]> deaths_;  // by rank
    std::atomic<bool> any_dead_{false};
    std::thread thread_;
};

}  // namespace ddl
