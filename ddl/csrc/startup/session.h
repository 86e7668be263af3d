// A session lasts from a ddl_init to its ddl_finalize. It has the engine, the ranks' places and the communicators'
// handles.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "device/cuda.h"
#include "engine/engine.h"
#include "forecast/part.h"
#include "schedule/placement.h"
#include "startup/job.h"
#include "transport/bootstrap.h"

namespace ddl {

class Session {
  public:
    // Comes to the job; `options` as ddl_init takes them, `start` as Job::join() does. Collective. Throws Error.
    static std::shared_ptr<Session> begin(const char* options, const Start* start);
    // The next epoch's, among the ranks that are alive and, if `takes_in`, the processes that wait. Ends this one: what
    // is in flight anywhere, on any of its communicators, ends with DDL_ERROR_PEER_LOST. `gone` gets the ranks that are
    // no more in it, by their numbers here, and `joined` how many are new. Collective over those alive; blocks. Throws
    // Error; over MPI DDL_ERROR_UNSUPPORTED, and then nothing has ended.
    std::shared_ptr<Session> resize(bool takes_in, std::vector<int>* gone, int* joined);
    // How many processes wait at this rank.
    int waiting();
    ~Session() { end(); }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;

    Job& job() { return job_; }
    const Membership& members() const { return members_; }
    Engine& engine() { return *engine_; }
    int local_rank() const { return placement_.local_rank(members_.rank); }
    int local_size() const { return placement_.local_size(members_.rank); }
    int num_hosts() const { return placement_.num_hosts; }
    // The least seconds that an allreduce takes for each byte on the measured links; 0 if none were, for this epoch.
    double least_seconds_per_byte() const;

    // The engine's number of a communicator. Throws Error(DDL_ERROR_STATE) if it is not this session's.
    CommId id_of(ddl_comm handle) const;
    // A handle that stands for nothing yet; bind() makes it a communicator's, and needs no memory.
    using Handle = std::map<ddl_comm, CommId>::node_type;
    static Handle new_handle();
    ddl_comm bind(Handle handle, CommId id);
    void forget(ddl_comm handle);

    // Finds out in which memory the buffers of `call` are. Those in a GPU's memory, and in managed memory, are used
    // once the GPU has done the work that `stream` holds. Throws Error if they are in different memories, or on another
    // GPU than this rank's.
    void locate(Call& call, CudaStream stream);

    // Keeps in mind that a collective failed in a way that may leave other ranks behind.
    void note(const Status& status);
    // Ends what is in flight and leaves the transport alone from then on. Doing it twice does nothing.
    void end();
    bool has_ended() const { return ended_; }

  private:
    // What the last plan of measured links was made of: at the start, or when ranks joined.
    struct Origin {
        uint64_t epoch;
        Basis basis;
        Plan plan;
    };
    // Where the ranks stood in the plan of `origin`; without one, links are measured.
    Session(Job& job, std::string text, std::shared_ptr<const Origin> origin, std::vector<int> places);
    static std::shared_ptr<Session> go_on(Job& job, const std::string& text, std::shared_ptr<const Origin> origin,
                                          std::vector<int> places, std::vector<int>* here);
    void open();
    void go_within_host(std::unique_ptr<Transport>& transport, const BootstrapOptions& talk, const Options& asked,
                        std::vector<Notice>* early);

    Job& job_;
    const Membership members_;
    const std::string text_;  // the options'
    std::shared_ptr<const Origin> origin_;
    std::vector<int> places_;  // of each rank in origin_
    Placement placement_;
    Transport* transport_ = nullptr;  // the engine's
    std::unique_ptr<Engine> engine_;
    std::mutex ending_;
    std::atomic<bool> ended_{false};
    bool nccl_gpu_ = false;               // gpu_ is NCCL's
    mutable std::mutex mutex_;            // guards the rest
    std::shared_ptr<CudaDevice> gpu_;     // null until a buffer was in one, or NCCL wanted one
    std::map<ddl_comm, CommId> handles_;  // never used twice, so that one that was freed is known as such
};

}  // namespace ddl
