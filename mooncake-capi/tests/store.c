/* Parts of a test of the store's C interface. Each part joins the cluster of the master at the given address. */
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "store_c.h"
#include "transfer_engine_c.h"

#define SEGMENT (32 << 20)
#define BUFFER (4 << 20)
#define SIZE (1 << 20)

static const char *master;

static int set_up(mooncake_store_t store, const char *at) {
    return mooncake_store_setup(store, "127.0.0.1", "P2PHANDSHAKE", SEGMENT, BUFFER, "tcp", "", at);
}

static mooncake_store_t joined(void) {
    mooncake_store_t store = mooncake_store_create();
    CHECK(store != NULL && mooncake_store_health_check(store) == 1);
    CHECK(set_up(store, master) == 0 && mooncake_store_health_check(store) == 0);
    return store;
}

static void fill(unsigned char *memory, size_t len, unsigned seed) {
    for (size_t at = 0; at < len; at++) memory[at] = (unsigned char)((at * 31 + seed) >> 3);
}

static int holds(const unsigned char *memory, size_t len, unsigned seed) {
    for (size_t at = 0; at < len; at++) {
        if (memory[at] != (unsigned char)((at * 31 + seed) >> 3)) return 0;
    }
    return 1;
}

/* Writes and reads through `memory`, which holds twice SIZE and is registered or not. */
static void through(mooncake_store_t store, unsigned char *memory, const char *name) {
    unsigned char *copy = memory + SIZE;
    char key[64], other[64];
    snprintf(key, sizeof key, "%s/one", name);
    snprintf(other, sizeof other, "%s/other", name);
    fill(memory, SIZE, 5);
    CHECK(mooncake_store_put_from(store, key, memory, SIZE, NULL) == 0);
    memset(copy, 0, SIZE);
    CHECK(mooncake_store_get_into(store, key, copy, SIZE) == SIZE && holds(copy, SIZE, 5));
    CHECK(mooncake_store_get_into(store, key, copy, SIZE - 1) == -600);
    CHECK(mooncake_store_get_into(store, other, copy, SIZE) == -704);

    const char *keys[] = {key, other, "", "nothing of it"};
    void *sources[] = {memory, memory, memory, NULL};
    size_t sizes[] = {SIZE, 1000, 10, 0};
    int stored[] = {9, 9, 9, 9};
    CHECK(mooncake_store_batch_put_from(store, keys, sources, sizes, 4, NULL, stored) == 0);
    CHECK(stored[0] == 0 && stored[1] == 0 && stored[2] == -600 && stored[3] == -600);
    void *targets[] = {copy, copy + 1, copy + 2000, copy + 3000};
    size_t rooms[] = {SIZE, 1000, 10, 10};
    int64_t lengths[] = {9, 9, 9, 9};
    const char *wanted[] = {"nothing of it", other, other, key};
    CHECK(mooncake_store_batch_get_into(store, wanted, targets, rooms, 4, lengths) == 0);
    CHECK(lengths[0] == -704 && lengths[1] == 1000 && lengths[2] == -600 && lengths[3] == -600);
    CHECK(holds(copy + 1, 1000, 5));
    int there[] = {9, 9, 9};
    const char *asked[] = {key, "nothing of it", other};
    CHECK(mooncake_store_batch_is_exist(store, asked, 3, there) == 0 && there[0] == 1 && there[1] == 0 && there[2] == 1);
}

static int values(void) {
    mooncake_store_t store = joined();
    char name[256];
    CHECK(mooncake_store_get_hostname(store, name, 5) == -1 && mooncake_store_get_hostname(store, NULL, 100) == -1);
    CHECK(mooncake_store_get_hostname(store, name, sizeof name) == 0 && strncmp(name, "127.0.0.1:", 10) == 0);

    static unsigned char value[100000], copy[100000];
    fill(value, sizeof value, 1);
    CHECK(mooncake_store_put(store, "key", value, sizeof value, NULL) == 0);
    /* The value was copied. */
    memset(value, 0, sizeof value);
    CHECK(mooncake_store_get_size(store, "key") == sizeof value && mooncake_store_is_exist(store, "key") == 1);
    CHECK(mooncake_store_get_into(store, "key", copy, sizeof copy) == sizeof copy && holds(copy, sizeof copy, 1));
    /* A key that exists keeps its value. */
    CHECK(mooncake_store_put(store, "key", "other", 5, NULL) == 0 && mooncake_store_get_size(store, "key") == sizeof value);
    CHECK(mooncake_store_get_size(store, "absent") == -704 && mooncake_store_is_exist(store, "absent") == 0);
    CHECK(mooncake_store_put(store, "empty", value, 0, NULL) == -600 && mooncake_store_put(store, "", value, 1, NULL) == -600);
    CHECK(mooncake_store_put(store, "empty", NULL, 0, NULL) == -600);
    CHECK(mooncake_store_put_from(store, "empty", value, 0, NULL) == -600 && mooncake_store_is_exist(store, "empty") == 0);
    /* A key has any bytes but zero. */
    CHECK(mooncake_store_put(store, "\xff\xfe\n", "bytes", 5, NULL) == 0 && mooncake_store_get_size(store, "\xff\xfe\n") == 5);

    const char *segments[] = {NULL, name, "nobody:1"};
    mooncake_replicate_config_t config = {1, 1, 0, segments, 3};
    CHECK(mooncake_store_put(store, "placed", "there", 5, &config) == 0 && mooncake_store_get_size(store, "placed") == 5);
    config.replica_num = 0;
    CHECK(mooncake_store_put(store, "nowhere", "there", 5, &config) == -600);

    unsigned char *memory = malloc(2 * SIZE);
    through(store, memory, "unregistered");
    CHECK(mooncake_store_register_buffer(store, memory, 2 * SIZE) == 0);
    through(store, memory, "registered");
    CHECK(mooncake_store_register_buffer(store, memory + 100, SIZE) == 0);
    CHECK(mooncake_store_unregister_buffer(store, memory) == 0 && mooncake_store_unregister_buffer(store, memory) == -600);
    CHECK(mooncake_store_unregister_buffer(store, memory + 100) == 0);
    /* Also memory of a put may be unregistered, and freed next. */
    free(memory);

    /* The last existence check gave a lease. */
    CHECK(mooncake_store_remove(store, "key", 0) == -706 && mooncake_store_remove(store, "key", 1) == 0);
    CHECK(mooncake_store_remove(store, "key", 1) == -704 && mooncake_store_get_into(store, "key", copy, 10) == -704);
    CHECK(mooncake_store_put(store, "a/1", "1", 1, NULL) == 0 && mooncake_store_put(store, "a/2", "2", 1, NULL) == 0);
    CHECK(mooncake_store_put(store, "b/a/", "3", 1, NULL) == 0);
    CHECK(mooncake_store_remove_by_regex(store, "^a/", 0) == 2 && mooncake_store_remove_by_regex(store, "^a/", 0) == 0);
    CHECK(mooncake_store_remove_by_regex(store, "(", 0) == -600 && mooncake_store_is_exist(store, "b/a/") == 1);
    CHECK(mooncake_store_remove_all(store, 0) >= 0 && mooncake_store_is_exist(store, "b/a/") == 1);
    CHECK(mooncake_store_remove_all(store, 1) >= 1 && mooncake_store_is_exist(store, "b/a/") == 0);

    /* A second client reads what lies in the memory of the first, which outlives it. */
    mooncake_store_t reader = joined();
    fill(value, sizeof value, 2);
    config.replica_num = 1;
    CHECK(mooncake_store_put(store, "shared", value, sizeof value, &config) == 0);
    CHECK(mooncake_store_get_into(reader, "shared", copy, sizeof copy) == sizeof copy && holds(copy, sizeof copy, 2));
    CHECK(set_up(store, master) == -600);
    mooncake_store_destroy(reader);
    CHECK(mooncake_store_get_size(store, "shared") == sizeof value);
    mooncake_store_destroy(store);
    CHECK(mooncake_store_get_size(store, "shared") < 0 && mooncake_store_health_check(store) < 0);
    return 0;
}

/* A master of Mooncake C++ is asked about all keys, so that those behind the prefix get leases, too. */
static int prefix(int behind) {
    mooncake_store_t store = joined();
    char texts[20][16], value[500] = "value";
    const char *keys[20];
    for (int at = 0; at < 20; at++) {
        snprintf(texts[at], sizeof texts[at], "block/%d", at);
        keys[at] = texts[at];
        if (at != 12) CHECK(mooncake_store_put(store, keys[at], value, (size_t)(100 + at), NULL) == 0);
    }
    CHECK(mooncake_store_find_prefix(store, keys, 20, NULL) == 12);
    CHECK(mooncake_store_find_prefix(store, keys, 5, NULL) == 5);
    CHECK(mooncake_store_find_prefix(store, keys + 12, 8, NULL) == 0);
    mooncake_prefix_t *found = NULL;
    CHECK(mooncake_store_find_prefix(store, keys, 20, &found) == 12 && found != NULL && found->count == 12);
    for (size_t at = 0; at < found->count; at++) {
        const mooncake_object_t *object = &found->objects[at];
        CHECK(object->replica_count == 1 && object->lease_ms > 0);
        CHECK(object->replicas->kind == MOONCAKE_REPLICA_MEMORY && object->replicas->length == 100 + at);
        CHECK(object->replicas->address != 0 && strcmp(object->replicas->protocol, "tcp") == 0);
        CHECK(strchr(object->replicas->endpoint, ':') != NULL);
    }
    /* An object that was found stays for the time of a lease, and one behind the prefix does not. */
    CHECK(mooncake_store_remove(store, keys[11], 0) == -706 && mooncake_store_remove(store, keys[13], 0) == behind);

    mooncake_prefix_t *none = found, *empty = NULL;
    CHECK(mooncake_store_find_prefix(store, keys + 12, 8, &none) == 0 && none != NULL && none->count == 0);
    CHECK(mooncake_store_find_prefix(store, keys, 0, &empty) == 0 && empty != NULL && empty->count == 0);
    CHECK(mooncake_store_free_prefix(none) == 0 && mooncake_store_free_prefix(empty) == 0);
    CHECK(mooncake_store_free_prefix(none) == -600 && mooncake_store_free_prefix(NULL) == 0);
    mooncake_prefix_t foreign = {NULL, 0}, *wrong = &foreign;
    CHECK(mooncake_store_free_prefix(&foreign) == -600);
    const char *holes[] = {keys[0], NULL};
    CHECK(mooncake_store_find_prefix(store, holes, 2, &wrong) == -1 && wrong == NULL);
    CHECK(mooncake_store_find_prefix(store, NULL, 2, NULL) == -1);
    wrong = &foreign;
    CHECK(mooncake_store_find_prefix(store, keys, MOONCAKE_STORE_MAX_BATCH + 1, &wrong) == -600 && wrong == NULL);
    wrong = &foreign;
    CHECK(mooncake_store_find_prefix(NULL, keys, 2, &wrong) == -1 && wrong == NULL);

    /* An empty key ends a prefix as an absent one does. */
    const char *with_empty[] = {keys[0], "", keys[1]};
    CHECK(mooncake_store_find_prefix(store, with_empty, 3, NULL) == 1);
    mooncake_store_destroy(store);
    /* The result outlives the store. */
    CHECK(found->objects[11].replicas->length == 111 && mooncake_store_free_prefix(found) == 0);
    return 0;
}

/* Calls with a handle of no store, which have this code. */
static void no_store(mooncake_store_t store, int expected) {
    char memory[64];
    int results[1];
    int64_t lengths[1];
    const char *keys[] = {"key"};
    void *buffers[] = {memory};
    size_t sizes[] = {1};
    CHECK(set_up(store, master) == expected && mooncake_store_init_all(store, "tcp", "", 1 << 24) == expected);
    CHECK(mooncake_store_health_check(store) == expected);
    CHECK(mooncake_store_put(store, "key", memory, 1, NULL) == expected);
    CHECK(mooncake_store_put_from(store, "key", memory, 1, NULL) == expected);
    CHECK(mooncake_store_batch_put_from(store, keys, buffers, sizes, 1, NULL, results) == expected);
    CHECK(mooncake_store_get_into(store, "key", memory, 1) == expected);
    CHECK(mooncake_store_batch_get_into(store, keys, buffers, sizes, 1, lengths) == expected);
    CHECK(mooncake_store_is_exist(store, "key") == expected);
    CHECK(mooncake_store_batch_is_exist(store, keys, 1, results) == expected);
    CHECK(mooncake_store_get_size(store, "key") == expected);
    CHECK(mooncake_store_get_hostname(store, memory, sizeof memory) == expected);
    CHECK(mooncake_store_remove(store, "key", 0) == expected);
    CHECK(mooncake_store_remove_by_regex(store, "key", 0) == expected && mooncake_store_remove_all(store, 0) == expected);
    CHECK(mooncake_store_register_buffer(store, memory, sizeof memory) == expected);
    CHECK(mooncake_store_unregister_buffer(store, memory) == expected);
    CHECK(mooncake_store_find_prefix(store, keys, 1, NULL) == expected);
    mooncake_store_destroy(store);
}

static int nonsense(void) {
    int number = 0;
    no_store(NULL, -1);
    no_store(&number, -600);
    transfer_engine_t engine = createTransferEngine("P2PHANDSHAKE", "127.0.0.1", "", 0, 1);
    CHECK(engine != NULL);
    no_store(engine, -600);
    CHECK(openSegment(engine, "127.0.0.1:1") == -1);
    destroyTransferEngine(engine);
    mooncake_store_t destroyed = mooncake_store_create();
    CHECK(openSegment(destroyed, "127.0.0.1:1") == -1);
    mooncake_store_destroy(destroyed);
    no_store(destroyed, -600);

    mooncake_store_t store = mooncake_store_create();
    char name[16] = "before";
    /* Before setup. */
    CHECK(mooncake_store_get_hostname(store, name, sizeof name) == 0 && strcmp(name, "") == 0);
    CHECK(mooncake_store_health_check(store) == 1 && mooncake_store_put(store, "key", name, 1, NULL) == -600);
    CHECK(mooncake_store_get_size(store, "key") == -600 && mooncake_store_register_buffer(store, name, 1) == -600);
    CHECK(mooncake_store_find_prefix(store, NULL, 0, NULL) == -600);
    CHECK(mooncake_store_setup(store, "\xff", "P2PHANDSHAKE", SEGMENT, BUFFER, "tcp", "", master) == -600);
    CHECK(mooncake_store_setup(store, "127.0.0.1", "P2PHANDSHAKE", SEGMENT, BUFFER, "pigeon", "", master) < 0);
    CHECK(mooncake_store_setup(store, "127.0.0.1", "P2PHANDSHAKE", UINT64_MAX, BUFFER, "tcp", "", master) < 0);
    CHECK(mooncake_store_setup(store, "127.0.0.1", "P2PHANDSHAKE", SEGMENT, UINT64_MAX, "tcp", "", master) < 0);
    CHECK(mooncake_store_setup(store, "127.0.0.1", "P2PHANDSHAKE", SEGMENT, BUFFER, "tcp", "", "nonsense") < 0);
    CHECK(mooncake_store_setup(store, "127.0.0.1", "P2PHANDSHAKE", SEGMENT, BUFFER, NULL, NULL, master) == 0);

    static char memory[4096];
    int results[2] = {9, 9};
    int64_t lengths[2] = {9, 9};
    const char *keys[] = {"key", "other"}, *holes[] = {"key", NULL};
    void *buffers[] = {memory, memory}, *no_memory[] = {memory, NULL};
    size_t sizes[] = {1, 1};
    CHECK(mooncake_store_put(store, NULL, memory, 1, NULL) == -1 && mooncake_store_put(store, "key", NULL, 1, NULL) == -1);
    CHECK(mooncake_store_put(store, "key", memory, SIZE_MAX, NULL) == -600);
    CHECK(mooncake_store_put_from(store, NULL, memory, 1, NULL) == -1);
    CHECK(mooncake_store_put_from(store, "key", NULL, 1, NULL) == -1);
    CHECK(mooncake_store_put_from(store, "key", memory, SIZE_MAX, NULL) == -600);
    CHECK(mooncake_store_put_from(store, "key", (void *)16, 100, NULL) == -600);
    CHECK(mooncake_store_get_into(store, NULL, memory, 1) == -1 && mooncake_store_get_into(store, "key", NULL, 1) == -1);
    CHECK(mooncake_store_batch_put_from(store, holes, buffers, sizes, 2, NULL, results) == -1);
    CHECK(mooncake_store_batch_put_from(store, keys, no_memory, sizes, 2, NULL, results) == -1);
    CHECK(mooncake_store_batch_put_from(store, NULL, buffers, sizes, 2, NULL, results) == -1);
    CHECK(mooncake_store_batch_put_from(store, keys, NULL, sizes, 2, NULL, results) == -1);
    CHECK(mooncake_store_batch_put_from(store, keys, buffers, NULL, 2, NULL, results) == -1);
    CHECK(mooncake_store_batch_put_from(store, keys, buffers, sizes, 2, NULL, NULL) == -1);
    CHECK(mooncake_store_batch_put_from(store, keys, buffers, sizes, SIZE_MAX, NULL, results) == -600);
    CHECK(mooncake_store_batch_get_into(store, holes, buffers, sizes, 2, lengths) == -1);
    CHECK(mooncake_store_batch_get_into(store, keys, buffers, sizes, SIZE_MAX / 8, lengths) == -600);
    CHECK(mooncake_store_batch_get_into(store, keys, buffers, sizes, 2, NULL) == -1);
    CHECK(mooncake_store_batch_is_exist(store, holes, 2, results) == -1);
    CHECK(mooncake_store_batch_is_exist(store, keys, 2, NULL) == -1);
    CHECK(mooncake_store_batch_is_exist(store, keys, SIZE_MAX, results) == -600);
    CHECK(results[0] == 9 && results[1] == 9 && lengths[0] == 9 && lengths[1] == 9);
    CHECK(mooncake_store_batch_is_exist(store, keys, 0, results) == 0 && results[0] == 9);
    CHECK(mooncake_store_batch_get_into(store, keys, buffers, sizes, 0, lengths) == 0 && lengths[0] == 9);
    CHECK(mooncake_store_batch_put_from(store, keys, buffers, sizes, 0, NULL, results) == 0 && results[0] == 9);
    CHECK(mooncake_store_is_exist(store, NULL) == -1 && mooncake_store_get_size(store, NULL) == -1);
    CHECK(mooncake_store_remove(store, NULL, 1) == -1 && mooncake_store_remove_by_regex(store, NULL, 1) == -1);
    CHECK(mooncake_store_remove_by_regex(store, "\xff", 1) == -600);
    CHECK(mooncake_store_register_buffer(store, NULL, 1) == -1 && mooncake_store_register_buffer(store, memory, 0) == -1);
    CHECK(mooncake_store_register_buffer(store, memory, SIZE_MAX) == -600);
    CHECK(mooncake_store_register_buffer(store, (void *)16, 100) == -600);
    CHECK(mooncake_store_unregister_buffer(store, NULL) == -600 && mooncake_store_unregister_buffer(store, memory) == -600);
    const char *segments[] = {"\xff"};
    mooncake_replicate_config_t config = {1, 0, 0, segments, 1};
    CHECK(mooncake_store_put(store, "key", memory, 1, &config) == -600);
    config.preferred_segments_count = SIZE_MAX;
    CHECK(mooncake_store_put(store, "key", memory, 1, &config) == -600);
    /* Read-only memory is a source, and no target. */
    static const char constant[4096] = "constant";
    CHECK(mooncake_store_put_from(store, "constant", (void *)constant, 4096, NULL) == 0);
    CHECK(mooncake_store_get_into(store, "constant", (void *)constant, 4096) == -600);
    CHECK(mooncake_store_is_exist(store, "key") == 0 && mooncake_store_health_check(store) == 0);
    mooncake_store_destroy(store);
    return 0;
}

static int full(void) {
    mooncake_store_t store = joined();
    unsigned char *memory = malloc(SIZE);
    fill(memory, SIZE, 3);
    mooncake_replicate_config_t pinned = {1, 0, 1, NULL, 0};
    char key[32];
    int stored = 0, code = 0;
    for (; stored < 2 * SEGMENT / SIZE; stored++) {
        snprintf(key, sizeof key, "pinned/%d", stored);
        code = stored % 2 ? mooncake_store_put(store, key, memory, SIZE, &pinned)
                          : mooncake_store_put_from(store, key, memory, SIZE, &pinned);
        if (code != 0) break;
    }
    CHECK(code == -200 && stored > 10 && stored <= SEGMENT / SIZE);
    const char *keys[] = {key};
    void *buffers[] = {memory};
    size_t sizes[] = {SIZE};
    int results[] = {9};
    CHECK(mooncake_store_batch_put_from(store, keys, buffers, sizes, 1, NULL, results) == 0 && results[0] == -200);
    CHECK(mooncake_store_is_exist(store, key) == 0 && mooncake_store_health_check(store) == 0);
    CHECK(mooncake_store_remove(store, "pinned/3", 1) == 0 && mooncake_store_put(store, key, memory, SIZE, &pinned) == 0);
    CHECK(mooncake_store_remove_by_regex(store, "^pinned/", 1) == stored);
    mooncake_store_destroy(store);
    free(memory);
    return 0;
}

static void *work(void *store) {
    static int numbers;
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&lock);
    unsigned number = (unsigned)numbers++;
    pthread_mutex_unlock(&lock);
    size_t len = 30000 + 1000 * number;
    unsigned char *memory = malloc(len), *copy = malloc(len);
    if (number % 2) CHECK(mooncake_store_register_buffer(store, memory, len) == 0);
    for (unsigned round = 0; round < 40; round++) {
        char key[64];
        snprintf(key, sizeof key, "thread/%u/%u", number, round);
        fill(memory, len, number + round);
        CHECK(round % 3 ? mooncake_store_put_from(store, key, memory, len, NULL) == 0
                        : mooncake_store_put(store, key, memory, len, NULL) == 0);
        CHECK(mooncake_store_put(store, "shared", "same", 4, NULL) == 0);
        CHECK(mooncake_store_get_into(store, key, copy, len) == (int64_t)len && holds(copy, len, number + round));
        const char *keys[] = {key, "absent"};
        mooncake_prefix_t *found;
        CHECK(mooncake_store_find_prefix(store, keys, 2, &found) == 1 && found->objects[0].replicas->length == len);
        CHECK(mooncake_store_free_prefix(found) == 0 && mooncake_store_remove(store, key, 1) == 0);
    }
    if (number % 2) CHECK(mooncake_store_unregister_buffer(store, memory) == 0);
    free(memory);
    free(copy);
    return NULL;
}

static void *create_and_destroy(void *unused) {
    for (int round = 0; round < 3; round++) {
        /* Without memory of its own, so that no object is lost with it. */
        mooncake_store_t store = mooncake_store_create();
        CHECK(mooncake_store_setup(store, "127.0.0.1", "P2PHANDSHAKE", 0, BUFFER, "tcp", "", master) == 0);
        CHECK(mooncake_store_put(store, "shared", "same", 4, NULL) == 0);
        mooncake_store_destroy(store);
    }
    return unused;
}

static int threads(void) {
    mooncake_store_t store = joined();
    pthread_t workers[8], others[2];
    for (int at = 0; at < 8; at++) CHECK(pthread_create(&workers[at], NULL, work, store) == 0);
    for (int at = 0; at < 2; at++) CHECK(pthread_create(&others[at], NULL, create_and_destroy, NULL) == 0);
    for (int at = 0; at < 8; at++) CHECK(pthread_join(workers[at], NULL) == 0);
    for (int at = 0; at < 2; at++) CHECK(pthread_join(others[at], NULL) == 0);
    mooncake_store_destroy(store);
    return 0;
}

/* A child cannot use the store of its parent, and does not end its membership. */
static int forked(void) {
    mooncake_store_t store = joined();
    unsigned char *value = malloc(SIZE);
    fill(value, SIZE, 4);
    CHECK(mooncake_store_put(store, "of the parent", value, SIZE, NULL) == 0);
    pid_t child = fork();
    if (child == 0) {
        alarm(60);
        no_store(store, -1012);
        mooncake_store_t own = joined();
        memset(value, 0, SIZE);
        CHECK(mooncake_store_get_into(own, "of the parent", value, SIZE) == SIZE && holds(value, SIZE, 4));
        CHECK(mooncake_store_put(own, "of the child", value, 10, NULL) == 0);
        mooncake_store_destroy(own);
        _exit(0);
    }
    int status = 1;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    CHECK(mooncake_store_health_check(store) == 0 && mooncake_store_get_size(store, "of the parent") == SIZE);
    mooncake_store_destroy(store);
    free(value);
    return 0;
}

static int64_t size_found;
static volatile int has_begun, is_destroyed;

static void *ask_size(void *store) {
    has_begun = 1;
    size_found = mooncake_store_get_size(store, "key");
    return NULL;
}

static void *destroy(void *store) {
    mooncake_store_destroy(store);
    is_destroyed = 1;
    return NULL;
}

static void pause_a_little(void) {
    struct timespec time = {0, 200000000};
    nanosleep(&time, NULL);
}

/* Stops a process, and waits until its threads have stopped. */
static void stop(pid_t process) {
    char name[64], line[512] = "";
    snprintf(name, sizeof name, "/proc/%d/stat", (int)process);
    CHECK(kill(process, SIGSTOP) == 0);
    do {
        pause_a_little();
        FILE *file = fopen(name, "r");
        CHECK(file != NULL && fgets(line, sizeof line, file) != NULL && fclose(file) == 0);
    } while (strstr(line, ") T ") == NULL);
    pause_a_little();
}

/* The end of a store waits for a call that waits for a stopped master. The store has no memory of its own, so that its
   end has nothing else to ask the master. */
static int ending(pid_t process) {
    mooncake_store_t provider = joined(), store = mooncake_store_create();
    CHECK(mooncake_store_setup(store, "127.0.0.1", "P2PHANDSHAKE", 0, BUFFER, "tcp", "", master) == 0);
    CHECK(mooncake_store_put(store, "key", "value", 5, NULL) == 0);
    stop(process);
    pthread_t asker, destroyer;
    CHECK(pthread_create(&asker, NULL, ask_size, store) == 0);
    while (!has_begun) pause_a_little();
    pause_a_little();
    CHECK(pthread_create(&destroyer, NULL, destroy, store) == 0);
    for (int round = 0; round < 5; round++) pause_a_little();
    int too_early = is_destroyed;
    CHECK(kill(process, SIGCONT) == 0 && !too_early);
    CHECK(pthread_join(destroyer, NULL) == 0 && pthread_join(asker, NULL) == 0 && size_found == 5);
    CHECK(mooncake_store_get_size(store, "key") == -600);
    mooncake_store_destroy(provider);
    return 0;
}

static int killed(pid_t process) {
    mooncake_store_t store = joined();
    CHECK(mooncake_store_put(store, "key", "value", 5, NULL) == 0 && kill(process, SIGKILL) == 0);
    char copy[5];
    const char *keys[] = {"key", "other"};
    void *buffers[] = {copy, copy};
    size_t sizes[] = {5, 5};
    int results[] = {9, 9};
    int64_t lengths[] = {9, 9};
    CHECK(mooncake_store_get_size(store, "key") < 0 && mooncake_store_is_exist(store, "key") < 0);
    CHECK(mooncake_store_put(store, "other", "value", 5, NULL) < 0 && mooncake_store_health_check(store) == 2);
    /* Every item of a batch has the code of the failure. */
    CHECK(mooncake_store_batch_is_exist(store, keys, 2, results) == 0 && results[0] < 0 && results[1] < 0);
    CHECK(mooncake_store_batch_get_into(store, keys, buffers, sizes, 2, lengths) == 0 && lengths[0] < 0 && lengths[1] < 0);
    mooncake_prefix_t *found;
    CHECK(mooncake_store_find_prefix(store, keys, 2, &found) < 0 && found == NULL);
    mooncake_store_destroy(store);
    return 0;
}

static int missing(char **wrong, int count) {
    mooncake_store_t store = mooncake_store_create();
    for (int at = 0; at < count; at++) {
        int code = set_up(store, wrong[at]);
        if (code >= 0) fprintf(stderr, "setup with %s: %d\n", wrong[at], code);
        CHECK(code < 0 && mooncake_store_health_check(store) == 1);
    }
    CHECK(set_up(store, master) == 0 && mooncake_store_put(store, "key", "value", 5, NULL) == 0);
    mooncake_store_destroy(store);
    return 0;
}

int main(int count, char **words) {
    if (count < 3) return 2;
    const char *part = words[1];
    master = words[2];
    if (strcmp(part, "values") == 0) return values();
    if (strcmp(part, "prefix") == 0) return prefix(0);
    if (strcmp(part, "prefix of Mooncake C++") == 0) return prefix(-706);
    if (strcmp(part, "nonsense") == 0) return nonsense();
    if (strcmp(part, "full") == 0) return full();
    if (strcmp(part, "threads") == 0) return threads();
    if (strcmp(part, "fork") == 0) return forked();
    if (strcmp(part, "missing") == 0) return missing(words + 3, count - 3);
    if (count > 3 && strcmp(part, "ending") == 0) return ending(atoi(words[3]));
    if (count > 3 && strcmp(part, "killed") == 0) return killed(atoi(words[3]));
    return 2;
}
