#include "work.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "errors.h"

namespace ddl_torch {
namespace {

// Requests that nobody asks for any more, and what they use. Never destroyed.
struct Dropped {
    struct Entry {
        ddl_request request;
        std::unique_ptr<Held> held;
    };
    std::mutex mutex;  // guards the rest
    std::vector<Entry> entries;
    std::vector<std::unique_ptr<Held>> retained;  // of calls that failed: MPI may use it until the process ends
};

Dropped& dropped() {
    static auto* const made = new Dropped;
    return *made;
}

void retain(std::unique_ptr<Held> held) {
    const std::lock_guard lock(dropped().mutex);
    dropped().retained.push_back(std::move(held));
}

}  // namespace

std::vector<c10::Device> devices_of(const std::vector<at::Tensor>& tensors) {
    std::vector<c10::Device> devices;
    for (const at::Tensor& tensor : tensors) {
        const c10::Device device = tensor.device();
        if (!device.is_cpu() && std::find(devices.begin(), devices.end(), device) == devices.end()) {
            devices.push_back(device);
        }
    }
    return devices;
}

// A work that a reaper keeps alive.
class Work::Kept final : public Awaited {
  public:
    explicit Kept(c10::intrusive_ptr<Work> work) : work_(std::move(work)) {}
    bool test() override { return work_->ended(); }
    void wait() override { work_->wait_for_end(); }
    void settle() override { work_->complete_futures(); }

  private:
    const c10::intrusive_ptr<Work> work_;
};

Work::Work(std::shared_ptr<Group> group, c10d::OpType type, const char* name, std::vector<at::Tensor> results,
           std::vector<at::Tensor> tensors)
    : c10d::Work(-1, type),
      group_(std::move(group)),
      name_(name),
      results_(std::move(results)),
      held_(std::make_unique<Held>(Held{std::move(tensors), -1})) {}

Work::~Work() {
    if (request_ == DDL_REQUEST_NULL) return;
    const std::lock_guard lock(dropped().mutex);
    dropped().entries.push_back({request_, std::move(held_)});
}

void Work::sweep() {
    std::vector<std::unique_ptr<Held>> over;  // freed without the lock: a tensor's end may call anything
    Dropped& all = dropped();
    const std::unique_lock lock(all.mutex, std::try_to_lock);
    if (!lock) return;
    for (auto entry = all.entries.begin(); entry != all.entries.end();) {
        int finished = 0;
        const ddl_result result = ddl_test(&entry->request, &finished);
        if (!finished) {
            ++entry;
            continue;
        }
        (result == DDL_SUCCESS ? over : all.retained).push_back(std::move(entry->held));
        entry = all.entries.erase(entry);
    }
}

void Work::begun(ddl_result result) {
    if (result == DDL_SUCCESS && request_ != DDL_REQUEST_NULL) return;
    // Nothing was started, or the call has blocked.
    if (result != DDL_SUCCESS) {
        const std::exception_ptr error = error_of(result);
        if (result != DDL_ERROR_ARGUMENT) retain(std::move(held_));
        std::rethrow_exception(error);
    }
    end(result, std::unique_lock(requesting_));
}

bool Work::wait(std::chrono::milliseconds timeout) {
    if (timeout.count() > 0) await(timeout);
    settle();
    if (error_) std::rethrow_exception(error_);
    return true;
}

void Work::await(std::chrono::milliseconds limit) {
    const auto deadline = std::chrono::steady_clock::now() + limit;
    for (std::chrono::microseconds nap{20}; !test(); nap = std::min(2 * nap, std::chrono::microseconds(1000))) {
        if (std::chrono::steady_clock::now() > deadline) {
            raise("late", name(), std::chrono::duration<double>(limit).count());
        }
        std::this_thread::sleep_for(nap);
    }
}

// Whether it is over, in whatever way.
bool Work::ended() {
    if (over_) return true;
    std::unique_lock lock(requesting_, std::try_to_lock);
    if (!lock) return false;  // another thread waits for it
    if (over_) return true;
    int finished = 0;
    const ddl_result result = ddl_test(&request_, &finished);
    if (finished) end(result, std::move(lock));
    return finished != 0;
}

void Work::wait_for_end() {
    if (over_) return;
    std::unique_lock lock(requesting_);
    if (!over_) end(ddl_wait(&request_), std::move(lock));
}

bool Work::test() {
    const bool is_over = ended();
    if (is_over) complete_futures();
    return is_over;
}

void Work::settle() {
    wait_for_end();
    complete_futures();
}

// By the thread that was told the result, which holds `requesting`. Completes no future: callbacks may do anything.
void Work::end(ddl_result result, std::unique_lock<std::mutex> requesting) {
    source_ = held_->source;
    if (result != DDL_SUCCESS) {
        error_ = error_of(result);
        retain(std::move(held_));
    }
    const std::unique_ptr<Held> held = std::move(held_);  // freed without the lock: a tensor's end may call anything
    {
        const std::lock_guard lock(futures_mutex_);
        over_ = true;
    }
    requesting.unlock();
}

void Work::complete_futures() {
    std::vector<Future> futures;
    {
        const std::lock_guard lock(futures_mutex_);
        futures.swap(futures_);
    }
    for (const Future& future : futures) complete(future);
}

void Work::complete(const Future& future) const { error_ ? future->setError(error_) : future->markCompleted(results_); }

c10::intrusive_ptr<c10::ivalue::Future> Work::getFuture() {
    auto future =
        c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices_of(results_));
    bool waits = false, reaped = true;
    {
        const std::lock_guard lock(futures_mutex_);
        waits = !over_;
        if (waits) {
            futures_.push_back(future);
            reaped = std::exchange(reaped_, true);
        }
    }
    if (!waits) complete(future);
    if (!reaped) {
        const bool is_message = c10d::isP2POp(opType_);
        (is_message ? group_->in_any_order : group_->in_order)
            .add(std::make_unique<Kept>(c10::intrusive_ptr<Work>::reclaim_copy(this)));
    }
    return future;
}

bool Work::isSuccess() const { return const_cast<Work*>(this)->test() && !error_; }

std::exception_ptr Work::exception() const { return const_cast<Work*>(this)->test() ? error_ : nullptr; }

int Work::sourceRank() const {
    if (opType_ != c10d::OpType::RECV && opType_ != c10d::OpType::RECVANYSOURCE) raise("sourceless", name());
    const_cast<Work*>(this)->wait();
    return source_;
}

}  // namespace ddl_torch
