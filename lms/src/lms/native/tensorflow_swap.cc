// TensorFlow operations of LMS. LmsSwapOut writes a tensor to the file tier, after which its memory can go; LmsSwapIn
// reads it back. LmsGate hands a tensor on: it stands for a copy if TensorFlow itself copies, between two devices.
//
// LmsMark stands in a step that LMS shall edit. When TensorFlow's and oneDNN's optimizers are done with a graph, a pass
// gives each graph with a mark to Python and takes the edited one. Edited earlier, they would rewrite other operations
// than they do without LMS, and sums would add up in another order, to other bits.
//
// The copies are stateless. TensorFlow chains stateful operations in the order of their creation, and every write would
// then wait for the backward pass. What a write made belongs to its handle, a variant that shares the ownership of its
// place in the file: the place is free once nothing can read it any more. One thread writes and one reads, so that no
// thread of TensorFlow's waits for a disk. Copies go through a page-aligned buffer, because O_DIRECT needs one.

// TensorFlow is built with it, and a graph's nodes have another layout without.
#ifndef NDEBUG
#define NDEBUG
#endif

#include <errno.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "tensorflow/core/common_runtime/graph_constructor.h"
#include "tensorflow/core/common_runtime/optimization_registry.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/variant.h"
#include "tensorflow/core/framework/variant_encode_decode.h"
#include "tensorflow/core/framework/variant_op_registry.h"
#include "tensorflow/core/graph/graph.h"

namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::shape_inference::InferenceContext;

constexpr std::int64_t kPage = 4096;
constexpr std::int64_t kBuffer = 4 << 20;

std::int64_t round_up(std::int64_t nbytes) { return (nbytes + kPage - 1) / kPage * kPage; }

struct Free {
    void operator()(void* memory) const { std::free(memory); }
};
using Buffer = std::unique_ptr<char, Free>;

Buffer make_buffer() {
    void* memory = nullptr;
    return Buffer(posix_memalign(&memory, kPage, kBuffer) == 0 ? static_cast<char*>(memory) : nullptr);
}

// Runs tasks one after the other on a thread of its own. It lives as long as the process.
class Worker {
  public:
    Worker() {
        std::thread([this] { run(); }).detach();
    }

    void add(std::function<void(char*)> task) {
        {
            std::lock_guard lock(mutex_);
            tasks_.push_back(std::move(task));
        }
        wake_.notify_one();
    }

  private:
    void run() {
        Buffer buffer = make_buffer();
        while (true) {
            std::unique_lock lock(mutex_);
            wake_.wait(lock, [this] { return !tasks_.empty(); });
            std::function<void(char*)> task = std::move(tasks_.front());
            tasks_.pop_front();
            lock.unlock();
            task(buffer.get());
        }
    }

    std::mutex mutex_;
    std::condition_variable wake_;
    std::deque<std::function<void(char*)>> tasks_;
};

// The open file and which of its bytes are taken: first fit, and neighbouring holes become one. Never destroyed, as
// handles may outlive everything else.
class Tier {
  public:
    static Tier& get() {
        static Tier* tier = new Tier;
        return *tier;
    }

    void use(int file) { file_ = file; }
    int file() const { return file_; }

    std::int64_t take(std::int64_t nbytes) {
        std::lock_guard lock(mutex_);
        live += 1;
        used_ += nbytes;
        peak = std::max<std::int64_t>(peak, used_);
        for (auto hole = holes_.begin(); hole != holes_.end(); ++hole) {
            const auto [offset, length] = *hole;
            if (length < nbytes) continue;
            holes_.erase(hole);
            if (length > nbytes) holes_[offset + nbytes] = length - nbytes;
            return offset;
        }
        const std::int64_t offset = end_;
        end_ += nbytes;
        return offset;
    }

    void give(std::int64_t offset, std::int64_t nbytes) {
        std::lock_guard lock(mutex_);
        live -= 1;
        used_ -= nbytes;
        auto hole = holes_.emplace(offset, nbytes).first;
        const auto next = std::next(hole);
        if (next != holes_.end() && next->first == offset + nbytes) {
            hole->second += next->second;
            holes_.erase(next);
        }
        if (hole == holes_.begin()) return;
        const auto before = std::prev(hole);
        if (before->first + before->second != offset) return;
        before->second += hole->second;
        holes_.erase(hole);
    }

    // How many of a plan's copies have run at least once. What is returned lives as long as the process.
    struct Copies {
        std::atomic<std::int64_t> outs{0}, ins{0};
    };
    Copies& of_plan(std::int64_t plan) {
        std::lock_guard lock(mutex_);
        return plans_[plan];
    }

    Worker writer, reader;
    std::atomic<std::int64_t> outs{0}, ins{0}, live{0}, bytes_out{0}, bytes_in{0}, peak{0};

  private:
    std::atomic<int> file_{-1};
    std::mutex mutex_;
    std::map<std::int64_t, Copies> plans_;
    std::map<std::int64_t, std::int64_t> holes_;  // offset -> length
    std::int64_t end_ = 0, used_ = 0;
};

// A place in the file, and the shape of what it holds.
struct Place {
    explicit Place(const Tensor& tensor)
        : shape(tensor.shape()),
          nbytes(tensor.tensor_data().size()),
          span(round_up(std::max<std::int64_t>(nbytes, 1))) {
        offset = Tier::get().take(span);
    }
    Place(const Place&) = delete;
    Place& operator=(const Place&) = delete;
    ~Place() { Tier::get().give(offset, span); }

    tensorflow::TensorShape shape;
    std::int64_t nbytes, span, offset;
};

struct Handle {
    std::shared_ptr<Place> place;
    std::string TypeName() const { return "lms::Handle"; }
    void Encode(tensorflow::VariantTensorData*) const {}
    bool Decode(const tensorflow::VariantTensorData&) { return false; }
    std::string DebugString() const { return "lms::Handle"; }
};

absl::Status failed(const char* what, std::int64_t nbytes, int code) {
    std::string text = std::string("LMS: ") + what + " " + std::to_string(nbytes) + " bytes failed: " + strerror(code);
    if (code == ENOSPC || code == EDQUOT || code == EFBIG)
        return absl::ResourceExhaustedError(
            text + "; free some room, or give a folder on a larger disk (spill_dir, LMS_SPILL_DIR)");
    return absl::InternalError(text + "; check the disk of spill_dir");
}

absl::Status write(const Place& place, const char* bytes, char* buffer) {
    if (buffer == nullptr) return absl::ResourceExhaustedError("LMS: no memory for the buffer of the file tier");
    for (std::int64_t at = 0; at < place.nbytes; at += kBuffer) {
        const std::int64_t length = std::min(kBuffer, place.nbytes - at), whole = round_up(length);
        memcpy(buffer, bytes + at, length);
        memset(buffer + length, 0, whole - length);
        for (std::int64_t done = 0; done < whole;) {
            const ssize_t now = pwrite(Tier::get().file(), buffer + done, whole - done, place.offset + at + done);
            if (now < 0 && errno == EINTR) continue;
            if (now <= 0) return failed("writing", place.nbytes, now < 0 ? errno : EIO);
            done += now;
        }
    }
    return absl::OkStatus();
}

absl::Status read(const Place& place, char* bytes, char* buffer) {
    if (buffer == nullptr) return absl::ResourceExhaustedError("LMS: no memory for the buffer of the file tier");
    for (std::int64_t at = 0; at < place.nbytes; at += kBuffer) {
        const std::int64_t length = std::min(kBuffer, place.nbytes - at), whole = round_up(length);
        for (std::int64_t done = 0; done < whole;) {
            const ssize_t now = pread(Tier::get().file(), buffer + done, whole - done, place.offset + at + done);
            if (now < 0 && errno == EINTR) continue;
            if (now < 0) return failed("reading", place.nbytes, errno);
            if (now == 0) return absl::DataLossError("LMS: the file was cut; nothing else may touch it");
            done += now;
        }
        memcpy(bytes + at, buffer, length);
    }
    return absl::OkStatus();
}

// The operation's entry in the counts of its plan.
class Counted {
  public:
    explicit Counted(OpKernelConstruction* context, std::atomic<std::int64_t> Tier::Copies::* kind) {
        std::int64_t plan = 0;
        OP_REQUIRES_OK(context, context->GetAttr("plan", &plan));
        count_ = &(Tier::get().of_plan(plan).*kind);
    }

    void ran() {
        if (!ran_.exchange(true)) *count_ += 1;
    }

  private:
    std::atomic<std::int64_t>* count_ = nullptr;
    std::atomic<bool> ran_{false};
};

class SwapOut : public AsyncOpKernel {
  public:
    explicit SwapOut(OpKernelConstruction* context) : AsyncOpKernel(context), counted_(context, &Tier::Copies::outs) {}

    void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
        // The input lives until done(), so that is called once the bytes are in the file.
        Tier::get().writer.add([this, context, done = std::move(done)](char* buffer) {
            const Tensor& tensor = context->input(0);
            auto place = std::make_shared<Place>(tensor);
            const absl::Status status = write(*place, tensor.tensor_data().data(), buffer);
            OP_REQUIRES_OK_ASYNC(context, status, done);
            Tensor* handle = nullptr;
            OP_REQUIRES_OK_ASYNC(context, context->allocate_output(0, {}, &handle), done);
            Tier& tier = Tier::get();
            tier.outs += 1;
            tier.bytes_out += place->nbytes;
            counted_.ran();
            handle->scalar<tensorflow::Variant>()() = Handle{std::move(place)};
            done();
        });
    }

  private:
    Counted counted_;
};

class SwapIn : public AsyncOpKernel {
  public:
    explicit SwapIn(OpKernelConstruction* context) : AsyncOpKernel(context), counted_(context, &Tier::Copies::ins) {}

    void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
        Tier::get().reader.add([this, context, done = std::move(done)](char* buffer) {
            const Handle* handle = context->input(0).scalar<tensorflow::Variant>()().get<Handle>();
            OP_REQUIRES_ASYNC(context, handle != nullptr, absl::InternalError("LMS: not a handle of LmsSwapOut"), done);
            std::shared_ptr<Place> place = handle->place;
            Tensor* tensor = nullptr;
            OP_REQUIRES_OK_ASYNC(context, context->allocate_output(0, place->shape, &tensor), done);
            const absl::Status status = read(*place, const_cast<char*>(tensor->tensor_data().data()), buffer);
            OP_REQUIRES_OK_ASYNC(context, status, done);
            Tier& tier = Tier::get();
            tier.ins += 1;
            tier.bytes_in += place->nbytes;
            counted_.ran();
            place.reset();  // the step may be over as soon as this is done, and no place outlives it
            done();
        });
    }

  private:
    Counted counted_;
};

class Gate : public OpKernel {
  public:
    explicit Gate(OpKernelConstruction* context) : OpKernel(context) {}

    void Compute(OpKernelContext* context) override { context->set_output(0, context->input(0)); }

    bool IsExpensive() override { return false; }
};

class Mark : public OpKernel {
  public:
    explicit Mark(OpKernelConstruction* context) : OpKernel(context) {}

    void Compute(OpKernelContext*) override {}

    bool IsExpensive() override { return false; }
};

struct Answer {
    std::string graph, error;
};

// Python's function: the graph, which mark stands in it, and the Answer to be filled by lms_tensorflow_answer.
using Editor = void (*)(const char* graph, std::int64_t nbytes, std::int64_t index, void* answer);
std::atomic<Editor> editor{nullptr};

class Edit : public tensorflow::GraphOptimizationPass {
  public:
    absl::Status Run(const tensorflow::GraphOptimizationPassOptions& options) override {
        if (editor == nullptr) return absl::OkStatus();
        if (options.graph != nullptr) return edit(*options.graph, true);
        if (options.partition_graphs == nullptr) return absl::OkStatus();
        for (auto& [device, graph] : *options.partition_graphs) {
            const absl::Status status = edit(graph, false);
            if (!status.ok()) return status;
        }
        return absl::OkStatus();
    }

  private:
    static absl::Status edit(std::unique_ptr<tensorflow::Graph>& graph, bool before_partition) {
        std::set<std::int64_t> marks;
        for (const tensorflow::Node* node : graph->op_nodes()) {
            if (node->type_string() != "LmsMark") continue;
            bool early = false;
            std::int64_t index = 0;
            TF_RETURN_IF_ERROR(tensorflow::GetNodeAttr(node->attrs(), "before_partition", &early));
            TF_RETURN_IF_ERROR(tensorflow::GetNodeAttr(node->attrs(), "index", &index));
            if (early == before_partition) marks.insert(index);
        }
        for (const std::int64_t index : marks) {
            tensorflow::GraphDef definition;
            graph->ToGraphDef(&definition);
            definition.clear_library();
            const std::string bytes = definition.SerializeAsString();
            Answer answer;
            editor.load()(bytes.data(), bytes.size(), index, &answer);
            if (!answer.error.empty()) return absl::InvalidArgumentError(answer.error);
            definition.Clear();
            if (!definition.ParseFromString(answer.graph)) return absl::InternalError("LMS: no graph came back");
            auto edited = std::make_unique<tensorflow::Graph>(tensorflow::OpRegistry::Global());
            tensorflow::GraphConstructorOptions how;
            how.allow_internal_ops = true;
            how.expect_device_spec = true;
            TF_RETURN_IF_ERROR(tensorflow::ConvertGraphDefToGraph(how, std::move(definition), edited.get()));
            for (tensorflow::Node* node : edited->op_nodes())
                if (node->assigned_device_name().empty()) node->set_assigned_device_name(node->requested_device());
            graph = std::move(edited);
        }
        return absl::OkStatus();
    }
};

// After all of TensorFlow's own passes: oneDNN's is the first of the last group.
REGISTER_OPTIMIZATION(tensorflow::OptimizationPassRegistry::POST_REWRITE_FOR_EXEC, 1000, Edit);
REGISTER_OPTIMIZATION(tensorflow::OptimizationPassRegistry::POST_PARTITIONING, 1000, Edit);

// `index` differs from operation to operation, so that no optimizer takes two of them for the same. `plan` differs from
// edited graph to edited graph.
REGISTER_OP("LmsSwapOut")
    .Input("tensor: T")
    .Output("handle: variant")
    .Attr("T: type")
    .Attr("index: int")
    .Attr("plan: int")
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);
REGISTER_OP("LmsSwapIn")
    .Input("handle: variant")
    .Output("tensor: T")
    .Attr("T: type")
    .Attr("index: int")
    .Attr("plan: int")
    .SetShapeFn(tensorflow::shape_inference::UnknownShape);
REGISTER_OP("LmsGate")
    .Input("tensor: T")
    .Output("same: T")
    .Attr("T: type")
    .Attr("index: int")
    .Attr("plan: int")
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape);
REGISTER_OP("LmsMark")
    .Attr("index: int")
    .Attr("before_partition: bool")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);
REGISTER_KERNEL_BUILDER(Name("LmsSwapOut").Device(tensorflow::DEVICE_CPU), SwapOut);
REGISTER_KERNEL_BUILDER(Name("LmsSwapIn").Device(tensorflow::DEVICE_CPU), SwapIn);
REGISTER_KERNEL_BUILDER(Name("LmsGate").Device(tensorflow::DEVICE_CPU), Gate);
REGISTER_KERNEL_BUILDER(Name("LmsMark").Device(tensorflow::DEVICE_CPU), Mark);
REGISTER_KERNEL_BUILDER(Name("LmsMark").Device(tensorflow::DEVICE_GPU), Mark);

}  // namespace

// For Python, by ctypes. `file` stays open until the process ends.
extern "C" void lms_tensorflow_use(int file) { Tier::get().use(file); }

// The function that edits graphs; it calls lms_tensorflow_answer once. One of `graph` and `error` is NULL.
extern "C" void lms_tensorflow_edit_with(Editor function) { editor = function; }

extern "C" void lms_tensorflow_answer(void* answer, const char* graph, std::int64_t nbytes, const char* error) {
    auto* filled = static_cast<Answer*>(answer);
    if (graph != nullptr) filled->graph.assign(graph, nbytes);
    if (error != nullptr) filled->error = error;
}

// Six figures: copies out, copies in, places in use, bytes out, bytes in, most bytes in the file at once.
extern "C" void lms_tensorflow_usage(std::int64_t* figures) {
    const Tier& tier = Tier::get();
    figures[0] = tier.outs;
    figures[1] = tier.ins;
    figures[2] = tier.live;
    figures[3] = tier.bytes_out;
    figures[4] = tier.bytes_in;
    figures[5] = tier.peak;
}

// Two figures: how many of a plan's copies out and of its copies in have run at least once.
extern "C" void lms_tensorflow_copies(std::int64_t plan, std::int64_t* figures) {
    const Tier::Copies& copies = Tier::get().of_plan(plan);
    figures[0] = copies.outs;
    figures[1] = copies.ins;
}
