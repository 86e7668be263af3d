// What lives in a process from its first ddl_init until it exits: MPI, the heartbeats and an orderly end. MPI cannot be
// initialised twice, so ddl_finalize leaves it alone.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "startup/rendezvous.h"
#include "startup/tcp_rendezvous.h"
#include "transport/heartbeats.h"
#include "transport/mpi_call.h"
#include "transport/mpi_watch.h"

namespace ddl {

constexpr size_t kEagerBytes = 20 << 10;  // that Open MPI sends at once inside a host, where we initialise it

class Job {
  public:
    // This process's job. The first call initialises MPI, where the user has not, and blocks until every rank of the
    // job does so; after `timeout_seconds` it ends the process, because MPI's calls cannot be given up. Throws Error.
    // Never destroyed: it is in use until the process ends.
    // `members`: who takes part in a job that no MPI started; null: DDL_TRANSPORT and the environment decide. The first
    // call decides for the process.
    static Job& join(double timeout_seconds, const Membership* members);
    // True in a child that a rank has forked: nothing of the job is its own. Others would take for its parent's what it
    // sends, and a lock may be held by a thread that it does not have.
    static bool is_in_child();

    Job(const Job&) = delete;
    Job& operator=(const Job&) = delete;

    int rank() const { return rank_; }
    int size() const { return size_; }
    bool uses_mpi() const { return !members_; }
    // Over TCP: a connection to each other rank; each call makes new ones. Collective; before assemble(). Throws Error.
    std::vector<Socket> connect_all(double timeout_seconds);

    // Calls the roll, over `transport` if MPI did not start the job, and the first time connects the heartbeats.
    // Returns everyone's greeting. Throws Error.
    std::vector<Greeting> assemble(Transport* transport, const std::string& options, const Patience& patience,
                                   const std::function<void(const std::string&)>& warn);

    // Another communicator of all ranks. Collective; all must have been there in assemble() just before. Names in a
    // warning, then in an Error (DDL_ERROR_TIMEOUT), who does not answer meanwhile.
    MPI_Comm duplicate(const Patience& patience, const std::function<void(const std::string&)>& warn);
    // A communicator of the ranks of this one's color, ordered by key. Collective, and as duplicate(). Ends the process
    // if it does not return for so many seconds, because MPI has no form of it that can be given up.
    MPI_Comm split(int color, int key, double timeout_seconds);

    bool is_dead(int rank) const { return heartbeats_ && watching_ && heartbeats_->death_of(rank) != Death::none; }

    // What is called before MPI is finalized, by whomever: it must leave MPI alone afterwards.
    void before_finalize(std::function<void()> action) { before_finalize_ = std::move(action); }
    // A collective failed: others may never come to MPI_Finalize, and this process does not wait for them for ever.
    void note_failure() { failed_ = true; }

  private:
    Job(double timeout_seconds, const Membership* members);
    void start_mpi(double timeout_seconds);
    std::vector<Greeting> call(Transport* transport, const Greeting& mine, const RendezvousOptions& options) const;
    void initialise_mpi(double timeout_seconds);
    void watch_calls(double timeout_seconds);
    void watch_finalize();
    std::vector<std::string> addresses_in_use(const std::vector<Greeting>& greetings) const;
    std::string name() const;
    std::string silent_ranks();
    void connect_heartbeats(const std::vector<Greeting>& greetings,
                            const std::function<void(const std::string&)>& warn);
    void report_death(int rank, Death cause);
    void leave(int status);
    void finalize_mpi();
    [[noreturn]] void end_process(const std::string& why);

    const pid_t process_;
    std::unique_ptr<Membership> members_;  // none: MPI's
    bool initialised_mpi_ = false;
    MPI_Comm base_ = MPI_COMM_NULL;
    int rank_ = 0, size_ = 1;
    int round_ = 0;
    bool spoiled_ = false;  // an assembly failed: its messages may still arrive
    std::unique_ptr<MpiWatch> calls_;
    std::unique_ptr<Heartbeats> heartbeats_;  // none if there is one rank
    std::atomic<bool> watching_{false};
    std::vector<std::string> names_;  // "rank 3 (host b)", of each rank
    std::vector<std::string> hosts_;  // of each rank
    std::atomic<bool> death_reported_{false};
    std::function<void()> before_finalize_;
    std::atomic<bool> failed_{false}, exiting_{false};
    std::atomic<int> exit_status_{0};
};

// The name by which this host is known in messages.
std::string host_name();

}  // namespace ddl
