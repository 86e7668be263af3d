#include "errors.h"

#include <map>

namespace ddl_torch {
namespace {

// Their references are never given back: an exception may be thrown as long as there is a Python.
std::map<int, PyObject*>& exceptions() {
    static auto* const made = new std::map<int, PyObject*>;
    return *made;
}

}  // namespace

PyObject* Error::python_type() {
    const auto found = exceptions().find(code_);
    return found == exceptions().end() ? PyExc_RuntimeError : found->second;
}

void translate(const py::dict& exception_of_code) {
    for (const auto& [code, type] : exception_of_code) exceptions()[code.cast<int>()] = type.inc_ref().ptr();
    py::register_exception_translator([](std::exception_ptr thrown) {
        try {
            if (thrown) std::rethrow_exception(thrown);
        } catch (Error& error) {
            PyErr_SetString(error.python_type(), error.what());
        }
    });
}

std::exception_ptr error_of(ddl_result code) {
    const std::string said = ddl_last_error();
    return std::make_exception_ptr(Error(code, said.empty() ? ddl_error_string(code) : said));
}

void check(ddl_result code) {
    if (code != DDL_SUCCESS) std::rethrow_exception(error_of(code));
}

}  // namespace ddl_torch
