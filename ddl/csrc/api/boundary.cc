#include "api/boundary.h"

namespace ddl {
namespace {

std::string& last_error() {
    thread_local std::string text;
    return text;
}

}  // namespace

ddl_result failed(Code code, const char* text) noexcept {
    try {
        last_error() = text;
    } catch (...) {
        last_error().clear();  // no memory for the words: the code has to do
    }
    return code;
}

void need(const void* pointer, const char* name) {
    if (!pointer)
        throw Error(DDL_ERROR_ARGUMENT, std::string(name) + " is NULL: it must point to where the result goes");
}

}  // namespace ddl

const char* ddl_last_error() { return ddl::last_error().c_str(); }
