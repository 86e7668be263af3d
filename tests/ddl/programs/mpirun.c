// An MPI launcher, to the port filter: by its name. Listens at all addresses and prints its port. For each number on
// stdin it accepts a connection, prints a line, waits for so many bytes of it, and prints what recv() returned and
// them. If the number is negative, it reads as Open MPI does: what there is, until it has all.
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>

int main(void) {
    struct sockaddr_in address = {.sin_family = AF_INET};
    socklen_t length = sizeof address;
    const int listener = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(listener, (struct sockaddr*)&address, length) != 0 || listen(listener, 9) != 0) return 1;
    getsockname(listener, (struct sockaddr*)&address, &length);
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    for (int bytes = 0; scanf("%d", &bytes) == 1;) {
        char data[99] = "";
        const int made = accept(listener, NULL, NULL);
        // Open MPI does so, and prints a backtrace if it fails.
        const int no_delay = setsockopt(made, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
        printf(no_delay == 0 ? "accepted\n" : "no option of TCP\n");
        fflush(stdout);
        ssize_t count = bytes < 0 ? 0 : recv(made, data, bytes, MSG_WAITALL);
        for (ssize_t more = 1; more > 0 && count < -bytes; count += more) {
            more = recv(made, data + count, -bytes - count, 0);
        }
        printf("%zd %s\n", count, data);
        fflush(stdout);
        close(made);
    }
    return 0;
}
