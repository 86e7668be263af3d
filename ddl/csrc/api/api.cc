// The C interface: translates, and lets no exception out. What the functions mean is said in ddl.h.
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "api/boundary.h"
#include "ddl.h"
#include "startup/environment.h"
#include "startup/reporter.h"
#include "startup/session.h"
#include "startup/tcp_rendezvous.h"

// What a request's handle points to. It keeps its session alive, so that it can be asked for after ddl_finalize.
struct ddl_request_s {
    std::shared_ptr<ddl::Session> session;
    ddl::RequestPtr request;
};

namespace ddl {
namespace {

using SessionPtr = std::shared_ptr<Session>;

// Never destroyed: threads may still use them while the process exits.
struct Global {
    std::mutex joining;  // held through a ddl_init
    std::mutex mutex;    // guards the rest
    SessionPtr session;
};
Global& global() {
    static auto* made = new Global;
    return *made;
}

// What ddl_set_stream() was last given on this thread.
CudaStream& stream() {
    thread_local CudaStream mine = nullptr;
    return mine;
}

SessionPtr current() {
    const std::lock_guard lock(global().mutex);
    return global().session;
}

void refuse_child() {
    if (!Job::is_in_child()) return;
    throw Error(DDL_ERROR_STATE,
                "this process was forked by a rank, and is none itself: use ddl in the rank, or start another job");
}

SessionPtr session() {
    refuse_child();
    SessionPtr found = current();
    if (!found) throw Error(DDL_ERROR_STATE, "ddl is not initialised: call ddl_init first");
    return found;
}

template <typename Value>
ddl_result store(int* target, const char* name, Value value) {
    return guarded([&]() -> Status {
        need(target, name);
        *target = value(*session());
        return {};
    });
}

// What the engine knows of a communicator that was there when it was looked up: another thread may have freed it since,
// or finalized.
int known(int number) {
    if (number < 0) throw Error(DDL_ERROR_STATE, "this communicator was freed, or the library finalized, meanwhile");
    return number;
}

// Makes a communicator by `make(session, &id)`, from `comm`, which `id` stays if there is none for this rank.
template <typename Make>
ddl_result make_comm(ddl_comm comm, ddl_comm* result, Make make) {
    return guarded([&] {
        need(result, "result");
        *result = DDL_COMM_NULL;
        const SessionPtr its = session();
        const CommId from = its->id_of(comm);
        CommId made = from;
        auto handle = Session::new_handle();  // before there is what it stands for, which the others have then
        Status status = make(*its, from, &made);
        its->note(status);
        if (status.ok() && made != from) *result = its->bind(std::move(handle), made);
        return status;
    });
}

// Ends the session; `found` may still be in use by other threads, whose calls then end with an error.
void end_session() {
    if (Job::is_in_child()) return;  // as at the child's exit
    SessionPtr found;
    {
        const std::lock_guard lock(global().mutex);
        found.swap(global().session);
    }
    if (found) found->end();
}

ddl_result run(Call call, ddl_comm comm) {
    return guarded([&] {
        const SessionPtr its = session();
        its->locate(call, stream());
        Status status = its->engine().run(its->id_of(comm), call);
        its->note(status);
        return status;
    });
}

ddl_result start(Call call, ddl_comm comm, ddl_request* request) {
    return guarded([&] {
        need(request, "request");
        *request = DDL_REQUEST_NULL;
        auto made = std::make_unique<ddl_request_s>();
        made->session = session();
        made->session->locate(call, stream());
        Status status = made->session->engine().submit(made->session->id_of(comm), call, &made->request);
        if (status.ok()) *request = made.release();
        return status;
    });
}

// Frees the request and returns how it ended.
Status take(ddl_request* request) {
    const std::unique_ptr<ddl_request_s> owner(std::exchange(*request, DDL_REQUEST_NULL));
    owner->session->note(owner->request->status());
    return owner->request->status();
}

ddl_result post(Mail mail, int peer, ddl_comm comm, ddl_request* request) {
    return guarded([&] {
        need(request, "request");
        *request = DDL_REQUEST_NULL;
        auto made = std::make_unique<ddl_request_s>();
        made->session = session();
        const void* const buffer = mail.incoming ? mail.to : mail.from;
        if (const auto gpu = mail.count > 0 ? CudaDevice::place_of(buffer).gpu : nullptr) {
            throw Error(DDL_ERROR_ARGUMENT, std::string(mail.incoming ? "receive" : "send") +
                                                ": the buffer is in memory of GPU " + std::to_string(gpu->gpu()) +
                                                ": copy it to host memory first");
        }
        Status status = made->session->engine().post(made->session->id_of(comm), peer, std::move(mail), &made->request);
        if (status.ok()) *request = made.release();
        return status;
    });
}

Mail outgoing(const void* data, size_t count, ddl_type type, int64_t tag) {
    Mail mail;
    mail.tag = tag;
    mail.type = type;
    mail.count = count;
    mail.from = data;
    return mail;
}

Mail incoming(void* data, size_t count, ddl_type type, int64_t tag, int* source) {
    Mail mail = outgoing(nullptr, count, type, tag);
    mail.incoming = true;
    mail.to = data;
    mail.source = source;
    return mail;
}

// The blocking form.
template <typename Start>
ddl_result finish(Start start) {
    ddl_request request = DDL_REQUEST_NULL;
    const ddl_result result = start(&request);
    return result == DDL_SUCCESS ? ddl_wait(&request) : result;
}

Call reduction(Collective collective, const void* input, void* output, size_t count, ddl_type type, ddl_op op) {
    return {{collective, type, op, count, 0}, input, output};
}

Call movement(Collective collective, const void* input, void* output, size_t count, ddl_type type, int root = 0) {
    return {{collective, type, DDL_SUM, count, root}, input, output};
}

ddl_result initialise(const char* options, const std::function<std::optional<Start>()>& how) {
    return guarded([&]() -> Status {
        refuse_child();
        Global& global = ddl::global();
        const std::lock_guard joining(global.joining);
        if (current()) {
            throw Error(DDL_ERROR_STATE, "ddl is initialised already: call ddl_finalize before the next ddl_init");
        }
        const std::optional<Start> start = how();
        auto made = Session::begin(options, start ? &*start : nullptr);
        made->job().before_finalize(end_session);
        report_on_signal([] {
            const SessionPtr found = current();
            const std::string text = found ? found->engine().in_flight() : "";
            return text.empty() ? "ddl: process " + std::to_string(getpid()) + " has no requests in flight\n" : text;
        });
        const std::lock_guard lock(global.mutex);
        global.session = std::move(made);
        return {};
    });
}

ddl_result resize(bool takes_in, int* gone, int capacity, int* count, int* joined) {
    return guarded([&]() -> Status {
        refuse_child();
        Global& global = ddl::global();
        const std::lock_guard joining(global.joining);
        const SessionPtr former = session();
        std::vector<int> ranks;
        int added = 0;
        SessionPtr next;
        try {
            next = former->resize(takes_in, &ranks, &added);
        } catch (...) {
            if (former->has_ended()) end_session();
            throw;
        }
        {
            const std::lock_guard lock(global.mutex);
            if (global.session == former) global.session.swap(next);
        }
        if (next != former) {  // another thread has finalized meanwhile
            next->end();
            throw Error(DDL_ERROR_STATE, "ddl_finalize was called meanwhile");
        }
        const auto most = static_cast<size_t>(std::max(capacity, 0));
        if (gone) std::copy_n(ranks.begin(), std::min(most, ranks.size()), gone);
        if (count) *count = static_cast<int>(ranks.size());
        if (joined) *joined = added;
        return {};
    });
}

}  // namespace
}  // namespace ddl

using ddl::Collective;
using ddl::Status;

ddl_result ddl_init(const char* options) {
    return ddl::initialise(options, [] { return std::nullopt; });
}

ddl_result ddl_init_with(const ddl_membership* membership, const char* options) {
    if (!membership) return ddl::failed(DDL_ERROR_ARGUMENT, "ddl_init_with: membership is NULL");
    return ddl::initialise(options, [&] { return ddl::start_of(*membership, false); });
}

ddl_result ddl_join(const ddl_membership* membership, const char* options) {
    return ddl::initialise(
        options, [&] { return membership ? ddl::start_of(*membership, true) : ddl::start_of_environment(true); });
}

ddl_result ddl_waiting(int* count) {
    return ddl::store(count, "count", [](ddl::Session& its) { return its.waiting(); });
}

ddl_result ddl_shrink(int* gone, int capacity, int* count) {
    return ddl::resize(false, gone, capacity, count, nullptr);
}

ddl_result ddl_resize(int* gone, int capacity, int* count, int* joined) {
    return ddl::resize(true, gone, capacity, count, joined);
}

ddl_result ddl_epoch(uint64_t* epoch) {
    return ddl::guarded([&]() -> Status {
        ddl::need(epoch, "epoch");
        *epoch = ddl::session()->members().epoch;
        return {};
    });
}

ddl_result ddl_get_stats(ddl_stats* stats) {
    return ddl::guarded([&]() -> Status {
        ddl::need(stats, "stats");
        const ddl::SessionPtr its = ddl::session();
        const ddl::Tally tally = its->engine().tally();
        *stats = {tally.calls(), tally.bytes(), tally.timed(), tally.seconds(),
                  tally.allreduces() * its->least_seconds_per_byte()};
        return {};
    });
}

ddl_result ddl_get_waits(double* seconds, uint64_t* late, int capacity) {
    return ddl::guarded([&]() -> Status {
        const ddl::Tally tally = ddl::session()->engine().tally();
        const size_t count = std::min(static_cast<size_t>(std::max(capacity, 0)), tally.waited().size());
        if (seconds) std::copy_n(tally.waited().begin(), count, seconds);
        if (late) std::copy_n(tally.late().begin(), count, late);
        return {};
    });
}

ddl_result ddl_finalize() {
    return ddl::guarded([]() -> Status {
        ddl::end_session();
        return {};
    });
}

int ddl_version() { return DDL_VERSION_MAJOR * 10000 + DDL_VERSION_MINOR * 100 + DDL_VERSION_PATCH; }

ddl_result ddl_rank(ddl_comm comm, int* rank) {
    return ddl::store(rank, "rank", [&](ddl::Session& its) { return ddl::known(its.engine().rank(its.id_of(comm))); });
}
ddl_result ddl_size(ddl_comm comm, int* size) {
    return ddl::store(size, "size", [&](ddl::Session& its) { return ddl::known(its.engine().size(its.id_of(comm))); });
}
ddl_result ddl_local_rank(int* rank) {
    return ddl::store(rank, "rank", [](ddl::Session& its) { return its.local_rank(); });
}
ddl_result ddl_local_size(int* size) {
    return ddl::store(size, "size", [](ddl::Session& its) { return its.local_size(); });
}
ddl_result ddl_num_hosts(int* hosts) {
    return ddl::store(hosts, "hosts", [](ddl::Session& its) { return its.num_hosts(); });
}

ddl_result ddl_comm_split(ddl_comm comm, int color, int key, ddl_comm* result) {
    return ddl::make_comm(comm, result, [&](ddl::Session& its, ddl::CommId parent, ddl::CommId* made) {
        return its.engine().split(parent, color, key, made);
    });
}

ddl_result ddl_comm_create_group(const int* ranks, int count, uint64_t tag, ddl_comm* result) {
    return ddl::make_comm(DDL_WORLD, result, [&](ddl::Session& its, ddl::CommId, ddl::CommId* made) {
        ddl::need(ranks, "ranks");
        return its.engine().create_group({ranks, ranks + std::max(count, 0)}, tag, made);
    });
}

ddl_result ddl_comm_set_timeout(ddl_comm comm, double seconds) {
    return ddl::guarded([&] {
        const ddl::SessionPtr its = ddl::session();
        return its->engine().set_timeout(its->id_of(comm), seconds);
    });
}

ddl_result ddl_comm_free(ddl_comm comm) {
    return ddl::guarded([&] {
        const ddl::SessionPtr its = ddl::session();
        Status status = its->engine().free(its->id_of(comm));
        if (status.ok()) its->forget(comm);
        return status;
    });
}

ddl_result ddl_allreduce(const void* input, void* output, size_t count, ddl_type type, ddl_op op, ddl_comm comm) {
    return ddl::run(ddl::reduction(Collective::allreduce, input, output, count, type, op), comm);
}
ddl_result ddl_iallreduce(const void* input, void* output, size_t count, ddl_type type, ddl_op op, ddl_comm comm,
                          ddl_request* request) {
    return ddl::start(ddl::reduction(Collective::allreduce, input, output, count, type, op), comm, request);
}
ddl_result ddl_reduce_scatter(const void* input, void* output, size_t count, ddl_type type, ddl_op op, ddl_comm comm) {
    return ddl::run(ddl::reduction(Collective::reduce_scatter, input, output, count, type, op), comm);
}
ddl_result ddl_ireduce_scatter(const void* input, void* output, size_t count, ddl_type type, ddl_op op, ddl_comm comm,
                               ddl_request* request) {
    return ddl::start(ddl::reduction(Collective::reduce_scatter, input, output, count, type, op), comm, request);
}
ddl_result ddl_allgather(const void* input, void* output, size_t count, ddl_type type, ddl_comm comm) {
    return ddl::run(ddl::movement(Collective::allgather, input, output, count, type), comm);
}
ddl_result ddl_iallgather(const void* input, void* output, size_t count, ddl_type type, ddl_comm comm,
                          ddl_request* request) {
    return ddl::start(ddl::movement(Collective::allgather, input, output, count, type), comm, request);
}
ddl_result ddl_broadcast(void* buffer, size_t count, ddl_type type, int root, ddl_comm comm) {
    return ddl::run(ddl::movement(Collective::broadcast, nullptr, buffer, count, type, root), comm);
}
ddl_result ddl_ibroadcast(void* buffer, size_t count, ddl_type type, int root, ddl_comm comm, ddl_request* request) {
    return ddl::start(ddl::movement(Collective::broadcast, nullptr, buffer, count, type, root), comm, request);
}
ddl_result ddl_alltoall(const void* input, void* output, size_t count, ddl_type type, ddl_comm comm) {
    return ddl::run(ddl::movement(Collective::alltoall, input, output, count, type), comm);
}
ddl_result ddl_ialltoall(const void* input, void* output, size_t count, ddl_type type, ddl_comm comm,
                         ddl_request* request) {
    return ddl::start(ddl::movement(Collective::alltoall, input, output, count, type), comm, request);
}
ddl_result ddl_barrier(ddl_comm comm) {
    return ddl::run(ddl::movement(Collective::barrier, nullptr, nullptr, 0, DDL_UINT8), comm);
}
ddl_result ddl_ibarrier(ddl_comm comm, ddl_request* request) {
    return ddl::start(ddl::movement(Collective::barrier, nullptr, nullptr, 0, DDL_UINT8), comm, request);
}

ddl_result ddl_set_stream(void* stream) {
    ddl::stream() = stream;
    return DDL_SUCCESS;
}

ddl_result ddl_send(const void* data, size_t count, ddl_type type, int peer, int64_t tag, ddl_comm comm) {
    return ddl::finish([&](ddl_request* made) { return ddl_isend(data, count, type, peer, tag, comm, made); });
}
ddl_result ddl_isend(const void* data, size_t count, ddl_type type, int peer, int64_t tag, ddl_comm comm,
                     ddl_request* request) {
    return ddl::post(ddl::outgoing(data, count, type, tag), peer, comm, request);
}
ddl_result ddl_recv(void* data, size_t count, ddl_type type, int peer, int64_t tag, ddl_comm comm, int* source) {
    return ddl::finish([&](ddl_request* made) { return ddl_irecv(data, count, type, peer, tag, comm, source, made); });
}
ddl_result ddl_irecv(void* data, size_t count, ddl_type type, int peer, int64_t tag, ddl_comm comm, int* source,
                     ddl_request* request) {
    return ddl::post(ddl::incoming(data, count, type, tag, source), peer, comm, request);
}

ddl_result ddl_test(ddl_request* request, int* finished) {
    return ddl::guarded([&]() -> Status {
        ddl::need(request, "request");
        ddl::need(finished, "finished");
        *finished = 0;
        ddl::refuse_child();
        if (*request != DDL_REQUEST_NULL && !(*request)->session->engine().test((*request)->request)) return {};
        *finished = 1;
        return *request == DDL_REQUEST_NULL ? Status{} : ddl::take(request);
    });
}

ddl_result ddl_wait(ddl_request* request) {
    return ddl::guarded([&]() -> Status {
        ddl::need(request, "request");
        if (*request == DDL_REQUEST_NULL) return {};
        ddl::refuse_child();
        (*request)->session->engine().wait((*request)->request);
        return ddl::take(request);
    });
}
