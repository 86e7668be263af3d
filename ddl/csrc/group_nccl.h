// Groups over NCCL, on buffers in a GPU's memory: modes b and n.
#pragma once

#include <memory>
#include <vector>

#include "group.h"
#include "nccl.h"
#include "plan.h"

namespace ddl {

// The stream and the communicators of this process's NCCL groups. All of their collectives run on the one stream: the
// engine starts them in one order on all ranks, and a GPU that ran some out of it could wait for another for ever.
class NcclJob {
  public:
    NcclJob(const NcclApi& api, std::shared_ptr<CudaDevice> device);

    // Joins a communicator; blocks until its `size` ranks have. Throws Error.
    NcclComm join(const NcclId& id, int size, int rank);
    // Ends what is under way on all communicators: they are not to be used again, and no buffer is touched afterwards.
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
    bool aborted_ = false;
};

// One dimension's. Communicators are left to the end of the process: NCCL's own way of freeing them waits for the other
// ranks.
std::unique_ptr<GroupComm> make_nccl_group(std::shared_ptr<NcclJob> job, const NcclId& id, int size, int rank,
                                           char mode);

}  // namespace ddl
