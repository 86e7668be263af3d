#include "engine/mailbox.h"

#include <algorithm>
#include <cstring>

#include "base/backoff.h"
#include "engine/operation.h"

namespace ddl {
namespace {

constexpr const char* kNoMemory = "out of memory";  // short: the text of a Status that itself needs none
constexpr uint32_t kEnvelopeMagic = 0x4c444d31;
// What moves at all moves this much long before anybody warns.
constexpr size_t kPieceBytes = 8 << 20;
// Collectives have the lower half of the tags. Numbers of payloads come round after a million messages.
constexpr Tag kEnvelopeTag = Tag{1} << (kTagBits - 1);
constexpr uint64_t kPayloadTags = kEnvelopeTag - 1;

Tag payload_tag(uint64_t number) { return kEnvelopeTag + 1 + static_cast<Tag>(number % kPayloadTags); }

// What ddl.torch makes of messages: a collective's name for its tag, else "".
std::string collective_of(const Mail& mail) {
    if (mail.channel != Channel::user) return "";
    switch (mail.tag) {
        case int64_t{1} << 40: return "gather's ";
        case int64_t{1} << 41: return "scatter's ";
        case int64_t{1} << 42: return "alltoall's ";
        default: return "";
    }
}

std::string content(DataType type, uint64_t count) {
    return (is_valid(type) ? std::string(name_of(type)) : "an unknown type") + ", " + elements(count);
}

}  // namespace

std::string describe(const Mail& mail, const std::vector<std::string>& names) {
    const std::string collective = mail.channel == Channel::library ? "create_group's " : collective_of(mail);
    std::string text = collective;
    text += mail.incoming ? "receive from " : "send to ";
    text += mail.peers.size() == 1 ? names[static_cast<size_t>(mail.peers[0])] : "any rank";
    text += " on communicator " + std::to_string(mail.comm.id) + " (";
    if (collective.empty()) text += "tag " + std::to_string(mail.tag) + ", ";
    return text + content(mail.type, mail.count) + ")";
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
    if (line.next.empty()) line.next.emplace_back();
    Scratch& content = line.next.front().content;
    if (!content) content = pool_.take(capacity);
    line.ticket = transport_.irecv(peer, kEnvelopeTag, content.data(), capacity);
    line.deaf = false;
}

void Mailbox::listen_on(int peer) noexcept {
    try {
        if (wanted(peer)) listen(peer);
    } catch (const std::bad_alloc&) {
        lines_[static_cast<size_t>(peer)].deaf = true;  // tried again with the next poll
    }
}

void Mailbox::post(Letter letter) {
    letter.flight.emplace_back();
    letters_.push_back(std::move(letter));
    Letter& mine = letters_.back();
    try {
        mine.mail.incoming ? receive(mine) : send(mine);
    } catch (...) {
        letters_.pop_back();  // nothing of it is under way
        throw;
    }
}

void Mailbox::receive(Letter& letter) {
    const auto found = std::find_if(arrivals_.begin(), arrivals_.end(),
                                    [&](const Arrival& arrival) { return matches(letter.mail, arrival); });
    if (found != arrivals_.end()) {
        deliver(letter, *found);
        arrivals_.erase(found);
        return;
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
    Flight& flight = letter.flight.front();
    flight.scratch = pool_.take(sizeof envelope + riding);
    std::memcpy(flight.scratch.data(), &envelope, sizeof envelope);
    if (riding > 0) std::memcpy(flight.scratch.data() + sizeof envelope, mail.from, riding);
    flight.envelope = transport_.isend(peer, kEnvelopeTag, flight.scratch.data(), sizeof envelope + riding);
    letter.peer = peer;
    letter.tag = payload_tag(envelope.number);
    letter.payload = bytes - riding;
    begin_pieces(letter);
}

// Gives to the transport as much of the payload as may be under way. Where there is no memory for that the letter has
// failed: its envelope is out.
void Mailbox::begin_pieces(Letter& letter) noexcept {
    const Mail& mail = letter.mail;
    try {
        for (Letter::Piece& piece : letter.flight.front().pieces) {
            if (piece.ticket != 0 || letter.begun == letter.payload) continue;
            const size_t bytes = std::min(kPieceBytes, letter.payload - letter.begun);
            piece.ticket =
                mail.incoming
                    ? transport_.irecv(letter.peer, letter.tag, static_cast<std::byte*>(mail.to) + letter.begun, bytes)
                    : transport_.isend(letter.peer, letter.tag, static_cast<const std::byte*>(mail.from) + letter.begun,
                                       bytes);
            piece.bytes = bytes;
            letter.begun += bytes;
        }
    } catch (const std::bad_alloc&) {
        letter.status = {DDL_ERROR_MEMORY, kNoMemory};
    }
}

void Mailbox::deliver(Letter& letter, const Arrival& arrival) noexcept {
    const Mail& mail = letter.mail;
    const Envelope& envelope = arrival.envelope;
    letter.matched = true;
    letter.peer = arrival.from;
    letter.moved = seconds_now();
    letter.warned = false;
    if (mail.source) {
        *mail.source = mail.ranks[static_cast<size_t>(std::find(mail.peers.begin(), mail.peers.end(), arrival.from) -
                                                      mail.peers.begin())];
    }
    const auto type = static_cast<DataType>(envelope.type);
    if (type != mail.type || envelope.count != mail.count) {
        letter.status.code = DDL_ERROR_MISMATCH;
        try {
            letter.status.message =
                "it was sent with " + content(type, envelope.count) + ": give both sides the same type and count";
        } catch (const std::bad_alloc&) {
            // The code has to do.
        }
        return;
    }
    const size_t bytes = mail.count * size_of(mail.type);
    if (inlines(envelope)) {
        if (bytes > 0) std::memcpy(mail.to, arrival.content.data() + sizeof envelope, bytes);
    } else {
        letter.tag = payload_tag(envelope.number);
        letter.payload = bytes;
        begin_pieces(letter);
    }
}

// Takes what has arrived from a rank. True if something has.
bool Mailbox::hear(int peer) noexcept {
    Line& line = lines_[static_cast<size_t>(peer)];
    bool heard = false;
    while (line.ticket != 0) {
        size_t received = 0;
        const Progress progress = transport_.test(line.ticket, &received);
        if (progress == Progress::pending) break;
        heard = true;
        line.ticket = 0;
        Arrival& arrival = line.next.front();
        arrival.from = peer;
        arrival.envelope = {};
        if (received >= sizeof(Envelope)) std::memcpy(&arrival.envelope, arrival.content.data(), sizeof(Envelope));
        const Envelope& envelope = arrival.envelope;
        if (progress == Progress::failed || envelope.magic != kEnvelopeMagic ||
            !is_valid(static_cast<DataType>(envelope.type)) ||
            received != sizeof envelope +
                            (inlines(envelope) ? envelope.count * size_of(static_cast<DataType>(envelope.type)) : 0)) {
            line.broken = true;  // nothing after it can be told apart
            break;
        }
        const auto found = std::find_if(letters_.begin(), letters_.end(), [&](const Letter& letter) {
            return letter.mail.incoming && !letter.matched && !letter.withdrawn && matches(letter.mail, arrival);
        });
        if (found != letters_.end()) {
            deliver(*found, arrival);
        } else {
            arrivals_.splice(arrivals_.end(), line.next);
        }
        listen_on(peer);
    }
    return heard;
}

// True if the letter is over: its buffer is its caller's.
bool Mailbox::advance(Letter& letter) noexcept {
    const Mail& mail = letter.mail;
    Flight& flight = letter.flight.front();
    const auto fail = [&] {
        letter.status.code = DDL_ERROR_TRANSPORT;
        try {
            letter.status.message = "the transport dropped or truncated a message";
        } catch (const std::bad_alloc&) {
            // The code has to do.
        }
        return end(letter);
    };
    if (letter.withdrawn || !letter.status.ok()) return end(letter);
    if (mail.incoming && !letter.matched) {
        const auto is_broken = [&](int peer) { return lines_[static_cast<size_t>(peer)].broken; };
        return std::any_of(mail.peers.begin(), mail.peers.end(), is_broken) && fail();
    }
    size_t received = 0;
    if (flight.envelope != 0) {
        const Progress progress = transport_.test(flight.envelope, &received);
        if (progress != Progress::pending) flight.envelope = 0;
        if (progress == Progress::failed) return fail();
    }
    for (Letter::Piece& piece : flight.pieces) {
        if (piece.ticket == 0) continue;
        const Progress progress = transport_.test(piece.ticket, &received);
        if (progress == Progress::pending) continue;
        piece.ticket = 0;
        if (progress == Progress::failed || (mail.incoming && received != piece.bytes)) return fail();
        letter.passed += piece.bytes;
        letter.moved = seconds_now();
        letter.warned = false;
    }
    begin_pieces(letter);
    return letter.status.ok() ? is_over(flight) : end(letter);
}

// Takes back one that has failed or was withdrawn. True if it is over.
bool Mailbox::end(Letter& letter) noexcept {
    Flight& flight = letter.flight.front();
    if (letter.ended_at == 0) {
        letter.ended_at = seconds_now();
        take_back(flight);
    }
    const bool is_written = letter.mail.incoming && !settle(flight);
    return !is_written || seconds_now() - letter.ended_at >= settle_seconds_;
}

bool Mailbox::is_over(const Flight& flight) {
    return flight.envelope == 0 && std::all_of(flight.pieces.begin(), flight.pieces.end(),
                                               [](const Letter::Piece& piece) { return piece.ticket == 0; });
}

// True if the transport has done with it, whatever came of it.
bool Mailbox::settle(Flight& flight) noexcept {
    settle(flight.envelope);
    for (Letter::Piece& piece : flight.pieces) settle(piece.ticket);
    return is_over(flight);
}

void Mailbox::settle(Ticket& ticket) noexcept {
    size_t received = 0;
    if (ticket != 0 && transport_.test(ticket, &received) != Progress::pending) ticket = 0;
}

void Mailbox::take_back(Ticket& ticket) noexcept {
    if (ticket != 0 && transport_.cancel(ticket)) ticket = 0;
}

void Mailbox::take_back(Flight& flight) noexcept {
    take_back(flight.envelope);
    for (Letter::Piece& piece : flight.pieces) take_back(piece.ticket);
}

bool Mailbox::poll(std::list<Letter>* over) noexcept {
    bool moved = false;
    for (size_t peer = 0; peer < lines_.size(); ++peer) {
        if (lines_[peer].deaf) listen_on(static_cast<int>(peer));
        if (lines_[peer].ticket != 0) moved |= hear(static_cast<int>(peer));
    }
    for (auto letter = letters_.begin(); letter != letters_.end();) {
        const auto next = std::next(letter);
        if (advance(*letter)) {
            moved = true;
            take_back(letter->flight.front());
            if (!is_over(letter->flight.front())) unsettled_.splice(unsettled_.end(), letter->flight);
            over->splice(over->end(), letters_, letter);
        }
        letter = next;
    }
    unsettled_.remove_if([&](Flight& flight) { return settle(flight); });
    return moved;
}

void Mailbox::withdraw(const CommKey& comm, const std::shared_ptr<const Status>& cause) noexcept {
    for (Letter& letter : letters_) {
        if (!(letter.mail.comm == comm) || letter.withdrawn) continue;
        letter.withdrawn = true;
        letter.cause = cause;
        letter.ended_at = seconds_now();
        take_back(letter.flight.front());
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
    for (Letter& letter : letters_) unsettled_.splice(unsettled_.end(), letter.flight);
    for (Flight& flight : unsettled_) {
        take_back(flight);
        if (flight.envelope != 0) flight.scratch.leave();
    }
    letters_.clear();
    unsettled_.clear();
    arrivals_.clear();
    for (Line& line : lines_) {
        take_back(line.ticket);
        if (line.ticket != 0) line.next.front().content.leave();
        line.ticket = 0;
    }
}

}  // namespace ddl
