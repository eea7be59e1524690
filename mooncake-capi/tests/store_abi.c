/* The interface of Mooncake C++ as its programs are compiled: layouts, and types of functions. A declaration below that
   differs from the one of the header is an error of the compiler. The program looks each name up as a binding does that
   loads the library at run time. */
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "check.h"
#include "store_c.h"

typedef void *handle;
typedef const mooncake_replicate_config_t *options;

handle mooncake_store_create(void);
void mooncake_store_destroy(handle);
int mooncake_store_setup(handle, const char *, const char *, uint64_t, uint64_t, const char *, const char *, const char *);
int mooncake_store_init_all(handle, const char *, const char *, uint64_t);
int mooncake_store_health_check(handle);
int mooncake_store_put(handle, const char *, const void *, size_t, options);
int mooncake_store_put_from(handle, const char *, void *, size_t, options);
int mooncake_store_batch_put_from(handle, const char **, void **, const size_t *, size_t, options, int *);
int64_t mooncake_store_get_into(handle, const char *, void *, size_t);
int mooncake_store_batch_get_into(handle, const char **, void **, const size_t *, size_t, int64_t *);
int mooncake_store_is_exist(handle, const char *);
int mooncake_store_batch_is_exist(handle, const char **, size_t, int *);
int64_t mooncake_store_get_size(handle, const char *);
int mooncake_store_get_hostname(handle, char *, size_t);
int mooncake_store_remove(handle, const char *, int);
int64_t mooncake_store_remove_by_regex(handle, const char *, int);
int64_t mooncake_store_remove_all(handle, int);
int mooncake_store_register_buffer(handle, void *, size_t);
int mooncake_store_unregister_buffer(handle, void *);

static const char *names[] = {
    "create",   "destroy",  "setup",        "init_all", "health_check",  "put",      "put_from",
    "get_into", "is_exist", "get_size",     "remove",   "batch_put_from", "remove_all", "batch_get_into",
    "batch_is_exist", "get_hostname", "remove_by_regex", "register_buffer", "unregister_buffer",
    /* In this project only. */
    "find_prefix", "free_prefix",
};

int main(void) {
    struct mooncake_replicate_config config = {2, 1, 0, NULL, 0};
    CHECK(config.replica_num == 2 && config.with_soft_pin == 1 && config.with_hard_pin == 0);
    CHECK(sizeof config == 32 && offsetof(mooncake_replicate_config_t, with_soft_pin) == 8);
    CHECK(offsetof(mooncake_replicate_config_t, with_hard_pin) == 12);
    CHECK(offsetof(mooncake_replicate_config_t, preferred_segments) == 16);
    CHECK(offsetof(mooncake_replicate_config_t, preferred_segments_count) == 24);
    CHECK(sizeof(mooncake_replica_t) == 40 && sizeof(mooncake_object_t) == 24 && sizeof(mooncake_prefix_t) == 16);
    CHECK(offsetof(mooncake_replica_t, endpoint) == 8 && offsetof(mooncake_replica_t, address) == 24);
    CHECK(MOONCAKE_REPLICA_MEMORY == 0 && MOONCAKE_REPLICA_DISK == 1 && MOONCAKE_REPLICA_LOCAL_DISK == 2);
    CHECK(MOONCAKE_REPLICA_NOF_SSD == 3 && MOONCAKE_REPLICA_DFS == 5);

    void *library = dlopen("libmooncake_store.so", RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) fprintf(stderr, "%s\n", dlerror());
    CHECK(library != NULL);
    for (size_t at = 0; at < sizeof names / sizeof *names; at++) {
        char name[64];
        snprintf(name, sizeof name, "mooncake_store_%s", names[at]);
        if (dlsym(library, name) == NULL) fprintf(stderr, "%s\n", name);
        CHECK(dlsym(library, name) != NULL);
    }
    /* The engine is in the same library. */
    CHECK(dlsym(library, "createTransferEngine") != NULL);
    /* Loaded once under its two names. */
    CHECK(dlsym(library, "mooncake_store_create") == (void *)(uintptr_t)mooncake_store_create);
    return 0;
}
