// Making and freeing communicators.
#include <algorithm>
#include <tuple>

#include "communicator.h"
#include "reservation.h"

namespace ddl {

Status Engine::split(CommId parent, int color, int key, CommId* comm) {
    const CommPtr over = find(parent);
    if (!over) return shut_ ? shut_down() : no_such(parent);
    try {
        return split_over(*over, color, key, comm);
    } catch (const Error& error) {
        return error.status();
    } catch (const std::bad_alloc&) {
        return {DDL_ERROR_MEMORY, "out of memory"};
    }
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
        // Splits begin their search at different places, so that they seldom want the same.
        const auto begin =
            ids.begin() + static_cast<ptrdiff_t>(birth_of_child({parent.id, birth}, attempt) % ids.size());
        auto found = std::find(begin, ids.end(), 1);
        if (found == ids.end()) found = std::find(ids.begin(), begin, 1);
        if (found == begin && *begin != 1) {
            return {DDL_ERROR_UNSUPPORTED, "there are " + std::to_string(kMostCommunicators) +
                                               " communicators already: free some with ddl_comm_free"};
        }
        uint8_t everyones = reservation->take(static_cast<CommId>(found - ids.begin())) ? 1 : 0;
        Call check{{Collective::allreduce, DDL_UINT8, DDL_MIN, 1, 0}, &everyones, &everyones, Purpose::split};
        if (Status status = run(parent.id, check); !status.ok()) return status;
        if (everyones == 1) return {};
        reservation->give_back();
    }
}

Status Engine::split_over(const Communicator& parent, int color, int key, CommId* comm) {
    const auto size = static_cast<size_t>(parent.size());
    const int mine[2] = {color, key};
    std::vector<int> theirs(2 * size);
    Call gather{{Collective::allgather, DDL_INT32, DDL_SUM, 2, 0}, mine, theirs.data(), Purpose::split};
    RequestPtr request;
    if (Status status = submit(parent.key.id, gather, &request); !status.ok()) return status;
    if (Status status = wait(request); !status.ok()) return status;
    const uint64_t birth = birth_of_child(parent.key, request->sequence_);
    Reservation reservation(*this);
    if (Status status = reserve_id(parent.key, birth, &reservation); !status.ok()) return status;
    *comm = parent.key.id;
    if (color < 0) return {};
    std::vector<std::tuple<int, size_t>> order;  // (key, rank) of the ranks with this color
    for (size_t r = 0; r < size; ++r) {
        if (theirs[2 * r] == color) order.emplace_back(theirs[2 * r + 1], r);
    }
    std::sort(order.begin(), order.end());
    std::vector<int> members;
    for (const auto& [its_key, rank] : order) members.push_back(parent.group.members[rank]);
    if (Status status = create_part({reservation.id(), birth}, std::move(members)); !status.ok()) return status;
    *comm = reservation.keep();
    return {};
}

Status Engine::create_part(const CommKey& key, std::vector<int> members) {
    const CommPtr world = find(kWorld);
    if (!world) return shut_down();
    Plan all;
    {
        const std::lock_guard lock(progress_);
        all = world->plan;  // of what was found: another thread may shut the engine down meanwhile
    }
    // Without the lock, as it may take a while, in which others' messages are waited for.
    Plan part = options_.plan_part ? options_.plan_part(all, members) : plan_of_part(all, members);
    create(key, std::move(members), std::move(part));
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
    const std::lock_guard table(table_);
    // Another thread may have freed it, and even made another of this number, since it was found.
    const auto found = comms_.find(id);
    if (found == comms_.end() || found->second != comm) return no_such(id);
    registry_.bury(comm->key, {comm->sequence, comm->last_call(), comm->broken ? *comm->broken : Status{}});
    comms_.erase(found);
    mailbox_.forget(comm->key);
    // Messages of a broken communicator may still arrive: its id is not used again.
    free_ids_[id] = !comm->broken;
    comm->broken = freed;
    return {};
}

}  // namespace ddl
