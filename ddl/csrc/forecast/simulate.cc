#include "forecast/simulate.h"

#include <algorithm>
#include <deque>
#include <map>
#include <queue>
#include <unordered_map>

#include "base/status.h"
#include "forecast/chunks.h"
#include "forecast/classes.h"
#include "forecast/ring_time.h"
#include "forecast/traffic.h"

namespace ddl {
namespace {

struct End {  // of a message
    int actor = 0;
    uint32_t chunk = 0;
};

struct Message {
    End sender, receiver;
    double latency = 0;   // seconds from the last byte sent to the last received
    double reduce = 0;    // seconds that the receiver then reduces for
    uint64_t number = 0;  // messages are numbered in the order in which they were complete
};

// The messages of one actor in a chunk, as far as they take time.
struct Part {
    struct Message {
        double bytes = 0, mean = 0;  // mean: over all ranks
        int channel = 0;
        bool incoming = false, reduces = false;
    };
    std::vector<Message> messages;
    std::vector<uint32_t> rounds;  // the end of each round; rounds without messages are left out
};

// From one rank to another: a path, and the message ends that wait for their other end, in order for each chunk.
struct Channel {
    struct Waiting {
        End end;
        bool incoming, reduces;
    };
    int path = -1;
    double latency = 0;
    std::vector<Waiting> waiting;
};

struct Actor {
    struct Run {
        uint32_t chunk, round;
        uint32_t open;
        const Part* part;
    };
    int rank = 0;
    std::map<uint64_t, Part> parts;  // by Chunks::kind()
    uint32_t next_chunk = 0;
    std::deque<Run> runs;
    double reduced = 0;  // when it is done reducing its messages so far: one thread reduces for all chunks
};

// The tiers that a dimension of a plan spans, [first, last]; neither has size 1.
struct Reach {
    size_t first = 0, last = 0;
};

class Simulation {
  public:
    // If there are `reaches`, one for each dimension, one rank is simulated for all. Otherwise the first rank of each
    // class is simulated for its class.
    Simulation(const Network& network, const Plan& plan, const Chunks& chunks, int window, std::vector<Reach> reaches,
               Classes classes)
        : network_(network),
          layout_(network),
          plan_(plan),
          chunks_(chunks),
          window_(static_cast<size_t>(std::clamp(window, 1, kChunkSlots))),
          reaches_(std::move(reaches)),
          classes_(std::move(classes)),
          one_(!reaches_.empty()),
          traffic_(link_capacities(layout_)) {
        if (one_) classes_ = {std::vector<int>(static_cast<size_t>(network.size()), 0), {0}, {network.size()}, {}};
        for (const int rank : classes_.first) actors_.emplace_back().rank = rank;
    }

    Forecast run() {
        forecast_.tier_bytes.resize(network_.tiers.size());
        forecast_.tier_messages.resize(network_.tiers.size());
        forecast_.symmetric = one_;
        forecast_.algorithm = chunks_.algorithm();
        forecast_.reason = chunks_.reason();
        forecast_.chunks = chunks_.count();
        for (size_t actor = 0; actor < actors_.size(); ++actor) start_chunks(static_cast<int>(actor));
        std::vector<int> ended, arrived;
        while (!traffic_.is_idle() || !arrivals_.empty()) step(ended, arrived);
        for (const Actor& actor : actors_) {
            if (!actor.runs.empty()) throw Error(DDL_ERROR_INTERNAL, "the simulated schedule does not come to an end");
        }
        for (size_t t = 0; t < network_.tiers.size(); ++t) {
            forecast_.tier_bytes[t] /= static_cast<double>(network_.size());
            forecast_.tier_messages[t] /= static_cast<double>(network_.size());
        }
        forecast_.seconds = now_;
        return forecast_;
    }

  private:
    // No rank is simulated for others.
    bool is_each_alone() const { return classes_.first.size() == static_cast<size_t>(network_.size()); }

    // A message's channel, by its sender's class and its dimension; if no rank is simulated for others, by its ends.
    int channel(int rank, const Step& step) {
        const int from = step.is_incoming() ? step.peer : rank, to = step.is_incoming() ? rank : step.peer;
        const bool own = is_each_alone();
        const auto size = static_cast<uint64_t>(network_.size());
        const int of = classes_.of[static_cast<size_t>(from)];
        const uint64_t key = own ? static_cast<uint64_t>(from) * size + static_cast<uint64_t>(to)
                                 : static_cast<uint64_t>(of) << 8 | step.dimension;
        const auto [found, added] = channel_of_.emplace(key, static_cast<int>(channels_.size()));
        if (!added) return found->second;
        Channel& made = channels_.emplace_back();
        shares_.emplace_back(network_.tiers.size());
        if (one_) {
            lead(made, shares_.back(), reaches_[step.dimension]);
        } else {
            int sender = from, receiver = to;
            if (!own) {
                sender = classes_.first[static_cast<size_t>(of)];
                receiver = next_in_ring(plan_, sender, step.dimension);
            }
            const size_t tier = layout_.meet(sender, receiver);
            made.latency = network_.tiers[tier].latency;
            shares_.back()[tier] = 1;
            made.path = traffic_.add_path(
                own ? way(layout_, sender, receiver)
                    : classes_.uses[static_cast<size_t>(of) * plan_.dimensions.size() + step.dimension]);
        }
        return found->second;
    }

    // The path of the rank that stands for all, in a ring over the tiers of `reach`.
    void lead(Channel& made, std::vector<double>& shares, Reach reach) {
        const int rings = network_.stride(reach.first);  // that pass below one child of the ring's first tier
        const int members = network_.stride(reach.last + 1) / rings;
        std::vector<Use> uses;
        for (size_t t = reach.first == 0 ? 0 : 1; t <= reach.last; ++t) {
            // Below its first tier every rank sends out of each group; above, the last member of each ring does.
            uses.push_back({link_of(layout_, t, 0, true), t <= reach.first ? network_.stride(t) : rings});
        }
        made.path = traffic_.add_path(std::move(uses));
        for (size_t t = reach.first; t <= reach.last; ++t) {
            if (network_.tiers[t].size < 2) continue;
            made.latency = std::max(made.latency, network_.tiers[t].latency);
            const int leaving = members * rings / network_.stride(t);  // members that leave their group of this tier
            const int farther = t == reach.last ? 0 : members * rings / network_.stride(t + 1);
            shares[t] = static_cast<double>(leaving - farther) / members;
        }
    }

    // The part of an actor in a chunk. Its messages are counted for all ranks of its class.
    const Part& part(int index, uint32_t chunk) {
        Actor& actor = actors_[static_cast<size_t>(index)];
        const auto [found, added] = actor.parts.try_emplace(chunks_.kind(chunk));
        Part& part = found->second;
        if (added) {
            const auto [schedule, rounds] = chunks_.schedule(actor.rank, chunk);
            for (uint32_t round = rounds.begin; round < rounds.end; ++round) {
                const Span span = schedule.rounds[round];
                for (uint32_t i = span.begin; i < span.end; ++i) {
                    const Step& step = schedule.steps[i];
                    if (!step.is_message()) continue;
                    const auto own = static_cast<double>(step.bytes);
                    const auto [most, mean] =
                        is_each_alone() ? Chunks::Bytes{own, own} : chunks_.bytes(chunk, step.dimension);
                    part.messages.push_back(
                        {most, mean, channel(actor.rank, step), step.is_incoming(), step.kind == StepKind::reduce});
                }
                const auto end = static_cast<uint32_t>(part.messages.size());
                if (end > (part.rounds.empty() ? 0 : part.rounds.back())) part.rounds.push_back(end);
            }
            forecast_.rounds = std::max(forecast_.rounds, static_cast<uint32_t>(part.rounds.size()));
        }
        const int members = classes_.count[static_cast<size_t>(index)];
        for (const Part::Message& message : part.messages) {
            if (message.incoming) continue;
            const auto& shares = shares_[static_cast<size_t>(message.channel)];
            for (size_t t = 0; t < shares.size(); ++t) {
                forecast_.tier_bytes[t] += members * shares[t] * message.mean;
                forecast_.tier_messages[t] += members * shares[t];
            }
        }
        return part;
    }

    void start_chunks(int index) {
        Actor& actor = actors_[static_cast<size_t>(index)];
        while (actor.next_chunk < chunks_.count() && actor.runs.size() < window_ &&
               (actor.runs.empty() || actor.next_chunk - actor.runs.front().chunk < kChunkSlots)) {
            const uint32_t chunk = actor.next_chunk++;
            actor.runs.push_back({chunk, 0, 0, &part(index, chunk)});
            post_round(index, actor.runs.back());
            if (actor.runs.back().open == 0) actor.runs.pop_back();  // it has no messages
        }
    }

    void post_round(int index, Actor::Run& run) {
        const Part& part = *run.part;
        if (run.round == part.rounds.size()) return;
        const uint32_t begin = run.round == 0 ? 0 : part.rounds[run.round - 1], end = part.rounds[run.round];
        run.open = end - begin;
        for (uint32_t i = begin; i < end; ++i) post({index, run.chunk}, part.messages[i]);
    }

    void post(End end, const Part::Message& posted) {
        Channel& channel = channels_[static_cast<size_t>(posted.channel)];
        auto& waiting = channel.waiting;
        const auto other = std::find_if(waiting.begin(), waiting.end(), [&](const Channel::Waiting& one) {
            return one.end.chunk == end.chunk && one.incoming != posted.incoming;
        });
        if (other == waiting.end()) {
            waiting.push_back({end, posted.incoming, posted.reduces});
            return;
        }
        const bool reduces = posted.reduces || other->reduces;
        Message message{posted.incoming ? other->end : end, posted.incoming ? end : other->end, channel.latency, 0,
                        complete_++};
        waiting.erase(other);
        if (reduces && network_.reduce_bandwidth > 0) message.reduce = posted.bytes / network_.reduce_bandwidth;
        int number = static_cast<int>(messages_.size());
        if (free_.empty()) {
            messages_.push_back(message);
        } else {
            number = free_.back();
            free_.pop_back();
            messages_[static_cast<size_t>(number)] = message;
        }
        traffic_.send(channel.path, posted.bytes, number);
    }

    // Goes from one event to the next; messages that end at the same moment end together.
    void step(std::vector<int>& ended, std::vector<int>& arrived) {
        ended.clear();
        arrived.clear();
        double next = traffic_.next();
        if (!arrivals_.empty()) next = std::min(next, arrivals_.top().time);
        now_ = std::max(now_, next);
        traffic_.advance(now_, ended);
        const double moment = now_ + 1e-12;
        while (!arrivals_.empty() && arrivals_.top().time <= moment) {
            arrived.push_back(arrivals_.top().message);
            arrivals_.pop();
        }
        for (const int index : ended) {
            const Message message = messages_[static_cast<size_t>(index)];
            double& reduced = actors_[static_cast<size_t>(message.receiver.actor)].reduced;
            if (message.reduce > 0) {
                reduced = std::max(reduced, now_ + message.latency) + message.reduce;
                arrivals_.push({reduced, message.number, index});
            } else if (message.latency > 0) {
                arrivals_.push({now_ + message.latency, message.number, index});
            } else {
                free_.push_back(index);
                complete(message.receiver);
            }
            complete(message.sender);
        }
        for (const int index : arrived) {
            const Message message = messages_[static_cast<size_t>(index)];
            free_.push_back(index);
            complete(message.receiver);
        }
    }

    void complete(End end) {
        Actor& actor = actors_[static_cast<size_t>(end.actor)];
        const auto run = std::find_if(actor.runs.begin(), actor.runs.end(),
                                      [&](const Actor::Run& r) { return r.chunk == end.chunk; });
        if (--run->open > 0) return;
        ++run->round;
        post_round(end.actor, *run);
        if (run->open > 0) return;
        actor.runs.erase(run);
        start_chunks(end.actor);
    }

    struct Arrival {
        double time;
        uint64_t order;
        int message;
        bool operator>(const Arrival& other) const {
            return std::pair(time, order) > std::pair(other.time, other.order);
        }
    };

    const Network& network_;
    const Layout layout_;
    const Plan& plan_;
    const Chunks& chunks_;
    const size_t window_;
    const std::vector<Reach> reaches_;
    Classes classes_;
    const bool one_;
    Traffic traffic_;
    std::vector<Actor> actors_;
    std::vector<Channel> channels_;
    std::vector<std::vector<double>> shares_;  // of each channel's messages, that meet at each tier
    std::unordered_map<uint64_t, int> channel_of_;
    std::vector<Message> messages_;
    std::vector<int> free_;  // of messages_
    std::priority_queue<Arrival, std::vector<Arrival>, std::greater<>> arrivals_;
    uint64_t complete_ = 0;
    double now_ = 0;
    Forecast forecast_;
};

// The algorithms of MPI and NCCL are not known: their dimension is timed as the ring that it replaces.
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
    Plan whole = plan;
    whole.chunks = 1;
    if (make_schedule(whole, 0, task, tuning).stages > 0) {
        rings.tuning.algorithm = Algorithm::bandwidth;
        rings.plan.chunks = Builder(plan, 0, task, tuning).chunks(task.count);
    }
    return rings;
}

// The tiers of each dimension, if one rank can stand for all; else empty.
std::vector<Reach> reaches_of(const Network& network, const Plan& plan, const Chunks& chunks) {
    if (!network.odd.empty() || !chunks.is_uniform() || !std::is_sorted(plan.ranks.begin(), plan.ranks.end())) {
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

// Up to so many messages all ranks are simulated. It takes about a second.
constexpr double kFewMessages = 2e6;

}  // namespace

bool is_quick(const Network& network, const Plan& plan, const Task& task, const Tuning& tuning) {
    constexpr int kFew = 64;
    const Rings rings = rings_of(network, plan, task, tuning);
    if (plan.size() <= kFew) return true;
    const Chunks chunks(rings.plan, task, rings.tuning);
    if (network.odd.empty()) return !reaches_of(network, rings.plan, chunks).empty();
    const double messages = chunks.messages() / 2 * plan.size();
    if (messages <= kFewMessages) return true;
    if (!chunks.is_uniform()) return false;
    const Layout layout(network);
    constexpr double kMostInRing = 1e9;
    if (is_alone(network, layout, rings.plan)) return messages <= kMostInRing;
    const Classes classes = alike(network, layout, rings.plan);
    return messages * static_cast<double>(classes.first.size()) / plan.size() <= 2 * kFewMessages;
}

Forecast simulate(const Network& network, const Plan& plan, const Task& task, const Tuning& tuning, int window,
                  bool use_symmetry) {
    const Rings rings = rings_of(network, plan, task, tuning);
    const Chunks chunks(rings.plan, task, rings.tuning);
    std::vector<Reach> reaches;
    if (use_symmetry) reaches = reaches_of(network, rings.plan, chunks);
    Classes classes = each_alone(plan.size());
    const bool many = chunks.messages() / 2 * plan.size() > kFewMessages;
    if (use_symmetry && reaches.empty() && many && chunks.is_uniform()) {
        const Layout layout(network);
        if (const auto ring = ring_time(network, layout, rings.plan, task.count, size_of(task.type), chunks.count(),
                                        std::clamp(window, 1, kChunkSlots))) {
            return {ring->seconds,
                    ring->tier_bytes,
                    ring->tier_messages,
                    chunks.count(),
                    2 * static_cast<uint32_t>(plan.size() - 1),
                    false,
                    chunks.algorithm(),
                    chunks.reason()};
        }
        classes = alike(network, layout, rings.plan);
    }
    return Simulation(network, rings.plan, chunks, window, std::move(reaches), std::move(classes)).run();
}

}  // namespace ddl
