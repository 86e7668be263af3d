/* libddl's planning: what an allreduce would do, and how long it would take, on a network that is described and need
 * not exist. Nothing is run: these functions need neither ddl_init nor MPI, keep no state, and may be called by any
 * thread at any time.
 *
 * A network is a tree of switches. Tier 0 joins the ranks of a host, tier 1 the hosts of a rack, tier 2 the racks of an
 * aisle, and so on: tier i has `size` children below each switch, and each child has a link into it, full duplex, which
 * is shared by all that passes between the child and the rest. Messages inside a host use the two ranks' links of tier
 * 0; others use the links of the tiers from 1 up to the switch where their ends meet, and back down. Ranks stand in
 * order: consecutive ranks share a host, consecutive hosts a rack.
 *
 * A forecast is a simulation of the schedules that the library would execute. A message travels when both its ends have
 * posted it, messages that share a link share its bandwidth fairly, and a rank reduces one message at a time. What
 * processors have to do beside that, and what a protocol puts around the data, is not in it: bandwidths are those that
 * programs get. A dimension that MPI or NCCL reduces (modes m, n and b) is timed as our ring would be, because what
 * they do in it is theirs to know.
 *
 * Errors are as in ddl.h: DDL_ERROR_ARGUMENT with ddl_last_error(), which names the tier or the number that is wrong.
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
    double latency;   /* seconds, of a message that turns around at this tier; at least 0 */
    double bandwidth; /* bytes a second and direction of each child's link, above 0 */
} ddl_tier;

/* A child that differs from the others of its tier: a host with fewer ranks, a slow link. */
typedef struct ddl_odd {
    int tier;         /* 0: a rank, 1: a host, 2: a rack, ... */
    int child;        /* its number among all children of that tier in the network, from 0 */
    int size;         /* how many children it has itself; 0: as many as the others */
    double bandwidth; /* of its link; 0: as the others */
} ddl_odd;

typedef struct ddl_network {
    const ddl_tier* tiers;   /* innermost first */
    int tier_count;          /* 1 to DDL_MOST_TIERS */
    double reduce_bandwidth; /* bytes a second that a rank reduces; 0: takes no time */
    const ddl_odd* odd;      /* each child at most once; may be NULL if odd_count is 0 */
    int odd_count;
} ddl_network;

typedef enum ddl_algorithm DDL_INT {
    DDL_ALGORITHM_AUTOMATIC = 0, /* by size, as the library's calls do */
    DDL_ALGORITHM_LATENCY = 1,   /* the fewest rounds: recursive doubling */
    DDL_ALGORITHM_BANDWIDTH = 2  /* the fewest bytes: rings in the plan's dimensions */
} ddl_algorithm;

/* How an allreduce is done. A NULL ddl_plan, or one of zeros, is the library's choice for the network. */
typedef struct ddl_plan {
    const char* mode; /* "r:4x2", as in DDL_OPTIONS; NULL, "p" or a mode without dimensions: chosen */
    int chunks;       /* pieces that the buffer is cut into; 0: by size */
    const int* ranks; /* the rank at each position of the dimensions; NULL: in order */
    ddl_algorithm algorithm;
} ddl_plan;

/* What is behind the time of a formula: latency + bytes / capacity. All 0, and tier -1, if there is no such term. */
typedef struct ddl_term {
    double latency;  /* seconds */
    double bytes;    /* through the link that decides */
    double capacity; /* of that link, in bytes a second */
    int tier, child; /* that link: of this child of this tier */
} ddl_term;

/* The witness of the bound of any algorithm. The ranks are parted into groups: `count` children of `tier`, from `first`
 * on, and all others, if there are any, as one group more. Ranks combine what they got with what they have, and
 * switches only pass it on. Then each element leaves groups at least groups - 1 times until it is reduced, and as often
 * until all have the result: 2 (groups - 1) buffers, over links that carry `capacity` out of all groups together. So no
 * algorithm takes less than bytes / capacity seconds. */
typedef struct ddl_cut {
    int tier, first, count;
    int groups;
    double bytes;
    double capacity; /* bytes a second */
} ddl_cut;

/* The least that an allreduce can take, in seconds. With N ranks, S bytes, latency a and bandwidth B: */
typedef struct ddl_bounds {
    double ring;         /* a well-ordered ring over all ranks: 2 (N-1) a + 2 (N-1)/N x S / B, by the slowest link */
    double hierarchical; /* a dimension for each tier, one after the other: the sum of the tiers' terms; 0 where
                            switches of a tier have different sizes: there are no such dimensions */
    double pipelined;    /* its floor where chunks overlap: the largest of these terms */
    double cut;          /* any algorithm: the longest of the cuts around all children of a tier, around one child, and
                            around the children of one switch */
    ddl_term ring_term;
    ddl_term tier_terms[DDL_MOST_TIERS]; /* of `hierarchical` */
    ddl_cut cut_witness;
} ddl_bounds;

typedef struct ddl_forecast {
    double seconds;
    double tier_bytes[DDL_MOST_TIERS];    /* what a rank sends whose messages meet at each tier: the mean over ranks */
    double tier_messages[DDL_MOST_TIERS]; /* how many messages these are */
    int chunks;                           /* of rank 0 */
    int rounds;                           /* of its longest chunk: messages that wait for one another */
    int symmetric;                        /* 1 where one rank was simulated, because it stands for all */
    char plan[64];                        /* "r:4x2": what a ddl_plan's mode may be */
    char algorithm[64];                   /* "hierarchy 4x2", "flat ring", "recursive doubling", ... */
    char reason[192];                     /* why this one */
} ddl_forecast;

typedef enum ddl_step_kind DDL_INT {
    DDL_STEP_SEND = 0,
    DDL_STEP_RECEIVE = 1,
    DDL_STEP_REDUCE = 2, /* receives, and combines what arrived with what this rank has */
    DDL_STEP_COPY = 3,
    DDL_STEP_DIVIDE = 4,
    DDL_STEP_REDUCE_SCATTER = 5, /* MPI's own (mode m), among the ranks that differ in one dimension */
    DDL_STEP_ALLGATHER = 6       /* the same */
} ddl_step_kind;

/* A step of one rank. Chunks proceed independently of one another; within a chunk a round begins when the one before it
 * is complete; the messages of a round travel together. */
typedef struct ddl_step {
    int chunk, round; /* from 0; rounds are counted within their chunk */
    ddl_step_kind kind;
    int peer;               /* rank; -1 where there is no message */
    int tier;               /* at which the message turns around, or the collective; -1 where there is none */
    uint64_t offset, bytes; /* the part of the buffer: first byte, and how many */
} ddl_step;

/* Stores the bounds of an allreduce of `bytes` bytes. */
DDL_API ddl_result ddl_plan_bounds(const ddl_network* network, uint64_t bytes, ddl_bounds* bounds);

/* Stores the forecast of an allreduce of `count` elements. Where one rank stands for all (nothing is odd, ranks in
 * order, each dimension one tier or several neighbours) it takes milliseconds for thousands of ranks, and where ranks
 * are of few kinds, or form one ring in order, a second; otherwise its time grows with the number of all ranks'
 * messages: a second for two million. */
DDL_API ddl_result ddl_plan_forecast(const ddl_network* network, const ddl_plan* plan, size_t count, ddl_type type,
                                     ddl_forecast* forecast);

/* Stores up to `capacity` forecasts in `forecasts`, and in `found` how many there are: first what the library does,
 * then the alternatives by time. What would take minutes is left out: rings over more ranks than there are elements,
 * and, where children are odd, plans of thousands of ranks of which few are alike; where the library would run these,
 * recursive doubling stands first, and its reason says so. `forecasts` may be NULL where `capacity` is 0. */
DDL_API ddl_result ddl_plan_alternatives(const ddl_network* network, size_t count, ddl_type type,
                                         ddl_forecast* forecasts, size_t capacity, size_t* found);

/* Stores up to `capacity` of the steps of `rank` in `steps`, in order, and in `found` how many there are. `steps` may
 * be NULL where `capacity` is 0. */
DDL_API ddl_result ddl_plan_schedule(const ddl_network* network, const ddl_plan* plan, size_t count, ddl_type type,
                                     int rank, ddl_step* steps, size_t capacity, size_t* found);

#ifdef __cplusplus
}
#endif

#endif
