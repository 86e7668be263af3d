// What Python sees of the backend in C++; ddl/torch/fast_path.py is who looks.
#include <pybind11/stl.h>

#include "backend.h"
#include "errors.h"
#include "reaper.h"

PYBIND11_MODULE(_backend, module) {
    using ddl_torch::Backend;
    module.attr("DDL_VERSION") = py::make_tuple(DDL_VERSION_MAJOR, DDL_VERSION_MINOR);
    module.def("translate", &ddl_torch::translate, py::arg("exception_of_code"));
    module.def("end_threads", &ddl_torch::Reaper::end_threads, py::call_guard<py::gil_scoped_release>());
    py::class_<Backend, c10d::Backend, c10::intrusive_ptr<Backend>>(module, "Backend")
        .def(py::init([](py::object group, int rank, int size, std::string name, std::optional<uintptr_t> comm,
                         Backend::Types types, Backend::Operations operations) {
                 return c10::make_intrusive<Backend>(std::move(group), rank, size, std::move(name),
                                                     reinterpret_cast<ddl_comm>(comm.value_or(0)), std::move(types),
                                                     std::move(operations));
             }),
             py::arg("group"), py::arg("rank"), py::arg("size"), py::arg("name"), py::arg("comm"), py::arg("types"),
             py::arg("operations"));
}
