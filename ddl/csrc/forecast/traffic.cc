#include "forecast/traffic.h"

#include <algorithm>
#include <functional>
#include <limits>

#include "base/status.h"

namespace ddl {
namespace {

constexpr double kByte = 1e-3;  // the rest that rounding leaves

}  // namespace

Traffic::Traffic(std::vector<double> capacities) {
    for (const double capacity : capacities) {
        Link& link = links_.emplace_back();
        link.capacity = capacity;
    }
}

int Traffic::add_path(std::vector<Use> uses) {
    std::sort(uses.begin(), uses.end());
    const auto [found, added] = route_of_.emplace(std::move(uses), static_cast<int>(routes_.size()));
    if (added) {
        Route& route = routes_.emplace_back();
        route.uses = found->first;
        for (const Use& use : route.uses) links_[static_cast<size_t>(use.link)].routes.push_back(found->second);
    }
    paths_.emplace_back().route = found->second;
    return static_cast<int>(paths_.size()) - 1;
}

// Updates the bytes that the route has carried.
void Traffic::carry(Route& route) const {
    route.carried += route.rate * (now_ - route.at);
    route.at = now_;
}

// Adds the route's next end to the events.
void Traffic::expect(int index) {
    Route& route = routes_[static_cast<size_t>(index)];
    ++route.version;
    if (route.ends.empty()) return;
    const double left = route.ends.front().first - route.carried;
    events_.push_back({route.at + std::max(left, 0.0) / route.rate, index, route.version});
    std::push_heap(events_.begin(), events_.end(), std::greater<>());
}

void Traffic::change(int index) {
    Route& route = routes_[static_cast<size_t>(index)];
    if (!route.changed) changed_.push_back(index);
    route.changed = true;
}

void Traffic::send(int index, double bytes, int message) {
    Path& path = paths_[static_cast<size_t>(index)];
    path.queue.emplace_back(bytes, message);
    if (path.queue.size() > 1) return;
    path.since = busy_++;
    ++moving_;
    Route& route = routes_[static_cast<size_t>(path.route)];
    carry(route);
    if (route.ends.empty()) route.carried = 0;
    route.ends.emplace_back(route.carried + bytes, index);
    std::push_heap(route.ends.begin(), route.ends.end(), std::greater<>());
    change(path.route);
}

// Max-min fairness by progressive filling: the link that gives each of its paths the least fixes their rate. Only
// routes that share links, directly or through others, with a changed route are computed anew.
void Traffic::share() {
    if (changed_.empty()) return;
    constexpr double kSame = 1 + 1e-9;
    ++mark_;
    near_.clear();
    touched_.clear();
    for (const int index : changed_) {
        Route& route = routes_[static_cast<size_t>(index)];
        route.changed = false;
        route.mark = mark_;
        near_.push_back(index);
    }
    changed_.clear();
    for (size_t i = 0; i < near_.size(); ++i) {
        for (const Use& use : routes_[static_cast<size_t>(near_[i])].uses) {
            Link& link = links_[static_cast<size_t>(use.link)];
            if (link.mark == mark_) continue;
            link.mark = mark_;
            link.left = link.capacity;
            link.load = 0;
            touched_.push_back(use.link);
            for (const int other : link.routes) {
                Route& route = routes_[static_cast<size_t>(other)];
                if (route.mark == mark_ || route.ends.empty()) continue;
                route.mark = mark_;
                near_.push_back(other);
            }
        }
    }
    size_t open = 0;
    for (const int index : near_) {
        Route& route = routes_[static_cast<size_t>(index)];
        carry(route);
        route.fixed = route.ends.empty();
        if (route.fixed) continue;
        ++open;
        for (const Use& use : route.uses) {
            links_[static_cast<size_t>(use.link)].load += use.copies * static_cast<double>(route.ends.size());
        }
    }
    while (open > 0) {
        double least = std::numeric_limits<double>::infinity();
        for (const int index : touched_) {
            const Link& link = links_[static_cast<size_t>(index)];
            if (link.load > 0) least = std::min(least, link.left / link.load);
        }
        bound_.clear();
        for (const int index : near_) {
            const Route& route = routes_[static_cast<size_t>(index)];
            if (route.fixed) continue;
            const bool bound = std::any_of(route.uses.begin(), route.uses.end(), [&](const Use& use) {
                const Link& link = links_[static_cast<size_t>(use.link)];
                return link.left / link.load <= least * kSame;
            });
            if (bound) bound_.push_back(index);
        }
        if (bound_.empty()) throw Error(DDL_ERROR_INTERNAL, "no link bounds the simulated messages");
        for (const int index : bound_) {
            Route& route = routes_[static_cast<size_t>(index)];
            route.fixed = true;
            route.rate = least;
            --open;
            for (const Use& use : route.uses) {
                Link& link = links_[static_cast<size_t>(use.link)];
                const double copies = use.copies * static_cast<double>(route.ends.size());
                link.left = std::max(0.0, link.left - least * copies);
                link.load -= copies;
            }
        }
    }
    for (const int index : near_) expect(index);
}

// The next event that is still valid under the rates of the last share().
const Traffic::Event* Traffic::first() {
    while (!events_.empty()) {
        const Event& event = events_.front();
        if (event.version == routes_[static_cast<size_t>(event.route)].version) return &event;
        std::pop_heap(events_.begin(), events_.end(), std::greater<>());
        events_.pop_back();
    }
    return nullptr;
}

double Traffic::next() {
    share();
    const Event* event = first();
    return event ? event->time : std::numeric_limits<double>::infinity();
}

void Traffic::advance(double now, std::vector<int>& ended) {
    now_ = now;
    found_.clear();
    while (const Event* event = first()) {
        const int index = event->route;
        Route& route = routes_[static_cast<size_t>(index)];
        if (event->time > now + kByte / route.rate) break;
        carry(route);
        const double slack = std::max(kByte, 1e-12 * route.carried);
        // The event's own message ends, even if more than the slack seems left: after hours that is less than a step of
        // the clock, and waiting for it would never end.
        do {
            const int at = route.ends.front().second;
            std::pop_heap(route.ends.begin(), route.ends.end(), std::greater<>());
            route.ends.pop_back();
            Path& path = paths_[static_cast<size_t>(at)];
            found_.emplace_back(path.since, path.queue.front().second);
            path.queue.pop_front();
            if (path.queue.empty()) {
                --moving_;
                change(index);
            } else {
                route.ends.emplace_back(route.carried + path.queue.front().first, at);
                std::push_heap(route.ends.begin(), route.ends.end(), std::greater<>());
            }
        } while (!route.ends.empty() && route.ends.front().first <= route.carried + slack);
        expect(index);
    }
    std::stable_sort(found_.begin(), found_.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    for (const auto& [since, message] : found_) ended.push_back(message);
}

}  // namespace ddl
