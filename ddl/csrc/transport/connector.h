// Makes the connections of a job: listens, connects, and lets in ranks that prove that they know the job's token.
//
// The rank that connects sends its number, the number of the rank that it means, its epoch, and a nonce (hello). The
// other answers with a nonce of its own and an HMAC of all this under the token. The first then proves itself in the
// same way. There may be several connections between two ranks, one for each address that was tried: the one that was
// connected to keeps the first that came so far, and says so. If both connect at once, the higher rank refuses the
// lower one as soon as its own connection is up, and the lower one accepts. Nobody accepts one that begins in an epoch
// to come: the other end tries again. A connection has two seconds for its hello, and some hundred bytes for all this.
// They are served side by side, so that none holds another up.
//
// Ranks have the numbers here that they had when the job began, in every epoch.
#pragma once

#include <deque>
#include <map>
#include <string>
#include <vector>

#include "transport/interfaces.h"
#include "transport/socket.h"

namespace ddl {

constexpr size_t kMostContact = 1000;  // bytes of where a process listens

class Connector {
  public:
    // For `rank` of `size`. If it `listens`, then at the loopback address and at addresses_for_other_hosts(). Throws
    // Error as open_door() does.
    Connector(int rank, int size, bool listens = true);
    ~Connector();
    Connector(const Connector&) = delete;
    Connector& operator=(const Connector&) = delete;

    // Where this rank listens, for the others: one line.
    const std::string& contact() const { return contact_; }
    // The job's secret. Nobody is let in before let_in().
    void set_token(std::string token) { token_ = std::move(token); }
    void let_in();
    // Where all listen. If they share this rank's host, it stops to listen at addresses that other hosts reach.
    void know(std::vector<std::string> contacts);
    // The epoch in which connections that are begun from now on start.
    void set_epoch(uint32_t epoch) {
        epoch_ = epoch;
        cut_since_ = 0;
    }
    // The network is known to be cut, in this epoch: ranks of other hosts that do not answer at any address are
    // unreachable.
    void expect_cut();

    // Takes another place among others, before let_in(); gives up all connections that are under way.
    void take_seat(int rank, int size);
    // Lets a rank connect once more.
    void forget(int peer) { connected_[static_cast<size_t>(peer)] = false; }

    // Begins to connect to a rank, at all its addresses at once.
    void connect(int peer, const std::string& contact);
    // The same, again and again until there is a connection, or news that there will be none.
    void want(int peer);
    // No address of a wanted rank has answered for a second.
    bool is_unanswered(int peer) const;
    // It is known to be on this host, and reached without a network: only its end, or its leave(), refuses a connection
    // or closes one.
    bool is_near(int peer) const;
    // Lets nobody in any more, and takes a rank that refuses for gone at once: this one leaves.
    void leave();
    // Gives up the connections that this rank has begun, but those that the other end may have kept.
    void give_up();
    // The other end may have kept a connection: it must not be tried again before that one ends.
    bool is_promised(int peer) const;
    bool is_connected(int peer) const { return connected_[static_cast<size_t>(peer)]; }
    size_t attempts() const;  // of this rank's, under way
    // An end that this rank connected to has closed the connection without an answer, and none has answered since.
    bool was_turned_away() const { return turned_away_; }

    struct News {
        enum Kind : uint8_t {
            connected,
            refused,     // nobody has listened at any of its addresses for a while
            unreachable  // it is on another host, the network is cut, and no address has led to it for a while
        };
        int peer = -1;
        Kind kind = connected;
        Socket socket;       // under keep_alive()
        uint32_t epoch = 0;  // in which the connection starts
    };
    // Of each connection once; false if there is none.
    bool next(News* news);

    // An epoll that becomes ready when serve() has something to do; if is_busy(), it is to be called anyway.
    int ready() const { return ready_.fd(); }
    bool is_busy() const { return !links_.empty() || !wants_.empty() || rests_until_ > 0; }
    // Moves all connections along; waits at most so long for the first event.
    void serve(int milliseconds);

  private:
    struct Link;
    // A connection that is to be made.
    struct Want {
        double next_try = 0;
        double unanswered_since = 0, refused_since = 0;  // 0: it is not so
        // In the last try; failed: an address did not lead there, but nobody refused.
        bool was_refused = false, failed = false;
    };
    void add(Link link, bool connects);
    bool advance(Link& link);
    void connected(Link& link);
    void try_wanted(double now);
    void accept_at(size_t door, double now);
    bool is_here(const std::string& contact) const;
    void listen(bool on);
    void watch(int operation, int fd, uint64_t number, bool connects = false) const;

    int rank_, size_;
    Door door_;
    std::string contact_, token_;
    std::vector<std::string> contacts_;
    uint32_t epoch_ = 0;
    bool open_ = false, leaves_ = false, turned_away_ = false;
    double cut_since_ = 0;    // 0: there is no cut
    double rests_until_ = 0;  // nobody is let in before; 0: now
    std::vector<bool> connected_;
    Socket ready_;
    uint64_t last_ = 0;
    std::map<uint64_t, Link> links_;  // the oldest first
    std::map<int, Want> wants_;
    std::deque<News> news_;
};

}  // namespace ddl
