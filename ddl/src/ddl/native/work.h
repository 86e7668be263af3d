// A call in flight that is one request of libddl's, as torch.distributed knows it.
#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "ddl.h"
#include "reaper.h"

namespace ddl_torch {

// What the calls of a process group have in common. It lives as long as the last of them.
struct Group {
    Group(std::string its_name, ddl_comm its_comm) : name(std::move(its_name)), comm(its_comm) {}

    const std::string name;
    const ddl_comm comm;
    Reaper in_order{false};     // of collectives
    Reaper in_any_order{true};  // of messages
};

// What libddl uses for as long as a request is in flight, which may be longer than anybody asks for its result.
struct Held {
    std::vector<at::Tensor> tensors;
    int source = -1;  // the sender's rank
};

// The GPUs whose memory they are in.
std::vector<c10::Device> devices_of(const std::vector<at::Tensor>& tensors);

class Work final : public c10d::Work {
  public:
    // Of a call that start() makes.
    Work(std::shared_ptr<Group> group, c10d::OpType type, const char* name, std::vector<at::Tensor> results,
         std::vector<at::Tensor> tensors);
    ~Work() override;

    // `call` makes a call of libddl, with the request (that of a call which blocks leaves it null) and a place for the
    // sender's rank. Throws Error: nothing is in flight.
    template <typename Call>
    void start(Call call) {
        sweep();
        begun(call(&request_, &held_->source));
    }

    bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
    bool isCompleted() override { return test(); }
    bool isSuccess() const override;
    std::exception_ptr exception() const override;
    int sourceRank() const override;
    std::vector<at::Tensor> result() override { return results_; }
    void synchronize() override { wait(); }         // results are in memory, also in a GPU's, when a request is over
    void blockCurrentStream() override { wait(); }  // likewise
    void abort() override {}                        // the group's is what ends it
    // Each call makes a future of its own, of the list of results. It is completed also where nobody waits.
    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

  private:
    using Future = c10::intrusive_ptr<c10::ivalue::Future>;
    class Kept;

    static void sweep();
    void begun(ddl_result result);
    std::string name() const { return std::string(name_) + " of group '" + group_->name + "'"; }
    bool ended();
    void wait_for_end();
    void complete_futures();
    bool test();
    void settle();
    void await(std::chrono::milliseconds limit);
    void end(ddl_result result, std::unique_lock<std::mutex> requesting);
    void complete(const Future& future) const;

    const std::shared_ptr<Group> group_;
    const char* const name_;
    const std::vector<at::Tensor> results_;

    std::mutex requesting_;  // guards the next two; held by who waits for the request
    ddl_request request_ = DDL_REQUEST_NULL;
    std::unique_ptr<Held> held_;

    std::mutex futures_mutex_;  // guards the next two
    std::vector<Future> futures_;
    bool reaped_ = false;

    std::exception_ptr error_;  // written before over_
    int source_ = -1;           // likewise
    std::atomic<bool> over_{false};
};

}  // namespace ddl_torch
