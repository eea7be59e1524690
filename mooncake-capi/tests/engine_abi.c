/* The interface of the engine of Mooncake C++ as its programs are compiled: layouts, and types of functions. A declaration
   below that differs from the one of the header is an error of the compiler. The program looks each name up as a binding
   does that loads the library at run time. */
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "check.h"
#include "transfer_engine_c.h"

typedef void *handle;
typedef const char *text;

handle createTransferEngine(text, text, text, uint64_t, int);
void destroyTransferEngine(handle);
int discoverTopology(handle);
int getLocalIpAndPort(handle, char *, size_t);
void *installTransport(handle, text, void **);
int uninstallTransport(handle, text);
int32_t openSegment(handle, text);
int32_t openSegmentNoCache(handle, text);
int closeSegment(handle, int32_t);
int removeLocalSegment(handle, text);
int getSegmentFirstBufferAddress(handle, int32_t, uint64_t *, uint64_t *);
int syncSegmentCache(handle);
int registerLocalMemory(handle, void *, size_t, text, int);
int unregisterLocalMemory(handle, void *);
int registerLocalMemoryBatch(handle, struct buffer_entry *, size_t, text);
int unregisterLocalMemoryBatch(handle, void **, size_t);
uint64_t allocateBatchID(handle, size_t);
int submitTransfer(handle, uint64_t, struct transfer_request *, size_t);
int submitTransferWithNotify(handle, uint64_t, struct transfer_request *, size_t, struct notify_msg);
int getTransferStatus(handle, uint64_t, size_t, struct transfer_status *);
int freeBatchID(handle, uint64_t);
struct notify_msg *getNotifsFromEngine(handle, int *);
int freeNotifsMsgBuf(struct notify_msg *, int);
int genNotifyInEngine(handle, uint64_t, struct notify_msg);
int showLinks(handle, char *, size_t, int);
int getNicLoadStats(handle, struct nic_load_stat *, size_t *);
void enableGracefulShutdown(handle);
int warmupEfaSegment(handle, text);

static const char *names[] = {
    "createTransferEngine", "destroyTransferEngine", "discoverTopology", "getLocalIpAndPort", "installTransport",
    "uninstallTransport", "openSegment", "openSegmentNoCache", "closeSegment", "removeLocalSegment",
    "getSegmentFirstBufferAddress", "syncSegmentCache", "registerLocalMemory", "unregisterLocalMemory",
    "registerLocalMemoryBatch", "unregisterLocalMemoryBatch", "allocateBatchID", "submitTransfer",
    "submitTransferWithNotify", "getTransferStatus", "freeBatchID", "getNotifsFromEngine", "freeNotifsMsgBuf",
    "genNotifyInEngine", "showLinks", "getNicLoadStats", "enableGracefulShutdown", "warmupEfaSegment",
};

int main(void) {
    CHECK(LOCAL_SEGMENT == 0 && INVALID_BATCH == UINT64_MAX && OPCODE_READ == 0 && OPCODE_WRITE == 1);
    CHECK(STATUS_WAITING == 0 && STATUS_PENDING == 1 && STATUS_INVALID == 2 && STATUS_CANCELED == 3);
    CHECK(STATUS_COMPLETED == 4 && STATUS_TIMEOUT == 5 && STATUS_FAILED == 6);
    CHECK(sizeof(segment_handle_t) == 4 && sizeof(segment_id_t) == 4 && sizeof(batch_id_t) == 8);
    CHECK(sizeof(transfer_engine_t) == sizeof(void *) && sizeof(transport_t) == sizeof(void *));
    CHECK(sizeof(transfer_request_t) == 40 && offsetof(struct transfer_request, source) == 8);
    CHECK(offsetof(struct transfer_request, target_id) == 16 && offsetof(struct transfer_request, target_offset) == 24);
    CHECK(offsetof(struct transfer_request, length) == 32);
    CHECK(sizeof(transfer_status_t) == 16 && offsetof(struct transfer_status, transferred_bytes) == 8);
    CHECK(sizeof(notify_msg_t) == 16 && offsetof(struct notify_msg, msg) == 8);
    CHECK(sizeof(buffer_entry_t) == 16 && offsetof(struct buffer_entry, length) == 8);
    CHECK(sizeof(nic_load_stat_t) == 80 && offsetof(struct nic_load_stat, inflight_bytes) == 64);
    CHECK(offsetof(struct nic_load_stat, ewma_bandwidth_bps) == 72);
    CHECK(sizeof(segment_desc_t) == 48 && offsetof(struct segment_desc, desc_.rdma.addr) == 8);
    CHECK(offsetof(struct segment_desc, desc_.rdma.size) == 16 && offsetof(struct segment_desc, desc_.rdma.location) == 24);
    CHECK(offsetof(struct segment_desc, type) == 0 && offsetof(struct segment_desc, desc_.nvmeof.file_path) == 8);
    CHECK(offsetof(struct segment_desc, desc_.nvmeof.subsystem_name) == 16);
    CHECK(offsetof(struct segment_desc, desc_.nvmeof.proto) == 24 && offsetof(struct segment_desc, desc_.nvmeof.ip) == 32);
    CHECK(offsetof(struct segment_desc, desc_.nvmeof.port) == 40);
    void *library = dlopen("libtransfer_engine.so", RTLD_NOW);
    CHECK(library != NULL);
    for (size_t at = 0; at < sizeof names / sizeof *names; at++) {
        if (dlsym(library, names[at]) == NULL) {
            fprintf(stderr, "the library lacks %s\n", names[at]);
            return 1;
        }
    }
    return 0;
}
