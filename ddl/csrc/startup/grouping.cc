#include "startup/grouping.h"

#include <cstring>
#include <utility>

#include "base/backoff.h"
#include "base/say.h"
#include "base/status.h"
#include "device/group_nccl.h"

namespace ddl {
namespace {

constexpr size_t kMostDimensions = 8;

// What each rank says of how it fared, and of each dimension in whose group it is the first the communicator's id.
struct Report {
    int32_t code = DDL_SUCCESS;
    char who[128] = "";
    char text[892] = "";
    NcclId ids[kMostDimensions] = {};
};
static_assert(sizeof(Report) == 2048);

std::string name_of(const Job& job) {
    return "rank " + std::to_string(job.members().rank) + " (host " + host_name() + ")";
}

Error unusable(Code code, const std::string& text) {
    return Error(code, "DDL_OPTIONS: modes b and n cannot be used: " + text);
}

// Everyone's reports; throws what failed on any rank, the same on all.
std::vector<Report> exchange(Engine& engine, const Report& mine) {
    std::vector<Report> all(static_cast<size_t>(engine.size(kWorld)));
    Call call{{Collective::allgather, DDL_UINT8, DDL_SUM, sizeof mine, 0}, &mine, all.data()};
    call.purpose = Purpose::init;
    if (const Status status = engine.run(kWorld, call); !status.ok()) throw Error(status.code, status.message);
    // All that failed, as one may have failed because another had.
    constexpr int kShown = 4;
    Code code = DDL_SUCCESS;
    std::string text;
    int failed = 0;
    for (const Report& theirs : all) {
        if (theirs.code == DDL_SUCCESS) continue;
        if (code == DDL_SUCCESS) code = static_cast<Code>(theirs.code);
        if (++failed <= kShown) text += (text.empty() ? "" : "; ") + std::string(theirs.who) + ": " + theirs.text;
    }
    if (failed > kShown) text += "; and " + std::to_string(failed - kShown) + " more";
    if (failed > 0) throw unusable(code, text);
    return all;
}

// The GPU that the program has made current. If that is GPU 0, perhaps because the program made none current, the one
// with this rank's number on its host.
int choose_gpu(const CudaApi& cuda, int local_rank) {
    int count = 0, current = 0;
    const int code = cuda.get_device_count(&count);
    if (code != 0 || count == 0) {
        throw Error(DDL_ERROR_UNSUPPORTED, std::string("no GPU is seen (") +
                                               (code != 0 ? cuda.error_string(code) : "there are 0") +
                                               "): check nvidia-smi and CUDA_VISIBLE_DEVICES, or take '-mode r'");
    }
    cuda.check(cuda.get_device(&current), "cudaGetDevice");
    return current != 0 ? current : local_rank % count;
}

bool is_nccl(const Plan& plan, size_t dimension) {
    const char mode = plan.modes[dimension];
    return (mode == 'n' || mode == 'b') && plan.dimensions[dimension] > 1;
}

// Waits until NCCL has joined what it was asked to join. NCCL itself waits for ever for a rank that does not come: who
// fails tells the others, by breaking their engine's communicator.
void await_joined(Job& job, Engine& engine, const NcclJob& nccl, const NcclGroupsOptions& options) {
    const double begin = seconds_now();
    bool warned = false;
    for (Backoff backoff(0, 1e-3); !nccl.joined(); backoff.pause()) {
        if (const Status told = engine.state(kWorld); !told.ok()) throw Error(told.code, told.message);
        for (int rank = 0; rank < job.members().size(); ++rank) {
            if (!job.is_dead(rank)) continue;
            throw Error(DDL_ERROR_PEER_LOST, "rank " + std::to_string(rank) + " died meanwhile");
        }
        const double waited = seconds_now() - begin;
        const auto text = [&] {
            return "it has waited " + std::to_string(static_cast<int>(waited)) +
                   " s in ddl_init for NCCL, which joins the ranks' GPUs: NCCL_DEBUG=INFO says how far it is, "
                   "NCCL_SOCKET_IFNAME which network it takes";
        };
        if (waited >= options.patience.timeout_seconds) {
            throw Error(DDL_ERROR_TIMEOUT, text() + ". " + kPatienceOfInit);
        }
        if (waited >= options.patience.warn_seconds && !std::exchange(warned, true)) {
            options.warn(name_of(job) + ": " + text());
        }
    }
}

// The one that was made last: no session is joined before the last one has ended.
std::shared_ptr<NcclJob>& last_nccl() {
    static auto* last = new std::shared_ptr<NcclJob>;
    return *last;
}

}  // namespace

GroupComms make_mpi_groups(Job& job, const Plan& plan) {
    GroupComms comms(plan.dimensions.size());
    const int position = plan.positions[static_cast<size_t>(job.members().rank)];
    for (size_t i = 0; i < comms.size(); ++i) {
        if (plan.modes[i] != 'm' || plan.dimensions[i] == 1) continue;
        const int at = plan.coordinate(position, i);
        comms[i] = job.group(position - at * plan.stride(i), at);
    }
    return comms;
}

std::shared_ptr<CudaDevice> make_nccl_groups(Job& job, Engine& engine, const Plan& plan,
                                             const NcclGroupsOptions& options, GroupComms* comms) {
    const size_t dimensions = plan.dimensions.size();
    bool any = false;
    for (size_t i = 0; i < dimensions; ++i) any |= is_nccl(plan, i);
    if (!any) return nullptr;
    const int position = plan.positions[static_cast<size_t>(job.members().rank)];
    std::shared_ptr<NcclJob> nccl;
    Report mine;
    name_of(job).copy(mine.who, sizeof mine.who - 1);
    try {
        if (dimensions > kMostDimensions) {
            throw Error(DDL_ERROR_UNSUPPORTED, "more than 8 dimensions with modes b and n");
        }
        const NcclApi& api = nccl_api();
        nccl = std::make_shared<NcclJob>(api, CudaDevice::of(choose_gpu(cuda_api(), options.local_rank)));
        for (size_t i = 0; i < dimensions; ++i) {
            if (!is_nccl(plan, i) || plan.coordinate(position, i) != 0) continue;
            api.check(api.get_unique_id(&mine.ids[i]), "ncclGetUniqueId");
        }
    } catch (const Error& error) {
        mine.code = error.code();
        std::strncpy(mine.text, error.what(), sizeof mine.text - 1);
    }
    last_nccl() = nccl;
    const std::vector<Report> reports = exchange(engine, mine);
    try {
        // One after the other, the same on all ranks: a thread may have one call of NCCL's in progress.
        for (size_t i = 0; i < dimensions; ++i) {
            if (!is_nccl(plan, i)) continue;
            const int at = plan.coordinate(position, i);
            const int first = plan.ranks[static_cast<size_t>(position - at * plan.stride(i))];
            const NcclComm comm = nccl->join(reports[static_cast<size_t>(first)].ids[i], plan.dimensions[i], at);
            await_joined(job, engine, *nccl, options);
            (*comms)[i] = make_nccl_group(nccl, comm, plan.dimensions[i], at, plan.modes[i]);
        }
    } catch (const Error& error) {
        engine.fail(kWorld, unusable(error.code(), name_of(job) + ": " + error.what()).status());
        nccl->abort();
        const Status first = engine.state(kWorld);  // another rank may have failed before
        throw Error(first.code, first.message);
    }
    // Nobody goes on before all have joined.
    Call barrier{{Collective::barrier, DDL_UINT8, DDL_SUM, 0, 0}, nullptr, nullptr};
    barrier.purpose = Purpose::init;
    if (const Status status = engine.run(kWorld, barrier); !status.ok()) {
        nccl->abort();
        throw Error(status.code, status.message);
    }
    return CudaDevice::of(nccl->device().gpu());
}

void free_former_nccl() {
    if (const auto former = std::exchange(last_nccl(), nullptr)) former->abort();
}

}  // namespace ddl
