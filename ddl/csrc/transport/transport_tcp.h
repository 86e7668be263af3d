// The transport over one TCP connection for each pair of ranks.
//
// Short messages are sent at once, as long as the receiver keeps few of them that it has no receive for: each side
// gives credit. Others announce themselves, and their payload moves once a receive is posted. So memory for unexpected
// messages is bounded by kEagerWindow for each peer.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include "transport/socket.h"
#include "transport/transport.h"

namespace ddl {

// A connection, and what of it was read but not looked at.
struct TcpStream {
    Socket socket;
    std::vector<std::byte> unread;
    bool has_ended = false;  // there is none, because the process at the other end has ended
};

class TcpTransport final : public Transport {
  public:
    // `sockets`: a connection to each rank, none to this one; the other end is known to be that rank. A rank without
    // one is dead. `is_dead` says which ranks are known to be dead; it may be empty.
    TcpTransport(int rank, std::vector<Socket> sockets, std::function<bool(int rank)> is_dead);
    TcpTransport(int rank, std::vector<TcpStream> streams, std::function<bool(int rank)> is_dead);
    ~TcpTransport() override;

    int rank() const override { return rank_; }
    int size() const override { return static_cast<int>(peers_.size()); }
    Ticket isend(int peer, Tag tag, const void* data, size_t bytes) override;
    Ticket irecv(int peer, Tag tag, void* data, size_t capacity) override;
    void poll() override;
    bool wait(double seconds) override;
    Progress test(Ticket ticket, size_t* received) override;
    bool cancel(Ticket ticket) override;
    void notify(int peer, const void* data, size_t bytes) override;
    bool next_notice(Notice* notice) override;
    // Also of a rank whose connection broke without a goodbye.
    bool is_dead(int rank) const override;

    // What became of a rank's connection, as far as this end can tell.
    bool has_left(int rank) const;        // it said goodbye
    bool has_ended(int rank) const;       // closed, as only a process's end does
    double seconds_lost(int rank) const;  // since it broke; 0: it did not

    // Messages beside those of the interface, in order, for ranks that agree on who goes on.
    void say(int peer, const std::vector<std::byte>& word);
    bool next_word(int* from, std::vector<std::byte>* word);
    // Ends the use of a connection by this transport: nothing more is sent, and what was not begun is dropped.
    void park(int peer);
    // True when both ends have parked it, and what was begun has left.
    bool is_parked(int peer) const;
    // The parked connections to these ranks, in this order; of this rank, and of those not parked, none.
    std::vector<TcpStream> release(const std::vector<int>& ranks);

    // Sends what was begun, says goodbye and closes the connections; the last call. Doing it twice does nothing.
    void close() override;

  private:
    struct Frame;
    struct Peer;
    struct Message;
    struct Out;

    Peer& at(int peer) { return *peers_[static_cast<size_t>(peer)]; }
    const Peer& at(int peer) const { return *peers_[static_cast<size_t>(peer)]; }
    void push(Peer& peer, Out out);
    void send_copy(Peer& peer, Frame frame, const void* data, size_t bytes);
    void flush(Peer& peer) noexcept;
    void hear(Peer& peer) noexcept;
    bool read(Peer& peer);
    void digest(Peer& peer);
    void take(Peer& peer, const Frame& frame);
    void end_payload(Peer& peer);
    void await(Peer& peer, Ticket ticket);
    void ask(Peer& peer, Ticket ticket, const Frame& announced);
    void forget(Peer& peer, const Frame& frame);
    static void finish(Message& message, size_t bytes, const std::byte* payload);
    void lose(Peer& peer, bool ended = false) noexcept;
    void give_credit(Peer& peer, size_t bytes);

    const int rank_;
    const std::function<bool(int)> is_dead_;
    std::vector<std::unique_ptr<Peer>> peers_;
    int ready_ = -1;  // an epoll
    std::unordered_map<Ticket, Message> messages_;
    Ticket last_ = 0;
    std::deque<Notice> notices_, words_;
    bool closed_ = false;
};

}  // namespace ddl
