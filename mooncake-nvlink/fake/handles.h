// Handles of memory in other processes, and memory that is created and mapped separately. Part of
// cuda.c.

static void describe(struct handle *handle, char sort, int fd, uint64_t at, size_t len, int device) {
    struct stat about;
    fstat(fd, &about);
    memset(handle, 0, sizeof *handle);
    memcpy(handle->magic, "CUDOUB", 6);
    handle->magic[6] = sort;
    handle->pid = getpid(), handle->fd = fd, handle->inode = about.st_ino, handle->len = len, handle->at = at, handle->device = device;
}

static int open_file(const struct handle *handle, char sort) {
    char path[64];
    struct stat about;
    if (bad_handles > 0) { bad_handles--; return -1; }
    if (memcmp(handle->magic, "CUDOUB", 6) != 0 || handle->magic[6] != sort) return -1;
    if (handle->device < 0 || handle->device >= devices) return -1;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", handle->pid, handle->fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return -1;
    if (fstat(fd, &about) != 0 || about.st_ino != handle->inode || (size_t)about.st_size < handle->len) {
        close(fd);
        return -1;
    }
    return fd;
}

CUresult cuIpcGetMemHandle(struct handle *handle, CUdeviceptr at) {
    CALL;
    pthread_mutex_lock(&lock);
    CUresult result = here();
    struct range *r = find(at);
    if (result == OK && (!r || r->kind != PLAIN)) result = INVALID_VALUE;
    if (result == OK) describe(handle, 'I', r->fd, r->at, r->len, r->device);
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *at, struct handle handle, unsigned flags) {
    CALL;
    pthread_mutex_lock(&lock);
    CUresult result = here();
    // The real driver does not open the handles of its own process either.
    if (result == OK && handle.pid == getpid()) result = INVALID_CONTEXT;
    struct range *r = ranges;
    while (r && !(r->kind == IMPORTED && r->pid == handle.pid && r->theirs == handle.at)) r = r->next;
    // Memory that this process has open is opened again even if its owner has ended: the mapping
    // keeps it.
    int open = result == OK && r && r->inode == handle.inode && bad_handles <= 0;
    int fd = result == OK && !open ? open_file(&handle, 'I') : -1;
    if (result == OK && !open && fd < 0) result = INVALID_HANDLE;
    // The earlier memory is still open: nothing can be opened at its address.
    if (result == OK && r && r->inode != handle.inode) {
        close(fd);
        result = ALREADY_MAPPED;
    }
    if (result == OK) {
        if (flags & 1) current()->peers |= 1u << handle.device;
        if (open) {
            r->refs++;
        } else {
            uint64_t to = reserve(round_up(handle.len, PAGE));
            r = to ? add(IMPORTED, to, handle.len, round_up(handle.len, PAGE), fd, handle.device) : NULL;
            if (r) r->pid = handle.pid, r->theirs = handle.at;
        }
        if (r) *at = r->at;
        else result = OUT_OF_MEMORY;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult cuIpcCloseMemHandle(CUdeviceptr at) {
    CALL;
    pthread_mutex_lock(&lock);
    struct range *r = find(at);
    CUresult result = r && r->kind == IMPORTED ? OK : INVALID_VALUE;
    if (result == OK && r->refs == 1) unused(r), wait_for_all();
    if (result == OK && --r->refs == 0) drop(r, 1);
    pthread_mutex_unlock(&lock);
    return result;
}

struct properties { int type, handles, location, id; void *windows; char flags[8]; };

CUresult cuMemGetAllocationGranularity(size_t *grain, const struct properties *p, int which) {
    CALL;
    (void)p, (void)which;
    *grain = GRAIN;
    return OK;
}

CUresult cuMemCreate(uint64_t *handle, size_t len, const struct properties *p, uint64_t flags) {
    CALL;
    (void)flags;
    pthread_mutex_lock(&lock);
    CUresult result = initialised ? (lost ? LAUNCH_FAILED : OK) : NOT_INITIALIZED;
    if (result == OK && (len == 0 || len % GRAIN || p->id < 0 || p->id >= devices)) result = INVALID_VALUE;
    if (result == OK && (p->handles & 8) && !fabric) result = NOT_SUPPORTED;
    if (result == OK && (p->handles & 8) && fabric == 2) result = NOT_PERMITTED;
    if (result == OK && no_more_room()) result = OUT_OF_MEMORY;
    if (result == OK) {
        struct block *b = calloc(1, sizeof *b);
        b->fd = new_file(len), b->len = len, b->device = p->id, b->refs = 1, b->types = p->handles;
        b->generation = generation;
        live++;
        *handle = (uint64_t)b;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

static void let_go(struct block *b) {
    if (--b->refs) return;
    if (b->generation == generation) live--;
    close(b->fd);
    free(b);
}

CUresult cuMemRelease(uint64_t handle) {
    CALL;
    pthread_mutex_lock(&lock);
    let_go((struct block *)handle);
    pthread_mutex_unlock(&lock);
    return OK;
}

CUresult cuMemAddressReserve(CUdeviceptr *at, size_t len, size_t align, CUdeviceptr hint, uint64_t flags) {
    CALL;
    (void)align, (void)hint, (void)flags;
    pthread_mutex_lock(&lock);
    *at = reserve(len);
    pthread_mutex_unlock(&lock);
    return *at ? OK : OUT_OF_MEMORY;
}

CUresult cuMemAddressFree(CUdeviceptr at, size_t len) {
    CALL;
    pthread_mutex_lock(&lock);
    unreserve(at, len);
    pthread_mutex_unlock(&lock);
    return OK;
}

CUresult cuMemMap(CUdeviceptr at, size_t len, size_t offset, uint64_t handle, uint64_t flags) {
    CALL;
    (void)flags;
    struct block *b = (struct block *)handle;
    pthread_mutex_lock(&lock);
    CUresult result = offset == 0 && len == b->len && !find(at) ? OK : INVALID_VALUE;
    if (result == OK) {
        struct range *r = add(MAPPED, at, len, 0, b->fd, b->device);
        r->block = b;
        b->refs++;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult cuMemUnmap(CUdeviceptr at, size_t len) {
    CALL;
    pthread_mutex_lock(&lock);
    struct range *r = find(at);
    CUresult result = r && r->kind == MAPPED && r->at == at && r->len == len ? OK : INVALID_VALUE;
    if (result == OK) {
        struct block *b = r->block;
        unused(r), drop(r, 0);
        let_go(b);
    }
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult cuMemSetAccess(CUdeviceptr at, size_t len, const void *access, size_t n) {
    CALL;
    (void)len, (void)access, (void)n;
    pthread_mutex_lock(&lock);
    struct range *r = find(at);
    if (r) r->access = 1;
    pthread_mutex_unlock(&lock);
    return r ? OK : INVALID_VALUE;
}

CUresult cuMemExportToShareableHandle(void *into, uint64_t handle, int type, uint64_t flags) {
    CALL;
    (void)flags;
    struct block *b = (struct block *)handle;
    if (type != 8 || !(b->types & 8)) return NOT_SUPPORTED;
    if (fabric == 3) return NOT_PERMITTED;
    describe(into, 'F', b->fd, 0, b->len, b->device);
    return OK;
}

CUresult cuMemImportFromShareableHandle(uint64_t *handle, void *from, int type) {
    CALL;
    struct handle shown;
    memcpy(&shown, from, sizeof shown);
    pthread_mutex_lock(&lock);
    CUresult result = type != 8 || !fabric ? NOT_SUPPORTED : fabric > 1 ? NOT_PERMITTED : OK;
    int fd = result == OK ? open_file(&shown, 'F') : -1;
    if (result == OK && fd < 0) result = INVALID_HANDLE;
    if (result == OK) {
        struct block *b = calloc(1, sizeof *b);
        b->fd = fd, b->len = shown.len, b->device = shown.device, b->refs = 1, b->types = 8;
        b->generation = generation;
        live++;
        *handle = (uint64_t)b;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult cuMemRetainAllocationHandle(uint64_t *handle, void *at) {
    CALL;
    pthread_mutex_lock(&lock);
    struct range *r = find((uint64_t)at);
    CUresult result = r && r->kind == MAPPED ? OK : INVALID_VALUE;
    if (result == OK) {
        r->block->refs++;
        *handle = (uint64_t)r->block;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult cuMemGetAllocationPropertiesFromHandle(struct properties *p, uint64_t handle) {
    CALL;
    struct block *b = (struct block *)handle;
    memset(p, 0, sizeof *p);
    p->type = 1, p->handles = b->types, p->location = 1, p->id = b->device;
    return OK;
}

// The descriptor of the file with the bytes stands for the dma-buf.
CUresult cuMemGetHandleForAddressRange(void *into, CUdeviceptr at, size_t len, int type, uint64_t flags) {
    CALL;
    (void)flags;
    pthread_mutex_lock(&lock);
    CUresult result = here();
    struct range *r = find(at);
    if (result == OK && (!r || type != 1 || at % PAGE || len % PAGE || at + len > r->at + round_up(r->len, PAGE)))
        result = INVALID_VALUE;
    int fd = result == OK ? fcntl(r->fd, F_DUPFD_CLOEXEC, 0) : -1;
    if (result == OK && fd < 0) result = NOT_SUPPORTED;
    *(int *)into = fd;
    pthread_mutex_unlock(&lock);
    return result;
}
