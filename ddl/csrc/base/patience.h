// How long a rank may be late, and what to tell the user about it. Pure.
#pragma once

namespace ddl {

// Advice about a late rank, in the messages of ddl_init and of calls on a communicator.
constexpr const char* kPatienceOfInit = "DDL_TIMEOUT sets how many seconds a rank may be late";
constexpr const char* kPatienceOfCalls =
    "DDL_TIMEOUT, or ddl_comm_set_timeout for one communicator, sets how many seconds a rank may be late";

struct Patience {
    double ask_seconds = 1;  // without progress: ask the others what they do, and again after 2, 4, 8, ... of these, at
                             // least every warn_seconds
    double warn_seconds = 10;      // then a warning names who is missing
    double timeout_seconds = 300;  // end the collective with an error
};

// The same with another timeout. Questions and the warning come before the end, however short that is.
Patience within(Patience patience, double timeout_seconds);

}  // namespace ddl
