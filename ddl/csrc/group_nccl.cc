#include "group_nccl.h"

#include <unordered_map>

#include "range.h"
#include "status.h"

namespace ddl {
namespace {

class NcclGroup final : public GroupComm {
  public:
    NcclGroup(std::shared_ptr<NcclJob> job, NcclComm comm, int size, int rank, char mode)
        : job_(std::move(job)), api_(job_->api()), comm_(comm), size_(size), rank_(rank), mode_(mode) {}

    Ticket start(const GroupCall& call) override {
        if (job_->aborted()) throw Error(DDL_ERROR_STATE, "NCCL's communicators were ended by an earlier error");
        const CurrentGpu current(job_->device().api(), job_->device().gpu());
        try {
            call.gathers ? gather(call) : reduce(call);
            flights_[++last_] = job_->device().events().record(job_->stream());
        } catch (...) {
            job_->abort();  // a part of it may be under way
            throw;
        }
        return last_;
    }

    bool test(Ticket ticket) override {
        const auto found = flights_.find(ticket);
        if (!job_->device().events().passed(found->second)) {
            // What NCCL finds on its own, such as a peer that is gone.
            constexpr unsigned kEvery = 256;
            if (++tests_ % kEvery != 0) return false;
            int error = 0;
            api_.check(api_.async_error(comm_, &error), "ncclCommGetAsyncError", comm_);
            constexpr int kInProgress = 7;
            if (error != kInProgress) api_.check(error, "an NCCL collective", comm_);
            return false;
        }
        job_->device().events().give(found->second);
        flights_.erase(found);
        return true;
    }

    void abandon(Ticket ticket) noexcept override {
        job_->abort();
        flights_.erase(ticket);  // its event stays recorded: it is not used again
    }

  private:
    Range part(const GroupCall& call, int rank) const { return Range{0, call.count}.part(rank, size_); }
    bool is_even(const GroupCall& call) const { return call.count % static_cast<uint64_t>(size_) == 0; }

    // Several calls as one of NCCL's.
    template <typename Calls>
    void together(Calls calls) {
        api_.check(api_.group_start(), "ncclGroupStart", comm_);
        try {
            calls();
        } catch (...) {
            static_cast<void>(api_.group_end());
            throw;
        }
        api_.check(api_.group_end(), "ncclGroupEnd", comm_);
    }

    void reduce(const GroupCall& call) {
        const int type = nccl_type(call.type), op = nccl_op(call.op);
        if (is_even(call)) {
            const auto each = static_cast<size_t>(call.count) / static_cast<size_t>(size_);
            return api_.check(api_.reduce_scatter(call.from, call.to, each, type, op, comm_, job_->stream()),
                              "ncclReduceScatter", comm_);
        }
        // Parts of different sizes, which ncclReduceScatter cannot: each to its owner.
        const auto* const from = static_cast<const std::byte*>(call.from);
        together([&] {
            for (int i = 0; i < size_; ++i) {
                const Range range = part(call, i);
                if (range.size() == 0) continue;
                api_.check(api_.reduce(from + range.begin * size_of(call.type), call.to, range.size(), type, op, i,
                                       comm_, job_->stream()),
                           "ncclReduce", comm_);
            }
        });
    }

    void gather(const GroupCall& call) {
        const int type = nccl_type(call.type);
        const size_t element = size_of(call.type);
        auto* const to = static_cast<std::byte*>(call.to);
        const Range own = part(call, rank_);
        if (mode_ == 'b') {
            return together([&] {
                for (int distance = 1; distance < size_; ++distance) {
                    const int next = (rank_ + distance) % size_, previous = (rank_ - distance + size_) % size_;
                    const Range theirs = part(call, previous);
                    if (own.size() > 0) {
                        api_.check(api_.send(to + own.begin * element, own.size(), type, next, comm_, job_->stream()),
                                   "ncclSend", comm_);
                    }
                    if (theirs.size() > 0) {
                        api_.check(api_.receive(to + theirs.begin * element, theirs.size(), type, previous, comm_,
                                                job_->stream()),
                                   "ncclRecv", comm_);
                    }
                }
            });
        }
        if (is_even(call)) {
            return api_.check(api_.all_gather(to + own.begin * element, to, own.size(), type, comm_, job_->stream()),
                              "ncclAllGather", comm_);
        }
        together([&] {
            for (int i = 0; i < size_; ++i) {
                const Range range = part(call, i);
                std::byte* const at = to + range.begin * element;
                if (range.size() == 0) continue;
                api_.check(api_.broadcast(at, at, range.size(), type, i, comm_, job_->stream()), "ncclBroadcast",
                           comm_);
            }
        });
    }

    const std::shared_ptr<NcclJob> job_;
    const NcclApi& api_;
    const NcclComm comm_;
    const int size_, rank_;
    const char mode_;
    std::unordered_map<Ticket, CudaEvent> flights_;
    Ticket last_ = 0;
    unsigned tests_ = 0;
};

}  // namespace

NcclJob::NcclJob(const NcclApi& api, std::shared_ptr<CudaDevice> device)
    : api_(api), device_(std::move(device)), stream_(make_stream(device_->api(), device_->gpu())) {}

NcclComm NcclJob::join(const NcclId& id, int size, int rank) {
    const CurrentGpu current(device_->api(), device_->gpu());
    NcclComm comm = nullptr;
    api_.check(api_.init_rank(&comm, size, id, rank), "ncclCommInitRank");
    comms_.push_back(comm);
    return comm;
}

void NcclJob::abort() noexcept {
    if (aborted_) return;
    aborted_ = true;
    // All of them first: those on the stream wait for one another.
    for (const NcclComm comm : comms_) static_cast<void>(api_.abort(comm));
    static_cast<void>(device_->api().stream_synchronize(stream_));
}

std::unique_ptr<GroupComm> make_nccl_group(std::shared_ptr<NcclJob> job, const NcclId& id, int size, int rank,
                                           char mode) {
    const NcclComm comm = job->join(id, size, rank);
    return std::make_unique<NcclGroup>(std::move(job), comm, size, rank, mode);
}

}  // namespace ddl
