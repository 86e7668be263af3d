// Splitting a communicator, and what is common to the ways of making one.
#include <algorithm>
#include <tuple>

#include "engine/engine.h"

namespace ddl {

Status no_numbers_left() {
    return {DDL_ERROR_UNSUPPORTED,
            "there are " + std::to_string(kMostCommunicators) + " communicators already: free some with ddl_comm_free"};
}

std::optional<CommId> first_free(const std::vector<uint8_t>& ids, uint64_t from) {
    const auto begin = ids.begin() + static_cast<ptrdiff_t>(from % ids.size());
    auto found = std::find(begin, ids.end(), 1);
    if (found == ids.end()) found = std::find(ids.begin(), begin, 1);
    if (*found != 1) return std::nullopt;
    return static_cast<CommId>(found - ids.begin());
}

Status Engine::split(CommId parent, int color, int key, CommId* comm) {
    const CommPtr over = core_.table.find(parent);
    if (!over) return core_.shut ? shut_down() : no_such(parent);
    Status status;
    try {
        status = split_over(over, color, key, comm);
    } catch (const Error& error) {
        return error.status();
    } catch (const std::bad_alloc&) {
        status = no_memory();
    }
    if (status.code == DDL_ERROR_MEMORY) fail(parent, *core_.out_of_memory);  // the others wait in it for this rank
    return status;
}

// Takes one id for all parts, free on every rank of `parent`. Ranks in different parts never meet under it. Another
// split, of another communicator, may take the same one on some rank meanwhile: then both, or one, try again.
Status Engine::reserve_id(const CommKey& parent, uint64_t birth, Reservation* reservation) {
    for (uint64_t attempt = 0;; ++attempt) {
        std::vector<uint8_t> ids = core_.table.free_ids();
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
        *birth = birth_of_child(parent->key, request->sequence);
        return reserve_id(parent->key, *birth, reservation);
    };
    return make_part(parent, members, reserve, comm);
}

// Makes the communicator of `members`, if there are some, under the number and the birth that `reserve` agrees on with
// the other ranks of `parent`.
Status Engine::make_part(const CommPtr& parent, const std::vector<int>& members,
                         const std::function<Status(Reservation*, uint64_t* birth)>& reserve, CommId* comm) {
    Reservation reservation(core_.table);
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
    if (status.code == DDL_ERROR_MEMORY) fail(parent->key.id, *core_.out_of_memory);
    if (reservation.is_taken()) renounce(*parent, {reservation.id(), birth}, members);
    return status;
}

// What broke `parent` while a part of it was made may have come too late for some, who have the part: they are told
// that it is broken too, now and when they ask.
void Engine::renounce(const Communicator& parent, const CommKey& key, const std::vector<int>& members) noexcept {
    const std::lock_guard lock(core_.progress);
    if (core_.shut || !parent.broken) return;
    try {
        diagnosis_.bury(key, {{}, *parent.broken});  // first: whoever is not told asks
        NoticeContent abort = parent.abort();
        abort.comm = key.id;
        abort.birth = key.birth;
        core_.tell(members, abort);
        loop_.wake();
    } catch (const std::bad_alloc&) {
        // Without memory they cannot be told.
    }
}

Status Engine::create_part(const CommKey& key, const std::vector<int>& members) {
    const CommPtr world = core_.table.find(kWorld);
    if (!world) return shut_down();
    const Plan& all = world->plan;
    // Without the lock, as it may take a while, in which others' messages are waited for.
    Plan part = core_.options.plan_part ? core_.options.plan_part(all, members) : plan_of_part(all, members);
    create(key, members, std::move(part));
    return {};
}

}  // namespace ddl
