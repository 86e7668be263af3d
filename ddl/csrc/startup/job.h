// A process's part in its job, from its first ddl_init until it exits: the launch, the heartbeats and an orderly end.
// MPI cannot be initialised twice, so ddl_finalize leaves the launch alone.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "startup/launch.h"
#include "startup/rendezvous.h"
#include "transport/heartbeats.h"

namespace ddl {

class Job {
  public:
    // This process's job. The first call decides for the process who takes part (see make_launch()), and over MPI
    // blocks until every rank of the job calls it; after `timeout_seconds` it then ends the process, because MPI's
    // calls cannot be given up. Throws Error. Never destroyed: it is in use until the process ends.
    static Job& join(double timeout_seconds, const Start* start, const std::string& text);
    // True in a child that a rank has forked: nothing of the job is its own. Others would take for its parent's what it
    // sends, and a lock may be held by a thread that it does not have.
    static bool is_in_child();

    Job(const Job&) = delete;
    Job& operator=(const Job&) = delete;

    const Membership& members() const { return members_; }

    // The rendezvous: returns everyone's greeting, and the first time connects the heartbeats. Collective. Throws
    // Error.
    std::vector<Greeting> assemble(const std::string& options, int64_t origin, const Patience& patience,
                                   const std::function<void(const std::string&)>& warn);
    // As Launch has them; after assemble().
    std::unique_ptr<Transport> connect(const Patience& patience, const std::function<void(const std::string&)>& warn);
    std::unique_ptr<GroupComm> group(int color, int key) { return launch_->group(color, key); }

    // As Launch has them: members() are then those of the next epoch, and assemble() is next.
    void resize(bool takes_in, const Patience& patience, const std::function<void(const std::string&)>& warn);
    bool can_resize() const { return launch_->can_resize(); }
    int waiting(const std::string& options) { return launch_->waiting(options); }
    void keep(std::unique_ptr<Transport> transport) { launch_->keep(std::move(transport)); }

    Death death_of(int rank) const { return watching_ ? heartbeats_->death_of(rank) : Death::none; }
    bool is_dead(int rank) const { return death_of(rank) != Death::none; }

    // `action` is called before MPI is finalized, by whomever: it must leave MPI alone afterwards.
    void before_finalize(std::function<void()> action) { before_finalize_ = std::move(action); }
    // A collective failed: others may never come to MPI_Finalize, and this process does not wait for them for ever.
    void note_failure() { failed_ = true; }

  private:
    Job(double timeout_seconds, const Start* start, const std::string& text);
    std::string silent_ranks();
    void connect_heartbeats(const std::vector<Greeting>& greetings,
                            const std::function<void(const std::string&)>& warn);
    void report_death(int rank, Death cause);
    bool any_dead() const { return heartbeats_ && heartbeats_->any_dead(); }
    void spoil() { spoiled_ = failed_ = true; }
    void leave(int status);
    void finalize();
    [[noreturn]] void end_process(const std::string& why);

    const pid_t process_;
    const std::string place_;  // equal on ranks that share a host
    std::unique_ptr<Launch> launch_;
    Membership members_;
    bool spoiled_ = false;                    // an assembly failed: its messages may still arrive
    std::shared_ptr<Heartbeats> heartbeats_;  // none if there is one rank; its own thread reads it, too
    std::shared_ptr<Heartbeats> former_;      // those of the epoch before, until all have left it
    std::atomic<bool> watching_{false};
    std::vector<std::string> names_;  // "rank 3 (host b)", of each rank
    std::vector<std::string> hosts_;  // of each rank
    std::atomic<bool> death_reported_{false};
    std::function<void()> before_finalize_;
    std::atomic<bool> failed_{false}, exiting_{false};
    std::atomic<int> exit_status_{0};
};

}  // namespace ddl
