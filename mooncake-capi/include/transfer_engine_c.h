#ifndef TRANSFER_ENGINE_C
#define TRANSFER_ENGINE_C

/* Made from mooncake-capi/src/engine by `cargo xtask header`; do not edit. */

#include <stddef.h>
#include <stdint.h>

/*
 Number of the engine's own segment.
 */
#define LOCAL_SEGMENT 0

/*
 Number of no batch.
 */
#define INVALID_BATCH UINT64_MAX

/*
 Transfer from the target into local memory.
 */
#define OPCODE_READ 0

/*
 Transfer from local memory to the target.
 */
#define OPCODE_WRITE 1

/*
 Not sent yet.
 */
#define STATUS_WAITING 0

/*
 In progress.
 */
#define STATUS_PENDING 1

/*
 Invalid request.
 */
#define STATUS_INVALID 2

/*
 Cancelled.
 */
#define STATUS_CANCELED 3

/*
 Completed.
 */
#define STATUS_COMPLETED 4

/*
 Not completed in time.
 */
#define STATUS_TIMEOUT 5

/*
 Failed.
 */
#define STATUS_FAILED 6

/*
 Length of a device name in bytes, its zero byte included.
 */
#define NIC_NAME_LEN 64

/*
 Handle of an engine. The value is a number, not a valid address.
 */
typedef void *transfer_engine_t;

/*
 Transport of an engine. The value is only compared with NULL.
 */
typedef void *transport_t;

/*
 Number of an opened segment.
 */
typedef int32_t segment_id_t;

/*
 Piece of memory.
 */
typedef struct buffer_entry {
  /*
   Address of the first byte.
   */
  void *addr;
  /*
   Length in bytes.
   */
  size_t length;
} buffer_entry;

/*
 Piece of memory.
 */
typedef struct buffer_entry buffer_entry_t;

/*
 Number of a batch.
 */
typedef uint64_t batch_id_t;

/*
 Transfer request.
 */
typedef struct transfer_request {
  /*
   `OPCODE_READ` or `OPCODE_WRITE`.
   */
  int opcode;
  /*
   Registered local memory.
   */
  void *source;
  /*
   Segment of the other side.
   */
  segment_id_t target_id;
  /*
   Address in the other process.
   */
  uint64_t target_offset;
  /*
   Length in bytes.
   */
  uint64_t length;
} transfer_request;

/*
 Message of one engine to another.
 */
typedef struct notify_msg {
  /*
   Subject of the message.
   */
  char *name;
  /*
   Text of the message.
   */
  char *msg;
} notify_msg;

/*
 Message of one engine to another.
 */
typedef struct notify_msg notify_msg_t;

/*
 Status of a transfer.
 */
typedef struct transfer_status {
  /*
   Status, one of the `STATUS_...` constants.
   */
  int status;
  /*
   Bytes that were certainly transferred.
   */
  uint64_t transferred_bytes;
} transfer_status;

/*
 Load of an RDMA device.
 */
typedef struct nic_load_stat {
  /*
   Name of the device. A longer name is cut.
   */
  char device_name[NIC_NAME_LEN];
  /*
   Bytes of the messages that are posted or wait.
   */
  uint64_t inflight_bytes;
  /*
   Weighted mean of the throughput in bytes per second.
   */
  double ewma_bandwidth_bps;
} nic_load_stat;

/*
 Load of an RDMA device.
 */
typedef struct nic_load_stat nic_load_stat_t;

/*
 Memory of a segment. No function takes it; programs compile with it.
 */
typedef struct segment_memory {
  /*
   Address of the first byte.
   */
  void *addr;
  /*
   Length in bytes.
   */
  uint64_t size;
  /*
   Device of the memory.
   */
  const char *location;
} segment_memory;

/*
 File of a segment behind NVMe over Fabrics. No function takes it; programs compile with it.
 */
typedef struct segment_file {
  /*
   Path of the file.
   */
  const char *file_path;
  /*
   Name of the subsystem.
   */
  const char *subsystem_name;
  /*
   Protocol.
   */
  const char *proto;
  /*
   IP address.
   */
  const char *ip;
  /*
   Port.
   */
  uint64_t port;
} segment_file;

/*
 Kinds of segments.
 */
typedef union segment_kind {
  /*
   Memory.
   */
  struct segment_memory rdma;
  /*
   File.
   */
  struct segment_file nvmeof;
} segment_kind;

/*
 Description of a segment. No function takes it; programs compile with it.
 */
typedef struct segment_desc {
  /*
   Kind of the segment.
   */
  int type;
  /*
   Description by kind.
   */
  union segment_kind desc_;
} segment_desc;

/*
 Description of a segment.
 */
typedef struct segment_desc segment_desc_t;

/*
 Older name of `segment_id_t`.
 */
typedef int32_t segment_handle_t;

/*
 Transfer request.
 */
typedef struct transfer_request transfer_request_t;

/*
 Status of a transfer.
 */
typedef struct transfer_status transfer_status_t;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/*
 Starts an engine with all its transports. `ip_or_host_name` and `rpc_port` have no effect, as in
 Mooncake C++, and devices are always discovered. Returns NULL on failure; the reason is on
 standard error.

 # Safety
 The strings are NULL or end with a zero byte.
 */
transfer_engine_t createTransferEngine(const char *metadata_conn_string,
                                       const char *local_server_name,
                                       const char *ip_or_host_name,
                                       uint64_t rpc_port,
                                       int auto_discover);

/*
 Stops an engine. Its memory must not be freed before this returns.
 */
void destroyTransferEngine(transfer_engine_t engine);

/*
 Returns 0: the start of the engine has already discovered the devices.
 */
int discoverTopology(transfer_engine_t engine);

/*
 Writes the address of the handshake port, `host:port`, and a zero byte.

 # Safety
 There are `buf_len` writable bytes at `buf_out`.
 */
int getLocalIpAndPort(transfer_engine_t engine, char *buf_out, size_t buf_len);

/*
 Returns a value other than NULL if the engine has a transport of this name. The transports are
 installed by the start of the engine.

 # Safety
 `proto` is NULL or ends with a zero byte.
 */
transport_t installTransport(transfer_engine_t engine, const char *proto, void **args);

/*
 Opens a segment. Returns its number, or -1 on failure. The same name has the same number.

 # Safety
 The name is NULL or ends with a zero byte.
 */
segment_id_t openSegment(transfer_engine_t engine, const char *segment_name);

/*
 Opens a segment after a fresh lookup, past the cache.

 # Safety
 The conditions of `openSegment` hold.
 */
segment_id_t openSegmentNoCache(transfer_engine_t engine, const char *segment_name);

/*
 Does nothing, as in Mooncake C++: numbers stay valid.
 */
int closeSegment(transfer_engine_t engine, segment_id_t segment_id);

/*
 Returns address and length of the first registered memory of a segment.

 # Safety
 Both outputs are writable, or NULL if not wanted.
 */
int getSegmentFirstBufferAddress(transfer_engine_t engine,
                                 segment_id_t segment_id,
                                 uint64_t *addr_out,
                                 uint64_t *length_out);

/*
 Refreshes the descriptors of all opened segments.
 */
int syncSegmentCache(transfer_engine_t engine);

/*
 Registers memory for requests, and for peers if `remote_accessible` is not 0. The engine finds
 the device of the memory; `location` has no effect.

 # Safety
 The bytes stay allocated until they are unregistered without an error, or the engine is
 destroyed; peers and requests may read and write them at any time.
 */
int registerLocalMemory(transfer_engine_t engine,
                        void *addr,
                        size_t length,
                        const char *location,
                        int remote_accessible);

/*
 Unregisters memory, and waits until no transfer uses it.
 */
int unregisterLocalMemory(transfer_engine_t engine, void *addr);

/*
 Registers several pieces of memory for requests and peers, all or none.

 # Safety
 There are `buffer_len` entries at `buffer_list`; each satisfies the conditions of
 `registerLocalMemory`.
 */
int registerLocalMemoryBatch(transfer_engine_t engine,
                             buffer_entry_t *buffer_list,
                             size_t buffer_len,
                             const char *location);

/*
 Unregisters several pieces of memory, all or none.

 # Safety
 There are `addr_len` addresses at `addr_list`.
 */
int unregisterLocalMemoryBatch(transfer_engine_t engine, void **addr_list, size_t addr_len);

/*
 Allocates a batch for up to `batch_size` requests. Returns `INVALID_BATCH` for an unknown
 engine. `freeBatchID` frees the batch. Above 65,536 batches or 4,194,304 requests that are not
 freed, the oldest batches that have ended are dropped, and their numbers become unknown.
 */
batch_id_t allocateBatchID(transfer_engine_t engine, size_t batch_size);

/*
 Posts requests as the next ones of a batch, and returns at once. On an error nothing is sent: -2
 for too many requests, -3 for local memory that is not registered.

 # Safety
 There are `count` requests at `entries`.
 */
int submitTransfer(transfer_engine_t engine,
                   batch_id_t batch_id,
                   struct transfer_request *entries,
                   size_t count);

/*
 Posts requests like `submitTransfer`. When all of them have succeeded, the message is sent to
 the target of the first.

 # Safety
 The conditions of `submitTransfer` hold; the strings of the message are NULL or end with a zero
 byte.
 */
int submitTransferWithNotify(transfer_engine_t engine,
                             batch_id_t batch_id,
                             struct transfer_request *entries,
                             size_t count,
                             notify_msg_t notify_msg);

/*
 Returns the status of a request of a batch. A transfer past its deadline has `STATUS_TIMEOUT`
 only if `MC_SLICE_TIMEOUT` is set, as in Mooncake C++, and `STATUS_FAILED` otherwise.

 # Safety
 `status` is writable.
 */
int getTransferStatus(transfer_engine_t engine,
                      batch_id_t batch_id,
                      size_t task_id,
                      struct transfer_status *status);

/*
 Frees a batch. Returns -4 while a request of it is in progress.
 */
int freeBatchID(transfer_engine_t engine, batch_id_t batch_id);

/*
 Returns the messages that arrived since the last call, and their number, or NULL if there are
 none. `freeNotifsMsgBuf` frees them.

 # Safety
 `size` is writable.
 */
notify_msg_t *getNotifsFromEngine(transfer_engine_t engine, int *size);

/*
 Frees the messages that `getNotifsFromEngine` returned.

 # Safety
 Pointer and size are those of `getNotifsFromEngine`, and are not used again; or the pointer is
 NULL.
 */
int freeNotifsMsgBuf(notify_msg_t *msg, int size);

/*
 Sends a message to the engine of a segment.

 # Safety
 The strings of the message are NULL or end with a zero byte.
 */
int genNotifyInEngine(transfer_engine_t engine, uint64_t target_id, notify_msg_t notify_msg);

/*
 Returns 0 if the engine has a transport of this name. The transport stays usable until the
 engine is destroyed.

 # Safety
 `proto` is NULL or ends with a zero byte.
 */
int uninstallTransport(transfer_engine_t engine, const char *proto);

/*
 Removes a segment from the cache of this engine. The next `openSegment` looks the segment up
 again, and its number stays the same. The descriptor in the metadata service is not changed.

 # Safety
 The name is NULL or ends with a zero byte.
 */
int removeLocalSegment(transfer_engine_t engine, const char *segment_name);

/*
 Writes the transports, the devices near each memory, and the traffic with each peer, as text or,
 if `json` is not 0, as JSON, and a zero byte. A text that does not fit is cut.

 # Safety
 There are `buf_len` writable bytes at `buf_out`.
 */
int showLinks(transfer_engine_t engine, char *buf_out, size_t buf_len, int json);

/*
 Writes the loads of the first `*count` RDMA devices, and the number of all devices to `count`.
 Without RDMA the number is 0.

 # Safety
 `count` is writable, and there are `*count` writable entries at `stats`.
 */
int getNicLoadStats(transfer_engine_t engine, nic_load_stat_t *stats, size_t *count);

/*
 Opens the segment, so that the first transfer does not connect. There are no devices of EFA to
 warm up. Returns 0, or a code if the segment cannot be opened.

 # Safety
 The name is NULL or ends with a zero byte.
 */
int warmupEfaSegment(transfer_engine_t engine, const char *segment_name);

/*
 Makes SIGINT and SIGTERM close all engines of the process, within five seconds, before the
 signal ends the process. A signal that the program ignores or handles by itself is left to the
 program. Later calls have no further effect.
 */
void enableGracefulShutdown(transfer_engine_t engine);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* TRANSFER_ENGINE_C */
