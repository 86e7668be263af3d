// libddl's errors as C++ exceptions that Python gets as those of ddl.errors.
#pragma once

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <exception>
#include <string>
#include <utility>

#include "ddl.h"

namespace ddl_torch {

class Error final : public torch::PyTorchError {
  public:
    Error(ddl_result code, std::string text) : torch::PyTorchError(std::move(text)), code_(code) {}
    PyObject* python_type() override;

  private:
    const ddl_result code_;
};

// Gives to Python the exceptions that codes stand for (ddl.errors.OF_CODE), from whichever of PyTorch's threads and
// functions they come. Once, with the GIL held.
void translate(const py::dict& exception_of_code);

// What the call that this thread has just made has said.
std::exception_ptr error_of(ddl_result code);
// Throws it, where there is one.
void check(ddl_result code);

// Raises the exception that a function of ddl.torch.work makes: the words are there, for both kinds of works.
template <typename... Arguments>
[[noreturn]] void raise(const char* function, const Arguments&... arguments) {
    const py::gil_scoped_acquire gil;
    const py::object error = py::module_::import("ddl.torch.work").attr(function)(arguments...);
    PyErr_SetObject(py::type::handle_of(error).ptr(), error.ptr());
    throw py::error_already_set();
}

}  // namespace ddl_torch
