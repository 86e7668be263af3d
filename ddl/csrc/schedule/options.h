// DDL_OPTIONS: what the user and the launcher ask of the library, in the syntax of the original.
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
    std::vector<int> dimensions;  // accelerators a host, hosts a rack, racks an aisle, aisles; empty: to be found
    int dbg_level = 0;
    int shared_memory = 1;                             // between the ranks of a host; 0: everything goes through MPI
    int dump_iter = 0, dev_sync = 0, rebind_iter = 0;  // the original's: nothing reads them
};

// Options may begin with one dash or two. Throws Error(DDL_ERROR_ARGUMENT) that names the word and what is allowed.
Options parse_options(const std::string& text);

// What parse_options() reads: format_options(parse_options(text)) means the same as text.
std::string format_options(const Options& options);

// Says which options were given that do nothing here; "" where none was.
std::string idle_options(const Options& options);

// "4x2x1x1".
std::string format_dimensions(const std::vector<int>& dimensions);

// The plan that `options` ask for, over `size` ranks: dimensions of 1 are dropped (their links carry nothing). Throws
// where they do not multiply to `size`, or where the mode is p: that one is measured and not known yet.
Plan plan_of_options(const Options& options, int size, std::vector<int> ranks = {});

}  // namespace ddl
