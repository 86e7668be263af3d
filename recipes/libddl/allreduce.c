/* Ranks add rank + 1 over a length that no number of ranks divides, and check each sum. */
#include <ddl.h>
#include <stdio.h>

#define COUNT 10007

static int must(ddl_result code, const char* what) {
    if (code != DDL_SUCCESS) fprintf(stderr, "%s: %s\n", what, ddl_last_error());
    return code != DDL_SUCCESS;
}

int main(void) {
    static double input[COUNT], output[COUNT];
    int rank, size;
    if (must(ddl_init(NULL), "ddl_init")) return 1;
    if (must(ddl_rank(DDL_WORLD, &rank), "ddl_rank") || must(ddl_size(DDL_WORLD, &size), "ddl_size")) return 1;
    for (int i = 0; i < COUNT; i++) input[i] = (rank + 1.0) * i;
    if (must(ddl_allreduce(input, output, COUNT, DDL_FLOAT64, DDL_SUM, DDL_WORLD), "ddl_allreduce")) return 1;
    for (int i = 0; i < COUNT; i++) {
        const double expected = size * (size + 1) / 2.0 * i;
        if (output[i] != expected) {
            fprintf(stderr, "rank %d: element %d is %g, expected %g\n", rank, i, output[i], expected);
            return 1;
        }
    }
    if (rank == 0) printf("%d ranks agree\n", size);
    return must(ddl_finalize(), "ddl_finalize");
}
