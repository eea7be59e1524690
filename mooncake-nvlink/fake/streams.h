// Streams and events, and their work. Part of cuda.c.

enum sort { COPY, FILL, CALLBACK, MARK, WAIT_STREAM, WAIT_VALUE };

struct work {
    struct work *next;
    enum sort sort;
    char *to, *from;
    size_t len;
    struct range *ranges[2];
    void (*function)(void *);
    void *argument;
    struct stream *other;
    uint64_t until;
    volatile uint32_t *word;
    uint32_t value;
    unsigned char byte;
};

struct stream {
    struct context *context;
    unsigned generation;
    int blocking, closing, thread;
    struct work *first, **last;
    uint64_t submitted, done;
    struct stream *next;
    unsigned seed;
};
static struct stream *streams;

struct event { struct stream *stream; uint64_t until; unsigned generation; };

static int stale(const struct stream *s) { return lost || s->generation != generation; }

static void nap(struct stream *s, int copy) {
    long us = delay ? (long)(rand_r(&s->seed) % (unsigned)delay) : 0;
    if (copy) us += slow;
    if (us) usleep((useconds_t)us);
}

// Runs the work at the head of the queue. The lock is held before and after.
static void perform(struct stream *s, struct work *w) {
    switch (w->sort) {
    case COPY:
    case FILL:
        // In two halves, so that an early reader sees only one. A lost context touches nothing.
        for (int half = 0; half < 2; half++) {
            pthread_mutex_unlock(&lock);
            nap(s, !half);
            pthread_mutex_lock(&lock);
            if (stale(s)) break;
            size_t at = half ? w->len / 2 : 0, len = half ? w->len - w->len / 2 : w->len / 2;
            if (w->sort == COPY) memmove(w->to + at, w->from + at, len);
            else memset(w->to + at, w->byte, len);
        }
        break;
    case CALLBACK:
        pthread_mutex_unlock(&lock);
        in_host_function = 1;
        w->function(w->argument);
        in_host_function = 0;
        pthread_mutex_lock(&lock);
        break;
    case WAIT_STREAM:
        while (w->other->done < w->until && !stale(s) && !stale(w->other)) pthread_cond_wait(&changed, &lock);
        break;
    case WAIT_VALUE:
        while ((int32_t)(*w->word - w->value) < 0 && !stale(s)) {
            pthread_mutex_unlock(&lock);
            usleep(20);
            pthread_mutex_lock(&lock);
        }
        break;
    case MARK:
        break;
    }
}

static void *run(void *of) {
    struct stream *s = of;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!s->first && !s->closing) pthread_cond_wait(&changed, &lock);
        struct work *w = s->first;
        if (!w) break;
        if (!stale(s)) perform(s, w);
        s->first = w->next;
        if (!s->first) s->last = &s->first;
        for (int i = 0; i < 2; i++)
            if (w->ranges[i]) w->ranges[i]->pending--;
        s->done++;
        free(w);
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&lock);
    return NULL;
}

static struct stream *new_stream(struct context *context, int blocking) {
    struct stream *s = calloc(1, sizeof *s);
    pthread_t thread;
    s->context = context, s->generation = generation, s->blocking = blocking;
    s->last = &s->first, s->seed = (unsigned)(uintptr_t)s, s->next = streams, streams = s;
    if (pthread_create(&thread, NULL, run, s) != 0) die("no thread for a stream");
    pthread_detach(thread);
    return s;
}

static void push(struct stream *s, struct work what) {
    struct work *w = malloc(sizeof *w);
    *w = what, w->next = NULL;
    for (int i = 0; i < 2; i++)
        if (w->ranges[i]) w->ranges[i]->pending++;
    *s->last = w, s->last = &w->next;
    s->submitted++;
    pthread_cond_broadcast(&changed);
}

static void after(struct stream *s, struct stream *other) {
    if (other != s && other->done < other->submitted)
        push(s, (struct work){.sort = WAIT_STREAM, .other = other, .until = other->submitted});
}

// Returns the stream of a handle. 0 and 1 are the default stream of the current context.
static CUresult stream_of(void *handle, struct stream **into) {
    if (!initialised) return NOT_INITIALIZED;
    if ((uintptr_t)handle > 2) {
        *into = handle;
    } else {
        CUresult result = here();
        if (result != OK) return result;
        if (!current()->legacy) current()->legacy = new_stream(current(), 1);
        *into = current()->legacy;
    }
    if ((*into)->generation != generation) return DESTROYED;
    return lost ? LAUNCH_FAILED : OK;
}

// Appends work to a stream, ordered with the default stream as in the driver.
static void submit(struct stream *s, struct work what) {
    struct stream *legacy = s->context->legacy;
    if (s == legacy) {
        for (struct stream *other = streams; other; other = other->next)
            if (other->blocking && other->context == s->context && !other->closing) after(s, other);
    } else if (s->blocking && legacy) {
        after(s, legacy);
    }
    push(s, what);
}

static CUresult drain(struct stream *s) {
    uint64_t until = s->submitted;
    while (s->done < until) pthread_cond_wait(&changed, &lock);
    return stale(s) ? (s->generation != generation ? DESTROYED : LAUNCH_FAILED) : OK;
}

static void wait_for_all(void) {
    struct context *here = current();
    for (struct stream *s = streams; s && here; s = s->next) {
        uint64_t until = s->submitted;
        while (s->context == here && !stale(s) && s->done < until) pthread_cond_wait(&changed, &lock);
    }
}

// Returns the place of bytes. Memory of no device must be host memory.
static CUresult place(uint64_t at, size_t len, char **bytes, struct range **r) {
    *r = find(at);
    if (!*r) {
        *bytes = (char *)at;
        return at ? OK : INVALID_VALUE;
    }
    if (at + len > (*r)->at + (*r)->len || !(*r)->access) return INVALID_VALUE;
    *bytes = (*r)->bytes + (at - (*r)->at);
    return OK;
}

static CUresult copy(struct stream *s, uint64_t to, uint64_t from, size_t len) {
    struct work w = {.sort = COPY, .len = len};
    CUresult result = place(to, len, &w.to, &w.ranges[0]);
    if (result == OK) result = place(from, len, &w.from, &w.ranges[1]);
    if (result != OK) return result;
    // Memory of other devices than that of the stream.
    for (int i = 0; i < 2; i++) {
        struct range *r = w.ranges[i];
        int own = s->context->device;
        if (r && (r->kind == PLAIN || r->kind == IMPORTED) && r->device != own && !(s->context->peers & 1u << r->device)) {
            unaided++;
            break;
        }
    }
    if (failing_copies > 0) { failing_copies--; return INVALID_VALUE; }
    submit(s, w);
    // Memory that is not page-locked is copied before the call returns.
    return w.ranges[0] && w.ranges[1] ? OK : drain(s);
}

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t len, void *handle) {
    CALL;
    struct stream *s;
    pthread_mutex_lock(&lock);
    CUresult result = here();
    if (result == OK) result = stream_of(handle, &s);
    if (result == OK) result = copy(s, to, from, len);
    pthread_mutex_unlock(&lock);
    return result;
}

struct attributes { unsigned order; int from[2], to[2]; unsigned flags; };

CUresult cuMemcpyBatchAsync(CUdeviceptr *to, CUdeviceptr *from, size_t *len, size_t n, struct attributes *attributes,
                            size_t *which, size_t sorts, size_t *failed, void *handle) {
    CALL;
    struct stream *s;
    if (no_batch) return NOT_SUPPORTED;
    if (sorts != 1 || which[0] != 0 || attributes->order != 1 || (uintptr_t)handle <= 2) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    CUresult result = here();
    if (result == OK) result = stream_of(handle, &s);
    for (size_t i = 0; i < n && result == OK; i++) {
        result = copy(s, to[i], from[i], len[i]);
        if (result != OK) *failed = i;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult cuMemsetD8Async(CUdeviceptr at, unsigned char byte, size_t len, void *handle) {
    CALL;
    struct stream *s;
    struct work w = {.sort = FILL, .len = len, .byte = byte};
    pthread_mutex_lock(&lock);
    CUresult result = here();
    if (result == OK) result = stream_of(handle, &s);
    if (result == OK) result = place(at, len, &w.to, &w.ranges[0]);
    if (result == OK) submit(s, w);
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult cuStreamCreateWithPriority(void **into, unsigned flags, int priority) {
    CALL;
    (void)priority;
    pthread_mutex_lock(&lock);
    CUresult result = here();
    if (result == OK) {
        *into = new_stream(current(), !(flags & 1));
        live++;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    CALL;
    *least = 0, *greatest = -5;
    return OK;
}

CUresult cuStreamDestroy_v2(void *handle) {
    CALL;
    struct stream *s = handle;
    pthread_mutex_lock(&lock);
    if (s->generation == generation) live--;
    s->closing = 1;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return OK;
}

CUresult cuStreamQuery(void *handle) {
    CALL;
    struct stream *s;
    pthread_mutex_lock(&lock);
    CUresult result = stream_of(handle, &s);
    if (result == OK && s->done < s->submitted) result = NOT_READY;
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult cuStreamSynchronize(void *handle) {
    CALL;
    struct stream *s;
    pthread_mutex_lock(&lock);
    CUresult result = stream_of(handle, &s);
    if (result == OK) result = drain(s);
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult cuStreamGetCtx(void *handle, void **context) {
    CALL;
    struct stream *s;
    pthread_mutex_lock(&lock);
    CUresult result = stream_of(handle, &s);
    if (result == OK) *context = s->context;
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult cuStreamIsCapturing(void *handle, int *capturing) {
    CALL;
    (void)handle;
    *capturing = 0;
    return OK;
}

CUresult cuStreamWaitValue32_v2(void *handle, CUdeviceptr at, uint32_t value, unsigned flags) {
    CALL;
    struct stream *s;
    if (no_wait_value) return NOT_SUPPORTED;
    // Without the flush, earlier writes of a NIC may become visible late, so every caller must request
    // it.
    if (flags != 1u << 30) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    CUresult result = stream_of(handle, &s);
    struct range *r = find(at);
    if (result == OK && (!r || at % 4)) result = INVALID_VALUE;
    if (result == OK) {
        volatile uint32_t *word = (volatile uint32_t *)(r->bytes + (at - r->at));
        submit(s, (struct work){.sort = WAIT_VALUE, .word = word, .value = value, .ranges = {r, NULL}});
    }
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult cuLaunchHostFunc(void *handle, void (*function)(void *), void *argument) {
    CALL;
    struct stream *s;
    pthread_mutex_lock(&lock);
    CUresult result = stream_of(handle, &s);
    if (result == OK) submit(s, (struct work){.sort = CALLBACK, .function = function, .argument = argument});
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult cuEventCreate(void **into, unsigned flags) {
    CALL;
    (void)flags;
    pthread_mutex_lock(&lock);
    CUresult result = here();
    if (result == OK) {
        struct event *e = calloc(1, sizeof *e);
        e->generation = generation;
        live++;
        *into = e;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult cuEventDestroy_v2(void *handle) {
    CALL;
    struct event *e = handle;
    pthread_mutex_lock(&lock);
    if (e->generation == generation) live--;
    free(e);
    pthread_mutex_unlock(&lock);
    return OK;
}

CUresult cuEventRecord(void *handle, void *stream) {
    CALL;
    struct event *e = handle;
    struct stream *s;
    pthread_mutex_lock(&lock);
    CUresult result = stream_of(stream, &s);
    if (result == OK && e->generation != generation) result = DESTROYED;
    if (result == OK) {
        submit(s, (struct work){.sort = MARK});
        e->stream = s, e->until = s->submitted;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

static CUresult event_state(const struct event *e) {
    if (e->generation != generation) return DESTROYED;
    if (lost) return LAUNCH_FAILED;
    return e->stream && e->stream->done < e->until ? NOT_READY : OK;
}

CUresult cuEventQuery(void *handle) {
    CALL;
    pthread_mutex_lock(&lock);
    CUresult result = event_state(handle);
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult cuEventSynchronize(void *handle) {
    CALL;
    CUresult result;
    pthread_mutex_lock(&lock);
    while ((result = event_state(handle)) == NOT_READY) pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult cuStreamWaitEvent(void *stream, void *handle, unsigned flags) {
    CALL;
    (void)flags;
    struct event *e = handle;
    struct stream *s;
    pthread_mutex_lock(&lock);
    CUresult result = stream_of(stream, &s);
    if (result == OK && e->stream)
        submit(s, (struct work){.sort = WAIT_STREAM, .other = e->stream, .until = e->until});
    pthread_mutex_unlock(&lock);
    return result;
}
