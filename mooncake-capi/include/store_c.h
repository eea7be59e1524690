#ifndef MOONCAKE_STORE_C_H
#define MOONCAKE_STORE_C_H

/* Made from mooncake-capi/src/store by `cargo xtask header`; do not edit. */

#include <stddef.h>
#include <stdint.h>

/*
 Maximum number of items of one call.
 */
#define MOONCAKE_STORE_MAX_BATCH (1 << 20)

/*
 Replica in the memory of a client.
 */
#define MOONCAKE_REPLICA_MEMORY 0

/*
 File on a shared file system.
 */
#define MOONCAKE_REPLICA_DISK 1

/*
 Replica on the disk of a client.
 */
#define MOONCAKE_REPLICA_LOCAL_DISK 2

/*
 Replica on an NVMe-oF target.
 */
#define MOONCAKE_REPLICA_NOF_SSD 3

/*
 Replica in a distributed file system.
 */
#define MOONCAKE_REPLICA_DFS 5

/*
 Handle of a store. The value is a number, not a valid address.
 */
typedef void *mooncake_store_t;

/*
 Options of a put. NULL in place of the options means one replica, without pins.
 */
typedef struct mooncake_replicate_config {
  /*
   Number of replicas in memory.
   */
  size_t replica_num;
  /*
   Not 0 if the object is evicted only when nothing else is left.
   */
  int with_soft_pin;
  /*
   Not 0 if the object is never evicted.
   */
  int with_hard_pin;
  /*
   Names of the segments to try first, or NULL. Names that are NULL are skipped.
   */
  const char **preferred_segments;
  /*
   Number of these names.
   */
  size_t preferred_segments_count;
} mooncake_replicate_config;

/*
 Options of a put.
 */
typedef struct mooncake_replicate_config mooncake_replicate_config_t;

/*
 Position of one replica.
 */
typedef struct mooncake_replica {
  /*
   Kind of the position, one of the `MOONCAKE_REPLICA_...` constants.
   */
  int kind;
  /*
   Endpoint of the client that has the replica, or the path of a file.
   */
  const char *endpoint;
  /*
   Transport of the memory. Empty for a replica on a disk.
   */
  const char *protocol;
  /*
   Address in the memory of the client, offset in a file of a distributed file system, else 0.
   */
  uint64_t address;
  /*
   Length in bytes.
   */
  uint64_t length;
} mooncake_replica;

/*
 Positions of an object.
 */
typedef struct mooncake_object {
  /*
   Milliseconds from the response of the master during which the positions are valid.
   */
  uint64_t lease_ms;
  /*
   Readable replicas.
   */
  const struct mooncake_replica *replicas;
  /*
   Number of these replicas, at least 1.
   */
  size_t replica_count;
} mooncake_object;

/*
 Objects of the keys from the front that are readable.
 */
typedef struct mooncake_prefix {
  /*
   Object of each of these keys.
   */
  const struct mooncake_object *objects;
  /*
   Number of these keys.
   */
  size_t count;
} mooncake_prefix;

/*
 Objects of the keys from the front that are readable.
 */
typedef struct mooncake_prefix mooncake_prefix_t;

/*
 Position of one replica.
 */
typedef struct mooncake_replica mooncake_replica_t;

/*
 Positions of an object.
 */
typedef struct mooncake_object mooncake_object_t;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/*
 Creates a store, to be set up next. Returns NULL on failure; the reason is on standard error.
 */
mooncake_store_t mooncake_store_create(void);

/*
 Waits for the calls of other threads, leaves the cluster, and frees the store. Objects in the
 memory of this client are lost. Registered memory must not be freed before this returns.
 */
void mooncake_store_destroy(mooncake_store_t store);

/*
 Joins a cluster, once per store. Returns 0, or a negative code, after which the call may be
 repeated. `protocol` and `device_name` may be NULL, for TCP and for all devices. So may
 `master_server_addr`, for port 50051 of this host.

 # Safety
 The strings are NULL or end with a zero byte.
 */
int mooncake_store_setup(mooncake_store_t store,
                         const char *local_hostname,
                         const char *metadata_server,
                         uint64_t global_segment_size,
                         uint64_t local_buffer_size,
                         const char *protocol,
                         const char *device_name,
                         const char *master_server_addr);

/*
 Joins a test cluster on this host: `mooncake_store_setup` with the name `localhost:12345`, the
 metadata service `127.0.0.1:2379`, and 1 GiB of local buffer.

 # Safety
 The conditions of `mooncake_store_setup` hold.
 */
int mooncake_store_init_all(mooncake_store_t store,
                            const char *protocol,
                            const char *device_name,
                            uint64_t mount_segment_size);

/*
 Returns 0 if the master responds, 1 before setup, or 2 if the master does not respond.
 */
int mooncake_store_health_check(mooncake_store_t store);

/*
 Stores a copy of a value under a new key. Returns 0, also if the key exists already (its value
 does not change), or a negative code.

 # Safety
 There are `size` readable bytes at `value`. The strings end with a zero byte.
 */
int mooncake_store_put(mooncake_store_t store,
                       const char *key,
                       const void *value,
                       size_t size,
                       const mooncake_replicate_config_t *config);

/*
 Stores a value like `mooncake_store_put`, straight from this memory. Memory that is not
 registered is accepted where the transport needs no registration, as over TCP. An empty value is
 refused with -600.

 # Safety
 There are `size` readable bytes at `buffer`. The strings end with a zero byte.
 */
int mooncake_store_put_from(mooncake_store_t store,
                            const char *key,
                            void *buffer,
                            size_t size,
                            const mooncake_replicate_config_t *config);

/*
 Stores many values like `mooncake_store_put_from`, and writes a code for each. Returns 0 if all
 codes have been written, or a negative code. An empty value has the code -600.

 # Safety
 There are `count` keys, buffers, sizes and results. Each buffer has as many readable bytes as
 its size says. The strings end with a zero byte.
 */
int mooncake_store_batch_put_from(mooncake_store_t store,
                                  const char **keys,
                                  void **buffers,
                                  const size_t *sizes,
                                  size_t count,
                                  const mooncake_replicate_config_t *config,
                                  int *results_out);

/*
 Reads a value to the start of this memory. Returns its length in bytes, -704 if the key does not
 exist, -600 if the memory is too short, or another negative code. Memory that is not registered
 is accepted as by `mooncake_store_put_from`.

 # Safety
 There are `size` writable bytes at `buffer`. The key ends with a zero byte.
 */
int64_t mooncake_store_get_into(mooncake_store_t store, const char *key, void *buffer, size_t size);

/*
 Reads many values like `mooncake_store_get_into`, and writes a length or code for each. Returns
 0 if all of them have been written, or a negative code.

 # Safety
 There are `count` keys, buffers, sizes and results. Each buffer has as many writable bytes as
 its size says. The keys end with a zero byte.
 */
int mooncake_store_batch_get_into(mooncake_store_t store,
                                  const char **keys,
                                  void **buffers,
                                  const size_t *sizes,
                                  size_t count,
                                  int64_t *results_out);

/*
 Returns 1 if the key is readable, 0 if not, or a negative code. A readable key gets a lease,
 which protects it from eviction.

 # Safety
 The key ends with a zero byte.
 */
int mooncake_store_is_exist(mooncake_store_t store, const char *key);

/*
 Asks for many keys like `mooncake_store_is_exist`, with one request, and writes 1, 0 or a code
 for each. Returns 0 if all of them have been written, or a negative code.

 # Safety
 There are `count` keys and results. The keys end with a zero byte.
 */
int mooncake_store_batch_is_exist(mooncake_store_t store, const char **keys, size_t count, int *results_out);

/*
 Returns the length of a value in bytes, -704 if the key does not exist, or another negative
 code.

 # Safety
 The key ends with a zero byte.
 */
int64_t mooncake_store_get_size(mooncake_store_t store, const char *key);

/*
 Writes the name of this client in the cluster, `host:port`, and a zero byte. The name is empty
 before setup. Returns 0, or -1 if it does not fit.

 # Safety
 There are `buf_len` writable bytes at `buf_out`.
 */
int mooncake_store_get_hostname(mooncake_store_t store, char *buf_out, size_t buf_len);

/*
 Removes a key. Returns 0, -704 if the key does not exist, -706 while a lease protects it, or
 another negative code. A lease does not protect it if `force` is not 0.

 # Safety
 The key ends with a zero byte.
 */
int mooncake_store_remove(mooncake_store_t store, const char *key, int force);

/*
 Removes the keys that a regular expression matches in any part. Returns their number, -600 for
 an invalid expression, or another negative code. Keys in use stay.

 # Safety
 The pattern ends with a zero byte.
 */
int64_t mooncake_store_remove_by_regex(mooncake_store_t store, const char *pattern, int force);

/*
 Removes every key. Returns their number, or a negative code. Keys in use stay.
 */
int64_t mooncake_store_remove_all(mooncake_store_t store, int force);

/*
 Registers memory, which calls then use without a copy over every transport. It may overlap
 registered memory; each registration is ended by an unregistration of its own. Returns 0, -1 for
 no memory, or another negative code.

 # Safety
 The bytes stay allocated until they are unregistered without an error, or the store is
 destroyed.
 */
int mooncake_store_register_buffer(mooncake_store_t store, void *buffer, size_t size);

/*
 Unregisters the memory that begins here, after waiting for transfers that use it. Returns 0,
 -600 if no registered memory begins here, or another negative code.
 */
int mooncake_store_unregister_buffer(mooncake_store_t store, void *buffer);

/*
 Returns how many of the keys from the front are readable, or a negative code. For the keys of
 the blocks of a prompt, in order, this is the number of blocks that need not be computed. It
 takes one request. These keys get a lease, and later keys get none.

 The positions of the objects are written to `prefix_out`, unless it is NULL, and freed by
 `mooncake_store_free_prefix`. After an error NULL is written.

 This function is not in Mooncake C++. A master of Mooncake C++ is asked about all keys, which
 then get leases.

 # Safety
 There are `count` keys, which end with a zero byte. `prefix_out` is NULL or writable.
 */
int64_t mooncake_store_find_prefix(mooncake_store_t store,
                                   const char **keys,
                                   size_t count,
                                   mooncake_prefix_t **prefix_out);

/*
 Frees a result of `mooncake_store_find_prefix`, also after its store was destroyed. Returns 0,
 also for NULL, or -600 for any other pointer.
 */
int mooncake_store_free_prefix(mooncake_prefix_t *prefix);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* MOONCAKE_STORE_C_H */
