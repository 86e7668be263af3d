#include "engine/watch.h"

#include <algorithm>
#include <utility>

namespace ddl {

void Watch::progress() {
    next_ask_ = patience_.ask_seconds;
    asked_ = warned_ = false;
    answers_.clear();  // old answers say nothing about a new stall
}

const char* describe(Leave leave) {
    switch (leave) {
        case Leave::no: break;
        case Leave::freed: return "has freed the communicator";
        case Leave::finalized: return "has finalized";
    }
    return "is there";
}

Watch::Verdict Watch::judge(double stalled) {
    if (stalled >= patience_.timeout_seconds) return Verdict::give_up;
    if (stalled >= next_ask_) {
        while (next_ask_ <= stalled) next_ask_ = std::max(next_ask_ * 2, 1e-3);
        next_ask_ = std::min(next_ask_, stalled + std::max(patience_.warn_seconds, 1e-3));
        // Not long before the warning or the end without asking once more: they should rest on fresh answers.
        for (const double moment : {patience_.warn_seconds * 0.9, patience_.timeout_seconds * 0.9}) {
            if (stalled < moment) next_ask_ = std::min(next_ask_, moment);
        }
        return Verdict::ask;
    }
    if (!warned_ && stalled >= patience_.warn_seconds) {
        warned_ = true;
        return Verdict::warn;
    }
    return Verdict::wait;
}

std::vector<int> Watch::to_ask(int size, int rank, double stalled, const std::vector<int>& awaited) {
    const bool soon = size > kFew && stalled < patience_.warn_seconds * 0.9;
    if (!std::exchange(asked_, true) || soon) return awaited;
    std::vector<int> ranks;
    for (int other = 0; other < size; ++other) {
        const auto known = answers_.find(other);
        const bool is_clear = known != answers_.end() && known->second.arrived && known->second.waits.empty();
        if (other != rank && !is_clear) ranks.push_back(other);
    }
    return ranks;
}

void Watch::answer(int rank, bool arrived, const Header& call, Leave left, const std::string& waits) {
    answers_[rank] = {arrived, left, call, waits};
}

bool Watch::hopeless() const {
    return std::any_of(answers_.begin(), answers_.end(),
                       [](const auto& entry) { return entry.second.left != Leave::no && !entry.second.arrived; });
}

std::string Watch::report(const Group& group, int rank, const std::vector<int>& awaited,
                          const std::string& own_wait) const {
    constexpr int kShown = 8;
    if (!own_wait.empty()) return "it waits for " + own_wait;
    std::string text;
    int missing = 0;
    const auto size = static_cast<int>(group.members.size());
    for (int other = 0; other < size; ++other) {
        if (other == rank) continue;
        const auto found = answers_.find(other);
        if (found != answers_.end() && found->second.arrived) continue;
        // Who has left is the cause; the others may not have had the time to answer.
        if (found == answers_.end() && hopeless()) continue;
        if (++missing > kShown) continue;
        text += (text.empty() ? "" : "; ") + group.names[static_cast<size_t>(other)];
        if (found == answers_.end()) {
            text += " does not answer (stopped, or its link is cut)";
            continue;
        }
        const Leave left = found->second.left;
        text +=
            left == Leave::no ? " has not called it; " : std::string(" ") + describe(left) + " without calling it; ";
        text += found->second.call.magic == 0 ? "it has made no call on this communicator"
                                              : "its last call was " + describe(found->second.call);
    }
    if (missing > kShown) text += "; and " + std::to_string(missing - kShown) + " more";
    if (missing > 0) return text;
    for (const auto& [other, answer] : answers_) {
        if (answer.waits.empty() || ++missing > kShown) continue;
        text += (text.empty() ? "" : "; ") + group.names[static_cast<size_t>(other)] +
                " has called it, and waits for " + answer.waits;
    }
    if (missing > 0) return text;
    text = "every rank has called it, but no data arrives";
    for (size_t i = 0; i < awaited.size() && i < kShown; ++i) {
        text += (i == 0 ? " from " : ", ") + group.names[static_cast<size_t>(awaited[i])];
    }
    return text + ": check the links between them";
}

}  // namespace ddl
