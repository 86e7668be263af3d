#include "engine.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <new>

#include "backoff.h"
#include "communicator.h"

namespace ddl {
namespace {

constexpr double kWatchSeconds = 0.01;  // how often deaths and stalls are looked for
constexpr int kSequenceSlots = 16;      // collectives of a communicator that tags tell apart
static_assert(kMostCommunicators * kSequenceSlots * kOperationTags <= 1u << kTagBits);

Tag first_tag(CommId comm, uint64_t sequence) {
    return (comm * kSequenceSlots + static_cast<Tag>(sequence % kSequenceSlots)) * kOperationTags;
}

Status no_such(CommId comm) {
    return {DDL_ERROR_STATE, "there is no communicator " + std::to_string(comm) + ": it was freed or never made"};
}

Status shut_down() { return {DDL_ERROR_STATE, "the library was finalized: call ddl_init first"}; }

}  // namespace

// A caller that makes progress itself. The thread naps meanwhile.
class Engine::Helper {
  public:
    explicit Helper(Engine& engine) : engine_(engine) { ++engine_.helpers_; }
    ~Helper() {
        if (--engine_.helpers_ == 0 && engine_.busy_) engine_.wake();
    }
    Helper(const Helper&) = delete;
    Helper& operator=(const Helper&) = delete;

  private:
    Engine& engine_;
};

Engine::Engine(std::unique_ptr<Transport> transport, Plan plan, EngineOptions options)
    : transport_(std::move(transport)), options_(std::move(options)), free_ids_(kMostCommunicators, 1) {
    if (plan.size() != transport_->size()) {
        throw Error(DDL_ERROR_ARGUMENT, "the plan is for " + std::to_string(plan.size()) + " ranks, but there are " +
                                            std::to_string(transport_->size()));
    }
    std::vector<int> everyone(static_cast<size_t>(transport_->size()));
    for (size_t i = 0; i < everyone.size(); ++i) everyone[i] = static_cast<int>(i);
    create({kWorld, 0}, std::move(everyone), std::move(plan));
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
    const std::lock_guard lock(progress_);
    for (const auto& [from, notice] : registry_.take(key)) heed(*comm, from, notice);
    const std::lock_guard table(table_);
    free_ids_[key.id] = 0;  // as a split has done already
    comms_[key.id] = comm;
    return comm;
}

Status Engine::start(CommId id, const Call& call, RequestPtr* request, bool and_wake) {
    if (shut_) return shut_down();
    const CommPtr comm = find(id);
    if (!comm) return no_such(id);
    try {
        if (Status status = check_buffers(call, comm->rank, comm->size()); !status.ok()) return status;
        auto made = std::make_shared<Request>();
        {
            const std::lock_guard lock(table_);
            if (shut_) return shut_down();  // checked again: shutdown() empties the inbox under this lock
            inbox_.push_back({comm, call, made});
            inbox_full_ = true;
            busy_ = true;
        }
        *request = std::move(made);
    } catch (const Error& error) {
        return error.status();
    } catch (const std::bad_alloc&) {
        return {DDL_ERROR_MEMORY, "out of memory"};
    }
    if (and_wake) this->wake();
    return {};
}

Status Engine::submit(CommId comm, const Call& call, RequestPtr* request) { return start(comm, call, request, true); }

bool Engine::test(const RequestPtr& request) {
    if (!request->finished() && progress_.try_lock()) {
        const std::lock_guard lock(progress_, std::adopt_lock);
        poll();
    }
    return request->finished();
}

Status Engine::wait(const RequestPtr& request) {
    const Helper helper(*this);
    Backoff backoff(options_.spin_polls, options_.nap_seconds);
    while (!request->finished()) {
        bool moved = false;
        if (progress_.try_lock()) {
            const std::lock_guard lock(progress_, std::adopt_lock);
            moved = poll();
        }
        moved ? backoff.reset() : backoff.pause();
    }
    return request->status();
}

Status Engine::run(CommId comm, const Call& call) {
    RequestPtr request;
    const Status status = start(comm, call, &request, false);
    return status.ok() ? wait(request) : status;
}

void Engine::serve() {
    constexpr auto kIdle = std::chrono::milliseconds(5);  // others' queries wait this long for an answer
    Backoff backoff(options_.spin_polls, options_.nap_seconds);
    while (!stopping_) {
        if (helpers_ > 0 || !busy_) {
            std::unique_lock lock(sleep_);
            wake_.wait_for(lock, kIdle, [&] { return stopping_ || (helpers_ == 0 && busy_); });
            if (stopping_) return;
            if (helpers_ > 0) continue;
            backoff.reset();
        }
        bool moved = false;
        {
            const std::lock_guard lock(progress_);
            try {
                moved = poll();
            } catch (const std::bad_alloc&) {
                // Outside of a collective, whose own are its errors: nothing is lost, and it is tried again.
                std::fputs("ddl: warning: out of memory in the progress thread\n", stderr);
            }
        }
        moved ? backoff.reset() : backoff.pause();
    }
}

bool Engine::poll() {
    if (shut_) return false;
    if (inbox_full_) take_submissions();  // elsewhere without this look, which may miss what is being put in
    transport_->poll();
    bool moved = false;
    for (const CommPtr& comm : running_) moved |= poll(*comm);
    if (!moved) {
        take_notices();
        const double now = seconds_now();
        if (now >= next_watch_) {
            next_watch_ = now + kWatchSeconds;
            for (const CommPtr& comm : running_) watch(*comm, now);
        }
    }
    const auto is_idle = [](const CommPtr& comm) { return comm->queue.empty(); };
    running_.erase(std::remove_if(running_.begin(), running_.end(), is_idle), running_.end());
    if (active_ == 0) {
        const std::lock_guard lock(table_);
        busy_ = !inbox_.empty();
    }
    return moved;
}

void Engine::take_submissions() {
    std::vector<Submission> taken;
    {
        const std::lock_guard lock(table_);
        taken.swap(inbox_);
        inbox_full_ = false;
    }
    for (Submission& submission : taken) accept(submission);
}

void Engine::accept(Submission& submission) {
    Communicator& comm = *submission.comm;
    ++active_;
    const bool idle = comm.queue.empty();
    comm.queue.push_back(
        {std::move(submission.request), submission.call, {}, seconds_now(), 0, Watch(options_.patience), {}});
    Active& active = comm.queue.back();
    active.moved = active.submitted;
    active.header = make_header(submission.call.task, comm.key, comm.sequence, comm.layout, comm.past,
                                submission.call.of_split, uses_nccl(comm.plan, submission.call.task));
    comm.past = past_of(active.header);
    active.request->sequence_ = comm.sequence;
    comm.history[comm.sequence++ % comm.history.size()] = active.header;
    if (idle) running_.push_back(submission.comm);
    if (!comm.broken.ok()) break_comm(comm, comm.broken, false);
}

bool Engine::begin(Communicator& comm, Active& active) {
    const Task& task = active.call.task;
    const void* input = task.collective == Collective::broadcast ? active.call.output : active.call.input;
    auto schedule = comm.schedule(task, options_.tuning);
    if (schedule->stages > 0 && !comm.groups) {
        throw Error(DDL_ERROR_INTERNAL, "a plan with group steps, " + schedule->algorithm + ", but no groups");
    }
    active.operation =
        std::make_unique<Operation>(std::move(schedule), input, active.call.output, active.header, comm.group,
                                    comm.rank, first_tag(comm.key.id, active.header.sequence), options_.window,
                                    *transport_, pool_, Means{comm.groups, active.call.device, active.call.after});
    return true;
}

bool Engine::poll(Communicator& comm) {
    bool moved = false;
    Status failure;
    try {
        const auto most = static_cast<size_t>(std::clamp(options_.concurrent, 1, kSequenceSlots));
        for (size_t i = 0; i < std::min(most, comm.queue.size()) && failure.ok(); ++i) {
            Active& active = comm.queue[i];
            if (active.request->finished()) continue;
            if (!active.operation) moved |= begin(comm, active);
            if (active.operation->poll()) {
                moved = true;
                active.moved = seconds_now();
                active.watch.progress();
            }
            failure = active.operation->status();
            if (active.operation->finished()) {
                active.operation.reset();
                --active_;
                active.request->finished_.store(true, std::memory_order_release);
                moved = true;
            }
        }
    } catch (const Error& error) {
        failure = error.status();
    } catch (const std::bad_alloc&) {
        failure = {DDL_ERROR_MEMORY, "out of memory for the library's own buffers"};
    }
    if (!failure.ok()) {
        break_comm(comm, std::move(failure), true);
        return true;
    }
    while (!comm.queue.empty() && comm.queue.front().request->finished()) comm.queue.pop_front();
    return moved;
}

void Engine::break_comm(Communicator& comm, Status status, bool tell) {
    const bool news = comm.broken.ok();
    if (news) comm.broken = std::move(status);
    if (news && tell) {
        const NoticeContent notice = comm.abort();
        for (const int member : comm.group.members) {
            if (member != transport_->rank()) send_notice(*transport_, member, notice);
        }
    }
    for (Active& active : comm.queue) {
        if (active.request->finished()) continue;
        active.operation.reset();  // takes its messages back before the buffers are the caller's again
        --active_;
        active.request->status_ = comm.broken;
        active.request->finished_.store(true, std::memory_order_release);
    }
    comm.queue.clear();
}

void Engine::shutdown() {
    if (shut_.exchange(true)) return;
    {
        const std::lock_guard lock(sleep_);
        stopping_ = true;
    }
    wake_.notify_all();
    if (thread_.joinable()) thread_.join();
    const std::lock_guard lock(progress_);
    take_submissions();
    std::map<CommId, CommPtr> comms;
    {
        const std::lock_guard table(table_);
        comms.swap(comms_);
    }
    for (const auto& [id, comm] : comms) {
        const auto pending = std::find_if(comm->queue.begin(), comm->queue.end(),
                                          [](const Active& active) { return !active.request->finished(); });
        if (pending != comm->queue.end()) {
            break_comm(*comm,
                       {DDL_ERROR_SHUTDOWN, name_of_rank(transport_->rank()) + " was finalized with " +
                                                describe(pending->header) + " in flight"},
                       true);
        }
        NoticeContent goodbye = comm->notice(NoticeKind::goodbye);
        goodbye.call = comm->last_call();
        for (const int member : comm->group.members) {
            if (member != transport_->rank()) send_notice(*transport_, member, goodbye);
        }
    }
}

void Engine::wake() {
    // Under the lock, so that it does not fall between the thread's look at its work and its sleep.
    const std::lock_guard lock(sleep_);
    wake_.notify_one();
}

void Engine::warn(const std::string& text) const {
    if (options_.warn) {
        options_.warn(text);
    } else {
        std::fprintf(stderr, "ddl: warning: %s\n", text.c_str());
    }
}

std::string Engine::name_of_rank(int world_rank) const {
    const auto index = static_cast<size_t>(world_rank);
    const std::string name = "rank " + std::to_string(world_rank);
    return index < options_.hosts.size() ? name + " (host " + options_.hosts[index] + ")" : name;
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

Status Engine::set_plan(CommId id, Plan plan) {
    const CommPtr comm = find(id);
    if (!comm) return no_such(id);
    if (plan.size() != comm->size()) {
        return {DDL_ERROR_ARGUMENT, "the plan is for " + std::to_string(plan.size()) +
                                        " ranks, but the communicator has " + std::to_string(comm->size())};
    }
    const std::lock_guard lock(progress_);
    take_submissions();
    if (!comm->queue.empty()) return {DDL_ERROR_STATE, "the plan cannot change with requests in flight: wait for them"};
    comm->plan = std::move(plan);
    comm->layout = layout_of(comm->plan, options_.tuning);
    comm->schedules.clear();
    return {};
}

}  // namespace ddl
