#include "startup/launch.h"

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <utility>

#include "base/shared_library.h"
#include "base/status.h"
#include "startup/environment.h"
#include "startup/survivors.h"
#include "startup/tcp_rendezvous.h"
#include "transport/transport_tcp.h"

namespace ddl {
namespace {

class TcpLaunch final : public Launch {
  public:
    TcpLaunch(Membership members, const LaunchOptions& options) : members_(std::move(members)), options_(options) {}

    int rank() const override { return members_.rank; }
    int size() const override { return members_.size; }

    bool accept(const Membership& members) override {
        if (members.rank != rank() || members.size != size()) return false;
        members_ = members;
        return true;
    }

    Transport& lobby(int round) override {
        auto made = streams_ ? std::make_unique<TcpTransport>(rank(), *std::exchange(streams_, {}), options_.is_dead)
                             : std::make_unique<TcpTransport>(rank(), meet(members_, round, options_.timeout_seconds),
                                                              options_.is_dead);
        last_ = made.get();
        next_ = std::move(made);
        return *next_;
    }

    std::unique_ptr<Transport> connect(const Patience&, const std::function<void(const std::string&)>&) override {
        return std::move(next_);
    }

    std::unique_ptr<GroupComm> group(int, int) override {
        throw Error(DDL_ERROR_UNSUPPORTED,
                    "DDL_OPTIONS: mode m is MPI's collectives, but this job runs over TCP: start it by ddlrun or "
                    "mpirun, or take '-mode r'");
    }

    bool can_shrink() const override { return true; }
    void keep(std::unique_ptr<Transport> transport) override { next_ = std::move(transport); }

    std::vector<int> shrink(const Patience& patience, const std::function<void(const std::string&)>& warn) override {
        Survivors survivors = agree_on_survivors(*last_, {patience, options_.death_of, warn});
        const auto place = std::lower_bound(survivors.ranks.begin(), survivors.ranks.end(), members_.rank);
        members_.rank = static_cast<int>(place - survivors.ranks.begin());
        members_.size = static_cast<int>(survivors.ranks.size());
        streams_ = std::move(survivors.streams);
        return survivors.ranks;
    }

  private:
    Membership members_;
    const LaunchOptions options_;
    std::unique_ptr<Transport> next_;                // the next session's, once its rendezvous is over
    TcpTransport* last_ = nullptr;                   // the last one; it may be in next_, or wrapped in another there
    std::optional<std::vector<TcpStream>> streams_;  // of the epoch that begins with the next lobby()
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
                               "bascule-ddl again where that MPI's mpicxx is in PATH)" +
                                   instead,
                               SharedLibrary::Scope::global);
    const MpiPlugin& (*found)() = nullptr;
    plugin.find("ddl_mpi_plugin", &found);
    const MpiPlugin& its = found();
    if (its.version != ddl_version()) {
        throw Error(DDL_ERROR_UNSUPPORTED, "ddl_init: libddl has version " + std::to_string(ddl_version()) +
                                               ", but its plugin for MPI, libddl_mpi.so, has " +
                                               std::to_string(its.version) + ": install both of one version" + instead);
    }
    return its.launch(options);
}

}  // namespace

std::unique_ptr<Launch> make_launch(const Membership* members, const LaunchOptions& options) {
    if (members) return std::make_unique<TcpLaunch>(*members, options);
    const char* text = std::getenv("DDL_TRANSPORT");
    const std::string asked = text && *text ? text : "auto";
    if (asked != "auto" && asked != "mpi" && asked != "tcp") {
        throw Error(DDL_ERROR_ARGUMENT, "DDL_TRANSPORT is '" + asked + "', but must be auto, mpi or tcp");
    }
    if (asked == "mpi" || (asked == "auto" && mpi_started_it())) return launch_of_mpi(options);
    if (is_in_environment()) return std::make_unique<TcpLaunch>(membership_of_environment(), options);
    const char* size = std::getenv("WORLD_SIZE");
    const bool alone = !size || std::atoi(size) <= 1;
    if (asked == "auto" && alone) return std::make_unique<TcpLaunch>(Membership{}, options);  // a job of one process
    throw Error(
        DDL_ERROR_ARGUMENT,
        (alone ? "ddl_init: DDL_TRANSPORT is tcp" : "ddl_init: WORLD_SIZE is " + std::string(size)) +
            ", but RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are not all set: set them, or call ddl_init_with");
}

}  // namespace ddl
