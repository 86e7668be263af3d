// What a rank remembers about communicators that it does not have: those that it is still making, of which others may
// speak already, and those that it has freed, of which others may still ask.
#pragma once

#include <deque>
#include <map>
#include <utility>
#include <vector>

#include "base/status.h"
#include "engine/notice.h"

namespace ddl {

// What is left of a communicator after it was freed.
struct Freed {
    Header last;    // the last call that was made on it; magic 0: none
    Status broken;  // the error that it had, if any
};

// Not thread-safe: the engine's progress lock guards it. Remembers a bounded number of each, the newest.
class Registry {
  public:
    // A notice about a communicator that this rank does not have. Dropped if it was freed.
    void keep(int from, const NoticeContent& notice);
    // The notices kept for `key`, with their senders, in order of arrival; they are kept no longer.
    std::vector<std::pair<int, NoticeContent>> take(const CommKey& key);

    void bury(const CommKey& key, Freed freed);
    // nullptr if it was not freed, or so long ago that it is forgotten.
    const Freed* freed(const CommKey& key) const;

  private:
    std::deque<std::pair<int, NoticeContent>> early_;
    std::map<CommKey, Freed> freed_;
    std::deque<CommKey> order_;  // of freed_, oldest first
};

}  // namespace ddl
