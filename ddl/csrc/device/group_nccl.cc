#include "device/group_nccl.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>

#include "base/range.h"
#include "base/status.h"

namespace ddl {
namespace {

class NcclGroup final : public GroupComm {
  public:
    NcclGroup(std::shared_ptr<NcclJob> job, NcclComm comm, int size, int rank, char mode)
        : job_(std::move(job)), api_(job_->api()), comm_(comm), size_(size), rank_(rank), mode_(mode) {}

    bool ready() override { return !job_->preparing(); }

    Ticket start(const GroupCall& call) override {
        if (job_->aborted()) throw Error(DDL_ERROR_STATE, "NCCL's communicators were ended by an earlier error");
        const CurrentGpu current(job_->device().api(), job_->device().gpu());
        try {
            CudaEvent& event = flights_[++last_];
            if (call.gathers ? gather(call) : reduce(call)) {
                job_->set_preparing(true);  // nothing is in the stream yet that an event could follow
            } else {
                event = job_->device().events().record(job_->stream());
            }
        } catch (...) {
            job_->abort();  // a part of it may be under way
            throw;
        }
        return last_;
    }

    bool test(Ticket ticket) override {
        CudaEvents& events = job_->device().events();
        const auto found = flights_.find(ticket);
        CudaEvent& event = found->second;
        if (!event) {
            if (job_->is_busy(comm_)) return false;
            event = events.record(job_->stream());
            job_->set_preparing(false);
            return false;
        }
        if (!events.passed(event)) {
            constexpr unsigned kEvery = 256;
            if (++tests_ % kEvery == 0) job_->is_busy(comm_);
            return false;
        }
        job_->is_busy(comm_);  // a kernel ends, too, if NCCL has given up
        events.give(event);
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

    // Each of these is true if NCCL has still to prepare it.
    bool pends(int code, const char* call) const { return api_.in_progress(code, call, comm_); }

    // Several calls as one of NCCL's.
    template <typename Calls>
    bool together(Calls calls) {
        api_.check(api_.group_start(), "ncclGroupStart", comm_);
        try {
            calls();
        } catch (...) {
            static_cast<void>(api_.group_end());
            throw;
        }
        return pends(api_.group_end(), "ncclGroupEnd");
    }

    bool reduce(const GroupCall& call) {
        const int type = nccl_type(call.type), op = nccl_op(call.op);
        if (is_even(call)) {
            const auto each = static_cast<size_t>(call.count) / static_cast<size_t>(size_);
            return pends(api_.reduce_scatter(call.from, call.to, each, type, op, comm_, job_->stream()),
                         "ncclReduceScatter");
        }
        // Parts of different sizes, which ncclReduceScatter cannot: each to its owner.
        const auto* const from = static_cast<const std::byte*>(call.from);
        return together([&] {
            for (int i = 0; i < size_; ++i) {
                const Range range = part(call, i);
                if (range.size() == 0) continue;
                pends(api_.reduce(from + range.begin * size_of(call.type), call.to, range.size(), type, op, i, comm_,
                                  job_->stream()),
                      "ncclReduce");
            }
        });
    }

    bool gather(const GroupCall& call) {
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
                        pends(api_.send(to + own.begin * element, own.size(), type, next, comm_, job_->stream()),
                              "ncclSend");
                    }
                    if (theirs.size() > 0) {
                        pends(api_.receive(to + theirs.begin * element, theirs.size(), type, previous, comm_,
                                           job_->stream()),
                              "ncclRecv");
                    }
                }
            });
        }
        if (is_even(call)) {
            return pends(api_.all_gather(to + own.begin * element, to, own.size(), type, comm_, job_->stream()),
                         "ncclAllGather");
        }
        return together([&] {
            for (int i = 0; i < size_; ++i) {
                const Range range = part(call, i);
                std::byte* const at = to + range.begin * element;
                if (range.size() == 0) continue;
                pends(api_.broadcast(at, at, range.size(), type, i, comm_, job_->stream()), "ncclBroadcast");
            }
        });
    }

    const std::shared_ptr<NcclJob> job_;
    const NcclApi& api_;
    const NcclComm comm_;
    const int size_, rank_;
    const char mode_;
    std::unordered_map<Ticket, CudaEvent> flights_;  // null while NCCL prepares it
    Ticket last_ = 0;
    unsigned tests_ = 0;
};

// The aborts of several communicators: all at once, as each waits for the whole GPU, where another's kernel may wait
// for a peer that is gone (NVIDIA/nccl issue 1013).
class Aborts {
  public:
    explicit Aborts(size_t count) : left_(count) {}

    void ended() {
        {
            const std::lock_guard lock(mutex_);
            --left_;
        }
        changed_.notify_all();
    }
    // True if all have ended in this time.
    bool wait(double seconds) {
        std::unique_lock lock(mutex_);
        return changed_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return left_ == 0; });
    }

  private:
    std::mutex mutex_;
    std::condition_variable changed_;
    size_t left_;
};

}  // namespace

NcclJob::NcclJob(const NcclApi& api, std::shared_ptr<CudaDevice> device)
    : api_(api), device_(std::move(device)), stream_(make_stream(device_->api(), device_->gpu())) {}

NcclComm NcclJob::join(const NcclId& id, int size, int rank) {
    const CurrentGpu current(device_->api(), device_->gpu());
    NcclComm comm = nullptr;
    NcclConfig config;
    comms_.reserve(comms_.size() + 1);
    const int code = api_.init_rank(&comm, size, id, rank, &config);
    if (comm) comms_.push_back(comm);
    api_.in_progress(code, "ncclCommInitRankConfig", comm);
    return comm;
}

bool NcclJob::joined() const {
    const auto is_joining = [&](NcclComm comm) {
        int state = 0;
        api_.check(api_.async_error(comm, &state), "ncclCommGetAsyncError", comm);
        return api_.in_progress(state, "ncclCommInitRankConfig", comm);
    };
    return std::none_of(comms_.begin(), comms_.end(), is_joining);
}

bool NcclJob::is_busy(NcclComm comm) const {
    int state = 0;
    api_.check(api_.async_error(comm, &state), "ncclCommGetAsyncError", comm);
    return api_.in_progress(state, "an NCCL collective", comm);
}

void NcclJob::abort() noexcept {
    if (std::exchange(aborted_, true)) return;
    constexpr double kSeconds = 3;
    try {
        const auto aborts = std::make_shared<Aborts>(comms_.size());
        for (const NcclComm comm : comms_) {
            const auto body = [&api = api_, &cuda = device_->api(), gpu = device_->gpu(), comm, aborts] {
                static_cast<void>(cuda.set_device(gpu));
                static_cast<void>(api.abort(comm));
                aborts->ended();
            };
            std::thread(body).detach();
        }
        if (!aborts->wait(kSeconds)) return;
        static_cast<void>(device_->api().stream_synchronize(stream_));
        static_cast<void>(device_->api().stream_destroy(stream_));
    } catch (const std::exception&) {
        // No memory, or no thread to be had: what was not ended is left, as after the 3 seconds.
    }
}

std::unique_ptr<GroupComm> make_nccl_group(std::shared_ptr<NcclJob> job, NcclComm comm, int size, int rank, char mode) {
    return std::make_unique<NcclGroup>(std::move(job), comm, size, rank, mode);
}

}  // namespace ddl
