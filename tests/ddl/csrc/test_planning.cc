#include <cmath>
#include <cstdlib>
#include <ctime>
#include <vector>

#include "check.h"
#include "ddl_plan.h"
#include "forecast/alternatives.h"
#include "forecast/simulate.h"

namespace {

// 2 racks of 2 hosts of 2 ranks: links of 200 Mbit/s, uplinks of 100.
const ddl_tier kRacks[] = {{2, 5e-6, 2e9}, {2, 1e-4, 25e6}, {2, 1e-4, 12.5e6}};
const ddl_network kTwoRacks{kRacks, 3, 0, nullptr, 0};

std::vector<ddl_forecast> alternatives_of(const ddl_network& network, size_t count) {
    size_t found = 0;
    CHECK_EQ(ddl_plan_alternatives(&network, count, DDL_FLOAT32, nullptr, 0, &found), DDL_SUCCESS);
    std::vector<ddl_forecast> forecasts(found);
    CHECK_EQ(ddl_plan_alternatives(&network, count, DDL_FLOAT32, forecasts.data(), found, &found), DDL_SUCCESS);
    CHECK_EQ(found, forecasts.size());
    return forecasts;
}

}  // namespace

TEST("what the library does comes first, and is the fastest of the plans that it has for large buffers") {
    const auto forecasts = alternatives_of(kTwoRacks, 1 << 24);
    CHECK_EQ(std::string(forecasts[0].plan), std::string("r:2x2x2"));
    CHECK(forecasts.size() >= 5);  // the other three joinings, one chunk, recursive doubling
    for (size_t i = 1; i < forecasts.size(); ++i) CHECK(forecasts[i].seconds >= forecasts[0].seconds / 1.05);
    CHECK_CONTAINS(forecasts[0].reason, "the fastest of 4 plans");
    ddl_forecast chosen;
    CHECK_EQ(ddl_plan_forecast(&kTwoRacks, nullptr, 1 << 24, DDL_FLOAT32, &chosen), DDL_SUCCESS);
    CHECK_EQ(chosen.seconds, forecasts[0].seconds);
    CHECK_EQ(std::string(chosen.plan), std::string(forecasts[0].plan));
}

TEST("of every length, a plan that is not named is forecast as what the library does") {
    for (size_t bytes = 256; bytes <= 64 << 10; bytes *= 2) {
        const ddl_forecast first = alternatives_of(kTwoRacks, bytes / 4)[0];
        ddl_forecast chosen;
        CHECK_EQ(ddl_plan_forecast(&kTwoRacks, nullptr, bytes / 4, DDL_FLOAT32, &chosen), DDL_SUCCESS);
        CHECK_EQ(std::string(chosen.algorithm), std::string(first.algorithm));
        CHECK_EQ(chosen.seconds, first.seconds);
    }
}

TEST("no alternative is below the cut") {
    ddl_bounds bounds;
    CHECK_EQ(ddl_plan_bounds(&kTwoRacks, 1 << 26, &bounds), DDL_SUCCESS);
    for (const auto& forecast : alternatives_of(kTwoRacks, 1 << 24)) CHECK(forecast.seconds >= bounds.cut);
}

TEST("the bytes of each tier are those of the formula, and a schedule adds up to them") {
    const size_t count = 1 << 20;
    const double bytes = 4.0 * count;
    ddl_plan plan{"r:2x2x2", 3};
    ddl_forecast forecast;
    CHECK_EQ(ddl_plan_forecast(&kTwoRacks, &plan, count, DDL_FLOAT32, &forecast), DDL_SUCCESS);
    size_t found = 0;
    CHECK_EQ(ddl_plan_schedule(&kTwoRacks, &plan, count, DDL_FLOAT32, 5, nullptr, 0, &found), DDL_SUCCESS);
    std::vector<ddl_step> steps(found);
    CHECK_EQ(ddl_plan_schedule(&kTwoRacks, &plan, count, DDL_FLOAT32, 5, steps.data(), found, &found), DDL_SUCCESS);
    double sent[3] = {}, messages[3] = {};
    int chunks = 0, rounds = 0;
    for (const ddl_step& step : steps) {
        chunks = std::max(chunks, step.chunk + 1);
        rounds = std::max(rounds, step.round + 1);
        if (step.kind != DDL_STEP_SEND) continue;
        sent[step.tier] += static_cast<double>(step.bytes);
        ++messages[step.tier];
    }
    CHECK_EQ(chunks, 3);
    CHECK_EQ(forecast.chunks, 3);
    CHECK_EQ(rounds, forecast.rounds);
    CHECK_EQ(rounds, 6);
    for (int tier = 0; tier < 3; ++tier) {
        CHECK(std::fabs(sent[tier] - bytes / (1 << tier)) < 64);
        CHECK(std::fabs(forecast.tier_bytes[tier] - sent[tier]) < 64);
        CHECK_EQ(forecast.tier_messages[tier], messages[tier]);
    }
}

TEST("a small allreduce is recursive doubling, whatever the plan") {
    ddl_forecast forecast;
    CHECK_EQ(ddl_plan_forecast(&kTwoRacks, nullptr, 16, DDL_FLOAT32, &forecast), DDL_SUCCESS);
    CHECK_EQ(std::string(forecast.algorithm), std::string("recursive doubling"));
    CHECK_EQ(forecast.rounds, 3);
    const auto forecasts = alternatives_of(kTwoRacks, 16);
    CHECK_EQ(std::string(forecasts[0].algorithm), std::string("recursive doubling"));
    CHECK(forecasts[0].seconds <= forecasts[1].seconds);
}

TEST("1,728 ranks in 4 tiers are planned in seconds, at every size") {
    const int aisles = check::kSanitized ? 1 : 4;
    const ddl_tier tiers[] = {{6, 4e-6, 50e9}, {18, 5e-6, 12.5e9}, {4, 6e-6, 225e9}, {aisles, 8e-6, 450e9}};
    const ddl_network network{tiers, 4, 0, nullptr, 0};
    for (const size_t count : {1, 4096, 1 << 18, 1 << 26}) {
        const std::clock_t begin = std::clock();  // of this process: others may want the cores too
        const auto forecasts = alternatives_of(network, count);
        const double took = static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
        if (std::getenv("DDL_PRINT")) std::printf("%zu: %zu plans in %.2f s\n", count, forecasts.size(), took);
        CHECK(forecasts.size() > (count > 4096 ? 1 : 0));  // a ring needs an element for each rank
        CHECK(took < 10 || check::kSanitized);
    }
}

TEST("rings over more ranks than elements are not simulated, and recursive doubling that takes their place says so") {
    const ddl_tier few{100, 3e-5, 1.25e9}, many{8192, 0, 1.25e9};
    CHECK_CONTAINS(alternatives_of({&few, 1, 0, nullptr, 0}, 50)[0].reason, "few bytes");  // what the library does
    if (check::kSanitized) return;                                                         // it would take minutes
    const std::clock_t begin = std::clock();
    const auto forecasts =
        alternatives_of({&many, 1, 0, nullptr, 0}, 8000);  // 32,000 bytes: the library would run a ring
    CHECK_EQ(forecasts.size(), size_t{1});
    CHECK_EQ(std::string(forecasts[0].algorithm), std::string("recursive doubling"));
    CHECK_CONTAINS(forecasts[0].reason, "not what the library does");
    CHECK(static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC < 10);
}

TEST("one rank alone has a plan and takes no time on the network") {
    const ddl_tier tier{1, 0, 1e9};
    const ddl_network network{&tier, 1, 0, nullptr, 0};
    const auto forecasts = alternatives_of(network, 100);
    CHECK_EQ(forecasts.size(), size_t{1});
    CHECK_EQ(forecasts[0].seconds, 0.0);
}

TEST("what is wrong with a described network or plan is named") {
    ddl_forecast forecast;
    const auto refusal = [&](const ddl_network& network, const ddl_plan& plan) {
        CHECK_EQ(ddl_plan_forecast(&network, &plan, 1024, DDL_FLOAT32, &forecast), DDL_ERROR_ARGUMENT);
        return std::string(ddl_last_error());
    };
    const ddl_plan chosen{};
    const ddl_tier slow[] = {{2, 0, 1e9}, {2, 0, 0}}, none[] = {{0, 0, 1e9}}, back[] = {{2, -1, 1e9}};
    const ddl_tier many[] = {{1 << 20, 0, 1e9}, {1 << 20, 0, 1e9}};
    CHECK_CONTAINS(refusal({slow, 2, 0, nullptr, 0}, chosen), "tier 1 of the network: its bandwidth is 0");
    CHECK_CONTAINS(refusal({none, 1, 0, nullptr, 0}, chosen), "tier 0 of the network: its size is 0");
    CHECK_CONTAINS(refusal({back, 1, 0, nullptr, 0}, chosen), "its latency is -1");
    CHECK_CONTAINS(refusal({many, 2, 0, nullptr, 0}, chosen), "more than 1048576");
    CHECK_CONTAINS(refusal({kRacks, 9, 0, nullptr, 0}, chosen), "9 tiers");
    CHECK_CONTAINS(refusal({nullptr, 1, 0, nullptr, 0}, chosen), "tiers is NULL");
    CHECK_CONTAINS(refusal({kRacks, 3, -1, nullptr, 0}, chosen), "reduce bandwidth");
    CHECK_CONTAINS(refusal(kTwoRacks, {"r:4x4", 0}), "4x4 multiply to 16");
    CHECK_CONTAINS(refusal(kTwoRacks, {"q", 0}), "unknown mode 'q'");
    CHECK_CONTAINS(refusal(kTwoRacks, {nullptr, -1}), "chunks: -1");
    size_t found = 0;
    CHECK_EQ(ddl_plan_schedule(&kTwoRacks, nullptr, 1, DDL_FLOAT32, 8, nullptr, 0, &found), DDL_ERROR_ARGUMENT);
    CHECK_CONTAINS(std::string(ddl_last_error()), "rank 8 is not in a plan of 8");
    CHECK_EQ(ddl_plan_alternatives(&kTwoRacks, 1, DDL_FLOAT32, nullptr, 3, &found), DDL_ERROR_ARGUMENT);
}

TEST("what is wrong with an odd child is named") {
    const auto refusal = [&](std::vector<ddl_odd> odd) {
        const ddl_network network{kRacks, 3, 0, odd.data(), static_cast<int>(odd.size())};
        ddl_bounds bounds;
        CHECK_EQ(ddl_plan_bounds(&network, 1024, &bounds), DDL_ERROR_ARGUMENT);
        return std::string(ddl_last_error());
    };
    CHECK_CONTAINS(refusal({{3, 0, 0, 1e9}}), "odd child 0 of tier 3: the network has 3 tiers");
    CHECK_CONTAINS(refusal({{1, 4, 0, 1e9}}), "odd child 4 of tier 1: the tier has 4 children");
    CHECK_CONTAINS(refusal({{2, 1, 1, 0}, {1, 3, 0, 1e9}}), "odd child 3 of tier 1: the tier has 3 children");
    CHECK_CONTAINS(refusal({{0, 1, 2, 0}}), "a rank has nothing below it");
    CHECK_CONTAINS(refusal({{1, 1, -2, 0}}), "its size is -2");
    CHECK_CONTAINS(refusal({{1, 1, 0, -1}}), "its bandwidth is -1");
    CHECK_CONTAINS(refusal({{1, 1, 0, 1e9}, {1, 1, 3, 0}}), "odd child 1 of tier 1 is listed twice");
    CHECK_CONTAINS(refusal({{1, 1, 1 << 20, 0}}), "more than 1048576 ranks");
}

TEST("on uneven hosts one ring is planned, and where racks are uneven a dimension for the hosts") {
    const ddl_odd host{1, 1, 4, 0}, rack{2, 1, 3, 0};
    const auto ring = alternatives_of({kRacks, 3, 0, &host, 1}, 1 << 20);
    CHECK_EQ(std::string(ring[0].plan), std::string("r:10"));
    const auto hosts = alternatives_of({kRacks, 3, 0, &rack, 1}, 1 << 20);
    CHECK_EQ(std::string(hosts[0].plan), std::string("r:2x5"));
    ddl_bounds bounds;
    const ddl_network network{kRacks, 3, 0, &host, 1};
    CHECK_EQ(ddl_plan_bounds(&network, 1 << 22, &bounds), DDL_SUCCESS);
    CHECK_EQ(bounds.hierarchical, 0.0);
    CHECK_EQ(bounds.tier_terms[0].tier, -1);
    CHECK_EQ(bounds.cut_witness.groups, 2);
    CHECK(std::fabs(bounds.cut_witness.bytes / bounds.cut_witness.capacity - bounds.cut) < 1e-12);
}

TEST("4,096 ranks are planned in seconds, with uneven hosts, a slow link or both") {
    if (check::kSanitized) return;  // it would take minutes
    const ddl_tier tiers[] = {{64, 1e-6, 5e9}, {8, 3e-5, 1.25e9}, {8, 4e-5, 5e9}};
    const ddl_odd slow{1, 7, 0, 2.5e8};
    std::vector<ddl_odd> uneven;
    for (int host = 0; host < 64; ++host) uneven.push_back({1, host, host % 2 ? 48 : 80, 0});
    std::vector<ddl_odd> both = uneven;
    both[7].bandwidth = slow.bandwidth;
    for (const auto& odd : {std::vector<ddl_odd>{}, {slow}, uneven, both}) {
        const std::clock_t begin = std::clock();
        const ddl_network network{tiers, 3, 0, odd.data(), static_cast<int>(odd.size())};
        const auto forecasts = alternatives_of(network, 1 << 24);
        const double took = static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC / 2;  // asked twice
        if (std::getenv("DDL_PRINT")) std::printf("%zu odd: %zu plans in %.2f s\n", odd.size(), forecasts.size(), took);
        CHECK(took < 10);
        ddl_bounds bounds;
        CHECK_EQ(ddl_plan_bounds(&network, 1 << 26, &bounds), DDL_SUCCESS);
        for (const auto& forecast : forecasts) CHECK(forecast.seconds >= bounds.cut);
    }
}

TEST("the schedule of a plan with MPI's collectives shows them, and at which tier") {
    std::vector<ddl_step> steps(10000);
    size_t found = 0;
    const ddl_plan plan{"rrm:2x2x2", 3};
    CHECK_EQ(ddl_plan_schedule(&kTwoRacks, &plan, 1 << 20, DDL_FLOAT32, 5, steps.data(), steps.size(), &found),
             DDL_SUCCESS);
    CHECK(found <= steps.size());
    int groups = 0;
    for (size_t i = 0; i < found; ++i) {
        if (steps[i].kind != DDL_STEP_REDUCE_SCATTER && steps[i].kind != DDL_STEP_ALLGATHER) continue;
        CHECK_EQ(steps[i].tier, 2);
        CHECK_EQ(steps[i].peer, -1);
        ++groups;
    }
    CHECK_EQ(groups, 3 * 2);
}

TEST("of plans that take nearly the same time, the one with the fewest rounds is chosen") {
    // Ethernet of 10 Gbit/s: at some sizes rings over several tiers are the fastest, by some percent.
    const ddl_tier tiers[] = {{8, 1e-6, 20e9}, {16, 1e-5, 1.25e9}, {8, 1e-5, 1.25e9}};
    const ddl_network network{tiers, 3, 0, nullptr, 0};
    int near = 0;
    for (const size_t count : {1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26}) {
        const auto forecasts = alternatives_of(network, count);
        for (const auto& forecast : forecasts) {
            CHECK(forecast.seconds > forecasts[0].seconds / 1.05);
            if (forecast.seconds >= forecasts[0].seconds) continue;
            CHECK(forecast.rounds > forecasts[0].rounds);
            CHECK_CONTAINS(forecasts[0].reason, "the fewest rounds within 5%");
            ++near;
        }
    }
    CHECK(near > 0);
}
