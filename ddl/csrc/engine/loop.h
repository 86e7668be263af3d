// Progress: whoever makes it, the loop's own thread or a caller that waits, begins the calls that were submitted and
// moves on those in flight.
#pragma once

#include <atomic>
#include <list>
#include <mutex>
#include <thread>
#include <vector>

#include "engine/diagnosis.h"
#include "engine/messages.h"
#include "engine/waker.h"

namespace ddl {

class Loop {
  public:
    Loop(Core& core, Messages& messages, Diagnosis& diagnosis)
        : core_(core), messages_(messages), diagnosis_(diagnosis) {}
    ~Loop() { stop(); }

    // As Engine has them. Calls are begun in the order of their submission.
    Status submit(CommId comm, const Call& call, RequestPtr* request);
    Status post(CommId comm, int peer, Mail mail, RequestPtr* request);
    bool test(const RequestPtr& request);
    const Status& wait(const RequestPtr& request);
    Status run(CommId comm, const Call& call);

    // Starts the thread, and ends it.
    void start();
    void stop();

    // Ends a rest of the thread: there is something to do, or a notice left to send.
    void wake() noexcept { waker_.wake(); }

    // With the progress lock held:
    // Keeps room to poll one communicator more, so that a call on it needs no memory for that.
    void make_room();
    // Begins what was submitted before.
    void take_submissions() noexcept;
    // Moves on what is in flight until all of it has ended, and is used no more. The last call.
    void drain() noexcept;

  private:
    class Helper;

    Status start(CommId comm, const Call& call, const RequestPtr& request);
    bool run_alone(CommId comm, const Call& call, const RequestPtr& request);
    void serve();
    bool has_left_work() noexcept;
    double rest(double seconds) noexcept;
    bool is_busy() const { return inbox_full_ || core_.pending() > 0; }
    bool progress(std::unique_lock<std::mutex> held, bool all = false) noexcept;

    // With the progress lock held:
    void unlock_and_warn(std::unique_lock<std::mutex> held) noexcept;
    bool poll(bool all = false) noexcept;
    bool poll(Communicator& comm) noexcept;
    void drop_idle() noexcept;
    Cause try_fast_path(Communicator& comm, const Call& call, const Header& header) noexcept;
    Header enter(Communicator& comm, const Call& call, Request& request) noexcept;
    void accept(const CommPtr& comm, std::list<Active>& taken) noexcept;
    void begin(Communicator& comm, Active& active);
    void retire(Communicator& comm) noexcept;
    double timed_bytes(const Communicator& comm, const Call& call) const;
    uint64_t bytes_of(const Communicator& comm, const Call& call) const;
    void clock(const Communicator& comm, Active& active);
    void count(const Communicator& comm, const Call& call, const Timing& timing);

    Core& core_;
    Messages& messages_;
    Diagnosis& diagnosis_;

    std::mutex in_;  // guards the inbox; nothing else is done under it
    std::list<Active> inbox_;
    std::atomic<bool> inbox_full_{false};  // something is in it: spares each poll the lock

    // Guarded by the progress lock:
    double next_watch_ = 0;
    std::vector<CommPtr> running_;  // those that had a queue lately; make_room() keeps room for all
    std::list<Active> spare_;       // at most one, for the next call
    unsigned idle_polls_ = 0;       // that moved nothing
    unsigned fast_calls_ = 0;
    bool said_ = false;  // that memory is short: once is enough

    Waker waker_;
    std::atomic<int> helpers_{0};
    std::atomic<bool> rests_long_{false};
    std::atomic<bool> stopping_{false};
    std::thread thread_;
};

}  // namespace ddl
