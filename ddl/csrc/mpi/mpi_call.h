// MPI's C interface, and one way to check its calls. What every file that calls MPI includes instead of mpi.h.
#pragma once

// The C++ bindings of older versions would be linked for nothing, and break linking against another MPI.
#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>

#include <string>

#include "base/status.h"

namespace ddl {

// MPI's words for one of its error codes.
inline std::string mpi_error(int code) {
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    if (MPI_Error_string(code, text, &length) != MPI_SUCCESS) return "error " + std::to_string(code);
    return {text, static_cast<size_t>(length)};
}

// Throws Error(DDL_ERROR_TRANSPORT) that names the call, if `code` is not success.
inline void check_mpi(int code, const char* call) {
    if (code == MPI_SUCCESS) return;
    throw Error(DDL_ERROR_TRANSPORT,
                std::string(call) + " failed: " + mpi_error(code) + ". MPI's own output may say more");
}

}  // namespace ddl
