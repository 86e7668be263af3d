#include "mailbox.h"

#include <algorithm>
#include <cstring>

#include "backoff.h"
#include "operation.h"

namespace ddl {
namespace {

constexpr uint32_t kEnvelopeMagic = 0x4c444d31;
// Collectives have the lower half of the tags. Numbers of payloads come round after a million messages.
constexpr Tag kEnvelopeTag = Tag{1} << (kTagBits - 1);
constexpr uint64_t kPayloadTags = kEnvelopeTag - 1;

Tag payload_tag(uint64_t number) { return kEnvelopeTag + 1 + static_cast<Tag>(number % kPayloadTags); }

std::string plural(uint64_t count) { return std::to_string(count) + (count == 1 ? " element" : " elements"); }

std::string content(DataType type, uint64_t count) {
    return (is_valid(type) ? std::string(name_of(type)) : "an unknown type") + ", " + plural(count);
}

// To the transport, which may still use it: for ever.
void leave(Scratch scratch) { static_cast<void>(new Scratch(std::move(scratch))); }

}  // namespace

std::string describe(const Mail& mail, const std::vector<std::string>& names) {
    std::string text = mail.channel == Channel::library ? "create_group's " : "";
    text += mail.incoming ? "receive from " : "send to ";
    text += mail.peers.size() == 1 ? names[static_cast<size_t>(mail.peers[0])] : "any rank";
    return text + " on communicator " + std::to_string(mail.comm.id) + " (tag " + std::to_string(mail.tag) + ", " +
           content(mail.type, mail.count) + ")";
}

bool Mailbox::matches(const Mail& mail, const Arrival& arrival) {
    const Envelope& envelope = arrival.envelope;
    return mail.comm == CommKey{envelope.comm, envelope.birth} &&
           mail.channel == static_cast<Channel>(envelope.channel) && mail.tag == envelope.tag &&
           std::find(mail.peers.begin(), mail.peers.end(), arrival.from) != mail.peers.end();
}

bool Mailbox::inlines(const Envelope& envelope) {
    return envelope.count <= kInlineBytes / size_of(static_cast<DataType>(envelope.type));
}

bool Mailbox::wanted(int peer) const {
    return std::any_of(letters_.begin(), letters_.end(), [&](const Letter& letter) {
        const auto& peers = letter.mail.peers;
        return letter.mail.incoming && !letter.matched && !letter.withdrawn &&
               std::find(peers.begin(), peers.end(), peer) != peers.end();
    });
}

void Mailbox::listen(int peer) {
    Line& line = lines_[static_cast<size_t>(peer)];
    if (line.ticket != 0 || line.broken) return;
    const size_t capacity = sizeof(Envelope) + kInlineBytes;
    if (!line.scratch) line.scratch = pool_.take(capacity);
    line.ticket = transport_.irecv(peer, kEnvelopeTag, line.scratch.data(), capacity);
}

void Mailbox::post(Letter letter) {
    letters_.push_back(std::move(letter));
    Letter& mine = letters_.back();
    try {
        mine.mail.incoming ? receive(mine) : send(mine);
    } catch (...) {
        mine.withdrawn = true;
        unsettled_.splice(unsettled_.end(), letters_, std::prev(letters_.end()));
        take_back(mine.envelope);
        take_back(mine.payload);
        throw;
    }
}

void Mailbox::receive(Letter& letter) {
    const auto found = std::find_if(arrivals_.begin(), arrivals_.end(),
                                    [&](const Arrival& arrival) { return matches(letter.mail, arrival); });
    if (found != arrivals_.end()) {
        const Arrival arrival = std::move(*found);
        arrivals_.erase(found);
        return deliver(letter, arrival);
    }
    for (const int peer : letter.mail.peers) listen(peer);
}

void Mailbox::send(Letter& letter) {
    const Mail& mail = letter.mail;
    const int peer = mail.peers[0];
    Envelope envelope;
    envelope.magic = kEnvelopeMagic;
    envelope.comm = mail.comm.id;
    envelope.birth = mail.comm.birth;
    envelope.number = lines_[static_cast<size_t>(peer)].sent++;
    envelope.count = mail.count;
    envelope.tag = mail.tag;
    envelope.type = static_cast<uint8_t>(mail.type);
    envelope.channel = static_cast<uint8_t>(mail.channel);
    const size_t bytes = mail.count * size_of(mail.type);
    const size_t riding = inlines(envelope) ? bytes : 0;
    letter.scratch = pool_.take(sizeof envelope + riding);
    std::memcpy(letter.scratch.data(), &envelope, sizeof envelope);
    if (riding > 0) std::memcpy(letter.scratch.data() + sizeof envelope, mail.from, riding);
    letter.envelope = transport_.isend(peer, kEnvelopeTag, letter.scratch.data(), sizeof envelope + riding);
    if (!inlines(envelope)) letter.payload = transport_.isend(peer, payload_tag(envelope.number), mail.from, bytes);
}

void Mailbox::deliver(Letter& letter, const Arrival& arrival) {
    const Mail& mail = letter.mail;
    const Envelope& envelope = arrival.envelope;
    letter.matched = true;
    if (mail.source) {
        *mail.source = mail.ranks[static_cast<size_t>(std::find(mail.peers.begin(), mail.peers.end(), arrival.from) -
                                                      mail.peers.begin())];
    }
    const auto type = static_cast<DataType>(envelope.type);
    if (type != mail.type || envelope.count != mail.count) {
        letter.status = {DDL_ERROR_MISMATCH, "it was sent with " + content(type, envelope.count) +
                                                 ": give both sides the same type and count"};
        return;
    }
    const size_t bytes = mail.count * size_of(mail.type);
    if (inlines(envelope)) {
        if (bytes > 0) std::memcpy(mail.to, arrival.content.data() + sizeof envelope, bytes);
    } else {
        letter.payload = transport_.irecv(arrival.from, payload_tag(envelope.number), mail.to, bytes);
    }
}

// Takes what has arrived from a rank. True where something has.
bool Mailbox::hear(int peer) {
    Line& line = lines_[static_cast<size_t>(peer)];
    bool heard = false;
    while (line.ticket != 0) {
        size_t received = 0;
        const Progress progress = transport_.test(line.ticket, &received);
        if (progress == Progress::pending) break;
        heard = true;
        line.ticket = 0;
        Arrival arrival;
        arrival.from = peer;
        if (received >= sizeof(Envelope)) std::memcpy(&arrival.envelope, line.scratch.data(), sizeof(Envelope));
        const Envelope& envelope = arrival.envelope;
        if (progress == Progress::failed || envelope.magic != kEnvelopeMagic ||
            !is_valid(static_cast<DataType>(envelope.type)) ||
            received != sizeof envelope +
                            (inlines(envelope) ? envelope.count * size_of(static_cast<DataType>(envelope.type)) : 0)) {
            line.broken = true;  // nothing after it can be told apart
            break;
        }
        arrival.content = std::move(line.scratch);
        const auto found = std::find_if(letters_.begin(), letters_.end(), [&](const Letter& letter) {
            return letter.mail.incoming && !letter.matched && !letter.withdrawn && matches(letter.mail, arrival);
        });
        if (found != letters_.end()) {
            deliver(*found, arrival);
        } else {
            arrivals_.push_back(std::move(arrival));
        }
        if (wanted(peer)) listen(peer);
    }
    return heard;
}

// True where the letter is over: its buffer is its caller's.
bool Mailbox::advance(Letter& letter) {
    const Mail& mail = letter.mail;
    if (letter.withdrawn) {
        const bool is_written = mail.incoming && !is_over(letter.payload);
        return !is_written || seconds_now() - letter.withdrawn_at >= settle_seconds_;
    }
    if (!letter.status.ok()) return true;
    if (mail.incoming && !letter.matched) {
        const auto is_broken = [&](int peer) { return lines_[static_cast<size_t>(peer)].broken; };
        if (std::none_of(mail.peers.begin(), mail.peers.end(), is_broken)) return false;
        letter.status = {DDL_ERROR_TRANSPORT, "the transport dropped or truncated a message"};
        return true;
    }
    for (Ticket* ticket : {&letter.envelope, &letter.payload}) {
        if (*ticket == 0) continue;
        size_t received = 0;
        const Progress progress = transport_.test(*ticket, &received);
        if (progress == Progress::pending) return false;
        *ticket = 0;
        if (progress == Progress::failed || (mail.incoming && received != mail.count * size_of(mail.type))) {
            letter.status = {DDL_ERROR_TRANSPORT, "the transport dropped or truncated a message"};
            return true;
        }
    }
    return true;
}

bool Mailbox::is_over(Ticket& ticket) {
    size_t received = 0;
    if (ticket != 0 && transport_.test(ticket, &received) != Progress::pending) ticket = 0;
    return ticket == 0;
}

void Mailbox::take_back(Ticket& ticket) noexcept {
    if (ticket != 0 && transport_.cancel(ticket)) ticket = 0;
}

bool Mailbox::poll(std::list<Letter>* over) {
    bool moved = false;
    for (size_t peer = 0; peer < lines_.size(); ++peer) {
        if (lines_[peer].ticket != 0) moved |= hear(static_cast<int>(peer));
    }
    for (auto letter = letters_.begin(); letter != letters_.end();) {
        const auto next = std::next(letter);
        if (advance(*letter)) {
            moved = true;
            take_back(letter->envelope);
            take_back(letter->payload);
            if (letter->envelope != 0 || letter->payload != 0) {
                Letter rest;
                std::swap(rest.envelope, letter->envelope);
                std::swap(rest.payload, letter->payload);
                std::swap(rest.scratch, letter->scratch);
                unsettled_.push_back(std::move(rest));
            }
            over->splice(over->end(), letters_, letter);
        }
        letter = next;
    }
    unsettled_.remove_if([&](Letter& letter) {
        const bool envelope = is_over(letter.envelope);
        return is_over(letter.payload) && envelope;
    });
    return moved;
}

void Mailbox::withdraw(const CommKey& comm, const std::shared_ptr<const Status>& cause) noexcept {
    for (Letter& letter : letters_) {
        if (!(letter.mail.comm == comm) || letter.withdrawn) continue;
        letter.withdrawn = true;
        letter.cause = cause;
        letter.withdrawn_at = seconds_now();
        take_back(letter.envelope);
        take_back(letter.payload);
    }
}

void Mailbox::forget(const CommKey& comm) {
    arrivals_.remove_if(
        [&](const Arrival& arrival) { return comm == CommKey{arrival.envelope.comm, arrival.envelope.birth}; });
}

size_t Mailbox::count_of(const CommKey& comm) const {
    return static_cast<size_t>(std::count_if(letters_.begin(), letters_.end(),
                                             [&](const Letter& letter) { return letter.mail.comm == comm; }));
}

const Letter* Mailbox::first_of(const CommKey& comm) const {
    const auto found =
        std::find_if(letters_.begin(), letters_.end(), [&](const Letter& letter) { return letter.mail.comm == comm; });
    return found == letters_.end() ? nullptr : &*found;
}

void Mailbox::close() {
    letters_.splice(letters_.end(), unsettled_);
    for (Letter& letter : letters_) {
        take_back(letter.envelope);
        take_back(letter.payload);
        if (letter.envelope != 0) leave(std::move(letter.scratch));
    }
    letters_.clear();
    arrivals_.clear();
    for (Line& line : lines_) {
        take_back(line.ticket);
        if (line.ticket != 0) leave(std::move(line.scratch));
        line.ticket = 0;
    }
}

}  // namespace ddl
