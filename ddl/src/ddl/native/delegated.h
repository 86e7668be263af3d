// What the process group in Python does for the one in C++: every call that is not plain.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>

namespace ddl_torch {

// A work of ddl.torch.work.
class Delegated final : public c10d::Work {
  public:
    explicit Delegated(py::object work) : work_(std::move(work)) {}
    ~Delegated() override;

    bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
    bool isCompleted() override;
    bool isSuccess() const override;
    std::exception_ptr exception() const override;
    int sourceRank() const override;
    std::vector<at::Tensor> result() override;
    void synchronize() override { wait(); }
    void blockCurrentStream() override { wait(); }
    void abort() override {}
    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

  private:
    py::object work_;
};

// A ddl.torch.process_group.ProcessGroup. Used with or without the GIL.
class Delegate {
  public:
    explicit Delegate(py::object group) : group_(std::move(group)) {}
    ~Delegate();
    Delegate(const Delegate&) = delete;
    Delegate& operator=(const Delegate&) = delete;

    // What its method gives, which is a work. Throws py::error_already_set.
    template <typename... Arguments>
    c10::intrusive_ptr<c10d::Work> call(const char* method, Arguments&&... arguments) const {
        const py::gil_scoped_acquire gil;
        return c10::make_intrusive<Delegated>(group_.attr(method)(std::forward<Arguments>(arguments)...));
    }
    template <typename... Arguments>
    void tell(const char* method, Arguments&&... arguments) const {
        const py::gil_scoped_acquire gil;
        group_.attr(method)(std::forward<Arguments>(arguments)...);
    }
    // Needs the GIL.
    template <typename... Arguments>
    py::object get(const char* method, Arguments&&... arguments) const {
        return group_.attr(method)(std::forward<Arguments>(arguments)...);
    }

  private:
    py::object group_;
};

}  // namespace ddl_torch
