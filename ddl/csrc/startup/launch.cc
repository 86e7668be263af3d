#include "startup/launch.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <utility>

#include "base/shared_library.h"
#include "base/status.h"
#include "startup/environment.h"
#include "startup/front_door.h"
#include "startup/survivors.h"
#include "startup/tcp_rendezvous.h"
#include "startup/welcome.h"
#include "transport/transport_tcp.h"

namespace ddl {
namespace {

class TcpLaunch final : public Launch {
  public:
    TcpLaunch(Start start, const std::string& text, const LaunchOptions& options)
        : start_(std::move(start)), options_(options) {
        members_ = Membership::first(start_.rank, start_.size);
        if (!start_.joins) return;
        Admission made = join(start_, text, within({}, options_.timeout_seconds), options_.warn);
        members_ = std::move(made.members);
        links_ = std::move(made.links);
    }

    bool accept(const Start& start) override {
        if (start.joins || start.rank != members_.rank || start.size != members_.size()) return false;
        start_ = start;
        return true;
    }

    Transport& lobby(int round) override {
        members_.round = round;
        start_.rank = members_.rank;
        start_.size = members_.size();
        if (!links_) {
            door_.reset();  // its key in a store of ours makes room for that of the rendezvous
            links_ = meet(start_, round, options_.timeout_seconds, options_.warn);
        }
        TcpLinks links = *std::exchange(links_, std::nullopt);
        auto made = std::make_unique<TcpTransport>(members_.rank, std::move(links), options_.is_dead);
        last_ = made.get();
        next_ = std::move(made);
        return *next_;
    }

    std::unique_ptr<Transport> connect(const Patience&, const std::function<void(const std::string&)>&) override {
        return std::move(next_);
    }

    std::unique_ptr<GroupComm> group(int, int) override {
        throw Error(DDL_ERROR_UNSUPPORTED,
                    "DDL_OPTIONS: mode m is MPI's collectives, but this job runs over TCP: start it by 'ddlrun "
                    "-m m' or mpirun, set DDL_TRANSPORT=mpi, or take '-mode r'");
    }

    bool can_resize() const override { return true; }
    void keep(std::unique_ptr<Transport> transport) override { next_ = std::move(transport); }

    int waiting(const std::string& options) override {
        if (members_.rank != 0) return 0;
        if (!door_) door_ = std::make_unique<FrontDoor>(start_, options);
        return door_->waiting();
    }

    void resize(bool takes_in, const Patience& patience, const std::function<void(const std::string&)>& warn) override {
        Welcome welcome(members_.rank, members_.size());
        SurvivorOptions options{patience, options_.death_of, warn, {}, {}};
        options.offer = [&] { return takes_in && door_ ? door_->invite(members_.size()) : std::string(); };
        options.prepare = [&](const std::string& offer, uint64_t* ready) { return welcome.prepare(offer, ready); };
        Survivors survivors = agree_on_survivors(*last_, options);
        TcpLinks& links = survivors.links;
        std::vector<TcpLinks::Link> joined = welcome.admit(
            survivors.newcomers, {members_.epoch + 1, members_.round + 1, survivors.ballot, survivors.ranks});
        for (TcpLinks::Link& link : joined) {
            survivors.ranks.push_back(-1);
            links.ranks.push_back(std::move(link));
            if (links.connector) links.numbers.push_back(TcpLinks::kNoNumber);
        }
        const auto place = std::find(survivors.ranks.begin(), survivors.ranks.end(), members_.rank);
        members_ = {members_.epoch + 1, static_cast<int>(place - survivors.ranks.begin()), std::move(survivors.ranks),
                    members_.round + 1};
        links_ = std::move(survivors.links);
    }

  private:
    Start start_;
    const LaunchOptions options_;
    std::unique_ptr<Transport> next_;  // the next session's, once its rendezvous is over
    TcpTransport* last_ = nullptr;     // the last one; it may be in next_, or wrapped in another there
    std::optional<TcpLinks> links_;    // of the epoch that begins with the next lobby()
    std::unique_ptr<FrontDoor> door_;  // if the program has asked who waits
};

bool mpi_started_it() {
    for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE"}) {
        if (std::getenv(name)) return true;
    }
    // A program that has loaded MPI, and that nothing else says a rank of, may have another launcher of MPI's.
    return !is_in_environment() && !loaded_library("libmpi").empty();
}

std::unique_ptr<Launch> launch_of_mpi(const LaunchOptions& options) {
    const std::string instead =
        is_in_environment() ? ". Without MPI, DDL_TRANSPORT=tcp takes RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
                            : "";
    const SharedLibrary plugin({"libddl_mpi.so"}, "ddl_init: MPI started this process, but libddl's plugin for MPI",
                               "install it with the MPI that it was built for (conda: libddl-mpi; pip: install "
                               "./ddl again where that MPI's mpicxx is in PATH)" +
                                   instead,
                               SharedLibrary::Scope::global);
    const MpiPlugin& (*found)() = nullptr;
    plugin.find("ddl_mpi_plugin", &found);
    const MpiPlugin& its = found();
    if (its.version != ddl_version() || its.build != DDL_BUILD) {
        const auto name = [](int version, unsigned build) {
            char text[64];
            std::snprintf(text, sizeof text, "version %d, build %08x", version, build);
            return std::string(text);
        };
        throw Error(DDL_ERROR_UNSUPPORTED, "ddl_init: libddl is " + name(ddl_version(), DDL_BUILD) +
                                               ", but its plugin for MPI, " + "libddl_mpi.so, is " +
                                               name(its.version, its.build) + ": install both of one build" + instead);
    }
    return its.launch(options);
}

}  // namespace

std::unique_ptr<Launch> make_launch(const Start* start, const std::string& text, const LaunchOptions& options) {
    if (start) return std::make_unique<TcpLaunch>(*start, text, options);
    const char* transport = std::getenv("DDL_TRANSPORT");
    const std::string asked = transport && *transport ? transport : "auto";
    if (asked != "auto" && asked != "mpi" && asked != "tcp") {
        throw Error(DDL_ERROR_ARGUMENT, "DDL_TRANSPORT is '" + asked + "', but must be auto, mpi or tcp");
    }
    if (asked == "mpi" || (asked == "auto" && mpi_started_it())) return launch_of_mpi(options);
    if (is_in_environment()) return std::make_unique<TcpLaunch>(start_of_environment(false), text, options);
    const char* size = std::getenv("WORLD_SIZE");
    const bool alone = !size || std::atoi(size) <= 1;
    if (asked == "auto" && alone) return std::make_unique<TcpLaunch>(Start{}, text, options);  // a job of one process
    throw Error(
        DDL_ERROR_ARGUMENT,
        (alone ? "ddl_init: DDL_TRANSPORT is tcp" : "ddl_init: WORLD_SIZE is " + std::string(size)) +
            ", but RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are not all set: set them, or call ddl_init_with");
}

}  // namespace ddl
