#include "startup/job.h"

#include <pthread.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>

#include "base/backoff.h"
#include "base/random_number.h"
#include "base/say.h"
#include "base/status.h"
#include "startup/tcp_rendezvous.h"

namespace ddl {
namespace {

constexpr double kAnswerSeconds = 1;  // in which a rank that is not stopped answers
constexpr double kConnectSeconds =
    3;                               // for which heartbeats may take to come up; on a network that works, milliseconds
constexpr double kDeathSeconds = 1;  // for which MPI_Finalize is given a chance after a rank died
constexpr double kFailureSeconds = 3;  // and after an error that others may still have to learn of
// For which a rank that fails waits: alone, so that others can say that it left; for what others did, so that these end
// first.
constexpr double kLastWords = 0.5;

Job* the_job = nullptr;
std::atomic<bool> in_child{false};

template <size_t size>
void copy(const std::string& text, char (&target)[size], const char* what) {
    if (text.size() >= size) {
        throw Error(DDL_ERROR_ARGUMENT, std::string(what) + " is longer than " + std::to_string(size - 1) + " bytes");
    }
    std::memcpy(target, text.c_str(), text.size() + 1);
}

}  // namespace

Job& Job::join(double timeout_seconds, const Start* start, const std::string& text) {
    static std::mutex mutex;
    const std::lock_guard lock(mutex);
    if (!the_job) {
        the_job = new Job(timeout_seconds, start, text);  // the process's: it could be deleted at no later moment
    } else if (start && !the_job->launch_->accept(*start)) {
        throw Error(DDL_ERROR_STATE, "ddl_init_with: this process has been rank " +
                                         std::to_string(the_job->members_.rank) + " of " +
                                         std::to_string(the_job->members_.size()) + " of its job: it stays that");
    }
    return *the_job;
}

bool Job::is_in_child() { return in_child; }

Job::Job(double timeout_seconds, const Start* start, const std::string& text)
    // Both names are needed. Containers may share a host name. Simulated hosts share a kernel.
    : process_(getpid()), place_(network_space() + host_name()) {
    LaunchOptions options;
    options.timeout_seconds = timeout_seconds;
    options.is_dead = [this](int rank) { return is_dead(rank); };
    options.death_of = [this](int rank) { return death_of(rank); };
    options.silent_ranks = [this] { return silent_ranks(); };
    options.on_finalize = [this] {
        if (before_finalize_) before_finalize_();
        // When the call returns cannot be seen from here, so that it cannot be guarded: only what is known now counts.
        if (!exiting_ && any_dead()) end_process("a rank is dead");
    };
    options.warn = [](const std::string& line) { say("warning: " + line); };
    launch_ = make_launch(start, text, options);
    members_ = launch_->members();
    // on_exit, as atexit does not tell the exit status, by which a process that failed is known.
    on_exit([](int status, void*) { the_job->leave(status); }, nullptr);
    pthread_atfork(nullptr, nullptr, [] { in_child = true; });
}

std::vector<Greeting> Job::assemble(const std::string& options, int64_t origin, const Patience& patience,
                                    const std::function<void(const std::string&)>& warn) {
    if (launch_->is_over()) {
        throw Error(DDL_ERROR_STATE, "ddl_init: MPI was finalized in this process: it cannot be used again");
    }
    if (spoiled_) {
        throw Error(DDL_ERROR_STATE, "ddl_init failed before in this job, with ranks missing: start the job again");
    }
    Transport& lobby = launch_->lobby(members_.round);
    Greeting mine;
    mine.token = random_number();
    mine.version = ddl_version();
    mine.round = members_.round++;
    mine.origin = origin;
    mine.process = process_;
    mine.cores = own_cores();
    copy(host_name(), mine.host, "the host's name");
    copy(place_, mine.place, "the host's name");
    copy(options, mine.options, "DDL_OPTIONS");
    std::vector<Greeting> greetings;
    try {
        if (members_.size() > 1 && !heartbeats_) {
            std::atomic_store(&heartbeats_, std::make_shared<Heartbeats>(members_.rank, members_.size()));
        }
        if (heartbeats_) copy(heartbeats_->contact(), mine.contact, "the list of addresses");
        greetings = call_roll(lobby, mine, patience, warn);
        former_.reset();  // all have come out of its epoch
    } catch (const Error& error) {
        if (error.code() != DDL_ERROR_MISMATCH) spoil();  // a mismatch ended in good order
        throw;
    }
    if (heartbeats_ && !watching_) connect_heartbeats(greetings, warn);
    return greetings;
}

void Job::resize(bool takes_in, const Patience& patience, const std::function<void(const std::string&)>& warn) {
    launch_->resize(takes_in, patience, warn);
    watching_ = false;
    if (auto former = std::atomic_exchange(&heartbeats_, std::shared_ptr<Heartbeats>())) {
        // Ranks that still agree with others would take its end for this rank's death: a goodbye may get lost in it.
        former->say_goodbye();
        former_ = std::move(former);
    }
    members_ = launch_->members();
    death_reported_ = spoiled_ = false;
}

void Job::connect_heartbeats(const std::vector<Greeting>& greetings,
                             const std::function<void(const std::string&)>& warn) {
    std::vector<std::string> contacts;
    names_.clear();
    hosts_.clear();
    for (size_t rank = 0; rank < greetings.size(); ++rank) {
        const Greeting& greeting = greetings[rank];
        hosts_.emplace_back(greeting.host);
        names_.push_back("rank " + std::to_string(rank) + " (host " + greeting.host + ", process " +
                         std::to_string(greeting.process) + ")");
        contacts.emplace_back(greeting.contact);
    }
    const std::vector<int> missing =
        heartbeats_->connect(std::move(contacts), std::to_string(greetings[0].token), kConnectSeconds,
                             [this](int rank, Death cause) { report_death(rank, cause); });
    watching_ = true;
    if (missing.empty()) return;
    std::string peers;
    for (const int peer : missing) peers += (peers.empty() ? "" : ", ") + names_[static_cast<size_t>(peer)];
    warn(names_[static_cast<size_t>(members_.rank)] + " found no TCP connection to " + peers +
         ", by which their death would be noticed at once: it may take until DDL_TIMEOUT. Is there a firewall?");
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
    const auto heartbeats = std::atomic_load(&heartbeats_);
    if (!heartbeats || death_reported_.exchange(true)) return;
    // A host that does not answer has lost all its ranks, though of some of them it is not known yet: none of them
    // speaks.
    const auto is_lost = [&](int other) {
        const bool with_it =
            cause != Death::ended && hosts_[static_cast<size_t>(other)] == hosts_[static_cast<size_t>(rank)];
        return with_it || heartbeats->death_of(other) != Death::none;
    };
    int speaker = (rank + 1) % members_.size();
    while (speaker != rank && is_lost(speaker)) speaker = (speaker + 1) % members_.size();
    if (speaker != members_.rank) return;
    say(names_[static_cast<size_t>(rank)] + (cause == Death::ended
                                                 ? " died: its process ended"
                                                 : " is gone: its host, or the link to it, does not answer any more"));
}

std::unique_ptr<Transport> Job::connect(const Patience& patience, const std::function<void(const std::string&)>& warn) {
    try {
        return launch_->connect(patience, warn);
    } catch (const Error&) {
        spoil();
        throw;
    }
}

// At exit, on the thread that exits.
void Job::leave(int status) {
    if (getpid() != process_) return;  // in a child that was forked and did not execute another program
    exit_status_ = status;
    exiting_ = true;
    if (!launch_->is_over() && before_finalize_) before_finalize_();
    // With a rank dead MPI_Finalize does not return. Without it the launcher ends the other ranks, as it should.
    if (!launch_->is_over() && launch_->must_finalize() && !any_dead()) {
        // Who fails on its own is the cause of what others get for it: it ends first, so that its exit status counts.
        if (status != 0 && !failed_ && members_.size() > 1 && watching_) {
            std::this_thread::sleep_for(std::chrono::duration<double>(kLastWords));
            std::fflush(nullptr);
            _exit(status);
        }
        finalize();
    } else if (status != 0 && failed_ && !launch_->must_finalize() && members_.size() > 1) {
        std::this_thread::sleep_for(std::chrono::duration<double>(kLastWords));  // likewise: the cause ends first
    }
    if (heartbeats_ && watching_) heartbeats_->say_goodbye();
}

// MPI_Finalize waits for every rank: also for one that dies meanwhile, or never comes to it after an error.
void Job::finalize() {
    std::mutex mutex;
    std::condition_variable over;
    bool returned = false;
    std::thread guard([&] {
        const double start = seconds_now();
        double died = 0;
        std::unique_lock lock(mutex);
        while (watching_ && !over.wait_for(lock, std::chrono::milliseconds(50), [&] { return returned; })) {
            const double now = seconds_now();
            if (heartbeats_->any_dead() && died == 0) died = now;
            if (died != 0 && now - died > kDeathSeconds) end_process("a rank is dead");
            const bool failing = failed_ || exit_status_ != 0;
            if (failing && now - start > kFailureSeconds) end_process("other ranks do not come to it after an error");
        }
    });
    launch_->finalize();
    {
        const std::lock_guard lock(mutex);
        returned = true;
    }
    over.notify_all();
    guard.join();
}

void Job::end_process(const std::string& why) {
    const int status = exit_status_ == 0 ? 1 : exit_status_.load();
    say("rank " + std::to_string(members_.rank) + " ends without MPI_Finalize, which would not return: " + why);
    std::fflush(nullptr);
    _exit(status);
}

}  // namespace ddl
