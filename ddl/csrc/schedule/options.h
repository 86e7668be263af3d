// DDL_OPTIONS: the options of the user and the launcher, in the syntax of the original.
//
//   -mode MODES[:AxBxC...]   MODES: one of b n r m p for all dimensions, or one letter for each
//   -dbg_level 0|1|2
//   -shared_memory 0|1 (ours)
//   -dump_iter N  -dev_sync 0|1|2  -rebind_iter N (accepted, but without effect)
#pragma once

#include <string>
#include <vector>

#include "schedule/plan.h"

namespace ddl {

struct Options {
    std::string modes = "p";      // p: measured at start
    std::vector<int> dimensions;  // ranks a host, hosts a rack, racks an aisle, aisles; empty: the library chooses
    int dbg_level = 0;
    int shared_memory = 1;                             // between the ranks of a host; 0: all go through the transport
    int dump_iter = 0, dev_sync = 0, rebind_iter = 0;  // options of the original without effect
};

// Options may begin with one dash or two. Throws Error(DDL_ERROR_ARGUMENT), which names the word and the allowed
// values.
Options parse_options(const std::string& text);

// The inverse of parse_options(): format_options(parse_options(text)) means the same as text.
std::string format_options(const Options& options);

// A sentence about the given options that have no effect; "" if there are none.
std::string idle_options(const Options& options);

// "4x2x1x1".
std::string format_dimensions(const std::vector<int>& dimensions);

// The plan of `options` over `size` ranks. Dimensions of 1 are dropped, as their links carry nothing. Throws if the
// dimensions do not multiply to `size`, and for mode p, whose plan is measured later.
Plan plan_of_options(const Options& options, int size, std::vector<int> ranks = {});

}  // namespace ddl
