// Making and freeing communicators.
#include <algorithm>
#include <tuple>

#include "engine/communicator.h"
#include "engine/reservation.h"

namespace ddl {

std::optional<CommId> first_free(const std::vector<uint8_t>& ids, uint64_t from) {
    const auto begin = ids.begin() + static_cast<ptrdiff_t>(from % ids.size());
    auto found = std::find(begin, ids.end(), 1);
    if (found == ids.end()) found = std::find(ids.begin(), begin, 1);
    if (*found != 1) return std::nullopt;
    return static_cast<CommId>(found - ids.begin());
}

Status Engine::split(CommId parent, int color, int key, CommId* comm) {
    const CommPtr over = find(parent);
    if (!over) return shut_ ? shut_down() : no_such(parent);
    Status status;
    try {
        status = split_over(over, color, key, comm);
    } catch (const Error& error) {
        return error.status();
    } catch (const std::bad_alloc&) {
        status = no_memory();
    }
    if (status.code == DDL_ERROR_MEMORY) fail(parent, *out_of_memory_);  // the others wait in it for this rank
    return status;
}

// Takes one id for all parts, free on every rank of `parent`. Ranks in different parts never meet under it. Another
// split, of another communicator, may take the same one on some rank meanwhile: then both, or one, try again.
Status Engine::reserve_id(const CommKey& parent, uint64_t birth, Reservation* reservation) {
    for (uint64_t attempt = 0;; ++attempt) {
        std::vector<uint8_t> ids;
        {
            const std::lock_guard lock(table_);
            ids = free_ids_;
        }
        Call agree{{Collective::allreduce, DDL_UINT8, DDL_MIN, ids.size(), 0}, ids.data(), ids.data(), Purpose::split};
        if (Status status = run(parent.id, agree); !status.ok()) return status;
        const auto found = first_free(ids, birth_of_child({parent.id, birth}, attempt));
        if (!found) return no_numbers_left();
        uint8_t everyones = reservation->take(*found) ? 1 : 0;
        Call check{{Collective::allreduce, DDL_UINT8, DDL_MIN, 1, 0}, &everyones, &everyones, Purpose::split};
        if (Status status = run(parent.id, check); !status.ok()) return status;
        if (everyones == 1) return {};
        reservation->give_back();
    }
}

Status Engine::split_over(const CommPtr& parent, int color, int key, CommId* comm) {
    const auto size = static_cast<size_t>(parent->size());
    const int mine[2] = {color, key};
    std::vector<int> theirs(2 * size);
    Call gather{{Collective::allgather, DDL_INT32, DDL_SUM, 2, 0}, mine, theirs.data(), Purpose::split};
    RequestPtr request;
    if (Status status = submit(parent->key.id, gather, &request); !status.ok()) return status;
    if (Status status = wait(request); !status.ok()) return status;
    std::vector<std::tuple<int, size_t>> order;  // (key, rank) of the ranks with this color
    for (size_t r = 0; r < size; ++r) {
        if (color >= 0 && theirs[2 * r] == color) order.emplace_back(theirs[2 * r + 1], r);
    }
    std::sort(order.begin(), order.end());
    std::vector<int> members;
    for (const auto& [its_key, rank] : order) members.push_back(parent->group.members[rank]);
    *comm = parent->key.id;
    const auto reserve = [&](Reservation* reservation, uint64_t* birth) {
        *birth = birth_of_child(parent->key, request->sequence_);
        return reserve_id(parent->key, *birth, reservation);
    };
    return make_part(parent, members, reserve, comm);
}

// Makes the communicator of `members`, if there are some, under the number and the birth that `reserve` agrees on with
// the other ranks of `parent`.
Status Engine::make_part(const CommPtr& parent, const std::vector<int>& members,
                         const std::function<Status(Reservation*, uint64_t* birth)>& reserve, CommId* comm) {
    Reservation reservation(*this);
    uint64_t birth = 0;
    Status status;
    try {
        status = reserve(&reservation, &birth);
        if (status.ok() && !members.empty()) status = create_part({reservation.id(), birth}, members);
    } catch (const std::bad_alloc&) {
        status = no_memory();
    }
    if (status.ok()) {
        if (!members.empty()) *comm = reservation.keep();
        return status;
    }
    if (status.code == DDL_ERROR_MEMORY) fail(parent->key.id, *out_of_memory_);
    if (reservation.is_taken()) renounce(*parent, {reservation.id(), birth}, members);
    return status;
}

// What broke `parent` while a part of it was made may have come too late for some, who have the part: they are told
// that it is broken too, now and when they ask.
void Engine::renounce(const Communicator& parent, const CommKey& key, const std::vector<int>& members) noexcept {
    const std::lock_guard lock(progress_);
    if (shut_ || !parent.broken) return;
    try {
        NoticeContent abort = parent.abort();
        abort.comm = key.id;
        abort.birth = key.birth;
        tell(members, abort);
        registry_.bury(key, {{}, *parent.broken});
    } catch (const std::bad_alloc&) {
        // Without memory they cannot be told.
    }
}

Status Engine::create_part(const CommKey& key, const std::vector<int>& members) {
    const CommPtr world = find(kWorld);
    if (!world) return shut_down();
    const Plan& all = world->plan;
    // Without the lock, as it may take a while, in which others' messages are waited for.
    Plan part = options_.plan_part ? options_.plan_part(all, members) : plan_of_part(all, members);
    create(key, members, std::move(part));
    return {};
}

Status Engine::free(CommId id) {
    if (id == kWorld) return {DDL_ERROR_ARGUMENT, "the communicator of all ranks cannot be freed"};
    const CommPtr comm = find(id);
    if (!comm) return no_such(id);
    const std::lock_guard lock(progress_);
    take_submissions();
    if (const size_t in_flight = comm->in_flight() + mailbox_.count_of(comm->key)) {
        return {DDL_ERROR_STATE, "communicator " + std::to_string(id) + " has " + std::to_string(in_flight) +
                                     " requests in flight: wait for them before it is freed"};
    }
    // For a submission that another thread is making at this moment.
    const Cause freed =
        std::make_shared<const Status>(Status{DDL_ERROR_STATE, "communicator " + std::to_string(id) + " was freed"});
    const bool was_whole = !comm->broken;
    {
        const std::lock_guard table(table_);
        // Another thread may have freed it, and even made another of this number, since it was found.
        const auto found = comms_.find(id);
        if (found == comms_.end() || found->second != comm) return no_such(id);
        registry_.bury(comm->key, {comm->last_call(), was_whole ? Status{} : *comm->broken});
        comms_.erase(found);
        mailbox_.forget(comm->key);
        // Messages of a broken communicator may still arrive: its id is not used again.
        free_ids_[id] = was_whole;
        comm->broken = freed;
    }
    if (was_whole) {
        // Others may still call it. They have been told what broke one that was broken.
        NoticeContent notice = comm->notice(NoticeKind::freed);
        notice.call = comm->last_call();
        tell(comm->group.members, notice);
    }
    return {};
}

}  // namespace ddl
