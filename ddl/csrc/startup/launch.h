// How the processes of a job were started, and so are connected: TCP, or MPI, which is a plugin (csrc/mpi,
// libddl_mpi.so).
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "base/patience.h"
#include "device/group.h"
#include "startup/membership.h"
#include "transport/heartbeats.h"
#include "transport/transport.h"

namespace ddl {

struct Start;

// What a launch asks of its job.
struct LaunchOptions {
    double timeout_seconds = 0;  // as Patience's
    std::function<bool(int rank)> is_dead;
    std::function<Death(int rank)> death_of;    // as far as heartbeats tell
    std::function<std::string()> silent_ranks;  // who does not answer, in words; blocks for a while
    std::function<void(const std::string&)> warn;
    std::function<void()> on_finalize;  // called when MPI is finalized, by whomever: nothing is sent afterwards
};

// Lives until the process ends. Its functions throw Error and std::bad_alloc.
class Launch {
  public:
    virtual ~Launch() = default;

    // Who the ranks are, for the next lobby().
    const Membership& members() const { return members_; }
    // Takes a store for the next lobby(); false if this process cannot be that rank.
    virtual bool accept(const Start&) { return false; }

    // The transport of the rendezvous. Collective; blocks. `round` counts the rendezvous of this job.
    virtual Transport& lobby(int round) = 0;
    // The transport of the session that follows, which shares no message with those before it. Collective; blocks. All
    // must have been in the rendezvous just before.
    virtual std::unique_ptr<Transport> connect(const Patience& patience,
                                               const std::function<void(const std::string&)>& warn) = 0;
    // Ends the epoch: the ranks that are alive agree on the members of the next one: themselves in their order, then,
    // if `takes_in`, the processes that wait. Some may have died since. Collective over those alive; blocks. Nobody may
    // use the last transport meanwhile, or afterwards, but it must still be there.
    virtual void resize(bool /*takes_in*/, const Patience&, const std::function<void(const std::string&)>& /*warn*/) {}
    virtual bool can_resize() const { return false; }
    // How many processes wait at this rank, with these options. None do at ranks other than 0.
    virtual int waiting(const std::string& /*options*/) { return 0; }
    // Keeps the transport of a connect() for a resize() when its session could not be made.
    virtual void keep(std::unique_ptr<Transport>) {}
    // For mode m: MPI's collectives among the ranks of one color, in the order of their keys. Collective; blocks.
    virtual std::unique_ptr<GroupComm> group(int color, int key) = 0;

    // True once MPI was finalized: the job cannot go on.
    virtual bool is_over() const { return false; }
    // True if finalize() must be called at exit. It blocks until all ranks call it.
    virtual bool must_finalize() const { return false; }
    virtual void finalize() {}

  protected:
    Membership members_;
};

// `start`: how to come to a job that MPI did not start; null: DDL_TRANSPORT and the environment decide. `text`: the
// options of ddl_init, which a process that joins must have in common with the job. Blocks until MPI has started, if it
// is MPI's, or until the ranks have taken this process in.
std::unique_ptr<Launch> make_launch(const Start* start, const std::string& text, const LaunchOptions& options);

// What the plugin's one function, ddl_mpi_plugin(), returns. `version` is ddl_version()'s; `build` changes with any
// header of libddl's, so with the layout of what passes between the two. Both stay first: a plugin with others is asked
// for nothing else.
struct MpiPlugin {
    int version;
    unsigned build;
    std::unique_ptr<Launch> (*launch)(const LaunchOptions& options);
};

}  // namespace ddl
