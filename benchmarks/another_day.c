/* The clock of the day, and the times of files, moved by ANOTHER_DAY seconds: for another_day.sh, by LD_PRELOAD.
   Monotonic clocks stay, by which Python waits; a deadline is of the day's clock where it lies after 2001. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static long moved_by(void) {
  const char *text = getenv("ANOTHER_DAY");
  return text ? atol(text) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  int result = NEXT(clock_gettime)(clock, now);
  if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += moved_by();
  return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  int result = NEXT(gettimeofday)(now, zone);
  if (result == 0) now->tv_sec += moved_by();
  return result;
}

time_t time(time_t *to) {
  time_t now = NEXT(time)(NULL) + moved_by();
  if (to) *to = now;
  return now;
}

static struct timespec real(const struct timespec *deadline) {
  struct timespec moved = *deadline;
  if (moved.tv_sec > 1000000000) moved.tv_sec -= moved_by();
  return moved;
}

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *lock, const struct timespec *deadline) {
  struct timespec until = real(deadline);
  /* dlsym() may find the older of its two versions, which takes other conditions */
  return ((__typeof__(&pthread_cond_timedwait))dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2"))(condition, lock, &until);
}

int sem_timedwait(sem_t *semaphore, const struct timespec *deadline) {
  struct timespec until = real(deadline);
  return NEXT(sem_timedwait)(semaphore, &until);
}

static int moved(int result, struct stat64 *file) {
  if (result == 0) {
    file->st_atim.tv_sec += moved_by();
    file->st_mtim.tv_sec += moved_by();
    file->st_ctim.tv_sec += moved_by();
  }
  return result;
}

int stat64(const char *path, struct stat64 *file) { return moved(NEXT(stat64)(path, file), file); }
int lstat64(const char *path, struct stat64 *file) { return moved(NEXT(lstat64)(path, file), file); }
int fstat64(int number, struct stat64 *file) { return moved(NEXT(fstat64)(number, file), file); }
int fstatat64(int folder, const char *path, struct stat64 *file, int flags) {
  return moved(NEXT(fstatat64)(folder, path, file, flags), file);
}

static void unmoved(const struct timespec given[2], struct timespec times[2]) {
  for (int i = 0; i < 2; i++) {
    times[i] = given[i];
    if (times[i].tv_nsec != UTIME_NOW && times[i].tv_nsec != UTIME_OMIT) times[i].tv_sec -= moved_by();
  }
}

int utimensat(int folder, const char *path, const struct timespec given[2], int flags) {
  struct timespec times[2];
  if (given) unmoved(given, times);
  return NEXT(utimensat)(folder, path, given ? times : NULL, flags);
}

int futimens(int number, const struct timespec given[2]) {
  struct timespec times[2];
  if (given) unmoved(given, times);
  return NEXT(futimens)(number, given ? times : NULL);
}
