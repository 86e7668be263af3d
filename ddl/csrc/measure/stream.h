// Measures how fast two ranks exchange data, both ways at once, in a fixed time.
//
// The sender keeps so much data in flight that acknowledgements come back some milliseconds later than over an idle
// link. This fills a link of unknown rate, from 1 Mbit/s to 400 Gbit/s, but does not overflow a switch's queue, whose
// losses would cost TCP hundreds of milliseconds.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "transport/bootstrap.h"

namespace ddl {

struct Box {
    double warm_seconds = 0.015;   // at the start, not counted: TCP is still finding its rate
    double count_seconds = 0.055;  // after that, counted
    double queue_seconds = 0.004;  // an acknowledgement that is later than this stops further sends
    size_t most_bytes = 16 << 20;  // in flight at most
};

// Both ranks of a pair make one. It uses kStreamTags tags from `tag` on. Throws Error as Bootstrap::await() does.
constexpr Tag kStreamTags = 2;
class Stream {
  public:
    // `round_trip`: seconds of a small message to the peer and back on an idle link.
    Stream(Bootstrap& bootstrap, int peer, Tag tag, const Box& box, double round_trip);
    ~Stream();
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;

    // Exchanges data until the time is over on both ends and everything has arrived. Returns the bytes received per
    // second.
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
    const double on_time_;  // seconds for an acknowledgement that does not wait in a queue

    double start_ = 0, now_ = 0;
    size_t window_;         // bytes that may be in flight
    size_t under_way_ = 0;  // bytes
    bool said_end_ = false, heard_end_ = false;
    Block arena_;  // for received data
    std::deque<std::pair<Ticket, std::byte*>> receives_;
    std::deque<Sent> sent_;        // not acknowledged yet
    std::vector<Ticket> leaving_;  // acknowledged, or without data, but their memory may still be read
    Ticket acknowledgement_ = 0;   // a receive; 0: none is posted
    std::vector<Arrival> arrivals_;
};

}  // namespace ddl
