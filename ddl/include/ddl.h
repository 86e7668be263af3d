/* libddl: collective communication that follows the machine's topology.
 *
 * Collectives. Every rank of a communicator calls the same collective with the same type, count, operation and root,
 * and makes its calls in the same order. Calls on different communicators are independent. The ranks compare their
 * calls before any data of another rank reaches a buffer. If two calls differ, the result is DDL_ERROR_MISMATCH and
 * the message names both. A call that needs no data from another rank (a broadcast's root, a count of 0) may return
 * before the difference is known; the next call on that communicator then fails.
 *
 * Results. An allreduce gives the same bits on every rank, and in every run with the same plan.
 *
 * Counts are numbers of elements, never bytes. Any count is allowed, including 0 and odd numbers. Pointers must be
 * aligned to the element type. They may be NULL if no element is read or written through them.
 *
 * Buffers belong to the caller. While a call is in flight the library may read its inputs and write its outputs, and
 * the caller must not touch them. A blocking call is in flight until it returns; an asynchronous one until ddl_test or
 * ddl_wait reports it as finished, with whatever result. After an error the content of the output is undefined, and
 * both buffers must stay mapped until the process ends: MPI cannot take back a message that is half sent, so it may
 * still read an input. It may write an output in one case: a rank sent part of a message, is alive, and does not send
 * the rest within the 2 seconds that the call waits for it.
 *
 * Errors. Every function returns a ddl_result, and ddl_last_error() returns the message. If a collective fails, its
 * communicator is broken: later calls on it return the same error. Argument errors break nothing.
 *
 * Threads. Any thread may call any function once ddl_init has returned. Threads that share a communicator must make
 * their calls in the order that the other ranks expect.
 *
 * Forks. A forked child of a rank is not a rank. In the child ddl_finalize does nothing; ddl_init, and every function
 * that needs it, returns DDL_ERROR_STATE.
 */
#ifndef DDL_H
#define DDL_H

#include <stddef.h>
#include <stdint.h>

#define DDL_VERSION_MAJOR 0
#define DDL_VERSION_MINOR 1
#define DDL_VERSION_PATCH 0

/* The fixed type lets a C++ enumeration hold any int that a C caller passes, so that the library can refuse it. */
#ifdef __cplusplus
#define DDL_INT : int
#else
#define DDL_INT
#endif

#if defined(__GNUC__)
#define DDL_API __attribute__((visibility("default")))
#else
#define DDL_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum ddl_result DDL_INT {
    DDL_SUCCESS = 0,
    DDL_ERROR_ARGUMENT = 1,    /* an argument has a value that is not allowed; nothing was started */
    DDL_ERROR_STATE = 2,       /* called before ddl_init, after ddl_finalize, or on a freed communicator */
    DDL_ERROR_MISMATCH = 3,    /* the ranks made different calls */
    DDL_ERROR_TIMEOUT = 4,     /* nothing arrived within DDL_TIMEOUT, or the time of ddl_comm_set_timeout */
    DDL_ERROR_PEER_LOST = 5,   /* a rank died */
    DDL_ERROR_SHUTDOWN = 6,    /* a rank, perhaps this one, called ddl_finalize before the call was finished, or another
                                * rank freed the communicator */
    DDL_ERROR_MEMORY = 7,      /* out of memory */
    DDL_ERROR_TRANSPORT = 8,   /* MPI, NCCL, CUDA or a socket reported an error */
    DDL_ERROR_UNSUPPORTED = 9, /* this build or this machine cannot do this */
    DDL_ERROR_INTERNAL = 10    /* a bug in the library: please report it */
} ddl_result;

typedef enum ddl_type DDL_INT {
    DDL_FLOAT16 = 0,
    DDL_BFLOAT16 = 1,
    DDL_FLOAT32 = 2,
    DDL_FLOAT64 = 3,
    DDL_INT8 = 4,
    DDL_INT32 = 5,
    DDL_INT64 = 6,
    DDL_UINT8 = 7
} ddl_type;

/* Reductions. float16 and bfloat16 are added in float32 and rounded to nearest even at each hop. Integers wrap around.
 * DDL_AVERAGE divides the sum once by the number of ranks; integers round towards zero. DDL_MIN and DDL_MAX return NaN
 * if any operand is NaN. */
typedef enum ddl_op DDL_INT { DDL_SUM = 0, DDL_AVERAGE = 1, DDL_MIN = 2, DDL_MAX = 3, DDL_PRODUCT = 4 } ddl_op;

/* A group of ranks. DDL_WORLD has every rank; ddl_comm_split and ddl_comm_create_group make others. DDL_COMM_NULL is no
 * communicator: a function that gets it returns DDL_ERROR_ARGUMENT. */
typedef struct ddl_comm_s* ddl_comm;
#define DDL_WORLD ((ddl_comm)0)
#define DDL_COMM_NULL ((ddl_comm)(intptr_t)-1)

/* An asynchronous call in flight. DDL_REQUEST_NULL is no request: ddl_test and ddl_wait report it as finished. */
typedef struct ddl_request_s* ddl_request;
#define DDL_REQUEST_NULL ((ddl_request)0)

/* ---- The library ------------------------------------------------------------------------------------------------ */

/* Joins the job. Collective: it blocks until every rank has called it.
 *
 * `options` has the syntax of DDL_OPTIONS ("-mode bnrr:4x2x1x1 -dbg_level 1"). NULL takes DDL_OPTIONS from the
 * environment; if that is unset, the library chooses. DDL_TIMEOUT (seconds, default 300) limits how long this rank
 * waits for another. A second call without ddl_finalize between returns DDL_ERROR_STATE.
 *
 * Who the ranks are: DDL_TRANSPORT=mpi or tcp says whether MPI knows; ddlrun sets it. Without it, MPI says if mpirun
 * started the process. Otherwise, if RANK and WORLD_SIZE are set, and DDL_RENDEZVOUS (HOST:PORT) or MASTER_ADDR and
 * MASTER_PORT, the ranks meet over TCP: rank 0 opens that port, which must be free, at that address. Otherwise this
 * process is the only rank. The first call decides for the life of the process. */
DDL_API ddl_result ddl_init(const char* options);

/* The members of a job that MPI did not start: this rank, how many there are, and a store that all of them reach. */
typedef struct ddl_membership {
    int rank, size; /* 0 <= rank < size */
    void* context;  /* passed to set and get */
    /* Sets a key that all ranks can read. Returns 0 on success, another number on failure. */
    int (*set)(void* context, const char* key, const void* value, size_t bytes);
    /* Waits up to timeout_seconds until the key is set. Copies at most `capacity` bytes of its value, and sets *bytes
     * to the value's length. Returns 0 on success, 1 on timeout, another number on failure. */
    int (*get)(void* context, const char* key, void* value, size_t capacity, size_t* bytes, double timeout_seconds);
} ddl_membership;

/* Joins the job that `membership` describes; otherwise as ddl_init. The ranks talk over TCP, and inside a host through
 * shared memory.
 *
 * Rank 0 sets one key and the others get it. Its value holds a token by which ranks recognise one another, so anyone
 * who can read the store can join. A value that an earlier job left does no harm. This thread calls `set` and `get`
 * before the function returns; ddl_waiting and a later ddl_init of this process call them again, so `context` must
 * still be alive then. A process keeps its rank and size: different ones, or an earlier job under MPI, are
 * DDL_ERROR_STATE. */
DDL_API ddl_result ddl_init_with(const ddl_membership* membership, const char* options);

/* Leaves the job. Requests in flight end with DDL_ERROR_SHUTDOWN, and every communicator is freed. Does not wait for
 * the other ranks. Before ddl_init it does nothing and succeeds. MPI stays initialised until the process exits, so
 * ddl_init may be called again. NCCL's communicators (modes b and n) live until that next ddl_init, or until the exit.
 */
DDL_API ddl_result ddl_finalize(void);

/* Begins the next epoch: the ranks that died are left out, and the processes that wait in ddl_join are taken in.
 * Collective over all ranks that are alive; blocks. Ranks that were there keep their order and get consecutive ranks;
 * those that have joined come behind them. More of them may die meanwhile.
 *
 * Requests in flight, on any rank and communicator, end with DDL_ERROR_PEER_LOST, and no message reaches the new epoch.
 * Every communicator except DDL_WORLD is freed; DDL_WORLD then has the ranks of the new epoch. *count becomes the
 * number of ranks that are gone, gone[0..capacity) the former ranks of the first of them, and *joined the number of
 * those that have joined. All three pointers may be NULL.
 *
 * The step in which a rank died has to be done again or dropped. Survivors may be one collective apart, because some
 * may have the result of a call that failed on others. So they must agree on the step (an allreduce with DDL_MIN). Who
 * has joined must be given the state (a broadcast from rank 0, which has not joined).
 *
 * A process that waits is taken in if every rank and every other process that is taken in can connect to it within 5
 * seconds; others go on waiting. At most 32 are taken in at once. If some are, the links between hosts are measured
 * again, and otherwise the plan is made of the links that were measured before.
 *
 * Works over TCP only: under MPI it returns DDL_ERROR_UNSUPPORTED and changes nothing. After any other error this
 * process has left the job, as by ddl_finalize. DDL_ERROR_TIMEOUT: a rank that is alive did not call it within
 * DDL_TIMEOUT seconds. DDL_ERROR_PEER_LOST: this rank reaches fewer ranks than do not answer, and those may go on
 * without it. After a resize modes b, m and n are rings, unless ranks have joined. */
DDL_API ddl_result ddl_resize(int* gone, int capacity, int* count, int* joined);

/* As ddl_resize, and takes nobody in. (If ranks call both, the lowest one's call decides.) */
DDL_API ddl_result ddl_shrink(int* gone, int capacity, int* count);

/* Stores the number of processes that wait in ddl_join. Rank 0 alone knows them; elsewhere the number is 0. The first
 * call on rank 0 opens the door: it listens at one port more, and sets one key of the store. Does not block. */
DDL_API ddl_result ddl_waiting(int* count);

/* Joins a job that runs already, over TCP: blocks until its ranks call ddl_resize, at most DDL_TIMEOUT seconds. Then
 * this process is one of its ranks, as after ddl_init. ddl_epoch tells it from a first start.
 *
 * `membership`: the store of the job's ranks; its rank and size are not used. NULL: DDL_RENDEZVOUS, or
 * MASTER_ADDR and MASTER_PORT, are the job's. Who can read the store can join, if it has the job's DDL_SECRET.
 * `options` must be those of the job, and the version of the library, too: otherwise DDL_ERROR_MISMATCH.
 * DDL_ERROR_TIMEOUT: no rank has called ddl_waiting, or the ranks have not called ddl_resize. After DDL_ERROR_PEER_LOST
 * (ranks died, and this one is cut off) start another process. */
DDL_API ddl_result ddl_join(const ddl_membership* membership, const char* options);

/* Stores the number of this epoch: 0 after ddl_init, and higher after each ddl_resize and ddl_shrink, equal on all
 * ranks. */
DDL_API ddl_result ddl_epoch(uint64_t* epoch);

/* Returns the version of the loaded library: major * 10000 + minor * 100 + patch. Needs no ddl_init; cannot fail. */
DDL_API int ddl_version(void);

/* Returns the message of the last error that this library returned to the calling thread: what was asked, what was
 * found, what to do. "" if there was no error. Valid until this thread's next call. */
DDL_API const char* ddl_last_error(void);

/* ---- Ranks and communicators ------------------------------------------------------------------------------------ */

/* Store this process's rank in `comm`, from 0, and the number of ranks. DDL_ERROR_ARGUMENT if the pointer is NULL. */
DDL_API ddl_result ddl_rank(ddl_comm comm, int* rank);
DDL_API ddl_result ddl_size(ddl_comm comm, int* size);

/* Store this process's rank among the job's ranks on its host, the number of those ranks, and the number of hosts. */
DDL_API ddl_result ddl_local_rank(int* rank);
DDL_API ddl_result ddl_local_size(int* size);
DDL_API ddl_result ddl_num_hosts(int* hosts);

/* Splits `comm`: ranks that pass the same `color` get a new communicator together, ordered by (key, rank in comm). A
 * rank with a negative color joins none and gets DDL_COMM_NULL. Collective over `comm`; blocks. On an error *result is
 * DDL_COMM_NULL. If there are too many communicators, every rank gets DDL_ERROR_UNSUPPORTED and nothing breaks. The
 * caller frees the result with ddl_comm_free. */
DDL_API ddl_result ddl_comm_split(ddl_comm comm, int color, int key, ddl_comm* result);

/* Makes a communicator of `count` ranks of DDL_WORLD, in the order of `ranks`. Exactly these ranks make the call, all
 * with the same list. Blocks. If the same ranks make several such calls at once, on several threads, each call needs a
 * `tag` of its own. On an error *result is DDL_COMM_NULL. DDL_ERROR_ARGUMENT and DDL_ERROR_UNSUPPORTED (too many
 * communicators) come on all of these ranks and break nothing; any other error may come on some only, and breaks
 * DDL_WORLD. The caller frees the result with ddl_comm_free. */
DDL_API ddl_result ddl_comm_create_group(const int* ranks, int count, uint64_t tag, ddl_comm* result);

/* Sets how long later calls on `comm` wait for a rank, in seconds above 0. The initial value is DDL_TIMEOUT. Not
 * collective. */
DDL_API ddl_result ddl_comm_set_timeout(ddl_comm comm, double seconds);

/* Frees a communicator. Not collective: if another rank uses the communicator afterwards, that call returns
 * DDL_ERROR_SHUTDOWN at once. DDL_ERROR_STATE while the communicator has requests in flight. DDL_WORLD cannot be
 * freed. */
DDL_API ddl_result ddl_comm_free(ddl_comm comm);

/* ---- Figures ---------------------------------------------------------------------------------------------------- */

/* What this rank's collectives have come to since ddl_init, ddl_resize or ddl_shrink. Only calls that succeeded count.
 * Allreduces, reduce-scatters and allgathers of 64 KiB or more among all ranks are timed; a look at a clock would cost
 * smaller ones too much. */
typedef struct ddl_stats {
    uint64_t calls;       /* all collectives, on all communicators */
    uint64_t bytes;       /* in their buffers: in the larger one, if input and output differ */
    uint64_t timed;       /* calls that were timed */
    double seconds;       /* during which timed calls were in flight, one or several, from when their buffers were
                           * ready: work that a GPU had to do first does not count */
    double least_seconds; /* no algorithm could have run the timed calls in less time, on the links that ddl_init
                           * measured; 0 if it measured none (one host, or a mode other than p) */
} ddl_stats;
DDL_API ddl_result ddl_get_stats(ddl_stats* stats);

/* For each rank of DDL_WORLD below `capacity`, stores how many seconds this rank's timed calls have waited for that
 * rank's first message, and in *late at how many calls that was more than half of the call's time. Only messages that
 * need nothing from other ranks count, so the wait is that rank's doing alone. Calls that overlap wait together. Either
 * pointer may be NULL. */
DDL_API ddl_result ddl_get_waits(double* seconds, uint64_t* late, int capacity);

/* ---- Buffers in a GPU's memory ----------------------------------------------------------------------------------- */
/* Buffers may be in host memory or in GPU memory. A process uses one GPU, the same in all calls, and the input and the
 * output of a call are in the same memory. Managed memory counts as host memory that the GPU may still be writing. The
 * library recognises GPU memory by itself, through the CUDA runtime that the process has loaded or DDL_CUDA_LIB names.
 *
 * Modes b and n reduce GPU buffers with NCCL (libnccl.so.2, or the file that DDL_NCCL_LIB names). They use the GPU that
 * is current in ddl_init; if that is GPU 0, the one whose number is the rank's local rank. Everything else is staged
 * through pinned host memory. So are minima and maxima of floating point numbers, because NCCL would drop NaNs.
 *
 * After each call the thread's current GPU is the one it was before. There is one exception: if the process has never
 * used that GPU, making it current again would initialise it, so the GPU of the buffers stays current. */

/* Sets the CUDA stream that this thread's later calls follow: a call starts after the work that the stream held before
 * it. `stream` is a cudaStream_t; NULL, the initial value, is the legacy default stream. The stream must belong to the
 * GPU of the buffers, else the call that uses it returns DDL_ERROR_ARGUMENT, and it must live until another is set.
 * Calls cannot be captured into a CUDA graph. A result is in memory when the blocking call has returned, or ddl_test or
 * ddl_wait has reported the request as finished: no stream has to wait for it. Needs no ddl_init; cannot fail. */
DDL_API ddl_result ddl_set_stream(void* stream);

/* ---- Collectives ------------------------------------------------------------------------------------------------ */
/* Each collective has a blocking form, and an asynchronous form (with an i) that returns at once and stores a request.
 * Arguments are checked before anything is started. DDL_ERROR_ARGUMENT means: an unknown type or operation, a NULL
 * buffer with a count above 0, a buffer that is not aligned to its elements, a root outside [0, size), or a size in
 * bytes that overflows. An input and an output may be the same memory if the comment says "in place"; any other overlap
 * is DDL_ERROR_ARGUMENT. */

/* Reduces: output[i] = op over all ranks of input[i], for i < count. In place is allowed. */
DDL_API ddl_result ddl_allreduce(const void* input, void* output, size_t count, ddl_type type, ddl_op op,
                                 ddl_comm comm);
DDL_API ddl_result ddl_iallreduce(const void* input, void* output, size_t count, ddl_type type, ddl_op op,
                                  ddl_comm comm, ddl_request* request);

/* Reduces, and leaves each rank its block: output[i] = op over all ranks of input[rank * count + i], for i < count.
 * `input` has size * count elements. */
DDL_API ddl_result ddl_reduce_scatter(const void* input, void* output, size_t count, ddl_type type, ddl_op op,
                                      ddl_comm comm);
DDL_API ddl_result ddl_ireduce_scatter(const void* input, void* output, size_t count, ddl_type type, ddl_op op,
                                       ddl_comm comm, ddl_request* request);

/* Gathers the blocks of all ranks: output[r * count + i] = rank r's input[i], for i < count. `output` has size * count
 * elements. In place is allowed: `input` is then output + rank * count. */
DDL_API ddl_result ddl_allgather(const void* input, void* output, size_t count, ddl_type type, ddl_comm comm);
DDL_API ddl_result ddl_iallgather(const void* input, void* output, size_t count, ddl_type type, ddl_comm comm,
                                  ddl_request* request);

/* Copies the root's buffer to all ranks: buffer[i] = the root's buffer[i], for i < count. */
DDL_API ddl_result ddl_broadcast(void* buffer, size_t count, ddl_type type, int root, ddl_comm comm);
DDL_API ddl_result ddl_ibroadcast(void* buffer, size_t count, ddl_type type, int root, ddl_comm comm,
                                  ddl_request* request);

/* Sends a block to each rank: output[r * count + i] = rank r's input[rank * count + i], for i < count. Both buffers
 * have size * count elements. */
DDL_API ddl_result ddl_alltoall(const void* input, void* output, size_t count, ddl_type type, ddl_comm comm);
DDL_API ddl_result ddl_ialltoall(const void* input, void* output, size_t count, ddl_type type, ddl_comm comm,
                                 ddl_request* request);

/* Waits for all ranks: it finishes on no rank before every rank has called it. */
DDL_API ddl_result ddl_barrier(ddl_comm comm);
DDL_API ddl_result ddl_ibarrier(ddl_comm comm, ddl_request* request);

/* ---- Messages between two ranks --------------------------------------------------------------------------------- */
/* `peer` is another rank of `comm`. Buffers are in host memory; GPU memory and CUDA's managed memory are
 * DDL_ERROR_ARGUMENT. Messages and collectives on one communicator do not hold each other up.
 *
 * A receive takes the oldest message with its communicator, sender and tag that no earlier receive has taken. Type and
 * count must be those of the send. If they are not, the receive fails with DDL_ERROR_MISMATCH and the communicator is
 * broken: its other calls, in flight and later, fail too. The send may have succeeded by then, because a send of up to
 * 16 KiB need not wait for its receiver. A rank that waits for a peer that has finalized, or has freed `comm`, gets
 * DDL_ERROR_SHUTDOWN.
 *
 * Three tags belong to collectives that front ends build from messages. Errors call 2^40 gather, 2^41 scatter and 2^42
 * alltoall. */

#define DDL_ANY_RANK (-1) /* as the peer of a receive: any rank */

/* Sends `count` elements to `peer`. */
DDL_API ddl_result ddl_send(const void* data, size_t count, ddl_type type, int peer, int64_t tag, ddl_comm comm);
DDL_API ddl_result ddl_isend(const void* data, size_t count, ddl_type type, int peer, int64_t tag, ddl_comm comm,
                             ddl_request* request);

/* Receives `count` elements from `peer`. If `source` is not NULL, *source is the sender's rank once the receive is
 * finished. */
DDL_API ddl_result ddl_recv(void* data, size_t count, ddl_type type, int peer, int64_t tag, ddl_comm comm, int* source);
DDL_API ddl_result ddl_irecv(void* data, size_t count, ddl_type type, int peer, int64_t tag, ddl_comm comm, int* source,
                             ddl_request* request);

/* Checks a request; does not block. If it is finished, sets *finished to 1, frees *request, sets it to DDL_REQUEST_NULL
 * and returns the call's result; otherwise sets *finished to 0 and returns DDL_SUCCESS. */
DDL_API ddl_result ddl_test(ddl_request* request, int* finished);

/* Blocks until a request is finished. Then frees *request, sets it to DDL_REQUEST_NULL and returns the call's result.
 */
DDL_API ddl_result ddl_wait(ddl_request* request);

#ifdef __cplusplus
}
#endif

#endif
