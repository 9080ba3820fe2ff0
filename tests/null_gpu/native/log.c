/* The log of a process: a file "log.<process>" in the folder, a line for everything that a device has done. */
#define _GNU_SOURCE
#include "null_gpu.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static pthread_once_t opened = PTHREAD_ONCE_INIT;
static FILE *file;

long null_gpu_setting(const char *name, long otherwise) {
  const char *text = getenv(name);
  return text && *text ? atol(text) : otherwise;
}

const char *null_gpu_folder(void) {
  const char *folder = getenv("NULL_GPU_FOLDER");
  return folder ? folder : "/tmp";
}

double null_gpu_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

void null_gpu_nap(long microseconds) {
  struct timespec t = {microseconds / 1000000, microseconds % 1000000 * 1000};
  if (microseconds > 0) nanosleep(&t, NULL);
}

static void open_file(void) {
  char path[4096];
  snprintf(path, sizeof path, "%s/log.%d", null_gpu_folder(), getpid());
  file = fopen(path, "a");
  if (file) setvbuf(file, NULL, _IOLBF, 1 << 16); /* a process that is killed has logged what it did */
}

void null_gpu_log(const char *kind, int device, int stream, double queued, double began, double ended, const char *text) {
  pthread_once(&opened, open_file);
  if (file) fprintf(file, "%s\t%d\t%d\t%.1f\t%.1f\t%.1f\t%s\n", kind, device, stream, queued, began, ended, text);
}

static void log_now(const char *kind, const char *text) {
  double now = null_gpu_now();
  null_gpu_log(kind, null_gpu_current(), -1, now, now, now, text);
}

void null_gpu_note(const char *text) { log_now("note", text); }

long null_gpu_unknown(const char *name, long value) {
  log_now("unknown", name);
  return value;
}

/* The end waits a second, in which all that wait for the same say so. */
static void *end_soon(void *unused) {
  (void)unused;
  null_gpu_nap(1000000);
  _exit(NULL_GPU_FAILED);
}

void null_gpu_fail(const char *text) {
  log_now("error", text);
  fprintf(stderr, "null GPU: %s\n", text);
  fflush(stderr);
  pthread_t thread;
  pthread_create(&thread, NULL, end_soon, NULL);
}
