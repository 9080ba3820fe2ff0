/* The memory of null GPUs: the host's, taken page by page as it is touched. Addresses know whose they are. */
#define _GNU_SOURCE
#include "null_gpu.h"

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

typedef struct block {
  char *begin;
  size_t bytes;
  int device;
  struct block *next;
} block;

static block *blocks;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void *null_gpu_allocate(size_t bytes, int device) {
  bytes = bytes ? bytes : 1;
  void *address = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) return NULL;
  block *one = malloc(sizeof *one);
  pthread_mutex_lock(&lock);
  *one = (block){address, bytes, device, blocks};
  blocks = one;
  pthread_mutex_unlock(&lock);
  if (device >= 0) {
    char text[64];
    double now = null_gpu_now();
    snprintf(text, sizeof text, "%zu", bytes);
    null_gpu_log("allocate", device, -1, now, now, now, text);
  }
  return address;
}

void null_gpu_free(void *address) {
  pthread_mutex_lock(&lock);
  for (block **link = &blocks; *link; link = &(*link)->next) {
    block *one = *link;
    if (one->begin != address) continue;
    *link = one->next;
    munmap(one->begin, one->bytes);
    free(one);
    break;
  }
  pthread_mutex_unlock(&lock);
}

int null_gpu_owner(const void *address) {
  int device = -1;
  pthread_mutex_lock(&lock);
  for (block *one = blocks; one; one = one->next)
    if ((const char *)address >= one->begin && (const char *)address < one->begin + one->bytes) device = one->device;
  pthread_mutex_unlock(&lock);
  return device;
}
