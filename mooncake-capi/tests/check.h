/* Check of the C programs of the tests. */
#include <stdio.h>
#include <stdlib.h>

#define CHECK(what)                                                                \
    do {                                                                           \
        if (!(what)) {                                                             \
            fprintf(stderr, "line %d: this does not hold: %s\n", __LINE__, #what); \
            exit(1);                                                               \
        }                                                                          \
    } while (0)
