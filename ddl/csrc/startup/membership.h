// Who the ranks of an epoch are. MPI makes it, the rendezvous over TCP, or the agreement that ends the epoch before.
#pragma once

#include <cstdint>
#include <numeric>
#include <vector>

namespace ddl {

struct Membership {
    uint64_t epoch = 0;
    int rank = 0;             // this process's
    std::vector<int> former;  // of each rank: its number in the epoch before; -1: it has joined
    int round = 0;            // rendezvous of this job before the next one

    int size() const { return static_cast<int>(former.size()); }
    // The first one's: ranks have the numbers that they always had.
    static Membership first(int rank, int size) {
        Membership made;
        made.rank = rank;
        made.former.resize(static_cast<size_t>(size));
        std::iota(made.former.begin(), made.former.end(), 0);
        return made;
    }
};

}  // namespace ddl
