#include "startup/front_door.h"

#include <sys/socket.h>

#include <algorithm>
#include <sstream>
#include <utility>

#include "base/backoff.h"
#include "base/status.h"
#include "startup/text_message.h"

namespace ddl {
namespace {

constexpr int kServeMilliseconds = 50;
constexpr double kWordsSeconds = 2;  // in which a newcomer says what it wants
constexpr size_t kMostKnock = 4096;

bool has_ended(const Socket& socket) {
    char byte = 0;
    return recv(socket.fd(), &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0 || error_of(socket) != 0;
}

}  // namespace

FrontDoor::FrontDoor(const Start& start, std::string options) : options_(std::move(options)), connector_(0, kSeats) {
    const std::string token = new_token();
    key_ = start.key(token);
    connector_.set_token(key_);
    connector_.let_in();
    if (!start.set || !start.set(kDoorKey, token + " " + connector_.contact())) {
        throw Error(DDL_ERROR_TRANSPORT, "the store did not take the address at which processes can join");
    }
    thread_ = std::thread([this] { serve(); });
}

FrontDoor::~FrontDoor() {
    stopping_ = true;
    if (thread_.joinable()) thread_.join();
}

int FrontDoor::waiting() const {
    const std::lock_guard lock(mutex_);
    return static_cast<int>(guests_.size());
}

void FrontDoor::serve() {
    while (!stopping_) {
        connector_.serve(kServeMilliseconds);
        for (Connector::News news; connector_.next(&news);) greet(news.peer, std::move(news.socket));
        const std::lock_guard lock(mutex_);
        for (size_t i = guests_.size(); i-- > 0;) {
            if (!has_ended(guests_[i].socket)) continue;
            left_.push_back(guests_[i].seat);
            guests_.erase(guests_.begin() + static_cast<std::ptrdiff_t>(i));
        }
        for (const int seat : left_) connector_.forget(seat);
        left_.clear();
    }
}

// A process that knows the token: it says its version, its options and its contact, a line each.
void FrontDoor::greet(int seat, Socket socket) {
    const double deadline = seconds_now() + kWordsSeconds;
    std::string knock, version, options;
    Guest guest;
    guest.seat = seat;
    const bool heard = receive_text(socket, &knock, kMostKnock, deadline) == Delivery::done;
    std::istringstream lines(knock);
    std::getline(lines, version);
    std::getline(lines, options);
    std::getline(lines, guest.contact);
    std::string refusal;
    if (version != std::to_string(kVersion)) {
        refusal = "it has version " + version + " of ddl, and the job " + std::to_string(kVersion);
    } else if (options != options_) {
        refusal = "its options are '" + options + "', and the job's '" + options_ + "'";
    }
    if (heard && !refusal.empty()) send_text(socket, refusal, deadline);
    keep_alive(socket);
    guest.socket = std::move(socket);
    const std::lock_guard lock(mutex_);
    if (heard && refusal.empty() && guest.contact.size() <= kMostContact) {
        guests_.push_back(std::move(guest));
    } else {
        left_.push_back(seat);
    }
}

std::string FrontDoor::invite(int ranks) {
    const std::lock_guard lock(mutex_);
    const size_t count = std::min(guests_.size(), kMostNewcomers);
    if (count == 0) return "";
    std::string contacts;
    for (size_t i = 0; i < count; ++i) contacts += guests_[i].contact + "\n";
    for (size_t i = 0; i < count; ++i) {
        // Who does not take it is found out by the ranks that connect to it.
        send_text(guests_[i].socket,
                  std::string(kInvited) + " " + std::to_string(i) + " " + std::to_string(count) + " " +
                      std::to_string(ranks) + "\n" + contacts,
                  seconds_now() + kWordsSeconds);
        left_.push_back(guests_[i].seat);
    }
    guests_.erase(guests_.begin(), guests_.begin() + static_cast<std::ptrdiff_t>(count));
    return key_ + "\n" + contacts;
}

}  // namespace ddl
