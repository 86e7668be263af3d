// SIGUSR1 prints which calls this process has in flight, for a user who wonders why a job stands still.
#pragma once

#include <functional>
#include <string>

namespace ddl {

// From now on the signal prints `report`'s text, from a thread of its own; once a process, later calls do nothing. Does
// nothing either if the program has a use of its own for the signal.
void report_on_signal(std::function<std::string()> report);

}  // namespace ddl
