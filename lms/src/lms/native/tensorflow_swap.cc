// TensorFlow operations of LMS. LmsSwapOut writes a tensor to the file tier, after which its memory can go; LmsSwapIn
// reads it back. LmsTap makes a token once a tensor is there, and LmsGate hands a tensor on once tokens are there: with
// them LMS orders a graph. Control edges would do the same, but TensorFlow's graph optimizers do not rewrite an
// operation that has one, and what they do not rewrite adds up in another order, to other bits.
//
// All are stateless. TensorFlow chains stateful operations in the order of their creation, and every write would then
// wait for the backward pass. What a write made belongs to its handle, a variant that shares the ownership of its place
// in the file: the place is free once nothing can read it any more. One thread writes and one reads, so that no thread
// of TensorFlow's waits for a disk. Copies go through a page-aligned buffer, because O_DIRECT needs one.

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
#include <string>
#include <thread>
#include <utility>

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/variant.h"
#include "tensorflow/core/framework/variant_encode_decode.h"
#include "tensorflow/core/framework/variant_op_registry.h"

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

    Worker writer, reader;
    std::atomic<std::int64_t> outs{0}, ins{0}, live{0}, bytes_out{0}, bytes_in{0}, peak{0};

  private:
    std::atomic<int> file_{-1};
    std::mutex mutex_;
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

class SwapOut : public AsyncOpKernel {
  public:
    explicit SwapOut(OpKernelConstruction* context) : AsyncOpKernel(context) {}

    void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
        // The input lives until done(), so that is called once the bytes are in the file.
        Tier::get().writer.add([context, done = std::move(done)](char* buffer) {
            const Tensor& tensor = context->input(0);
            auto place = std::make_shared<Place>(tensor);
            const absl::Status status = write(*place, tensor.tensor_data().data(), buffer);
            OP_REQUIRES_OK_ASYNC(context, status, done);
            Tensor* handle = nullptr;
            OP_REQUIRES_OK_ASYNC(context, context->allocate_output(0, {}, &handle), done);
            Tier& tier = Tier::get();
            tier.outs += 1;
            tier.bytes_out += place->nbytes;
            handle->scalar<tensorflow::Variant>()() = Handle{std::move(place)};
            done();
        });
    }
};

class SwapIn : public AsyncOpKernel {
  public:
    explicit SwapIn(OpKernelConstruction* context) : AsyncOpKernel(context) {}

    void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
        Tier::get().reader.add([context, done = std::move(done)](char* buffer) {
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
            place.reset();  // the step may be over as soon as this is done, and no place outlives it
            done();
        });
    }
};

class Tap : public OpKernel {
  public:
    explicit Tap(OpKernelConstruction* context) : OpKernel(context) {}

    void Compute(OpKernelContext* context) override {
        Tensor* token = nullptr;
        OP_REQUIRES_OK(context, context->allocate_output(0, {0}, &token));
    }

    bool IsExpensive() override { return false; }
};

class Gate : public OpKernel {
  public:
    explicit Gate(OpKernelConstruction* context) : OpKernel(context) {}

    void Compute(OpKernelContext* context) override { context->set_output(0, context->input(0)); }

    bool IsExpensive() override { return false; }
};

// The optimizers need the shape: with unknown ones they rewrite less.
absl::Status given_shape(InferenceContext* context) {
    tensorflow::shape_inference::ShapeHandle shape;
    TF_RETURN_IF_ERROR(context->MakeShapeFromShapeTensor(1, &shape));
    context->set_output(0, shape);
    return absl::OkStatus();
}

// `index` differs from operation to operation, so that no optimizer takes two of them for the same.
REGISTER_OP("LmsSwapOut")
    .Input("tensor: T")
    .Output("handle: variant")
    .Attr("T: type")
    .Attr("index: int")
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);
REGISTER_OP("LmsSwapIn")
    .Input("handle: variant")
    .Input("shape: int32")
    .Input("tokens: N * variant")
    .Output("tensor: T")
    .Attr("T: type")
    .Attr("N: int >= 0")
    .Attr("index: int")
    .SetShapeFn(given_shape);
REGISTER_OP("LmsTap")
    .Input("tensor: T")
    .Output("token: variant")
    .Attr("T: type")
    .Attr("index: int")
    .SetShapeFn([](InferenceContext* context) {
        context->set_output(0, context->Vector(0));
        return absl::OkStatus();
    });
REGISTER_OP("LmsGate")
    .Input("tensor: T")
    .Input("tokens: N * variant")
    .Output("same: T")
    .Attr("T: type")
    .Attr("N: int >= 0")
    .Attr("index: int")
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape);
REGISTER_KERNEL_BUILDER(Name("LmsSwapOut").Device(tensorflow::DEVICE_CPU), SwapOut);
REGISTER_KERNEL_BUILDER(Name("LmsSwapIn").Device(tensorflow::DEVICE_CPU), SwapIn);
REGISTER_KERNEL_BUILDER(Name("LmsTap").Device(tensorflow::DEVICE_CPU), Tap);
REGISTER_KERNEL_BUILDER(Name("LmsGate").Device(tensorflow::DEVICE_CPU), Gate);
REGISTER_KERNEL_BUILDER(Name("LmsTap").Device(tensorflow::DEVICE_GPU).HostMemory("token"), Tap);
REGISTER_KERNEL_BUILDER(Name("LmsGate").Device(tensorflow::DEVICE_GPU).HostMemory("tokens"), Gate);

}  // namespace

// For Python, by ctypes. `file` stays open until the process ends.
extern "C" void lms_tensorflow_use(int file) { Tier::get().use(file); }

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
