// MPI's interface. In a build with TANDEM_MPI_AT_RUNTIME (a Python wheel, which runs with and
// without MPI) its functions and objects are looked up in libmpi on first use.
#pragma once

#include <mpi.h>

#ifdef TANDEM_MPI_AT_RUNTIME

namespace tandem::mpi {
/// Throws Unsupported if no libmpi can be loaded, or it has no such symbol.
void* symbol(const char* name);
}  // namespace tandem::mpi

#undef OMPI_PREDEFINED_GLOBAL
#define OMPI_PREDEFINED_GLOBAL(type, global) (static_cast<type>(tandem::mpi::symbol(#global)))

#define TANDEM_MPI(name)                                                                   \
  (*[] {                                                                                   \
    static const auto f = reinterpret_cast<decltype(&::name)>(tandem::mpi::symbol(#name)); \
    return f;                                                                              \
  }())
#define MPI_Allgather TANDEM_MPI(MPI_Allgather)
#define MPI_Allgatherv TANDEM_MPI(MPI_Allgatherv)
#define MPI_Allreduce TANDEM_MPI(MPI_Allreduce)
#define MPI_Alltoall TANDEM_MPI(MPI_Alltoall)
#define MPI_Alltoallv TANDEM_MPI(MPI_Alltoallv)
#define MPI_Barrier TANDEM_MPI(MPI_Barrier)
#define MPI_Bcast TANDEM_MPI(MPI_Bcast)
#define MPI_Cancel TANDEM_MPI(MPI_Cancel)
#define MPI_Comm_compare TANDEM_MPI(MPI_Comm_compare)
#define MPI_Comm_create_keyval TANDEM_MPI(MPI_Comm_create_keyval)
#define MPI_Comm_dup TANDEM_MPI(MPI_Comm_dup)
#define MPI_Comm_f2c TANDEM_MPI(MPI_Comm_f2c)
#define MPI_Comm_rank TANDEM_MPI(MPI_Comm_rank)
#define MPI_Comm_set_attr TANDEM_MPI(MPI_Comm_set_attr)
#define MPI_Comm_size TANDEM_MPI(MPI_Comm_size)
#define MPI_Comm_test_inter TANDEM_MPI(MPI_Comm_test_inter)
#define MPI_Finalize TANDEM_MPI(MPI_Finalize)
#define MPI_Finalized TANDEM_MPI(MPI_Finalized)
#define MPI_Get_count TANDEM_MPI(MPI_Get_count)
#define MPI_Init_thread TANDEM_MPI(MPI_Init_thread)
#define MPI_Initialized TANDEM_MPI(MPI_Initialized)
#define MPI_Irecv TANDEM_MPI(MPI_Irecv)
#define MPI_Isend TANDEM_MPI(MPI_Isend)
#define MPI_Op_create TANDEM_MPI(MPI_Op_create)
#define MPI_Query_thread TANDEM_MPI(MPI_Query_thread)
#define MPI_Reduce_scatter TANDEM_MPI(MPI_Reduce_scatter)
#define MPI_Reduce_scatter_block TANDEM_MPI(MPI_Reduce_scatter_block)
#define MPI_Test TANDEM_MPI(MPI_Test)
#define MPI_Testall TANDEM_MPI(MPI_Testall)
#define MPI_Type_commit TANDEM_MPI(MPI_Type_commit)
#define MPI_Type_contiguous TANDEM_MPI(MPI_Type_contiguous)
#define MPI_Wait TANDEM_MPI(MPI_Wait)
#define OMPI_C_MPI_COMM_NULL_COPY_FN TANDEM_MPI(OMPI_C_MPI_COMM_NULL_COPY_FN)

#endif
