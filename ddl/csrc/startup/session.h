// What lives from a ddl_init to its ddl_finalize: the engine, the ranks' places, and the communicators' handles.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "device/cuda.h"
#include "engine/engine.h"
#include "schedule/placement.h"
#include "startup/job.h"
#include "transport/bootstrap.h"

namespace ddl {

class Session {
  public:
    // Joins the job; `options` as ddl_init takes them. Collective. Throws Error.
    // `members`: as Job::join() takes them.
    explicit Session(const char* options, const Membership* members = nullptr);
    ~Session() { end(); }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;

    Job& job() { return job_; }
    Engine& engine() { return *engine_; }
    int local_rank() const { return placement_.local_rank(job_.rank()); }
    int local_size() const { return placement_.local_size(job_.rank()); }
    int num_hosts() const { return placement_.num_hosts; }

    // The engine's number of a communicator. Throws Error(DDL_ERROR_STATE) where the handle is none of this session's.
    CommId id_of(ddl_comm handle) const;
    // A handle that stands for nothing yet; bind() makes it a communicator's, and needs no memory.
    using Handle = std::map<ddl_comm, CommId>::node_type;
    static Handle new_handle();
    ddl_comm bind(Handle handle, CommId id);
    void forget(ddl_comm handle);

    // Finds out where the buffers of `call` are. In a GPU's memory, and in managed memory, they are used once the GPU
    // has done what was given to `stream` so far. Throws Error where they are in different memories, or in another
    // GPU's than this rank's.
    void locate(Call& call, CudaStream stream);

    // Keeps in mind that a collective failed in a way that may leave other ranks behind.
    void note(const Status& status);
    // Ends what is in flight and leaves the transport alone from then on. Doing it twice does nothing.
    void end();

  private:
    std::unique_ptr<Transport> within_host(std::unique_ptr<Transport> transport, const BootstrapOptions& talk,
                                           const Options& asked, std::vector<Notice>* early);

    Job& job_;
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
