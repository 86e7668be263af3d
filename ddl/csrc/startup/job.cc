#include "startup/job.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <mutex>
#include <sstream>
#include <thread>

#include "base/backoff.h"
#include "base/random_number.h"
#include "startup/environment.h"

namespace ddl {
namespace {

constexpr double kReminder = 10;      // as the engine's first warning of a rank that is late
constexpr double kAnswerSeconds = 1;  // in which a rank that is not stopped answers
constexpr double kConnectSeconds =
    3;                               // for which heartbeats may take to come up; on a network that works, milliseconds
constexpr double kDeathSeconds = 1;  // for which MPI_Finalize is given a chance after a rank died
constexpr double kFailureSeconds = 3;  // and after an error that others may still have to learn of
constexpr double kLastWords = 0.5;     // for which a rank that fails alone waits, so that others can say that it left

constexpr const char* kLoopback = "127.0.0.1";

Job* the_job = nullptr;
std::atomic<bool> in_child{false};
thread_local Heartbeats* forking = nullptr;  // those that this thread holds while it forks

void print(const std::string& text) {
    const std::string line = "ddl: " + text + "\n";
    static_cast<void>(!write(STDERR_FILENO, line.data(), line.size()));  // one piece: ranks share the terminal
}

std::string in_seconds(double seconds) {
    char text[32];
    std::snprintf(text, sizeof text, "%.3g s", seconds);
    return text;
}

// Says that `who` waits in `what`, and for whom, and after `seconds` ends the process, unless it is destroyed before: a
// call of MPI that blocks can neither say whom it waits for nor be given up.
class Reminder {
  public:
    Reminder(const std::string& who, const std::string& what, double seconds, std::function<std::string()> for_whom)
        : thread_([this, who, what, seconds, for_whom = std::move(for_whom)] {
              const double first = std::min<double>(kReminder, seconds / 2);
              if (!sleep(first)) return;
              print(who + " has waited " + in_seconds(first) + " in " + what + ": " + for_whom());
              if (!sleep(seconds - first)) return;
              print(who + " ends: it has waited " + in_seconds(seconds) + " in " + what + ": " + for_whom() + ". " +
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
    // False where it is over.
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

template <size_t size>
void copy(const std::string& text, char (&target)[size], const char* what) {
    if (text.size() >= size) {
        throw Error(DDL_ERROR_ARGUMENT, std::string(what) + " is longer than " + std::to_string(size - 1) + " bytes");
    }
    std::memcpy(target, text.c_str(), text.size() + 1);
}

std::vector<std::string> words(const char* text) {
    std::istringstream stream(text);
    std::vector<std::string> all;
    for (std::string word; stream >> word;) all.push_back(word);
    return all;
}

// Where the environment does not say otherwise. Inside a host, Open MPI asks the receiver before it sends more than 4
// KiB. Other MPIs ignore the variables.
void tune_openmpi() {
    for (const char* name : {"OMPI_MCA_btl_sm_eager_limit", "OMPI_MCA_btl_vader_eager_limit"}) {  // of versions 5 and 4
        setenv(name, std::to_string(kEagerBytes).c_str(), 0);
    }
}

}  // namespace

std::string host_name() {
    char name[256] = "";
    if (gethostname(name, sizeof name - 1) != 0 || name[0] == '\0') return "unknown";
    return name;
}

namespace {

// Hosts are told apart by their name, and, where ranks choose the loopback interface and /proc themselves, by the
// kernel's: containers may have one name.
std::string place_of(bool uses_mpi) {
    if (uses_mpi) return host_name();
    std::string place;
    std::ifstream("/proc/sys/kernel/random/boot_id") >> place;
    char space[64] = "";
    if (readlink("/proc/self/ns/net", space, sizeof space - 1) > 0) place += space;
    return place + host_name().substr(0, 200);
}

bool mpi_started_it() {
    for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE"}) {
        if (std::getenv(name)) return true;
    }
    int initialised = 0;
    MPI_Initialized(&initialised);
    return initialised != 0;
}

// Null: MPI says who takes part.
std::unique_ptr<Membership> find_members(const Membership* given) {
    if (given) return std::make_unique<Membership>(*given);
    const char* text = std::getenv("DDL_TRANSPORT");
    const std::string asked = text && *text ? text : "auto";
    if (asked != "auto" && asked != "mpi" && asked != "tcp") {
        throw Error(DDL_ERROR_ARGUMENT, "DDL_TRANSPORT is '" + asked + "', but must be auto, mpi or tcp");
    }
    if (asked == "mpi" || (asked == "auto" && (mpi_started_it() || !is_in_environment()))) return nullptr;
    if (!is_in_environment()) {
        throw Error(
            DDL_ERROR_ARGUMENT,
            "ddl_init: DDL_TRANSPORT is tcp, but RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are not all set: "
            "set them, or call ddl_init_with");
    }
    return std::make_unique<Membership>(membership_of_environment());
}

}  // namespace

Job& Job::join(double timeout_seconds, const Membership* members) {
    static std::mutex mutex;
    const std::lock_guard lock(mutex);
    if (!the_job)
        the_job =
            new Job(timeout_seconds, members);  // the process's: there is no later moment at which it could be deleted
    else if (members) {
        if (the_job->uses_mpi() || members->rank != the_job->rank_ || members->size != the_job->size_) {
            throw Error(DDL_ERROR_STATE, "ddl_init_with: this process has been rank " + std::to_string(the_job->rank_) +
                                             " of " + std::to_string(the_job->size_) +
                                             (the_job->uses_mpi() ? " of a job of MPI's" : "") + ": it stays that");
        }
        *the_job->members_ = *members;
    }
    return *the_job;
}

bool Job::is_in_child() { return in_child; }

Job::Job(double timeout_seconds, const Membership* members) : process_(getpid()), members_(find_members(members)) {
    if (members_) {
        rank_ = members_->rank;
        size_ = members_->size;
    } else {
        start_mpi(timeout_seconds);
    }
    // on_exit, as atexit does not tell the exit status, by which a process that failed is known.
    on_exit([](int status, void*) { the_job->leave(status); }, nullptr);
    pthread_atfork(
        [] {
            forking = the_job ? the_job->heartbeats_.get() : nullptr;
            if (forking) forking->before_fork();
        },
        [] {
            if (forking) forking->after_fork();
        },
        [] {
            in_child = true;
            if (forking) forking->close_in_child();
        });
}

std::vector<Socket> Job::connect_all(double timeout_seconds) { return meet(*members_, round_, timeout_seconds); }

std::vector<Greeting> Job::call(Transport* transport, const Greeting& mine, const RendezvousOptions& options) const {
    return uses_mpi() ? call_roll(base_, mine, options) : call_roll(*transport, mine, options);
}

void Job::start_mpi(double timeout_seconds) {
    initialise_mpi(timeout_seconds);
    check_mpi(MPI_Comm_rank(MPI_COMM_WORLD, &rank_), "MPI_Comm_rank");
    check_mpi(MPI_Comm_size(MPI_COMM_WORLD, &size_), "MPI_Comm_size");
    {
        const Reminder reminder(name(), "ddl_init", timeout_seconds, [] { return "another rank has not called it"; });
        check_mpi(MPI_Comm_dup(MPI_COMM_WORLD, &base_), "MPI_Comm_dup");
    }
    check_mpi(MPI_Comm_set_errhandler(base_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    if (size_ > 1) watch_calls(timeout_seconds);
    watch_finalize();
}

void Job::initialise_mpi(double timeout_seconds) {
    int initialised = 0, finalized = 0, level = MPI_THREAD_SINGLE;
    MPI_Initialized(&initialised);
    MPI_Finalized(&finalized);
    if (finalized) {
        throw Error(DDL_ERROR_STATE,
                    "ddl_init: MPI was finalized in this process and cannot be initialised again: "
                    "call ddl_init before MPI_Finalize");
    }
    if (initialised) {
        MPI_Query_thread(&level);
        if (level >= MPI_THREAD_MULTIPLE) return;
        throw Error(DDL_ERROR_UNSUPPORTED,
                    "ddl_init: MPI was initialised without MPI_THREAD_MULTIPLE, which is needed where the program and "
                    "ddl both call it: ask MPI_Init_thread for it, or let ddl_init initialise MPI");
    }
    const Reminder reminder("rank " + rank_of_environment() + " (host " + host_name() + ")", "MPI_Init",
                            timeout_seconds,
                            [] { return "another rank has not called ddl_init, or cannot be reached"; });
    tune_openmpi();
    check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level), "MPI_Init_thread");
    initialised_mpi_ = true;
    // An error that MPI finds on its own then reaches the caller as DDL_ERROR_TRANSPORT instead of ending the process.
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN);
    if (level < MPI_THREAD_SERIALIZED) {
        throw Error(DDL_ERROR_UNSUPPORTED,
                    "ddl_init: this MPI was built without support for threads "
                    "(MPI_THREAD_SERIALIZED at least): choose one that was built with it");
    }
}

std::string Job::name() const { return "rank " + std::to_string(rank_) + " (host " + host_name() + ")"; }

void Job::watch_calls(double timeout_seconds) {
    const std::string what = " has been inside one call of MPI for ";
    const std::string why =
        ". Whoever connects to a port of MPI and says nothing can hold it up: see \"Who can "
        "connect\" in docs/ddlrun.md";
    const auto warn = [=, who = name()](double seconds) {
        print("warning: " + who + what + in_seconds(seconds) + why);
    };
    const auto end = [=, who = name()](double seconds) {
        print(who + " ends: it" + what + in_seconds(seconds) + why + ". " + kPatienceOfInit);
        _exit(1);
    };
    calls_ = std::make_unique<MpiWatch>(std::min(kReminder, timeout_seconds / 2), timeout_seconds, warn, end);
}

// MPI_Finalize begins with freeing MPI_COMM_SELF, and so calls what hangs on it: also where the user calls it himself.
void Job::watch_finalize() {
    int key = MPI_KEYVAL_INVALID;
    const auto on_finalize = [](MPI_Comm, int, void*, void*) -> int {
        if (the_job->before_finalize_) the_job->before_finalize_();
        // When the call returns cannot be seen from here, so that it cannot be guarded: only what is known now counts.
        if (!the_job->exiting_ && the_job->heartbeats_ && the_job->heartbeats_->any_dead()) {
            the_job->end_process("a rank is dead");
        }
        return MPI_SUCCESS;
    };
    check_mpi(MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, on_finalize, &key, nullptr), "MPI_Comm_create_keyval");
    check_mpi(MPI_Comm_set_attr(MPI_COMM_SELF, key, nullptr), "MPI_Comm_set_attr");
}

std::vector<Greeting> Job::assemble(Transport* transport, const std::string& options, const Patience& patience,
                                    const std::function<void(const std::string&)>& warn) {
    int finalized = 0;
    if (uses_mpi()) MPI_Finalized(&finalized);
    if (finalized) throw Error(DDL_ERROR_STATE, "ddl_init: MPI was finalized in this process: it cannot be used again");
    if (spoiled_) {
        throw Error(DDL_ERROR_STATE, "ddl_init failed before in this job, with ranks missing: start the job again");
    }
    Greeting mine;
    mine.token = random_number();
    mine.version = ddl_version();
    mine.round = round_++;
    mine.process = process_;
    mine.cores = own_cores();
    copy(host_name(), mine.host, "the host's name");
    copy(place_of(uses_mpi()), mine.place, "the host's name");
    copy(options, mine.options, "DDL_OPTIONS");
    std::vector<Greeting> greetings;
    RendezvousOptions options_of_call{patience, [this](int rank) { return is_dead(rank); }, warn};
    try {
        greetings = call(transport, mine, options_of_call);
        if (size_ > 1 && !heartbeats_) {
            // Only now it is known whether there are other hosts, who need an address to connect to.
            heartbeats_ = std::make_unique<Heartbeats>(addresses_in_use(greetings));
            std::string contact;
            for (const Endpoint& endpoint : heartbeats_->contact()) {
                const std::string text = endpoint.address + " " + std::to_string(endpoint.port) + " ";
                if (contact.size() + text.size() < sizeof mine.contact) contact += text;
            }
            copy(contact, mine.contact, "the list of addresses");
            options_of_call.missing =
                "called ddl_init but stopped responding (the process is stopped, or its link is cut)";
            greetings = call(transport, mine, options_of_call);
        }
    } catch (const Error& error) {
        spoiled_ = error.code() != DDL_ERROR_MISMATCH;  // a mismatch ended in good order
        if (spoiled_) failed_ = true;
        throw;
    }
    if (heartbeats_ && !watching_) connect_heartbeats(greetings, warn);
    return greetings;
}

void Job::connect_heartbeats(const std::vector<Greeting>& greetings,
                             const std::function<void(const std::string&)>& warn) {
    std::vector<Contact> contacts;
    for (size_t rank = 0; rank < greetings.size(); ++rank) {
        const Greeting& greeting = greetings[rank];
        hosts_.emplace_back(greeting.host);
        names_.push_back("rank " + std::to_string(rank) + " (host " + greeting.host + ", process " +
                         std::to_string(greeting.process) + ")");
        const bool same_host = std::strcmp(greeting.place, greetings[static_cast<size_t>(rank_)].place) == 0;
        Contact contact;
        const std::vector<std::string> pairs = words(greeting.contact);
        for (size_t i = 0; i + 1 < pairs.size(); i += 2) {
            if (pairs[i] == kLoopback && !same_host) continue;
            contact.push_back({pairs[i], static_cast<uint16_t>(std::stoi(pairs[i + 1]))});
        }
        contacts.push_back(std::move(contact));
    }
    const std::vector<int> missing = heartbeats_->connect(rank_, contacts, greetings[0].token, kConnectSeconds,
                                                          [this](int rank, Death cause) { report_death(rank, cause); });
    watching_ = true;
    if (missing.empty()) return;
    std::string peers;
    for (const int peer : missing) peers += (peers.empty() ? "" : ", ") + names_[static_cast<size_t>(peer)];
    warn(names_[static_cast<size_t>(rank_)] + " found no TCP connection to " + peers +
         ", by which their death would be noticed at once: it may take until DDL_TIMEOUT. Is there a firewall?");
}

// Where ranks that have a heartbeat to this one may connect: those of its own host through the loopback interface, a
// way that no cable is part of; those of other hosts through the networks that DDL_NETWORKS names, else any.
std::vector<std::string> Job::addresses_in_use(const std::vector<Greeting>& greetings) const {
    const std::string place = greetings[static_cast<size_t>(rank_)].place;
    std::vector<std::string> addresses;
    bool others = false;
    for (const Greeting& greeting : greetings) others = others || greeting.place != place;
    const auto on_this_host = [&](const Greeting& greeting) { return greeting.place == place; };
    if (std::count_if(greetings.begin(), greetings.end(), on_this_host) > 1) addresses.emplace_back(kLoopback);
    if (!others) return addresses;
    for (std::string& address : addresses_for_other_hosts()) addresses.push_back(std::move(address));
    if (addresses.empty()) addresses.emplace_back(kLoopback);  // nobody finds it, and says so in a warning
    return addresses;
}

// Who does not answer, in words. Blocks for a while.
std::string Job::silent_ranks() {
    std::string text;
    if (heartbeats_ && watching_) {
        for (const int rank : heartbeats_->silent(kAnswerSeconds)) {
            text += (text.empty() ? "" : ", ") + names_[static_cast<size_t>(rank)];
        }
    }
    if (text.empty()) return "another rank has not come to it";
    return text + " does not answer (stopped, or its link is cut)";
}

// On the watching thread. One rank speaks for all, and only of the first death: what follows it is no news.
void Job::report_death(int rank, Death cause) {
    if (death_reported_.exchange(true)) return;
    // A host that does not answer has lost all its ranks, though of some of them it is not known yet: none of them
    // speaks.
    const auto is_lost = [&](int other) {
        const bool with_it =
            cause != Death::ended && hosts_[static_cast<size_t>(other)] == hosts_[static_cast<size_t>(rank)];
        return with_it || heartbeats_->death_of(other) != Death::none;
    };
    int speaker = (rank + 1) % size_;
    while (speaker != rank && is_lost(speaker)) speaker = (speaker + 1) % size_;
    if (speaker != rank_) return;
    print(names_[static_cast<size_t>(rank)] +
          (cause == Death::ended
               ? (uses_mpi() ? " died: its process ended without MPI_Finalize" : " died: its process ended")
               : " is gone: its host, or the link to it, does not answer any more"));
}

MPI_Comm Job::duplicate(const Patience& patience, const std::function<void(const std::string&)>& warn) {
    // It stays where the call is given up: MPI may write to it later.
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
                                         " s in ddl_init: " + silent_ranks();
                if (late) {
                    spoiled_ = failed_ = true;
                    throw Error(DDL_ERROR_TIMEOUT, text + ". " + kPatienceOfInit);
                }
                warn(text);
            }
            if (heartbeats_ && heartbeats_->any_dead()) {
                spoiled_ = failed_ = true;
                throw Error(DDL_ERROR_PEER_LOST, "ddl_init: a rank died during the call");
            }
        }
    } catch (...) {
        static_cast<void>(made.release());
        throw;
    }
}

MPI_Comm Job::split(int color, int key, double timeout_seconds) {
    // There is no form of it that does not block.
    const Reminder reminder(name(), "ddl_init (MPI_Comm_split, for mode m)", timeout_seconds,
                            [this] { return silent_ranks(); });
    MPI_Comm made = MPI_COMM_NULL;
    check_mpi(MPI_Comm_split(base_, color, key, &made), "MPI_Comm_split");
    return made;
}

// At exit, on the thread that exits.
void Job::leave(int status) {
    if (getpid() != process_) return;  // in a child that was forked and did not execute another program
    exit_status_ = status;
    exiting_ = true;
    int finalized = 0;
    if (uses_mpi()) MPI_Finalized(&finalized);
    if (!finalized) {
        if (before_finalize_) before_finalize_();
        // Who fails on its own is the cause of what others get for it: it ends first, so that its exit status counts.
        if (initialised_mpi_ && status != 0 && !failed_ && size_ > 1 && watching_ && !heartbeats_->any_dead()) {
            std::this_thread::sleep_for(std::chrono::duration<double>(kLastWords));
            std::fflush(nullptr);
            _exit(status);
        }
        // With a rank dead MPI_Finalize does not return. Without it the launcher ends the other ranks, as it should.
        if (initialised_mpi_ && !(heartbeats_ && heartbeats_->any_dead())) finalize_mpi();
    }
    if (heartbeats_ && watching_) heartbeats_->say_goodbye();
}

// MPI_Finalize waits for every rank: also for one that dies meanwhile, or never comes to it after an error.
void Job::finalize_mpi() {
    std::mutex mutex;
    std::condition_variable over;
    bool returned = false;
    std::thread guard([&] {
        const double start = seconds_now();
        double died = 0;
        std::unique_lock lock(mutex);
        while (heartbeats_ && !over.wait_for(lock, std::chrono::milliseconds(50), [&] { return returned; })) {
            const double now = seconds_now();
            if (heartbeats_->any_dead() && died == 0) died = now;
            if (died != 0 && now - died > kDeathSeconds) end_process("a rank is dead");
            const bool failing = failed_ || exit_status_ != 0;
            if (failing && now - start > kFailureSeconds) end_process("other ranks do not come to it after an error");
        }
    });
    MPI_Finalize();
    {
        const std::lock_guard lock(mutex);
        returned = true;
    }
    over.notify_all();
    guard.join();
}

void Job::end_process(const std::string& why) {
    const int status = exit_status_ == 0 ? 1 : exit_status_.load();
    print("rank " + std::to_string(rank_) + " ends without MPI_Finalize, which would not return: " + why);
    std::fflush(nullptr);
    _exit(status);
}

}  // namespace ddl
