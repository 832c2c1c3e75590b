/* The times of files moved by TRILANE_FILE_TIMES seconds, as another_day.sh moves the clock: libfaketime does so in stat(), and
   Python calls stat64(). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/stat.h>

static int moved(int result, struct stat64 *file) {
  const char *text = getenv("TRILANE_FILE_TIMES");
  long seconds = text ? atol(text) : 0;
  if (result == 0) {
    file->st_atim.tv_sec += seconds;
    file->st_mtim.tv_sec += seconds;
    file->st_ctim.tv_sec += seconds;
  }
  return result;
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

int stat64(const char *path, struct stat64 *file) { return moved(NEXT(stat64)(path, file), file); }
int lstat64(const char *path, struct stat64 *file) { return moved(NEXT(lstat64)(path, file), file); }
int fstat64(int number, struct stat64 *file) { return moved(NEXT(fstat64)(number, file), file); }
int fstatat64(int folder, const char *path, struct stat64 *file, int flags) {
  return moved(NEXT(fstatat64)(folder, path, file, flags), file);
}
