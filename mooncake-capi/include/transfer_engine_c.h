#ifndef TRANSFER_ENGINE_C
#define TRANSFER_ENGINE_C

/* Made from mooncake-capi/src by `cargo xtask header`; do not edit. */

#include <stddef.h>
#include <stdint.h>

/*
 The engine's own segment.
 */
#define LOCAL_SEGMENT 0

/*
 No batch.
 */
#define INVALID_BATCH UINT64_MAX

/*
 From the target into local memory.
 */
#define OPCODE_READ 0

/*
 From local memory to the target.
 */
#define OPCODE_WRITE 1

/*
 Not sent yet.
 */
#define STATUS_WAITING 0

/*
 Under way.
 */
#define STATUS_PENDING 1

/*
 Makes no sense.
 */
#define STATUS_INVALID 2

/*
 Given up.
 */
#define STATUS_CANCELED 3

/*
 Done.
 */
#define STATUS_COMPLETED 4

/*
 Not done in time.
 */
#define STATUS_TIMEOUT 5

/*
 Failed.
 */
#define STATUS_FAILED 6

/*
 An engine. A number in disguise: it leads nowhere.
 */
typedef void *transfer_engine_t;

/*
 A wire of an engine; it is only compared with NULL.
 */
typedef void *transport_t;

/*
 An opened segment.
 */
typedef int32_t segment_id_t;

/*
 A piece of memory.
 */
typedef struct buffer_entry {
  /*
   Where it begins.
   */
  void *addr;
  /*
   Bytes.
   */
  size_t length;
} buffer_entry;

/*
 A piece of memory.
 */
typedef struct buffer_entry buffer_entry_t;

/*
 A batch.
 */
typedef uint64_t batch_id_t;

/*
 One transfer.
 */
typedef struct transfer_request {
  /*
   `OPCODE_READ` or `OPCODE_WRITE`.
   */
  int opcode;
  /*
   Local memory, registered.
   */
  void *source;
  /*
   The other side.
   */
  segment_id_t target_id;
  /*
   Address in the other process.
   */
  uint64_t target_offset;
  /*
   Bytes.
   */
  uint64_t length;
} transfer_request;

/*
 A message of one engine to another.
 */
typedef struct notify_msg {
  /*
   What it is about.
   */
  char *name;
  /*
   The message.
   */
  char *msg;
} notify_msg;

/*
 A message of one engine to another.
 */
typedef struct notify_msg notify_msg_t;

/*
 How a transfer stands.
 */
typedef struct transfer_status {
  /*
   `STATUS_...`
   */
  int status;
  /*
   Bytes that were moved for sure.
   */
  uint64_t transferred_bytes;
} transfer_status;

/*
 Older name of `segment_id_t`.
 */
typedef int32_t segment_handle_t;

/*
 One transfer.
 */
typedef struct transfer_request transfer_request_t;

/*
 How a transfer stands.
 */
typedef struct transfer_status transfer_status_t;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/*
 Starts an engine with all its wires. `ip_or_host_name` and `rpc_port` have no effect, as in the existing system, and devices are always looked for.
 NULL on failure; the reason is on standard error.

 # Safety
 The texts are NULL or end with a zero byte.
 */
transfer_engine_t createTransferEngine(const char *metadata_conn_string,
                                       const char *local_server_name,
                                       const char *ip_or_host_name,
                                       uint64_t rpc_port,
                                       int auto_discover);

/*
 Ends an engine. Its memory must not be freed before this returns.
 */
void destroyTransferEngine(transfer_engine_t engine);

/*
 Looks for devices, which the start has done already: 0.
 */
int discoverTopology(transfer_engine_t engine);

/*
 Writes the address of the handshake port, `host:port`, and a zero byte.

 # Safety
 There are `buf_len` writable bytes at `buf_out`.
 */
int getLocalIpAndPort(transfer_engine_t engine, char *buf_out, size_t buf_len);

/*
 Whether the engine has a wire of this name: something that is not NULL. Wires come with the engine.

 # Safety
 `proto` is NULL or ends with a zero byte.
 */
transport_t installTransport(transfer_engine_t engine, const char *proto, void **args);

/*
 Opens a segment: its number, -1 on failure. The same name has the same number.

 # Safety
 The name is NULL or ends with a zero byte.
 */
segment_id_t openSegment(transfer_engine_t engine, const char *segment_name);

/*
 The same, looked up anew.

 # Safety
 As for `openSegment`.
 */
segment_id_t openSegmentNoCache(transfer_engine_t engine, const char *segment_name);

/*
 Does nothing, as in the existing system: numbers stay good.
 */
int closeSegment(transfer_engine_t engine, segment_id_t segment_id);

/*
 Address and length of a segment's first registered memory.

 # Safety
 Both outputs are writable, or NULL where they are not wanted.
 */
int getSegmentFirstBufferAddress(transfer_engine_t engine,
                                 segment_id_t segment_id,
                                 uint64_t *addr_out,
                                 uint64_t *length_out);

/*
 Looks all opened segments up anew.
 */
int syncSegmentCache(transfer_engine_t engine);

/*
 Opens memory to requests, and to peers if `remote_accessible` is not 0. Where it lies is found out; `location` has no effect.

 # Safety
 The bytes stay allocated until they are unregistered without an error, or the engine is destroyed; peers and requests may read and write them at any time.
 */
int registerLocalMemory(transfer_engine_t engine,
                        void *addr,
                        size_t length,
                        const char *location,
                        int remote_accessible);

/*
 Closes memory, and waits until no transfer uses it.
 */
int unregisterLocalMemory(transfer_engine_t engine, void *addr);

/*
 Opens several pieces of memory to requests and peers, all or none.

 # Safety
 There are `buffer_len` entries at `buffer_list`; for each, as for `registerLocalMemory`.
 */
int registerLocalMemoryBatch(transfer_engine_t engine,
                             buffer_entry_t *buffer_list,
                             size_t buffer_len,
                             const char *location);

/*
 Closes several pieces of memory, all or none.

 # Safety
 There are `addr_len` addresses at `addr_list`.
 */
int unregisterLocalMemoryBatch(transfer_engine_t engine, void **addr_list, size_t addr_len);

/*
 A batch for up to `batch_size` requests; `INVALID_BATCH` for an engine that there is not.
 */
batch_id_t allocateBatchID(transfer_engine_t engine, size_t batch_size);

/*
 Posts requests as the next ones of a batch, and returns at once. On an error nothing is sent: -2 when there are too many, -3 for local memory that is not
 registered.

 # Safety
 There are `count` requests at `entries`.
 */
int submitTransfer(transfer_engine_t engine,
                   batch_id_t batch_id,
                   struct transfer_request *entries,
                   size_t count);

/*
 The same; when all of these requests have succeeded, the message is sent to the target of the first.

 # Safety
 As for `submitTransfer`; the message's texts are NULL or end with a zero byte.
 */
int submitTransferWithNotify(transfer_engine_t engine,
                             batch_id_t batch_id,
                             struct transfer_request *entries,
                             size_t count,
                             notify_msg_t notify_msg);

/*
 How a request of a batch stands.

 # Safety
 `status` is writable.
 */
int getTransferStatus(transfer_engine_t engine,
                      batch_id_t batch_id,
                      size_t task_id,
                      struct transfer_status *status);

/*
 Forgets a batch; -4 while a request of it is under way.
 */
int freeBatchID(transfer_engine_t engine, batch_id_t batch_id);

/*
 Messages that arrived since the last call, and how many; NULL when there are none. `freeNotifsMsgBuf` frees them.

 # Safety
 `size` is writable.
 */
notify_msg_t *getNotifsFromEngine(transfer_engine_t engine,
                                  int *size);

/*
 Frees what `getNotifsFromEngine` returned.

 # Safety
 Pointer and size are as they came from there, and are not used again; or NULL.
 */
int freeNotifsMsgBuf(notify_msg_t *msg, int size);

/*
 Sends a message to a segment's engine.

 # Safety
 The message's texts are NULL or end with a zero byte.
 */
int genNotifyInEngine(transfer_engine_t engine, uint64_t target_id, notify_msg_t notify_msg);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* TRANSFER_ENGINE_C */
