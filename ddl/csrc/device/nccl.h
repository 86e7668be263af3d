// NCCL, loaded at run time. Its functions are declared here as in its documentation (NCCL API, 2.14 and later); its
// header is not needed.
//
// Our communicators are non-blocking: a thread of NCCL's own waits for the other ranks while it joins them or connects
// for the first collectives, so we can give up on a rank that never comes. While ncclCommGetAsyncError returns "in
// progress", the communicator accepts no call but ncclCommAbort.
#pragma once

#include <cstddef>
#include <string>

#include "base/types.h"
#include "device/cuda.h"

namespace ddl {

using NcclComm = void*;  // ncclComm_t

struct NcclId {  // ncclUniqueId, which is passed by value
    char bytes[128];
};

struct NcclConfig {  // ncclConfig_t as of 2.14, which later versions recognise
    size_t size = sizeof(NcclConfig);
    unsigned magic = 0xcafebeef;
    unsigned version = 21400;
    int blocking = 0;
    int reserved = 0;
};

struct NcclApi {
    int (*get_version)(int*);
    const char* (*error_string)(int);
    const char* (*last_error)(NcclComm);
    int (*get_unique_id)(NcclId*);
    int (*init_rank)(NcclComm*, int size, NcclId, int rank, NcclConfig*);
    int (*abort)(NcclComm);
    int (*async_error)(NcclComm, int*);
    int (*group_start)();
    int (*group_end)();
    int (*reduce_scatter)(const void*, void*, size_t, int type, int op, NcclComm, CudaStream);
    int (*all_gather)(const void*, void*, size_t, int type, NcclComm, CudaStream);
    int (*reduce)(const void*, void*, size_t, int type, int op, int root, NcclComm, CudaStream);
    int (*broadcast)(const void*, void*, size_t, int type, int root, NcclComm, CudaStream);
    int (*send)(const void*, size_t, int type, int peer, NcclComm, CudaStream);
    int (*receive)(void*, size_t, int type, int peer, NcclComm, CudaStream);

    std::string library;
    int version = 0;  // major * 10000 + minor * 100 + patch

    // Throws Error(DDL_ERROR_TRANSPORT), which names the call, if `code` is not success.
    void check(int code, const char* call, NcclComm comm = nullptr) const;
    // The same, but returns true if NCCL is still in progress.
    bool in_progress(int code, const char* call, NcclComm comm) const;
};

// $DDL_NCCL_LIB, else libnccl.so.2. Throws Error(DDL_ERROR_UNSUPPORTED) if it cannot be loaded or is older than 2.14.
const NcclApi& nccl_api();

// ncclDataType_t and ncclRedOp_t.
int nccl_type(DataType type);
int nccl_op(ReduceOp op);

}  // namespace ddl
