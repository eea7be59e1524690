// Devices, contexts, errors, and injected faults. Part of cuda.c.

CUresult cuInit(unsigned flags) {
    CALL;
    (void)flags;
    const char *value = getenv("FAKE_CUDA_DEVICES");
    pthread_mutex_lock(&lock);
    if (value) devices = atoi(value);
    if ((value = getenv("FAKE_CUDA_FABRIC"))) fabric = atol(value);
    if ((value = getenv("FAKE_CUDA_DELAY_US"))) delay = atol(value);
    initialised = devices > 0;
    pthread_mutex_unlock(&lock);
    return initialised ? OK : NO_DEVICE;
}

CUresult cuDriverGetVersion(int *version) { CALL; *version = 12080; return OK; }
CUresult cuDeviceGetCount(int *n) { CALL; *n = devices; return initialised ? OK : NOT_INITIALIZED; }

CUresult cuDeviceGet(CUdevice *device, int number) {
    CALL;
    *device = number;
    return !initialised ? NOT_INITIALIZED : number >= 0 && number < devices ? OK : INVALID_DEVICE;
}

CUresult cuDeviceGetName(char *name, int len, CUdevice device) {
    CALL;
    snprintf(name, (size_t)len, "Double of a GPU, number %d", device);
    return OK;
}

CUresult cuDeviceGetUuid(unsigned char *uuid, CUdevice device) {
    CALL;
    memcpy(uuid, "fake nvidia gpu", 16);
    uuid[15] = (unsigned char)(device + 1);
    return OK;
}

CUresult cuDeviceGetAttribute(int *value, int which, CUdevice device) {
    CALL;
    (void)device;
    *value = which == 98 || which == 102 || which == 110 || which == 124 ? 1 : which == 128 ? fabric != 0 : 0;
    return OK;
}

CUresult cuDeviceCanAccessPeer(int *can, CUdevice a, CUdevice b) {
    CALL;
    *can = a != b && !no_peers;
    return OK;
}

CUresult cuDevicePrimaryCtxRetain(void **into, CUdevice device) {
    CALL;
    pthread_mutex_lock(&lock);
    CUresult result = !initialised ? NOT_INITIALIZED : device < 0 || device >= devices ? INVALID_DEVICE : lost ? LAUNCH_FAILED : OK;
    if (result == OK) {
        struct context *c = primary[device];
        if (!c || c->generation != generation) {
            c = primary[device] = calloc(1, sizeof *c);
            c->device = device, c->generation = generation;
        }
        c->retained++, live++;
        *into = c;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    CALL;
    pthread_mutex_lock(&lock);
    struct context *c = primary[device];
    CUresult result = c && c->retained > 0 && c->generation == generation ? OK : INVALID_CONTEXT;
    if (result == OK) c->retained--, live--;
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult cuCtxPushCurrent_v2(void *context) {
    CALL;
    struct context *c = context;
    if (!initialised) return NOT_INITIALIZED;
    if (c->generation != generation) return DESTROYED;
    if (depth == 16) die("contexts are pushed and not popped");
    stack[depth++] = c;
    return OK;
}

CUresult cuCtxPopCurrent_v2(void **context) {
    CALL;
    if (!depth) return INVALID_CONTEXT;
    *context = stack[--depth];
    return OK;
}

CUresult cuCtxGetCurrent(void **context) {
    CALL;
    *context = current();
    return initialised ? OK : NOT_INITIALIZED;
}

CUresult cuCtxGetDevice(CUdevice *device) {
    CALL;
    CUresult result = !initialised ? NOT_INITIALIZED : current() ? OK : INVALID_CONTEXT;
    if (result == OK) *device = current()->device;
    return result;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    CALL;
    *flags = 0;
    pthread_mutex_lock(&lock);
    struct context *c = device >= 0 && device < devices ? primary[device] : NULL;
    *active = c && c->retained > 0 && c->generation == generation;
    pthread_mutex_unlock(&lock);
    return initialised ? OK : NOT_INITIALIZED;
}

// The numbers of the devices are in reverse order of their addresses, which CUDA permits.
CUresult cuDeviceGetPCIBusId(char *text, int len, CUdevice device) {
    CALL;
    snprintf(text, (size_t)len, "0000:%02X:00.0", 0xa0 - device);
    return initialised ? OK : NOT_INITIALIZED;
}

CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *all) {
    CALL;
    pthread_mutex_lock(&lock);
    CUresult result = here();
    size_t used = 0;
    for (struct range *r = ranges; r && result == OK; r = r->next)
        if (r->kind == PLAIN && r->device == current()->device) used += round_up(r->len, PAGE);
    *all = 1ul << 36, *free_bytes = *all - used;
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult cuCtxEnablePeerAccess(void *context, unsigned flags) {
    CALL;
    (void)flags;
    struct context *other = context;
    pthread_mutex_lock(&lock);
    CUresult result = here();
    if (result == OK && no_peers) result = NOT_SUPPORTED;
    if (result == OK) {
        unsigned bit = 1u << other->device;
        if (current()->peers & bit) result = PEER_ALREADY;
        current()->peers |= bit;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

static const struct { int number; const char *name, *text; } errors[] = {
    {OK, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {ALREADY_MAPPED, "CUDA_ERROR_ALREADY_MAPPED", "resource already mapped"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {PEER_ALREADY, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "peer access is already enabled"},
    {DESTROYED, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {NOT_PERMITTED, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
};

static CUresult say(int number, const char **into, int text) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].number == number) {
            *into = text ? errors[i].text : errors[i].name;
            return OK;
        }
    return INVALID_VALUE;
}

CUresult cuGetErrorName(CUresult number, const char **into) { return say(number, into, 0); }
CUresult cuGetErrorString(CUresult number, const char **into) { return say(number, into, 1); }

long fake_cuda_contexts(int device) {
    pthread_mutex_lock(&lock);
    struct context *c = device >= 0 && device < MAX_DEVICES ? primary[device] : NULL;
    long now = c && c->generation == generation ? c->retained : 0;
    pthread_mutex_unlock(&lock);
    return now;
}

// ---- injected faults -------- -----------------------------------------------------------------------------------------

void fake_cuda_inject(int fault, long value) {
    pthread_mutex_lock(&lock);
    switch (fault) {
    case 1: failing_allocations = value; break;
    case 2: lost = 1; break;
    case 3: lost = 0, generation++, live = 0; break;
    case 4: bad_handles = value; break;
    case 5: no_wait_value = value; break;
    case 6: slow = value; break;
    case 7: no_batch = value; break;
    case 8: fabric = value; break;
    case 9: failing_copies = value; break;
    case 10: no_peers = value; break;
    default: die("an unknown fault");
    }
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}
