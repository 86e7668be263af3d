// Makes a communicator of some ranks of the world without the others. MPI knows this as MPI_Comm_create_group.
#include <algorithm>
#include <string>

#include "engine/engine.h"

namespace ddl {
namespace {

constexpr int32_t kNone = -1;

// What the first member, which leads, tells the others.
struct Proposal {
    int32_t id = kNone;
    int32_t reserved = 0;
    uint64_t birth = 0;
};

}  // namespace

// One piece of bytes with each of `peers`; blocks. The memory is the caller's again whatever happens.
Status Engine::exchange(bool incoming, const std::vector<int>& peers, int64_t tag, std::byte* first, size_t stride,
                        size_t bytes) {
    std::vector<RequestPtr> requests;
    requests.reserve(peers.size());
    Status status;
    for (size_t i = 0; i < peers.size() && status.ok(); ++i) {
        Mail mail;
        mail.incoming = incoming;
        mail.channel = Channel::library;
        mail.tag = tag;
        mail.count = bytes;
        mail.from = mail.to = first + i * stride;
        RequestPtr request;
        try {
            status = post(kWorld, peers[i], std::move(mail), &request);
        } catch (const std::bad_alloc&) {
            status = no_memory();
        }
        if (status.ok()) requests.push_back(std::move(request));
    }
    if (!status.ok()) fail(kWorld, status);  // nobody may wait for what is not posted: neither this rank nor the others
    const Status* failed = nullptr;
    for (const RequestPtr& request : requests) {
        const Status& its = wait(request);
        if (!its.ok() && !failed) failed = &its;
    }
    if (status.ok() && failed) status = *failed;
    return status;
}

Status Engine::create_group(const std::vector<int>& members, uint64_t tag, CommId* comm) {
    const CommPtr world = core_.table.find(kWorld);
    if (!world || core_.shut) return shut_down();
    try {
        std::vector<int> sorted = members;
        std::sort(sorted.begin(), sorted.end());
        const bool valid = !sorted.empty() && sorted.front() >= 0 && sorted.back() < world->size() &&
                           std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end();
        if (!valid || std::find(members.begin(), members.end(), world->rank) == members.end()) {
            return {DDL_ERROR_ARGUMENT, "create_group: the ranks must be different ones of [0, " +
                                            std::to_string(world->size()) + ") with this one, " +
                                            std::to_string(world->rank) + ", among them"};
        }
        const auto reserve = [&](Reservation* reservation, uint64_t* birth) {
            return reserve_group_id(world->rank, members, tag, reservation, birth);
        };
        return make_part(world, members, reserve, comm);
    } catch (const Error& error) {
        return error.status();
    } catch (const std::bad_alloc&) {
        return no_memory();
    }
}

// Takes an id that is free on every member, and its first user's birth.
Status Engine::reserve_group_id(int rank, const std::vector<int>& members, uint64_t tag, Reservation* reservation,
                                uint64_t* birth) {
    uint64_t name = birth_of_child({static_cast<uint32_t>(members.size()), tag}, tag);
    for (const int member : members) name = birth_of_child({static_cast<uint32_t>(member), name}, tag);
    const bool leads = members[0] == rank;
    const std::vector<int> others =
        leads ? std::vector<int>(members.begin() + 1, members.end()) : std::vector{members[0]};
    const auto channel = static_cast<int64_t>(name);
    const auto send = [&](void* data, size_t bytes) {
        return exchange(false, others, channel, static_cast<std::byte*>(data), 0, bytes);
    };
    const auto receive = [&](void* data, size_t stride, size_t bytes) {
        return exchange(true, others, channel, static_cast<std::byte*>(data), stride, bytes);
    };
    // Other splits and groups may take the id that is chosen here on some rank meanwhile: then it is tried again.
    for (;; reservation->give_back()) {
        std::vector<uint8_t> ids = core_.table.free_ids();
        Proposal proposal;
        // No parent has this birth, and no two groups that a rank leads have the same number.
        if (leads) proposal.birth = birth_of_child({static_cast<uint32_t>(rank), ~uint64_t{0}}, groups_++);
        if (leads) {
            std::vector<uint8_t> theirs(others.size() * ids.size());
            if (Status status = receive(theirs.data(), ids.size(), ids.size()); !status.ok()) return status;
            for (size_t i = 0; i < theirs.size(); ++i) ids[i % ids.size()] &= theirs[i];
            if (const auto found = first_free(ids, proposal.birth)) proposal.id = static_cast<int32_t>(*found);
            if (Status status = send(&proposal, sizeof proposal); !status.ok()) return status;
        } else {
            if (Status status = send(ids.data(), ids.size()); !status.ok()) return status;
            if (Status status = receive(&proposal, 0, sizeof proposal); !status.ok()) return status;
        }
        if (proposal.id == kNone) return no_numbers_left();
        *birth = proposal.birth;
        uint8_t verdict = reservation->take(static_cast<CommId>(proposal.id)) ? 1 : 0;
        if (leads) {
            std::vector<uint8_t> theirs(others.size());
            if (Status status = receive(theirs.data(), 1, 1); !status.ok()) return status;
            for (const uint8_t its : theirs) verdict &= its;
            if (Status status = send(&verdict, 1); !status.ok()) return status;
        } else {
            if (Status status = send(&verdict, 1); !status.ok()) return status;
            if (Status status = receive(&verdict, 0, 1); !status.ok()) return status;
        }
        if (verdict == 1) return {};
    }
}

}  // namespace ddl
