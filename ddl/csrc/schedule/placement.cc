#include "schedule/placement.h"

#include <algorithm>
#include <map>
#include <numeric>

#include "base/status.h"

namespace ddl {

int Placement::local_rank(int rank) const {
    const auto end = host_of.begin() + rank;
    return static_cast<int>(std::count(host_of.begin(), end, host_of[static_cast<size_t>(rank)]));
}

int Placement::local_size(int rank) const {
    return static_cast<int>(std::count(host_of.begin(), host_of.end(), host_of[static_cast<size_t>(rank)]));
}

std::vector<int> Placement::host_order() const {
    std::vector<int> ranks(host_of.size());
    std::iota(ranks.begin(), ranks.end(), 0);
    std::stable_sort(ranks.begin(), ranks.end(),
                     [&](int a, int b) { return host_of[static_cast<size_t>(a)] < host_of[static_cast<size_t>(b)]; });
    return ranks;
}

Placement place(const std::vector<std::string>& hosts) {
    Placement placement;
    std::map<std::string, int> numbers;
    for (const std::string& host : hosts) {
        placement.host_of.push_back(numbers.emplace(host, static_cast<int>(numbers.size())).first->second);
    }
    placement.num_hosts = static_cast<int>(numbers.size());
    return placement;
}

Plan plan_of(const Options& options, const Placement& placement) {
    Options asked = options;
    for (char& mode : asked.modes) {
        if (mode == 'p') mode = 'r';  // the only mode that p chooses
    }
    if (asked.dimensions.empty() && options.modes == "p") return plan_of_groups({placement.host_of});
    Plan plan = plan_of_options(asked, static_cast<int>(placement.host_of.size()), placement.host_order());
    plan.reason = "as DDL_OPTIONS asks: " + format_options(options);
    return plan;
}

}  // namespace ddl
