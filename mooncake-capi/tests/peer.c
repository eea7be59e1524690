/* Both sides of a transfer through the C interface: `serve` registers memory until its input ends, `use NAME` transfers
   from and to it. */
#include <arpa/inet.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "transfer_engine_c.h"

#define SIZE (1 << 20)

static void pause_a_little(void) {
    struct timespec time = {0, 1000000};
    nanosleep(&time, NULL);
}

/* Waits until a request is complete, and returns its status. */
static int outcome(transfer_engine_t engine, batch_id_t batch, size_t task) {
    struct transfer_status status = {STATUS_WAITING, 0};
    do {
        pause_a_little();
        CHECK(getTransferStatus(engine, batch, task, &status) == 0);
    } while (status.status == STATUS_WAITING || status.status == STATUS_PENDING);
    return status.status;
}

static int serve(void) {
    unsigned char *memory = malloc(SIZE);
    memset(memory, 7, SIZE);
    transfer_engine_t engine = createTransferEngine("P2PHANDSHAKE", "127.0.0.1", "", 0, 1);
    CHECK(engine != NULL);
    CHECK(installTransport(engine, "tcp", NULL) != NULL && installTransport(engine, "pigeon", NULL) == NULL);
    CHECK(registerLocalMemory(engine, memory, SIZE, "*", 1) == 0);
    CHECK(registerLocalMemory(engine, memory + 1, 10, "*", 1) == -7);
    char name[64];
    CHECK(getLocalIpAndPort(engine, name, 3) == -1);
    CHECK(getLocalIpAndPort(engine, name, sizeof name) == 0);
    printf("%s\n", name);
    fflush(stdout);
    int count = 0;
    notify_msg_t *messages;
    while ((messages = getNotifsFromEngine(engine, &count)) == NULL) pause_a_little();
    CHECK(count == 1 && strcmp(messages[0].name, "done") == 0 && strcmp(messages[0].msg, "all of it") == 0);
    CHECK(freeNotifsMsgBuf(messages, count) == 0);
    /* The bytes of the other side have arrived before its message. */
    for (size_t at = 0; at < SIZE; at++) CHECK(memory[at] == (at < SIZE / 2 ? (unsigned char)(at * 13 >> 3) : 7));
    while (getchar() != EOF) {
    }
    CHECK(unregisterLocalMemory(engine, memory) == 0);
    CHECK(unregisterLocalMemory(engine, memory) == -3);
    destroyTransferEngine(engine);
    free(memory);
    return 0;
}

static void nonsense(transfer_engine_t engine) {
    int number;
    struct transfer_status status;
    notify_msg_t message = {"name", "text"}, empty = {NULL, NULL};
    transfer_engine_t foreign = &number;
    transfer_engine_t engines[] = {NULL, foreign};
    for (int at = 0; at < 2; at++) {
        CHECK(openSegment(engines[at], "x") == -1 && openSegmentNoCache(engines[at], "x") == -1);
        CHECK(registerLocalMemory(engines[at], &number, 4, "*", 1) < 0);
        CHECK(unregisterLocalMemory(engines[at], &number) < 0);
        CHECK(allocateBatchID(engines[at], 1) == INVALID_BATCH);
        CHECK(submitTransfer(engines[at], 1, NULL, 0) < 0);
        CHECK(getTransferStatus(engines[at], 1, 0, &status) < 0 && freeBatchID(engines[at], 1) < 0);
        CHECK(getNotifsFromEngine(engines[at], &number) == NULL && number == 0);
        CHECK(genNotifyInEngine(engines[at], 0, message) < 0 && syncSegmentCache(engines[at]) < 0);
        CHECK(closeSegment(engines[at], 0) < 0 && discoverTopology(engines[at]) < 0);
        CHECK(getSegmentFirstBufferAddress(engines[at], 0, NULL, NULL) < 0);
        destroyTransferEngine(engines[at]);
    }
    CHECK(createTransferEngine(NULL, "x", "", 0, 1) == NULL);
    CHECK(createTransferEngine("P2PHANDSHAKE", NULL, NULL, 0, 1) == NULL);
    CHECK(createTransferEngine("mysql://x", "x", "", 0, 1) == NULL);
    CHECK(openSegment(engine, NULL) == -1 && openSegment(engine, "127.0.0.1:1") == -1 && openSegment(engine, "\xff") == -1);
    CHECK(registerLocalMemory(engine, NULL, 4096, "*", 1) == -1 && registerLocalMemory(engine, &number, 0, NULL, 1) == -1);
    CHECK(registerLocalMemoryBatch(engine, NULL, 3, "*") == -1 && unregisterLocalMemoryBatch(engine, NULL, 3) == -1);
    CHECK(genNotifyInEngine(engine, 99, message) == -1 && genNotifyInEngine(engine, 0, empty) == -1);
    CHECK(getLocalIpAndPort(engine, NULL, 100) == -1 && getNotifsFromEngine(engine, NULL) == NULL);
    CHECK(installTransport(engine, NULL, NULL) == NULL && freeNotifsMsgBuf(NULL, 5) == 0);
    CHECK(closeSegment(engine, 99) == -1 && closeSegment(engine, -1) == -1 && closeSegment(engine, LOCAL_SEGMENT) == 0);
    CHECK(freeBatchID(engine, 0) == -1 && freeBatchID(engine, INVALID_BATCH) == -1 && freeBatchID(engine, 1234567) == -1);
}

static char silent_name[64];

static void *open_silent(void *engine) {
    CHECK(openSegment(engine, silent_name) == -1);
    return NULL;
}

/* A destroyed engine no longer serves its memory, even if other threads are in the middle of calls. */
static void destroyed_is_out_of_use(transfer_engine_t user) {
    struct sockaddr_in at = {0};
    socklen_t len = sizeof at;
    int silent = socket(AF_INET, SOCK_STREAM, 0);
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    CHECK(bind(silent, (struct sockaddr *)&at, sizeof at) == 0 && listen(silent, 1) == 0);
    CHECK(getsockname(silent, (struct sockaddr *)&at, &len) == 0);
    snprintf(silent_name, sizeof silent_name, "127.0.0.1:%d", ntohs(at.sin_port));

    unsigned char *theirs = malloc(SIZE), *mine = malloc(SIZE);
    transfer_engine_t engine = createTransferEngine("P2PHANDSHAKE", "127.0.0.1", "", 0, 1);
    CHECK(engine != NULL && registerLocalMemory(engine, theirs, SIZE, "*", 1) == 0);
    CHECK(registerLocalMemory(user, mine, SIZE, "*", 1) == 0);
    char name[64];
    CHECK(getLocalIpAndPort(engine, name, sizeof name) == 0);
    segment_id_t segment = openSegment(user, name);
    batch_id_t batch = allocateBatchID(user, 2);
    struct transfer_request write = {OPCODE_WRITE, mine, segment, (uint64_t)(uintptr_t)theirs, 100};
    CHECK(submitTransfer(user, batch, &write, 1) == 0 && outcome(user, batch, 0) == STATUS_COMPLETED);

    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, open_silent, engine) == 0);
    int asking = accept(silent, NULL, NULL);
    CHECK(asking >= 0);
    destroyTransferEngine(engine);
    CHECK(submitTransfer(user, batch, &write, 1) == 0 && outcome(user, batch, 1) != STATUS_COMPLETED);
    CHECK(freeBatchID(user, batch) == 0);
    CHECK(closeSegment(user, segment) == 0 && syncSegmentCache(user) == 0);
    free(theirs);
    close(asking);
    close(silent);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(unregisterLocalMemory(user, mine) == 0);
    free(mine);
}

static int use(const char *name) {
    unsigned char *memory = malloc(SIZE), *copy = malloc(SIZE);
    transfer_engine_t engine = createTransferEngine("P2PHANDSHAKE", "127.0.0.1", "", 0, 1);
    CHECK(engine != NULL);
    nonsense(engine);
    buffer_entry_t pieces[] = {{memory, SIZE}, {copy, SIZE}};
    CHECK(registerLocalMemoryBatch(engine, pieces, 2, "*") == 0);
    segment_id_t peer = openSegment(engine, name);
    char spelled[80];
    snprintf(spelled, sizeof spelled, "[127.0.0.1]%s", strrchr(name, ':'));
    CHECK(openSegment(engine, spelled) == 1 && openSegment(engine, spelled) == 1);
    CHECK(peer == 1 && openSegment(engine, name) == peer && openSegmentNoCache(engine, name) == peer);
    CHECK(syncSegmentCache(engine) == 0);
    uint64_t address, length;
    CHECK(getSegmentFirstBufferAddress(engine, peer, &address, &length) == 0 && length == SIZE);

    for (size_t at = 0; at < SIZE; at++) memory[at] = (unsigned char)(at * 13 >> 3);
    batch_id_t batch = allocateBatchID(engine, 3);
    struct transfer_request write = {OPCODE_WRITE, memory, peer, address, SIZE / 2};
    CHECK(submitTransfer(engine, batch, &write, 1) == 0 && outcome(engine, batch, 0) == STATUS_COMPLETED);
    struct transfer_request reads[] = {
        {OPCODE_READ, copy, peer, address, SIZE / 2},
        {OPCODE_READ, copy + SIZE / 2, peer, address + SIZE / 2, SIZE / 2},
        {OPCODE_READ, copy, peer, address, 1},
    };
    CHECK(submitTransfer(engine, batch, reads, 3) == -2);
    CHECK(submitTransfer(engine, batch, NULL, 2) == -1);
    CHECK(submitTransfer(engine, batch, reads, 2) == 0);
    CHECK(outcome(engine, batch, 1) == STATUS_COMPLETED && outcome(engine, batch, 2) == STATUS_COMPLETED);
    CHECK(memcmp(memory, copy, SIZE / 2) == 0 && copy[SIZE / 2] == 7 && copy[SIZE - 1] == 7);
    struct transfer_status status;
    CHECK(getTransferStatus(engine, batch, 0, &status) == 0 && status.transferred_bytes == SIZE / 2);
    CHECK(getTransferStatus(engine, batch, 3, &status) == -1 && getTransferStatus(engine, batch, 0, NULL) == -1);
    CHECK(freeBatchID(engine, batch) == 0);
    CHECK(freeBatchID(engine, batch) == -1 && submitTransfer(engine, batch, &write, 1) == -1);

    batch = allocateBatchID(engine, 4);
    struct transfer_request bad[] = {
        {7, memory, peer, address, 1},
        {OPCODE_WRITE, memory, 99, address, 1},
        {OPCODE_WRITE, &bad, peer, address, 1},
        {OPCODE_WRITE, memory, peer, address + SIZE, 1},
    };
    CHECK(submitTransfer(engine, batch, &bad[0], 1) == -1 && submitTransfer(engine, batch, &bad[1], 1) == -1);
    CHECK(submitTransfer(engine, batch, &bad[2], 1) == -3);
    CHECK(submitTransfer(engine, batch, &bad[3], 1) == 0 && outcome(engine, batch, 0) == STATUS_FAILED);
    notify_msg_t message = {"done", "all of it"};
    CHECK(submitTransferWithNotify(engine, batch, &write, 1, message) == 0 && outcome(engine, batch, 1) == STATUS_COMPLETED);
    CHECK(freeBatchID(engine, batch) == 0);

    void *addresses[] = {memory, copy};
    CHECK(unregisterLocalMemoryBatch(engine, addresses, 2) == 0 && unregisterLocalMemoryBatch(engine, addresses, 2) == -3);
    CHECK(registerLocalMemory(engine, memory, SIZE, NULL, 0) == 0 && unregisterLocalMemory(engine, memory) == 0);
    destroyed_is_out_of_use(engine);
    destroyTransferEngine(engine);
    CHECK(openSegment(engine, name) == -1);
    destroyTransferEngine(engine);
    free(memory);
    free(copy);
    return 0;
}

/* A forked child has a copy of the parent's memory at the same addresses: its transfers must reach the memory of the
   parent. */
static int forked(void) {
    transfer_engine_t parent = createTransferEngine("P2PHANDSHAKE", "127.0.0.1", "", 0, 1);
    unsigned char *memory = calloc(1, SIZE);
    char name[64];
    CHECK(parent != NULL && memory != NULL && registerLocalMemory(parent, memory, SIZE, "*", 1) == 0);
    CHECK(getLocalIpAndPort(parent, name, sizeof name) == 0);
    pid_t child = fork();
    if (child == 0) {
        alarm(30);
        CHECK(openSegment(parent, name) == -1 && unregisterLocalMemory(parent, memory) < 0);
        destroyTransferEngine(parent);
        transfer_engine_t engine = createTransferEngine("P2PHANDSHAKE", "127.0.0.1", "", 0, 1);
        unsigned char *source = malloc(SIZE);
        CHECK(engine != NULL && source != NULL);
        memset(source, 'A', SIZE);
        CHECK(registerLocalMemory(engine, source, SIZE, "*", 1) == 0);
        segment_id_t segment = openSegment(engine, name);
        CHECK(segment >= 0);
        batch_id_t batch = allocateBatchID(engine, 1);
        struct transfer_request write = {OPCODE_WRITE, source, segment, (uint64_t)memory, SIZE};
        CHECK(submitTransfer(engine, batch, &write, 1) == 0 && outcome(engine, batch, 0) == STATUS_COMPLETED);
        _exit(0);
    }
    int status = 1;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    for (size_t at = 0; at < SIZE; at++) CHECK(memory[at] == 'A');
    destroyTransferEngine(parent);
    free(memory);
    return 0;
}

/* A read from a peer that is stopped in the middle ends with this status, and moves no byte. */
static int stopped(int expected) {
    int channel[2];
    uint64_t address = 0;
    char name[64] = {0};
    CHECK(pipe(channel) == 0);
    pid_t child = fork();
    CHECK(child >= 0);
    unsigned char *memory = malloc(SIZE);
    CHECK(memory != NULL);
    memset(memory, child == 0 ? 7 : 1, SIZE);
    transfer_engine_t engine = createTransferEngine("P2PHANDSHAKE", "127.0.0.1", "", 0, 1);
    CHECK(engine != NULL && registerLocalMemory(engine, memory, SIZE, "*", 1) == 0);
    if (child == 0) {
        alarm(120);
        address = (uint64_t)(uintptr_t)memory;
        CHECK(getLocalIpAndPort(engine, name, sizeof name) == 0);
        CHECK(write(channel[1], name, sizeof name) == sizeof name);
        CHECK(write(channel[1], &address, sizeof address) == sizeof address);
        for (;;) pause();
    }
    CHECK(read(channel[0], name, sizeof name) == sizeof name);
    CHECK(read(channel[0], &address, sizeof address) == sizeof address);
    segment_id_t segment = openSegment(engine, name);
    CHECK(segment >= 0 && kill(child, SIGSTOP) == 0);
    int status = 0;
    CHECK(waitpid(child, &status, WUNTRACED) == child && WIFSTOPPED(status));
    batch_id_t batch = allocateBatchID(engine, 1);
    struct transfer_request request = {OPCODE_READ, memory, segment, address, 4096};
    CHECK(submitTransfer(engine, batch, &request, 1) == 0);
    int ended = outcome(engine, batch, 0);
    struct transfer_status last = {0, 1};
    CHECK(getTransferStatus(engine, batch, 0, &last) == 0 && last.transferred_bytes == 0);
    for (size_t at = 0; at < 4096; at++) CHECK(memory[at] == 1);
    CHECK(kill(child, SIGKILL) == 0);
    if (ended != expected) fprintf(stderr, "the status is %d, not %d\n", ended, expected);
    CHECK(ended == expected && freeBatchID(engine, batch) == 0);
    destroyTransferEngine(engine);
    free(memory);
    return 0;
}

int main(int count, char **words) {
    if (count == 3 && strcmp(words[1], "stopped") == 0) return stopped(atoi(words[2]));
    if (count == 2 && strcmp(words[1], "fork") == 0) return forked();
    if (count == 2 && strcmp(words[1], "serve") == 0) return serve();
    if (count == 3 && strcmp(words[1], "use") == 0) return use(words[2]);
    fprintf(stderr, "usage: %s serve | use NAME | fork | stopped STATUS\n", words[0]);
    return 2;
}
