#include "startup/text_message.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>

#include "base/backoff.h"

namespace ddl {
namespace {

Delivery move(const Socket& socket, char* data, size_t bytes, bool sends, double deadline) {
    while (bytes > 0) {
        const double left = deadline - seconds_now();
        if (left <= 0) return Delivery::late;
        pollfd wait{socket.fd(), static_cast<short>(sends ? POLLOUT : POLLIN), 0};
        if (poll(&wait, 1, static_cast<int>(std::min(left, 0.1) * 1e3) + 1) == 0) continue;
        const ssize_t count = sends ? send(socket.fd(), data, bytes, MSG_NOSIGNAL) : recv(socket.fd(), data, bytes, 0);
        if (count < 0 && (errno == EAGAIN || errno == EINTR)) continue;
        if (count <= 0) return Delivery::ended;
        data += count;
        bytes -= static_cast<size_t>(count);
    }
    return Delivery::done;
}

}  // namespace

Delivery send_text(const Socket& socket, const std::string& text, double deadline) {
    const uint64_t bytes = text.size();
    std::string all(reinterpret_cast<const char*>(&bytes), sizeof bytes);
    all += text;
    return move(socket, all.data(), all.size(), true, deadline);
}

Delivery receive_text(const Socket& socket, std::string* text, size_t most, double deadline) {
    uint64_t bytes = 0;
    const Delivery head = move(socket, reinterpret_cast<char*>(&bytes), sizeof bytes, false, deadline);
    if (head != Delivery::done) return head;
    if (bytes > most) return Delivery::ended;
    text->resize(bytes);
    return move(socket, text->data(), bytes, false, deadline);
}

}  // namespace ddl
