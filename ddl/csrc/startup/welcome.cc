#include "startup/welcome.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <sstream>
#include <utility>

#include "base/backoff.h"
#include "base/random_number.h"
#include "base/status.h"
#include "startup/front_door.h"
#include "startup/text_message.h"

namespace ddl {
namespace {

constexpr int kServeMilliseconds = 20;
constexpr double kKnockSeconds = 2;  // in which a connection to the door comes up, or is tried again
constexpr size_t kMostText = 1 << 20;
constexpr char kReady = 'r';

// Reads one byte; -1: not here yet, 0: the connection is over.
int look(const Socket& socket, int flags, char* byte) {
    const ssize_t count = recv(socket.fd(), byte, 1, MSG_DONTWAIT | flags);
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return -1;
    return count == 1 ? 1 : 0;
}

TcpLinks::Link link_of(Socket socket, bool is_there) {
    TcpLinks::Link link;
    link.is_lost = link.has_ended = !is_there;
    if (!is_there) return link;
    link.connection = std::make_unique<TcpConnection>();
    link.connection->open(std::move(socket), true);
    return link;
}

std::vector<std::string> lines_of(const std::string& text) {
    std::istringstream stream(text);
    std::vector<std::string> lines;
    for (std::string line; std::getline(stream, line);) lines.push_back(line);
    return lines;
}

}  // namespace

bool Welcome::prepare(const std::string& offer, uint64_t* ready) {
    *ready = 0;
    if (offer.empty()) return true;
    if (offer != offer_) {
        const std::vector<std::string> lines = lines_of(offer);
        const size_t count = std::min(lines.size() - 1, kMostNewcomers);
        offer_ = offer;
        newcomers_ = std::vector<Newcomer>(count);
        deadline_ = seconds_now() + kMeetSeconds;
        const auto first = static_cast<int>(count);  // newcomers have the first numbers
        connector_ = std::make_unique<Connector>(first + rank_, first + size_, false);
        connector_->set_token(lines[0]);
        for (size_t i = 0; i < count; ++i) connector_->connect(static_cast<int>(i), lines[i + 1]);
    }
    connector_->serve(0);
    for (Connector::News news; connector_->next(&news);) {
        newcomers_[static_cast<size_t>(news.peer)].socket = std::move(news.socket);
    }
    bool settled = true;
    for (size_t i = 0; i < newcomers_.size(); ++i) {
        Newcomer& its = newcomers_[i];
        if (!its.socket && connector_->attempts() == 0) its.lost = true;
        if (its.socket && !its.ready && !its.lost) {
            char byte = 0;
            const int seen = look(its.socket, 0, &byte);
            its.ready = seen == 1 && byte == kReady;
            its.lost = seen == 0;
        }
        settled = settled && (its.ready || its.lost);
        if (its.ready) *ready |= uint64_t{1} << i;
    }
    return settled || seconds_now() > deadline_;
}

std::vector<TcpLinks::Link> Welcome::admit(uint64_t newcomers, const NextEpoch& next) {
    std::string text = std::to_string(next.ballot) + " " + std::to_string(next.epoch) + " " +
                       std::to_string(next.round) + " " + std::to_string(newcomers);
    for (const int rank : next.survivors) text += " " + std::to_string(rank);
    std::vector<TcpLinks::Link> links;
    for (size_t i = 0; i < newcomers_.size(); ++i) {
        Socket socket = std::move(newcomers_[i].socket);
        if ((newcomers >> i & 1) == 0) continue;
        const bool is_there = send_text(socket, text, seconds_now() + kKnockSeconds) == Delivery::done;
        links.push_back(link_of(std::move(socket), is_there));
    }
    connector_.reset();
    return links;
}

namespace {

// One attempt of a newcomer, from its knock to its admission.
class Attempt {
  public:
    // `value`: what stands in the store.
    Attempt(const Start& start, const std::string& value, std::string knock, double deadline)
        : deadline_(deadline), knock_(std::move(knock)) {
        const size_t space = value.find(' ');
        if (space == std::string::npos) return;
        connector_.set_token(start.key(value.substr(0, space)));
        connector_.connect(0, value.substr(space + 1));
    }

    // Nothing if it is to be tried again.
    std::optional<Admission> run() {
        if (!await_invitation() || !meet()) return std::nullopt;
        return take_places();
    }

  private:
    void serve() {
        connector_.serve(kServeMilliseconds);
        for (Connector::News news; connector_.next(&news);) {
            sockets_[static_cast<size_t>(news.peer)] = std::move(news.socket);
        }
    }

    bool await_invitation() {
        const double until = std::min(deadline_, seconds_now() + kKnockSeconds);
        while (!sockets_[0] && connector_.attempts() > 0 && (seconds_now() < until || connector_.is_promised(0))) {
            serve();
        }
        if (!sockets_[0]) return false;
        std::string text;
        if (send_text(sockets_[0], knock_ + connector_.contact(), until + kKnockSeconds) != Delivery::done ||
            receive_text(sockets_[0], &text, kMostText, deadline_) != Delivery::done) {
            return false;
        }
        const std::vector<std::string> lines = lines_of(text);
        std::istringstream words(text);
        std::string kind;
        if (!(words >> kind >> index_ >> count_ >> ranks_) || kind != kInvited || lines.size() != count_ + 1) {
            throw Error(DDL_ERROR_MISMATCH, "ddl_join: the job does not take this process: " + text);
        }
        sockets_ = std::vector<Socket>(count_ + ranks_);
        connector_.take_seat(static_cast<int>(index_), static_cast<int>(sockets_.size()));
        connector_.let_in();
        for (size_t other = 0; other < index_; ++other) {
            connector_.connect(static_cast<int>(other), lines[other + 1]);
        }
        return true;
    }

    // Until a rank says who belongs to the next epoch. False: the ranks have not taken this process.
    bool meet() {
        const double until = seconds_now() + kMeetSeconds;
        std::vector<bool> told(ranks_);
        for (bool met = false;; serve()) {
            if (seconds_now() > deadline_) return false;
            bool ready = true, any = false;
            for (size_t other = 0; other < count_; ++other) ready = ready && (other == index_ || sockets_[other]);
            if (!ready && seconds_now() > until) return false;
            for (size_t rank = 0; rank < ranks_; ++rank) {
                Socket& socket = sockets_[count_ + rank];
                if (!socket) continue;
                met = any = true;
                if (ready && !told[rank]) told[rank] = send(socket.fd(), &kReady, 1, MSG_NOSIGNAL) == 1;
                char byte = 0;
                const int seen = look(socket, MSG_PEEK, &byte);
                if (seen == 0) socket.close();
                if (seen == 1) return true;
            }
            if (!any && (met || seconds_now() > until)) return false;
        }
    }

    // What a rank says: its decision, and who of the newcomers is in.
    struct Word {
        NextEpoch next;
        uint64_t newcomers = 0;
        bool agrees_with(const Word& other) const {
            return next.survivors == other.next.survivors && newcomers == other.newcomers;
        }
    };
    // Nothing if it has died, or does not take this process. As long as its connection is up it may still say that it
    // does, and would hold this process for dead if that did not wait for it.
    std::optional<Word> hear(size_t rank) {
        std::string text;
        Socket& socket = sockets_[count_ + rank];
        const Delivery heard = socket ? receive_text(socket, &text, kMostText, deadline_) : Delivery::ended;
        if (heard == Delivery::late) {
            throw Error(DDL_ERROR_TIMEOUT, "ddl_join: the ranks take this process in, but rank " +
                                               std::to_string(rank) + " has not said so: is it stopped? " +
                                               kPatienceOfInit);
        }
        if (heard == Delivery::ended) return std::nullopt;
        Word word;
        NextEpoch& next = word.next;
        std::istringstream words(text);
        words >> next.ballot >> next.epoch >> next.round >> word.newcomers;
        for (int one = 0; words >> one;) {
            if (one >= 0 && static_cast<size_t>(one) < ranks_) next.survivors.push_back(one);
        }
        return word;
    }

    // Hears the decision from every rank that belongs to it: what follows on the connection is the next epoch's.
    std::optional<Admission> take_places() {
        std::vector<std::optional<Word>> heard(ranks_);
        std::vector<bool> asked(ranks_);
        std::optional<Word> its;
        const auto ask = [&](size_t rank) {
            asked[rank] = true;
            heard[rank] = hear(rank);
            // Who decided the earlier one was gone before the others knew of it, and they have decided anew.
            if (heard[rank] && (!its || heard[rank]->next.ballot > its->next.ballot)) its = heard[rank];
        };
        for (size_t rank = 0; rank < ranks_; ++rank) {
            char byte = 0;
            if (sockets_[count_ + rank] && look(sockets_[count_ + rank], MSG_PEEK, &byte) == 1) ask(rank);
        }
        if (!its) return std::nullopt;  // who was to say it died meanwhile
        for (size_t i = 0; i < its->next.survivors.size();) {
            const auto rank = static_cast<size_t>(its->next.survivors[i++]);
            if (asked[rank]) continue;
            ask(rank);
            i = 0;  // of a later decision, maybe
        }
        if ((its->newcomers >> index_ & 1) == 0) return std::nullopt;
        Admission made;
        for (const int one : its->next.survivors) {
            const auto rank = static_cast<size_t>(one);
            const bool is_in = heard[rank] && heard[rank]->agrees_with(*its);
            made.links.ranks.push_back(link_of(std::move(sockets_[count_ + rank]), is_in));
            // It may have died, or not have taken this process: only those that stay know.
            made.links.ranks.back().has_ended = false;
        }
        for (size_t i = 0; i < count_; ++i) {
            if ((its->newcomers >> i & 1) == 0) continue;
            if (i == index_) made.members.rank = static_cast<int>(made.links.ranks.size());
            made.links.ranks.push_back(link_of(std::move(sockets_[i]), i != index_));
        }
        made.links.ranks[static_cast<size_t>(made.members.rank)] = {};
        made.links.epoch = static_cast<uint32_t>(its->next.epoch);
        made.members.epoch = its->next.epoch;
        made.members.round = its->next.round;
        made.members.former.assign(made.links.ranks.size(), -1);
        return made;
    }

    const double deadline_;
    const std::string knock_;
    size_t index_ = 0, count_ = 0, ranks_ = 0;  // this newcomer among those of the offer, and how many ranks there are
    std::vector<Socket> sockets_ = std::vector<Socket>(1);  // to the door; then to all newcomers, and then to all ranks
    Connector connector_{static_cast<int>(1 + random_number() % (kSeats - 1)), kSeats};
};

}  // namespace

Admission join(const Start& start, const std::string& options, const Patience& patience,
               const std::function<void(const std::string&)>& warn) {
    const double begin = seconds_now(), deadline = begin + patience.timeout_seconds;
    const std::string knock = std::to_string(kVersion) + "\n" + options + "\n";
    bool warned = false;
    for (Backoff backoff(0, 0.1);; backoff.pause()) {
        std::string value;
        const double now = seconds_now(), left = deadline - now;
        const double patient = warned ? left : std::min(left, begin + patience.warn_seconds - now);
        if (patient > 0 && start.get(kDoorKey, &value, patient)) {
            if (auto made = Attempt(start, value, knock, deadline).run()) return std::move(*made);
        }
        const double waited = seconds_now() - begin;
        const std::string text = "ddl_join: this process has waited " + std::to_string(static_cast<int>(waited)) +
                                 " s for the job to take it in: " +
                                 (value.empty() ? "nobody has opened the door: has a rank called ddl_waiting?"
                                                : "its ranks must call ddl_resize, and be reachable from here");
        if (waited >= patience.timeout_seconds) throw Error(DDL_ERROR_TIMEOUT, text + ". " + kPatienceOfInit);
        if (waited >= patience.warn_seconds && !std::exchange(warned, true)) warn(text);
    }
}

}  // namespace ddl
