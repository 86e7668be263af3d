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

#include "transport/connector.h"
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
    // For `rank` of `size`. Listens as a Connector does, and throws the same.
    Heartbeats(int rank, int size);
    ~Heartbeats();
    Heartbeats(const Heartbeats&) = delete;
    Heartbeats& operator=(const Heartbeats&) = delete;

    const std::string& contact() const { return connector_.contact(); }

    // Connects to the peers of this rank, and watches them from then on; once. `contacts` are those of all ranks;
    // `token` is the same on all, and no other job's. `on_death` is called on the watching thread, once for each rank
    // that died. Returns, after at most `seconds`, the peers to which no address led: their deaths are learnt from
    // others, if there are others.
    std::vector<int> connect(std::vector<std::string> contacts, std::string token, double seconds,
                             std::function<void(int rank, Death cause)> on_death);

    Death death_of(int rank) const { return static_cast<Death>(deaths_[static_cast<size_t>(rank)].load()); }
    bool any_dead() const { return any_dead_; }

    // The ranks that answer nobody: each rank that calls this asks its peers, and tells the others which of them say
    // nothing for `seconds`. A process that is stopped does not answer; one that is stuck inside MPI does. Blocks for
    // twice that time.
    std::vector<int> silent(double seconds);

    // Tells the peers that this process ends in good order, and lets in nobody else. Later deaths are passed on,
    // and not reported here.
    void say_goodbye();

  private:
    struct Frame {
        enum Kind : uint32_t {
            goodbye = 1,  // the sender ends in good order
            dead,         // `rank` is, of `cause`
            ask,          // the sender wants an answer
            answer,       // here it is
            silent,       // `rank` does not answer
        };
        uint32_t kind = 0, cause = 0;
        int32_t rank = -1;
    };
    struct Link {
        Socket socket;
        int peer = -1;
        bool said_goodbye = false;
        Frame frame;          // the one that arrives
        size_t received = 0;  // bytes of it

        void send(const Frame& one) const;
    };

    void serve();
    void establish(Connector::News news);
    bool advance(Link& link);  // false: it has ended
    void take_frame(Link& link);
    void mark(int rank, Death cause);
    void note_silence(int rank);
    void send_all(const Frame& frame) const;

    const int rank_, size_;
    const std::vector<int> peers_;
    const Socket wake_;  // an eventfd: ends the thread
    double deadline_ = 0;
    std::function<void(int, Death)> on_death_;

    std::mutex mutex_;  // guards what follows
    std::condition_variable changed_;
    Connector connector_;
    bool leaves_ = false;                                   // it has said goodbye
    std::vector<Link> links_;                               // those that are up
    std::set<int> answered_;                                // of the peers that silent() has asked
    std::vector<double> silent_since_;                      // by rank: when it was last found silent; 0: never
    const std::unique_ptr<std::atomic<uint8_t>[]> deaths_;  // by rank; read without the lock, as is the next
    std::atomic<bool> any_dead_{false};
    std::thread thread_;
};

}  // namespace ddl
