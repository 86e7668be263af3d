// A rank's part in taking newcomers in, and a newcomer's.
//
// Every rank connects to each newcomer of an offer (front_door.h). A newcomer that has connections to all others of the
// offer says so to each rank: the rank is then ready for it. When the ranks have decided (agreement.h), each tells
// those that they take who belongs to the next epoch, and closes the connection to the others, who knock again.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/patience.h"
#include "startup/membership.h"
#include "startup/tcp_rendezvous.h"
#include "transport/connector.h"
#include "transport/transport_tcp.h"

namespace ddl {

// What ranks have decided.
struct NextEpoch {
    uint64_t epoch = 0;
    int round = 0;               // as Membership has it
    int ballot = -1;             // as Agreement has it
    std::vector<int> survivors;  // by their numbers now
};

class Welcome {
  public:
    Welcome(int rank, int size) : rank_(rank), size_(size) {}

    // As Agreement::Links::prepare(): at most kMeetSeconds for each offer.
    bool prepare(const std::string& offer, uint64_t* ready);
    // Tells these newcomers that they are in, and who is. Returns the connections to them, in their order; none to one
    // that has died since.
    std::vector<TcpLinks::Link> admit(uint64_t newcomers, const NextEpoch& next);

  private:
    struct Newcomer {
        Socket socket;
        bool ready = false, lost = false;
    };
    const int rank_, size_;
    std::string offer_;  // the last one that was not empty
    double deadline_ = 0;
    std::vector<Newcomer> newcomers_;
    std::unique_ptr<Connector> connector_;
};

struct Admission {
    Membership members;
    TcpLinks links;
};

// Knocks at the job's door until its ranks take this process in; blocks. Throws Error: DDL_ERROR_TIMEOUT after the
// patience's time, DDL_ERROR_MISMATCH if its version or options are not the job's.
Admission join(const Start& start, const std::string& options, const Patience& patience,
               const std::function<void(const std::string&)>& warn);

}  // namespace ddl
