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
    // Joins the job; `options` as ddl_init takes them. Collective. Throws Error.
    // `members`: as Job::join() takes them.
    explicit Session(const char* options, const Membership* members = nullptr);
    // The next epoch's, among the ranks that are alive. Ends this one: what is in flight anywhere, on any of its
    // communicators, ends with DDL_ERROR_PEER_LOST. `gone` gets the ranks that are no more in it, by their numbers
    // here. Collective over those alive; blocks. Throws Error; over MPI DDL_ERROR_UNSUPPORTED, and then nothing has
    // ended.
    std::shared_ptr<Session> shrink(std::vector<int>* gone);
    ~Session() { end(); }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;

    Job& job() { return job_; }
    uint64_t epoch() const { return epoch_; }
    Engine& engine() { return *engine_; }
    int local_rank() const { return placement_.local_rank(job_.rank()); }
    int local_size() const { return placement_.local_size(job_.rank()); }
    int num_hosts() const { return placement_.num_hosts; }

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
    // What the job's first plan was made of, and where this epoch's ranks stood in it.
    struct Origin {
        std::string text;  // the options'
        Basis basis;
        Plan plan;
    };
    Session(Job& job, uint64_t epoch, std::shared_ptr<const Origin> origin, std::vector<int> places);
    void begin(const std::string& text);
    void go_within_host(std::unique_ptr<Transport>& transport, const BootstrapOptions& talk, const Options& asked,
                        std::vector<Notice>* early);

    Job& job_;
    uint64_t epoch_ = 0;
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
