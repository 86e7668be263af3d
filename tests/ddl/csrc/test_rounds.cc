#include <set>

#include "check.h"
#include "measure/rounds.h"

using namespace ddl;

TEST("every pair talks and nobody talks to two at once") {
    for (int hosts = 2; hosts <= 10; ++hosts) {
        const auto rounds = probe_rounds(hosts);
        std::set<std::pair<int, int>> met;
        for (const Pairs& pairs : rounds) {
            std::set<int> busy;
            for (const auto& [one, other] : pairs) {
                CHECK(one < other);
                CHECK(busy.insert(one).second);
                CHECK(busy.insert(other).second);
                met.emplace(one, other);
            }
        }
        CHECK_EQ(met.size(), static_cast<size_t>(hosts * (hosts - 1) / 2));
        CHECK(rounds.size() <= static_cast<size_t>(kMostRounds));
    }
}

TEST("the plan of many hosts stays short and is the same everywhere") {
    CHECK_EQ(probe_rounds(200).size(), static_cast<size_t>(kMostRounds));
    CHECK(probe_rounds(200) == probe_rounds(200));
    for (const Pairs& pairs : probe_rounds(200)) CHECK_EQ(pairs.size(), size_t{100});
    CHECK(probe_rounds(1).empty());
    // Fixed by the standard's generator: another library must deal the same pairs, or ranks would wait for each other.
    CHECK(probe_rounds(4).back() == Pairs({{0, 1}, {2, 3}}));
}
