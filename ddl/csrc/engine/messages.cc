#include "engine/messages.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "base/backoff.h"

namespace ddl {
namespace {

constexpr double kGrace = 2;  // seconds in which messages that a rank sent before it left may still arrive

Status refuse(const std::string& why) { return {DDL_ERROR_ARGUMENT, why}; }

Status check(const Mail& mail, int peer, int rank, int size) {
    const std::string what = mail.incoming ? "receive: " : "send: ";
    if (!is_valid(mail.type)) {
        return refuse(what + "type " + std::to_string(static_cast<int>(mail.type)) + " is none of ddl_type");
    }
    const bool any = mail.incoming && peer == kAnyRank;
    if (!any && (peer < 0 || peer >= size)) {
        return refuse(what + "peer " + std::to_string(peer) + " is no rank of the communicator: it has " +
                      std::to_string(size));
    }
    if (peer == rank || (any && size == 1)) return refuse(what + "a rank cannot exchange messages with itself");
    const void* buffer = mail.incoming ? mail.to : mail.from;
    if (mail.count == 0) return {};
    if (!buffer) return refuse(what + "the buffer is NULL, but count is " + std::to_string(mail.count));
    const size_t element = size_of(mail.type);
    if (mail.count > static_cast<uint64_t>(PTRDIFF_MAX) / element) {
        return refuse(what + "count " + std::to_string(mail.count) + " is more than memory can be addressed");
    }
    if (reinterpret_cast<uintptr_t>(buffer) % element != 0) {
        return refuse(what + "the buffer is not aligned to its elements: the address of a " + name_of(mail.type) +
                      " must be a multiple of " + std::to_string(element));
    }
    return {};
}

void address(const Communicator& comm, int peer, Mail* mail) {
    mail->comm = comm.key;
    for (int rank = 0; rank < comm.size(); ++rank) {
        if (rank == comm.rank || (peer != kAnyRank && peer != rank)) continue;
        mail->ranks.push_back(rank);
        mail->peers.push_back(comm.group.members[static_cast<size_t>(rank)]);
    }
}

// When this rank heard that the last of these ranks has left; infinity if some have not.
double left_at(const Communicator& comm, const std::vector<int>& ranks) {
    double last = 0;
    for (const int rank : ranks) {
        const auto found = comm.departed.find(rank);
        if (found == comm.departed.end()) return std::numeric_limits<double>::infinity();
        last = std::max(last, found->second.at);
    }
    return last;
}

// The same of all who could move the letter on.
double left_at(const Communicator& comm, const Letter& letter) {
    return letter.matched ? left_at(comm, std::vector{comm.rank_of(letter.peer)}) : left_at(comm, letter.mail.ranks);
}

}  // namespace

Status Messages::post(CommId id, int peer, Mail mail, RequestPtr* request) {
    if (core_.shut) return shut_down();
    const CommPtr comm = core_.table.find(id);
    if (!comm) return no_such(id);
    if (Status status = check(mail, peer, comm->rank, comm->size()); !status.ok()) return status;
    address(*comm, peer, &mail);
    auto made = std::make_shared<Request>();
    Letter letter;
    letter.mail = std::move(mail);
    letter.request = made;
    letter.posted = letter.moved = seconds_now();
    const std::lock_guard lock(core_.progress);
    if (core_.shut) return shut_down();  // checked again: the mailbox is emptied under this lock
    if (comm->broken) {
        made->finish(comm->broken);
    } else {
        letter.patience = comm->patience;
        core_.mailbox.post(std::move(letter));
        core_.begin(1);
    }
    *request = std::move(made);
    return {};
}

bool Messages::poll() {
    if (core_.mailbox.empty()) return false;
    std::list<Letter> over;
    const bool moved = core_.mailbox.poll(&over);
    for (Letter& letter : over) {
        Cause error = std::move(letter.cause);
        if (!letter.withdrawn && !letter.status.ok()) {
            error = core_.cause(letter.status.code, [&] {
                return core_.own_name() + " called " + describe(letter.mail, core_.names) + ": " +
                       letter.status.message;
            });
            if (const CommPtr comm = core_.table.find(letter.mail.comm)) core_.break_comm(*comm, error);
        }
        core_.finish(letter.request, std::move(error));
    }
    return moved;
}

// Why the letter does not move.
std::string Messages::hindrance_of(const Communicator& comm, const Letter& letter) const {
    const bool alone = std::isfinite(left_at(comm, letter)), unsent = letter.mail.incoming && !letter.matched;
    if (unsent && letter.mail.peers.size() > 1) {
        return alone ? "every rank that could send it has left the communicator" : "no rank has sent it";
    }
    const int other = unsent ? letter.mail.peers[0] : letter.peer;
    const std::string peer = core_.name(other);
    if (alone) return peer + " " + describe(comm.departed.at(comm.rank_of(other)).how);
    if (unsent) return peer + " has not sent it";
    const std::string part = std::to_string(letter.passed) + " of " + std::to_string(letter.payload) + " bytes";
    if (letter.mail.incoming) return peer + " has sent it, but its data does not arrive: " + part + " are here";
    return peer + (letter.passed == 0 ? " has not taken it" : " has taken only " + part + " of it");
}

void Messages::watch(double now) {
    for (Letter& letter : core_.mailbox.letters()) {
        const CommPtr comm = core_.table.find(letter.mail.comm);
        if (!comm || letter.withdrawn || !letter.status.ok()) continue;
        if (std::exchange(comm->watched, now) != now) {
            for (const int member : comm->group.members) {
                if (!core_.transport->is_dead(member)) continue;
                const std::string text = core_.name(member) + " died during " + describe(letter.mail, core_.names) +
                                         " of " + core_.own_name() + ": see its own output for the cause";
                return core_.break_comm(*comm, core_.cause(DDL_ERROR_PEER_LOST, text));
            }
        }
        for (const int peer : letter.mail.peers) {  // their goodbyes may be lost on their way over others
            if (!core_.transport->has_left(peer)) continue;
            comm->departed.emplace(comm->rank_of(peer), Departure{Leave::finalized, {}, now});
        }
        const Patience& patience = letter.patience;
        const double waited = now - letter.moved;
        const bool hopeless = std::min(waited, now - left_at(*comm, letter)) >= kGrace;
        const bool late = waited >= patience.timeout_seconds;
        const bool warns = !letter.warned && waited >= patience.warn_seconds;
        if (!hopeless && !late && !warns) continue;
        const std::string text = core_.own_name() + " has waited " + std::to_string(static_cast<int>(waited)) +
                                 " s in " + describe(letter.mail, core_.names) + ": " + hindrance_of(*comm, letter);
        if (hopeless) return core_.break_comm(*comm, core_.cause(DDL_ERROR_SHUTDOWN, text));
        if (late) {
            return core_.break_comm(*comm, core_.cause(DDL_ERROR_TIMEOUT, text + ". " + kPatienceOfCalls));
        }
        core_.warnings.push_back(text);
        letter.warned = true;
        if (letter.mail.peers.size() == 1) core_.transport->reach(letter.mail.peers);
    }
}

std::string Messages::in_flight() const {
    std::string text;
    for (const Letter& letter : core_.mailbox.letters()) {
        text += core_.own_name() + ": " + describe(letter.mail, core_.names) + ", " +
                std::to_string(static_cast<int>(seconds_now() - letter.posted)) + " s\n";
    }
    return text;
}

}  // namespace ddl
