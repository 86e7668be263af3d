#include "engine/loop.h"

#include <algorithm>
#include <cstdio>
#include <new>
#include <utility>

#include "base/backoff.h"

namespace ddl {
namespace {

constexpr double kWatchSeconds = 0.01;  // how often deaths and stalls are looked for
constexpr unsigned kIdlePolls = 8;      // polls without progress before the clock is looked at
constexpr int kHeldPolls = 16;          // polls of a blocking call before it lets others have the lock
constexpr int kFastLooks = 300;         // for each message of a call on the fast path, in 1 to 2 us
constexpr unsigned kFastCalls = 128;    // of so many calls one takes the ordinary path, which polls all that there is
// Of a caller that waits. A rank that naps makes those nap that wait for it, one after the other. With eight ranks on
// two cores, and other processes that interrupt them, a small allreduce took six times as long with 200 yields. The
// thread yields less, beside callers that compute.
constexpr int kYields = 4000;
// The thread's rests, in seconds: each is kRestGrowth times the one before, up to kLongRest. From then on a message
// ends a rest; if none comes, it lasts for kLongestRest.
constexpr double kShortRest = 5e-3, kRestGrowth = 1.5, kLongRest = 50e-3, kLongestRest = 1;
constexpr int kSequenceSlots = 16;  // collectives of a communicator that tags tell apart
static_assert(kMostCommunicators * kSequenceSlots * kOperationTags <=
              1u << (kTagBits - 1));  // the upper half is the mailbox's

// Calls on the fast path are too small to be timed: a halved allreduce sends its half in one message.
static_assert(2 * kInlineBytes < kTimedBytes);

Tag first_tag(CommId comm, uint64_t sequence) {
    return (comm * kSequenceSlots + static_cast<Tag>(sequence % kSequenceSlots)) * kOperationTags;
}

const void* input_of(const Call& call) {
    return call.task.collective == Collective::broadcast ? call.output : call.input;
}

// True if the call has the task of the last one, whose operation has a fast path.
bool has_fast_path(const Communicator& comm, const Call& call) {
    return !comm.broken && comm.reusable && comm.reusable->is_fast() && comm.reusable->schedule().task == call.task &&
           !call.device && !call.after;
}

}  // namespace

// A caller that makes progress itself. The thread rests meanwhile.
class Loop::Helper {
  public:
    explicit Helper(Loop& loop) : loop_(loop) { ++loop_.helpers_; }
    ~Helper() {
        if (--loop_.helpers_ > 0) return;
        if (loop_.is_busy() || loop_.has_left_work()) loop_.wake();
    }
    Helper(const Helper&) = delete;
    Helper& operator=(const Helper&) = delete;

  private:
    Loop& loop_;
};

Status Loop::start(CommId id, const Call& call, const RequestPtr& request) {
    try {
        std::list<Active> one;
        one.emplace_back();
        one.front().request = request;
        one.front().call = call;
        const CommPtr comm = core_.table.find(id);
        if (!comm) return core_.shut ? shut_down() : no_such(id);
        if (Status status = check_buffers(call, comm->rank, comm->size()); !status.ok()) return status;
        one.front().comm = comm;
        const std::lock_guard lock(in_);
        if (core_.shut) return shut_down();  // under the lock with which the inbox is emptied for the last time
        inbox_.splice(inbox_.end(), one);
        inbox_full_ = true;
    } catch (const Error& error) {
        return error.status();
    } catch (const std::bad_alloc&) {
        return no_memory();
    }
    return {};
}

Status Loop::submit(CommId comm, const Call& call, RequestPtr* request) {
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

Status Loop::post(CommId comm, int peer, Mail mail, RequestPtr* request) {
    Status status = messages_.post(comm, peer, std::move(mail), request);
    if (status.ok()) wake();
    return status;
}

bool Loop::test(const RequestPtr& request) {
    if (!request->finished()) progress(std::unique_lock(core_.progress, std::try_to_lock));
    return request->finished();
}

const Status& Loop::wait(const RequestPtr& request) {
    if (request->finished()) return request->status();
    const Helper helper(*this);
    Backoff backoff(core_.options.spin_polls, core_.options.nap_seconds, kYields);
    bool all = false;
    while (!request->finished()) {
        std::unique_lock held(core_.progress, std::try_to_lock);
        const int messages = held ? core_.transport->ready() : -1;  // another thread takes those that are there
        const bool moved = progress(std::move(held), all);
        if (moved) backoff.reset();
        all = !moved && backoff.pause(messages);
    }
    return request->status();
}

Status Loop::run(CommId comm, const Call& call) {
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
bool Loop::run_alone(CommId id, const Call& call, const RequestPtr& request) {
    std::unique_lock held(core_.progress, std::try_to_lock);
    if (!held || core_.shut || inbox_full_) return false;
    const CommPtr* const found = core_.table.find_held(id);
    if (!found || !(*found)->queue.empty()) return false;
    Communicator& comm = **found;
    try {
        if (!check_buffers(call, comm.rank, comm.size()).ok()) return false;
        if (spare_.empty()) spare_.emplace_back();
    } catch (const std::exception&) {
        return false;
    }
    Active& active = spare_.front();
    Cause failure;
    // Not if ranks share cores: the awaited one may need this core. Nor if something else is in flight, which would
    // wait.
    const bool may_spin = core_.options.spin_polls > 0 && core_.pending() == 0;
    if (may_spin && has_fast_path(comm, call) && ++fast_calls_ % kFastCalls != 0) {
        active.header = enter(comm, call, *request);
        failure = try_fast_path(comm, call, active.header);
        if (!failure && comm.reusable->finished()) {
            request->finish(nullptr);
            return true;
        }
        active.operation = std::move(comm.reusable);
    }
    active.request = request;
    active.call = call;
    core_.begin(1);
    accept(*found, spare_);
    if (failure) core_.break_comm(comm, std::move(failure));
    poll(comm);
    const int polls = std::min(core_.options.spin_polls, kHeldPolls);
    for (int i = 0; i < polls && !request->finished(); ++i) poll();
    if (request->finished() && rests_long_ && core_.transport->is_busy()) wake();
    unlock_and_warn(std::move(held));
    return true;
}

// Runs a call on the fast path for as long as its messages come at once. Returns an error if memory ran out.
Cause Loop::try_fast_path(Communicator& comm, const Call& call, const Header& header) noexcept {
    Operation& operation = *comm.reusable;
    operation.repeat(input_of(call), call.output, header, first_tag(comm.key.id, header.sequence));
    try {
        operation.run_fast(kFastLooks);
    } catch (const std::bad_alloc&) {
        return core_.out_of_memory;
    }
    if (operation.finished()) count(comm, call, operation.timing());
    return nullptr;
}

void Loop::serve() {
    Backoff backoff(core_.options.spin_polls, core_.options.nap_seconds);
    double seconds = kShortRest;
    bool all = false;
    while (!stopping_) {
        if (helpers_ > 0 || !is_busy()) {
            seconds = rest(seconds);
            if (helpers_ > 0) continue;
            all = true;
            backoff.reset();
        } else {
            seconds = kShortRest;
        }
        const bool moved = progress(std::unique_lock(core_.progress), all);
        if (moved) backoff.reset();
        all = !moved && backoff.pause(core_.transport->ready());
    }
}

// True if a call has left something to the transport and the thread rests for long.
bool Loop::has_left_work() noexcept {
    if (!rests_long_) return false;
    const std::unique_lock held(core_.progress, std::try_to_lock);
    return !held || core_.transport->is_busy();
}

// Lets the thread rest. Returns for how long it may rest the next time. Short rests ignore messages: they may be those
// of a call that this rank is about to make.
double Loop::rest(double seconds) noexcept {
    rests_long_ = seconds > kShortRest;  // first: who leaves something after the look below wakes the thread
    int messages = -1;
    if (helpers_ == 0) {
        const std::lock_guard held(core_.progress);
        if (core_.transport->is_busy()) {
            seconds = kShortRest;
            rests_long_ = false;
        }
        if (seconds >= kLongRest) messages = core_.transport->ready();
    }
    const bool ended = waker_.rest(messages < 0 ? seconds : kLongestRest, messages);
    rests_long_ = false;
    return ended ? kShortRest : std::min(seconds * kRestGrowth, kLongRest);
}

// Polls with the lock held, then releases it. True if something moved.
bool Loop::progress(std::unique_lock<std::mutex> held, bool all) noexcept {
    if (!held) return false;
    const bool moved = poll(all);
    unlock_and_warn(std::move(held));
    return moved;
}

// Says what was to be said meanwhile, without the lock: who hears it may be slow, or ask this engine something.
void Loop::unlock_and_warn(std::unique_lock<std::mutex> held) noexcept {
    const std::vector<std::string> warnings = std::exchange(core_.warnings, {});
    held.unlock();
    for (const std::string& text : warnings) {
        try {
            core_.options.warn(text);
        } catch (...) {
            std::fprintf(stderr, "ddl: warning: %s\n",
                         text.c_str());  // no reason to leave the call, which is still under way
        }
    }
}

// `all`: also what the transport does less often than with each poll.
bool Loop::poll(bool all) noexcept {
    if (core_.shut) return false;
    bool moved = inbox_full_;
    if (inbox_full_) take_submissions();  // elsewhere without this look, which may miss what is being put in
    try {
        all ? core_.transport->poll_all() : core_.transport->poll();
        for (const CommPtr& comm : running_) moved |= poll(*comm);
        moved |= messages_.poll();
        if (moved || (core_.pending() > 0 && idle_polls_++ % kIdlePolls != 0)) return moved;
        diagnosis_.take_notices();
        const double now = seconds_now();
        if (now < next_watch_) return false;
        next_watch_ = now + kWatchSeconds;
        for (const CommPtr& comm : running_) diagnosis_.watch(*comm, now);
        messages_.watch(now);
        drop_idle();
    } catch (const std::bad_alloc&) {
        // Outside of a collective, whose own are its errors: nothing is lost, and it is tried again.
        if (!std::exchange(said_, true)) std::fputs("ddl: warning: out of memory while ranks are watched\n", stderr);
    }
    return moved;
}

// Polls no more those that had no call lately. Not as soon as they have none: most get the next one at once.
void Loop::drop_idle() noexcept {
    for (const CommPtr& comm : running_) comm->listed = !comm->queue.empty();
    const auto is_idle = [](const CommPtr& comm) { return !comm->listed; };
    running_.erase(std::remove_if(running_.begin(), running_.end(), is_idle), running_.end());
}

void Loop::take_submissions() noexcept {
    std::list<Active> taken;
    {
        const std::lock_guard lock(in_);
        taken.swap(inbox_);
        core_.begin(taken.size());  // first: is_busy() reads the two without the lock
        inbox_full_ = false;
    }
    while (!taken.empty()) {
        const CommPtr comm = std::move(taken.front().comm);
        accept(comm, taken);
    }
}

// Makes the header of the communicator's next call, and keeps it for those who ask.
Header Loop::enter(Communicator& comm, const Call& call, Request& request) noexcept {
    const Header header = make_header(call.task, comm.key, comm.sequence, comm.layout, comm.past, call.purpose,
                                      uses_nccl(comm.plan, call.task));
    comm.past = past_of(header);
    request.sequence = comm.sequence;
    comm.history[comm.sequence++ % comm.history.size()] = header;
    return header;
}

// Takes the first of `taken`. If it has an operation, it comes from the fast path, and has its header.
void Loop::accept(const CommPtr& owner, std::list<Active>& taken) noexcept {
    Active& active = taken.front();
    Communicator& comm = *owner;
    comm.queue.splice(comm.queue.end(), taken, taken.begin());
    if (!active.operation) active.header = enter(comm, active.call, *active.request);
    active.watch = Watch(comm.patience);
    if (comm.broken) return static_cast<void>(core_.settle(comm));
    if (!comm.listed) running_.push_back(owner);
    comm.listed = true;
}

void Loop::begin(Communicator& comm, Active& active) {
    const Task& task = active.call.task;
    auto schedule = comm.schedules.get(comm.plan, comm.rank, task, core_.options.tuning);
    if (schedule->stages > 0 && !comm.groups) {
        throw Error(DDL_ERROR_INTERNAL, "a plan with group steps, " + schedule->algorithm + ", but no groups");
    }
    const Tag tag = first_tag(comm.key.id, active.header.sequence);
    if (comm.reusable && &comm.reusable->schedule() == schedule.get() && !active.call.device && !active.call.after) {
        comm.reusable->repeat(input_of(active.call), active.call.output, active.header, tag);
        active.operation = std::move(comm.reusable);
    } else {
        active.operation =
            std::make_unique<Operation>(std::move(schedule), input_of(active.call), active.call.output, active.header,
                                        comm.group, comm.rank, tag, core_.options.window, *core_.transport, core_.pool,
                                        Means{comm.groups, active.call.device, active.call.after});
    }
    if (!active.operation->is_held_back()) clock(comm, active);
}

// Begins to time a call, if it is one that is timed.
void Loop::clock(const Communicator& comm, Active& active) {
    const double allreduces = timed_bytes(comm, active.call);
    if (allreduces > 0) core_.tally.begin(active.operation->timing(), seconds_now(), allreduces);
}

// Bytes of the allreduce that a timed call is worth; 0: it is not timed. Only calls among all ranks have one measure.
double Loop::timed_bytes(const Communicator& comm, const Call& call) const {
    const bool halves = call.task.collective == Collective::reduce_scatter ||  // each is half an allreduce
                        call.task.collective == Collective::allgather;
    if (!halves && call.task.collective != Collective::allreduce) return 0;
    if (comm.size() == 1 || comm.size() != core_.transport->size() || call.purpose != Purpose::user) return 0;
    const uint64_t bytes = bytes_of(comm, call);
    if (bytes < kTimedBytes) return 0;
    return static_cast<double>(bytes) / (halves ? 2 : 1);
}

uint64_t Loop::bytes_of(const Communicator& comm, const Call& call) const {
    const Extent extent = extent_of(call.task, comm.size());
    return std::max(extent.input, extent.output);
}

// Counts a call that has finished.
void Loop::count(const Communicator& comm, const Call& call, const Timing& timing) {
    if (call.purpose != Purpose::user) return;
    const int from = timing.heard_from;
    core_.tally.finish(bytes_of(comm, call), timing, timing.began != 0 ? seconds_now() : 0,
                       from < 0 ? from : comm.group.members[static_cast<size_t>(from)]);
}

bool Loop::poll(Communicator& comm) noexcept {
    if (comm.broken) return core_.settle(comm);
    bool moved = false;
    Cause failure;
    try {
        int left = std::clamp(core_.options.concurrent, 1, kSequenceSlots);
        // The window is that of all calls together, earlier ones first: a later call fills it up while the tiers of an
        // earlier one run dry. What an earlier one may have in flight never depends on a later one, or ranks that
        // begin them at different times would wait for one another.
        int room = core_.options.window;
        for (auto active = comm.queue.begin(); active != comm.queue.end() && left-- > 0 && !failure; ++active) {
            if (active->finished()) continue;
            if (!active->operation) {
                begin(comm, *active);
                moved = true;
            }
            if (active->operation->begin_after_device()) clock(comm, *active);  // the GPU's queue is no call
            if (active->operation->poll(room)) {
                moved = active->has_moved = true;
            }
            room -= active->operation->chunks_in_flight();
            const Status& failed = active->operation->status();
            if (!failed.ok()) failure = core_.cause(failed.code, failed.message);
            if (active->operation->finished()) {
                count(comm, active->call, active->operation->timing());
                if (active->operation->is_light()) comm.reusable = std::move(active->operation);
                active->operation.reset();
                core_.finish(active->request, nullptr);
                moved = true;
            }
        }
    } catch (const Error& error) {
        failure = core_.cause(error.code(), error.what());
    } catch (const std::bad_alloc&) {
        failure = core_.out_of_memory;
    }
    if (failure) {
        core_.break_comm(comm, std::move(failure));
        return true;
    }
    while (!comm.queue.empty() && comm.queue.front().finished()) retire(comm);
    return moved;
}

// Takes the first of its queue, which is finished, out of it.
void Loop::retire(Communicator& comm) noexcept {
    if (!spare_.empty()) return comm.queue.pop_front();
    spare_.splice(spare_.begin(), comm.queue, comm.queue.begin());
    spare_.front() = Active{};
}

void Loop::start() {
    thread_ = std::thread([this] { serve(); });
}

void Loop::stop() {
    stopping_ = true;
    wake();
    if (thread_.joinable()) thread_.join();
}

void Loop::make_room() {
    running_.reserve(running_.size() + core_.table.size() +
                     1);  // those that were freed with messages on their way included
}

void Loop::drain() noexcept {
    for (Backoff backoff(0, 1e-3); core_.pending() > 0; backoff.pause(core_.transport->ready())) {
        core_.transport->poll_all();
        for (const CommPtr& comm : running_) core_.settle(*comm);
        messages_.poll();
    }
    for (const CommPtr& comm : running_) core_.abandon(*comm);
    running_.clear();
}

}  // namespace ddl
