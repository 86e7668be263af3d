/* libddl: collective communication that knows which links are fast.
 *
 * A collective is called by every rank of its communicator, with the same type, count, operation and root, and in the
 * same order of calls; calls on different communicators are independent. Ranks compare their calls before a rank's
 * buffer is written with another's data; a difference is DDL_ERROR_MISMATCH and names both calls. If a call awaits
 * no data from another rank (a broadcast's root, a count of 0) it may return before a difference is known; the next
 * call on that communicator then fails.
 *
 * Results. An allreduce gives the same bits on every rank, and from run to run with the same plan.
 *
 * Counts are numbers of elements, never bytes; any count is allowed, 0 and odd ones too. Pointers need the alignment of
 * the element, and may be NULL if no element is read or written through them.
 *
 * Buffers belong to the caller. Until a blocking call returns, or until ddl_test or ddl_wait reports an asynchronous
 * one as finished (with whatever result), the library may read the inputs and write the outputs, and the caller must
 * leave them alone. After an error the content of the output is undefined. Both must then stay mapped until the process
 * ends, as MPI cannot take back what is half under way: it may still read an input. It may still write an output
 * if a rank has sent a part of a message and neither dies nor sends the rest, for which the call waits 2 seconds.
 *
 * Errors. Every function returns a ddl_result; ddl_last_error() has the sentence that goes with it. An error of a
 * collective breaks its communicator: later calls on it return the same error. Argument errors break nothing.
 *
 * Threads. Every function may be called from any thread once ddl_init has returned. Threads that share a communicator
 * must agree with the other ranks about the order of their calls.
 *
 * Forks. A child that a rank forks is no rank. In it ddl_finalize does nothing, and what needs a ddl_init, and ddl_init
 * itself, is DDL_ERROR_STATE.
 */
#ifndef DDL_H
#define DDL_H

#include <stddef.h>
#include <stdint.h>

#define DDL_VERSION_MAJOR 0
#define DDL_VERSION_MINOR 1
#define DDL_VERSION_PATCH 0

/* In C++ an enumeration may then hold what a C caller passes, also if that is wrong and has to be refused. */
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
    DDL_ERROR_ARGUMENT = 1,    /* an argument's value is not allowed; nothing was started */
    DDL_ERROR_STATE = 2,       /* before ddl_init, after ddl_finalize, or on a freed communicator */
    DDL_ERROR_MISMATCH = 3,    /* ranks called different things */
    DDL_ERROR_TIMEOUT = 4,     /* nothing arrived for DDL_TIMEOUT, or ddl_comm_set_timeout's, seconds */
    DDL_ERROR_PEER_LOST = 5,   /* a rank died */
    DDL_ERROR_SHUTDOWN = 6,    /* a rank, maybe this one, called ddl_finalize with the collective unfinished, or another
                                * rank freed the communicator */
    DDL_ERROR_MEMORY = 7,      /* out of memory */
    DDL_ERROR_TRANSPORT = 8,   /* MPI or NCCL reported an error */
    DDL_ERROR_UNSUPPORTED = 9, /* this build or this machine cannot do it */
    DDL_ERROR_INTERNAL = 10    /* a defect of the library: please report it */
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

/* float16 and bfloat16 are added in float32 and rounded to nearest even at each hop. Integers wrap around. DDL_AVERAGE
 * is the sum divided once by the number of ranks, for integers towards zero. DDL_MIN and DDL_MAX give NaN if any
 * operand is NaN. */
typedef enum ddl_op DDL_INT { DDL_SUM = 0, DDL_AVERAGE = 1, DDL_MIN = 2, DDL_MAX = 3, DDL_PRODUCT = 4 } ddl_op;

/* A group of ranks. DDL_WORLD is every rank; others come from ddl_comm_split and ddl_comm_create_group. DDL_COMM_NULL
 * is none, and DDL_ERROR_ARGUMENT wherever it is passed. */
typedef struct ddl_comm_s* ddl_comm;
#define DDL_WORLD ((ddl_comm)0)
#define DDL_COMM_NULL ((ddl_comm)(intptr_t)-1)

/* A collective in flight. DDL_REQUEST_NULL is none: ddl_test and ddl_wait report it as finished. */
typedef struct ddl_request_s* ddl_request;
#define DDL_REQUEST_NULL ((ddl_request)0)

/* ---- The library ------------------------------------------------------------------------------------------------ */

/* Joins the ranks of this job. `options` has the syntax of DDL_OPTIONS ("-mode bnrr:4x2x1x1 -dbg_level 1"); NULL takes
 * the environment's DDL_OPTIONS, and the library's own choice if that is unset. Collective; blocks until every rank
 * has called it. A second call while initialised is DDL_ERROR_STATE. DDL_TIMEOUT (seconds, default 300) bounds how
 * long a rank is waited for.
 *
 * Who takes part: MPI, if mpirun or ddlrun started the process; else RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, if
 * all are set: ranks then meet over TCP, through a port that rank 0 opens at that address, which must be free; else
 * this process is the only rank. DDL_TRANSPORT=mpi or tcp decides otherwise. The first call decides for the process. */
DDL_API ddl_result ddl_init(const char* options);

/* Who takes part in a job that no MPI started, and a store that all of them reach. */
typedef struct ddl_membership {
    int rank, size; /* 0 <= rank < size */
    void* context;  /* passed to set and get */
    /* Sets a key for all ranks. Returns 0, or another number on failure. */
    int (*set)(void* context, const char* key, const void* value, size_t bytes);
    /* Waits until the key is set, at most timeout_seconds; copies at most capacity bytes and stores the length in
     * *bytes. Returns 0; 1 on timeout; another number on failure. */
    int (*get)(void* context, const char* key, void* value, size_t capacity, size_t* bytes, double timeout_seconds);
} ddl_membership;

/* As ddl_init, for the ranks that `membership` names, which talk over TCP, and inside a host through shared memory.
 * Rank 0 sets one key, and the others get it; the value holds a token by which ranks recognise one another, so whoever
 * can read the store can join. An old value of an earlier job does no harm. `set` and `get` are called by this thread
 * before it returns, and by a later ddl_init of this process: the context must be alive then. A process keeps its rank
 * and size: others, or a job of MPI's before, are DDL_ERROR_STATE. */
DDL_API ddl_result ddl_init_with(const ddl_membership* membership, const char* options);

/* Leaves the job: requests in flight end with DDL_ERROR_SHUTDOWN and every communicator is freed. It does not wait for
 * the other ranks. MPI itself lives until the process exits, so that ddl_init may be called again; NCCL's communicators
 * (modes b and n) until the next ddl_init, if there is one. Without a ddl_init it does nothing and succeeds. */
DDL_API ddl_result ddl_finalize(void);

/* Goes on without the ranks that died: those that are alive leave what they have in common and begin an epoch of their
 * own, with consecutive ranks in their order. Collective over all ranks that are alive; blocks, and tolerates that more
 * of them die meanwhile. Requests in flight, on any rank and communicator, end with DDL_ERROR_PEER_LOST; no message
 * reaches the new epoch. Every communicator is freed but DDL_WORLD, which is then that of the survivors. Stores the
 * former ranks of the first `capacity` that are gone in `gone`, and their number in `count`; both may be NULL.
 *
 * The step in which a rank died has to be done again or dropped. Survivors may be one collective apart: some may have
 * got its result, where others got an error, so they must agree on the step (an allreduce with DDL_MIN).
 *
 * Only over TCP: DDL_ERROR_UNSUPPORTED under MPI, and then nothing has changed. After any other error this process has
 * left the job, as by ddl_finalize: DDL_ERROR_TIMEOUT (a rank that is alive does not call it within DDL_TIMEOUT
 * seconds) or DDL_ERROR_PEER_LOST (the ranks that this one reaches are fewer than those that do not answer, which may
 * go on without it, or have done so). After a shrink modes b, m and n are rings. */
DDL_API ddl_result ddl_shrink(int* gone, int capacity, int* count);

/* The number of this epoch: 0 after ddl_init, and higher after each ddl_shrink, by the same on all ranks. */
DDL_API ddl_result ddl_epoch(uint64_t* epoch);

/* The version of the library that runs, as major * 10000 + minor * 100 + patch. Needs no ddl_init and cannot fail. */
DDL_API int ddl_version(void);

/* A code's meaning in a few words, in static memory; "unknown result" for a number that is none. Cannot fail. */
DDL_API const char* ddl_error_string(ddl_result code);

/* The message of the last error that a function of this library returned to the calling thread: what was asked, what
 * was found, what to do. "" if there was none. Valid until this thread's next call. */
DDL_API const char* ddl_last_error(void);

/* ---- Ranks and communicators ------------------------------------------------------------------------------------ */

/* This process's number in `comm`, from 0, and how many there are. DDL_ERROR_ARGUMENT if the pointer is NULL. */
DDL_API ddl_result ddl_rank(ddl_comm comm, int* rank);
DDL_API ddl_result ddl_size(ddl_comm comm, int* size);

/* This process's number among those of the whole job on its host, how many these are, and how many hosts there are. */
DDL_API ddl_result ddl_local_rank(int* rank);
DDL_API ddl_result ddl_local_size(int* size);
DDL_API ddl_result ddl_num_hosts(int* hosts);

/* Parts `comm`: ranks with equal `color` get a new communicator together, ordered by (key, rank in comm). A negative
 * color joins none and stores DDL_COMM_NULL, as does an error. Collective over `comm`; blocks. DDL_ERROR_UNSUPPORTED
 * (there are too many) comes on every rank and breaks nothing. The caller owns the result: ddl_comm_free. */
DDL_API ddl_result ddl_comm_split(ddl_comm comm, int color, int key, ddl_comm* result);

/* A communicator of `count` ranks of DDL_WORLD, in the order of `ranks`, all of which make this call with the same
 * list; no other rank takes part. Blocks. Of calls by the same ranks that are under way at once, on several threads,
 * each has a `tag` of its own. An error stores DDL_COMM_NULL; one that the ranks do not all find, as they do
 * DDL_ERROR_ARGUMENT and DDL_ERROR_UNSUPPORTED (there are too many), breaks DDL_WORLD. The caller owns the result:
 * ddl_comm_free. */
DDL_API ddl_result ddl_comm_create_group(const int* ranks, int count, uint64_t tag, ddl_comm* result);

/* Bounds how long calls on `comm` that are made from now on wait for a rank, in seconds above 0. It is DDL_TIMEOUT
 * before. Not collective. */
DDL_API ddl_result ddl_comm_set_timeout(ddl_comm comm, double seconds);

/* Frees a communicator. Not collective: a rank that calls it later than this one gets DDL_ERROR_SHUTDOWN at once.
 * DDL_ERROR_STATE while it has requests in flight; DDL_WORLD cannot be freed. */
DDL_API ddl_result ddl_comm_free(ddl_comm comm);

/* ---- Buffers in a GPU's memory ----------------------------------------------------------------------------------- */
/* Buffers may be in host memory or in the memory of one GPU a process, which must be the same GPU in all calls; input
 * and output of a call are in the same memory. (Managed memory counts as host memory, which the GPU may be writing.)
 * The library finds out by itself, with the CUDA runtime that the process has loaded, or that DDL_CUDA_LIB names. Modes
 * b and n reduce such buffers by NCCL (libnccl.so.2, or what DDL_NCCL_LIB names), on the GPU that is current in
 * ddl_init, or, if that is GPU 0, on the one with the rank's local number; everything else goes through pinned host
 * memory, and so do minima and maxima of floating point numbers, of which NCCL would drop NaNs.
 *
 * A thread's current GPU is what it was after each call, unless the process has never used that one: it would be begun
 * by making it current. The buffers' GPU is then current.
 *
 * A call is ordered behind what its thread's stream was given before it: the legacy default stream, or the one that was
 * last passed here on this thread (a cudaStream_t; NULL is the default stream again). That stream belongs to the
 * buffers' GPU, or the call is DDL_ERROR_ARGUMENT, and lives until another is passed. Calls cannot be captured into a
 * CUDA graph. A result is in memory when ddl_wait or ddl_test says that it is finished, or a blocking call has
 * returned: no stream needs to wait for it. Cannot fail, and needs no ddl_init. */
DDL_API ddl_result ddl_set_stream(void* stream);

/* ---- Collectives ------------------------------------------------------------------------------------------------ */
/* Each has a blocking form and one, with an i, that returns at once and stores a request. Whether a call is legal is
 * checked before anything is started: an unknown type or operation, a NULL buffer with a count above 0, one that is not
 * aligned to its elements, a root that is not in [0, size), or a size in bytes that overflows is DDL_ERROR_ARGUMENT. An
 * input and an output may be the same memory if it says "in place"; any other overlap is DDL_ERROR_ARGUMENT too. */

/* output[i] = op over all ranks of input[i], i < count. In place allowed. */
DDL_API ddl_result ddl_allreduce(const void* input, void* output, size_t count, ddl_type type, ddl_op op,
                                 ddl_comm comm);
DDL_API ddl_result ddl_iallreduce(const void* input, void* output, size_t count, ddl_type type, ddl_op op,
                                  ddl_comm comm, ddl_request* request);

/* output[i] = op over all ranks of input[rank * count + i], i < count: `input` has size * count elements. */
DDL_API ddl_result ddl_reduce_scatter(const void* input, void* output, size_t count, ddl_type type, ddl_op op,
                                      ddl_comm comm);
DDL_API ddl_result ddl_ireduce_scatter(const void* input, void* output, size_t count, ddl_type type, ddl_op op,
                                       ddl_comm comm, ddl_request* request);

/* output[r * count + i] = rank r's input[i], i < count: `output` has size * count elements. In place allowed: `input`
 * is then output + rank * count. */
DDL_API ddl_result ddl_allgather(const void* input, void* output, size_t count, ddl_type type, ddl_comm comm);
DDL_API ddl_result ddl_iallgather(const void* input, void* output, size_t count, ddl_type type, ddl_comm comm,
                                  ddl_request* request);

/* buffer[i] = the root's buffer[i], i < count. */
DDL_API ddl_result ddl_broadcast(void* buffer, size_t count, ddl_type type, int root, ddl_comm comm);
DDL_API ddl_result ddl_ibroadcast(void* buffer, size_t count, ddl_type type, int root, ddl_comm comm,
                                  ddl_request* request);

/* output[r * count + i] = rank r's input[rank * count + i], i < count: both have size * count elements. */
DDL_API ddl_result ddl_alltoall(const void* input, void* output, size_t count, ddl_type type, ddl_comm comm);
DDL_API ddl_result ddl_ialltoall(const void* input, void* output, size_t count, ddl_type type, ddl_comm comm,
                                 ddl_request* request);

/* Finishes on no rank before every rank has called it. */
DDL_API ddl_result ddl_barrier(ddl_comm comm);
DDL_API ddl_result ddl_ibarrier(ddl_comm comm, ddl_request* request);

/* ---- Messages between two ranks --------------------------------------------------------------------------------- */
/* `peer` is another rank of `comm`. A receive takes the oldest message of its communicator, sender and tag that no
 * earlier receive has taken; type and count must be the sender's, else the receiver gets DDL_ERROR_MISMATCH, and so
 * does what is in flight on the communicator elsewhere, and what comes later. A send of up to 16 KiB may have returned
 * success by then: it need not wait for its receiver. Buffers are in host memory, not in a GPU's and not managed by
 * CUDA (DDL_ERROR_ARGUMENT). A rank that waits for one that has finalized, or freed `comm`, gets
 * DDL_ERROR_SHUTDOWN. Messages and collectives of a communicator pass one another freely. Three tags are those of
 * collectives that front ends make of messages: errors call 2^40 gather, 2^41 scatter and 2^42 alltoall. */

#define DDL_ANY_RANK (-1) /* as the peer of a receive: whoever sends first */

DDL_API ddl_result ddl_send(const void* data, size_t count, ddl_type type, int peer, int64_t tag, ddl_comm comm);
DDL_API ddl_result ddl_isend(const void* data, size_t count, ddl_type type, int peer, int64_t tag, ddl_comm comm,
                             ddl_request* request);

/* `source`, if it is not NULL, gets the sender's rank, before the receive is reported as finished. */
DDL_API ddl_result ddl_recv(void* data, size_t count, ddl_type type, int peer, int64_t tag, ddl_comm comm, int* source);
DDL_API ddl_result ddl_irecv(void* data, size_t count, ddl_type type, int peer, int64_t tag, ddl_comm comm, int* source,
                             ddl_request* request);

/* Checks for a message that a receive with this peer and tag would take. Sets `*found` to 1 and, if `source` is not
 * NULL, `*source` to the sender's rank; otherwise sets `*found` to 0. Takes nothing, and does not block: a message that
 * was sent is found some calls later. If none is here and none will come, the result is DDL_ERROR_PEER_LOST (a rank of
 * `comm` died), DDL_ERROR_SHUTDOWN (all who could send it have finalized, or freed `comm`), or what broke `comm`. */
DDL_API ddl_result ddl_probe(int peer, int64_t tag, ddl_comm comm, int* found, int* source);

/* If the collective is finished, stores 1 in `finished`, frees *request, sets it to DDL_REQUEST_NULL and returns the
 * result; otherwise stores 0 and returns DDL_SUCCESS. Does not block. */
DDL_API ddl_result ddl_test(ddl_request* request, int* finished);

/* Blocks until the collective is finished, frees *request, sets it to DDL_REQUEST_NULL and returns the result. */
DDL_API ddl_result ddl_wait(ddl_request* request);

#ifdef __cplusplus
}
#endif

#endif
