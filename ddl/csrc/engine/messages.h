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

    // As Engine has them; probe() looks at what is here.
    Status post(CommId comm, int peer, Mail mail, RequestPtr* request);
    Status probe(CommId comm, int peer, int64_t tag, bool* found, int* source);

    // Moves messages along, and ends the requests of those that are over. True if one moved.
    bool poll();
    // Looks for deaths, and for messages that do not go on.
    void watch(double now);
    // A line for each in flight.
    std::string in_flight() const;

  private:
    Status loss_of(const Communicator& comm, const Mail& mail) const;
    std::string hindrance_of(const Communicator& comm, const Letter& letter) const;

    Core& core_;
};

}  // namespace ddl
