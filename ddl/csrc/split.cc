// Making and freeing communicators.
#include <algorithm>
#include <tuple>

#include "communicator.h"

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

// An id that this rank has taken for a communicator which may not come to be.
class Engine::Reservation {
  public:
    Reservation(Engine& engine, CommId id) : engine_(engine), id_(id) {}
    ~Reservation() {
        if (kept_) return;
        const std::lock_guard lock(engine_.table_);
        engine_.free_ids_[id_] = 1;
    }
    Reservation(const Reservation&) = delete;
    Reservation& operator=(const Reservation&) = delete;
    void keep() { kept_ = true; }

  private:
    Engine& engine_;
    const CommId id_;
    bool kept_ = false;
};

// Takes one id for all parts, free on every rank of `parent`. Ranks in different parts never meet under it. Another
// split, of another communicator, may take the same one on some rank meanwhile: then both, or one, try again.
Status Engine::reserve_id(const CommKey& parent, uint64_t birth, CommId* id) {
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
        *id = static_cast<CommId>(found - ids.begin());
        uint8_t mine = 0;
        {
            const std::lock_guard lock(table_);
            std::swap(mine, free_ids_[*id]);
        }
        uint8_t everyones = mine;
        Call check{{Collective::allreduce, DDL_UINT8, DDL_MIN, 1, 0}, &everyones, &everyones, Purpose::split};
        const Status status = run(parent.id, check);
        if (status.ok() && everyones == 1) return {};
        if (mine == 1) {
            const std::lock_guard lock(table_);
            free_ids_[*id] = 1;
        }
        if (!status.ok()) return status;
    }
}

Status Engine::split_over(const Communicator& parent, int color, int key, CommId* comm) {
    const auto size = static_cast<size_t>(parent.size());
    const int mine[2] = {color, key};
    std::vector<int> theirs(2 * size);
    Call gather{{Collective::allgather, DDL_INT32, DDL_SUM, 2, 0}, mine, theirs.data(), Purpose::split};
    RequestPtr request;
    if (Status status = start(parent.key.id, gather, &request, false); !status.ok()) return status;
    if (Status status = wait(request); !status.ok()) return status;
    const uint64_t birth = birth_of_child(parent.key, request->sequence_);
    CommId id = 0;
    if (Status status = reserve_id(parent.key, birth, &id); !status.ok()) return status;
    *comm = parent.key.id;
    Reservation reservation(*this, id);
    if (color < 0) return {};
    std::vector<std::tuple<int, size_t>> order;  // (key, rank) of the ranks with this color
    for (size_t r = 0; r < size; ++r) {
        if (theirs[2 * r] == color) order.emplace_back(theirs[2 * r + 1], r);
    }
    std::sort(order.begin(), order.end());
    std::vector<int> members;
    for (const auto& [its_key, rank] : order) members.push_back(parent.group.members[rank]);
    if (Status status = create_part({id, birth}, std::move(members)); !status.ok()) return status;
    reservation.keep();
    *comm = id;
    return {};
}

Status Engine::create_part(const CommKey& key, std::vector<int> members) {
    const CommPtr world = find(kWorld);
    if (!world) return shut_down();
    Plan plan;
    {
        const std::lock_guard lock(progress_);
        plan = plan_of_part(world->plan, members);
    }
    create(key, std::move(members), std::move(plan));
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
