// The boundary between C++ and the C interface: exceptions and Statuses become a ddl_result and ddl_last_error().
#pragma once

#include <new>

#include "base/status.h"

namespace ddl {

// Keeps `text` for the calling thread's ddl_last_error(); returns `code`.
ddl_result failed(Code code, const char* text) noexcept;

inline ddl_result result_of(const Status& status) {
    return status.ok() ? DDL_SUCCESS : failed(status.code, status.message.c_str());
}

// Runs a body that returns a Status, and turns whatever it throws into a result.
template <typename Body>
ddl_result guarded(Body body) noexcept {
    try {
        return result_of(body());
    } catch (const Error& error) {
        return failed(error.code(), error.what());
    } catch (const std::bad_alloc&) {
        return failed(DDL_ERROR_MEMORY, "out of memory");
    } catch (const std::exception& error) {
        return failed(DDL_ERROR_INTERNAL, error.what());
    } catch (...) {
        return failed(DDL_ERROR_INTERNAL, "an exception of an unknown type");
    }
}

// Throws Error(DDL_ERROR_ARGUMENT) if the pointer is NULL; `name` is the caller's name for it.
void need(const void* pointer, const char* name);

}  // namespace ddl
