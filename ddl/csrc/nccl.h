// NCCL, found at run time. Its functions are declared here as its documentation gives them (NCCL API, 2.10 and later);
// no header of it is needed.
#pragma once

#include <cstddef>
#include <string>

#include "cuda.h"
#include "types.h"

namespace ddl {

using NcclComm = void*;  // ncclComm_t

struct NcclId {  // ncclUniqueId, which is passed by value
    char bytes[128];
};

struct NcclApi {
    int (*get_version)(int*);
    const char* (*error_string)(int);
    const char* (*last_error)(NcclComm);  // null before 2.13
    int (*get_unique_id)(NcclId*);
    int (*init_rank)(NcclComm*, int size, NcclId, int rank);
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

    // Throws Error(DDL_ERROR_TRANSPORT) that names the call, where `code` is none of success.
    void check(int code, const char* call, NcclComm comm = nullptr) const;
};

// $DDL_NCCL_LIB, else libnccl.so.2. Throws Error(DDL_ERROR_UNSUPPORTED) where it cannot be loaded or is older
// than 2.10.
const NcclApi& nccl_api();

// ncclDataType_t and ncclRedOp_t.
int nccl_type(DataType type);
int nccl_op(ReduceOp op);

}  // namespace ddl
