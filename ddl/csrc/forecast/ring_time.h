// The time of one ring over all ranks if no two of its messages share a link, as in a ring through a tree in order.
// Pure.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "forecast/network.h"
#include "schedule/plan.h"

namespace ddl {

struct RingTime {
    double seconds = 0;
    std::vector<double> tier_bytes, tier_messages;  // as Forecast has them
};

// True if `plan` is one ring, and no link carries two of its hops.
bool is_alone(const Network& network, const Layout& layout, const Plan& plan);

// The time of an allreduce of `count` elements of `element` bytes in `chunks` chunks, `window` of them in flight. The
// result equals the event-by-event simulation: without shared links a message starts at the latest of three ends (the
// previous rounds of both ranks, and the previous message on its path), and messages keep their order, round by round
// and chunk by chunk. Nothing if not is_alone(). Cost: a few nanoseconds a message.
std::optional<RingTime> ring_time(const Network& network, const Layout& layout, const Plan& plan, uint64_t count,
                                  uint64_t element, uint32_t chunks, int window);

}  // namespace ddl
