#include "forecast/simulate.h"

#include <algorithm>
#include <deque>
#include <limits>
#include <queue>
#include <unordered_map>

#include "base/status.h"

namespace ddl {
namespace {

// A way through the network, and what is on it: one message at a time, in order, as on a connection.
struct Path {
    struct Use {
        int link = 0;
        int copies = 1;  // how many messages like this one pass the link, of the ranks that are not simulated
    };
    std::vector<Use> uses;
    double latency = 0;
    std::vector<double> shares;  // of the messages on it, that meet at each tier; one entry a tier
    double rate = 0;             // bytes per second
    bool fixed = false;
    std::deque<std::pair<double, int>> queue;  // (bytes that are left, message)
};

struct End {  // of a message
    int rank = 0;
    uint32_t chunk = 0;
};

struct Message {
    End sender, receiver;
    double latency = 0;  // seconds from the last byte sent to the last received
    double reduce = 0;   // seconds that the receiver then reduces for
};

struct Actor {
    struct Run {
        uint32_t chunk, round;
        uint32_t open;
    };
    Schedule schedule;
    uint32_t next_chunk = 0;
    std::deque<Run> runs;
    double reduced = 0;  // when it has reduced what it got so far: one thread does so for all chunks
};

// The tiers that a dimension of a plan spans, [first, last]; neither has size 1.
struct Reach {
    size_t first = 0, last = 0;
};

class Simulation {
  public:
    // `reaches`, of each dimension, where one rank is to stand for all; else empty.
    Simulation(const Network& network, const Plan& plan, const Task& task, const Tuning& tuning, int window,
               std::vector<Reach> reaches)
        : network_(network),
          window_(static_cast<size_t>(std::clamp(window, 1, kChunkSlots))),
          reaches_(std::move(reaches)),
          one_(!reaches_.empty()) {
        const int actors = one_ ? 1 : plan.size();
        for (int rank = 0; rank < actors; ++rank)
            actors_.push_back({make_schedule(plan, rank, task, tuning), 0, {}, 0});
        first_link_.push_back(0);
        for (size_t t = 0; t < network.tiers.size(); ++t) {
            first_link_.push_back(first_link_.back() + 2 * network.size() / network.stride(t));
        }
        capacity_.resize(static_cast<size_t>(first_link_.back()));
        for (size_t t = 0; t < network.tiers.size(); ++t) {
            std::fill(capacity_.begin() + first_link_[t], capacity_.begin() + first_link_[t + 1],
                      network.tiers[t].bandwidth);
        }
    }

    Forecast run() {
        forecast_.tier_bytes.resize(network_.tiers.size());
        forecast_.tier_messages.resize(network_.tiers.size());
        forecast_.symmetric = one_;
        const Schedule& first = actors_[0].schedule;
        forecast_.algorithm = first.algorithm;
        forecast_.reason = first.reason;
        forecast_.chunks = static_cast<uint32_t>(first.chunks.size());
        for (const Span& chunk : first.chunks) forecast_.rounds = std::max(forecast_.rounds, chunk.size());
        for (size_t rank = 0; rank < actors_.size(); ++rank) start_chunks(static_cast<int>(rank));
        while (!active_.empty() || !arrivals_.empty()) step();
        for (const Actor& actor : actors_) {
            if (!actor.runs.empty()) throw Error(DDL_ERROR_INTERNAL, "the simulated schedule does not come to an end");
        }
        for (size_t t = 0; t < network_.tiers.size(); ++t) {
            forecast_.tier_bytes[t] /= static_cast<double>(actors_.size());
            forecast_.tier_messages[t] /= static_cast<double>(actors_.size());
        }
        forecast_.seconds = now_;
        return forecast_;
    }

  private:
    // Posted ends that wait for their other end.
    struct Posted {
        std::deque<End> sends;
        std::deque<std::pair<End, bool>> receives;  // and whether it reduces
    };

    int link(size_t tier, int rank, bool up) const {
        return first_link_[tier] + 2 * (rank / network_.stride(tier)) + (up ? 0 : 1);
    }

    Path& path(int from, int to, size_t dimension) {
        const uint64_t key = one_ ? dimension : static_cast<uint64_t>(from) << 32 | static_cast<uint32_t>(to);
        const auto [found, added] = path_of_.emplace(key, paths_.size());
        if (!added) return paths_[found->second];
        Path& path = paths_.emplace_back();
        path.shares.resize(network_.tiers.size());
        if (one_) {
            lead(path, reaches_[dimension]);
            return path;
        }
        const size_t tier = network_.meet(from, to);
        path.latency = network_.tiers[tier].latency;
        path.shares[tier] = 1;
        for (size_t t = std::min<size_t>(tier, 1); t <= tier; ++t) {
            path.uses.push_back({link(t, from, true), 1});
            path.uses.push_back({link(t, to, false), 1});
        }
        return path;
    }

    // The way of the rank that stands for all, in a ring over the tiers of `reach`.
    void lead(Path& path, Reach reach) const {
        const int rings = network_.stride(reach.first);  // that pass below one child of the ring's first tier
        const int members = network_.stride(reach.last + 1) / rings;
        for (size_t t = reach.first == 0 ? 0 : 1; t <= reach.last; ++t) {
            // Below its first tier every rank sends out of each group; above, the last member of each ring does.
            path.uses.push_back({link(t, 0, true), t <= reach.first ? network_.stride(t) : rings});
        }
        for (size_t t = reach.first; t <= reach.last; ++t) {
            if (network_.tiers[t].size < 2) continue;
            path.latency = std::max(path.latency, network_.tiers[t].latency);
            const int leaving = members * rings / network_.stride(t);  // members that leave their group of this tier
            const int farther = t == reach.last ? 0 : members * rings / network_.stride(t + 1);
            path.shares[t] = static_cast<double>(leaving - farther) / members;
        }
    }

    void start_chunks(int rank) {
        Actor& actor = actors_[static_cast<size_t>(rank)];
        while (actor.next_chunk < actor.schedule.chunks.size() && actor.runs.size() < window_ &&
               (actor.runs.empty() || actor.next_chunk - actor.runs.front().chunk < kChunkSlots)) {
            const uint32_t chunk = actor.next_chunk++;
            actor.runs.push_back({chunk, actor.schedule.chunks[chunk].begin, 0});
            post_round(rank, actor.runs.back());
            if (actor.runs.back().open == 0) actor.runs.pop_back();  // it has no messages
        }
    }

    // Posts the round of a run; rounds of local steps only are passed at once.
    void post_round(int rank, Actor::Run& run) {
        const Schedule& schedule = actors_[static_cast<size_t>(rank)].schedule;
        for (; run.round < schedule.chunks[run.chunk].end; ++run.round) {
            const Span round = schedule.rounds[run.round];
            for (uint32_t i = round.begin; i < round.end; ++i) run.open += schedule.steps[i].is_message();
            if (run.open == 0) continue;
            for (uint32_t i = round.begin; i < round.end; ++i) {
                if (schedule.steps[i].is_message()) post(rank, run.chunk, schedule.steps[i]);
            }
            return;
        }
    }

    void post(int rank, uint32_t chunk, const Step& step) {
        const bool incoming = step.is_incoming();
        const auto from = static_cast<uint64_t>(one_ ? 0 : incoming ? step.peer : rank);
        const auto to = static_cast<uint64_t>(one_ ? 0 : incoming ? rank : step.peer);
        const uint64_t key = (from * static_cast<uint64_t>(network_.size()) + to) << 24 | chunk;
        Posted& posted = posted_[key];
        if (incoming) {
            posted.receives.push_back({{rank, chunk}, step.kind == StepKind::reduce});
        } else {
            posted.sends.push_back({rank, chunk});
            const Path& way = path(rank, step.peer, step.dimension);
            for (size_t t = 0; t < way.shares.size(); ++t) {
                forecast_.tier_bytes[t] += way.shares[t] * static_cast<double>(step.bytes);
                forecast_.tier_messages[t] += way.shares[t];
            }
        }
        // The first send is for the first receive; at most one pair is complete now, and this step is part of it. Its
        // peer tells the way, its bytes the length, whichever end it is.
        if (posted.sends.empty() || posted.receives.empty()) return;
        const int other = step.peer;
        Path& way = incoming ? path(other, rank, step.dimension) : path(rank, other, step.dimension);
        const auto bytes = static_cast<double>(step.bytes);
        Message message{posted.sends.front(), posted.receives.front().first, way.latency, 0};
        if (posted.receives.front().second && network_.reduce_bandwidth > 0) {
            message.reduce = bytes / network_.reduce_bandwidth;
        }
        posted.sends.pop_front();
        posted.receives.pop_front();
        if (posted.sends.empty() && posted.receives.empty()) posted_.erase(key);
        messages_.push_back(message);
        if (way.queue.empty()) {
            active_.push_back(&way);
            stale_ = true;
        }
        way.queue.emplace_back(bytes, static_cast<int>(messages_.size()) - 1);
    }

    // Max-min fairness by progressive filling: the link that gives the least to each way over it fixes their rate.
    void fill() {
        stale_ = false;
        constexpr double kSame = 1 + 1e-9;
        load_.assign(capacity_.size(), 0);
        left_ = capacity_;
        for (Path* path : active_) path->fixed = false;
        for (size_t open = active_.size(); open > 0;) {
            std::fill(load_.begin(), load_.end(), 0);
            double least = std::numeric_limits<double>::infinity();
            for (const Path* path : active_) {
                if (path->fixed) continue;
                for (const auto& use : path->uses) {
                    load_[static_cast<size_t>(use.link)] += use.copies;
                }
            }
            for (size_t i = 0; i < load_.size(); ++i) {
                if (load_[i] > 0) least = std::min(least, left_[i] / load_[i]);
            }
            const size_t before = open;
            std::vector<Path*> fixed;
            for (Path* path : active_) {
                if (path->fixed) continue;
                const bool bound = std::any_of(path->uses.begin(), path->uses.end(), [&](const Path::Use& use) {
                    const auto i = static_cast<size_t>(use.link);
                    return left_[i] / load_[i] <= least * kSame;
                });
                if (bound) fixed.push_back(path);
            }
            for (Path* path : fixed) {
                path->fixed = true;
                path->rate = least;
                --open;
                for (const auto& use : path->uses) {
                    double& left = left_[static_cast<size_t>(use.link)];
                    left = std::max(0.0, left - least * use.copies);
                }
            }
            if (open == before) throw Error(DDL_ERROR_INTERNAL, "no link bounds the simulated messages");
        }
    }

    // From one event to the next; what ends at the same moment ends together.
    void step() {
        if (stale_) fill();
        double dt = std::numeric_limits<double>::infinity();
        for (const Path* path : active_) dt = std::min(dt, path->queue.front().first / path->rate);
        if (!arrivals_.empty()) dt = std::min(dt, arrivals_.top().first - now_);
        dt = std::max(dt, 0.0);
        now_ += dt;
        std::vector<int> sent, arrived;
        for (Path* path : active_) {
            constexpr double kByte = 1e-3;  // what is left by rounding
            path->queue.front().first -= path->rate * dt;
            while (!path->queue.empty() && path->queue.front().first <= kByte) {
                sent.push_back(path->queue.front().second);
                path->queue.pop_front();
            }
            stale_ |= path->queue.empty();
        }
        active_.erase(std::remove_if(active_.begin(), active_.end(), [](const Path* p) { return p->queue.empty(); }),
                      active_.end());
        const double moment = now_ + 1e-12;
        while (!arrivals_.empty() && arrivals_.top().first <= moment) {
            arrived.push_back(arrivals_.top().second);
            arrivals_.pop();
        }
        for (const int index : sent) {
            const Message message = messages_[static_cast<size_t>(index)];
            double& reduced = actors_[static_cast<size_t>(message.receiver.rank)].reduced;
            if (message.reduce > 0) {
                reduced = std::max(reduced, now_ + message.latency) + message.reduce;
                arrivals_.emplace(reduced, index);
            } else if (message.latency > 0) {
                arrivals_.emplace(now_ + message.latency, index);
            } else {
                complete(message.receiver);
            }
            complete(message.sender);
        }
        for (const int index : arrived) {
            const Message message = messages_[static_cast<size_t>(index)];
            complete(message.receiver);
        }
    }

    void complete(End end) {
        Actor& actor = actors_[static_cast<size_t>(end.rank)];
        const auto run = std::find_if(actor.runs.begin(), actor.runs.end(),
                                      [&](const Actor::Run& r) { return r.chunk == end.chunk; });
        if (--run->open > 0) return;
        ++run->round;
        post_round(end.rank, *run);
        if (run->open > 0) return;
        actor.runs.erase(run);
        start_chunks(end.rank);
    }

    const Network& network_;
    const size_t window_;
    const std::vector<Reach> reaches_;
    const bool one_;
    std::vector<Actor> actors_;
    std::vector<int> first_link_;  // of each tier
    std::vector<double> capacity_, left_, load_;
    std::deque<Path> paths_;
    std::unordered_map<uint64_t, size_t> path_of_;
    std::vector<Path*> active_;  // those with messages on them
    std::vector<Message> messages_;
    std::priority_queue<std::pair<double, int>, std::vector<std::pair<double, int>>, std::greater<>> arrivals_;
    std::unordered_map<uint64_t, Posted> posted_;
    double now_ = 0;
    bool stale_ = false;
    Forecast forecast_;
};

// What MPI and NCCL do in a dimension is theirs to know: it is timed as the ring that it replaces.
struct Rings {
    Plan plan;
    Tuning tuning;
};

Rings rings_of(const Network& network, const Plan& plan, const Task& task, const Tuning& tuning) {
    check(network);
    if (network.size() != plan.size()) {
        throw Error(DDL_ERROR_ARGUMENT, "the network has " + std::to_string(network.size()) + " ranks, the plan " +
                                            std::to_string(plan.size()));
    }
    Rings rings{plan, tuning};
    std::fill(rings.plan.modes.begin(), rings.plan.modes.end(), 'r');
    if (const Schedule asked = make_schedule(plan, 0, task, tuning); asked.stages > 0) {
        rings.tuning.algorithm = Algorithm::bandwidth;
        rings.plan.chunks = static_cast<int>(asked.chunks.size()) - 1;  // less the roll
    }
    return rings;
}

// The tiers of each dimension where one rank can stand for all; else empty.
std::vector<Reach> reaches_of(const Network& network, const Rings& rings, const Task& task) {
    const Plan& plan = rings.plan;
    if (plan.size() == 1) return {};
    const Schedule schedule = make_schedule(plan, 0, task, rings.tuning);
    // Recursive doubling has no rings; and where parts are empty, ranks differ.
    if (task.collective != Collective::allreduce || schedule.algorithm.rfind("recursive", 0) == 0 ||
        !std::is_sorted(plan.ranks.begin(), plan.ranks.end()) ||
        task.count < schedule.chunks.size() * static_cast<uint64_t>(plan.size())) {
        return {};
    }
    std::vector<Reach> reaches;
    size_t tier = 0;
    for (const int dimension : plan.dimensions) {
        while (tier < network.tiers.size() && network.tiers[tier].size == 1) ++tier;
        Reach reach{tier, tier};
        int size = 1;
        for (; tier < network.tiers.size() && size < dimension; ++tier) {
            size *= network.tiers[tier].size;
            if (network.tiers[tier].size > 1) reach.last = tier;
        }
        if (size != dimension) return {};
        reaches.push_back(reach);
    }
    return reaches;
}

}  // namespace

bool is_quick(const Network& network, const Plan& plan, const Task& task, const Tuning& tuning) {
    constexpr int kFew = 64;
    const Rings rings = rings_of(network, plan, task, tuning);
    return plan.size() <= kFew || !reaches_of(network, rings, task).empty();
}

Forecast simulate(const Network& network, const Plan& plan, const Task& task, const Tuning& tuning, int window,
                  bool use_symmetry) {
    const Rings rings = rings_of(network, plan, task, tuning);
    std::vector<Reach> reaches;
    if (use_symmetry) reaches = reaches_of(network, rings, task);
    return Simulation(network, rings.plan, task, rings.tuning, window, std::move(reaches)).run();
}

}  // namespace ddl
