// The plugin: a job that MPI started.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <utility>

#include "base/backoff.h"
#include "base/say.h"
#include "engine/header.h"
#include "mpi/group_mpi.h"
#include "mpi/mpi_call.h"
#include "mpi/mpi_watch.h"
#include "mpi/transport_mpi.h"
#include "startup/launch.h"

namespace ddl {
namespace {

constexpr double kReminder = 10;  // as the engine's first warning of a rank that is late

constexpr size_t kEagerBytes = 20 << 10;  // that Open MPI sends at once inside a host, if we initialise it
// A header and its payload in one message go at once inside a host, with room for MPI's own header.
static_assert(sizeof(PackedHeader) + kInlineBytes + 256 <= kEagerBytes);

std::string in_seconds(double seconds) {
    char text[32];
    std::snprintf(text, sizeof text, "%.3g s", seconds);
    return text;
}

// Says that `who` waits in `what`, and for whom, and ends the process after `seconds`, unless it is destroyed before: a
// call of MPI that blocks can neither say whom it waits for nor be given up.
class Reminder {
  public:
    Reminder(const std::string& who, const std::string& what, double seconds, std::function<std::string()> for_whom)
        : thread_([this, who, what, seconds, for_whom = std::move(for_whom)] {
              const double first = std::min<double>(kReminder, seconds / 2);
              if (!sleep(first)) return;
              say(who + " has waited " + in_seconds(first) + " in " + what + ": " + for_whom());
              if (!sleep(seconds - first)) return;
              say(who + " ends: it has waited " + in_seconds(seconds) + " in " + what + ": " + for_whom() + ". " +
                  kPatienceOfInit);
              _exit(1);
          }) {}
    ~Reminder() {
        {
            const std::lock_guard lock(mutex_);
            over_ = true;
        }
        done_.notify_all();
        thread_.join();
    }

  private:
    // False if it is over.
    bool sleep(double seconds) {
        std::unique_lock lock(mutex_);
        return !done_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return over_; });
    }

    std::mutex mutex_;
    std::condition_variable done_;
    bool over_ = false;
    std::thread thread_;
};

// The rank of this process as its launcher names it, for messages before MPI knows.
std::string rank_of_environment() {
    for (const char* name : {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "RANK"}) {
        if (const char* text = std::getenv(name); text && *text) return text;
    }
    return "?";
}

// Unless the environment says otherwise. Inside a host, Open MPI asks the receiver before it sends more than 4 KiB.
// Other MPIs ignore the variables.
void tune_openmpi() {
    for (const char* name : {"OMPI_MCA_btl_sm_eager_limit", "OMPI_MCA_btl_vader_eager_limit"}) {  // of versions 5 and 4
        setenv(name, std::to_string(kEagerBytes).c_str(), 0);
    }
}

bool is_finalized() {
    int finalized = 0;
    MPI_Finalized(&finalized);
    return finalized != 0;
}

class MpiLaunch final : public Launch {
  public:
    // Initialises MPI, unless the program has.
    explicit MpiLaunch(const LaunchOptions& options) : options_(options) {
        initialise();
        int rank = 0, size = 1;
        check_mpi(MPI_Comm_rank(MPI_COMM_WORLD, &rank), "MPI_Comm_rank");
        check_mpi(MPI_Comm_size(MPI_COMM_WORLD, &size), "MPI_Comm_size");
        members_ = Membership::first(rank, size);
        {
            const Reminder reminder(name(), "ddl_init", options_.timeout_seconds,
                                    [] { return "another rank has not called it"; });
            check_mpi(MPI_Comm_dup(MPI_COMM_WORLD, &base_), "MPI_Comm_dup");
            check_mpi(MPI_Comm_set_errhandler(base_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
            check_mpi(MPI_Comm_dup(base_, &notices_), "MPI_Comm_dup");
        }
        lobby_ = make_transport(base_, notices_);
        if (size > 1) watch_calls();
        watch_finalize();
    }

    Transport& lobby(int) override { return *lobby_; }

    std::unique_ptr<Transport> connect(const Patience& patience,
                                       const std::function<void(const std::string&)>& warn) override {
        // They are not freed, as what is still under way in them would be delivered to a later one with the same
        // number.
        const MPI_Comm data = duplicate(patience, warn);
        return make_transport(data, duplicate(patience, warn));
    }

    std::unique_ptr<GroupComm> group(int color, int key) override {
        // There is no form of it that does not block.
        const Reminder reminder(name(), "ddl_init (MPI_Comm_split, for mode m)", options_.timeout_seconds,
                                options_.silent_ranks);
        MPI_Comm made = MPI_COMM_NULL;
        check_mpi(MPI_Comm_split(base_, color, key, &made), "MPI_Comm_split");
        return std::make_unique<MpiGroup>(made);
    }

    bool is_over() const override { return is_finalized(); }
    bool must_finalize() const override { return initialised_; }
    void finalize() override { MPI_Finalize(); }

  private:
    std::string name() const { return "rank " + std::to_string(members_.rank) + " (host " + host_name() + ")"; }

    std::unique_ptr<MpiTransport> make_transport(MPI_Comm data, MPI_Comm notices) const {
        MpiTransportOptions options;
        options.is_dead = options_.is_dead;
        return std::make_unique<MpiTransport>(data, notices, std::move(options));
    }

    void initialise();
    void watch_calls();
    void watch_finalize();
    MPI_Comm duplicate(const Patience& patience, const std::function<void(const std::string&)>& warn);

    const LaunchOptions options_;
    bool initialised_ = false;
    MPI_Comm base_ = MPI_COMM_NULL, notices_ = MPI_COMM_NULL;
    std::unique_ptr<MpiTransport> lobby_;
    std::unique_ptr<MpiWatch> calls_;
};

void MpiLaunch::initialise() {
    int initialised = 0, level = MPI_THREAD_SINGLE;
    MPI_Initialized(&initialised);
    if (is_finalized()) {
        throw Error(DDL_ERROR_STATE,
                    "ddl_init: MPI was finalized in this process and cannot be initialised again: "
                    "call ddl_init before MPI_Finalize");
    }
    if (initialised) {
        MPI_Query_thread(&level);
        if (level >= MPI_THREAD_MULTIPLE) return;
        throw Error(DDL_ERROR_UNSUPPORTED,
                    "ddl_init: MPI was initialised without MPI_THREAD_MULTIPLE, which is needed if the program and "
                    "ddl both call it: ask MPI_Init_thread for it, or let ddl_init initialise MPI");
    }
    const Reminder reminder("rank " + rank_of_environment() + " (host " + host_name() + ")", "MPI_Init",
                            options_.timeout_seconds,
                            [] { return "another rank has not called ddl_init, or cannot be reached"; });
    tune_openmpi();
    check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level), "MPI_Init_thread");
    initialised_ = true;
    // An error that MPI finds on its own then reaches the caller as DDL_ERROR_TRANSPORT instead of ending the process.
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN);
    if (level < MPI_THREAD_SERIALIZED) {
        throw Error(DDL_ERROR_UNSUPPORTED,
                    "ddl_init: this MPI was built without support for threads "
                    "(MPI_THREAD_SERIALIZED at least): choose one that was built with it");
    }
}

void MpiLaunch::watch_calls() {
    const std::string what = " has been inside one call of MPI for ";
    const std::string why =
        ". Whoever connects to a port of MPI and says nothing can hold it up: see \"Who can "
        "connect\" in docs/ddlrun.md";
    const auto warn = [=, who = name()](double seconds) { say("warning: " + who + what + in_seconds(seconds) + why); };
    const auto end = [=, who = name()](double seconds) {
        say(who + " ends: it" + what + in_seconds(seconds) + why + ". " + kPatienceOfInit);
        _exit(1);
    };
    calls_ = std::make_unique<MpiWatch>(std::min(kReminder, options_.timeout_seconds / 2), options_.timeout_seconds,
                                        warn, end);
}

// MPI_Finalize begins with freeing MPI_COMM_SELF, and so calls what hangs on it: also if the user calls it himself.
void MpiLaunch::watch_finalize() {
    int key = MPI_KEYVAL_INVALID;
    const auto on_finalize = [](MPI_Comm, int, void* launch, void*) -> int {
        auto& its = *static_cast<MpiLaunch*>(launch);
        its.options_.on_finalize();
        its.lobby_->close();
        return MPI_SUCCESS;
    };
    check_mpi(MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, on_finalize, &key, nullptr), "MPI_Comm_create_keyval");
    check_mpi(MPI_Comm_set_attr(MPI_COMM_SELF, key, this), "MPI_Comm_set_attr");
}

// Another communicator of all ranks. Names in a warning, then in an error, who does not answer meanwhile.
MPI_Comm MpiLaunch::duplicate(const Patience& patience, const std::function<void(const std::string&)>& warn) {
    // It stays if the call is given up: MPI may write to it later.
    auto made = std::make_unique<MPI_Comm>(MPI_COMM_NULL);
    MPI_Request request = MPI_REQUEST_NULL;
    try {
        check_mpi(MPI_Comm_idup(base_, made.get(), &request), "MPI_Comm_idup");
        const double start = seconds_now();
        bool warned = false;
        for (Backoff backoff(0, 1e-3);; backoff.pause()) {
            int finished = 0;
            {
                const MpiCall call;
                check_mpi(MPI_Test(&request, &finished, MPI_STATUS_IGNORE), "MPI_Test");
            }
            if (finished) return *made;
            const double waited = seconds_now() - start;
            const bool late = waited >= patience.timeout_seconds;
            if (late || (!warned && waited >= patience.warn_seconds)) {
                warned = true;
                const std::string text = name() + " has waited " + std::to_string(static_cast<int>(waited)) +
                                         " s in ddl_init: " + options_.silent_ranks();
                if (late) throw Error(DDL_ERROR_TIMEOUT, text + ". " + kPatienceOfInit);
                warn(text);
            }
            for (int other = 0; other < members_.size(); ++other) {
                if (!options_.is_dead(other)) continue;
                throw Error(DDL_ERROR_PEER_LOST, "ddl_init: rank " + std::to_string(other) + " died during the call");
            }
        }
    } catch (...) {
        static_cast<void>(made.release());
        throw;
    }
}

}  // namespace
}  // namespace ddl

extern "C" DDL_API const ddl::MpiPlugin& ddl_mpi_plugin() {
    static const ddl::MpiPlugin plugin{DDL_VERSION_MAJOR * 10000 + DDL_VERSION_MINOR * 100 + DDL_VERSION_PATCH,
                                       DDL_BUILD,
                                       [](const ddl::LaunchOptions& options) -> std::unique_ptr<ddl::Launch> {
                                           return std::make_unique<ddl::MpiLaunch>(options);
                                       }};
    return plugin;
}
