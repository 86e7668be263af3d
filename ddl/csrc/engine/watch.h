// Watches one collective that makes no progress: when to ask the other ranks, when to warn, when to give up, and in
// what words. Pure: times come in, decisions go out.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "base/patience.h"
#include "engine/header.h"
#include "engine/operation.h"

namespace ddl {

// Whether a rank has left a communicator for good, and how.
enum class Leave : uint8_t { no, freed, finalized };
// "has finalized".
const char* describe(Leave leave);

class Watch {
  public:
    enum class Verdict : uint8_t { wait, ask, warn, give_up };

    explicit Watch(const Patience& patience = {}) : patience_(patience), next_ask_(patience.ask_seconds) {}

    // The collective went on.
    void progress();
    // What to do after `stalled` seconds without progress. `ask` and `warn` come once for each time they are due.
    Verdict judge(double stalled);

    // Which ranks to ask after `stalled` seconds, of `size`, less `rank` itself. At first those that a message is
    // awaited from, who are most often the cause. Then all that have not said that they called it, or that they wait
    // for something of their own: the cause may stand far behind. If there are more than kFew, only as the warning is
    // near: each question to a rank that this one has not talked to makes a connection.
    static constexpr int kFew = 64;
    std::vector<int> to_ask(int size, int rank, double stalled, const std::vector<int>& awaited);

    // What a rank said about itself. `waits`: as Operation::own_wait().
    void answer(int rank, bool arrived, const Header& call, Leave left, const std::string& waits = "");
    // True if a rank that has not arrived never will: it has left.
    bool hopeless() const;

    // Who is waited for and what they last did: "rank 2 (host b) has not called it; its last call was ...". `own_wait`:
    // this rank's.
    std::string report(const Group& group, int rank, const std::vector<int>& awaited,
                       const std::string& own_wait = "") const;

  private:
    struct Answer {
        bool arrived = false;
        Leave left = Leave::no;
        Header call;
        std::string waits;
    };
    Patience patience_;
    double next_ask_;
    bool asked_ = false, warned_ = false;
    std::map<int, Answer> answers_;
};

}  // namespace ddl
