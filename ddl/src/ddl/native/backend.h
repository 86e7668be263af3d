// torch.distributed's backend over libddl, in C++: the fast path of what is called most.
//
// Plain calls (one dense, contiguous tensor, of types and by operations that libddl has) go straight to libddl, without
// Python's lock. All others, those that are wrong included, are made by the process group in Python: the rules and the
// words of errors are there and nowhere else. Both use one communicator, so that calls keep their order.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "delegated.h"
#include "work.h"

namespace ddl_torch {

class Backend final : public c10d::Backend {
  public:
    using Types = std::map<at::ScalarType, int>;                  // ddl_type of each that libddl has
    using Operations = std::map<c10d::ReduceOp::RedOpType, int>;  // ddl_op likewise
    using WorkPtr = c10::intrusive_ptr<c10d::Work>;
    using Tensors = std::vector<at::Tensor>;

    // `comm` is that of `group`, the process group in Python, and freed by it.
    Backend(py::object group, int rank, int size, std::string name, ddl_comm comm, Types types, Operations operations);

    const std::string getBackendName() const override { return "ddl"; }
    void setTimeout(std::chrono::milliseconds timeout) override;
    void setSequenceNumberForGroup() override { sequence_ = 0; }
    uint64_t getSequenceNumberForGroup() override { return sequence_; }
    void startCoalescing() override;
    WorkPtr endCoalescing() override;
    void shutdown() override;
    void abort() override;
    bool supportsShrinking() const override { return true; }
    c10::intrusive_ptr<c10d::Backend> shrink(const std::vector<int64_t>& ranks_to_exclude, int flags,
                                             const c10::intrusive_ptr<Options>& options) override;

    WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
    WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
    WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override;
    WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
    WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                           const c10d::ReduceScatterOptions& opts) override;
    WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                 const c10d::ReduceScatterOptions& opts) override;
    WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                            const c10d::ReduceScatterOptions& opts) override;
    WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
    WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;
    WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                const c10d::AllgatherOptions& opts) override;
    WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override;
    WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                            const c10d::AllgatherOptions& opts) override;
    WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override;
    WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override;
    WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                          std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) override;
    WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;
    WorkPtr barrier(const c10d::BarrierOptions& opts) override;
    WorkPtr send(Tensors& tensors, int peer, int tag) override;
    WorkPtr recv(Tensors& tensors, int peer, int tag) override;
    WorkPtr recvAnysource(Tensors& tensors, int tag) override;

  private:
    struct Plain;

    template <typename... Arguments>
    WorkPtr delegate(const char* method, Arguments&&... arguments);
    template <typename Call>
    WorkPtr start(c10d::OpType type, const char* name, Tensors results, Tensors tensors, Call call);
    const int* type_of(const at::Tensor& tensor) const;
    const int* operation_of(const c10d::ReduceOp& op) const;
    WorkPtr receive(Tensors& tensors, int peer, int tag, c10d::OpType type);

    const Delegate python_;
    const std::shared_ptr<Group> group_;
    const Types types_;
    const Operations operations_;
    std::atomic<uint64_t> sequence_{0};
    std::atomic<bool> coalescing_{false};  // Python's group then has all calls
};

}  // namespace ddl_torch
