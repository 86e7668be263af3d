#include "engine/engine.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <new>
#include <utility>

#include "base/backoff.h"
#include "engine/communicator.h"

namespace ddl {
namespace {

constexpr double kWatchSeconds = 0.01;  // how often deaths and stalls are looked for
constexpr unsigned kIdlePolls = 8;      // polls without progress before the clock is looked at
constexpr int kHeldPolls = 16;          // polls of a blocking call before it lets others have the lock
constexpr int kSequenceSlots = 16;      // collectives of a communicator that tags tell apart
static_assert(kMostCommunicators * kSequenceSlots * kOperationTags <=
              1u << (kTagBits - 1));  // the upper half is the mailbox's

Tag first_tag(CommId comm, uint64_t sequence) {
    return (comm * kSequenceSlots + static_cast<Tag>(sequence % kSequenceSlots)) * kOperationTags;
}

void print_warning(const std::string& text) { std::fprintf(stderr, "ddl: warning: %s\n", text.c_str()); }

EngineOptions complete(EngineOptions options) {
    if (!options.warn) options.warn = print_warning;
    return options;
}

}  // namespace

// A caller that makes progress itself. The thread naps meanwhile.
class Engine::Helper {
  public:
    explicit Helper(Engine& engine) : engine_(engine) { ++engine_.helpers_; }
    ~Helper() {
        if (--engine_.helpers_ == 0 && engine_.is_busy()) engine_.wake();
    }
    Helper(const Helper&) = delete;
    Helper& operator=(const Helper&) = delete;

  private:
    Engine& engine_;
};

Engine::Engine(std::unique_ptr<Transport> transport, Plan plan, EngineOptions options)
    : transport_(std::move(transport)),
      options_(complete(std::move(options))),
      out_of_memory_(std::make_shared<const Status>(Status{
          DDL_ERROR_MEMORY, name_of_rank(transport_->rank()) + ": out of memory for the library's own buffers"})),
      free_ids_(kMostCommunicators, 1),
      mailbox_(*transport_, pool_, options_.settle_seconds) {
    if (plan.size() != transport_->size()) {
        throw Error(DDL_ERROR_ARGUMENT, "the plan is for " + std::to_string(plan.size()) + " ranks, but there are " +
                                            std::to_string(transport_->size()));
    }
    std::vector<int> everyone(static_cast<size_t>(transport_->size()));
    for (size_t i = 0; i < everyone.size(); ++i) everyone[i] = static_cast<int>(i);
    create({kWorld, 0}, std::move(everyone), std::move(plan));
    for (const Notice& notice : options_.early) take(notice);
    thread_ = std::thread([this] { serve(); });
}

Engine::~Engine() { shutdown(); }

Engine::CommPtr Engine::find(CommId comm) const {
    const std::lock_guard lock(table_);
    const auto found = comms_.find(comm);
    return found == comms_.end() ? nullptr : found->second;
}

Engine::CommPtr Engine::find(const CommKey& key) const {
    const CommPtr comm = find(key.id);
    return comm && comm->key == key ? comm : nullptr;
}

Engine::CommPtr Engine::create(const CommKey& key, std::vector<int> members, Plan plan) {
    auto comm = std::make_shared<Communicator>();
    comm->key = key;
    comm->group.members = std::move(members);
    for (const int member : comm->group.members) comm->group.names.push_back(name_of_rank(member));
    comm->rank = comm->rank_of(transport_->rank());
    comm->plan = std::move(plan);
    comm->layout = layout_of(comm->plan, options_.tuning);
    comm->patience = options_.patience;
    const std::lock_guard lock(progress_);
    if (shut_) throw Error(DDL_ERROR_STATE, shut_down().message);  // nobody would end what is called on it
    for (const auto& [from, notice] : registry_.take(key)) heed(*comm, from, notice);
    const std::lock_guard table(table_);
    running_.reserve(running_.size() + comms_.size() + 1);  // those that were freed with messages on their way included
    comms_[key.id] = comm;
    free_ids_[key.id] = 0;  // as a split has done already
    return comm;
}

Status Engine::start(CommId id, const Call& call, const RequestPtr& request) {
    try {
        std::list<Active> one;
        one.emplace_back();
        one.front().request = request;
        one.front().call = call;
        const std::lock_guard lock(table_);
        if (shut_) return shut_down();  // under the lock with which shutdown() empties the inbox
        const auto found = comms_.find(id);
        if (found == comms_.end()) return no_such(id);
        const CommPtr& comm = found->second;
        if (Status status = check_buffers(call, comm->rank, comm->size()); !status.ok()) return status;
        one.front().comm = comm;
        inbox_.splice(inbox_.end(), one);
        inbox_full_ = true;
    } catch (const Error& error) {
        return error.status();
    } catch (const std::bad_alloc&) {
        return no_memory();
    }
    return {};
}

Status Engine::submit(CommId comm, const Call& call, RequestPtr* request) {
    try {
        auto made = std::make_shared<Request>();
        Status status = start(comm, call, made);
        if (!status.ok()) return status;
        *request = std::move(made);
    } catch (const std::bad_alloc&) {
        return no_memory();
    }
    wake();
    return {};
}

bool Engine::test(const RequestPtr& request) {
    if (!request->finished()) progress(std::unique_lock(progress_, std::try_to_lock));
    return request->finished();
}

const Status& Engine::wait(const RequestPtr& request) {
    if (request->finished()) return request->status();
    const Helper helper(*this);
    Backoff backoff(options_.spin_polls, options_.nap_seconds);
    while (!request->finished()) {
        progress(std::unique_lock(progress_, std::try_to_lock)) ? backoff.reset() : backoff.pause();
    }
    return request->status();
}

Status Engine::run(CommId comm, const Call& call) {
    Request mine;
    const RequestPtr request(RequestPtr(), &mine);  // shared with nobody who outlives this call: there is no count
    if (!run_alone(comm, call, request)) {
        Status status = start(comm, call, request);
        if (!status.ok()) return status;
    }
    return wait(request);
}

// Begins a call, and moves it on for a moment, under one hold of the lock: one small message between the ranks of a
// host takes no longer than a dozen locks. It does so only if no other thread makes progress and the communicator has
// no earlier call. False if it began nothing: start() then begins the call, or says why not.
bool Engine::run_alone(CommId id, const Call& call, const RequestPtr& request) {
    std::unique_lock held(progress_, std::try_to_lock);
    if (!held || shut_ || inbox_full_) return false;
    const auto found = comms_.find(id);
    if (found == comms_.end() || !found->second->queue.empty()) return false;
    Communicator& comm = *found->second;
    try {
        if (!check_buffers(call, comm.rank, comm.size()).ok()) return false;
        if (spare_.empty()) spare_.emplace_back();
    } catch (const std::exception&) {
        return false;
    }
    spare_.front().request = request;
    spare_.front().call = call;
    add_active(1);
    accept(found->second, spare_);
    poll(comm);
    const int polls = std::min(options_.spin_polls, kHeldPolls);
    for (int i = 0; i < polls && !request->finished(); ++i) poll();
    unlock_and_warn(std::move(held));
    return true;
}

void Engine::serve() {
    // Others' queries wait this long for an answer, and 32 times as long if receives are posted (transport_mpi.cc,
    // transport_shared.cc).
    constexpr auto kIdle = std::chrono::milliseconds(5);
    Backoff backoff(options_.spin_polls, options_.nap_seconds);
    while (!stopping_) {
        if (helpers_ > 0 || !is_busy()) {
            std::unique_lock lock(sleep_);
            wake_.wait_for(lock, kIdle, [&] { return stopping_ || (helpers_ == 0 && is_busy()); });
            if (stopping_) return;
            if (helpers_ > 0) continue;
            backoff.reset();
        }
        progress(std::unique_lock(progress_)) ? backoff.reset() : backoff.pause();
    }
}

// Polls with the lock held, then releases it. True if something moved.
bool Engine::progress(std::unique_lock<std::mutex> held) noexcept {
    if (!held) return false;
    const bool moved = poll();
    unlock_and_warn(std::move(held));
    return moved;
}

// Says what was to be said meanwhile, without the lock: who hears it may be slow, or ask this engine something.
void Engine::unlock_and_warn(std::unique_lock<std::mutex> held) noexcept {
    std::vector<std::string> warnings;
    warnings.swap(warnings_);
    held.unlock();
    for (const std::string& text : warnings) {
        try {
            options_.warn(text);
        } catch (...) {
            print_warning(text);  // no reason to leave the call, which is still under way
        }
    }
}

bool Engine::poll() noexcept {
    if (shut_) return false;
    bool moved = inbox_full_;
    if (inbox_full_) take_submissions();  // elsewhere without this look, which may miss what is being put in
    try {
        transport_->poll();
        for (const CommPtr& comm : running_) moved |= poll(*comm);
        moved |= poll_messages();
        if (moved || (active_ > 0 && idle_polls_++ % kIdlePolls != 0)) return moved;
        take_notices();
        const double now = seconds_now();
        if (now < next_watch_) return false;
        next_watch_ = now + kWatchSeconds;
        for (const CommPtr& comm : running_) watch(*comm, now);
        watch_messages(now);
        drop_idle();
    } catch (const std::bad_alloc&) {
        // Outside of a collective, whose own are its errors: nothing is lost, and it is tried again.
        if (!std::exchange(said_, true)) std::fputs("ddl: warning: out of memory while ranks are watched\n", stderr);
    }
    return moved;
}

// Polls no more those that had no call lately. Not as soon as they have none: most get the next one at once.
void Engine::drop_idle() noexcept {
    for (const CommPtr& comm : running_) comm->listed = !comm->queue.empty();
    const auto is_idle = [](const CommPtr& comm) { return !comm->listed; };
    running_.erase(std::remove_if(running_.begin(), running_.end(), is_idle), running_.end());
}

void Engine::take_submissions() noexcept {
    std::list<Active> taken;
    {
        const std::lock_guard lock(table_);
        taken.swap(inbox_);
        add_active(static_cast<ptrdiff_t>(taken.size()));  // first: is_busy() reads the two without the lock
        inbox_full_ = false;
    }
    while (!taken.empty()) {
        const CommPtr comm = std::move(taken.front().comm);
        accept(comm, taken);
    }
}

// The first of `taken`.
void Engine::accept(const CommPtr& owner, std::list<Active>& taken) noexcept {
    Active& active = taken.front();
    Communicator& comm = *owner;
    comm.queue.splice(comm.queue.end(), taken, taken.begin());
    active.header = make_header(active.call.task, comm.key, comm.sequence, comm.layout, comm.past, active.call.purpose,
                                uses_nccl(comm.plan, active.call.task));
    active.watch = Watch(comm.patience);
    comm.past = past_of(active.header);
    active.request->sequence_ = comm.sequence;
    comm.history[comm.sequence++ % comm.history.size()] = active.header;
    if (!comm.listed) running_.push_back(owner);
    comm.listed = true;
    if (comm.broken) settle(comm);
}

void Engine::begin(Communicator& comm, Active& active) {
    const Task& task = active.call.task;
    const void* input = task.collective == Collective::broadcast ? active.call.output : active.call.input;
    auto schedule = comm.schedules.get(comm.plan, comm.rank, task, options_.tuning);
    if (schedule->stages > 0 && !comm.groups) {
        throw Error(DDL_ERROR_INTERNAL, "a plan with group steps, " + schedule->algorithm + ", but no groups");
    }
    active.operation =
        std::make_unique<Operation>(std::move(schedule), input, active.call.output, active.header, comm.group,
                                    comm.rank, first_tag(comm.key.id, active.header.sequence), options_.window,
                                    *transport_, pool_, Means{comm.groups, active.call.device, active.call.after});
}

bool Engine::poll(Communicator& comm) noexcept {
    if (comm.broken) return settle(comm);
    bool moved = false;
    Cause failure;
    try {
        int left = std::clamp(options_.concurrent, 1, kSequenceSlots);
        // The window is that of all calls together, earlier ones first: a later call fills it up while the tiers of an
        // earlier one run dry. What an earlier one may have in flight never depends on a later one, or ranks that
        // begin them at different times would wait for one another.
        int room = options_.window;
        for (auto active = comm.queue.begin(); active != comm.queue.end() && left-- > 0 && !failure; ++active) {
            if (active->finished()) continue;
            if (!active->operation) {
                begin(comm, *active);
                moved = true;
            }
            if (active->operation->poll(room)) {
                moved = active->has_moved = true;
            }
            room -= active->operation->chunks_in_flight();
            const Status& failed = active->operation->status();
            if (!failed.ok()) failure = cause_of(failed.code, failed.message.c_str());
            if (active->operation->finished()) {
                active->operation.reset();
                finish(*active, nullptr);
                moved = true;
            }
        }
    } catch (const Error& error) {
        failure = cause_of(error.code(), error.what());
    } catch (const std::bad_alloc&) {
        failure = out_of_memory_;
    }
    if (failure) {
        break_comm(comm, std::move(failure), true);
        return true;
    }
    while (!comm.queue.empty() && comm.queue.front().finished()) retire(comm);
    return moved;
}

void Engine::finish(Active& active, Cause error) noexcept {
    add_active(-1);
    const RequestPtr request = std::move(active.request);
    request->error_ = std::move(error);
    request->finished_.store(true, std::memory_order_release);  // the last that is done with it
}

// Takes the first of its queue, which is finished, out of it.
void Engine::retire(Communicator& comm) noexcept {
    if (!spare_.empty()) return comm.queue.pop_front();
    spare_.splice(spare_.begin(), comm.queue, comm.queue.begin());
    spare_.front() = Active{};
}

// Not an addition of the processor's, which would take as long as a lock: all who write hold one.
void Engine::add_active(ptrdiff_t number) noexcept {
    active_.store(active_.load(std::memory_order_relaxed) + static_cast<size_t>(number), std::memory_order_release);
}

Cause Engine::cause_of(Code code, const char* text) const noexcept {
    try {
        return std::make_shared<const Status>(Status{code, text});
    } catch (const std::bad_alloc&) {
        return out_of_memory_;
    }
}

void Engine::wake() {
    // Under the lock, so that it does not fall between the thread's look at its work and its sleep.
    const std::lock_guard lock(sleep_);
    wake_.notify_one();
}

std::string Engine::name_of_rank(int world_rank) const {
    const auto index = static_cast<size_t>(world_rank);
    const std::string name = "rank " + std::to_string(world_rank);
    return index < options_.hosts.size() ? name + " (host " + options_.hosts[index] + ")" : name;
}

size_t Engine::free_communicators() const {
    const std::lock_guard lock(table_);
    return static_cast<size_t>(std::count(free_ids_.begin(), free_ids_.end(), 1));
}

Plan Engine::plan(CommId id) const {
    const CommPtr comm = find(id);
    return comm ? comm->plan : Plan{};
}

int Engine::rank(CommId id) const {
    const CommPtr comm = find(id);
    return comm ? comm->rank : -1;
}

int Engine::size(CommId id) const {
    const CommPtr comm = find(id);
    return comm ? comm->size() : -1;
}

Status Engine::set_groups(CommId id, std::shared_ptr<Groups> groups) {
    const CommPtr comm = find(id);
    if (!comm) return no_such(id);
    const std::lock_guard lock(progress_);
    comm->groups = std::move(groups);
    return {};
}

Status Engine::state(CommId id) const {
    const CommPtr comm = find(id);
    if (!comm) return no_such(id);
    const std::lock_guard lock(progress_);
    return comm->broken ? *comm->broken : Status{};
}

}  // namespace ddl
