#include "startup/tcp_rendezvous.h"

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
            await_others();
            contacts[0] = connector_->contact();
            for (int other = 1; other < size; ++other) contacts[static_cast<size_t>(other)] = hear(other);
            std::string all;
            for (const std::string& one : contacts) all += one + "\n";
            for (int other = 1; other < size; ++other) say(other, all);
        } else {
            find_first();
            connector_->let_in();  // not before the token is known to be this job's
            say(0, connector_->contact());
            std::istringstream lines(hear(0));
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
        }
    }

    // Rank 0's: until all others are connected.
    void await_others() {
        for (;; serve()) {
            std::vector<int> missing;
            for (int other = 1; other < start_.size; ++other) {
                if (!connector_->is_connected(other)) missing.push_back(other);
            }
            if (missing.empty()) return;
            check_time(missing);
        }
    }

    // Warns once of ranks that do not come, and gives up when the time is over.
    void check_time(const std::vector<int>& missing) {
        const double waited = seconds_now() - begin_;
        if (waited >= patience_.timeout_seconds) fail(missing);
        if (waited >= patience_.warn_seconds && !std::exchange(warned_, true)) warn_(complaint(missing, waited));
    }
    std::string complaint(const std::vector<int>& missing, double waited) const {
        return "ddl_init: rank " + std::to_string(start_.rank) + " has waited " +
               std::to_string(static_cast<int>(waited)) + " s for " + name_list(missing) + ": not started, " +
               (start_.secret.empty() ? "" : "with another DDL_SECRET, ") + "or no TCP connection is possible";
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
        const size_t most = (kMostContact + 1) * sockets_.size();
        check(peer, receive_text(sockets_[static_cast<size_t>(peer)], &text, most, deadline_));
        return text;
    }

    const Start& start_;
    const std::string key_;
    const double begin_;
    const Patience patience_;
    const double deadline_ = begin_ + patience_.timeout_seconds;
    const std::function<void(const std::string&)>& warn_;
    bool warned_ = false;
    std::vector<Socket> sockets_;
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
