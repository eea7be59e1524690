// Fake libcuda.so.1 for tests on machines without a GPU: the calls of mooncake-nvlink, on host memory.
//
// A device address is mapped without access rights, so that a direct access by the processor
// crashes. The bytes lie in a memfd mapped elsewhere, which another process opens through /proc by
// the content of the handle. Each stream is a thread with delays. Misuse that the real driver leaves
// undefined ends the process with a message: freeing memory during a copy, or calling CUDA from a
// host function.

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef int CUresult;
typedef int CUdevice;
typedef uint64_t CUdeviceptr;

enum {
    OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201, ALREADY_MAPPED = 208, INVALID_HANDLE = 400, NOT_READY = 600, PEER_ALREADY = 704, DESTROYED = 709,
    LAUNCH_FAILED = 719, NOT_PERMITTED = 800, NOT_SUPPORTED = 801,
};

#define MAX_DEVICES 8
#define PAGE 4096ul
#define GRAIN (64 * 1024ul)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int initialised, devices = 2;
static unsigned generation = 1;
static int lost;
static long live;
static long failing_allocations, bad_handles, no_wait_value, slow, no_batch, failing_copies, no_peers;
// 0: none. 1: a fabric. 2: the device has the attribute, but no memory can be created, as without an
// IMEX channel. 3: memory can be created, but not exported.
static long fabric;
static long delay = 100;
static long unaided;
static __thread int in_host_function;

static void die(const char *why) {
    fprintf(stderr, "fake libcuda: %s\n", why);
    abort();
}

// ---- counted calls --------------------------------------------------------------------------------------------------

static struct { const char *name; long count; } counts[128];
static int counted;

static void count(int *slot, const char *name) {
    if (in_host_function) die("CUDA is called from a host function");
    pthread_mutex_lock(&lock);
    if (*slot < 0) {
        counts[counted].name = name;
        *slot = counted++;
    }
    counts[*slot].count++;
    pthread_mutex_unlock(&lock);
}

#define CALL static int slot_ = -1; count(&slot_, __func__)

long fake_cuda_calls(const char *name) {
    long found = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < counted; i++)
        if (strncmp(counts[i].name, name, strlen(name)) == 0) found += counts[i].count;
    pthread_mutex_unlock(&lock);
    return found;
}

// Copies between devices without access to the memory of each other. The real driver copies through
// the host.
long fake_cuda_unaided(void) {
    pthread_mutex_lock(&lock);
    long now = unaided;
    pthread_mutex_unlock(&lock);
    return now;
}

long fake_cuda_live(void) {
    pthread_mutex_lock(&lock);
    long now = live;
    pthread_mutex_unlock(&lock);
    return now;
}

// ---- contexts -------------------------------------------------------------------------------------------------------

struct context { int device; unsigned generation; int retained; struct stream *legacy; unsigned peers; };
static struct context *primary[MAX_DEVICES];
static __thread struct context *stack[16];
static __thread int depth;

static struct context *current(void) { return depth ? stack[depth - 1] : NULL; }

// Returns the error that a call in the current context has before it does anything.
static CUresult here(void) {
    if (!initialised) return NOT_INITIALIZED;
    struct context *context = current();
    if (!context) return INVALID_CONTEXT;
    if (context->generation != generation) return DESTROYED;
    return lost ? LAUNCH_FAILED : OK;
}

// ---- memory ---------------------------------------------------------------------------------------------------------

enum kind { PLAIN, IMPORTED, MAPPED, PINNED };

struct range {
    struct range *next;
    enum kind kind;
    uint64_t at;
    size_t len, reserved;
    char *bytes;
    int fd, device, refs, pending, access;
    ino_t inode;
    unsigned generation;
    struct block *block;
    // Owner of the memory and its id there, for memory of another process.
    int32_t pid;
    uint64_t theirs, id;
};
static struct range *ranges;
static uint64_t last_id;

// Freed addresses are reused, the last one first, as by the real driver.
static struct { uint64_t at; size_t len; } spare[256];
static int spares;

// Memory of cuMemCreate.
struct block { int fd, device, refs, types; size_t len; unsigned generation; };

struct handle { char magic[8]; int32_t pid, fd; uint64_t inode, len, at; int32_t device; char rest[20]; };
_Static_assert(sizeof(struct handle) == 64, "a handle has 64 bytes");

static struct range *find(uint64_t at) {
    for (struct range *r = ranges; r; r = r->next)
        if (at >= r->at && at < r->at + r->len) return r;
    return NULL;
}

static size_t round_up(size_t len, size_t to) { return (len + to - 1) / to * to; }

static uint64_t reserve(size_t len) {
    for (int i = spares - 1; i >= 0; i--)
        if (spare[i].len == len) {
            uint64_t at = spare[i].at;
            memmove(spare + i, spare + i + 1, (size_t)(--spares - i) * sizeof *spare);
            return at;
        }
    void *at = mmap(NULL, len + GRAIN, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return at == MAP_FAILED ? 0 : (uint64_t)at;
}

static void unreserve(uint64_t at, size_t len) {
    if (spares == (int)(sizeof spare / sizeof *spare)) {
        munmap((void *)spare[0].at, spare[0].len + GRAIN);
        memmove(spare, spare + 1, (size_t)--spares * sizeof *spare);
    }
    spare[spares].at = at, spare[spares++].len = len;
}

static struct range *add(enum kind kind, uint64_t at, size_t len, size_t reserved, int fd, int device) {
    struct range *r = calloc(1, sizeof *r);
    struct stat about = {0};
    if (fd >= 0) {
        r->bytes = mmap(NULL, round_up(len, PAGE), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (r->bytes == MAP_FAILED) { free(r); return NULL; }
        fstat(fd, &about);
    } else {
        r->bytes = (char *)at;
    }
    r->kind = kind, r->at = at, r->len = len, r->reserved = reserved, r->fd = fd, r->device = device;
    r->refs = 1, r->access = kind != MAPPED, r->inode = about.st_ino, r->generation = generation;
    r->id = ++last_id;
    r->next = ranges, ranges = r;
    live++;
    return r;
}

static void unused(const struct range *gone) {
    if (gone->pending && !lost && gone->generation == generation) die("memory goes that a copy is under way in");
}

static void drop(struct range *gone, int close_fd) {
    while (gone->pending) pthread_cond_wait(&changed, &lock);
    for (struct range **r = &ranges; *r; r = &(*r)->next)
        if (*r == gone) { *r = gone->next; break; }
    if (gone->generation == generation) live--;
    munmap(gone->bytes, round_up(gone->len, PAGE));
    if (gone->reserved) unreserve(gone->at, gone->reserved);
    if (close_fd && gone->fd >= 0) close(gone->fd);
    free(gone);
}

static int new_file(size_t len) {
    int fd = memfd_create("fake-gpu", MFD_CLOEXEC);
    if (fd >= 0 && ftruncate(fd, (off_t)round_up(len, PAGE)) != 0) { close(fd); fd = -1; }
    return fd;
}

static int no_more_room(void) {
    if (failing_allocations <= 0) return 0;
    failing_allocations--;
    return 1;
}

CUresult cuMemAlloc_v2(CUdeviceptr *ptr, size_t len) {
    CALL;
    pthread_mutex_lock(&lock);
    CUresult result = here();
    if (result == OK && len == 0) result = INVALID_VALUE;
    if (result == OK && (no_more_room() || len > (1ul << 36))) result = OUT_OF_MEMORY;
    if (result == OK) {
        int fd = new_file(len);
        uint64_t at = fd < 0 ? 0 : reserve(round_up(len, PAGE));
        if (!at || !add(PLAIN, at, len, round_up(len, PAGE), fd, current()->device)) result = OUT_OF_MEMORY;
        *ptr = at;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

// Freeing memory waits for all current work of the context, as with the real driver.
static void wait_for_all(void);

CUresult cuMemFree_v2(CUdeviceptr at) {
    CALL;
    pthread_mutex_lock(&lock);
    struct range *r = find(at);
    CUresult result = r && r->kind == PLAIN && r->at == at ? OK : INVALID_VALUE;
    if (result == OK) unused(r), wait_for_all(), drop(r, 1);
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult cuMemHostAlloc(void **ptr, size_t len, unsigned flags) {
    CALL;
    (void)flags;
    pthread_mutex_lock(&lock);
    CUresult result = here();
    if (result == OK && no_more_room()) result = OUT_OF_MEMORY;
    if (result == OK) {
        void *at = mmap(NULL, round_up(len, PAGE), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (at == MAP_FAILED) result = OUT_OF_MEMORY;
        else add(PINNED, (uint64_t)at, len, 0, -1, current()->device);
        *ptr = at;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult cuMemFreeHost(void *ptr) {
    CALL;
    pthread_mutex_lock(&lock);
    struct range *r = find((uint64_t)ptr);
    CUresult result = r && r->kind == PINNED ? OK : INVALID_VALUE;
    if (result == OK) unused(r), wait_for_all(), drop(r, 0);
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *len, CUdeviceptr at) {
    CALL;
    pthread_mutex_lock(&lock);
    struct range *r = find(at);
    CUresult result = r && r->kind != PINNED ? OK : INVALID_VALUE;
    if (result == OK) *base = r->at, *len = r->len;
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult cuPointerGetAttributes(unsigned n, const int *what, void **into, CUdeviceptr at) {
    CALL;
    if (!initialised) return NOT_INITIALIZED;
    pthread_mutex_lock(&lock);
    struct range *r = find(at);
    for (unsigned i = 0; i < n; i++) switch (what[i]) {
        case 2: *(unsigned *)into[i] = !r ? 0 : r->kind == PINNED ? 1 : 2; break;
        case 7: *(uint64_t *)into[i] = r ? r->id : 0; break;
        case 8: *(unsigned char *)into[i] = 0; break;
        case 9: *(int *)into[i] = r ? r->device : -2; break;
        case 11: *(uint64_t *)into[i] = r ? r->at : 0; break;
        case 12: *(size_t *)into[i] = r ? r->len : 0; break;
        default: pthread_mutex_unlock(&lock); return INVALID_VALUE;
    }
    pthread_mutex_unlock(&lock);
    return OK;
}

#include "handles.h"
#include "streams.h"
#include "devices.h"
