#include "transport/transport_tcp.h"

#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "base/backoff.h"
#include "base/status.h"

namespace ddl {
namespace {

constexpr size_t kMostWord = 64 << 10;
constexpr double kGoodbyeSeconds = 2;  // in which close() lets the rest leave
constexpr double kLastWordsSeconds = 1;
constexpr double kNewsSeconds = 4;  // in which heartbeats say whether a rank without a goodbye has died
constexpr size_t kBranches = 8;     // ranks that one tells by itself
constexpr int kEvents = 64;
constexpr uint64_t kConnector = ~uint64_t{0};  // in the epoll; others are ranks

}  // namespace

struct TcpTransport::Message {
    Progress state = Progress::pending;
    int peer = -1;
    Tag tag = 0;
    const std::byte* from = nullptr;
    std::byte* to = nullptr;
    size_t bytes = 0;           // of a send: its length; of a receive: its capacity, then what it received
    bool is_announced = false;  // a send whose payload moves when it is asked for
    uint64_t asked = 0;         // of a receive: the sender's ticket of the announced message that it has asked for
};

struct TcpTransport::Peer final : TcpConnection::Owner {
    struct Early {
        Frame frame;
        std::unique_ptr<std::byte[]> payload;
    };
    Peer(TcpTransport& all, int its_rank) : all(all), rank(its_rank) {}

    bool begin(const Frame& frame, TcpConnection::In* in) override;
    void end(const Frame& frame, TcpConnection::In& in) override;
    void sent(Ticket ticket) noexcept override {
        if (const auto found = all.messages_.find(ticket); found != all.messages_.end()) {
            found->second.state = Progress::done;
        }
    }
    void lost(bool by_its_end, bool is_void) noexcept override {
        // A rank that leaves may not have the time to say goodbye on a connection that it has not used.
        if (is_void && !left && all.connector_) return vanish(kNewsSeconds, by_its_end && all.is_near(rank));
        is_lost = !left && !all.closed_;
        has_ended = is_lost && by_its_end;
        lost_at = seconds_now();
    }
    // It does not want this rank, or is no more there: has_left() says so, unless heartbeats tell of its death in these
    // seconds. If its process `ended`, has_ended() says so then.
    void vanish(double seconds, bool ended) noexcept {
        has_vanished = true;
        has_ended = ended;
        lost_at = seconds_now() + seconds;
    }
    // The oldest receive of this tag that no message has come for.
    auto awaiting(Tag tag) {
        return std::find_if(awaited.begin(), awaited.end(),
                            [&](Ticket ticket) { return all.messages_.at(ticket).tag == tag; });
    }

    TcpTransport& all;
    const int rank;
    std::unique_ptr<TcpConnection> wire = std::make_unique<TcpConnection>();
    bool is_lost = false, left = false, has_ended = false, has_vanished = false;
    bool is_over() const { return is_lost || left || has_vanished; }
    double lost_at = 0;
    size_t window = kEagerWindow;     // eager bytes that may still be sent
    size_t consumed = 0;              // eager bytes to give back
    std::vector<Ticket> awaited;      // receives that no message has come for, the oldest first
    std::multimap<Tag, Early> early;  // of one tag in order
};

TcpTransport::TcpTransport(int rank, TcpLinks links, std::function<bool(int)> is_dead)
    : rank_(rank),
      is_dead_(std::move(is_dead)),
      numbers_(std::move(links.numbers)),
      connector_(std::move(links.connector)),
      epoch_(links.epoch),
      farewells_(std::move(links.farewells)),
      peers_(links.ranks.size()),
      ready_(epoll_create1(EPOLL_CLOEXEC)) {
    if (!ready_) throw Error(DDL_ERROR_TRANSPORT, std::string("epoll_create1: ") + std::strerror(errno));
    for (int other = 0; other < size(); ++other) {
        TcpLinks::Link& its = links.ranks[static_cast<size_t>(other)];
        if (other == rank_ || (!its.connection && !its.is_lost && can_reach(other))) continue;
        Peer& peer = at(other);
        peer.is_lost = !its.connection;
        peer.has_ended = its.has_ended;
        peer.lost_at = seconds_now();
        if (!its.connection) continue;
        peer.wire = std::move(its.connection);
        peer.wire->renew();
        open(peer);
    }
    if (!connector_) return;
    connector_->set_epoch(epoch_);
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = kConnector;
    if (epoll_ctl(ready_.fd(), EPOLL_CTL_ADD, connector_->ready(), &event) != 0) {
        throw Error(DDL_ERROR_TRANSPORT, std::string("epoll_ctl: ") + std::strerror(errno));
    }
}

TcpTransport::~TcpTransport() { close(); }

TcpTransport::Peer& TcpTransport::at(int rank) {
    auto& peer = peers_[static_cast<size_t>(rank)];
    if (!peer) peer = std::make_unique<Peer>(*this, rank);
    return *peer;
}

// True if a connection to it can be made at any time.
bool TcpTransport::can_reach(int rank) const {
    return connector_ && numbers_[static_cast<size_t>(rank)] != TcpLinks::kNoNumber;
}

// No cable lies between it and this rank.
bool TcpTransport::is_near(int rank) const {
    return can_reach(rank) && connector_->is_near(numbers_[static_cast<size_t>(rank)]);
}

// Its connection is up.
void TcpTransport::open(Peer& peer) {
    keep_alive(peer.wire->socket());
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = static_cast<uint64_t>(peer.rank);
    if (epoll_ctl(ready_.fd(), EPOLL_CTL_ADD, peer.wire->socket().fd(), &event) != 0) {
        throw Error(DDL_ERROR_TRANSPORT, std::string("epoll_ctl: ") + std::strerror(errno));
    }
    peer.wire->hear(peer);
    peer.wire->flush(peer);
}

bool TcpTransport::is_dead(int rank) const {
    const Peer* const peer = find(rank);
    return (peer && peer->is_lost) || (is_dead_ && is_dead_(rank));
}

bool TcpTransport::is_gone(int rank) const { return find(rank) && find(rank)->left; }

// Until then its own words may arrive, or those of its death.
bool TcpTransport::has_left(int rank) const {
    const Peer* const peer = find(rank);
    return peer && (peer->left || peer->has_vanished) && seconds_now() - peer->lost_at > kLastWordsSeconds;
}

bool TcpTransport::has_ended(int rank) const {
    const Peer* const peer = find(rank);
    return peer && peer->has_ended && seconds_now() >= peer->lost_at;
}

double TcpTransport::seconds_lost(int rank) const {
    const Peer* const peer = find(rank);
    return peer && (peer->is_lost || peer->has_vanished) ? seconds_now() - peer->lost_at : 0;
}

bool TcpTransport::is_unanswered(int rank) const {
    return can_reach(rank) && connector_->is_unanswered(numbers_[static_cast<size_t>(rank)]);
}

void TcpTransport::expect_cut() const {
    if (connector_) connector_->expect_cut();
}

bool TcpTransport::is_over(int rank) const { return is_dead(rank) || (find(rank) && find(rank)->is_over()); }

size_t TcpTransport::connections() const {
    return static_cast<size_t>(
        std::count_if(peers_.begin(), peers_.end(), [](const auto& peer) { return peer && peer->wire->is_open(); }));
}

void TcpTransport::push(Peer& peer, Out out) {
    const bool is_open = peer.wire->is_open();
    if (peer.is_lost || closed_ || peer.wire->is_parked()) return;
    if (!is_open && (peer.is_over() || !can_reach(peer.rank))) return;
    // First, as it may find no memory: the caller then takes the message back, and none of it may be queued.
    if (!is_open) connector_->want(numbers_[static_cast<size_t>(peer.rank)]);
    peer.wire->push(std::move(out));
    if (is_open) peer.wire->flush(peer);
}

void TcpTransport::reach(const std::vector<int>& ranks) {
    for (const int rank : ranks) {
        if (!can_reach(rank) || is_over(rank) || at(rank).wire->is_open()) continue;
        connector_->want(numbers_[static_cast<size_t>(rank)]);
    }
}

// Makes the connections that are wanted, and takes those that others make.
void TcpTransport::serve_connector() noexcept {
    try {
        connector_->serve(0);
        for (Connector::News news; connector_->next(&news);) adopt(std::move(news));
    } catch (const std::exception&) {
        // There is no memory. A connection that was lost by that is missed by its other end, which says so.
    }
}

void TcpTransport::adopt(Connector::News news) {
    const auto found = std::lower_bound(numbers_.begin(), numbers_.end(), news.peer);
    const bool is_in = found != numbers_.end() && *found == news.peer;
    const bool is_connected = news.kind == Connector::News::connected;
    if (!is_in && !is_connected) return;
    // It gets the farewell, and its end stays open: the kernel would drop what it has not read yet.
    if (!is_in) left_out_.push_back(std::make_unique<Peer>(*this, -1));
    Peer& peer = is_in ? at(static_cast<int>(found - numbers_.begin())) : *left_out_.back();
    if (peer.is_lost || peer.has_vanished || peer.wire->is_open()) return;
    if (!is_connected) {
        peer.wire->close();
        return news.kind == Connector::News::refused ? peer.vanish(0, is_near(peer.rank)) : peer.lost(false, false);
    }
    const auto ended = static_cast<std::ptrdiff_t>(epoch_ - news.epoch);  // none begins in an epoch to come
    peer.wire->follow({farewells_.end() - ended, farewells_.end()});
    peer.wire->open(std::move(news.socket));
    if (!is_in) return peer.wire->flush(peer);
    open(peer);
    if (leaves_) say_goodbye(peer);
}

Ticket TcpTransport::isend(int peer_rank, Tag tag, const void* data, size_t bytes) {
    Peer& peer = at(peer_rank);
    const Ticket ticket = ++last_;
    Message message;
    message.peer = peer_rank;
    message.tag = tag;
    message.from = static_cast<const std::byte*>(data);
    message.bytes = bytes;
    const size_t cost = bytes + sizeof(Frame);
    const bool at_once = bytes <= kEagerBytes && cost <= peer.window;
    message.is_announced = !at_once;
    messages_.emplace(ticket, message);
    Out out;
    out.frame.tag = tag;
    out.frame.bytes = bytes;
    out.frame.sender = ticket;
    out.frame.kind = at_once ? Frame::eager : Frame::announce;
    if (at_once) {
        out.data = message.from;
        out.bytes = bytes;
        out.ticket = ticket;
    }
    try {
        push(peer, std::move(out));
    } catch (const std::bad_alloc&) {
        messages_.erase(ticket);
        throw;
    }
    if (at_once) peer.window -= cost;
    return ticket;
}

Ticket TcpTransport::irecv(int peer_rank, Tag tag, void* data, size_t capacity) {
    Peer& peer = at(peer_rank);
    const Ticket ticket = ++last_;
    Message message;
    message.peer = peer_rank;
    message.tag = tag;
    message.to = static_cast<std::byte*>(data);
    message.bytes = capacity;
    messages_.emplace(ticket, message);
    try {
        await(peer, ticket);
    } catch (const std::bad_alloc&) {
        messages_.erase(ticket);
        throw;
    }
    return ticket;
}

// Gives a receive the message that has come for it, or lets it wait for one. Throws std::bad_alloc; then nothing has
// changed.
void TcpTransport::await(Peer& peer, Ticket ticket) {
    Message& message = messages_.at(ticket);
    const auto found = peer.early.lower_bound(message.tag);
    if (found == peer.early.end() || found->first != message.tag) {
        peer.awaited.insert(std::lower_bound(peer.awaited.begin(), peer.awaited.end(), ticket), ticket);
        return;
    }
    const Peer::Early& early = found->second;
    size_t cost = 0;
    if (early.frame.kind == Frame::eager) {
        finish(message, early.frame.bytes, early.payload.get());
        cost = early.frame.bytes + sizeof(Frame);
    } else {
        ask(peer, ticket, early.frame);
    }
    peer.early.erase(found);
    if (cost > 0) give_credit(peer, cost);
}

// Asks for the payload of an announced message. Throws std::bad_alloc; then nothing has changed.
void TcpTransport::ask(Peer& peer, Ticket ticket, const Frame& announced) {
    Out out;
    out.frame = announced;
    out.frame.kind = Frame::ask;
    out.frame.receiver = ticket;
    push(peer, std::move(out));
    messages_.at(ticket).asked = announced.sender;
}

// A message of `bytes` has come for a receive. `payload`: its bytes, or null if they are in their place already.
void TcpTransport::finish(Message& message, size_t bytes, const std::byte* payload) {
    const bool fits = bytes <= message.bytes;
    if (fits && bytes > 0 && payload) std::memcpy(message.to, payload, bytes);
    message.state = fits ? Progress::done : Progress::failed;
    message.bytes = bytes;
}

void TcpTransport::give_credit(Peer& peer, size_t bytes) {
    peer.consumed += bytes;
    if (peer.consumed < kEagerWindow / 4 || peer.wire->is_parked()) return;
    Out out;
    out.frame.kind = Frame::credit;
    out.frame.bytes = peer.consumed;
    try {
        push(peer, std::move(out));
        peer.consumed = 0;
    } catch (const std::bad_alloc&) {
        // It is given with the next one.
    }
}

void TcpTransport::poll() {
    if (closed_) return;
    for (const auto& peer : peers_) {
        if (!peer || !peer->wire->is_open() || !peer->wire->is_busy()) continue;
        peer->wire->flush(*peer);
        if (peer->wire->is_stuck()) peer->wire->hear(*peer);
    }
    epoll_event events[kEvents];
    const int count = epoll_wait(ready_.fd(), events, kEvents, 0);
    bool serves = connector_ && connector_->is_busy();
    for (int i = 0; i < count; ++i) {
        if (events[i].data.u64 == kConnector) {
            serves = true;
            continue;
        }
        Peer& peer = *peers_[events[i].data.u64];
        peer.wire->hear(peer);
    }
    if (serves) serve_connector();
}

bool TcpTransport::has_unsent() const {
    const auto has_more = [](const auto& peer) { return peer && peer->wire->is_open() && peer->wire->is_busy(); };
    return std::any_of(peers_.begin(), peers_.end(), has_more);
}

bool TcpTransport::is_busy() const {
    return (connector_ && connector_->is_busy()) || has_unsent() || !notices_.empty();
}

bool TcpTransport::wait(double seconds) {
    if (closed_ || has_unsent()) return false;
    epoll_event event;
    epoll_wait(ready_.fd(), &event, 1, static_cast<int>(seconds * 1e3));
    return true;
}

bool TcpTransport::Peer::begin(const Frame& frame, TcpConnection::In* in) {
    switch (frame.kind) {
        case Frame::eager:
            if (frame.bytes > kEagerBytes) return false;
            if (const auto first = awaiting(frame.tag); first != awaited.end()) {
                const Message& its = all.messages_.at(*first);
                in->receive = *first;
                if (frame.bytes <= its.bytes) in->target = its.to;
                awaited.erase(first);
                return true;
            }
            break;
        case Frame::announce:
            if (const auto first = awaiting(frame.tag); first != awaited.end()) {
                all.ask(*this, *first, frame);
                awaited.erase(first);
            } else {
                early.emplace(frame.tag, Early{frame, nullptr});
            }
            return true;
        case Frame::withdraw: all.forget(*this, frame); return true;
        case Frame::ask: {
            const auto found = all.messages_.find(frame.sender);
            if (found == all.messages_.end() || found->second.peer != rank) return true;  // it is withdrawn
            Out out;
            out.frame = frame;
            out.frame.kind = Frame::payload;
            out.data = found->second.from;
            out.bytes = found->second.bytes;
            out.ticket = frame.sender;
            all.push(*this, std::move(out));
            return true;
        }
        case Frame::payload: {
            const auto found = all.messages_.find(frame.receiver);
            if (found == all.messages_.end() || found->second.peer != rank) return true;
            in->receive = frame.receiver;
            if (frame.bytes <= found->second.bytes) in->target = found->second.to;
            return true;
        }
        case Frame::notice:
            if (frame.tag > static_cast<Tag>(all.size()) || frame.sender >= static_cast<uint64_t>(all.size()) ||
                frame.bytes > kNoticeBytes + frame.tag * sizeof(int32_t)) {
                return false;
            }
            break;
        case Frame::word:
        case Frame::park:
            if (frame.bytes > kMostWord) return false;
            break;
        case Frame::credit: window += frame.bytes; return true;
        case Frame::goodbye:
            left = true;
            lost_at = seconds_now();
            return true;
        default: return false;
    }
    in->copy.reset(new std::byte[frame.bytes]);
    in->target = in->copy.get();
    return true;
}

// The sender has taken back a message that it had announced.
void TcpTransport::forget(Peer& peer, const Frame& frame) {
    const auto range = peer.early.equal_range(frame.tag);
    const auto early = std::find_if(range.first, range.second,
                                    [&](const auto& one) { return one.second.frame.sender == frame.sender; });
    if (early != range.second) {
        peer.early.erase(early);
        return;
    }
    // A receive has asked for it: it waits for the next one of its tag.
    const auto asked = std::find_if(messages_.begin(), messages_.end(), [&](const auto& one) {
        return one.second.peer == peer.rank && one.second.asked == frame.sender &&
               one.second.state == Progress::pending;
    });
    if (asked == messages_.end()) return;
    await(peer, asked->first);
    if (asked->second.asked == frame.sender) asked->second.asked = 0;
}

void TcpTransport::Peer::end(const Frame& frame, TcpConnection::In& in) {
    size_t cost = 0;
    if (frame.kind == Frame::notice) {
        all.take_notice(frame, in.copy.get());
    } else if (frame.kind == Frame::word || (frame.kind == Frame::park && frame.bytes > 0)) {
        all.words_.push_back({rank, {in.copy.get(), in.copy.get() + frame.bytes}});
    } else if (frame.kind == Frame::eager && in.copy) {
        // A receive may have been posted since its head came.
        if (const auto first = awaiting(frame.tag); first == awaited.end()) {
            early.emplace(frame.tag, Early{frame, nullptr})->second.payload = std::move(in.copy);
        } else {
            finish(all.messages_.at(*first), frame.bytes, in.copy.get());
            awaited.erase(first);
            cost = frame.bytes + sizeof(Frame);
        }
    } else {
        const auto found = all.messages_.find(in.receive);
        if (in.receive != 0 && found != all.messages_.end()) finish(found->second, frame.bytes, nullptr);
        if (frame.kind == Frame::eager) cost = frame.bytes + sizeof(Frame);
    }
    if (frame.kind == Frame::park) epoll_ctl(all.ready_.fd(), EPOLL_CTL_DEL, wire->socket().fd(), nullptr);
    if (cost > 0) all.give_credit(*this, cost);
}

Progress TcpTransport::test(Ticket ticket, size_t* received) {
    const auto found = messages_.find(ticket);
    const Progress state = found->second.state;
    *received = found->second.bytes;
    if (state != Progress::pending) messages_.erase(found);
    return state;
}

bool TcpTransport::cancel(Ticket ticket) {
    const auto found = messages_.find(ticket);
    Peer& peer = at(found->second.peer);
    const bool is_announced = found->second.is_announced && found->second.state == Progress::pending;
    const Tag tag = found->second.tag;
    messages_.erase(found);
    peer.awaited.erase(std::remove(peer.awaited.begin(), peer.awaited.end(), ticket), peer.awaited.end());
    try {
        // A message that has begun must go on.
        if (!peer.wire->forget(ticket) && is_announced) {
            Out withdraw;
            withdraw.frame.kind = Frame::withdraw;
            withdraw.frame.tag = tag;
            withdraw.frame.sender = ticket;
            push(peer, std::move(withdraw));
        }
    } catch (const std::bad_alloc&) {
        peer.wire->close();
        peer.lost(false, false);
    }
    return true;
}

void TcpTransport::send_copy(Peer& peer, const Frame& frame, const void* data, size_t bytes) {
    push(peer, TcpConnection::copy_of(frame, data, bytes));
}

void TcpTransport::notify(int peer, const void* data, size_t bytes) { pass_on(rank_, {peer}, data, bytes); }

void TcpTransport::tell(const std::vector<int>& peers, const void* data, size_t bytes) {
    std::vector<int> others;
    for (const int peer : peers) {
        if (peer != rank_ && !is_over(peer)) others.push_back(peer);
    }
    // From this rank on, so that every rank has its branches at the same distances: few connections carry all of it.
    const auto distance = [&](int peer) { return (peer - rank_ + size()) % size(); };
    std::sort(others.begin(), others.end(), [&](int a, int b) { return distance(a) < distance(b); });
    pass_on(rank_, std::move(others), data, bytes);
}

// Sends a notice of `from` to those of these ranks that this one is connected to; one of each branch, which it connects
// to if need be, passes it on to the others.
void TcpTransport::pass_on(int from, std::vector<int> ranks, const void* data, size_t bytes) {
    const size_t count = ranks.size(), branches = std::min(kBranches, count);
    const auto is_near = [&](int rank) { return find(rank) && find(rank)->wire->is_open(); };
    const auto at_index = [&](size_t index) { return ranks.begin() + static_cast<ptrdiff_t>(index); };
    std::vector<std::byte> content;
    for (size_t i = 0; i < branches; ++i) {
        const auto begin = at_index(count * i / branches), end = at_index(count * (i + 1) / branches);
        const auto others = std::max(std::stable_partition(begin, end, is_near), begin + 1);
        for (auto one = begin; one != others; ++one) {
            const std::vector<int32_t> behind(one == begin ? others : end, end);
            const auto* const first = static_cast<const std::byte*>(data);
            content.assign(first, first + bytes);
            const auto* const list = reinterpret_cast<const std::byte*>(behind.data());
            content.insert(content.end(), list, list + behind.size() * sizeof(int32_t));
            Frame frame;
            frame.kind = Frame::notice;
            frame.tag = static_cast<Tag>(behind.size());
            frame.sender = static_cast<uint64_t>(from);
            send_copy(at(*one), frame, content.data(), content.size());
        }
    }
}

void TcpTransport::take_notice(const Frame& frame, const std::byte* payload) {
    std::vector<int32_t> behind(frame.tag);
    const size_t listed = behind.size() * sizeof(int32_t);
    if (frame.bytes < listed) return;
    const size_t bytes = frame.bytes - listed;
    if (listed > 0) std::memcpy(behind.data(), payload + bytes, listed);
    const auto is_wrong = [&](int32_t rank) { return rank < 0 || rank >= size() || rank == rank_; };
    if (std::any_of(behind.begin(), behind.end(), is_wrong)) return;
    const auto is_gone = [&](int32_t rank) { return is_over(rank); };
    behind.erase(std::remove_if(behind.begin(), behind.end(), is_gone), behind.end());
    notices_.push_back({static_cast<int>(frame.sender), {payload, payload + bytes}});
    try {
        pass_on(static_cast<int>(frame.sender), {behind.begin(), behind.end()}, payload, bytes);
    } catch (const std::bad_alloc&) {
        // Notices may be lost.
    }
}

void TcpTransport::say(int peer, const std::vector<std::byte>& word) {
    Frame frame;
    frame.kind = Frame::word;
    send_copy(at(peer), frame, word.data(), word.size());
}

bool TcpTransport::next_word(int* from, std::vector<std::byte>* word) {
    if (words_.empty()) return false;
    *from = words_.front().from;
    *word = std::move(words_.front().content);
    words_.pop_front();
    return true;
}

TcpLinks TcpTransport::end_epoch(const std::vector<int>& ranks, const std::vector<std::byte>& farewell) {
    TcpLinks links;
    links.epoch = epoch_ + 1;
    links.farewells = farewells_;
    links.farewells.push_back(farewell);
    if (connector_) {
        connector_->give_up();
        epoll_ctl(ready_.fd(), EPOLL_CTL_DEL, connector_->ready(), nullptr);
    }
    for (const auto& peer : peers_) {
        if (!peer || !peer->wire->is_open()) continue;
        peer->wire->park(farewell);
        peer->wire->flush(*peer);
    }
    for (const int rank : ranks) {
        links.ranks.emplace_back();
        if (!numbers_.empty()) links.numbers.push_back(numbers_[static_cast<size_t>(rank)]);
        Peer* const peer = peers_[static_cast<size_t>(rank)].get();
        if (!peer) continue;
        TcpLinks::Link& link = links.ranks.back();
        link.is_lost = peer->is_over();
        if (!peer->wire->is_open()) continue;
        epoll_ctl(ready_.fd(), EPOLL_CTL_DEL, peer->wire->socket().fd(), nullptr);
        link.connection = std::exchange(peer->wire, std::make_unique<TcpConnection>());
    }
    links.connector = std::exchange(connector_, nullptr);
    return links;
}

bool TcpTransport::next_notice(Notice* notice) {
    if (notices_.empty()) return false;
    *notice = std::move(notices_.front());
    notices_.pop_front();
    return true;
}

void TcpTransport::say_goodbye(Peer& peer) {
    Out out;
    out.frame.kind = Frame::goodbye;
    push(peer, std::move(out));
}

void TcpTransport::close() {
    if (closed_) return;
    const double deadline = seconds_now() + kGoodbyeSeconds;
    leaves_ = true;  // connections that are made from now on, for notices that are passed on, end with a goodbye, too
    if (connector_) {
        // Nobody connects any more who would not hear the goodbye.
        serve_connector();
        connector_->leave();
    }
    for (const auto& peer : peers_) {
        if (peer && peer->wire->is_open()) say_goodbye(*peer);
    }
    const auto is_busy = [&](const auto& peer) {
        return peer && peer->wire->is_busy() && (connector_ || peer->wire->is_open()) && !peer->wire->is_parked() &&
               !is_dead(peer->rank);
    };
    for (Backoff backoff(0, 1e-3); std::any_of(peers_.begin(), peers_.end(), is_busy); backoff.pause()) {
        if (seconds_now() > deadline) break;
        poll();
    }
    poll();  // if a socket is closed with bytes that were not read, the kernel drops bytes that were sent
    closed_ = true;
    for (const auto& peer : peers_) {
        if (peer) peer->wire->close();
    }
    connector_.reset();
}

}  // namespace ddl
