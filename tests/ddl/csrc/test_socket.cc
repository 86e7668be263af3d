// Sockets over the loopback interface, and what becomes of them when their process forks or is slow.
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <iterator>

#include "check.h"
#include "transport/socket.h"

using namespace ddl;

namespace {

bool is_ready(const Socket& socket, short event) {
    pollfd wait{socket.fd(), event, 0};
    return poll(&wait, 1, 10000) == 1;
}

struct Pair {
    Pair() {
        listener = listen_at("127.0.0.1", &port);
        one = connect_to("127.0.0.1", port);
        CHECK(is_ready(listener, POLLIN));
        other = accept_from(listener);
        keep_alive(one);
    }
    uint16_t port = 0;
    Socket listener, one, other;
};

}  // namespace

TEST("a child that was forked keeps no connection and no port of its parent's") {
    Pair pair;
    const int parents[] = {pair.listener.fd(), pair.one.fd(), pair.other.fd()};
    const pid_t child = fork();
    if (child == 0) {
        const bool kept = std::any_of(std::begin(parents), std::end(parents),
                                      [](int fd) { return fcntl(fd, F_GETFD) != -1 || errno != EBADF; });
        _exit(kept ? 1 : 0);
    }
    int status = 1;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
    pair.other.close();
    CHECK(is_ready(pair.one, POLLIN));  // the parent's own stayed open until here
    char byte = 0;
    CHECK_EQ(recv(pair.one.fd(), &byte, 1, MSG_DONTWAIT), ssize_t{0});
}

TEST("a process of this host that has ended was not silent, however late its end is looked at") {
    Pair pair;
    CHECK_EQ(send(pair.one.fd(), "x", 1, MSG_NOSIGNAL), ssize_t{1});
    CHECK(is_ready(pair.other, POLLIN));
    pair.other.close();  // with a byte that it has not read, so that the kernel resets the connection
    CHECK(is_ready(pair.one, POLLIN));
    usleep(3200000);  // more than was_silent() allows another host
    CHECK(!was_silent(pair.one));
}
