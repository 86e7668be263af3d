#include "startup/session.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>

#include "base/say.h"
#include "startup/decision.h"
#include "startup/grouping.h"
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

}  // namespace

Session::Session(const char* options, const Membership* members)
    : job_(Job::join(patience_of_environment().timeout_seconds, members)) {
    begin(text_of(options));
}

Session::Session(Job& job, uint64_t epoch, std::shared_ptr<const Origin> origin, std::vector<int> places)
    : job_(job), epoch_(epoch), origin_(std::move(origin)), places_(std::move(places)) {
    begin(origin_->text);
}

std::shared_ptr<Session> Session::shrink(std::vector<int>* gone) {
    if (!job_.can_shrink()) {
        throw Error(DDL_ERROR_UNSUPPORTED,
                    "ddl_shrink: MPI connects this job, and cannot go on without a rank: start it over TCP "
                    "(DDL_TRANSPORT=tcp, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT), or start it again");
    }
    const std::lock_guard lock(ending_);
    if (ended_.exchange(true)) throw Error(DDL_ERROR_STATE, "ddl is not initialised: call ddl_init first");
    const int size = job_.size();
    engine_->shutdown({DDL_ERROR_PEER_LOST,
                       "rank " + std::to_string(job_.rank()) + " called ddl_shrink, as every rank that is alive must"});
    std::vector<int> here(static_cast<size_t>(size));  // by their numbers in this epoch
    for (size_t i = 0; i < here.size(); ++i) here[i] = static_cast<int>(i);
    for (uint64_t epoch = epoch_ + 1;; ++epoch) {
        const size_t before = here.size();
        std::vector<int> survivors, places;
        for (const int rank : job_.shrink(patience_of_environment(), warn)) {
            survivors.push_back(here[static_cast<size_t>(rank)]);
            places.push_back(places_[static_cast<size_t>(survivors.back())]);
        }
        here = std::move(survivors);
        try {
            std::shared_ptr<Session> next(new Session(job_, epoch, origin_, std::move(places)));
            for (int rank = 0; rank < size; ++rank) {
                if (!std::binary_search(here.begin(), here.end(), rank)) gone->push_back(rank);
            }
            return next;
        } catch (const Error& error) {
            // Another one died: once more, without it. If the last time was without it already, all are alive, but two
            // of them cannot reach each other.
            const bool again = epoch == epoch_ + 1 || here.size() < before;
            if (error.code() == DDL_ERROR_PEER_LOST && again) continue;
            job_.keep(nullptr);  // which says goodbye
            throw;
        } catch (...) {
            job_.keep(nullptr);
            throw;
        }
    }
}

void Session::begin(const std::string& text) {
    EngineOptions options;
    options.patience = patience_of_environment();
    options.warn = warn;
    // What is wrong with the options is said on every rank, before the rendezvous, in which they wait for one another.
    const Options asked = parse_options(text);
    const std::vector<Greeting> greetings = job_.assemble(text, options.patience, warn);
    std::vector<std::string> places;
    for (const Greeting& greeting : greetings) {
        options.hosts.push_back(greeting.host);
        places.push_back(greeting.place);
    }
    const std::string idle = idle_options(asked);
    if (!idle.empty() && job_.rank() == 0 && !origin_) warn(idle);
    free_former_nccl();
    placement_ = place(places);
    // The links of those that go on are as they were measured.
    Plan plan = origin_ ? plan_of_part(origin_->basis, origin_->plan, places_) : plan_of(asked, placement_);
    // Who spins while another rank waits for its core only delays what it waits for.
    if (local_size() > cores_of_host(greetings, places[static_cast<size_t>(job_.rank())])) options.spin_polls = 0;
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
        if (origin_) job_.keep(std::move(transport));
        throw;
    } catch (const std::bad_alloc&) {
        note({DDL_ERROR_MEMORY, {}});
        throw;
    }
    if (!origin_) {
        for (int rank = 0; rank < job_.size(); ++rank) places_.push_back(rank);
        origin_ = std::make_shared<Origin>(Origin{text, std::move(basis), plan});
    }
    if (asked.dbg_level > 0 && job_.rank() == 0) {
        say(std::to_string(job_.size()) + " ranks on " + std::to_string(placement_.num_hosts) + " hosts, plan " +
            format_mode(plan) + ": " + plan.reason);
    }
    const NcclGroupsOptions groups_options{local_rank(), options.patience, warn};
    options.plan_part = [origin = origin_, places = places_, rank = job_.rank()](const Plan&,
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
    const bool speaks = job_.rank() == 0 || (local_rank() == 0 && !memory.memory);
    if (asked.dbg_level > 0 && speaks) {
        say("shared memory " + std::string(memory.memory ? "on host " : "is not used on host ") +
            talk.hosts[static_cast<size_t>(job_.rank())] + ": " + memory.reason);
    }
    if (memory.memory) transport = std::make_unique<SharedTransport>(std::move(transport), std::move(memory));
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
                "this communicator was freed, or made before the last ddl_init or ddl_shrink: use another");
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
