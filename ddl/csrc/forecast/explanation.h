// Partitions of hosts into racks, and how well they explain a measurement. Pure; internal to tiers.cc.
#pragma once

#include <cstddef>
#include <limits>
#include <vector>

#include "forecast/tiers.h"

namespace ddl {

constexpr double kInfinite = std::numeric_limits<double>::infinity();
constexpr int kExhaustive = 8;  // up to so many hosts every partition is tried: 4,140 of them

inline size_t index(int number) { return static_cast<size_t>(number); }

// A partition: the rack of each host. Racks are numbered from 0 in the order of their first hosts.
struct Partition {
    std::vector<int> rack_of;
    int racks = 0;

    explicit Partition(std::vector<int> of);
    Racks groups() const;
};

// Rates how well partitions explain a measurement. Reuses its working memory.
class Explanation {
  public:
    explicit Explanation(const Measurement& measured);

    double link = 0;
    std::vector<double> uplinks;
    double effort = 0;  // so far

    // The price of a partition, to be minimised: how unlikely the flows are, given the racks and the noise that they
    // leave unexplained, plus a price for each rack. If every rack has one host, there are no racks: they would explain
    // any rates of single links.
    double price(const Partition& partition);

    // Whether `partition`, which must be the last one priced, may be an answer.
    bool is_sound(const Partition& partition) const { return wide_racks(partition) <= 1; }

    // The sum over all flows of how far each is from what `partition` predicts; sets link and uplinks.
    double cost(const Partition& partition);

  private:
    struct Open {
        size_t flow = 0, up = 0, down = 0;
    };

    int wide_racks(const Partition& partition) const;
    void fit(const Partition& partition);
    void share(const Partition& partition, const std::vector<Flow>& flows);

    const Measurement& measured_;
    double fastest_ = 0, flows_ = 0, price_of_rack_ = 0;
    std::vector<double> left_, rates_, values_;
    std::vector<int> users_, narrowest_;
    std::vector<Open> open_;
};

}  // namespace ddl
