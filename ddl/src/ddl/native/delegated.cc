#include "delegated.h"

#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include <algorithm>

#include "work.h"

namespace ddl_torch {
namespace {

// The last reference may go on a thread that has no GIL, or after Python itself.
void drop(py::object& object) {
    if (!Py_IsInitialized()) {
        object.release();
        return;
    }
    const py::gil_scoped_acquire gil;
    object = py::object();
}

// The error that a Python exception is, to be thrown later and on any thread; null for None.
std::exception_ptr pointer_to(const py::object& error) {
    if (error.is_none()) return nullptr;
    PyErr_SetObject(py::type::handle_of(error).ptr(), error.ptr());
    return std::make_exception_ptr(py::error_already_set());
}

}  // namespace

Delegated::~Delegated() { drop(work_); }

bool Delegated::wait(std::chrono::milliseconds timeout) {
    const py::gil_scoped_acquire gil;
    return work_.attr("wait")(std::max(timeout, kNoTimeout)).cast<bool>();
}

bool Delegated::isCompleted() {
    const py::gil_scoped_acquire gil;
    return work_.attr("is_completed")().cast<bool>();
}

bool Delegated::isSuccess() const {
    const py::gil_scoped_acquire gil;
    return work_.attr("is_success")().cast<bool>();
}

std::exception_ptr Delegated::exception() const {
    const py::gil_scoped_acquire gil;
    return pointer_to(work_.attr("exception")());
}

int Delegated::sourceRank() const {
    const py::gil_scoped_acquire gil;
    return work_.attr("source_rank")().cast<int>();
}

std::vector<at::Tensor> Delegated::result() {
    const py::gil_scoped_acquire gil;
    return work_.attr("result")().cast<std::vector<at::Tensor>>();
}

c10::intrusive_ptr<c10::ivalue::Future> Delegated::getFuture() {
    const py::gil_scoped_acquire gil;
    const auto results = work_.attr("result")().cast<std::vector<at::Tensor>>();
    auto future =
        c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices_of(results));
    // Follows the future in Python, which has seen to the order of streams.
    work_.attr("get_future")().attr("add_done_callback")(py::cpp_function([future, results](const py::object& done) {
        std::exception_ptr error;
        try {
            done.attr("value")();
        } catch (const py::error_already_set&) {
            error = std::current_exception();
        }
        const py::gil_scoped_release released;  // callbacks of its own may block
        error ? future->setError(error) : future->markCompleted(results);
    }));
    return future;
}

Delegate::~Delegate() { drop(group_); }

}  // namespace ddl_torch
