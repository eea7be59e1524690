/* Functions about transports, links and signals of the C interface. */
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "transfer_engine_c.h"

#define SIZE (1 << 16)

static transfer_engine_t new_engine(unsigned char *memory, char *name) {
    transfer_engine_t engine = createTransferEngine("P2PHANDSHAKE", "127.0.0.1", "", 0, 1);
    CHECK(engine != NULL && registerLocalMemory(engine, memory, SIZE, "*", 1) == 0);
    CHECK(getLocalIpAndPort(engine, name, 64) == 0);
    return engine;
}

static void moves(transfer_engine_t engine, segment_id_t segment, unsigned char *from, unsigned char *to) {
    batch_id_t batch = allocateBatchID(engine, 1);
    struct transfer_request write = {OPCODE_WRITE, from, segment, (uint64_t)(uintptr_t)to, SIZE};
    struct transfer_status status = {STATUS_WAITING, 0};
    CHECK(submitTransfer(engine, batch, &write, 1) == 0);
    while (status.status == STATUS_WAITING || status.status == STATUS_PENDING)
        CHECK(getTransferStatus(engine, batch, 0, &status) == 0);
    CHECK(status.status == STATUS_COMPLETED && freeBatchID(engine, batch) == 0);
}

static int links(void) {
    alarm(60);
    unsigned char *theirs = calloc(1, SIZE), *mine = calloc(1, SIZE);
    char name[64], own[64], text[4096], part[8];
    transfer_engine_t peer = new_engine(theirs, name), engine = new_engine(mine, own);
    segment_id_t segment = openSegment(engine, name);
    CHECK(segment == 1);
    moves(engine, segment, mine, theirs);

    CHECK(showLinks(engine, NULL, sizeof text, 0) == -1 && showLinks(engine, text, 0, 0) == -1);
    CHECK(showLinks(NULL, text, sizeof text, 0) == -1);
    /* A transfer may be complete a moment before it is counted. */
    struct timespec moment = {0, 1000000};
    do {
        CHECK(showLinks(engine, text, sizeof text, 0) == 0);
    } while (strstr(text, "65536 bytes written, 0 failures\n") == NULL && nanosleep(&moment, NULL) == 0);
    CHECK(strstr(text, "transports tcp") != NULL && strstr(text, name) != NULL);
    CHECK(showLinks(engine, part, sizeof part, 0) == 0 && strcmp(part, "segment") == 0);
    CHECK(showLinks(engine, part, 1, 1) == 0 && part[0] == 0);
    CHECK(showLinks(engine, text, sizeof text, 1) == 0);
    CHECK(text[0] == '{' && text[strlen(text) - 1] == '}' && strstr(text, "\"bytes_written\":65536") != NULL);

    /* Without RDMA there is no device to report. */
    nic_load_stat_t loads[2];
    size_t count = 2;
    memset(loads, 0x5a, sizeof loads);
    CHECK(getNicLoadStats(engine, NULL, &count) == -1 && getNicLoadStats(engine, loads, NULL) == -1);
    CHECK(getNicLoadStats(NULL, loads, &count) == -1 && count == 2);
    CHECK(getNicLoadStats(engine, loads, &count) == 0 && count == 0);
    CHECK(loads[0].device_name[0] == 0x5a && loads[1].inflight_bytes == 0x5a5a5a5a5a5a5a5a);
    CHECK(sizeof(struct nic_load_stat) == 80 && sizeof(segment_desc_t) == 48);

    CHECK(removeLocalSegment(engine, NULL) == -1 && removeLocalSegment(engine, "//") == -1);
    CHECK(removeLocalSegment(NULL, name) == -1 && removeLocalSegment(engine, "127.0.0.1:1") == 0);
    CHECK(removeLocalSegment(engine, name) == 0 && removeLocalSegment(engine, name) == 0);
    CHECK(openSegment(engine, name) == segment);
    moves(engine, segment, mine, theirs);

    CHECK(warmupEfaSegment(engine, name) == 0 && warmupEfaSegment(engine, NULL) == -1);
    CHECK(warmupEfaSegment(engine, "127.0.0.1:1") < 0 && warmupEfaSegment(NULL, name) == -1);

    CHECK(uninstallTransport(engine, "pigeon") == -1 && uninstallTransport(engine, NULL) == -1);
    CHECK(uninstallTransport(NULL, "tcp") == -1 && uninstallTransport(engine, "tcp") == 0);
    moves(engine, segment, mine, theirs);
    destroyTransferEngine(engine);
    destroyTransferEngine(peer);
    CHECK(showLinks(engine, text, sizeof text, 0) == -1);
    return 0;
}

static void on_signal(int number) {
    (void)number;
    _exit(7);
}

/* Waits for a signal with an engine in the metadata service: `default`, `handled` or `ignored` by this program. */
static int waits(const char *metadata, const char *how) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = strcmp(how, "handled") == 0 ? on_signal : strcmp(how, "ignored") == 0 ? SIG_IGN : SIG_DFL;
    CHECK(sigaction(SIGTERM, &action, NULL) == 0);
    /* A job in the background of a shell ignores interrupts. */
    action.sa_handler = SIG_DFL;
    CHECK(sigaction(SIGINT, &action, NULL) == 0);
    transfer_engine_t first = createTransferEngine(metadata, "first", "", 0, 1);
    transfer_engine_t second = createTransferEngine(metadata, "second", "", 0, 1);
    CHECK(first != NULL && second != NULL);
    enableGracefulShutdown(NULL);
    enableGracefulShutdown(first);
    enableGracefulShutdown(second);
    /* The child of a fork has no engine to close. The signal ends it at once. */
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0)
        for (;;) pause();
    int status = 0;
    CHECK(kill(child, SIGINT) == 0 && waitpid(child, &status, 0) == child && WTERMSIG(status) == SIGINT);
    printf("ready\n");
    fflush(stdout);
    CHECK(getchar() == EOF);
    return 0;
}

int main(int count, char **words) {
    if (count == 2 && strcmp(words[1], "links") == 0) return links();
    if (count == 4 && strcmp(words[1], "wait") == 0) return waits(words[2], words[3]);
    fprintf(stderr, "usage: %s links | wait METADATA default|handled|ignored\n", words[0]);
    return 2;
}
