/* Makes system calls on the files below one directory fail, as a network file system or a disk does that is away.
 *
 * Preloaded into a process (LD_PRELOAD), it lies under Python and Arrow alike. fault_arm() chooses the calls that fail:
 * from call number `skip` (from 0) of the kind `first` (of any kind where it is empty) on, `times` calls of any kind,
 * with the error `number`. Syncs are counted, and not done.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define MOST_FILES 4096
static char prefix[512];
static size_t prefix_size;
static char below[MOST_FILES];
static const char *const kinds[] = {"open",  "read",    "pread", "write", "close", "fsync",  "stat",   "lstat",    "fstat",
                                    "rename", "opendir", "flock", "mkdir", "unlink", "pwrite", "readdir", "ftruncate"};
#define NUM_KINDS (sizeof kinds / sizeof *kinds)
static long skip_calls, fail_times, num_calls, num_first, num_failed, calls_of[NUM_KINDS];
static int fail_number;
static char first_call[64], failed_in[64];

static size_t kind_of(const char *call) {
  size_t kind = 0;
  while (strcmp(kinds[kind], call)) ++kind;
  return kind;
}
void fault_arm(const char *directory, const char *first, int number, long skip, long times) {
  strncpy(prefix, directory, sizeof prefix - 1);
  strncpy(first_call, first, sizeof first_call - 1);
  skip_calls = skip, fail_times = times, fail_number = number, num_calls = num_first = num_failed = 0;
  memset(calls_of, 0, sizeof calls_of);
  failed_in[0] = 0;
  __atomic_store_n(&prefix_size, strlen(directory), __ATOMIC_SEQ_CST);
}
long fault_disarm(void) {
  __atomic_store_n(&prefix_size, 0, __ATOMIC_SEQ_CST);
  return num_calls;
}
const char *fault_place(void) { return failed_in; }
long fault_calls(const char *call) { return calls_of[kind_of(call)]; }

static int fails(const char *call) {
  __atomic_fetch_add(&num_calls, 1, __ATOMIC_SEQ_CST);
  __atomic_fetch_add(&calls_of[kind_of(call)], 1, __ATOMIC_SEQ_CST);
  if (!__atomic_load_n(&num_failed, __ATOMIC_SEQ_CST)) {
    if (*first_call && strcmp(call, first_call)) return 0;
    if (__atomic_fetch_add(&num_first, 1, __ATOMIC_SEQ_CST) < skip_calls) return 0;
  }
  long failed = __atomic_fetch_add(&num_failed, 1, __ATOMIC_SEQ_CST);
  if (failed >= fail_times) return 0;
  if (!failed) strncpy(failed_in, call, sizeof failed_in - 1);
  errno = fail_number;
  return 1;
}
static int meant(const char *path) { return path && prefix_size && !strncmp(path, prefix, prefix_size); }
static int meant_file(int file) { return prefix_size && file >= 0 && file < MOST_FILES && below[file]; }
static int keep(int file, int is_meant) {
  if (file >= 0 && file < MOST_FILES) below[file] = (char)is_meant;
  return file;
}

#define REAL(result, name, ...) \
  static result (*real)(__VA_ARGS__); \
  if (!real) real = (result (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

#define OPEN(name) \
  int name(const char *path, int flags, ...) { \
    REAL(int, #name, const char *, int, ...); \
    va_list rest; \
    va_start(rest, flags); \
    mode_t mode = va_arg(rest, mode_t); \
    va_end(rest); \
    if (meant(path) && fails("open")) return -1; \
    return keep(real(path, flags, mode), meant(path)); \
  }
OPEN(open)
OPEN(open64)

/* A path below a directory that is open; one below the first is opened by its own path. */
static int meant_at(int at, const char *path) { return path && *path == '/' ? meant(path) : meant_file(at); }

#define OPENAT(name) \
  int name(int at, const char *path, int flags, ...) { \
    REAL(int, #name, int, const char *, int, ...); \
    va_list rest; \
    va_start(rest, flags); \
    mode_t mode = va_arg(rest, mode_t); \
    va_end(rest); \
    int is_meant = meant_at(at, path); \
    if (is_meant && fails("open")) return -1; \
    return keep(real(at, path, flags, mode), is_meant); \
  }
OPENAT(openat)
OPENAT(openat64)

#define OF_PATH(name, call, declared, given, ...) \
  int name declared { \
    REAL(int, #name, __VA_ARGS__); \
    if (meant(path) && fails(call)) return -1; \
    return real given; \
  }
OF_PATH(stat, "stat", (const char *path, struct stat *found), (path, found), const char *, struct stat *)
OF_PATH(stat64, "stat", (const char *path, struct stat64 *found), (path, found), const char *, struct stat64 *)
OF_PATH(lstat, "lstat", (const char *path, struct stat *found), (path, found), const char *, struct stat *)
OF_PATH(lstat64, "lstat", (const char *path, struct stat64 *found), (path, found), const char *, struct stat64 *)
OF_PATH(mkdir, "mkdir", (const char *path, mode_t mode), (path, mode), const char *, mode_t)
OF_PATH(unlink, "unlink", (const char *path), (path), const char *)
OF_PATH(rename, "rename", (const char *path, const char *to), (path, to), const char *, const char *)

#define OF_PLACE(name, call, declared, given, ...) \
  int name declared { \
    REAL(int, #name, __VA_ARGS__); \
    if (meant_at(at, path) && fails(call)) return -1; \
    return real given; \
  }
OF_PLACE(fstatat, "stat", (int at, const char *path, struct stat *found, int flags), (at, path, found, flags), int,
         const char *, struct stat *, int)
OF_PLACE(fstatat64, "stat", (int at, const char *path, struct stat64 *found, int flags), (at, path, found, flags), int,
         const char *, struct stat64 *, int)
OF_PLACE(mkdirat, "mkdir", (int at, const char *path, mode_t mode), (at, path, mode), int, const char *, mode_t)
OF_PLACE(unlinkat, "unlink", (int at, const char *path, int flags), (at, path, flags), int, const char *, int)
OF_PLACE(renameat, "rename", (int at, const char *path, int to_at, const char *to), (at, path, to_at, to), int,
         const char *, int, const char *)

#define OF_FILE(result, name, call, declared, given, ...) \
  result name declared { \
    REAL(result, #name, __VA_ARGS__); \
    if (meant_file(file) && fails(call)) return -1; \
    return real given; \
  }
OF_FILE(ssize_t, read, "read", (int file, void *to, size_t size), (file, to, size), int, void *, size_t)
OF_FILE(ssize_t, pread, "pread", (int file, void *to, size_t size, off_t at), (file, to, size, at), int, void *, size_t,
        off_t)
OF_FILE(ssize_t, pread64, "pread", (int file, void *to, size_t size, off64_t at), (file, to, size, at), int, void *,
        size_t, off64_t)
OF_FILE(ssize_t, preadv2, "pread", (int file, const struct iovec *to, int count, off_t at, int flags),
        (file, to, count, at, flags), int, const struct iovec *, int, off_t, int)
OF_FILE(ssize_t, preadv64v2, "pread", (int file, const struct iovec *to, int count, off64_t at, int flags),
        (file, to, count, at, flags), int, const struct iovec *, int, off64_t, int)
OF_FILE(ssize_t, write, "write", (int file, const void *data, size_t size), (file, data, size), int, const void *,
        size_t)
OF_FILE(ssize_t, pwrite, "pwrite", (int file, const void *data, size_t size, off_t at), (file, data, size, at), int,
        const void *, size_t, off_t)
OF_FILE(ssize_t, pwrite64, "pwrite", (int file, const void *data, size_t size, off64_t at), (file, data, size, at), int,
        const void *, size_t, off64_t)
OF_FILE(int, fstat, "fstat", (int file, struct stat *found), (file, found), int, struct stat *)
OF_FILE(int, fstat64, "fstat", (int file, struct stat64 *found), (file, found), int, struct stat64 *)
OF_FILE(int, ftruncate, "ftruncate", (int file, off_t size), (file, size), int, off_t)
OF_FILE(int, ftruncate64, "ftruncate", (int file, off64_t size), (file, size), int, off64_t)
OF_FILE(int, flock, "flock", (int file, int operation), (file, operation), int, int)

int fsync(int file) {
  REAL(int, "fsync", int);
  if (!meant_file(file)) return real(file);
  return fails("fsync") ? -1 : 0;
}
int close(int file) {
  REAL(int, "close", int);
  int is_meant = meant_file(file);
  keep(file, 0);
  int result = real(file);
  return is_meant && fails("close") ? -1 : result;
}
DIR *opendir(const char *path) {
  REAL(DIR *, "opendir", const char *);
  if (meant(path) && fails("opendir")) return NULL;
  DIR *opened = real(path);
  if (opened) keep(dirfd(opened), meant(path));
  return opened;
}
#define READDIR(name, type) \
  struct type *name(DIR *opened) { \
    REAL(struct type *, #name, DIR *); \
    return meant_file(dirfd(opened)) && fails("readdir") ? NULL : real(opened); \
  }
READDIR(readdir, dirent)
READDIR(readdir64, dirent64)
