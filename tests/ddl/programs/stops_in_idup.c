// Preloaded into ranks: the one that STOPS names is stopped in the midst of its first MPI_Comm_idup.
#include <mpi.h>
#include <signal.h>
#include <stdlib.h>

int MPI_Comm_idup(MPI_Comm comm, MPI_Comm* made, MPI_Request* request) {
    int rank = -1;
    PMPI_Comm_rank(comm, &rank);
    const int error = PMPI_Comm_idup(comm, made, request);
    if (rank == atoi(getenv("STOPS"))) raise(SIGSTOP);
    return error;
}
