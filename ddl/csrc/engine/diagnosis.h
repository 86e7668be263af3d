// Who is missing, dead or elsewhere: the watch over collectives, and what ranks tell one another about them.
#pragma once

#include <string>

#include "engine/core.h"
#include "engine/registry.h"

namespace ddl {

// The progress lock guards it.
class Diagnosis {
  public:
    explicit Diagnosis(Core& core) : core_(core) {}

    // Looks for deaths, and for a call that does not go on. Throws std::bad_alloc; then it is to be called again.
    void watch(Communicator& comm, double now);
    // Takes what others have sent; throws likewise, and loses at most one.
    void take_notices();
    void take(const Notice& notice);
    // Takes what others have said about a communicator before this rank had made it.
    void adopt(Communicator& comm);
    // Remembers what to answer about a communicator that this rank has no more, or never made.
    void bury(const CommKey& key, Freed freed) { registry_.bury(key, std::move(freed)); }
    // A line for each collective in flight: what it is, for how long, whom it waits for.
    std::string in_flight() const;

  private:
    bool hear_departed(Communicator& comm, Active& active);
    void ask(const Communicator& comm, Active& active, double stalled);
    void heed(Communicator& comm, int from, const NoticeContent& notice);
    void answer(int from, const NoticeContent& query);
    void hear(int from, const NoticeContent& answer);
    void break_mismatch(Communicator& comm, const Active& active, int rank, const Header& theirs);

    Core& core_;
    Registry registry_;
};

}  // namespace ddl
