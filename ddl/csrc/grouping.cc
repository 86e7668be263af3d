#include "grouping.h"

#include <cstring>

#include "group_mpi.h"
#include "group_nccl.h"
#include "status.h"

namespace ddl {
namespace {

// What each rank says of how it fared.
struct Report {
    int32_t code = DDL_SUCCESS;
    char who[128] = "";
    char text[892] = "";
};
static_assert(sizeof(Report) == 1024);

template <size_t size>
void copy(const std::string& text, char (&target)[size]) {
    std::strncpy(target, text.c_str(), size - 1);
}

template <typename Record>
std::vector<Record> gather(Engine& engine, const Record& mine) {
    std::vector<Record> all(static_cast<size_t>(engine.size(kWorld)));
    const Status status =
        engine.run(kWorld, {{Collective::allgather, DDL_UINT8, DDL_SUM, sizeof(Record), 0}, &mine, all.data()});
    if (!status.ok()) throw Error(status.code, status.message);
    return all;
}

// Ranks go on together, or throw the same error together.
void agree(Engine& engine, int rank, const Status& mine) {
    Report report;
    report.code = mine.code;
    copy("rank " + std::to_string(rank) + " (host " + host_name() + ")", report.who);
    copy(mine.message, report.text);
    // All that failed, as one may have failed because another had.
    constexpr int kShown = 4;
    Code code = DDL_SUCCESS;
    std::string text;
    int failed = 0;
    for (const Report& theirs : gather(engine, report)) {
        if (theirs.code == DDL_SUCCESS) continue;
        if (code == DDL_SUCCESS) code = static_cast<Code>(theirs.code);
        if (++failed <= kShown) text += (text.empty() ? "" : "; ") + std::string(theirs.who) + ": " + theirs.text;
    }
    if (failed > kShown) text += "; and " + std::to_string(failed - kShown) + " more";
    if (failed > 0) throw Error(code, "DDL_OPTIONS: modes b and n cannot be used: " + text);
}

template <typename Body>
Status status_of(Body body) {
    try {
        body();
    } catch (const Error& error) {
        return error.status();
    }
    return {};
}

// The GPU that the program has made current; where that is the first, as it is where it has made none, the one with
// this rank's number on its host.
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

struct Ids {
    static constexpr size_t kMost = 8;  // dimensions
    NcclId of[kMost] = {};
};

}  // namespace

Grouping make_grouping(Job& job, Engine& engine, const Plan& plan, int local_rank, double timeout_seconds) {
    Grouping made;
    if (plan.modes.find_first_not_of('r') == std::string::npos) return made;
    const size_t dimensions = plan.dimensions.size();
    const int position = plan.positions[static_cast<size_t>(job.rank())];
    std::vector<std::unique_ptr<GroupComm>> comms(dimensions);
    for (size_t i = 0; i < dimensions; ++i) {
        if (plan.modes[i] != 'm' || plan.dimensions[i] == 1) continue;
        const int at = plan.coordinate(position, i);
        comms[i] = std::make_unique<MpiGroup>(job.split(position - at * plan.stride(i), at, timeout_seconds));
    }
    const auto is_nccl = [&](size_t i) {
        return (plan.modes[i] == 'n' || plan.modes[i] == 'b') && plan.dimensions[i] > 1;
    };
    bool any = false;
    for (size_t i = 0; i < dimensions; ++i) any |= is_nccl(i);
    if (any) {
        std::shared_ptr<NcclJob> nccl;
        Ids mine;
        agree(engine, job.rank(), status_of([&] {
                  if (dimensions > Ids::kMost) {
                      throw Error(DDL_ERROR_UNSUPPORTED, "more than 8 dimensions with modes b and n");
                  }
                  const NcclApi& api = nccl_api();
                  made.device = CudaDevice::of(choose_gpu(cuda_api(), local_rank));
                  nccl = std::make_shared<NcclJob>(api, made.device);
                  for (size_t i = 0; i < dimensions; ++i) {
                      if (is_nccl(i) && plan.coordinate(position, i) == 0) {
                          api.check(api.get_unique_id(&mine.of[i]), "ncclGetUniqueId");
                      }
                  }
              }));
        const std::vector<Ids> ids = gather(engine, mine);
        agree(engine, job.rank(), status_of([&] {
                  for (size_t i = 0; i < dimensions; ++i) {
                      if (!is_nccl(i)) continue;
                      const int at = plan.coordinate(position, i);
                      const int first = plan.ranks[static_cast<size_t>(position - at * plan.stride(i))];
                      comms[i] = make_nccl_group(nccl, ids[static_cast<size_t>(first)].of[i], plan.dimensions[i], at,
                                                 plan.modes[i]);
                  }
              }));
    }
    made.groups = std::make_shared<Groups>(std::move(comms));
    return made;
}

}  // namespace ddl
