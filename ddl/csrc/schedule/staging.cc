#include "schedule/staging.h"

#include <algorithm>
#include <array>
#include <map>

#include "base/range.h"

namespace ddl {
namespace {

constexpr uint64_t kAlignment = 64;  // of ranges in staging memory

// Disjoint ranges of bytes that do not touch.
class Ranges {
  public:
    void add(Range range) {
        if (range.size() == 0) return;
        auto next = ends_.upper_bound(range.begin);
        if (next != ends_.begin() && std::prev(next)->second >= range.begin) --next;
        while (next != ends_.end() && next->first <= range.end) {
            range = {std::min(range.begin, next->first), std::max(range.end, next->second)};
            next = ends_.erase(next);
        }
        ends_[range.begin] = range.end;
    }
    // The parts of `range` that are not in here.
    std::vector<Range> missing(Range range) const {
        std::vector<Range> found;
        auto next = ends_.upper_bound(range.begin);
        if (next != ends_.begin()) --next;
        for (; next != ends_.end() && next->first < range.end; ++next) {
            if (next->second <= range.begin) continue;
            if (next->first > range.begin) found.push_back({range.begin, next->first});
            range.begin = std::min(range.end, next->second);
        }
        if (range.size() > 0) found.push_back(range);
        return found;
    }
    std::vector<Range> all() const {
        std::vector<Range> found;
        for (const auto& [begin, end] : ends_) found.push_back({begin, end});
        return found;
    }

  private:
    std::map<uint64_t, uint64_t> ends_;  // by begin
};

constexpr size_t kBuffers = 2;  // the caller's input and output
using Touched = std::array<Ranges, kBuffers>;

bool is_callers(const Place& place) { return place.buffer == Buffer::input || place.buffer == Buffer::output; }
size_t index_of(const Place& place) { return place.buffer == Buffer::input ? 0 : 1; }

// The places that a step reads and writes.
struct Access {
    std::vector<std::pair<Place, uint64_t>> reads, writes;
};

Access access_of(const Step& step, const Schedule& schedule) {
    switch (step.kind) {
        case StepKind::send: return {{{step.from, step.bytes}}, {}};
        case StepKind::receive: return {{}, {{step.to, step.bytes}}};
        case StepKind::reduce:
        case StepKind::copy: return {{{step.from, step.bytes}}, {{step.to, step.bytes}}};
        case StepKind::divide: return {{{step.to, step.bytes}}, {{step.to, step.bytes}}};
        case StepKind::reduce_scatter:
        case StepKind::allgather: break;
        case StepKind::to_host:
        case StepKind::to_device: return {};
    }
    // In a group step, this rank's part is one range of bytes; parts are cut at elements.
    const auto& members = schedule.groups[step.dimension];
    const auto size = static_cast<int>(members.size());
    const auto at = static_cast<int>(std::find(members.begin(), members.end(), schedule.rank) - members.begin());
    const uint64_t element = size_of(schedule.task.type);
    const Range part = Range{0, step.bytes / element}.part(at, size);
    if (step.kind == StepKind::reduce_scatter) {
        return {{{step.from, step.bytes}}, {{step.to, part.size() * element}}};
    }
    Place own = step.to;
    own.offset += part.begin * element;
    return {{{own, part.size() * element}}, {{step.to, step.bytes}}};
}

// Rewrites one chunk after the other.
class Stager {
  public:
    explicit Stager(Schedule schedule)
        : old_(std::move(schedule)), made_(old_), shares_(old_.task.collective == Collective::allreduce) {
        made_.steps.clear();
        made_.rounds.clear();
        made_.chunks.clear();
    }

    Schedule run() {
        for (const Span& chunk : old_.chunks) {
            const auto first = static_cast<uint32_t>(made_.rounds.size());
            for (uint32_t round = chunk.begin; round < chunk.end;) {
                uint32_t end = round;
                while (end < chunk.end && !is_on_device(end)) ++end;
                if (end > round) stage({round, end});
                if (end < chunk.end) take(end++);
                round = end;
            }
            made_.chunks.push_back({first, static_cast<uint32_t>(made_.rounds.size())});
        }
        return std::move(made_);
    }

  private:
    // The region of staging memory for a place of the caller: the output's or the input's.
    size_t region_of(const Place& place) const { return shares_ ? 1 : index_of(place); }

    bool is_on_device(uint32_t round) const { return old_.steps[old_.rounds[round].begin].on_device; }

    void close_round(uint32_t begin) {
        const auto end = static_cast<uint32_t>(made_.steps.size());
        if (end > begin) made_.rounds.push_back({begin, end});
    }

    void take(uint32_t round) {
        const auto begin = static_cast<uint32_t>(made_.steps.size());
        for (uint32_t i = old_.rounds[round].begin; i < old_.rounds[round].end; ++i) {
            made_.steps.push_back(old_.steps[i]);
        }
        close_round(begin);
    }

    struct Touches {
        Touched needed, written, all;  // needed: read before it is written
    };

    // A round's messages are sent before anything in it changes, so they are noted first.
    void note(const Step& step, Touches& touches) const {
        const Access access = access_of(step, old_);
        for (const auto& [place, bytes] : access.reads) {
            if (!is_callers(place)) continue;
            const size_t b = index_of(place);
            const Range range{place.offset, place.offset + bytes};
            for (const Range& part : touches.written[b].missing(range)) touches.needed[b].add(part);
            touches.all[region_of(place)].add(range);
        }
        for (const auto& [place, bytes] : access.writes) {
            if (!is_callers(place)) continue;
            const Range range{place.offset, place.offset + bytes};
            touches.written[index_of(place)].add(range);
            touches.all[region_of(place)].add(range);
        }
    }

    // A stretch of rounds that work on the host.
    void stage(Span rounds) {
        Touches touches;
        for (uint32_t round = rounds.begin; round < rounds.end; ++round) {
            for (uint32_t i = old_.rounds[round].begin; i < old_.rounds[round].end; ++i) {
                if (old_.steps[i].kind == StepKind::send) note(old_.steps[i], touches);
            }
            for (uint32_t i = old_.rounds[round].begin; i < old_.rounds[round].end; ++i) {
                if (old_.steps[i].kind != StepKind::send) note(old_.steps[i], touches);
            }
        }
        const auto& [needed, written, touched] = touches;
        uint64_t bytes = 0;
        for (size_t b = 0; b < kBuffers; ++b) {
            staged_[b].clear();
            for (const Range& range : touched[b].all()) {
                staged_[b].push_back({range, bytes});
                bytes += (range.size() + kAlignment - 1) / kAlignment * kAlignment;
            }
        }
        made_.staging_bytes = std::max(made_.staging_bytes, bytes);
        transfer(StepKind::to_host, needed);
        for (uint32_t round = rounds.begin; round < rounds.end; ++round) {
            const auto begin = static_cast<uint32_t>(made_.steps.size());
            for (uint32_t i = old_.rounds[round].begin; i < old_.rounds[round].end; ++i) {
                Step step = old_.steps[i];
                if (step.bytes > 0) {
                    step.from = mirror(step.from);
                    step.to = mirror(step.to);
                }
                made_.steps.push_back(step);
            }
            close_round(begin);
        }
        transfer(StepKind::to_device, written);
    }

    void transfer(StepKind kind, const Touched& what) {
        const auto begin = static_cast<uint32_t>(made_.steps.size());
        for (size_t b = 0; b < kBuffers; ++b) {
            for (const Range& range : what[b].all()) {
                Step step;
                step.kind = kind;
                step.bytes = range.size();
                const Place callers{b == 0 ? Buffer::input : Buffer::output, range.begin};
                step.from = kind == StepKind::to_host ? callers : mirror(callers);
                step.to = kind == StepKind::to_host ? mirror(callers) : callers;
                made_.steps.push_back(step);
            }
        }
        close_round(begin);
    }

    Place mirror(const Place& place) const {
        if (!is_callers(place)) return place;
        for (const auto& [range, at] : staged_[region_of(place)]) {
            if (place.offset >= range.begin && place.offset < range.end) {
                return {Buffer::staging, at + place.offset - range.begin};
            }
        }
        return {Buffer::staging, 0};  // no bytes: an empty part, or a place that the step does not use
    }

    Schedule old_, made_;
    const bool shares_;                                                     // the input and the output share one region
    std::array<std::vector<std::pair<Range, uint64_t>>, kBuffers> staged_;  // by region: where ranges lie
};

}  // namespace

Schedule staged(Schedule schedule) { return Stager(std::move(schedule)).run(); }

}  // namespace ddl
