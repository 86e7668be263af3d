/* many_ranks RANKS KILLED: a job of so many processes on this host, over TCP, with a store in memory that they share.
 *
 * They meet, do a barrier and allreduces, and check each sum. Then KILLED of them, spread evenly, are killed, and the
 * others shrink and go on. Prints a line of JSON: seconds until the last rank had done each, the processors' time of
 * all ranks until then, and how many connections (heartbeats' included) and store operations there were. Exit status 0:
 * every sum was right. */
#define _GNU_SOURCE
#include <ddl.h>
#include <dirent.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 4096, STEPS = 6 };
enum step { MET, BARRIER, SMALL_SUM, LARGE_SUM, SHRUNK, SUM_AFTER };

static struct {
    atomic_int sets, gets, is_set, here;
    char key[256], value[2048];
    size_t bytes;
    double start, killed, done[STEPS][MOST], cpu[STEPS][MOST];
    int ends[STEPS][MOST]; /* of connections, by rank */
    atomic_int right;
}* all;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static int set(void* context, const char* key, const void* value, size_t bytes) {
    (void)context;
    ++all->sets;
    strcpy(all->key, key);
    memcpy(all->value, value, all->bytes = bytes);
    all->is_set = 1;
    return 0;
}

static int get(void* context, const char* key, void* value, size_t capacity, size_t* bytes, double seconds) {
    (void)context;
    ++all->gets;
    for (const double end = now() + seconds; !all->is_set || strcmp(all->key, key) != 0; usleep(1000)) {
        if (now() > end) return 1;
    }
    *bytes = all->bytes;
    memcpy(value, all->value, all->bytes < capacity ? all->bytes : capacity);
    return 0;
}

static int count_connections(void) {
    int count = 0;
    DIR* const folder = opendir("/proc/self/fd");
    for (struct dirent* entry; (entry = readdir(folder));) {
        struct sockaddr_storage other;
        socklen_t length = sizeof other;
        count += getpeername(atoi(entry->d_name), (struct sockaddr*)&other, &length) == 0;
    }
    closedir(folder);
    return count;
}

static void note(enum step step, int name) {
    struct rusage used;
    all->done[step][name] = now();
    getrusage(RUSAGE_SELF, &used);
    all->cpu[step][name] = (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
                           1e-6 * (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec);
    all->ends[step][name] = count_connections();
}

static void must(ddl_result result, const char* what) {
    if (result == DDL_SUCCESS) return;
    fprintf(stderr, "%s: %s\n", what, ddl_last_error());
    exit(1);
}

/* Sums rank + i, and checks it. */
static ddl_result sum(size_t count) {
    int rank = 0, size = 0;
    must(ddl_rank(DDL_WORLD, &rank), "ddl_rank");
    must(ddl_size(DDL_WORLD, &size), "ddl_size");
    int64_t* const data = malloc(count * sizeof *data);
    for (size_t i = 0; i < count; ++i) data[i] = rank + (int64_t)i;
    const ddl_result result = ddl_allreduce(data, data, count, DDL_INT64, DDL_SUM, DDL_WORLD);
    for (size_t i = 0; result == DDL_SUCCESS && i < count; ++i) {
        if (data[i] == (int64_t)size * (size - 1) / 2 + (int64_t)i * size) continue;
        fprintf(stderr, "rank %d: a wrong sum\n", rank);
        exit(1);
    }
    free(data);
    return result;
}

/* Until all have come here: what is measured next begins at the same moment. */
static void meet(int size) {
    const int goal = (all->here++ / size + 1) * size;
    while (all->here < goal) usleep(1000);
}

static int run(int rank, int size, int killed) {
    const int dies = (rank + 1) * killed / size > rank * killed / size;
    const ddl_membership members = {rank, size, NULL, set, get};
    must(ddl_init_with(&members, NULL), "ddl_init_with");
    note(MET, rank);
    must(ddl_barrier(DDL_WORLD), "ddl_barrier");
    note(BARRIER, rank);
    must(sum(128), "ddl_allreduce");
    note(SMALL_SUM, rank);
    must(sum(8192), "ddl_allreduce");
    note(LARGE_SUM, rank);
    meet(size);
    if (dies) {
        all->killed = now();
        kill(getpid(), SIGKILL);
    }
    ddl_result result = DDL_SUCCESS;
    int left = size;
    while (result == DDL_SUCCESS && left > size - killed) { /* some may die later than others */
        while (result == DDL_SUCCESS) result = sum(128);
        if (result != DDL_ERROR_PEER_LOST) must(result, "ddl_allreduce");
        result = ddl_shrink(NULL, 0, NULL);
        must(result, "ddl_shrink");
        must(ddl_size(DDL_WORLD, &left), "ddl_size");
    }
    note(SHRUNK, rank);
    must(sum(128), "ddl_allreduce after ddl_shrink");
    note(SUM_AFTER, rank);
    ++all->right;
    must(ddl_finalize(), "ddl_finalize");
    return 0;
}

static double last_of(enum step step, int size) {
    double last = 0;
    for (int rank = 0; rank < size; ++rank) last = all->done[step][rank] > last ? all->done[step][rank] : last;
    return last;
}

static void print(const char* name, enum step step, int size, double since) {
    int ends = 0;
    double cpu = 0;
    for (int rank = 0; rank < size; ++rank) {
        ends += all->ends[step][rank];
        cpu += all->cpu[step][rank];
    }
    printf("\"%s\": {\"seconds\": %.3f, \"cpu\": %.3f, \"connections\": %d}, ", name, last_of(step, size) - since, cpu,
           ends / 2);
}

int main(int argc, char** argv) {
    const int size = argc == 3 ? atoi(argv[1]) : 0, killed = argc == 3 ? atoi(argv[2]) : 0;
    if (size < 2 || size > MOST || killed < 1 || killed >= size) {
        fprintf(stderr, "usage: many_ranks RANKS KILLED, with 2 to %d ranks and at least one killed\n", MOST);
        return 2;
    }
    struct rlimit limit;
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
    all = mmap(NULL, sizeof *all, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    all->start = now();
    for (int rank = 0; rank < size; ++rank) {
        if (fork() == 0) exit(run(rank, size, killed));
    }
    const double forked = now() - all->start;
    int failed = 0;
    for (int status; wait(&status) > 0;) failed += !WIFEXITED(status) || WEXITSTATUS(status) != 0;
    printf("{\"ranks\": %d, \"killed\": %d, \"forked\": {\"seconds\": %.3f}, ", size, killed, forked);
    print("met", MET, size, all->start);
    print("barrier", BARRIER, size, last_of(MET, size));
    print("sum of 1 KiB", SMALL_SUM, size, last_of(BARRIER, size));
    print("sum of 64 KiB", LARGE_SUM, size, last_of(SMALL_SUM, size));
    print("shrunk", SHRUNK, size, all->killed);
    print("sum after", SUM_AFTER, size, all->killed);
    printf("\"ended\": {\"seconds\": %.3f}, ", now() - last_of(SUM_AFTER, size));
    printf("\"sets\": %d, \"gets\": %d, \"right\": %d, \"failed\": %d}\n", all->sets, all->gets, all->right,
           failed - killed);
    return failed == killed && all->right == size - killed ? 0 : 1;
}
