#include "startup/tcp_rendezvous.h"

#include <poll.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <sstream>
#include <utility>

#include "base/backoff.h"
#include "base/patience.h"
#include "base/random_number.h"
#include "base/rank_list.h"
#include "base/sha256.h"
#include "base/status.h"
#include "startup/text_message.h"
#include "transport/connector.h"

namespace ddl {
namespace {

constexpr double kRetrySeconds = 2;  // without success: the store is read again
constexpr int kServeMilliseconds = 50;
constexpr char kRefusal = '!';  // begins what rank 0 answers in place of the contacts

// A rank may come to have a connection and a heartbeat to each other one, and 1024 files are the usual limit.
void allow_sockets(int ranks) {
    constexpr rlim_t kOthers = 512;  // the program's own files
    rlimit limit{};
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
    limit.rlim_cur = std::max(limit.rlim_cur, std::min(2 * static_cast<rlim_t>(ranks) + kOthers, limit.rlim_max));
    setrlimit(RLIMIT_NOFILE, &limit);
}

// One rank's part.
class Meeting {
  public:
    Meeting(const Start& start, int round, double timeout, const std::function<void(const std::string&)>& warn)
        : start_(start),
          key_("ddl/rendezvous/" + std::to_string(round)),
          begin_(seconds_now()),
          patience_(within({}, timeout)),
          warn_(warn),
          sockets_(static_cast<size_t>(start.size)),
          connector_(std::make_shared<Connector>(start.rank, start.size)) {}

    TcpLinks run() {
        const int rank = start_.rank, size = start_.size;
        std::vector<std::string> contacts(sockets_.size());
        if (rank == 0) {
            const std::string token = new_token();
            connector_->set_token(start_.key(token));
            connector_->let_in();
            if (!start_.set(key_, token + " " + connector_->contact())) {
                throw Error(DDL_ERROR_TRANSPORT, "ddl_init: the store did not take rank 0's address");
            }
            await_others(contacts);
            contacts[0] = connector_->contact();
            std::string all;
            for (const std::string& one : contacts) all += one + "\n";
            for (int other = 1; other < size; ++other) say(other, all);
        } else {
            find_first();
            connector_->let_in();  // not before the token is known to be this job's
            say(0, connector_->contact() + "\n" + std::to_string(size));
            const std::string answer = hear(0);
            if (answer[0] == kRefusal) throw Error(DDL_ERROR_MISMATCH, answer.substr(1));
            std::istringstream lines(answer);
            for (std::string& line : contacts) std::getline(lines, line);
        }
        connector_->know(std::move(contacts));
        TcpLinks links;
        for (int other = 0; other < size; ++other) {
            links.numbers.push_back(other);
            links.ranks.emplace_back();
            Socket& socket = sockets_[static_cast<size_t>(other)];
            if (!socket) continue;
            links.ranks.back().connection = std::make_unique<TcpConnection>();
            links.ranks.back().connection->open(std::move(socket), true);
        }
        links.connector = std::move(connector_);
        return links;
    }

  private:
    // Reads the key again until the rank that it names knows the token: a job before this one may have left it.
    void find_first() {
        for (Backoff backoff(0, 0.05); !connector_->is_connected(0); backoff.pause()) {
            std::string value;
            const double until_then = (warned_ ? deadline_ : begin_ + patience_.warn_seconds) - seconds_now();
            if (until_then <= 0 || !start_.get(key_, &value, until_then)) {
                check_time({0});
                continue;
            }
            const size_t space = value.find(' ');
            if (space == std::string::npos) continue;
            connector_->set_token(start_.key(value.substr(0, space)));
            connector_->connect(0, value.substr(space + 1));
            const double until = std::min(deadline_, seconds_now() + kRetrySeconds);
            while (!connector_->is_connected(0) && connector_->attempts() > 0 &&
                   (seconds_now() < until || connector_->is_promised(0))) {
                check_time({0});
                serve();
            }
            connector_->give_up();
        }
    }

    void serve() {
        connector_->serve(kServeMilliseconds);
        for (Connector::News news; connector_->next(&news);) {
            sockets_[static_cast<size_t>(news.peer)] = std::move(news.socket);
            silent_.push_back(news.peer);
        }
    }

    // On rank 0: wait until all others are connected and have said at which addresses they listen.
    void await_others(std::vector<std::string>& contacts) {
        for (;; serve()) {
            const auto has_spoken = [&](int other) {
                pollfd wait{sockets_[static_cast<size_t>(other)].fd(), POLLIN, 0};
                if (poll(&wait, 1, 0) <= 0) return false;
                contacts[static_cast<size_t>(other)] = contact_said_by(other, contacts);
                return true;
            };
            silent_.erase(std::remove_if(silent_.begin(), silent_.end(), has_spoken), silent_.end());
            std::vector<int> missing;
            for (int other = 1; other < start_.size; ++other) {
                if (contacts[static_cast<size_t>(other)].empty()) missing.push_back(other);
            }
            if (missing.empty()) return;
            check_time(missing);
        }
    }

    // A rank's contact. If it is of a job of another size, all ranks that have come are told so.
    std::string contact_said_by(int other, const std::vector<std::string>& contacts) {
        std::istringstream lines(hear(other));
        std::string contact, size;
        std::getline(lines, contact);
        std::getline(lines, size);
        if (size.empty() || size == std::to_string(start_.size)) return contact;
        const std::string text = "ddl_init: rank 0 is one of " + std::to_string(start_.size) + " ranks, but rank " +
                                 std::to_string(other) + " is one of " + size +
                                 ": start all with the same size (WORLD_SIZE)";
        const double until = std::min(deadline_, seconds_now() + 1);
        for (int rank = 1; rank < start_.size; ++rank) {
            const Socket& socket = sockets_[static_cast<size_t>(rank)];
            if (!socket) continue;
            // If a socket is closed with unread data, TCP resets it, and the refusal is lost.
            if (rank != other && contacts[static_cast<size_t>(rank)].empty()) {
                receive_text(socket, &contact, longest_text(), until);
            }
            send_text(socket, kRefusal + text, until);
        }
        throw Error(DDL_ERROR_MISMATCH, text);
    }

    // Warns once of ranks that do not come, and gives up when the time is over.
    void check_time(const std::vector<int>& missing) {
        const double waited = seconds_now() - begin_;
        if (waited >= patience_.timeout_seconds) fail(missing);
        if (waited >= patience_.warn_seconds && !std::exchange(warned_, true)) warn_(complaint(missing, waited));
    }
    std::string complaint(const std::vector<int>& missing, double waited) const {
        const std::string rank = std::to_string(start_.rank);
        const std::string begin = "ddl_init: rank " + rank + " has waited " + std::to_string(static_cast<int>(waited)) +
                                  " s for " + name_list(missing) + ": ";
        if (connector_->was_turned_away()) {
            return begin + "it answers, but takes no rank " + rank + " of " + std::to_string(start_.size) +
                   " from here: there is another rank " + rank +
                   ", ranks have different sizes (WORLD_SIZE), or another program has this address";
        }
        return begin + "not started, " + (start_.secret.empty() ? "" : "with another DDL_SECRET, ") +
               "or no TCP connection is possible";
    }
    [[noreturn]] void fail(const std::vector<int>& missing) const {
        throw Error(DDL_ERROR_TIMEOUT, complaint(missing, patience_.timeout_seconds) + ". " + kPatienceOfInit);
    }

    void check(int peer, Delivery delivery) const {
        if (delivery == Delivery::late) fail({peer});
        if (delivery == Delivery::done) return;
        throw Error(DDL_ERROR_PEER_LOST, "ddl_init: rank " + std::to_string(peer) + " died during the call" +
                                             (peer == 0 ? ", or ended it because another rank did" : ""));
    }
    void say(int peer, const std::string& text) {
        check(peer, send_text(sockets_[static_cast<size_t>(peer)], text, deadline_));
    }
    std::string hear(int peer) {
        std::string text;
        check(peer, receive_text(sockets_[static_cast<size_t>(peer)], &text, longest_text(), deadline_));
        return text;
    }
    size_t longest_text() const { return (kMostContact + 1) * sockets_.size(); }

    const Start& start_;
    const std::string key_;
    const double begin_;
    const Patience patience_;
    const double deadline_ = begin_ + patience_.timeout_seconds;
    const std::function<void(const std::string&)>& warn_;
    bool warned_ = false;
    std::vector<Socket> sockets_;
    std::vector<int> silent_;  // ranks that are connected, and have said nothing yet
    std::shared_ptr<Connector> connector_;
};

}  // namespace

std::string new_token() {
    std::string token;
    for (int i = 0; i < 4; ++i) token += std::to_string(random_number());
    token.resize(60);
    return token;
}

std::string Start::key(const std::string& token) const {
    if (secret.empty()) return token;
    std::string text;
    for (const unsigned char byte : hmac_sha256(secret, token)) {
        char digits[3];
        std::snprintf(digits, sizeof digits, "%02x", byte);
        text += digits;
    }
    return text;
}

std::string secret_of_environment() {
    const char* const secret = std::getenv("DDL_SECRET");
    return secret ? secret : "";
}

Start start_of(const ddl_membership& given, bool joins) {
    const bool has_place = given.size >= 1 && given.rank >= 0 && given.rank < given.size;
    if (!given.set || !given.get || (!joins && !has_place)) {
        throw Error(DDL_ERROR_ARGUMENT, "ddl_init_with: rank " + std::to_string(given.rank) + " of " +
                                            std::to_string(given.size) +
                                            ": expected 0 <= rank < size, and both set and get");
    }
    Start made;
    made.joins = joins;
    made.secret = secret_of_environment();
    made.rank = given.rank;
    made.size = given.size;
    made.set = [given](const std::string& key, const std::string& value) {
        return given.set(given.context, key.c_str(), value.data(), value.size()) == 0;
    };
    made.get = [given](const std::string& key, std::string* value, double seconds) {
        std::string buffer(2048, '\0');
        size_t bytes = 0;
        const int result = given.get(given.context, key.c_str(), buffer.data(), buffer.size(), &bytes, seconds);
        if (result == 1) return false;
        if (result != 0 || bytes > buffer.size()) {
            throw Error(DDL_ERROR_TRANSPORT, "ddl_init: the store failed to give '" + key + "' (get returned " +
                                                 std::to_string(result) + ")");
        }
        *value = buffer.substr(0, bytes);
        return true;
    };
    return made;
}

TcpLinks meet(const Start& start, int round, double timeout_seconds,
              const std::function<void(const std::string&)>& warn) {
    if (start.size == 1) {
        TcpLinks alone;
        alone.ranks.resize(1);
        return alone;
    }
    allow_sockets(start.size);
    return Meeting(start, round, timeout_seconds, warn).run();
}

}  // namespace ddl
