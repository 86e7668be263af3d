// How long one ring over all ranks takes if no two of its messages share a link, as in a ring through a tree in order.
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

// True if `plan` is one ring, and no link of it carries two of the ring's ways.
bool is_alone(const Network& network, const Layout& layout, const Plan& plan);

// Of an allreduce of `count` elements of `element` bytes in `chunks` chunks, of which `window` are in flight. The same
// as the simulation event by event: without shared links a message's start is the latest of three ends (both ranks'
// rounds before, and the message before on its way), and messages keep their order, round by round and chunk by chunk.
// Nothing if not is_alone(). Cost: a few nanoseconds a message.
std::optional<RingTime> ring_time(const Network& network, const Layout& layout, const Plan& plan, uint64_t count,
                                  uint64_t element, uint32_t chunks, int window);

}  // namespace ddl
