// Where processes wait that want to join the job at its next epoch: rank 0's, if the program asks who waits.
//
// Its address and a token stand in the store. Both ends prove that they know the token, as in the rendezvous. A
// newcomer says its version, its options and where it listens, and waits. invite() tells each its number among those
// that are offered to the ranks, and where the others of them listen. Every rank then connects to each (welcome.h).
#pragma once

#include <atomic>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "startup/tcp_rendezvous.h"
#include "transport/connector.h"

namespace ddl {

// ddl_version(), which the core does not have.
constexpr int kVersion = DDL_VERSION_MAJOR * 10000 + DDL_VERSION_MINOR * 100 + DDL_VERSION_PATCH;
constexpr const char* kDoorKey = "ddl/door";
constexpr int kSeats = 128;                  // of the door itself and of those that wait
constexpr size_t kMostNewcomers = 32;        // of one epoch
constexpr double kMeetSeconds = 5;           // for the connections between newcomers and ranks
constexpr const char* kInvited = "invited";  // what the text of an invitation begins with; others say why not

class FrontDoor {
  public:
    // Opens it and tells the store. `options`: what newcomers must have, too. Throws Error.
    FrontDoor(const Start& start, std::string options);
    ~FrontDoor();
    FrontDoor(const FrontDoor&) = delete;
    FrontDoor& operator=(const FrontDoor&) = delete;

    int waiting() const;
    // Invites those that wait to the ranks, of which there are so many. Returns the offer for them: a line with the
    // token, then a line for each newcomer with where it listens. Empty if nobody waits.
    std::string invite(int ranks);

  private:
    struct Guest {
        int seat = 0;
        Socket socket;
        std::string contact;
    };
    void serve();
    void greet(int seat, Socket socket);

    const std::string options_;
    std::string key_;           // Start::key() of the token in the store
    Connector connector_;       // the thread's
    mutable std::mutex mutex_;  // guards the next two
    std::vector<Guest> guests_;
    std::vector<int> left_;  // seats to be given again
    std::atomic<bool> stopping_{false};
    std::thread thread_;
};

}  // namespace ddl
