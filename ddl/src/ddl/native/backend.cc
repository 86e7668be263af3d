#include "backend.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <utility>

#include "errors.h"

namespace ddl_torch {
namespace {

// In memory that libddl takes as it lies.
bool is_plain(const at::Tensor& tensor) {
    return tensor.layout() == at::kStrided && (tensor.is_cpu() || tensor.is_cuda()) && tensor.is_contiguous() &&
           !tensor.is_conj() && !tensor.is_neg() &&
           reinterpret_cast<uintptr_t>(tensor.data_ptr()) % tensor.element_size() == 0;
}

bool is_plain(const at::Tensor& one, const at::Tensor& other) {
    return is_plain(one) && is_plain(other) && one.scalar_type() == other.scalar_type() &&
           one.device() == other.device();
}

bool is_plain(const std::vector<at::Tensor>& tensors) { return tensors.size() == 1 && is_plain(tensors[0]); }

size_t count_of(const at::Tensor& tensor) { return static_cast<size_t>(tensor.numel()); }

std::byte* memory_of(const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.data_ptr()); }

bool overlap(const at::Tensor& one, const at::Tensor& other) {
    return one.nbytes() > 0 && other.nbytes() > 0 && memory_of(one) < memory_of(other) + other.nbytes() &&
           memory_of(other) < memory_of(one) + one.nbytes();
}

// While it lives, this thread's calls with tensors in a GPU's memory are ordered behind what PyTorch's current stream
// was given. Results need no order: they are there when a request is over.
class OnCurrentStream {
  public:
    explicit OnCurrentStream(const std::vector<at::Tensor>& tensors) {
        if (tensors.empty() || tensors[0].is_cpu()) return;
        const c10::impl::VirtualGuardImpl device(tensors[0].device().type());
        is_set_ = true;
        check(ddl_set_stream(device.getStream(tensors[0].device()).native_handle()));
    }
    ~OnCurrentStream() {
        if (is_set_) ddl_set_stream(nullptr);
    }
    OnCurrentStream(const OnCurrentStream&) = delete;
    OnCurrentStream& operator=(const OnCurrentStream&) = delete;

  private:
    bool is_set_ = false;
};

}  // namespace

Backend::Backend(py::object group, int rank, int size, std::string name, ddl_comm comm, Types types,
                 Operations operations)
    : c10d::Backend(rank, size),
      python_(std::move(group)),
      group_(std::make_shared<Group>(std::move(name), comm)),
      types_(std::move(types)),
      operations_(std::move(operations)) {}

void Backend::setTimeout(std::chrono::milliseconds timeout) { python_.tell("set_timeout", timeout); }

void Backend::startCoalescing() {
    python_.tell("_start_coalescing");
    coalescing_ = true;
}

Backend::WorkPtr Backend::endCoalescing() {
    coalescing_ = false;
    return python_.call("_end_coalescing");
}

void Backend::shutdown() {
    python_.tell("shutdown");
    group_->in_order.stop();
    group_->in_any_order.stop();
}

void Backend::abort() { shutdown(); }

c10::intrusive_ptr<c10d::Backend> Backend::shrink(const std::vector<int64_t>& ranks_to_exclude, int,
                                                  const c10::intrusive_ptr<Options>&) {
    const py::gil_scoped_acquire gil;
    return python_.get("shrink", ranks_to_exclude).cast<c10::intrusive_ptr<c10d::Backend>>();
}

// ---- Starting -------------------------------------------------------------------------------------------------------

template <typename... Arguments>
Backend::WorkPtr Backend::delegate(const char* method, Arguments&&... arguments) {
    ++sequence_;
    return python_.call(method, std::forward<Arguments>(arguments)...);
}

template <typename Call>
Backend::WorkPtr Backend::start(c10d::OpType type, const char* name, Tensors results, Tensors tensors, Call call) {
    ++sequence_;
    const OnCurrentStream order(tensors);
    auto work = c10::make_intrusive<Work>(group_, type, name, std::move(results), std::move(tensors));
    work->start(std::move(call));
    return work;
}

const int* Backend::type_of(const at::Tensor& tensor) const {
    const auto found = types_.find(tensor.scalar_type());
    return found == types_.end() ? nullptr : &found->second;
}

const int* Backend::operation_of(const c10d::ReduceOp& op) const {
    const auto found = operations_.find(op);
    return found == operations_.end() ? nullptr : &found->second;
}

// ---- Reductions -----------------------------------------------------------------------------------------------------

Backend::WorkPtr Backend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
    const int* const op = operation_of(opts.reduceOp);
    const int* const type = tensors.empty() ? nullptr : type_of(tensors[0]);
    if (coalescing_ || !op || !type || !is_plain(tensors)) return delegate("allreduce", tensors, opts);
    return start(c10d::OpType::ALLREDUCE, "allreduce", tensors, tensors, [&](ddl_request* request, int*) {
        std::byte* const memory = memory_of(tensors[0]);
        const auto how = std::make_pair(static_cast<ddl_type>(*type), static_cast<ddl_op>(*op));
        const size_t count = count_of(tensors[0]);
        return opts.asyncOp ? ddl_iallreduce(memory, memory, count, how.first, how.second, group_->comm, request)
                            : ddl_allreduce(memory, memory, count, how.first, how.second, group_->comm);
    });
}

Backend::WorkPtr Backend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
    return delegate("allreduce", tensors, opts);  // which says that it cannot be
}

Backend::WorkPtr Backend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
    return delegate("allreduce_coalesced", tensors, opts);
}

Backend::WorkPtr Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
    return delegate("reduce", tensors, opts);
}

Backend::WorkPtr Backend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                         const c10d::ReduceScatterOptions& opts) {
    return delegate("reduce_scatter", outputs, inputs, opts);
}

Backend::WorkPtr Backend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                               const c10d::ReduceScatterOptions& opts) {
    const int* const op = operation_of(opts.reduceOp);
    const int* const type = type_of(input);
    const bool fits = input.numel() == output.numel() * getSize();
    if (coalescing_ || !op || !type || !fits || !is_plain(input, output) || overlap(input, output)) {
        return delegate("reduce_scatter_single", output, input, opts);
    }
    return start(c10d::OpType::_REDUCE_SCATTER_BASE, "reduce_scatter", {output}, {output, input},
                 [&](ddl_request* request, int*) {
                     std::byte *const from = memory_of(input), *const to = memory_of(output);
                     const auto how = std::make_pair(static_cast<ddl_type>(*type), static_cast<ddl_op>(*op));
                     const size_t count = count_of(output);
                     return opts.asyncOp
                                ? ddl_ireduce_scatter(from, to, count, how.first, how.second, group_->comm, request)
                                : ddl_reduce_scatter(from, to, count, how.first, how.second, group_->comm);
                 });
}

Backend::WorkPtr Backend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                          const c10d::ReduceScatterOptions& opts) {
    return delegate("reduce_scatter_single_coalesced", outputs, inputs, opts);
}

// ---- Movements ------------------------------------------------------------------------------------------------------

Backend::WorkPtr Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
    const int* const type = tensors.empty() ? nullptr : type_of(tensors[0]);
    if (coalescing_ || !type || !is_plain(tensors)) return delegate("broadcast", tensors, opts);
    return start(c10d::OpType::BROADCAST, "broadcast", tensors, tensors, [&](ddl_request* request, int*) {
        std::byte* const memory = memory_of(tensors[0]);
        const auto root = static_cast<int>(opts.rootRank);
        const size_t count = count_of(tensors[0]);
        const auto kind = static_cast<ddl_type>(*type);
        return opts.asyncOp ? ddl_ibroadcast(memory, count, kind, root, group_->comm, request)
                            : ddl_broadcast(memory, count, kind, root, group_->comm);
    });
}

Backend::WorkPtr Backend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                    const c10d::AllgatherOptions& opts) {
    return delegate("allgather", outputs, inputs, opts);
}

Backend::WorkPtr Backend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                              const c10d::AllgatherOptions& opts) {
    return delegate("allgather_coalesced", outputs, inputs, opts);
}

Backend::WorkPtr Backend::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) {
    const int* const type = type_of(input);
    const bool fits = output.numel() == input.numel() * getSize();
    bool plain = !coalescing_ && type && fits && is_plain(input, output);
    if (plain && overlap(input, output)) {
        plain = memory_of(input) == memory_of(output) + static_cast<size_t>(getRank()) * input.nbytes();
    }
    if (!plain) return delegate("all_gather_single", output, input, opts);
    return start(c10d::OpType::_ALLGATHER_BASE, "allgather", {output}, {output, input},
                 [&](ddl_request* request, int*) {
                     std::byte *const from = memory_of(input), *const to = memory_of(output);
                     const size_t count = count_of(input);
                     const auto kind = static_cast<ddl_type>(*type);
                     return opts.asyncOp ? ddl_iallgather(from, to, count, kind, group_->comm, request)
                                         : ddl_allgather(from, to, count, kind, group_->comm);
                 });
}

Backend::WorkPtr Backend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                          const c10d::AllgatherOptions& opts) {
    return delegate("all_gather_single_coalesced", outputs, inputs, opts);
}

Backend::WorkPtr Backend::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) {
    return delegate("gather", outputs, inputs, opts);
}

Backend::WorkPtr Backend::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) {
    return delegate("scatter", outputs, inputs, opts);
}

Backend::WorkPtr Backend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) {
    return delegate("all_to_all_single", output, input, output_splits, input_splits, opts);
}

Backend::WorkPtr Backend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) {
    return delegate("alltoall", outputs, inputs, opts);
}

// ---- Messages and the barrier ---------------------------------------------------------------------------------------

Backend::WorkPtr Backend::barrier(const c10d::BarrierOptions& opts) {
    if (coalescing_) return delegate("barrier", opts);
    return start(c10d::OpType::BARRIER, "barrier", {}, {}, [&](ddl_request* request, int*) {
        return opts.asyncOp ? ddl_ibarrier(group_->comm, request) : ddl_barrier(group_->comm);
    });
}

Backend::WorkPtr Backend::send(Tensors& tensors, int peer, int tag) {
    const int* const type = tensors.empty() ? nullptr : type_of(tensors[0]);
    if (coalescing_ || !type || !is_plain(tensors) || !tensors[0].is_cpu()) return delegate("send", tensors, peer, tag);
    return start(c10d::OpType::SEND, "send", tensors, tensors, [&](ddl_request* request, int*) {
        return ddl_isend(memory_of(tensors[0]), count_of(tensors[0]), static_cast<ddl_type>(*type), peer, tag,
                         group_->comm, request);
    });
}

Backend::WorkPtr Backend::recv(Tensors& tensors, int peer, int tag) {
    return receive(tensors, peer, tag, c10d::OpType::RECV);
}

Backend::WorkPtr Backend::recvAnysource(Tensors& tensors, int tag) {
    return receive(tensors, DDL_ANY_RANK, tag, c10d::OpType::RECVANYSOURCE);
}

Backend::WorkPtr Backend::receive(Tensors& tensors, int peer, int tag, c10d::OpType type) {
    const int* const kind = tensors.empty() ? nullptr : type_of(tensors[0]);
    if (coalescing_ || !kind || !is_plain(tensors) || !tensors[0].is_cpu()) {
        if (type == c10d::OpType::RECVANYSOURCE) return delegate("recv_anysource", tensors, tag);
        return delegate("recv", tensors, peer, tag);
    }
    return start(type, "recv", tensors, tensors, [&](ddl_request* request, int* source) {
        return ddl_irecv(memory_of(tensors[0]), count_of(tensors[0]), static_cast<ddl_type>(*kind), peer, tag,
                         group_->comm, source, request);
    });
}

}  // namespace ddl_torch
