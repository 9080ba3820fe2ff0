#define _GNU_SOURCE
#include "meeting.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "null_gpu.h"

enum { LOOK_US = 20, LOOKS_PER_QUESTION = 2000, LINE = 1024 };

meeting *meeting_open(const char *name) {
  char path[4096];
  snprintf(path, sizeof path, "%s/%s", null_gpu_folder(), name);
  int file = open(path, O_RDWR | O_CREAT, 0600);
  if (file < 0 || ftruncate(file, sizeof(meeting)) != 0) return NULL;
  void *mapped = mmap(NULL, sizeof(meeting), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  return mapped == MAP_FAILED ? NULL : mapped;
}

/* Lists in `text` the ranks that have not come to operation `number`; to join is to come to -1. */
static int missing(meeting *where, int size, long number, char *text, size_t room) {
  int count = 0;
  for (int rank = 0; rank < size; rank++) {
    member *one = &where->members[rank];
    if (number < 0 ? one->has_joined : one->arrived > number) continue;
    size_t used = strlen(text);
    snprintf(text + used, room - used, count++ ? ", %d" : "%d", rank);
  }
  return count;
}

/* Whether a process of the job has found a deadlock: then all that wait say so, and who waits for whom can be seen. */
static int is_over(int tell) {
  char path[4096];
  snprintf(path, sizeof path, "%s/deadlock", null_gpu_folder());
  if (!tell) return access(path, F_OK) == 0;
  int file = open(path, O_CREAT | O_WRONLY, 0600);
  if (file >= 0) close(file);
  return 1;
}

/* Waits until all ranks have come; says who waits for whom when that takes too long. Returns whether they have. */
static int wait_for_all(meeting *where, const char *name, int rank, int size, long number, const char *words) {
  double until = null_gpu_now() + 1e6 * null_gpu_setting("NULL_GPU_TIMEOUT_S", 20);
  for (long looks = 1;; looks++) {
    char who[LINE / 2] = "";
    if (!missing(where, size, number, who, sizeof who)) return 1;
    if (null_gpu_now() > until || (looks % LOOKS_PER_QUESTION == 0 && is_over(0))) {
      char line[LINE];
      is_over(1);
      snprintf(line, sizeof line, "Deadlock: rank %d of %d of communicator %s waits in %s %ld for ranks [%s].", rank, size, name,
               words, number, who);
      null_gpu_fail(line);
      return 0;
    }
    null_gpu_nap(LOOK_US);
  }
}

int meeting_join(meeting *where, const char *name, int rank, int size) {
  where->members[rank].has_joined = 1;
  return wait_for_all(where, name, rank, size, -1, "the making of the communicator,");
}

int meeting_hold(meeting *where, const char *name, int rank, int size, long number, const char *words, const void *payload,
                 size_t bytes) {
  member *mine = &where->members[rank];
  contribution *brought = &mine->brought[number % 2];
  snprintf(brought->words, sizeof brought->words, "%s", words);
  if (bytes <= MEETING_PAYLOAD && payload) memcpy(brought->payload, payload, bytes);
  mine->arrived = number + 1;
  if (!wait_for_all(where, name, rank, size, number, words)) return 0;
  for (int other = 0; other < size; other++) {
    const char *theirs = where->members[other].brought[number % 2].words;
    if (strcmp(theirs, words) == 0) continue;
    char line[LINE];
    snprintf(line, sizeof line, "Ranks disagree on operation %ld of communicator %s: rank %d runs %s, rank %d runs %s.", number,
             name, rank, words, other, theirs);
    null_gpu_fail(line);
    return 0;
  }
  return 1;
}
