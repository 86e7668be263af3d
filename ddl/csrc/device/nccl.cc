#include "device/nccl.h"

#include "base/shared_library.h"
#include "base/status.h"

namespace ddl {
namespace {

constexpr int kOldest = 21400;
constexpr int kInProgress = 7;

NcclApi load() {
    const std::string chosen = chosen_library("DDL_NCCL_LIB");
    const SharedLibrary library({chosen.empty() ? "libnccl.so.2" : chosen}, "NCCL, for modes b and n,",
                                "install it (pip: nvidia-nccl-cu12 or -cu13), name its file in DDL_NCCL_LIB, or take "
                                "'-mode r'");
    NcclApi api{};
    api.library = library.name();
    library.find("ncclGetVersion", &api.get_version);
    library.find("ncclGetErrorString", &api.error_string);
    library.find("ncclGetUniqueId", &api.get_unique_id);
    library.find("ncclCommAbort", &api.abort);
    library.find("ncclCommGetAsyncError", &api.async_error);
    library.find("ncclGroupStart", &api.group_start);
    library.find("ncclGroupEnd", &api.group_end);
    library.find("ncclReduceScatter", &api.reduce_scatter);
    library.find("ncclAllGather", &api.all_gather);
    library.find("ncclReduce", &api.reduce);
    library.find("ncclBroadcast", &api.broadcast);
    library.find("ncclSend", &api.send);
    library.find("ncclRecv", &api.receive);
    static_cast<void>(api.get_version(&api.version));
    if (api.version < kOldest) {
        throw Error(DDL_ERROR_UNSUPPORTED, api.library + " is NCCL " + std::to_string(api.version) +
                                               ", but 2.14 (21400) or later is needed: install a later one");
    }
    library.find("ncclGetLastError", &api.last_error);
    library.find("ncclCommInitRankConfig", &api.init_rank);
    return api;
}

}  // namespace

void NcclApi::check(int code, const char* call, NcclComm comm) const {
    if (code == 0) return;
    std::string text = std::string(call) + " failed: " + error_string(code);
    if (const char* more = last_error(comm); more && *more) text += ": " + std::string(more);
    throw Error(DDL_ERROR_TRANSPORT, text + ". NCCL_DEBUG=WARN says more");
}

bool NcclApi::in_progress(int code, const char* call, NcclComm comm) const {
    if (code != kInProgress) check(code, call, comm);
    return code == kInProgress;
}

const NcclApi& nccl_api() {
    static const auto* made = new NcclApi(load());  // until the process ends
    return *made;
}

int nccl_type(DataType type) {
    switch (type) {
        case DDL_FLOAT16: return 6;
        case DDL_BFLOAT16: return 9;
        case DDL_FLOAT32: return 7;
        case DDL_FLOAT64: return 8;
        case DDL_INT8: return 0;
        case DDL_INT32: return 2;
        case DDL_INT64: return 4;
        case DDL_UINT8: return 1;
    }
    throw Error(DDL_ERROR_ARGUMENT, "data type " + std::to_string(static_cast<int>(type)) + " is not a ddl_type");
}

int nccl_op(ReduceOp op) {
    switch (op) {
        case DDL_SUM:
        case DDL_AVERAGE: return 0;  // summed; divided once, at the end
        case DDL_PRODUCT: return 1;
        case DDL_MAX: return 2;
        case DDL_MIN: return 3;
    }
    throw Error(DDL_ERROR_ARGUMENT, "operation " + std::to_string(static_cast<int>(op)) + " is not a ddl_op");
}

}  // namespace ddl
