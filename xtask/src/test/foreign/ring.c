/* Passes messages around a ring of MPI ranks, and sums over all of them, and verifies each byte and number. */

#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

static unsigned char byte_of(int origin, int round, size_t at)
{
    return (unsigned char)(origin * 31 + round * 7 + (int)(at % 251));
}

static void require(int holds, const char *what, int rank, size_t size)
{
    if (!holds) {
        fprintf(stderr, "rank %d: %s, %zu\n", rank, what, size);
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
}

int main(int argc, char **argv)
{
    static const size_t sizes[] = { 1, 8, 1000, 4096, 65536, 1048576 };
    int rank, ranks;

    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    require(ranks > 1, "there is no other rank", rank, 0);
    for (size_t i = 0; i < sizeof(sizes) / sizeof(*sizes); i++) {
        const size_t size = sizes[i];
        unsigned char *out = malloc(size), *in = malloc(size);
        long *parts = malloc(size * sizeof(long)), *sums = malloc(size * sizeof(long));

        /* In each round each rank forwards what it received, until every rank has received everything. */
        for (size_t at = 0; at < size; at++) {
            out[at] = byte_of(rank, 0, at);
        }
        for (int round = 1; round < ranks; round++) {
            const int to = (rank + 1) % ranks, from = (rank + ranks - 1) % ranks;
            const int origin = (rank + ranks - round) % ranks;
            MPI_Sendrecv(out, (int)size, MPI_BYTE, to, round, in, (int)size, MPI_BYTE, from, round, MPI_COMM_WORLD,
                         MPI_STATUS_IGNORE);
            for (size_t at = 0; at < size; at++) {
                require(in[at] == byte_of(origin, round - 1, at), "a byte of the ring is wrong", rank, size);
                out[at] = byte_of(origin, round, at);
            }
        }
        for (size_t at = 0; at < size; at++) {
            parts[at] = (long)at * (rank + 1);
        }
        MPI_Allreduce(parts, sums, (int)size, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
        for (size_t at = 0; at < size; at++) {
            require(sums[at] == (long)at * ranks * (ranks + 1) / 2, "a sum is wrong", rank, size);
        }
        free(out);
        free(in);
        free(parts);
        free(sums);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 0) {
        printf("%d ranks agree\n", ranks);
    }
    MPI_Finalize();
    return 0;
}
