// What a rank's collectives have come to: how many, how long, which ranks it waited for. The progress lock guards it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace ddl {

// Collectives of fewer bytes are counted and not timed: they cannot afford looks at a clock.
constexpr uint64_t kTimedBytes = 64 << 10;

// The times of one call, in seconds of the engine's clock.
struct Timing {
    double began = 0;       // 0: not timed
    double heard = 0;       // when the last of the first messages came that need no rank but their sender; 0: none yet
    int heard_from = -1;    // its sender, by its rank in the communicator
    double allreduces = 0;  // bytes of an allreduce that takes as long at least
};

class Tally {
  public:
    explicit Tally(int ranks)
        : waited_(static_cast<size_t>(ranks)),
          from_(static_cast<size_t>(ranks)),
          until_(static_cast<size_t>(ranks)),
          late_(static_cast<size_t>(ranks)) {}

    // A call begins. If its buffers had to wait for this rank's GPU, they are ready now.
    void begin(Timing& timing, double now, double allreduces) {
        timing.began = now;
        timing.allreduces = allreduces;
        if (in_flight_++ == 0) since_ = now;
    }
    // A call of `bytes` is finished. `now`: if it was timed. `heard_from`: by its rank in the world.
    void finish(uint64_t bytes, const Timing& timing, double now, int heard_from) {
        ++calls_;
        bytes_ += bytes;
        if (timing.began == 0) return;
        ++timed_;
        allreduces_ += timing.allreduces;
        if (in_flight_ > 0) {
            // Not only when none is left: overlapping calls may never leave a gap, and this one counts from now on.
            seconds_ += now - since_;
            since_ = now;
            --in_flight_;
        }
        if (heard_from < 0) return;
        const auto peer = static_cast<size_t>(heard_from);
        // Calls that overlap wait together, whichever finishes first.
        double &from = from_[peer], &until = until_[peer];
        waited_[peer] += std::max(0.0, timing.heard - std::max(timing.began, until));
        if (timing.began > until) {
            from = timing.began;
        } else if (timing.began < from) {
            waited_[peer] += std::max(0.0, std::min(timing.heard, from) - timing.began);
            from = timing.began;
        }
        until = std::max(until, timing.heard);
        if (timing.heard - timing.began > (now - timing.began) / 2) ++late_[peer];
    }
    // A communicator broke: calls in flight will not finish.
    void give_up(double now) {
        if (in_flight_ > 0) seconds_ += now - since_;
        in_flight_ = 0;
    }

    uint64_t calls() const { return calls_; }
    uint64_t bytes() const { return bytes_; }
    uint64_t timed() const { return timed_; }
    double seconds() const { return seconds_; }        // in which one timed call or several were in flight
    double allreduces() const { return allreduces_; }  // bytes of allreduces that would take as long at least
    // By rank of the world: how long timed calls waited for its first message, and at how many that was more than half
    // of the call.
    const std::vector<double>& waited() const { return waited_; }
    const std::vector<uint64_t>& late() const { return late_; }

  private:
    uint64_t calls_ = 0, bytes_ = 0, timed_ = 0;
    double seconds_ = 0, since_ = 0, allreduces_ = 0;
    int in_flight_ = 0;
    std::vector<double> waited_, from_, until_;  // from_ and until_: the last wait for the rank
    std::vector<uint64_t> late_;
};

}  // namespace ddl
