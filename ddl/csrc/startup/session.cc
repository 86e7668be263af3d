#include "startup/session.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>

#include "base/rank_list.h"
#include "base/say.h"
#include "startup/decision.h"
#include "startup/grouping.h"
#include "startup/tcp_rendezvous.h"
#include "transport/host_memory.h"
#include "transport/transport_shared.h"

namespace ddl {
namespace {

// Of the messages before the engine's: to share memory, then to decide. All of them are received, or taken back, before
// the next ones begin, which may use the tags again.
constexpr Tag kFirstTag = 0;

Patience patience_of_environment() {
    const Patience patience;
    double timeout = patience.timeout_seconds;
    if (const char* text = std::getenv("DDL_TIMEOUT"); text && *text) {
        char* end = nullptr;
        const double seconds = std::strtod(text, &end);
        if (*end != '\0' || !(seconds > 0) || seconds > 1e9) {
            throw Error(DDL_ERROR_ARGUMENT,
                        std::string("DDL_TIMEOUT is '") + text + "', but must be a number of seconds above 0");
        }
        timeout = seconds;
    }
    return within(patience, timeout);
}

std::string text_of(const char* options) {
    if (!options) options = std::getenv("DDL_OPTIONS");
    return options ? options : "";
}

void warn(const std::string& text) { say("warning: " + text); }

// Processors that the ranks of the host at `place` may run on: each of them may be bound to its own.
int cores_of_host(const std::vector<Greeting>& greetings, const std::string& place) {
    std::vector<CoreSet> sets;
    for (const Greeting& greeting : greetings) {
        if (greeting.place == place) sets.push_back(greeting.cores);
    }
    return count_cores(sets);
}

// `numbers` are what the ranks of the last epoch were called in an earlier one. Returns the same for the ranks of this
// epoch; -1 for those that have joined.
std::vector<int> numbers_before(const Membership& members, const std::vector<int>& numbers) {
    std::vector<int> all;
    for (const int former : members.former) all.push_back(former < 0 ? -1 : numbers[static_cast<size_t>(former)]);
    return all;
}

}  // namespace

Session::Session(Job& job, std::string text, std::shared_ptr<const Origin> origin, std::vector<int> places)
    : job_(job),
      members_(job.members()),
      text_(std::move(text)),
      origin_(std::move(origin)),
      places_(std::move(places)) {
    open();
}

std::shared_ptr<Session> Session::begin(const char* options, const Start* start) {
    const std::string text = text_of(options);
    parse_options(text);  // what is wrong with them is said on every rank, before they wait for one another
    Job& job = Job::join(patience_of_environment().timeout_seconds, start, text);
    if (!start || !start->joins) return std::shared_ptr<Session>(new Session(job, text, nullptr, {}));
    std::vector<int> here = job.members().former;
    return go_on(job, text, nullptr, {}, &here);
}

// The session of the job's members. If one of them dies meanwhile, that of the others. `here` has the members' numbers
// for the caller, -1 for who has joined, and is kept so.
std::shared_ptr<Session> Session::go_on(Job& job, const std::string& text, std::shared_ptr<const Origin> origin,
                                        std::vector<int> places, std::vector<int>* here) {
    for (size_t before = here->size() + 1;;) {
        try {
            return std::shared_ptr<Session>(new Session(job, text, origin, places));
        } catch (const Error& error) {
            // Another one died: once more, without it. If the last time was without it already, all are alive, but two
            // of them cannot reach each other.
            if (error.code() != DDL_ERROR_PEER_LOST || here->size() >= before) {
                job.keep(nullptr);  // which says goodbye
                throw;
            }
        } catch (...) {
            job.keep(nullptr);
            throw;
        }
        before = here->size();
        job.resize(false, patience_of_environment(), warn);
        *here = numbers_before(job.members(), *here);
        if (origin) places = numbers_before(job.members(), places);
    }
}

std::shared_ptr<Session> Session::resize(bool takes_in, std::vector<int>* gone, int* joined) {
    if (!job_.can_resize()) {
        throw Error(DDL_ERROR_UNSUPPORTED,
                    std::string(takes_in ? "ddl_resize" : "ddl_shrink") +
                        ": MPI connects this job, and cannot go on with other ranks: start it over TCP "
                        "(DDL_TRANSPORT=tcp, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT), or start it again");
    }
    const std::lock_guard lock(ending_);
    if (ended_.exchange(true)) throw Error(DDL_ERROR_STATE, "ddl is not initialised: call ddl_init first");
    engine_->shutdown(
        {DDL_ERROR_PEER_LOST, "rank " + std::to_string(members_.rank) +
                                  " called ddl_resize or ddl_shrink: every rank that is alive must call one of them"});
    job_.resize(takes_in, patience_of_environment(), warn);
    std::vector<int> here = job_.members().former;
    auto next = go_on(job_, text_, origin_, numbers_before(job_.members(), places_), &here);
    for (int rank = 0; rank < members_.size(); ++rank) {
        if (std::find(here.begin(), here.end(), rank) == here.end()) gone->push_back(rank);
    }
    *joined = static_cast<int>(std::count(here.begin(), here.end(), -1));
    return next;
}

int Session::waiting() {
    const std::lock_guard lock(ending_);
    if (ended_) throw Error(DDL_ERROR_STATE, "ddl is not initialised: call ddl_init first");
    return job_.waiting(text_);
}

void Session::open() {
    EngineOptions options;
    options.patience = patience_of_environment();
    options.warn = warn;
    Options asked = parse_options(text_);
    if (members_.epoch > 0 && !asked.dimensions.empty()) {  // they are those of the ranks at the start
        asked.dimensions.clear();
        if (asked.modes.size() > 1) asked.modes = "p";
    }
    const int64_t known = origin_ ? static_cast<int64_t>(origin_->epoch) : -1;
    const std::vector<Greeting> greetings = job_.assemble(text_, known, options.patience, warn);
    // Links that not all know are measured again: some have joined, or have gone through an epoch that failed on
    // others.
    const auto is_common = [&](const Greeting& its) { return its.origin == known; };
    if (!std::all_of(greetings.begin(), greetings.end(), is_common)) origin_ = nullptr;
    std::vector<std::string> places;
    for (const Greeting& greeting : greetings) {
        options.hosts.push_back(greeting.host);
        places.push_back(greeting.place);
    }
    const std::string idle = idle_options(asked);
    if (!idle.empty() && members_.rank == 0 && !origin_) warn(idle);
    free_former_nccl();
    placement_ = place(places);
    // The links of those that go on are as they were measured.
    Plan plan = origin_ ? plan_of_part(origin_->basis, origin_->plan, places_) : plan_of(asked, placement_);
    // Who spins while another rank waits for its core only delays what it waits for.
    if (local_size() > cores_of_host(greetings, places[static_cast<size_t>(members_.rank)])) options.spin_polls = 0;
    std::unique_ptr<Transport> transport = job_.connect(options.patience, warn);
    BootstrapOptions talk;
    talk.patience = options.patience;
    talk.hosts = options.hosts;
    talk.warn = warn;
    talk.spins = options.spin_polls;
    Basis basis{asked, placement_, {}};
    try {
        talk.what = "ddl_init, sharing memory";
        go_within_host(transport, talk, asked, &options.early);
        if (!origin_ && needs_links(asked, placement_)) {
            talk.what = "ddl_init, measuring links";
            Bootstrap bootstrap(*transport, talk);
            Decision decision = decide(bootstrap, asked, placement_, kFirstTag, say);
            plan = std::move(decision.plan);
            basis.links = std::move(decision.links);
            for (Notice& notice : bootstrap.take_foreign()) options.early.push_back(std::move(notice));
        }
    } catch (const Error& error) {
        note(error.status());
        if (members_.epoch > 0) job_.keep(std::move(transport));
        throw;
    } catch (const std::bad_alloc&) {
        note({DDL_ERROR_MEMORY, {}});
        throw;
    }
    if (!origin_) {
        places_ = Membership::first(0, members_.size()).former;
        origin_ = std::make_shared<Origin>(Origin{members_.epoch, std::move(basis), plan});
    }
    if (asked.dbg_level > 0 && members_.rank == 0) {
        say(plural(static_cast<size_t>(members_.size()), "rank") + " on " +
            plural(static_cast<size_t>(placement_.num_hosts), "host") + ", plan " + format_mode(plan) + ": " +
            plan.reason);
    }
    const NcclGroupsOptions groups_options{local_rank(), options.patience, warn};
    options.plan_part = [origin = origin_, places = places_, rank = members_.rank](const Plan&,
                                                                                   const std::vector<int>& members) {
        std::vector<int> of_origin;
        for (const int member : members) of_origin.push_back(places[static_cast<size_t>(member)]);
        Plan part = plan_of_part(origin->basis, origin->plan, of_origin);
        if (origin->basis.options.dbg_level > 0 && members[0] == rank) {
            say("communicator of " + std::to_string(part.size()) + " ranks, rank " + std::to_string(rank) +
                " of the job first, plan " + format_mode(part) + ": " + part.reason);
        }
        return part;
    };
    GroupComms groups = make_mpi_groups(job_, plan);
    transport_ = transport.get();
    engine_ = std::make_unique<Engine>(std::move(transport), plan, std::move(options));
    try {
        gpu_ = make_nccl_groups(job_, *engine_, plan, groups_options, &groups);
    } catch (const Error& error) {
        // Others may still be in it; if NCCL has failed, they are not.
        if (error.code() == DDL_ERROR_TIMEOUT || error.code() == DDL_ERROR_PEER_LOST) note(error.status());
        // The engine has closed the transport: there is nothing left to go on with (go_on()).
        if (members_.epoch > 0) throw Error(DDL_ERROR_TRANSPORT, error.what());
        throw;
    }
    nccl_gpu_ = gpu_ != nullptr;
    if (plan.modes.find_first_not_of('r') == std::string::npos) return;
    engine_->set_groups(kWorld, std::make_shared<Groups>(std::move(groups)));
}

// With a way through shared memory to the other ranks of this host, if there are some and it can be had.
void Session::go_within_host(std::unique_ptr<Transport>& transport, const BootstrapOptions& talk, const Options& asked,
                             std::vector<Notice>* early) {
    if (local_size() == 1 || asked.shared_memory == 0) return;
    Bootstrap bootstrap(*transport, talk);
    HostMemory memory = share_memory(bootstrap, placement_, kFirstTag);
    *early = bootstrap.take_foreign();
    const bool speaks = members_.rank == 0 || (local_rank() == 0 && !memory.memory);
    if (asked.dbg_level > 0 && speaks) {
        say("shared memory " + std::string(memory.memory ? "on host " : "is not used on host ") +
            talk.hosts[static_cast<size_t>(members_.rank)] + ": " + memory.reason);
    }
    if (memory.memory) transport = std::make_unique<SharedTransport>(std::move(transport), std::move(memory));
}

double Session::least_seconds_per_byte() const {
    if (!origin_ || !origin_->basis.links || origin_->epoch != members_.epoch) return 0;
    return ddl::least_seconds_per_byte(placement_, *origin_->basis.links);
}

void Session::locate(Call& call, CudaStream stream) {
    const bool is_empty = call.task.count == 0 || call.task.collective == Collective::barrier;
    const bool reads = call.task.collective != Collective::broadcast;
    if (is_empty || !call.output || (reads && !call.input)) return;  // refused, or nothing is touched
    if (CudaDevice::is_absent()) return;
    const CudaPlace output = CudaDevice::place_of(call.output);
    const CudaPlace input = reads ? CudaDevice::place_of(call.input) : output;
    if (!output.gpu && !input.gpu) return;
    const std::shared_ptr<CudaDevice> device = output.device(), other = input.device();
    const std::string what = name_of(call.task.collective);
    if (device != other) {
        const auto where = [](const std::shared_ptr<CudaDevice>& its) {
            return its ? "in GPU " + std::to_string(its->gpu()) + "'s memory" : "in host memory";
        };
        throw Error(DDL_ERROR_ARGUMENT, what + ": the input is " + where(other) + ", the output " + where(device) +
                                            ": both must be in one memory");
    }
    if (!device) {
        if (output.gpu && input.gpu && output.gpu != input.gpu) {
            throw Error(DDL_ERROR_ARGUMENT, what + ": the input is in managed memory of GPU " +
                                                std::to_string(input.gpu->gpu()) + ", the output in that of GPU " +
                                                std::to_string(output.gpu->gpu()) + ": a rank has one GPU");
        }
        call.after = (output.gpu ? output.gpu : input.gpu)->fence(stream);
        return;
    }
    {
        const std::lock_guard lock(mutex_);
        if (!gpu_) gpu_ = device;
        if (gpu_ != device) {
            throw Error(DDL_ERROR_ARGUMENT,
                        what + ": the buffers are in GPU " + std::to_string(device->gpu()) +
                            "'s memory, but this rank uses GPU " + std::to_string(gpu_->gpu()) +
                            (nccl_gpu_ ? ", which was current in ddl_init, or has the rank's number on its host: call "
                                         "cudaSetDevice before ddl_init"
                                       : ", where its buffers were before: a rank has one GPU"));
        }
    }
    call.task.memory = Memory::device;
    call.device = device;
    call.after = device->fence(stream);
}

CommId Session::id_of(ddl_comm handle) const {
    if (handle == DDL_WORLD) return kWorld;
    if (handle == DDL_COMM_NULL) {
        throw Error(
            DDL_ERROR_ARGUMENT,
            "this communicator is DDL_COMM_NULL: ddl_comm_split gave this rank none, as its color was negative, or the "
            "call that was to make it failed");
    }
    const std::lock_guard lock(mutex_);
    const auto found = handles_.find(handle);
    if (found != handles_.end()) return found->second;
    throw Error(DDL_ERROR_STATE,
                "this communicator was freed, or made before the last ddl_init, ddl_resize or ddl_shrink: use another");
}

Session::Handle Session::new_handle() {
    static std::atomic<uintptr_t> last{0};
    std::map<ddl_comm, CommId> one;
    // A number, no address: nothing is behind it that a wrong use could damage.
    one[reinterpret_cast<ddl_comm>(++last)] = kWorld;
    return one.extract(one.begin());
}

ddl_comm Session::bind(Handle handle, CommId id) {
    handle.mapped() = id;
    const std::lock_guard lock(mutex_);
    return handles_.insert(std::move(handle)).position->first;
}

void Session::forget(ddl_comm handle) {
    const std::lock_guard lock(mutex_);
    handles_.erase(handle);
}

void Session::note(const Status& status) {
    switch (status.code) {
        case DDL_ERROR_MISMATCH:
        case DDL_ERROR_TIMEOUT:
        case DDL_ERROR_PEER_LOST:
        case DDL_ERROR_MEMORY:
        case DDL_ERROR_TRANSPORT:
        case DDL_ERROR_INTERNAL: job_.note_failure(); break;
        case DDL_ERROR_SHUTDOWN:
            if (!ended_) job_.note_failure();  // another rank's: an end of our own leaves nobody behind
            break;
        default: break;
    }
}

void Session::end() {
    const std::lock_guard lock(ending_);
    if (ended_.exchange(true)) return;
    engine_->shutdown();
    transport_->close();
}

}  // namespace ddl
