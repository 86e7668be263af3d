/* libddl's planning: how an allreduce would run, and how long it would take, on a network that is only described.
 *
 * These functions run nothing. They need neither ddl_init nor MPI, keep no state, and may be called by any thread at
 * any time.
 *
 * The network is a tree of switches. Tier 0 joins the ranks of a host, tier 1 the hosts of a rack, tier 2 the racks of
 * an aisle, and so on. A switch of tier i has `size` children. Each child has one full-duplex link to its switch, and
 * everything that passes between the child and the rest shares that link. A message inside a host uses the tier-0 links
 * of its two ranks. Any other message uses the links of tiers 1 and up, to the switch where the ways of its two ends
 * meet, and down again. Ranks stand in order: consecutive ranks share a host, consecutive hosts share a rack.
 *
 * A forecast simulates the schedules that the library would execute. A message starts when both its ends have posted
 * it, messages that share a link share its bandwidth fairly, and a rank reduces one message at a time. The simulation
 * leaves out other work of the processors and the headers of protocols: a bandwidth is what a program gets. A dimension
 * that MPI or NCCL reduces (modes m, n and b) is timed as a ring of this library, because the library does not know
 * their algorithms.
 *
 * Errors are as in ddl.h: DDL_ERROR_ARGUMENT, and ddl_last_error() names the tier or the number that is wrong.
 */
#ifndef DDL_PLAN_H
#define DDL_PLAN_H

#include "ddl.h"

#ifdef __cplusplus
extern "C" {
#endif

#define DDL_MOST_TIERS 8

typedef struct ddl_tier {
    int size;         /* children of a switch, at least 1 */
    double latency;   /* seconds, for a message that turns around at this tier; at least 0 */
    double bandwidth; /* bytes a second of each child's link, in each direction; above 0 */
} ddl_tier;

/* A child that differs from the others of its tier: for example a host with fewer ranks, or a slow link. */
typedef struct ddl_odd {
    int tier;         /* 0: a rank, 1: a host, 2: a rack, ... */
    int child;        /* its number among all children of that tier in the network, from 0 */
    int size;         /* how many children it has; 0: as many as the others */
    double bandwidth; /* of its link, in bytes a second; 0: as the others */
} ddl_odd;

typedef struct ddl_network {
    const ddl_tier* tiers;   /* innermost first */
    int tier_count;          /* 1 to DDL_MOST_TIERS */
    double reduce_bandwidth; /* bytes a second that a rank reduces; 0: reducing takes no time */
    const ddl_odd* odd;      /* each child at most once; may be NULL if odd_count is 0 */
    int odd_count;
} ddl_network;

/* How to run an allreduce. A NULL ddl_plan, or one of zeros, leaves it to the library. */
typedef struct ddl_plan {
    const char* mode; /* "r:4x2", as in DDL_OPTIONS; NULL, "p" or a mode without dimensions: the library chooses */
    int chunks;       /* into how many pieces the buffer is cut; 0: by size */
} ddl_plan;

/* One term of a bound: latency + bytes / capacity. All 0, and tier -1, if there is no such term. */
typedef struct ddl_term {
    double latency;  /* seconds */
    double bytes;    /* through the slowest link */
    double capacity; /* of that link, in bytes a second */
    int tier, child; /* it is the link of this child of this tier */
} ddl_term;

/* The witness of the bound that holds for any algorithm. It divides the ranks into groups: `count` children of `tier`,
 * from `first` on, and one more group of all other ranks, if there are any. Ranks combine what they receive with what
 * they have; switches only forward. So each element leaves a group at least groups - 1 times before it is reduced, and
 * groups - 1 times more before all groups have the result: 2 (groups - 1) buffers, over links that carry `capacity` out
 * of all groups together. No algorithm takes less than bytes / capacity seconds. */
typedef struct ddl_cut {
    int tier, first, count;
    int groups;
    double bytes;
    double capacity; /* bytes a second */
} ddl_cut;

/* Lower bounds on the time of an allreduce, in seconds. N ranks, S bytes, latency a, bandwidth B. */
typedef struct ddl_bounds {
    double ring;         /* one well-ordered ring over all ranks: 2 (N-1) a + 2 (N-1)/N x S / B, by the slowest link */
    double hierarchical; /* a dimension for each tier, one after the other: the sum of the tiers' terms. 0 if the
                            switches of a tier differ in size, as there are no such dimensions then */
    double pipelined;    /* the same with chunks that overlap perfectly: the largest of these terms */
    double cut;          /* any algorithm: the slowest of these cuts: around all children of a tier, around one child,
                            around the children of one switch */
    ddl_term ring_term;
    ddl_term tier_terms[DDL_MOST_TIERS]; /* of `hierarchical` */
    ddl_cut cut_witness;
} ddl_bounds;

typedef struct ddl_forecast {
    double seconds;
    double tier_bytes[DDL_MOST_TIERS];    /* bytes that a rank sends in messages that turn around at each tier: the mean
                                             over ranks */
    double tier_messages[DDL_MOST_TIERS]; /* the number of these messages: the mean over ranks */
    int chunks;                           /* of rank 0 */
    int rounds;                           /* most of any rank in a chunk: how many messages follow one another */
    int symmetric;                        /* 1 if one rank was simulated because it stands for all */
    char plan[64];                        /* "r:4x2": a ddl_plan's mode for the same plan */
    char algorithm[64];                   /* "hierarchy 4x2", "flat ring", "recursive doubling", ... */
    char reason[192];                     /* why the library chose it */
} ddl_forecast;

typedef enum ddl_step_kind DDL_INT {
    DDL_STEP_SEND = 0,
    DDL_STEP_RECEIVE = 1,
    DDL_STEP_REDUCE = 2, /* receives, and combines the data with what this rank has */
    DDL_STEP_COPY = 3,
    DDL_STEP_DIVIDE = 4,
    DDL_STEP_REDUCE_SCATTER = 5, /* MPI's own (mode m), among the ranks that differ in one dimension */
    DDL_STEP_ALLGATHER = 6       /* MPI's own, likewise */
} ddl_step_kind;

/* A step of one rank. Chunks proceed independently of one another. Within a chunk a round begins when the round before
 * it is complete, and the messages of a round travel together. */
typedef struct ddl_step {
    int chunk, round; /* from 0; rounds are counted within a chunk */
    ddl_step_kind kind;
    int peer;               /* the other rank; -1 if the step is no message */
    int tier;               /* where the message or the collective turns around; -1 if the step is neither */
    uint64_t offset, bytes; /* the part of the buffer, in bytes */
} ddl_step;

/* Computes the bounds of an allreduce of `bytes` bytes. */
DDL_API ddl_result ddl_plan_bounds(const ddl_network* network, uint64_t bytes, ddl_bounds* bounds);

/* Forecasts an allreduce of `count` elements. How long it takes depends on symmetry. If one rank stands for all
 * (nothing is odd, ranks in order, each dimension one tier or several neighbouring ones): milliseconds for thousands of
 * ranks. If ranks are of few kinds, or form one ring in order: a second. Otherwise the time grows with the number of
 * messages of all ranks: about a second for two million. */
DDL_API ddl_result ddl_plan_forecast(const ddl_network* network, const ddl_plan* plan, size_t count, ddl_type type,
                                     ddl_forecast* forecast);

/* Forecasts the plans that the network allows: first the library's choice, then the alternatives by time. Stores up to
 * `capacity` of them in `forecasts`, and in *found how many there are. `forecasts` may be NULL if `capacity` is 0.
 * Plans whose simulation would take minutes are left out: rings over more ranks than there are elements and, if
 * children are odd, plans of thousands of ranks few of which are alike. If the library's choice is such a plan,
 * recursive doubling stands first, and its reason says so. */
DDL_API ddl_result ddl_plan_alternatives(const ddl_network* network, size_t count, ddl_type type,
                                         ddl_forecast* forecasts, size_t capacity, size_t* found);

/* Lists the steps of `rank`, in order. Stores up to `capacity` of them in `steps`, and in *found how many there are.
 * `steps` may be NULL if `capacity` is 0. */
DDL_API ddl_result ddl_plan_schedule(const ddl_network* network, const ddl_plan* plan, size_t count, ddl_type type,
                                     int rank, ddl_step* steps, size_t capacity, size_t* found);

#ifdef __cplusplus
}
#endif

#endif
