// TensorFlow operations of DDL. DdlStart hands its tensors to Python, which announces the call and starts it in libddl
// once every rank has announced it; DdlFinish gives the results. No thread of TensorFlow's waits for another rank.
//
// DdlStart is stateful: it runs even if nobody uses the result, because the other ranks wait for it, and TensorFlow
// keeps the order in which a function starts its calls. DdlFinish is stateless, so that the next call can start before
// this one is over. Between them goes a handle, a variant that shares the ownership of the call.

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "tensorflow/core/framework/allocator.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/variant.h"
#include "tensorflow/core/framework/variant_encode_decode.h"

namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// Of a call, from DdlStart to DdlFinish or to the end of the request, whichever comes last.
struct Call {
    std::vector<Tensor> inputs, outputs;
    std::vector<bool> exclusive;  // nobody else reads the input
    tensorflow::Allocator* allocator = nullptr;

    // Ends the call; only the first time counts.
    void finish(absl::Status status) {
        std::unique_lock lock(mutex_);
        if (over_) return;
        over_ = true;
        status_ = std::move(status);
        const std::function<void()> then = std::move(then_);
        lock.unlock();
        if (then) then();
    }

    // Calls `then` once the call is over, perhaps at once.
    void when_over(std::function<void()> then) {
        std::unique_lock lock(mutex_);
        if (!over_) {
            then_ = std::move(then);
            return;
        }
        lock.unlock();
        then();
    }

    const absl::Status& status() const { return status_; }  // once the call is over

  private:
    std::mutex mutex_;
    bool over_ = false;
    absl::Status status_;
    std::function<void()> then_;
};

using Shared = std::shared_ptr<Call>;

struct Handle {
    Shared call;

    std::string TypeName() const { return "ddl::Call"; }
    void Encode(tensorflow::VariantTensorData*) const {}
    bool Decode(const tensorflow::VariantTensorData&) { return false; }
    std::string DebugString() const { return TypeName(); }
};

Call& call_of(void* pointer) { return **static_cast<Shared*>(pointer); }

}  // namespace

extern "C" {

// A tensor of a call, as Python sees it.
struct ddl_tf_tensor {
    std::int64_t type;  // tensorflow::DataType
    std::int64_t rank;
    const std::int64_t* shape;
    void* data;
    std::int64_t nbytes;
};

// Begins a call. `tensors` are valid until it returns, their data until ddl_tf_release(call).
typedef void (*ddl_tf_begin)(void* call, const char* request, int count, const ddl_tf_tensor* tensors);

static std::atomic<ddl_tf_begin> begin_call{nullptr};

// Sets the function that begins calls. NULL: none can begin any more.
__attribute__((visibility("default"))) void ddl_tf_on_begin(ddl_tf_begin begin) { begin_call = begin; }

// Makes a result, and returns its memory: NULL if there is no memory left.
__attribute__((visibility("default"))) void* ddl_tf_output(void* pointer, int index, std::int64_t type,
                                                           std::int64_t rank, const std::int64_t* shape) {
    Call& call = call_of(pointer);
    const TensorShape shaped(absl::Span<const std::int64_t>(shape, rank));
    Tensor made(call.allocator, static_cast<tensorflow::DataType>(type), shaped);
    if (!made.IsInitialized() && shaped.num_elements() > 0) return nullptr;
    call.outputs[index] = made;
    return made.data();
}

// Makes an input a result. Returns 0, and does nothing, if somebody else reads the input and `shared` is 0.
__attribute__((visibility("default"))) int ddl_tf_reuse(void* pointer, int index, int shared) {
    Call& call = call_of(pointer);
    if (!shared && !call.exclusive[index]) return 0;
    call.outputs[index] = call.inputs[index];
    return 1;
}

// Ends a call, with an absl::StatusCode.
__attribute__((visibility("default"))) void ddl_tf_finish(void* pointer, int code, const char* message) {
    call_of(pointer).finish(absl::Status(static_cast<absl::StatusCode>(code), message));
}

// Python needs the call no more.
__attribute__((visibility("default"))) void ddl_tf_release(void* pointer) { delete static_cast<Shared*>(pointer); }

}  // extern "C"

namespace {

class Start : public OpKernel {
  public:
    explicit Start(OpKernelConstruction* context) : OpKernel(context) {
        OP_REQUIRES_OK(context, context->GetAttr("request", &request_));
        OP_REQUIRES_OK(context, context->GetAttr("results", &results_));
    }

    void Compute(OpKernelContext* context) override {
        const ddl_tf_begin begin = begin_call;
        OP_REQUIRES(context, begin != nullptr,
                    absl::FailedPreconditionError("ddl: the job is over, or ddl.tensorflow is not imported"));
        auto call = std::make_shared<Call>();
        call->allocator = context->get_allocator(tensorflow::AllocatorAttributes());
        call->outputs.resize(results_);
        const int count = context->num_inputs();
        std::vector<ddl_tf_tensor> tensors(count);
        std::vector<std::vector<std::int64_t>> shapes(count);
        for (int index = 0; index < count; ++index) {
            const Tensor& input = context->input(index);
            // An input that only this operation reads becomes the result, without a copy.
            std::unique_ptr<Tensor> own =
                context->forward_input(index, OpKernelContext::Params::kNoReservation, input.dtype(), input.shape(),
                                       context->input_memory_type(index), context->input_alloc_attr(index));
            call->exclusive.push_back(own != nullptr);
            call->inputs.push_back(input);
            for (const auto& dimension : input.shape()) shapes[index].push_back(dimension.size);
            tensors[index] = {input.dtype(), input.dims(), shapes[index].data(), input.data(),
                              static_cast<std::int64_t>(input.TotalBytes())};
        }
        Tensor* handle = nullptr;
        OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape(), &handle));
        handle->scalar<tensorflow::Variant>()() = Handle{call};
        begin(new Shared(call), request_.c_str(), count, tensors.data());
    }

  private:
    std::string request_;
    int results_ = 0;
};

class Finish : public AsyncOpKernel {
  public:
    explicit Finish(OpKernelConstruction* context) : AsyncOpKernel(context) {}

    void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
        const Handle* handle = context->input(0).scalar<tensorflow::Variant>()().get<Handle>();
        OP_REQUIRES_ASYNC(context,
                          handle != nullptr && static_cast<int>(handle->call->outputs.size()) == context->num_outputs(),
                          absl::InvalidArgumentError("DdlFinish: its input is no handle of DdlStart"), done);
        const Shared call = handle->call;
        // If another operation of the step fails, the step ends without this call, which other ranks may never make.
        tensorflow::CancellationManager* manager = context->cancellation_manager();
        tensorflow::CancellationToken token = 0;
        if (manager != nullptr) {
            token = manager->get_cancellation_token();
            const auto cancel = [call] { call->finish(absl::CancelledError("ddl: the step was cancelled")); };
            if (!manager->RegisterCallback(token, cancel)) cancel();
        }
        call->when_over([context, done = std::move(done), call = call.get(), manager, token] {
            if (manager != nullptr) manager->TryDeregisterCallback(token);
            if (call->status().ok()) {
                for (int index = 0; index < context->num_outputs(); ++index) {
                    context->set_output(index, std::move(call->outputs[index]));
                }
                call->inputs.clear();
            } else {
                context->SetStatus(call->status());
            }
            done();
        });
    }
};

// The graph optimizers need the shapes: with unknown ones they rewrite less.
absl::Status given_shapes(tensorflow::shape_inference::InferenceContext* context) {
    std::vector<tensorflow::PartialTensorShape> shapes;
    TF_RETURN_IF_ERROR(context->GetAttr("shapes", &shapes));
    for (int index = 0; index < context->num_outputs(); ++index) {
        tensorflow::shape_inference::ShapeHandle shape;
        TF_RETURN_IF_ERROR(context->MakeShapeFromPartialTensorShape(shapes.at(index), &shape));
        context->set_output(index, shape);
    }
    return absl::OkStatus();
}

}  // namespace

REGISTER_OP("DdlStart")
    .Input("inputs: T")
    .Output("call: variant")
    .Attr("T: list(type) >= 0")
    .Attr("request: string")
    .Attr("results: int")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);
REGISTER_OP("DdlFinish")
    .Input("call: variant")
    .Output("outputs: T")
    .Attr("T: list(type) >= 0")
    .Attr("shapes: list(shape)")
    .SetShapeFn(given_shapes);
REGISTER_KERNEL_BUILDER(Name("DdlStart").Device(tensorflow::DEVICE_CPU), Start);
REGISTER_KERNEL_BUILDER(Name("DdlFinish").Device(tensorflow::DEVICE_CPU), Finish);
