// How fast two ranks exchange data, both ways at once, in a box of time.
//
// The sender keeps so much under way that the other end's acknowledgements come back some milliseconds later than over
// an idle link: enough to fill a link whose rate nobody knows, from 1 Mbit/s to 400 Gbit/s, and not so much that a
// switch's queue overflows, whose losses TCP needs hundreds of milliseconds to get over.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "transport/bootstrap.h"

namespace ddl {

struct Box {
    double warm_seconds = 0.015;   // at the start, which are not counted: TCP looks for its rate
    double count_seconds = 0.055;  // then
    double queue_seconds = 0.004;  // by which an acknowledgement may be late before no more is put under way
    size_t most_bytes = 16 << 20;  // under way at most
};

// Messages of at most kStreamTags tags from `tag` on; both ranks make one for the other. Throws Error, as
// Bootstrap::await() does.
constexpr Tag kStreamTags = 2;
class Stream {
  public:
    // `round_trip`: seconds of a small message's way to the peer and back, while nothing else is under way.
    Stream(Bootstrap& bootstrap, int peer, Tag tag, const Box& box, double round_trip);
    ~Stream();
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;

    // Exchanges until the time is over on both ends and everything has arrived. Returns bytes per second that came in.
    double run();

  private:
    struct Sent {
        Ticket ticket;
        double at;  // when it was posted, in seconds
        size_t bytes;
    };
    struct Arrival {
        double at;
        size_t bytes;
    };

    bool poll();
    void take_arrivals();
    void take_acknowledgements();
    void send_more();
    double rate() const;

    Bootstrap& bootstrap_;
    const int peer_;
    const Tag data_tag_, acknowledgement_tag_;
    const Box box_;
    const double on_time_;  // seconds for an acknowledgement that waits in no queue

    double start_ = 0, now_ = 0;
    size_t window_;         // bytes that may be under way
    size_t under_way_ = 0;  // bytes
    bool said_end_ = false, heard_end_ = false;
    Block arena_;  // what comes in
    std::deque<std::pair<Ticket, std::byte*>> receives_;
    std::deque<Sent> sent_;        // not acknowledged
    std::vector<Ticket> leaving_;  // acknowledged or no data, but their memory may still be read
    Ticket acknowledgement_ = 0;   // a receive; 0: none is posted
    std::vector<Arrival> arrivals_;
};

}  // namespace ddl
