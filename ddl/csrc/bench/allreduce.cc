// A rank that times allreduces for `ddlrun bench`: over libddl, or (-DBENCH_MPI) over any MPI's own MPI_Allreduce.
//
//   bench_ddl | bench_mpi HOST:PORT,...
//
// It connects to the benchmark's controller, at the first address that answers, and sends `TOKEN RANK SIZE` (the token
// is in OMPI_DDLRUN_BENCH). Then it executes commands, one a line:
//
//   check BYTES          one allreduce whose sum is known; answers `took SECONDS`, or `wrong` and where
//   time BYTES REPEATS   that many allreduces back to back; answers `took SECONDS`, of this rank, from a barrier on
//
// until the connection ends. The data is float32, the operation sum; input and output are different buffers. It sleeps
// in the kernel while it waits for a line, because contestants take turns on the same cores.
#include <netdb.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#ifdef BENCH_MPI
#include <mpi.h>
#else
#include <ddl.h>
#endif

namespace {

[[noreturn]] void die(const std::string& message) {
    std::fprintf(stderr, "bench: %s\n", message.c_str());
    std::exit(1);
}

#ifdef BENCH_MPI
void must(int code, const char* what) {
    if (code != MPI_SUCCESS) die(std::string(what) + " failed with MPI's error " + std::to_string(code));
}
void begin() { must(MPI_Init(nullptr, nullptr), "MPI_Init"); }
void end() { MPI_Finalize(); }
void place(int* rank, int* size) {
    must(MPI_Comm_rank(MPI_COMM_WORLD, rank), "MPI_Comm_rank");
    must(MPI_Comm_size(MPI_COMM_WORLD, size), "MPI_Comm_size");
}
void barrier() { must(MPI_Barrier(MPI_COMM_WORLD), "MPI_Barrier"); }
void allreduce(const float* input, float* output, size_t count) {
    must(MPI_Allreduce(input, output, static_cast<int>(count), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD), "MPI_Allreduce");
}
#else
void must(ddl_result code, const char* what) {
    if (code != DDL_SUCCESS) die(std::string(what) + ": " + ddl_last_error());
}
void begin() { must(ddl_init(nullptr), "ddl_init"); }
void end() { ddl_finalize(); }
void place(int* rank, int* size) {
    must(ddl_rank(DDL_WORLD, rank), "ddl_rank");
    must(ddl_size(DDL_WORLD, size), "ddl_size");
}
void barrier() { must(ddl_barrier(DDL_WORLD), "ddl_barrier"); }
void allreduce(const float* input, float* output, size_t count) {
    must(ddl_allreduce(input, output, count, DDL_FLOAT32, DDL_SUM, DDL_WORLD), "ddl_allreduce");
}
#endif

// Connects to HOST:PORT within 5 seconds; on failure returns -1 and sets `why`.
int connect_to(const std::string& contact, std::string& why) {
    const size_t colon = contact.rfind(':');
    if (colon == std::string::npos) die("expected HOST:PORT,..., found " + contact);
    addrinfo hints{}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    if (const int code = getaddrinfo(contact.substr(0, colon).c_str(), contact.c_str() + colon + 1, &hints, &found)) {
        why = gai_strerror(code);
        return -1;
    }
    int connected = -1;
    for (addrinfo* one = found; one && connected < 0; one = one->ai_next) {
        const int fd = socket(one->ai_family, one->ai_socktype, one->ai_protocol);
        if (fd < 0) continue;
        const timeval patience{5, 0}, none{};
        setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);  // also limits connect(): socket(7)
        if (connect(fd, one->ai_addr, one->ai_addrlen) == 0) {
            setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &none, sizeof none);
            connected = fd;
        } else {
            why = errno == EINPROGRESS ? "no answer" : std::strerror(errno);
            close(fd);
        }
    }
    freeaddrinfo(found);
    return connected;
}

int connect_to_any(const std::string& contacts) {
    std::string why;
    for (size_t begin = 0, end = 0; end != std::string::npos; begin = end + 1) {
        end = contacts.find(',', begin);
        const int fd = connect_to(contacts.substr(begin, end - begin), why);
        if (fd >= 0) return fd;
    }
    die("the controller at " + contacts + " cannot be reached: " + why);
}

// Small whole numbers, so that sums are exact in float32 for thousands of ranks.
float element(int rank, size_t i) { return static_cast<float>(rank % 13 + static_cast<int>(i % 17)); }

// Memory that begins at a cache line, as PyTorch's does, for every contestant: a plain vector's begins at any 16 bytes,
// as each process's heap happens to be.
template <typename T>
struct LineAllocator {
    using value_type = T;
    static constexpr std::align_val_t kLine{64};
    T* allocate(size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), kLine)); }
    void deallocate(T* memory, size_t) { ::operator delete(memory, kLine); }
    bool operator==(const LineAllocator&) const { return true; }
    bool operator!=(const LineAllocator&) const { return false; }
};
using Floats = std::vector<float, LineAllocator<float>>;

// Seconds of `repeats` allreduces after a barrier.
double timed(const Floats& input, Floats& output, unsigned long repeats) {
    barrier();
    const auto start = std::chrono::steady_clock::now();
    for (unsigned long i = 0; i < repeats; ++i) allreduce(input.data(), output.data(), input.size());
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    barrier();  // MPI sends its remaining data in here: it makes no progress outside of its calls
    return seconds.count();
}

std::string took(double seconds) {
    char answer[64];
    std::snprintf(answer, sizeof answer, "took %.9f", seconds);
    return answer;
}

std::string check(int rank, int size, size_t count) {
    Floats input(count), output(count, -1);
    for (size_t i = 0; i < count; ++i) input[i] = element(rank, i);
    const double seconds = timed(input, output, 1);
    float ranks = 0;
    for (int r = 0; r < size; ++r) ranks += element(r, 0);
    for (size_t i = 0; i < count; ++i) {
        const float expected = ranks + static_cast<float>(size) * static_cast<float>(i % 17);
        if (output[i] != expected) {
            return "wrong: element " + std::to_string(i) + " is " + std::to_string(output[i]) + ", expected " +
                   std::to_string(expected);
        }
    }
    return took(seconds);
}

}  // namespace

int main(int argc, char** argv) {
    const char* const token = std::getenv("OMPI_DDLRUN_BENCH");
    if (argc != 2 || !token) die("usage: bench_ddl | bench_mpi HOST:PORT,... (ddlrun bench starts it)");
    std::set_new_handler([] { die("there is no memory for buffers of this size; time smaller ones: --sizes"); });
    begin();
    int rank = 0, size = 1;
    place(&rank, &size);
    const int connection = connect_to_any(argv[1]);
    FILE* const controller = fdopen(connection, "r");
    const auto say = [&](const std::string& line) { dprintf(connection, "%s\n", line.c_str()); };
    say(std::string(token) + " " + std::to_string(rank) + " " + std::to_string(size));
    Floats input, output;
    char line[128];
    unsigned long bytes = 0, repeats = 0;
    while (std::fgets(line, sizeof line, controller)) {
        if (std::sscanf(line, "check %lu", &bytes) == 1) {
            say(check(rank, size, bytes / sizeof(float)));
        } else if (std::sscanf(line, "time %lu %lu", &bytes, &repeats) == 2) {
            const size_t count = bytes / sizeof(float);
            if (input.size() != count) {
                Floats(count, 1).swap(input);
                Floats(count, 0).swap(output);
            }
            say(took(timed(input, output, repeats)));
        } else {
            die(std::string("unknown command of the controller: ") + line);
        }
    }
    end();
    return 0;
}
