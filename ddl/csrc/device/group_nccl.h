// Groups over NCCL, on buffers in a GPU's memory: modes b and n.
#pragma once

#include <memory>
#include <vector>

#include "device/group.h"
#include "device/nccl.h"
#include "schedule/plan.h"

namespace ddl {

// The stream and the communicators of a session's NCCL groups. All of their collectives run on the one stream: the
// engine starts them in one order on all ranks, and a GPU that ran some out of it could wait for another for ever.
//
// They live until abort(): NCCL's own way of freeing them waits for the other ranks.
class NcclJob {
  public:
    NcclJob(const NcclApi& api, std::shared_ptr<CudaDevice> device);

    // Begins to join a communicator of `size` ranks. Throws Error.
    NcclComm join(const NcclId& id, int size, int rank);
    // True when every communicator that was asked for is joined. Throws Error if one failed.
    bool joined() const;

    // True while NCCL prepares what was called on `comm`: its first collectives connect the GPUs. Throws Error where
    // something failed, of whatever kind: NCCL finds on its own that a peer is gone.
    bool is_busy(NcclComm comm) const;
    // One collective is prepared at a time: what NCCL launches later would come into the stream in another order.
    bool preparing() const { return preparing_; }
    void set_preparing(bool preparing) { preparing_ = preparing; }

    // Ends what is under way on all communicators and frees them: they are not to be used again, and no buffer is
    // touched afterwards, unless NCCL or the GPU needs more than 3 seconds. Doing it twice does nothing.
    void abort() noexcept;
    bool aborted() const { return aborted_; }

    const NcclApi& api() const { return api_; }
    CudaDevice& device() const { return *device_; }
    CudaStream stream() const { return stream_; }

  private:
    const NcclApi& api_;
    const std::shared_ptr<CudaDevice> device_;
    const CudaStream stream_;
    std::vector<NcclComm> comms_;
    bool preparing_ = false, aborted_ = false;
};

// One dimension's, over a communicator of `size` ranks that is joined.
std::unique_ptr<GroupComm> make_nccl_group(std::shared_ptr<NcclJob> job, NcclComm comm, int size, int rank, char mode);

}  // namespace ddl
