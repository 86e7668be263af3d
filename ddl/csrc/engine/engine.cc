#include "engine/engine.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "base/rank_list.h"

namespace ddl {
namespace {

EngineOptions complete(EngineOptions options) {
    if (!options.warn) {
        options.warn = [](const std::string& text) { std::fprintf(stderr, "ddl: warning: %s\n", text.c_str()); };
    }
    return options;
}

}  // namespace

Engine::Engine(std::unique_ptr<Transport> transport, Plan plan, EngineOptions options)
    : core_(std::move(transport), complete(std::move(options))) {
    const int size = core_.transport->size();
    if (plan.size() != size) {
        throw Error(DDL_ERROR_ARGUMENT,
                    "the plan is for " + std::to_string(plan.size()) + " ranks, but there are " + std::to_string(size));
    }
    std::vector<int> everyone(static_cast<size_t>(size));
    for (size_t i = 0; i < everyone.size(); ++i) everyone[i] = static_cast<int>(i);
    create({kWorld, 0}, std::move(everyone), std::move(plan));
    for (const Notice& notice : core_.options.early) diagnosis_.take(notice);
    loop_.start();
}

void Engine::create(const CommKey& key, std::vector<int> members, Plan plan) {
    auto comm = std::make_shared<Communicator>();
    comm->key = key;
    comm->group.members = std::move(members);
    for (const int member : comm->group.members) comm->group.names.push_back(core_.name(member));
    comm->rank = comm->rank_of(core_.transport->rank());
    comm->plan = std::move(plan);
    comm->layout = layout_of(comm->plan, core_.options.tuning);
    comm->patience = core_.options.patience;
    const std::lock_guard lock(core_.progress);
    if (core_.shut) throw Error(DDL_ERROR_STATE, shut_down().message);  // nobody would end what is called on it
    diagnosis_.adopt(*comm);
    loop_.make_room();
    core_.table.add(comm);
}

int Engine::rank(CommId id) const {
    const CommPtr comm = core_.table.find(id);
    return comm ? comm->rank : -1;
}

int Engine::size(CommId id) const {
    const CommPtr comm = core_.table.find(id);
    return comm ? comm->size() : -1;
}

Status Engine::free(CommId id) {
    if (id == kWorld) return {DDL_ERROR_ARGUMENT, "the communicator of all ranks cannot be freed"};
    const CommPtr comm = core_.table.find(id);
    if (!comm) return no_such(id);
    const std::lock_guard lock(core_.progress);
    loop_.take_submissions();
    if (const size_t in_flight = comm->in_flight() + core_.mailbox.count_of(comm->key)) {
        return {DDL_ERROR_STATE, "communicator " + std::to_string(id) + " has " + plural(in_flight, "request") +
                                     " in flight: wait for all before it is freed"};
    }
    // For a submission that another thread is making at this moment.
    const Cause freed =
        std::make_shared<const Status>(Status{DDL_ERROR_STATE, "communicator " + std::to_string(id) + " was freed"});
    // Another thread may have freed it, and even made another of this number, since it was found.
    if (core_.table.find(id) != comm) return no_such(id);
    const bool was_whole = !comm->broken;
    diagnosis_.bury(comm->key, {comm->last_call(), was_whole ? Status{} : *comm->broken});
    // Messages of a broken communicator may still arrive: its number is not used again.
    core_.table.remove(id, was_whole);
    core_.mailbox.forget(comm->key);
    comm->broken = freed;
    if (was_whole) {
        // Others may still call it. They have been told what broke one that was broken.
        NoticeContent notice = comm->notice(NoticeKind::freed);
        notice.call = comm->last_call();
        core_.tell(comm->group.members, notice);
        loop_.wake();
    }
    return {};
}

Status Engine::set_timeout(CommId id, double seconds) {
    const CommPtr comm = core_.table.find(id);
    if (!comm) return no_such(id);
    if (!(seconds > 0)) {
        return {DDL_ERROR_ARGUMENT, "a timeout of " + std::to_string(seconds) + " s: it must be more than 0"};
    }
    const std::lock_guard lock(core_.progress);
    loop_.take_submissions();  // they were made before
    comm->patience = within(core_.options.patience, seconds);
    return {};
}

Status Engine::set_groups(CommId id, std::shared_ptr<Groups> groups) {
    const CommPtr comm = core_.table.find(id);
    if (!comm) return no_such(id);
    const std::lock_guard lock(core_.progress);
    comm->groups = std::move(groups);
    return {};
}

void Engine::fail(CommId id, const Status& cause) {
    const CommPtr comm = core_.table.find(id);
    if (!comm) return;
    const std::lock_guard lock(core_.progress);
    core_.break_comm(*comm, core_.cause(cause.code, cause.message));
    loop_.wake();
}

Status Engine::state(CommId id) const {
    const CommPtr comm = core_.table.find(id);
    if (!comm) return no_such(id);
    const std::lock_guard lock(core_.progress);
    return comm->broken ? *comm->broken : Status{};
}

Tally Engine::tally() const {
    const std::lock_guard lock(core_.progress);
    return core_.tally;
}

std::string Engine::in_flight() const {
    const std::lock_guard lock(core_.progress);
    return diagnosis_.in_flight() + messages_.in_flight();
}

void Engine::shutdown(const Status& cause) {
    if (core_.shut.exchange(true)) return;
    loop_.stop();
    const std::lock_guard lock(core_.progress);
    loop_.take_submissions();
    for (const auto& [id, comm] : core_.table.clear()) {
        if (cause.ok()) {
            core_.leave(*comm);
        } else {
            core_.break_comm(*comm, core_.cause(cause.code, cause.message));
        }
    }
    loop_.drain();
    core_.mailbox.close();
}

}  // namespace ddl
