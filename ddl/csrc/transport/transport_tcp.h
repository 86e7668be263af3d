// The transport over TCP. A pair of ranks connects when the first message between them is sent.
//
// Short messages are sent at once, as long as the receiver keeps few of them that it has no receive for: each side
// gives credit. Others announce themselves, and their payload moves once a receive is posted. So memory for unexpected
// messages is bounded by kEagerWindow for each peer.
//
// A rank that has no connection to another one learns of its death from heartbeats. What is told to many ranks passes
// over a tree, so that it needs few connections.
#pragma once

#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include "transport/connector.h"
#include "transport/tcp_connection.h"
#include "transport/transport.h"

namespace ddl {

// What an epoch leaves to the next one.
struct TcpLinks {
    static constexpr int kNoNumber = std::numeric_limits<int>::max();  // of ranks that the connector does not know
    struct Link {
        std::unique_ptr<TcpConnection> connection;  // null: not made yet, or lost
        bool is_lost = false;                       // the rank is gone, ...
        bool has_ended = false;                     // ... because its process has ended
    };
    std::vector<Link> ranks;               // by rank
    std::vector<int> numbers;              // of each rank, the connector's, ascending; kNoNumber come last
    std::shared_ptr<Connector> connector;  // makes the connections that are missing; null: ranks without one are lost
    uint32_t epoch = 0;                    // that begins
    std::vector<std::vector<std::byte>> farewells;  // of the epochs before it, for ranks that are still there
};

constexpr size_t kEagerBytes = 64 << 10;    // longest message that is sent before it is asked for
constexpr size_t kEagerWindow = 512 << 10;  // of such that a receiver keeps, for each peer

class TcpTransport final : public Transport {
  public:
    // `is_dead` says which ranks are known to be dead; it may be empty.
    TcpTransport(int rank, TcpLinks links, std::function<bool(int rank)> is_dead);
    ~TcpTransport() override;

    int rank() const override { return rank_; }
    int size() const override { return static_cast<int>(peers_.size()); }
    Ticket isend(int peer, Tag tag, const void* data, size_t bytes) override;
    Ticket irecv(int peer, Tag tag, void* data, size_t capacity) override;
    void poll() override;
    int ready() const override { return ready_.fd(); }
    bool is_busy() const override;
    bool wait(double seconds) override;
    Progress test(Ticket ticket, size_t* received) override;
    bool cancel(Ticket ticket) override;
    void notify(int peer, const void* data, size_t bytes) override;
    void tell(const std::vector<int>& peers, const void* data, size_t bytes) override;
    bool next_notice(Notice* notice) override;
    // Also of a rank whose connection broke without a goodbye.
    bool is_dead(int rank) const override;
    bool has_left(int rank) const override;
    void reach(const std::vector<int>& ranks) override;

    // What became of a rank's connection, as far as this end can tell.
    bool is_gone(int rank) const;         // it said goodbye
    bool has_ended(int rank) const;       // closed, reset or refused, as only the end of its process does
    double seconds_lost(int rank) const;  // since it broke, or none could be made; 0 or less: it is not so
    // No address of it has answered, though this rank tries.
    bool is_unanswered(int rank) const;
    // As Connector has it.
    void expect_cut() const;
    size_t connections() const;  // that are up: that they are few is a promise, which tests hold

    // Messages beside those of the interface, in order, for ranks that agree on who goes on.
    void say(int peer, const std::vector<std::byte>& word);
    bool next_word(int* from, std::vector<std::byte>* word);
    // Ends the epoch: the connections to these ranks, which are ascending, and will have new numbers in this order.
    // Nothing more is sent here, and what was not begun is dropped. Ranks that are not as far, and those that are left
    // out, get `farewell` as a word.
    TcpLinks end_epoch(const std::vector<int>& ranks, const std::vector<std::byte>& farewell);

    // Sends what was begun, says goodbye and closes the connections; the last call. Doing it twice does nothing.
    void close() override;

  private:
    struct Peer;
    struct Message;
    using Frame = TcpFrame;
    using Out = TcpConnection::Out;

    Peer& at(int rank);
    bool can_reach(int rank) const;
    bool is_near(int rank) const;
    bool has_unsent() const;  // the kernel has not taken all, or there was no memory to read
    bool is_over(int rank) const;
    const Peer* find(int rank) const { return peers_[static_cast<size_t>(rank)].get(); }
    void open(Peer& peer);
    void push(Peer& peer, Out out);
    void send_copy(Peer& peer, const Frame& frame, const void* data, size_t bytes);
    void serve_connector() noexcept;
    void adopt(Connector::News news);
    void pass_on(int from, std::vector<int> ranks, const void* data, size_t bytes);
    void take_notice(const Frame& frame, const std::byte* payload);
    void await(Peer& peer, Ticket ticket);
    void ask(Peer& peer, Ticket ticket, const Frame& announced);
    void forget(Peer& peer, const Frame& frame);
    static void finish(Message& message, size_t bytes, const std::byte* payload);
    void give_credit(Peer& peer, size_t bytes);
    void say_goodbye(Peer& peer);

    const int rank_;
    const std::function<bool(int)> is_dead_;
    std::vector<int> numbers_;
    std::shared_ptr<Connector> connector_;
    const uint32_t epoch_;
    std::vector<std::vector<std::byte>> farewells_;
    std::vector<std::unique_ptr<Peer>> peers_;     // null: nothing has passed between the two
    std::vector<std::unique_ptr<Peer>> left_out_;  // who is not in this epoch, and has been told so
    Socket ready_;                                 // an epoll
    std::unordered_map<Ticket, Message> messages_;
    Ticket last_ = 0;
    std::deque<Notice> notices_, words_;
    bool leaves_ = false, closed_ = false;
};

}  // namespace ddl
