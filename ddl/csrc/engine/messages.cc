// The engine's side of messages between two ranks: see mailbox.h.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "base/backoff.h"
#include "engine/communicator.h"

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

}  // namespace

Status Engine::post(CommId id, int peer, Mail mail, RequestPtr* request) {
    if (shut_) return shut_down();
    const CommPtr comm = find(id);
    if (!comm) return no_such(id);
    if (Status status = check(mail, peer, comm->rank, comm->size()); !status.ok()) return status;
    address(*comm, peer, &mail);
    auto made = std::make_shared<Request>();
    Letter letter;
    letter.mail = std::move(mail);
    letter.request = made;
    letter.posted = letter.moved = seconds_now();
    {
        const std::lock_guard lock(progress_);
        if (shut_) return shut_down();  // checked again: shutdown() empties the mailbox under this lock
        if (comm->broken) {
            made->error_ = comm->broken;
            made->finished_ = true;
        } else {
            letter.patience = comm->patience;
            mailbox_.post(std::move(letter));
            add_active(1);
        }
    }
    *request = std::move(made);
    wake();
    return {};
}

void Engine::address(const Communicator& comm, int peer, Mail* mail) {
    mail->comm = comm.key;
    for (int rank = 0; rank < comm.size(); ++rank) {
        if (rank == comm.rank || (peer != kAnyRank && peer != rank)) continue;
        mail->ranks.push_back(rank);
        mail->peers.push_back(comm.group.members[static_cast<size_t>(rank)]);
    }
}

Status Engine::probe(CommId id, int peer, int64_t tag, bool* found, int* source) {
    *found = false;
    if (shut_) return shut_down();
    const CommPtr comm = find(id);
    if (!comm) return no_such(id);
    Mail mail;
    mail.incoming = true;
    mail.tag = tag;
    if (Status status = check(mail, peer, comm->rank, comm->size()); !status.ok()) return status;
    address(*comm, peer, &mail);
    std::unique_lock held(progress_);
    if (shut_) return shut_down();
    poll();
    int from = -1;
    *found = mailbox_.probe(mail, &from);
    if (*found) *source = comm->rank_of(from);
    Status loss = *found ? Status{} : loss_of(*comm, mail);
    unlock_and_warn(std::move(held));
    return loss;
}

// Why a message that has not arrived will not; success if it may.
Status Engine::loss_of(const Communicator& comm, const Mail& mail) const {
    if (comm.broken) return *comm.broken;
    for (const int member : comm.group.members) {
        if (transport_->is_dead(member)) {
            return {DDL_ERROR_PEER_LOST, name_of_rank(member) + " died: see its own output for the cause"};
        }
    }
    if (seconds_now() - left_at(comm, mail.ranks) >= kGrace) {
        const std::string who = mail.peers.size() == 1
                                    ? name_of_rank(mail.peers[0]) + " " + describe(comm.departed.at(mail.ranks[0]).how)
                                    : "every other rank has left the communicator";
        return {DDL_ERROR_SHUTDOWN, who + ": no message will come any more"};
    }
    return {};
}

bool Engine::poll_messages() {
    if (mailbox_.empty()) return false;
    std::list<Letter> over;
    const bool moved = mailbox_.poll(&over);
    for (Letter& letter : over) {
        Cause error = std::move(letter.cause);
        if (!letter.withdrawn && !letter.status.ok()) {
            error = failure_of(letter);
            if (const CommPtr comm = find(letter.mail.comm)) break_comm(*comm, error, true);
        }
        finish(letter, std::move(error));
    }
    return moved;
}

void Engine::finish(Letter& letter, Cause error) noexcept {
    add_active(-1);
    letter.request->error_ = std::move(error);
    letter.request->finished_.store(true, std::memory_order_release);
}

std::string Engine::name_of(const Letter& letter) const {
    std::vector<std::string> names;
    for (int rank = 0; rank < transport_->size(); ++rank) names.push_back(name_of_rank(rank));
    return describe(letter.mail, names);
}

Cause Engine::failure_of(const Letter& letter) const noexcept {
    try {
        const std::string text = name_of_rank(transport_->rank()) + " called " + name_of(letter) + ": ";
        return cause_of(letter.status.code, (text + letter.status.message).c_str());
    } catch (const std::bad_alloc&) {
        return out_of_memory_;
    }
}

Cause Engine::finalized_with(const Letter& letter) const noexcept {
    try {
        const std::string text = name_of_rank(transport_->rank()) + " was finalized with " + name_of(letter);
        return cause_of(DDL_ERROR_SHUTDOWN, (text + " in flight").c_str());
    } catch (const std::bad_alloc&) {
        return out_of_memory_;
    }
}

// When this rank heard that the last of these ranks has left; infinity if some have not.
double Engine::left_at(const Communicator& comm, const std::vector<int>& ranks) {
    double last = 0;
    for (const int rank : ranks) {
        const auto found = comm.departed.find(rank);
        if (found == comm.departed.end()) return std::numeric_limits<double>::infinity();
        last = std::max(last, found->second.at);
    }
    return last;
}

// The same of all who could move the letter on.
double Engine::left_at(const Communicator& comm, const Letter& letter) {
    return letter.matched ? left_at(comm, {comm.rank_of(letter.peer)}) : left_at(comm, letter.mail.ranks);
}

// Why the letter does not move.
std::string Engine::hindrance_of(const Communicator& comm, const Letter& letter) const {
    const bool alone = std::isfinite(left_at(comm, letter)), unsent = letter.mail.incoming && !letter.matched;
    if (unsent && letter.mail.peers.size() > 1) {
        return alone ? "every rank that could send it has left the communicator" : "no rank has sent it";
    }
    const int other = unsent ? letter.mail.peers[0] : letter.peer;
    const std::string peer = name_of_rank(other);
    if (alone) return peer + " " + describe(comm.departed.at(comm.rank_of(other)).how);
    if (unsent) return peer + " has not sent it";
    const std::string part = std::to_string(letter.passed) + " of " + std::to_string(letter.payload) + " bytes";
    if (letter.mail.incoming) return peer + " has sent it, but its data does not arrive: " + part + " are here";
    return peer + (letter.passed == 0 ? " has not taken it" : " has taken only " + part + " of it");
}

void Engine::watch_messages(double now) {
    for (Letter& letter : mailbox_.letters()) {
        const CommPtr comm = find(letter.mail.comm);
        if (!comm || letter.withdrawn || !letter.status.ok()) continue;
        if (std::exchange(comm->watched, now) != now) {
            for (const int member : comm->group.members) {
                if (!transport_->is_dead(member)) continue;
                const std::string text = name_of_rank(member) + " died during " + name_of(letter) + " of " +
                                         name_of_rank(transport_->rank()) + ": see its own output for the cause";
                return break_comm(*comm, cause_of(DDL_ERROR_PEER_LOST, text.c_str()), true);
            }
        }
        const Patience& patience = letter.patience;
        const double waited = now - letter.moved;
        const bool hopeless = std::min(waited, now - left_at(*comm, letter)) >= kGrace;
        const bool late = waited >= patience.timeout_seconds;
        const bool warns = !letter.warned && waited >= patience.warn_seconds;
        if (!hopeless && !late && !warns) continue;
        const std::string text = name_of_rank(transport_->rank()) + " has waited " +
                                 std::to_string(static_cast<int>(waited)) + " s in " + name_of(letter) + ": " +
                                 hindrance_of(*comm, letter);
        if (hopeless) return break_comm(*comm, cause_of(DDL_ERROR_SHUTDOWN, text.c_str()), true);
        if (late) {
            const std::string end = text + ". " + kPatienceOfCalls;
            return break_comm(*comm, cause_of(DDL_ERROR_TIMEOUT, end.c_str()), true);
        }
        warnings_.push_back(text);
        letter.warned = true;
    }
}

std::string Engine::messages_in_flight() const {
    std::string text;
    for (const Letter& letter : mailbox_.letters()) {
        text += name_of_rank(transport_->rank()) + ": " + name_of(letter) + ", " +
                std::to_string(static_cast<int>(seconds_now() - letter.posted)) + " s\n";
    }
    return text;
}

Status Engine::set_timeout(CommId id, double seconds) {
    const CommPtr comm = find(id);
    if (!comm) return no_such(id);
    if (!(seconds > 0)) {
        return refuse("a timeout of " + std::to_string(seconds) + " s: it must be more than 0");
    }
    const std::lock_guard lock(progress_);
    take_submissions();  // they were made before
    comm->patience = within(options_.patience, seconds);
    return {};
}

}  // namespace ddl
