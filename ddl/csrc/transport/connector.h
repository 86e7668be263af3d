// Makes the connections of a job: listens, connects, and lets in ranks that prove that they know the job's token.
//
// The rank that connects sends its number, the number of the rank that it means, and a nonce (hello). The other answers
// with a nonce of its own and an HMAC of all this under the token. The first then proves itself in the same way. There
// may be several connections between two ranks, one for each address that was tried: the one that was connected to
// keeps the first that came so far, and says so. A connection has two seconds and some hundred bytes for all this. They
// are served side by side, so that none holds another up.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "transport/interfaces.h"
#include "transport/socket.h"

namespace ddl {

class Connector {
  public:
    // For `rank` of `size`. Listens at the loopback address and at addresses_for_other_hosts(). `on_connected` gets
    // each connection to another rank once. Throws Error as open_door() does.
    Connector(int rank, int size, std::function<void(int peer, Socket socket)> on_connected);
    ~Connector();

    // Where this rank listens, for connect() of others: one line.
    const std::string& contact() const { return contact_; }
    // The job's secret; at most 64 bytes. Nobody is let in before let_in().
    void set_token(std::string token) { token_ = std::move(token); }
    void let_in() { open_ = true; }

    // Begins to connect to a rank, at all its addresses at once; only a higher rank connects to a lower one.
    void connect(int peer, const std::string& contact);
    // Gives up all connections that are under way.
    void give_up();
    size_t attempts() const;  // of this rank's, under way
    // The other end may have kept a connection: it must not be tried again before that one ends.
    bool is_promised(int peer) const;
    bool is_connected(int peer) const { return connected_[static_cast<size_t>(peer)]; }

    // Moves all connections along; waits at most so long for the first event.
    void serve(int milliseconds);

  private:
    struct Link;
    bool advance(Link& link);
    void connected(Link& link);

    const int rank_, size_;
    const std::function<void(int, Socket)> on_connected_;
    Door door_;
    std::string contact_, token_;
    bool open_ = false;
    double listens_from_ = 0;
    std::vector<bool> connected_;
    std::vector<Link> links_;
};

}  // namespace ddl
