/* Where the ranks of a communicator meet: a file that all of them map, those of other processes too.
 *
 * Operations are numbered on each rank, in the order of its calls. Operation k is under way when every rank has come to its own
 * k-th, and then all must be the same. Before it comes to k + 1 a rank has seen all others at k: so two places for what a rank
 * brings are enough, of which k uses place k % 2.
 */
#ifndef NULL_GPU_MEETING_H
#define NULL_GPU_MEETING_H

#include <stdatomic.h>
#include <stddef.h>

enum { MEETING_RANKS = 32, MEETING_WORDS = 96, MEETING_PAYLOAD = 1 << 14 };

typedef struct {
  char words[MEETING_WORDS]; /* what the operation is; the same on all ranks, or it is an error */
  char payload[MEETING_PAYLOAD];
} contribution;

typedef struct {
  atomic_int has_joined;
  atomic_long arrived; /* number of operations that the rank has come to */
  contribution brought[2];
} member;

typedef struct {
  member members[MEETING_RANKS];
} meeting;

meeting *meeting_open(const char *name);
int meeting_join(meeting *where, const char *name, int rank, int size); /* waits for all; 0: one has not come */
int meeting_hold(meeting *where, const char *name, int rank, int size, long number, const char *words, const void *payload,
                 size_t bytes); /* waits for all; 0: one of them differs, or has not come */

#endif
