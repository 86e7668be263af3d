#include "measure/rounds.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>

namespace ddl {
namespace {

constexpr int kExtraRounds = 14;  // at least, after those in which every pair meets once ...
constexpr int kUsualRounds = 20;  // ... up to so many in all

size_t index(int number) { return static_cast<size_t>(number); }

// The standard fixes the sequence of mt19937_64, but std::shuffle differs between libraries.
void shuffle(std::vector<int>& items, std::mt19937_64& random) {
    for (size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[random() % i]);
}

// Every pair once, in as few rounds as possible: one host stays in place, the others rotate.
std::vector<Pairs> tournament(int hosts) {
    constexpr int kNobody = -1;
    std::vector<int> ring(index(hosts));
    std::iota(ring.begin(), ring.end(), 0);
    if (hosts % 2 == 1) ring.push_back(kNobody);
    std::vector<Pairs> rounds;
    for (size_t i = 0; i + 1 < ring.size(); ++i) {
        Pairs pairs;
        for (size_t at = 0; at < ring.size() / 2; ++at) {
            const int one = ring[at], other = ring[ring.size() - 1 - at];
            if (one != kNobody && other != kNobody) pairs.push_back(std::minmax(one, other));
        }
        std::sort(pairs.begin(), pairs.end());
        rounds.push_back(std::move(pairs));
        std::rotate(ring.begin() + 1, ring.end() - 1, ring.end());
    }
    return rounds;
}

}  // namespace

std::vector<Pairs> probe_rounds(int hosts) {
    if (hosts < 2) return {};
    std::mt19937_64 random(static_cast<uint64_t>(hosts));
    std::vector<Pairs> rounds = tournament(hosts);
    constexpr size_t kFirst = kMostRounds - kExtraRounds;
    if (rounds.size() > kFirst) {
        std::vector<int> order(rounds.size());
        std::iota(order.begin(), order.end(), 0);
        shuffle(order, random);
        std::vector<Pairs> some;
        for (size_t i = 0; i < kFirst; ++i) some.push_back(rounds[index(order[i])]);
        rounds = std::move(some);
    }
    if (hosts <= 3) {  // only one pair at a time: each meets several times, so that a bad moment is outvoted
        const std::vector<Pairs> once = rounds;
        for (int again = 1; again < 2 * hosts - 1; ++again) rounds.insert(rounds.end(), once.begin(), once.end());
        return rounds;
    }
    std::vector<int> order(index(hosts));
    std::iota(order.begin(), order.end(), 0);
    const int extra = std::max(kExtraRounds, kUsualRounds - static_cast<int>(rounds.size()));
    for (int i = 0; i < extra; ++i) {
        shuffle(order, random);
        Pairs pairs;
        for (size_t at = 0; at + 1 < order.size(); at += 2) pairs.push_back(std::minmax(order[at], order[at + 1]));
        std::sort(pairs.begin(), pairs.end());
        rounds.push_back(std::move(pairs));
    }
    return rounds;
}

}  // namespace ddl
