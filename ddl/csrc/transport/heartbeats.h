// Heartbeats: how ranks learn that another one is dead. MPI does not say: its implementations abort, or wait without
// end.
//
// Each rank holds a TCP connection to the ranks at distances 1, 2, 4, 8, ... before and behind it. Nothing passes over
// an idle one. The kernel closes it when the process ends, however it ends. If a host or a cable is gone, the kernel's
// own probes go unanswered (see keep_alive()). A rank that sees a death tells its neighbours, and they tell theirs: all
// know within as many hops as the size has bits, even if several ranks are dead. A rank that leaves in order says
// goodbye.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "transport/interfaces.h"
#include "transport/socket.h"

namespace ddl {

enum class Death : uint8_t {
    none,
    ended,   // its process ended without a goodbye
    silent,  // its host or the link to it is gone
};

// Ranks that `rank` of `size` has a heartbeat to, ascending.
std::vector<int> heartbeat_peers(int rank, int size);

class Heartbeats {
  public:
    // Listens at those of these numeric addresses of this host that can be had. Throws Error as open_door() does.
    explicit Heartbeats(const std::vector<std::string>& addresses);
    ~Heartbeats();
    Heartbeats(const Heartbeats&) = delete;
    Heartbeats& operator=(const Heartbeats&) = delete;

    const Contact& contact() const { return door_.contact; }

    // Connects to the peers of this rank, and watches them from then on; once. `contacts` are those of all ranks;
    // `token` is the same on all, and no other job's. `on_death` is called on the watching thread, once for each rank
    // that died. Returns, after at most `seconds`, the peers to which no address led: their deaths are learnt from
    // others, if there are others.
    std::vector<int> connect(int rank, const std::vector<Contact>& contacts, uint64_t token, double seconds,
                             std::function<void(int rank, Death cause)> on_death);

    Death death_of(int rank) const { return static_cast<Death>(deaths_[static_cast<size_t>(rank)].load()); }
    bool any_dead() const { return any_dead_; }

    // The ranks that answer nobody: each rank that calls this asks its peers, and tells the others which of them say
    // nothing for `seconds`. A process that is stopped does not answer; one that is stuck inside MPI does. Blocks for
    // twice that time.
    std::vector<int> silent(double seconds);

    // Tells the peers that this process ends in good order. Deaths are then passed on, but no more reported here.
    void say_goodbye();

  private:
    struct Link;
    struct Frame;

    void serve();
    bool take_guests(const Socket& listener);  // false: there are no descriptors for more
    void drop_guests(double now);
    bool advance(Link& link);  // false: it is to be dropped
    bool shake_hands(Link& link);
    bool take_frames(Link& link);
    void establish(Link& link);
    void mark(int rank, Death cause);
    void note_silence(int rank);
    void send_all(const Frame& frame);
    bool is_linked(int peer) const;

    const Door door_;
    int wake_[2] = {-1, -1};  // a pipe: ends the thread
    int rank_ = -1, size_ = 0;
    uint64_t token_ = 0;
    double deadline_ = 0;
    std::vector<int> peers_;
    std::function<void(int, Death)> on_death_;

    std::mutex mutex_;  // guards the links
    std::condition_variable linked_;
    bool leaves_ = false;                             // it has said goodbye
    std::vector<std::unique_ptr<Link>> links_;        // oldest first
    std::set<int> answered_;                          // of the peers that silent() has asked
    std::vector<double> silent_since_;                // by rank: when it was last found silent; 0: never
    std::unique_ptr<std::atomic<uint8_t>[]> deaths_;  // by rank
    std::atomic<bool> any_dead_{false};
    std::thread thread_;
};

}  // namespace ddl
