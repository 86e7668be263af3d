// Messages between two ranks, as callers see them: checked, watched, and ended with an error that says why. The mailbox
// moves them.
#pragma once

#include <string>

#include "engine/core.h"

namespace ddl {

// Takes the progress lock in post(); otherwise it guards this.
class Messages {
  public:
    explicit Messages(Core& core) : core_(core) {}

    // As Engine has it.
    Status post(CommId comm, int peer, Mail mail, RequestPtr* request);

    // Moves messages along, and ends the requests of those that are over. True if one moved.
    bool poll();
    // Looks for deaths, and for messages that do not go on.
    void watch(double now);
    // A line for each in flight.
    std::string in_flight() const;

  private:
    std::string hindrance_of(const Communicator& comm, const Letter& letter) const;

    Core& core_;
};

}  // namespace ddl
