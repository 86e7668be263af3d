// Groups over MPI's own collectives: mode m.
#pragma once

#include <memory>
#include <unordered_map>
#include <vector>

#include "base/scratch.h"
#include "device/group.h"
#include "mpi/mpi_call.h"

namespace ddl {

// MPI cannot end a collective that has begun. So each works on memory of ours: the result is copied to the caller's
// when it is complete, and what was abandoned keeps its memory until the process ends.
class MpiGroup final : public GroupComm {
  public:
    // `comm` has the group's ranks in their order, and is used by nobody else. It stays the caller's. Its error handler
    // becomes MPI_ERRORS_RETURN. Throws Error.
    explicit MpiGroup(MPI_Comm comm);
    ~MpiGroup() override;

    Ticket start(const GroupCall& call) override;
    bool test(Ticket ticket) override;
    void abandon(Ticket ticket) noexcept override;

  private:
    struct Flight;

    const MPI_Comm comm_;
    int rank_ = -1, size_ = 0;
    // Shared with the flights, whose memory goes back to it: one that is abandoned keeps it for ever.
    const std::shared_ptr<ScratchPool> pool_ = std::make_shared<ScratchPool>();
    std::unordered_map<Ticket, std::unique_ptr<Flight>> flights_;
    Ticket last_ = 0;
};

}  // namespace ddl
